"""Turns of episodes by a caller's own engine, which only has `generate`."""

import logging
from typing import Any

import pytest
from episodes import Talk
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import decoding
from lowmem_grpo.engines.base import check_own_engine
from lowmem_grpo.types import Rollout


class Plain:
    """Repeats the last token of a prompt, as often as a call allows."""

    name = "plain"

    def __init__(self) -> None:
        self.calls: list[tuple[int, SamplingParams]] = []

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Rollout]]:
        self.calls.append((len(prompts), params))
        return [[self.rollout(prompt, params)] for prompt in prompts]

    def rollout(self, prompt: list[int], params: SamplingParams) -> Rollout:
        return Rollout(prompt[-1:] * params.max_tokens, [-1.0] * params.max_tokens, "stop", "all of it")


class Telling(Plain):
    """The same, with `on_group`: the last prompt is finished first."""

    capabilities = frozenset({"on_group"})

    def generate(self, prompts: list[list[int]], params: SamplingParams, on_group: Any = None) -> list[list[Rollout]]:
        found = super().generate(prompts, params)
        for index in reversed(range(len(prompts))):
            on_group(index, found[index])
        return found


@pytest.mark.parametrize(("kind", "order"), [(Plain, [0, 1, 2]), (Telling, [2, 1, 0])])
def test_an_engine_without_converse_decodes_rounds_and_one_warning_says_so(
    kind: type[Plain], order: list[int], tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    decoding.warn_of_rounds.cache_clear()
    engine = kind()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            played = Talk([[5], [6, 7], [8]], 2, max_tokens=lambda key, turn: 2 + key + turn)
            decoding.converse(engine, played, SamplingParams(temperature=0.7, n=4), tokenizer)
            assert played.given == order * 2
            assert {len(r.ids) for r in played.asked if r.key == 1} == {2, 2 + 3 + 3}
    assert caplog.text.count("the engine plain has no converse(conversation, params)") == 1
    assert [(count, p.n, p.max_tokens, p.temperature, p.seed) for count, p in engine.calls[:2]] == [
        (3, 1, 4, 0.7, 0), (3, 1, 5, 0.7, 1)
    ]
    first = played.drawn[0][0]
    assert (first.completion_ids, first.rollout_logprobs, first.finish_reason) == ([5, 5], [-1.0] * 2, "length")
    assert first.text == tokenizer.decode([5, 5])
    longest = played.drawn[2][0]
    assert (longest.completion_ids, longest.finish_reason, longest.text) == ([8] * 4, "stop", "all of it")


def test_an_engine_with_converse_is_asked_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    asked: list[Any] = []

    class Own(Plain):
        capabilities = frozenset({"converse"})

        def converse(self, conversation: Any, params: SamplingParams) -> None:
            asked.append((conversation, params))

    played, params = Talk([[5]]), SamplingParams()
    decoding.converse(Own(), played, params, tokenizer)
    assert asked == [(played, params)] and not played.takes


def test_an_engine_that_lacks_what_a_run_uses_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"engine is a Plain without kv_bytes, on_policy_update, sleep; an engine has"):
        check_own_engine(Plain())
