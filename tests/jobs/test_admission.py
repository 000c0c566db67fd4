"""Whether a job may start: shares of the card, and what the plan says."""

from lowmem_grpo.jobs.admission import JobPlan, obstacle, too_large
from lowmem_grpo.jobs.job import Job
from lowmem_grpo.units import GIB

UNKNOWN = JobPlan()
FITS = JobPlan(10 * GIB, 20 * GIB, 22 * GIB)


def job(number: int, share: float = 1.0) -> Job:
    return Job(number, "arithmetic", [], "me", share=share)


def test_a_job_starts_on_an_empty_card() -> None:
    assert obstacle(job(1), FITS, [], 0.0) == "" == obstacle(job(1), UNKNOWN, [], 0.0)


def test_a_job_waits_for_the_one_that_has_the_card() -> None:
    assert obstacle(job(2), UNKNOWN, [job(1)], 0.0) == "waits for job 1, which has 100% of the card; it asks for 100%"


def test_shares_that_add_up_run_together() -> None:
    assert obstacle(job(3, 0.4), UNKNOWN, [job(1, 0.3), job(2, 0.3)], 0.0) == ""
    assert obstacle(job(3, 0.5), UNKNOWN, [job(1, 0.3), job(2, 0.3)], 0.0).startswith("waits for job 1 and job 2")


def test_the_model_that_is_served_keeps_its_share() -> None:
    assert obstacle(job(1), UNKNOWN, [], 0.5).startswith("waits for the model that is served, which has 50%")
    assert obstacle(job(1, 0.5), UNKNOWN, [], 0.5) == ""


def test_nothing_starts_before_its_plan_is_made() -> None:
    assert obstacle(job(1), None, [], 0.0) == "its memory is being planned"


def test_memory_that_another_program_holds_is_said() -> None:
    assert obstacle(job(1), JobPlan(10 * GIB, 20 * GIB, 4 * GIB), [], 0.0) == (
        "needs 10.00 GiB, and 4.00 GiB of the card are free: another program has the rest")


def test_a_job_that_fits_no_empty_card_is_told_so_with_advice() -> None:
    plan = JobPlan(30 * GIB, 20 * GIB, 22 * GIB, "lower max_seq_length")
    assert too_large(plan, job(1)) == ("the plan says that it needs 30.00 GiB, and it may fill 20.00 GiB of this card. "
                                       "lower max_seq_length")
    assert "(40% of it)" in too_large(plan, job(1, 0.4))
    assert too_large(FITS, job(1)) == "" == too_large(UNKNOWN, job(1))
