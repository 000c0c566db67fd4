"""Steps with everything at one address: the same completions, whether they run as they are or were recorded."""

import logging
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
from different_ends import CONTEXT, PARAMS, PROMPTS, check_same
from memory import Recorder
from small_models import FAMILIES, load_model, with_adapter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import token_step
from lowmem_grpo.engines.batch import Batch, DecodeState
from lowmem_grpo.engines.token_step import MOST_GRAPHS, StepBuffers, TokenStep, up_to_multiple
from lowmem_grpo.engines.transformers_engine import LOOK, TransformersEngine
from lowmem_grpo.memory.cards import GRAPH_PLACES, graph_rows, graph_width
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.models.policy import Policy

# The families whose steps can be recorded: not those with gated delta nets.
recordable = pytest.mark.parametrize("policy", ["tiny", *FAMILIES], indirect=True)


@pytest.fixture
def engine(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """Of every family."""
    return TransformersEngine(policy, tokenizer, CONTEXT)


@pytest.fixture
def small(small_policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    return TransformersEngine(small_policy, tokenizer, GRAPH_PLACES + 12)


def plain(engine: TransformersEngine) -> TransformersEngine:
    """The same with steps that are not recorded."""
    return TransformersEngine(engine.policy, engine.tokenizer, engine.max_seq_length)


@recordable
@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.every(2)
def test_recorded_steps_draw_the_same_also_where_rows_enter_and_leave(
    engine: TransformersEngine, rows: int | None
) -> None:
    expected, other = engine.generate(PROMPTS, PARAMS), plain(engine)
    other.bound.lowered = rows
    recorder = Recorder(other)
    check_same(other.generate(PROMPTS, PARAMS), expected)
    assert recorder.ran > 5 * recorder.recorded > 0
    assert other.step.recorded == recorder.recorded
    assert other.step.record is recorder, "the recorded steps agreed with those that run as they are"


def test_the_cache_is_as_large_as_said_and_graphs_read_no_more_of_it_than_they_need(small: TransformersEngine) -> None:
    step, recorder = 16, Recorder(small)
    small.step.block = step
    prompts, longest = [[100, 5, 7], [9] * 9], 9 + PARAMS.max_tokens + 1
    check_same(small.generate(prompts, PARAMS), plain(small).generate(prompts, PARAMS))
    shape = ModelShape.from_config(small.policy.base.config)
    assert small.kv_bytes == 2 * PARAMS.n * shape.kv_bytes(up_to_multiple(longest, step), itemsize=8)
    assert up_to_multiple(longest, step) - longest < step
    assert recorder.recorded == 3, "once for each length"


class NothingAsked(TorchDispatchMode):
    """Fails where the host asks a device for a value, or makes a shape of one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else ()
        assert name not in self.FORBIDDEN, f"a step asks the device ({name})"
        assert not any(one is not None and one.dtype == torch.bool for one in indices), "a step's shapes depend on data"
        return func(*args, **(kwargs or {}))


@recordable
@pytest.mark.every(2)
def test_a_step_asks_the_device_for_nothing_and_its_tensors_stay_where_they_are(engine: TransformersEngine) -> None:
    seen: list[list[int]] = []
    step = engine.step
    whole = step.step

    def watched() -> Tensor:
        caches, held = [layer.storage for layer in step.state.cache.layers], step.buffers  # type: ignore[union-attr]
        seen.append([part.data_ptr() for part in (held.tokens, held.positions, held.at, held.mask, *caches)])
        with NothingAsked():
            return whole()

    step.step = watched  # type: ignore[method-assign]
    engine.generate([[100, 5, 7], [9] * 9], SamplingParams(n=2, max_tokens=30, seed=1, ignore_eos=True))
    assert len(seen) == 29
    assert all(one == seen[0] for one in seen)


DRAWS = {
    "greedy": {"temperature": 0.0}, "at temperature 1": {}, "top_p and top_k": {"top_p": 0.8, "top_k": 40},
    "min_p": {"min_p": 0.05, "temperature": 0.7},
}


@pytest.mark.parametrize("how", DRAWS)
def test_drawing_a_token_asks_the_device_for_nothing(
    how: str, small: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, store, drew = Batch.draw, Batch.store, []

    def watched(batch: Batch, logits: Tensor) -> None:
        with NothingAsked() if drew else nullcontext():  # the first one makes the random numbers and the end tokens
            draw(batch, logits)
        drew.append(batch.since)

    def stored(batch: Batch) -> None:
        with NothingAsked():
            store(batch)

    monkeypatch.setattr(Batch, "draw", watched)
    monkeypatch.setattr(Batch, "store", stored)
    small.generate(PROMPTS[:2], SamplingParams(n=2, max_tokens=20, seed=1, **DRAWS[how]))
    assert len(drew) > 5


ENDINGS = {
    "the end token": {}, "several end tokens": {"stop_token_ids": [*range(5, 60)]}, "the budget": {"ignore_eos": True},
    "a stop string": {"stop": ["e"]},
}


@pytest.mark.parametrize(("ends", "rows"), [
    ("the end token", None), ("several end tokens", 5), ("the budget", None), ("a stop string", 5),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("the end token", 5), ("several end tokens", None), ("the budget", 5), ("a stop string", None))),
])
@pytest.mark.every(2)
def test_looking_rarely_at_which_rows_are_done_changes_no_token(
    ends: str, rows: int | None, small: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=37, seed=20, part=(0, len(PROMPTS) + 1), **ENDINGS[ends])
    prompts = [*PROMPTS, [7] * (small.max_seq_length - 20)]  # the last one has the smallest budget
    other = plain(small)
    expected = other.generate(prompts, params)
    assert ends == "the budget" or len({len(one.completion_ids) for one in chain(*expected)}) > 5
    recorder, looks, steps = Recorder(small), [], []
    small.bound.lowered = rows
    look, extend = Batch.find_done, TokenStep.extend
    monkeypatch.setattr(Batch, "find_done", lambda batch: looks.append(batch.since) or look(batch))
    monkeypatch.setattr(TokenStep, "extend", lambda step, state: steps.append(1) or extend(step, state))
    check_same(small.generate(prompts, params), expected)
    first = len(expected) * params.n  # tokens that are drawn from the prompts' own logits
    drawn = sum(len(one.completion_ids) for one in chain(*expected)) - first
    for engine, most in ((small, rows), (other, None)):
        tokens = engine.pace.tokens
        assert engine.pace.most == (most or first) and 0 < tokens["full"] + tokens["tail"] <= drawn
        assert most or tokens["full"] + tokens["tail"] == drawn, "no token after an end"
        assert most or tokens["prefill"] == sum(map(len, prompts))
    if ends == "a stop string":
        assert {*looks} == {1}
    else:
        assert max(looks) == LOOK and recorder.ran
        assert rows is not None or len(looks) < len(steps) / 2


@pytest.mark.parametrize("rows", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_who_counts_steps_between_two_looks_is_told_of_all(small: TransformersEngine, rows: int | None) -> None:
    def told(engine: TransformersEngine) -> list[int]:
        running: list[int] = []
        engine.bound.lowered = rows
        engine.generate(PROMPTS, PARAMS, None, running.append)
        return running

    steps = len(told(plain(small)))
    Recorder(small)
    assert steps <= len(told(small)) <= steps * (1 if rows is None else 1.5)


def test_a_shortage_between_two_looks_loses_no_token(
    small: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=37, seed=5)
    expected = plain(small).generate(PROMPTS, params)
    Recorder(small)
    extend, steps = TokenStep.extend, [0]

    def short(step: TokenStep, state: DecodeState) -> Tensor:
        steps[0] += 1
        if steps[0] == 13:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return extend(step, state)

    monkeypatch.setattr(TokenStep, "extend", short)
    check_same(small.generate(PROMPTS, params), expected)
    assert steps[0] > 13


def test_enforce_eager_turns_graphs_off_and_false_requires_them(small: TransformersEngine, monkeypatch: Any) -> None:
    with pytest.raises(EngineUnavailableError, match=r"eager is False.* is on the cpu; leave enforce_eager out"):
        TransformersEngine(small.policy, small.tokenizer, CONTEXT, enforce_eager=False)
    monkeypatch.setattr(token_step, "not_recorded", lambda policy: "")
    recorded = [TransformersEngine(small.policy, small.tokenizer, CONTEXT, enforce_eager=eager).step.record is not None
                for eager in (None, False, True)]
    assert recorded == [True, True, False]


def test_a_step_is_recorded_anew_where_weights_have_moved(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = TransformersEngine(Policy(with_adapter(load_model("shallow"))), tokenizer, CONTEXT)
    recorder, step, plain = Recorder(engine), engine.step, engine.step.logits

    def moving() -> Tensor:
        if recorder.ran == 6:
            weight = engine.policy.trainable[0]
            weight.data = weight.data.clone()
        return plain()

    step.logits = moving  # type: ignore[method-assign]
    engine.generate(PROMPTS[:1], SamplingParams(max_tokens=18, temperature=0, ignore_eos=True))
    assert recorder.recorded == 2


def test_packed_weights_are_asked_for_their_addresses_once_a_call(tokenizer: PreTrainedTokenizerBase) -> None:
    policy = Policy(with_adapter(load_model("shallow")))
    packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    policy.model.register_parameter("packed", packed)
    engine = TransformersEngine(policy, tokenizer, CONTEXT)
    recorder, recorded = Recorder(engine), []
    for moves in (False, False, True):
        packed.data = packed.data.clone() if moves else packed.data
        engine.generate(PROMPTS[:1], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        recorded.append(recorder.recorded)
    assert recorded == [1, 1, 2]
    assert engine.step.weights and all(weight.is_floating_point() for weight in engine.step.weights)


def test_a_step_that_cannot_be_recorded_is_said_once_and_decoded_as_it_is(
    small: TransformersEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(work: Any, beside: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    small.step.record = refuses
    with caplog.at_level(logging.WARNING):
        found = small.generate(PROMPTS[:2], PARAMS)
    check_same(found, plain(small).generate(PROMPTS[:2], PARAMS))
    assert [one.getMessage() for one in caplog.records if one.name == token_step.__name__] == [
        "token steps go on without a CUDA graph, several times slower where rows are few: it could not be recorded "
        "(operation not permitted when stream is capturing)"]
    assert small.step.record is None


def test_a_graph_that_gives_other_logits_and_wrote_other_keys_is_not_used(
    small: TransformersEngine, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(small)

    def wrong(work: Any, beside: Any) -> Any:
        run = recorder(work)

        def spoils() -> Tensor:
            logits = run() + 1.0
            for layer in small.step.state.cache.layers:  # type: ignore[union-attr]
                layer.storage[0].index_fill_(2, small.step.buffers.at - 1, 9.0)
            small.step.buffers.at.add_(5)
            return logits

        return spoils

    small.step.record = wrong
    check_same(small.generate(PROMPTS[:2], PARAMS), plain(small).generate(PROMPTS[:2], PARAMS))
    assert small.step.record is None and recorder.ran == 1 and "differ by" in caplog.text


@pytest.mark.parametrize("what", ["refuses", "fails when it runs"])
def test_who_asks_for_graphs_by_name_gets_an_error_and_no_other_decoding(
    what: str, small: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(token_step, "not_recorded", lambda policy: "")
    engine = TransformersEngine(small.policy, small.tokenizer, CONTEXT, enforce_eager=False)
    recorder = Recorder(engine)
    engine.step.record = fails if what == "refuses" else lambda work, beside: fails
    with pytest.raises(EngineUnavailableError, match=r"enforce_eager is False.*cannot be one: it could not be recorded "
                                                     r"\(operation not permitted when stream is capturing\); leave"):
        engine.generate(PROMPTS[:2], PARAMS)
    engine.step.record = recorder
    engine.generate(PROMPTS[:2], PARAMS)
    assert recorder.recorded and not engine.step.must, "one graph was made: of later ones a warning is enough"


def test_memory_that_runs_out_while_a_step_is_recorded_halves_the_rows_and_keeps_graphs(
    small: TransformersEngine,
) -> None:
    recorder, failures = Recorder(small), [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")]

    def short(work: Any, beside: Any) -> Any:
        if failures:
            raise failures.pop()
        return recorder(work)

    small.step.record = short
    check_same(small.generate(PROMPTS, PARAMS), plain(small).generate(PROMPTS, PARAMS))
    assert small.step.record is short and recorder.ran and small.bound.lowered == len(PROMPTS) * PARAMS.n // 2


def test_a_second_call_of_the_same_shape_records_nothing(small: TransformersEngine) -> None:
    params = SamplingParams(n=3, max_tokens=GRAPH_PLACES - 30, seed=20, stop_token_ids=[*range(5, 20)])
    recorder, expected = Recorder(small), plain(small).generate(PROMPTS, params)
    small.sleeps = False
    check_same(small.generate(PROMPTS, params), expected)
    first, ran = recorder.recorded, recorder.ran
    assert first >= 5, "rows left at several times"
    small.sleep()
    small.on_policy_update(1)
    steps = small.step.buffers.steps
    check_same(small.generate(PROMPTS, params), expected)
    assert recorder.recorded == first and recorder.ran > ran and small.step.buffers.steps == steps
    small.sleeps = True
    small.sleep()
    assert small.step.lasting is None, "its memory is given back"
    check_same(small.generate(PROMPTS, params), expected)
    assert recorder.recorded > first


@pytest.mark.parametrize("most", [MOST_GRAPHS, 30])
def test_no_graph_is_recorded_twice_in_ten_steps_of_64_rows_and_4096_tokens_nor_dropped_if_each_step_uses_it(
    most: int, small: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_step, "MOST_GRAPHS", most)
    step, made, used = small.step, Counter[tuple[int, int]](), list[set[tuple[int, int]]]()
    step.buffers, step.weights = StepBuffers(64, up_to_multiple(100 + 4096), torch.device("cpu")), []
    step.step = lambda: torch.ones(64, 1)  # type: ignore[method-assign]

    def recorder(work: Any, beside: Any) -> Any:
        made[step.rows, step.width] += 1
        return step.step

    step.record, random = recorder, torch.Generator().manual_seed(0)
    for _ in range(10):
        lengths = torch.empty(64).log_normal_(6.9, 0.8, generator=random).clamp(1, 4096)
        used.append(set())
        for place in range(1, int(lengths.max()), LOOK):
            step.rows = graph_rows(int((lengths > place).sum()))
            step.width = min(graph_width(100 + place), step.buffers.capacity)
            used[-1].add((step.rows, step.width))
            step.logits()
    assert len(made) > 30 and {made[key] for key in set.intersection(*used)} == {1}
    assert most < MOST_GRAPHS or {*made.values()} == {1}


def test_graphs_of_an_earlier_call_read_the_adapters_of_now_and_none_serves_other_adapters(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    engine = TransformersEngine(policy := Policy(with_adapter(load_model("shallow")).double()), tokenizer, CONTEXT)
    recorder, params = Recorder(engine), SamplingParams(n=2, max_tokens=12, seed=4, ignore_eos=True)
    before = engine.generate(PROMPTS[:2], params)
    for weight in policy.trainable:
        weight.data.add_(0.1 * torch.ones_like(weight))
    recorded = recorder.recorded
    after = engine.generate(PROMPTS[:2], params)
    assert recorder.recorded == recorded and before[0][0].rollout_logprobs != after[0][0].rollout_logprobs
    check_same(after, plain(engine).generate(PROMPTS[:2], params))
    with policy.base_model():
        check_same(engine.generate(PROMPTS[:2], params), plain(engine).generate(PROMPTS[:2], params))
    assert recorder.recorded > recorded


def test_a_call_that_fails_leaves_nothing_for_the_next(small: TransformersEngine) -> None:
    Recorder(small)

    def fails(index: int, rollouts: Any) -> None:
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        small.generate(PROMPTS, PARAMS, fails)
    assert small.step.lasting is None and small.step.buffers.rows == 0
    check_same(small.generate(PROMPTS, PARAMS), plain(small).generate(PROMPTS, PARAMS))


def test_rows_and_widths_of_graphs_are_rounded_up_and_few() -> None:
    assert [graph_rows(rows) for rows in (1, 2, 3, 5, 8, 9, 16, 17, 33, 63, 64, 65, 250)] == [
        1, 2, 4, 8, 8, 16, 16, 24, 40, 64, 64, 80, 256]
    assert [graph_width(width) for width in (1, 128, 129, 1025, 2049, 4097)] == [128, 128, 256, 1280, 2560, 5120]
    assert len({graph_width(width) for width in range(1, 2**17)}) <= 40
    for width in range(1, 2**15, 37):
        assert width <= graph_width(width) < max(width + 128, 1.25 * width)
