"""vLLM's key-value cache that finds no room when it wakes: a smaller one, nothing lost, and a pool as it was found.

vLLM, its memory pool and the card are pretended (pretend_vllm.py).
"""

import gc
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from card import CARD, gpu
from pretend_vllm import FakeLLM, Machine
from small_models import load_model, with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import NEEDS_VLLM

from lowmem_grpo.config.loading import EngineSettings
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.choice import EngineChoice, EngineKeeper, living
from lowmem_grpo.engines.token_step import StepBuffers
from lowmem_grpo.engines.vllm import engine as vllm_engine
from lowmem_grpo.engines.vllm import process_state as vllm_pool
from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.installed import import_plugin
from lowmem_grpo.engines.vllm.process_state import PROCESS
from lowmem_grpo.engines.vllm.settings import least_kv_bytes
from lowmem_grpo.memory import oom
from lowmem_grpo.memory.oom import MemoryExhaustedError, OutOfMemory, RunMemory
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.trainer.run_memory import follow_plan
from lowmem_grpo.types import Rollout

CONTEXT = 256
PARAMS = SamplingParams(n=2, max_tokens=3)
PROMPTS = [[5, 6], [7, 8, 9], [10]]
SEEN = [True, False]  # whether the driver says how much is free; else something else takes it meanwhile


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(with_adapter(load_model("tiny")))


@pytest.fixture
def unit(policy: Policy) -> int:
    """Bytes of one sequence of the longest length."""
    return least_kv_bytes(policy, CONTEXT)


@pytest.fixture
def eight(unit: int) -> EngineSettings:
    """A cache of eight sequences."""
    return EngineSettings(kv_cache_bytes=8 * unit)


@pytest.fixture(params=["discards", *(pytest.param(kind, marks=pytest.mark.slow)
                                      for kind in ("tracks", "rolls back", "neither"))])
def machine(request: pytest.FixtureRequest, unit: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A card with room for twenty of the longest sequences, of which nothing is in use at the end."""
    made = Machine(20 * unit, request.param)
    monkeypatch.setattr(vllm_engine, "import_plugin", lambda: made)
    monkeypatch.setattr(vllm_engine, "free", made.empty_caches)
    monkeypatch.setattr(vllm_engine, "SPARE", unit // 2)
    monkeypatch.setattr(vllm_settings, "free_bytes", lambda device: made.card.free)
    monkeypatch.setattr(vllm_settings, "on_card", lambda policy: True)
    monkeypatch.setattr(vllm_settings, "write_config", lambda *_: None)  # nobody reads it
    monkeypatch.setattr(PROCESS, "engine", None)
    monkeypatch.setattr(PROCESS, "clean", True)
    for name, owner in ((vllm_pool.ALLOCATOR, SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=made.pool),
                                                               create_and_map=made.pool.create_and_map)),
                        (vllm_pool.EXTENSION, made.pool)):
        module = ModuleType(name)
        module.__dict__.update({key: getattr(owner, key) for key in dir(owner) if not key.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    if (engine := living()) is not None:
        engine.close()
    assert (made.card.pool, made.card.lost) == (0, 0)


any_pool = pytest.mark.parametrize("machine", ["discards"], indirect=True)  # of tests to which its kind does not matter


@pytest.fixture
def engine(machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int) -> VLLMEngine:
    """Its cache holds eight sequences."""
    return VLLMEngine(policy, tokenizer, CONTEXT, EngineSettings(kv_cache_bytes=8 * unit, max_num_seqs=16))


def blind(machine: Machine, monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """Let the driver say nothing, so that vLLM finds out by itself, where not `seen`."""
    if not seen:
        monkeypatch.setattr(vllm_settings, "free_bytes", lambda device: None)


def all_sampled(groups: list[list[Rollout]]) -> bool:
    return [[rollout.completion_ids for rollout in group] for group in groups] == [
        [[prompt[-1]] * 3] * 2 for prompt in PROMPTS]


@pytest.mark.parametrize(("machine", "left", "stays"),
                         [("discards", 17, True), ("discards", 16, False), ("tracks", 17, False)], indirect=["machine"])
def test_what_torch_has_cached_stays_where_the_cache_has_room_beside_it(
    engine: VLLMEngine, machine: Machine, unit: int, left: int, stays: bool
) -> None:
    """Half a sequence must stay free beside a cache of eight. vLLM's own sleep and waking would empty torch's cache."""
    machine.card.cached = cached = machine.card.free - left * unit // 2 + 8 * unit
    for _ in range(2):
        engine.sleep()
        assert machine.card.pool == 0 and machine.card.cached == cached * (machine.pool.kind == "discards")
        engine.wake()
        assert machine.card.cached == cached * stays and engine.kv_bytes == 8 * unit
        machine.card.cached = cached
    assert all_sampled(engine.generate(PROMPTS, PARAMS))


@any_pool
def test_a_vllm_whose_pool_has_other_names_sleeps_by_itself_and_says_so_once(
    engine: VLLMEngine, machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_pool.say_own_sleep.cache_clear()
    monkeypatch.delattr(sys.modules[vllm_pool.ALLOCATOR], "create_and_map")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            engine.sleep()
            assert engine.llm.sleeping and machine.card.pool == 0
            assert all_sampled(engine.generate(PROMPTS, PARAMS)) and not engine.llm.sleeping
    assert len([one for one in caplog.messages if "has no discard or create_and_map here" in one]) == 1


@pytest.mark.parametrize(("trainer", "left", "failures", "seen"),
                         [(13, 4, 1, True), (13, 4, 1, False), (19, 1, 3, False)])
def test_a_cache_that_cannot_wake_is_made_smaller_and_the_run_goes_on(
    engine: VLLMEngine, machine: Machine, unit: int, trainer: int, left: int, failures: int, seen: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    memory = RunMemory()
    memory.watch(engine)
    engine.sleep()
    machine.card.trainer, machine.card.cached = trainer * unit, unit // 2
    blind(machine, monkeypatch, seen)
    with caplog.at_level(logging.WARNING):
        assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert (engine.kv_bytes, machine.caches[-1], memory.rollout.kv_bytes) == (left * unit,) * 3
    assert memory.metrics() == {"memory/oom_train": 0, "memory/oom_generate": failures}
    assert memory.rollout.lowered is None and engine.seqs == 16, "fewer sequences would free nothing"
    lines = [record.getMessage() for record in caplog.records if record.name == oom.__name__]
    assert len(lines) == failures
    mib = unit / 2**20
    assert f"with {4 * mib:.1f} MiB of key-value cache (before: {8 * mib:.1f} MiB)" in lines[0]
    for _ in range(2):  # the run goes on, as it is now
        engine.sleep()
        assert machine.card.pool == 0
        assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert memory.rollout.failures == failures
    resumed = RunMemory()
    resumed.restore(memory.state())
    assert resumed.rollout.kv_bytes == left * unit


@any_pool
def test_memory_that_another_program_takes_between_steps_makes_the_cache_smaller_and_is_named(
    engine: VLLMEngine, machine: Machine, unit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card, memory = machine.card, RunMemory()
    memory.watch(engine)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, card.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: card.trainer + card.cached)
    monkeypatch.setattr(oom, "peak_memory", lambda device: {})
    monkeypatch.setattr(oom, "free", machine.empty_caches)
    monkeypatch.setattr(oom, "UNNOTICED", unit)
    monkeypatch.setattr(vllm_engine, "catch_oom", lambda work, device: oom.catch_oom(work, torch.device("cuda")))
    card.trainer = 2 * unit
    for others, left, failures in ((0, 8, 0), (13 * unit, 4, 1), (13 * unit, 4, 1), (0, 4, 1)):
        card.others = others
        assert all_sampled(engine.generate(PROMPTS, PARAMS))
        assert (engine.kv_bytes, memory.rollout.failures) == (left * unit, failures)
        engine.sleep()
    assert "Other programs hold about" in caplog.text and "nvidia-smi lists them" in caplog.text


@any_pool
def test_a_cache_that_stays_while_training_is_freed_once_training_runs_out_of_memory(
    engine: VLLMEngine, machine: Machine, unit: int
) -> None:
    memory, planned = RunMemory(), SimpleNamespace(sampling_weights=None, sleeps=False)
    follow_plan(engine, memory, cast(MemoryPlan, SimpleNamespace(settings=planned)))
    assert engine.stays and memory.train.spare is not None
    memory.train.lower("a training micro-batch", OutOfMemory("out of memory", None, 0), 64)
    assert (engine.stays, machine.card.pool, memory.train.lowered) == (False, 0, None)
    assert all_sampled(engine.generate(PROMPTS, PARAMS)) and machine.card.pool == 8 * unit
    planned.sleeps = True
    follow_plan(engine, memory, cast(MemoryPlan, SimpleNamespace(settings=planned)))
    assert memory.train.spare is None and not engine.stays


@pytest.mark.parametrize(("wide", "form"), [(12, "16bit"), (13, "4bit")])
def test_waking_asks_for_the_room_of_dequantized_weights_too(
    engine: VLLMEngine, machine: Machine, unit: int, wide: int, form: str
) -> None:
    engine.sleep()
    engine.sampling_weights = "16bit"
    engine.loan.wide = SimpleNamespace(nbytes=wide * unit, drop=lambda: None, fill=lambda: None)  # type: ignore[assignment]
    assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert engine.sampling_weights == form
    assert machine.caches == [8 * unit] * len(machine.made), "the cache stays as it was, as the weights made room"
    assert len(machine.made) == (1 if form == "16bit" else 2)


@pytest.mark.parametrize("seen", SEEN)
def test_a_card_without_room_for_one_sequence_is_an_error_with_advice(
    engine: VLLMEngine, machine: Machine, unit: int, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.bound.advice.settings["rollout"] = ["a shorter max_completion_length"]
    engine.sleep()
    machine.card.trainer = 20 * unit - 1000
    blind(machine, monkeypatch, seen)
    with pytest.raises(MemoryExhaustedError) as caught:
        engine.generate(PROMPTS, PARAMS)
    assert "one sequence of max_seq_length=256 needs" in str(caught.value)
    assert "a shorter max_completion_length" in str(caught.value)
    assert engine.bound.failures == 4
    assert (machine.card.pool, machine.card.lost) == (0, 0)
    engine.close()
    assert PROCESS.engine is None


@pytest.mark.parametrize("seen", SEEN)
def test_each_prompt_is_reported_once_where_a_new_engine_finds_no_room(
    engine: VLLMEngine, machine: Machine, unit: int, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def runs_out() -> None:
        if len(told) == 1 and not machine.card.trainer:
            machine.card.trainer = 17 * unit  # and the new engine's cache does not fit either
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    machine.before_step = runs_out
    blind(machine, monkeypatch, seen)
    found = engine.generate(PROMPTS, PARAMS, lambda prompt, rollouts: told.append(prompt))
    assert all_sampled(found)
    assert sorted(told) == [0, 1, 2]
    assert engine.bound.failures == 2
    assert (engine.seqs, engine.kv_bytes) == (8, 2 * unit)


def test_an_engine_that_fails_to_wake_for_another_reason_is_made_anew(
    engine: VLLMEngine, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sleep()
    broken = engine.llm

    def invalid(*_: Any) -> None:
        raise RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:147")

    broken.wake_up = invalid
    monkeypatch.setattr(sys.modules[vllm_pool.ALLOCATOR], "create_and_map", invalid)
    assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert engine.llm is not broken
    assert engine.bound.failures == 0


@pytest.mark.parametrize("closed", [True, False])
def test_an_engine_that_ends_asleep_without_room_leaves_no_error_to_the_next_one(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, eight: EngineSettings, unit: int, closed: bool
) -> None:
    engine = VLLMEngine(policy, tokenizer, CONTEXT, eight)
    engine.sleep()
    machine.card.trainer = 15 * unit  # room for more than half of it
    if closed:
        engine.close()
    del engine
    gc.collect()
    assert machine.card.pool == 0
    machine.card.trainer = 0
    second = VLLMEngine(policy, tokenizer, CONTEXT, eight)
    assert all_sampled(second.generate(PROMPTS, PARAMS))
    assert machine.pool.resets > 0


def test_an_engine_that_is_made_again_remembers_what_memory_had_room_for(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.engines.choice.import_from_a_thread", lambda: None)
    keeper = EngineKeeper(CONTEXT, EngineChoice("vllm", "a test"),
                          EngineSettings(kv_cache_bytes=8 * unit, max_num_seqs=16))
    first = keeper.engine(policy, tokenizer)
    first.sleep()
    machine.card.trainer = 15 * unit
    first.generate(PROMPTS, PARAMS)
    keeper.close()
    keeper.engine(policy, tokenizer)
    assert [size // unit for size in machine.caches] == [8, 4, 4]


def test_a_start_that_finds_no_room_takes_a_smaller_cache(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, eight: EngineSettings, unit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.card.trainer = 15 * unit
    with pytest.raises(ValueError, match="are free on the card"):
        VLLMEngine(policy, tokenizer, CONTEXT, eight)  # what was asked for by name is no shortage
    blind(machine, monkeypatch, False)
    engine = VLLMEngine(policy, tokenizer, CONTEXT, eight)
    assert (engine.kv_bytes, engine.bound.failures) == (4 * unit, 1)


@any_pool
@pytest.mark.parametrize("words", [
    "1 validation error for ModelConfig\n  Value error, cumem allocator is not supported on current platform.",
    "Sleep mode is not supported on current platform.", "cumem allocator is not available",
])
def test_without_a_pool_the_cache_stays_on_the_card_and_the_log_says_so(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, eight: EngineSettings, unit: int, words: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    plain = machine.LLM

    def refuses(folder: str, **options: Any) -> FakeLLM:
        if options["enable_sleep_mode"]:
            raise ValueError(words)
        return plain(folder, **options)

    monkeypatch.setattr(machine, "LLM", refuses)
    engine = VLLMEngine(policy, tokenizer, CONTEXT, eight)
    engine.sleep()
    assert (engine.asleep, engine.kv_bytes) == (False, 8 * unit)
    assert all_sampled(engine.generate(PROMPTS, PARAMS))
    engine.restart()
    (line,) = [record.getMessage() for record in caplog.records if record.name == vllm_engine.__name__]
    assert "no memory pool" in line and "9.0 MiB stays on the card while training" in line


@any_pool
def test_an_engine_decodes_what_a_run_samples_or_what_was_asked_for(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int
) -> None:
    for most, sampled, seqs in ((None, 6, 6), (None, 600, 16), (None, None, 16), (40, None, 40), (3, 6, 3)):
        engine = VLLMEngine(policy, tokenizer, CONTEXT, EngineSettings(kv_cache_bytes=8 * unit, max_num_seqs=most),
                            sampled)
        assert machine.made[-1]["max_num_seqs"] == seqs
        engine.expect(2)
        assert all_sampled(engine.generate(PROMPTS, PARAMS)), "more than fit at once wait"
        assert machine.made[-1]["max_num_seqs"] == seqs
        engine.expect(9)
        engine.generate(PROMPTS, PARAMS)
        assert machine.made[-1]["max_num_seqs"] == (max(seqs, 9) if most is None else seqs)
        engine.close()


def test_only_records_of_what_torch_does_not_hold_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": 7}])
    allocator = SimpleNamespace(pointer_to_data={7: "mapped", 8: "never mapped"})
    vllm_pool.drop_records_of_failures(allocator)
    assert allocator.pointer_to_data == {7: "mapped"}


def test_a_build_without_a_pool_can_close_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, vllm_pool.EXTENSION, None)
    vllm_pool.reset_pool()


def test_an_engine_that_ends_drops_workspaces_that_would_stop_the_next_ones_graphs(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would not record another engine's graphs: "use_count > 0 INTERNAL ASSERT FAILED", seen on an H100."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(torch._C, vllm_pool.CLEAR, lambda: done.append("dropped"), raising=False)
    of_our_own = StepBuffers(1, 8, torch.device("cpu"))  # of another model, whose graphs may read such a workspace
    of_our_own.graphs[1, 8] = lambda: torch.zeros(1)
    engine.close()
    assert done[:2] == ["waited", "dropped"] and not of_our_own.graphs


@gpu
def test_torch_has_the_call_that_drops_workspaces() -> None:
    assert callable(getattr(torch._C, vllm_pool.CLEAR))
    product = torch.ones(64, 64, device=CARD) @ torch.ones(64, 64, device=CARD)
    before = torch.cuda.memory_allocated()
    vllm_pool.drop_workspaces()
    assert torch.cuda.memory_allocated() < before
    assert (torch.ones(64, 64, device=CARD) @ product).isfinite().all()


@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_the_names_of_the_pool_are_where_they_are_used() -> None:
    """Of vLLM 0.32; only builds for cards have the extension itself."""
    import_plugin()
    module = importlib.import_module(vllm_pool.ALLOCATOR)
    allocator = module.CuMemAllocator
    assert allocator.instance is None
    assert callable(allocator.release_pools)
    assert hasattr(module, "cumem_available")
    assert allocator().pointer_to_data == {}  # its constructor touches no card
    assert {"get_instance", "use_memory_pool"} <= set(dir(allocator))
    data = importlib.import_module("vllm.device_allocator").AllocationData
    assert {"handle", "tag", "is_asleep"} <= set(data.__dataclass_fields__)
    assert callable(module.create_and_map) and callable(allocator.discard)
    source = Path(str(importlib.import_module(vllm_pool.ALLOCATOR).__file__)).read_text()
    assert f"from {vllm_pool.EXTENSION} import" in source


@gpu
@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_the_call_that_resets_the_pool_forgets_its_error() -> None:
    import_plugin()
    extension = importlib.import_module(vllm_pool.EXTENSION)
    with pytest.raises(RuntimeError, match="CUDA Error"):
        extension.python_unmap_and_release(0, 0, 0, 0)
    vllm_pool.reset_pool()
    assert torch.ones(3, device=CARD).sum() == 3
