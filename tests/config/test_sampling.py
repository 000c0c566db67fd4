"""What SamplingParams refuses, and when they truncate the distribution."""

from tables import not_refused

from lowmem_grpo.config.sampling import SamplingParams

WITHOUT_SENSE = [
    ("n", 0, "at least 1"), ("temperature", -1, "1e-6 or "), ("top_p", 0, "in (0, 1]"), ("top_p", 1.1, "in (0, 1]"),
    ("top_k", -2, "-1 or 0"), ("min_p", -0.1, "in [0, 1]"), ("min_p", 1.1, "in [0, 1]"), ("max_tokens", 0, "at least"),
]


def test_sampling_params_refuse_what_makes_no_sense() -> None:
    rows = [({name: value}, (f"{name} is {value!r}", rule)) for name, value, rule in WITHOUT_SENSE]
    assert not_refused(lambda given: SamplingParams(**given), rows) == []


def test_truncation_is_known() -> None:
    assert not SamplingParams(top_k=-1, min_p=0.0).truncates
    assert all(SamplingParams(**options).truncates for options in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}))
