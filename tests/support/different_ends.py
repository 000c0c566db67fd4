"""Prompts whose answers end at different times, and what is the same in two lists of answers."""

from itertools import chain

import pytest

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.types import Rollout

CONTEXT = 50
# The longer a prompt, the sooner its answers end: at different times
PROMPTS = [[(7 * place + index) % 300 + 5 for place in range(length)]
           for index, length in enumerate((30, 10, 38, 22, 46, 16))]
PARAMS = SamplingParams(n=2, max_tokens=34, seed=3, ignore_eos=True)
ROUNDED = 2e-6  # log-probabilities are held in float32


def check_same(found: list[list[Rollout]], expected: list[list[Rollout]]) -> None:
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert (ours.completion_ids, ours.finish_reason, ours.text) == (
            theirs.completion_ids, theirs.finish_reason, theirs.text)
        assert ours.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=ROUNDED)
