"""What somebody asks the queue for is refused by the field that is wrong."""

import pytest
from tables import every_row

from lowmem_grpo.server.jobs.queue import JobRequest, seconds_of

REFUSED = {
    "recipe is '../x.py'": {"recipe": "../x.py"},
    "recipe is 3": {"recipe": 3},
    "a job has no prio; it has": {"recipe": "arithmetic", "prio": 3},
    "options is 'max_steps=3'; give a list": {"recipe": "arithmetic", "options": "max_steps=3"},
    "the queue sets output_dir itself": {"recipe": "arithmetic", "options": ["--output-dir=/tmp"]},
    "the queue sets resume itself": {"recipe": "arithmetic", "options": ["resume=true"]},
    "priority is 1.5": {"recipe": "arithmetic", "priority": 1.5},
    "priority is True": {"recipe": "arithmetic", "priority": True},
    "time_limit is 0": {"recipe": "arithmetic", "time_limit": 0},
    "time_limit is inf": {"recipe": "arithmetic", "time_limit": float("inf")},
    "share is 1.5": {"recipe": "arithmetic", "share": 1.5},
    "share is nan": {"recipe": "arithmetic", "share": float("nan")},
    "send a JSON object with recipe": {"options": []}, "send a JSON object": None, "send a JSON": [], "send a": "x",
}


@every_row("words", REFUSED)
def test_a_wrong_field_is_named(words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        JobRequest.from_json(REFUSED[words])


def test_a_right_one_is_taken() -> None:
    body = {"recipe": "mine.py", "options": ["max_steps=3"], "priority": -2, "time_limit": 60, "share": 0.5}
    asked = JobRequest.from_json(body)
    assert asked == JobRequest("mine.py", ["max_steps=3"], -2, 60, 0.5)


def test_times_are_read_and_other_texts_refused() -> None:
    assert [seconds_of(text) for text in ("90", "90s", "45m", "2h", "1h30m")] == [90, 90, 2700, 7200, 5400]
    for text in ("", "0", "soon", "-3", "1.5h", "h"):
        with pytest.raises(ValueError, match="the time"):
            seconds_of(text)
