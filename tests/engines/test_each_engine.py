"""What the trainer asks of any engine: seeds, room in the context, a listener that hears of each prompt, and turns."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from episodes import Talk
from small_models import TINY, load_model, with_adapter
from transformers import AutoTokenizer
from vllm_models import CONTEXT, GREEDY, NEEDS_VLLM, SAME, distance, engine_on, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.shared_linear import LAYERS
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each engine on the embedded model, with the same context."""
    if request.param == "vllm":
        with engine_on(Policy(with_adapter(load_model("tiny")))) as made:
            yield made
    else:
        policy = Policy(with_adapter(load_model("tiny")).double())
        yield TransformersEngine(policy, AutoTokenizer.from_pretrained(TINY), CONTEXT)


def test_the_same_seed_draws_the_same_tokens(engine: Any, prompts: list[list[int]]) -> None:
    assert engine.generate([], SamplingParams()) == []
    params = SamplingParams(n=4, max_tokens=16, seed=7, ignore_eos=True)
    first = ids_of(engine.generate(prompts, params))
    assert ids_of(engine.generate(prompts, params)) == first
    assert ids_of(engine.generate(prompts, replace(params, seed=8))) != first
    before = torch.get_rng_state()
    unseeded = [ids_of(engine.generate(prompts, replace(params, seed=None))) for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    assert torch.equal(torch.get_rng_state(), before), "the global random state is left alone"


def test_a_requests_seed_is_its_own_whatever_else_is_sampled(engine: Any, prompts: list[list[int]]) -> None:
    """As vLLM's ParentRequest derives seeds: completion i of n has seed + i; its SamplingParams reads -1 as None."""
    params, one = SamplingParams(n=3, max_tokens=16, seed=7, ignore_eos=True, temperature=2.0), prompts[0]
    (alone,) = ids_of(engine.generate([one], params))
    assert ids_of(engine.generate([prompts[2], one, prompts[1], one], params))[1::2] == [alone, alone]
    singles = [ids_of(engine.generate([one], replace(params, n=1, seed=7 + index)))[0][0] for index in range(3)]
    assert singles == alone and len(set(map(tuple, alone))) > 1
    drawn = [ids_of(engine.generate([one, one], replace(params, seed=-1))) for _ in range(2)]
    assert drawn[0] != drawn[1] and drawn[0][0] != drawn[0][1], "-1 is random"
    others = [ids_of(engine.generate([one, one], replace(params, seed=seed))) for seed in (0, -7)]
    assert others[0] != others[1] and all(first == second for first, second in others)
    high = [ids_of(engine.generate([one], replace(params, seed=seed))) for seed in (1, 2**32 + 1, 2**33 + 1, 1 - 2**63)]
    assert all(first != second for first, second in combinations(high, 2)), "also the bits that torch's CPU leaves out"
    assert engine.generate([one], replace(params, seed=2**64 - 1)), "whose last completions are beyond torch's range"


def test_completions_of_training_share_no_random_numbers(engine: Any, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=3, max_tokens=16, seed=7, ignore_eos=True, temperature=2.0).of_call(4)
    drawn = ids_of(engine.generate([prompts[0]] * 4, params))
    assert not any(drawn[0] == other for other in drawn[1:])


def test_a_completion_fills_the_context_and_no_more(engine: Any) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    lengths = [CONTEXT - 1, CONTEXT - 2, CONTEXT - 20, CONTEXT - 21, 4]
    groups = engine.generate([[5 + number % 9 for number in range(length)] for length in lengths], params)
    assert [len(rollout.completion_ids) for (rollout,) in groups] == [1, 2, 20, 20, 20], "each has its own room"
    assert {rollout.finish_reason for (rollout,) in groups} == {"length"}
    with pytest.raises(ValueError, match=f"a prompt of {CONTEXT} tokens leaves no room in a context of {CONTEXT}"):
        engine.generate([[5] * 4, [5] * CONTEXT], params)
    assert len(engine.generate([[5] * 4], params)) == 1


def test_between_two_steps_of_decoding_the_number_of_unfinished_sequences_is_told(
    engine: Any, prompts: list[list[int]]
) -> None:
    params, running = SamplingParams(n=2, max_tokens=12, seed=3), []
    expected = engine.generate(prompts, params)
    longest = max(len(rollout.completion_ids) for group in expected for rollout in group)
    assert ids_of(engine.generate(prompts, params, lambda *told: None, running.append)) == ids_of(expected)
    assert longest - 1 <= len(running) <= longest and running[0] <= 2 * len(prompts)
    assert running == sorted(running, reverse=True) and running[-1] >= 1

    def stop(running: int) -> None:
        raise KeyError(f"{running} are left")

    with pytest.raises(KeyError, match="are left"):
        engine.generate(prompts, params, lambda *told: None, stop)
    assert ids_of(engine.generate(prompts, params)) == ids_of(expected), "the next call is not disturbed"


def count_passes(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry with each pass through the engine's model."""
    passes: list[int] = []
    layer = LAYERS["model.layers.1.self_attn.o_proj"] if engine.name == "vllm" else engine.policy.backbone.norm
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: passes.append(1) or forward(x))
    return passes


def test_each_prompt_is_reported_once_as_soon_as_it_is_finished_with_the_rollouts_that_are_returned(
    engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=40, seed=4)
    expected = engine.generate(prompts, params)
    passes, told = count_passes(engine, monkeypatch), []
    groups = engine.generate(prompts, params, lambda prompt, rollouts: told.append((prompt, rollouts, len(passes))))
    assert ids_of(groups) == ids_of(expected)
    assert sorted(prompt for prompt, *_ in told) == [0, 1, 2]
    assert all(rollouts is groups[prompt] for prompt, rollouts, _ in told)
    longest = [max(len(rollout.completion_ids) for rollout in groups[prompt]) for prompt, *_ in told]
    reported = [made for *_, made in told]
    assert longest == sorted(longest) and len(set(longest)) > 1
    assert reported == longest or (engine.name == "vllm" and reported[0] < reported[1] < len(passes))


def test_an_error_of_the_listener_ends_the_call_and_the_engine_lives_on(engine: Any, prompts: list[list[int]]) -> None:
    told: list[int] = []

    def refuses(prompt: int, rollouts: list[Rollout]) -> None:
        told.append(prompt)
        raise KeyError("gold")

    engine.policy.model.train()
    with pytest.raises(KeyError, match="gold"):
        engine.generate(prompts, SamplingParams(n=2, max_tokens=10), refuses)
    assert engine.policy.model.training
    assert len(told) == 1
    assert len(engine.generate(prompts, SamplingParams(max_tokens=10))) == 3
    engine.policy.model.eval()


LENGTHS = [[5, 9, 3], [12, 2, 7], [1, 6, 4]]  # of the turns of three episodes, at most


def talk(prompts: list[list[int]], **options: Any) -> Talk:
    return Talk(prompts, max_tokens=lambda key, turn: LENGTHS[key][turn], **options)


@pytest.mark.parametrize("late", [
    pytest.param([], marks=pytest.mark.slow, id="at once"), pytest.param([(0, 1), (1, 2)], id="some replies come late"),
])
def test_each_turn_is_what_its_own_prompt_gives_and_its_logprobs_are_the_policys(
    engine: Any, prompts: list[list[int]], late: list[tuple[int, int]]
) -> None:
    played = talk(prompts, wait=lambda key, turn: (key, turn) in late)
    engine.converse(played, replace(GREEDY, ignore_eos=True))
    assert sorted(played.given) == sorted([0, 1, 2] * 3)
    for key, rollouts in played.drawn.items():
        asked = [request for request in played.asked if request.key == key]
        assert [len(rollout.completion_ids) for rollout in rollouts] == LENGTHS[key]
        for request, rollout in zip(asked, rollouts, strict=True):
            params = replace(GREEDY, max_tokens=request.max_tokens, ignore_eos=True)
            ((alone,),) = engine.generate([request.ids], params)
            assert (alone.completion_ids, alone.finish_reason) == (rollout.completion_ids, rollout.finish_reason)
            assert distance(engine.policy, [request.ids], [[rollout]]) < SAME
            assert len(request.ids) > rollout.cached_tokens >= 0


def test_the_same_requests_draw_the_same_turns_and_other_seeds_draw_others(
    engine: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=1.5, ignore_eos=True)
    first, second, same = talk(prompts), talk(prompts), talk([prompts[0]] * 3)
    for played in (first, second, same):
        before = torch.get_rng_state()
        engine.converse(played, params)
        assert torch.equal(torch.get_rng_state(), before), "the global random state is left alone"
    assert first.ids == second.ids
    for key in first.ids:
        for one, other in zip(first.drawn[key], second.drawn[key], strict=True):  # vLLM may find more in its cache
            assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-4)
    drawn = [tuple(rollouts[0].completion_ids[:5]) for rollouts in same.drawn.values()]
    assert drawn[0] != drawn[1]


def test_a_turn_is_given_while_longer_ones_are_decoded(
    engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, seen = count_passes(engine, monkeypatch), {}
    played = Talk(prompts, 1, max_tokens=lambda key, turn: [3, 30, 12][key],
                  on_give=lambda key, rollout: seen.setdefault(key, len(passes)))
    engine.converse(played, SamplingParams(ignore_eos=True))
    assert list(seen) == played.given == [0, 2, 1]
    assert seen[0] <= 5 and seen[2] <= 14 and seen[1] >= 30


def gold(*args: Any) -> None:
    raise KeyError("gold")


def full(*args: Any) -> None:
    raise MemoryError("of the environment")


@pytest.mark.parametrize(("where", "error"), [
    ("give", gold), ("take", full), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("give", full), ("take", gold)))])
@pytest.mark.every(2)
def test_an_error_of_the_conversation_ends_the_call_and_leaves_nothing_behind(
    engine: Any, prompts: list[list[int]], error: Any, where: str
) -> None:
    expected, played = ids_of(engine.generate(prompts, GREEDY)), talk(prompts)
    engine.policy.model.train()
    if where == "give":
        played.on_give = error
    else:
        take = played.next_requests
        played.next_requests = lambda busy: error() if played.given else take(busy)  # type: ignore[method-assign]
    kept = getattr(engine, "llm", None)
    with pytest.raises((KeyError, MemoryError), match=r"gold|of the environment"):
        engine.converse(played, SamplingParams(ignore_eos=True))
    assert len(played.given) == 1 or where == "take"
    assert engine.policy.model.training
    assert ids_of(engine.generate(prompts, GREEDY)) == expected
    assert getattr(engine, "llm", None) is kept, "the engine is as good as before"
    engine.policy.model.eval()


@pytest.mark.parametrize(("ids", "most", "message"), [
    ([], 4, "a prompt has no tokens"), ([5] * CONTEXT, 4, "leaves no room in a context"),
    ([5], 0, "at most 0 tokens is asked for; ask for at least one"),
])
def test_a_turn_that_cannot_be_decoded_is_an_error_that_says_why(
    engine: Any, ids: list[int], most: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.converse(Talk([ids], max_tokens=lambda key, turn: most), GREEDY)


def test_a_conversation_without_a_turn_ends_at_once(engine: Any) -> None:
    played = Talk([])
    engine.converse(played, GREEDY)
    assert played.takes == [(False, 0)]


# Tokens as they come


def test_tokens_are_passed_on_while_a_turn_is_sampled_and_change_nothing(
    engine: Any, prompts: list[list[int]]
) -> None:
    heard: dict[int, list[tuple[list[int], list[float]]]] = {0: [], 1: [], 2: []}

    def listen(key: int, ids: list[int], logprobs: list[float]) -> bool:
        heard[key].append((ids, logprobs))
        return True

    params = SamplingParams(ignore_eos=True)
    silent, told = (Talk(prompts, turns=1, max_tokens=lambda key, turn: [9, 4, 12][key], listen=one)
                    for one in (None, listen))
    engine.converse(silent, params)
    engine.converse(told, params)
    for key, (rollout,) in told.drawn.items():
        same, rounding = silent.drawn[key][0], 1e-5 if engine.name == "vllm" else 0  # it takes prefixes from its cache
        assert (rollout.completion_ids, rollout.text, rollout.finish_reason) == (
            same.completion_ids, same.text, same.finish_reason)
        assert rollout.rollout_logprobs == pytest.approx(same.rollout_logprobs, rel=0, abs=rounding)
        count = len(rollout.completion_ids) - 1
        assert len(heard[key]) == count, "each token but the last comes alone"
        assert [ids for ids, _ in heard[key]] == [[token] for token in rollout.completion_ids[:count]]
        assert [logprob for _, (logprob,) in heard[key]] == rollout.rollout_logprobs[:count]


def test_a_turn_that_nobody_wants_any_more_ends_and_the_others_go_on_as_they_were(
    engine: Any, prompts: list[list[int]]
) -> None:
    params, count = SamplingParams(ignore_eos=True), 0

    def leave(key: int, ids: list[int], logprobs: list[float]) -> bool:
        nonlocal count
        count += key == 1
        return key != 1 or count < 3

    whole, left = (Talk(prompts, turns=2, max_tokens=lambda key, turn: 12, listen=one) for one in (None, leave))
    engine.converse(whole, params)
    engine.converse(left, params)
    assert [left.ids[key] for key in (0, 2)] == [whole.ids[key] for key in (0, 2)]
    assert left.ids[1][0] == whole.ids[1][0][:3] and left.drawn[1][0].finish_reason == "length"
    assert len(left.ids[1][1]) == 1, "the next turn is left at its first token"
