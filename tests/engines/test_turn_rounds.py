"""Rounds of turns in the transformers engine: keys and values of the last turn are used again, and nothing changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from episodes import Interrupted, Talk
from memory import failing
from small_models import TINY, load_model, with_adapter
from transformers import AutoTokenizer

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Request
from lowmem_grpo.engines.generation_state import PrefixCache
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import ImageToken, Rollout

SAMPLED = SamplingParams(temperature=1.3)
Usual = tuple[Talk, list[int]]
PROMPTS = [[5 + number % 90 for number in range(40)], [9] * 7, [100], [9] * 7]


@pytest.fixture(scope="module", params=[  # windows and none, states; in the long lane none, and windows
    "Gemma3", "Qwen3_5", *(pytest.param(family, marks=pytest.mark.slow) for family in ("tiny", "Mistral"))])
def engine(request: pytest.FixtureRequest) -> TransformersEngine:
    model = with_adapter(load_model(request.param)).double()
    return TransformersEngine(Policy(model), AutoTokenizer.from_pretrained(TINY), max_seq_length=256)


@pytest.fixture(autouse=True)
def as_new(engine: TransformersEngine) -> None:
    engine.bound, engine.kept = RunMemory().rollout, PrefixCache()


@pytest.fixture(scope="module")
def usual(engine: TransformersEngine) -> Usual:
    """The conversation as it goes where nothing disturbs it, and the places of each pass that it took."""
    with fed(engine) as places:
        return played(engine), places


def reply(key: int, turn: int) -> list[int]:
    """Of different lengths, some longer than the turn."""
    return [60 + key] * ([2, 30, 1, 5][key] + 7 * turn)


def talk(**options: Any) -> Talk:
    return Talk(PROMPTS, **{"turns": 4, "reply": reply, "max_tokens": lambda key, turn: 3 + (5 * key + turn) % 9}
                | options)


def played(engine: TransformersEngine, params: SamplingParams = SAMPLED, **options: Any) -> Talk:
    found = talk(**options)
    engine.converse(found, params)
    assert not engine.kept.rows, "nothing is kept behind a call"
    return found


@contextmanager
def fed(engine: TransformersEngine) -> Iterator[list[int]]:
    """Places (rows times tokens) of each pass through the model."""
    places: list[int] = []
    handle = engine.policy.backbone.norm.register_forward_hook(
        lambda module, args, out: places.append(out.shape[0] * out.shape[1]))
    try:
        yield places
    finally:
        handle.remove()


def same(first: Talk, second: Talk, to: float) -> None:
    assert first.ids == second.ids
    for key, rollouts in first.drawn.items():
        for a, b in zip(rollouts, second.drawn[key], strict=True):
            assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=to)
            assert (a.finish_reason, a.text) == (b.finish_reason, b.text)


def test_turns_that_go_on_from_kept_rows_are_those_of_a_full_computation(
    engine: TransformersEngine, usual: Usual
) -> None:
    found = usual[0]
    engine.kept.most = 0
    with fed(engine) as without:
        whole = played(engine)
    same(found, whole, to=1e-6)
    assert sum(usual[1]) < 0.7 * sum(without)
    assert {rollout.cached_tokens for rollouts in whole.drawn.values() for rollout in rollouts} <= {0, 7}
    for key, rollouts in found.drawn.items():
        asked = [request.ids for request in found.asked if request.key == key]
        for turn in (1, 2, 3):
            new = len(asked[turn]) - len(asked[turn - 1]) - len(rollouts[turn - 1].completion_ids) + 1
            assert 0 <= len(asked[turn]) - rollouts[turn].cached_tokens - new <= 64


def test_a_conversation_is_the_same_to_the_bit_when_it_is_repeated(engine: TransformersEngine, usual: Usual) -> None:
    same(usual[0], played(engine), to=0)
    same(usual[0], played(engine, wait=lambda key, turn: False), to=0)


def test_replies_that_come_in_a_later_round_go_on_from_what_was_kept(engine: TransformersEngine, usual: Usual) -> None:
    """One episode waits while the others play on; its own numbers do not depend on who is decoded beside it."""
    class Late(Talk):
        def next_requests(self, busy: bool) -> list[Any]:
            if len(self.takes) in (1, 2):
                self.ready, self.held = ([r for r in self.ready if r.key != 0],
                                         self.held + [r for r in self.ready if r.key == 0])
                found, self.ready = self.ready, []
                self.asked += found
                self.takes.append((busy, len(found)))
                return found
            return super().next_requests(busy)

    late = Late(PROMPTS, 4, reply, lambda key, turn: 3 + (5 * key + turn) % 9)
    engine.converse(late, SAMPLED)
    same(late, usual[0], to=1e-6)
    assert [got for _, got in late.takes] == [4, 3, 3, 4, 1, 1, 0]
    assert late.drawn[0][1].cached_tokens > 20


@pytest.mark.parametrize(("between", "known"), [
    (lambda engine: None, True), (lambda engine: engine.sleep(), False),
    (lambda engine: engine.on_policy_update(0), False),
    (lambda engine: engine.generate([[7, 8]], replace(SAMPLED, max_tokens=1, n=1)), False),
    (lambda engine: played(engine), False), (lambda engine: broken_off(engine), False),
], ids=["nothing", "sleep", "update", "generate", "another", "error"])
@pytest.mark.every(2)
def test_a_conversation_that_goes_on_finds_what_was_kept_unless_weights_or_keys_may_be_others(
    engine: TransformersEngine, between: Callable[[TransformersEngine], None], known: bool
) -> None:
    first = talk(turns=1)
    first.goes_on = True
    engine.converse(first, SAMPLED)
    between(engine)
    following = [request.ids + first.drawn[request.key][0].completion_ids + [50] for request in first.asked]
    more, whole = Talk(following, turns=1), Talk(following, turns=1)
    more.goes_on = True
    engine.converse(more, SAMPLED)
    assert [bool(more.drawn[key][0].cached_tokens) for key in range(4)] == [known] * 4
    engine.converse(whole, SAMPLED)
    same(more, whole, to=1e-6)


def broken_off(engine: TransformersEngine) -> None:
    """A conversation that goes on, and fails."""
    def fail(key: int, rollout: Any) -> None:
        raise OSError("no more")

    bad = Talk([[3, 4]], on_give=fail)
    bad.goes_on = True
    with pytest.raises(OSError, match="no more"):
        engine.converse(bad, SAMPLED)


def test_a_rewritten_history_goes_on_from_what_is_the_same(engine: TransformersEngine) -> None:
    """As where a template leaves out earlier thoughts."""
    class Rewritten(Talk):
        def request(self, key: int, ids: list[int], turn: int) -> Any:
            return super().request(key, self.prompts[key] + [11] * turn + ids[len(self.prompts[key]) + 2 :], turn)

    found, whole = Rewritten(PROMPTS[:2]), Rewritten(PROMPTS[:2])
    engine.converse(found, SAMPLED)
    engine.kept.most = 0
    engine.converse(whole, SAMPLED)
    same(found, whole, to=1e-6)
    holds_states = engine.policy.base.config.model_type == "qwen3_5_text"  # which cannot be cut at an earlier token
    assert found.drawn[0][1].cached_tokens in (range(1) if holds_states else range(30, 90))
    assert whole.drawn[0][1].cached_tokens == 0


@pytest.mark.parametrize("calls", [
    (0,), (14, 22), *(pytest.param(calls, marks=pytest.mark.slow) for calls in ((3,), (14,), (17, 18)))], ids=str)
@pytest.mark.every(2)
def test_a_shortage_drops_kept_rows_first_and_changes_no_turn(
    engine: TransformersEngine, usual: Usual, calls: tuple[int, ...]
) -> None:
    """Call 12 is the first of the second round, beside the rows that were kept of the first."""
    with failing(engine, *calls) as hook:
        found = played(engine)
    assert hook.raised == engine.bound.failures == len(calls)
    assert sorted(found.given) == sorted([0, 1, 2, 3] * 4), "each turn is given once"
    same(found, usual[0], to=1e-6)


def test_memory_that_runs_out_beside_kept_rows_leaves_the_bound_as_it_is(
    engine: TransformersEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The third turn of episode 0 begins while the others' rows are kept."""
    waits = talk(turns=2, wait=lambda key, turn: key > 0)
    before: list[int] = []

    def shortage(module: Any, args: Any, out: Any) -> None:
        if len(waits.given) == 4 and len(engine.kept.rows) >= 3 and not before:
            before.append(len(engine.kept.rows))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    class One(Talk):
        def next_requests(self, busy: bool) -> list[Any]:
            found = super().next_requests(busy)
            if len(self.takes) > 1 and len(found) > 1:
                self.held, found = found[1:], found[:1]
                self.asked = self.asked[: -len(self.held)]
            return found

    waits = One(PROMPTS, 2, reply, lambda key, turn: 4)
    handle = engine.policy.backbone.norm.register_forward_hook(shortage)
    try:
        engine.converse(waits, SAMPLED)
    finally:
        handle.remove()
    assert before == [3] and engine.bound.lowered is None and engine.bound.failures == 1
    assert engine.kept.most == 1
    assert "the keys and values of 3 earlier turns are dropped, and the work is repeated" in caplog.text
    whole = Talk(PROMPTS, 2, reply, lambda key, turn: 4)
    engine.converse(whole, SAMPLED)
    same(waits, whole, to=1e-6)


def test_kept_rows_and_decoded_ones_stay_within_the_bound(engine: TransformersEngine, usual: Usual) -> None:
    most: list[tuple[int, int]] = []
    engine.bound.lowered = 3
    leave = PrefixCache.trim

    def watched(self: PrefixCache, room: int) -> None:
        leave(self, room)
        most.append((len(self.rows), max(room, 0)))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PrefixCache, "trim", watched)
        found = played(engine)
    assert most and all(rows <= room <= 3 for rows, room in most)
    assert max(rows for rows, _ in most) == 3
    same(found, usual[0], to=1e-6)


def test_equal_prompts_of_a_round_are_computed_once(engine: TransformersEngine) -> None:
    one = Talk([[7] * 50] * 4, 1)
    with fed(engine) as places:
        engine.converse(one, SamplingParams(ignore_eos=True))
    assert places == [50] + [4] * 7
    assert [one.drawn[key][0].cached_tokens for key in range(4)] == [0, 50, 50, 50]


def test_equal_prompts_of_several_users_of_a_round_are_computed_once(engine: TransformersEngine) -> None:
    """Users have turns, so their prompts alternate."""
    two = Talk([[7] * 50, [8] * 50] * 3, 1)
    with fed(engine) as places:
        engine.converse(two, SamplingParams(ignore_eos=True))
    assert places == [2 * 50] + [6] * 7
    assert [two.drawn[key][0].cached_tokens for key in range(6)] == [0, 0, 50, 50, 50, 50]


def test_prompts_of_other_images_share_no_keys_and_values(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model that reads images; one of text refuses them."""
    cat, dog = ([7] * 30 + [ImageToken(9, name)] * 20 for name in ("cat", "dog"))
    with pytest.raises(ValueError):
        engine.generate([cat], SAMPLED)
    monkeypatch.setattr(engine.policy.inputs, "of_rows", lambda ids, at, *_: {"input_ids": ids, "position_ids": at})
    with fed(engine) as places:
        engine.generate([cat, cat, dog], SamplingParams(max_tokens=1))
    assert places == [100]
    swapped = Talk([cat], 2)
    monkeypatch.setattr(swapped, "request", lambda *asked: Request(0, [*dog, *asked[1][50:]], 8, 0))
    engine.converse(swapped, SAMPLED)
    assert swapped.drawn[0][1].cached_tokens in (0, 30)


def test_turns_that_are_interrupted_go_on_as_if_they_were_not(engine: TransformersEngine, usual: Usual) -> None:
    work = []
    for kept in (None, 0):
        engine.kept.most, found = kept, Interrupted(PROMPTS, 4, reply, lambda key, turn: 3 + (5 * key + turn) % 9)
        with fed(engine) as places:
            engine.converse(found, SAMPLED)
        assert sum(request.begun is not None for request in found.asked) > 10
        same(found, usual[0], to=1e-6)
        first = {(request.key, len(request.ids)) for request in found.asked}
        assert all(rollout.cached_tokens <= length for key, rollouts in found.drawn.items()
                   for rollout, (_, length) in zip(rollouts, sorted(pair for pair in first if pair[0] == key),
                                                   strict=True)), "drawn tokens are no part of the prompt"
        work.append(sum(places))
    assert work[0] < 0.5 * work[1], "keys and values are used again"


@pytest.mark.parametrize("prompts", [[[7] * 50] * 4, [[7] * 50, [8] * 50] * 2], ids=["one user", "two users"])
def test_interrupted_turns_whose_cache_is_gone_read_an_equal_prompt_once(
    engine: TransformersEngine, prompts: list[list[int]]
) -> None:
    alone, found = Talk(prompts, 1), Interrupted(prompts, 1)
    engine.converse(alone, SamplingParams(ignore_eos=True))
    engine.kept.most = 0
    with fed(engine) as places:
        engine.converse(found, SamplingParams(ignore_eos=True))
    same(found, alone, to=1e-6)
    different = 50 * len(set(map(tuple, prompts)))
    assert places == [different, 4, 4, different, 3 * 4, 4, 4, different, 6 * 4, 4], "3, 3 and 2 tokens are drawn"


def test_turns_that_were_interrupted_at_different_lengths_go_on_together(engine: TransformersEngine) -> None:
    """Those of 5, 3, 5 and 3 tokens, whose cache is gone, beside one that has not begun."""
    ended: dict[int, Rollout] = {}
    first = Talk([[7] * 50] * 5, 1, max_tokens=lambda key, turn: 5 - 2 * (key % 2), on_give=ended.__setitem__)
    engine.converse(first, SamplingParams(ignore_eos=True))
    alone, found = Talk([[7] * 50] * 5, 1), Talk([[7] * 50] * 5, 1)
    engine.converse(alone, SamplingParams(ignore_eos=True))
    found.ready = [replace(request, begun=ended[request.key] if request.key < 4 else None) for request in found.ready]
    with fed(engine) as places:
        engine.converse(found, SamplingParams(ignore_eos=True))
    same(found, alone, to=1e-6)
    assert places[:5] == [50, 2 * 5, 50, 2 * 3, 50]


def test_the_cache_of_interrupted_turns_stays_when_that_of_others_has_to_go() -> None:
    rows: dict[int, Any] = dict.fromkeys([4, 0, 1, 2, 3], "prefix")
    for most, room, left in ((None, 2, [4, 0, 2, 3]), (None, 0, [4, 0]), (3, 4, [4, 0, 3]), (1, 4, [0]), (9, 1, [0])):
        kept = PrefixCache(dict(rows), most, awaited=lambda: {0, 4, 77})
        kept.trim(room)
        assert [*kept.rows] == left, (most, room)


def test_a_stop_string_over_an_interruption_ends_a_turn(engine: TransformersEngine) -> None:
    """Of each turn, the text of its third and fourth token stops it; the interruption is between the two."""
    free = talk(turns=1, max_tokens=lambda key, turn: 8)
    engine.converse(free, SAMPLED)
    for key, (rollout,) in free.drawn.items():
        ids = rollout.completion_ids
        if len(ids) < 5:
            continue
        stop = engine.tokenizer.decode(ids[2:4])
        asked = Interrupted([PROMPTS[key]], 1, reply, lambda key, turn: 8)
        asked.ready = [replace(asked.ready[0], seed=1000 * key)]
        engine.converse(asked, replace(SAMPLED, stop=[stop]))
        assert asked.drawn[0][0].finish_reason == "stop" and len(asked.drawn[0][0].completion_ids) <= 4


def test_a_shortage_in_a_turn_that_goes_on_changes_nothing(engine: TransformersEngine, usual: Usual) -> None:
    found = Interrupted(PROMPTS, 4, reply, lambda key, turn: 3 + (5 * key + turn) % 9)
    with failing(engine, 12):
        engine.converse(found, SAMPLED)
    same(found, usual[0], to=1e-6)
