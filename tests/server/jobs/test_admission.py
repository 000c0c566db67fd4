"""Whether a job may start: shares of the card, and what the plan says."""

import re

from tables import every_row

from lowmem_grpo.server.jobs.dispatcher import JobPlan, obstacle, too_large
from lowmem_grpo.server.jobs.queue import Job
from lowmem_grpo.utils import GIB

UNKNOWN = JobPlan()
FITS = JobPlan(10 * GIB, 20 * GIB, 22 * GIB)


def job(number: int, share: float = 1.0) -> Job:
    return Job(number, "arithmetic", [], "me", share=share)


SHARED = [job(1, 0.3), job(2, 0.3)]


@every_row(("asked", "plan", "live", "words"), [
    (job(1), FITS, [], "$"), (job(1), UNKNOWN, [], "$"),
    (job(2), UNKNOWN, [job(1)], "waits for job 1, which has 100% of the card; it asks for 100%$"),
    (job(3, 0.4), UNKNOWN, SHARED, "$"), (job(3, 0.5), UNKNOWN, SHARED, "waits for job 1 and job 2, which "),
    (job(1), None, [], "its memory is being planned$"),
    (job(1), JobPlan(10 * GIB, 20 * GIB, 4 * GIB), [],
     "needs 10.00 GiB, and 4.00 GiB of the card are free: another program has the rest$"),
])
def test_a_job_starts_where_it_has_room_and_else_says_what_it_waits_for(
    asked: Job, plan: JobPlan | None, live: list[Job], words: str
) -> None:
    assert re.match(words, obstacle(asked, plan, live))


def test_a_job_that_fits_no_empty_card_is_told_so_with_advice() -> None:
    plan = JobPlan(30 * GIB, 20 * GIB, 22 * GIB, "lower max_seq_length")
    assert too_large(plan, job(1)) == ("the plan says that it needs 30.00 GiB, and it may fill 20.00 GiB of this card. "
                                       "lower max_seq_length")
    assert "(40% of it)" in too_large(plan, job(1, 0.4))
    assert too_large(FITS, job(1)) == "" == too_large(UNKNOWN, job(1))
