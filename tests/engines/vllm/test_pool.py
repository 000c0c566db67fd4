"""vLLM's key-value cache that finds no room in waking: a smaller one, nothing lost, and a pool left as it was found.

vLLM, its memory pool and the card are pretended: the pool maps in parts, keeps its last error, and leaks as vLLM's does
where it is used wrongly. The names say what breaks.
"""

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from card import CARD, gpu
from small_models import load_model, with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import NEEDS_VLLM

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.choice import EngineChoice, EngineKeeper
from lowmem_grpo.engines.vllm import capacity as vllm_capacity
from lowmem_grpo.engines.vllm import engine as vllm_engine
from lowmem_grpo.engines.vllm import pool as vllm_pool
from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.engines.vllm.capacity import least_kv_bytes
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.installed import import_plugin
from lowmem_grpo.memory.bounds import MemoryExhaustedError, RunMemory
from lowmem_grpo.memory.cards import Device, device
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.rows import engine_workspace
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.planning.planner import plan
from lowmem_grpo.types import Rollout

CONTEXT, PARTS = 256, 4
WORDS = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"
PARAMS = SamplingParams(n=2, max_tokens=3)
PROMPTS = [[5, 6], [7, 8, 9], [10]]
SEEN = [True, False]  # whether the driver says how much is free; else something else takes it meanwhile


@dataclass
class Card:
    """Bytes of a card, by who has them."""

    total: int
    trainer: int = 0  # what training keeps
    cached: int = 0  # what torch keeps of what training freed
    pool: int = 0  # what vLLM's pool has mapped
    lost: int = 0  # what nobody can give back any more

    @property
    def free(self) -> int:
        return self.total - self.trainer - self.cached - self.pool - self.lost


@dataclass
class Pool:
    """vLLM's pool; `kind` is "tracks" (0.32), "rolls back" or "neither" (others before it)."""

    card: Card
    kind: str
    error: bool = False
    parts: list[list[int]] = field(default_factory=list)  # bytes, and whether they are mapped
    resets: int = 0

    def allocate(self, size: int) -> None:
        """As torch does by the pool; every part is asked for, and an error that was kept stops the first."""
        for _ in range(PARTS):
            if self.error or self.card.free < size // PARTS:
                self.error = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            self.parts.append([size // PARTS, True])
            self.card.pool += size // PARTS

    def wake_up(self) -> None:
        woken = []
        for part in self.parts:
            if self.kind == "tracks" and part[1]:
                continue
            if part[1]:  # its handle is overwritten
                self.card.lost += part[0]
                self.card.pool -= part[0]
                raise RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:147")
            if self.card.free < part[0]:
                for done in woken if self.kind == "rolls back" else ():
                    self.unmap(done)
                raise RuntimeError(WORDS)
            part[1] = True
            self.card.pool += part[0]
            woken.append(part)

    def unmap(self, part: list[int]) -> None:
        if not part[1]:
            raise RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:175")
        part[1] = False
        self.card.pool -= part[0]

    def sleep(self) -> None:
        for part in self.parts:
            if self.kind != "tracks" or part[1]:
                self.unmap(part)

    def release_pools(self) -> None:
        """Free every part, as the pool's end does: a part that sleeps sets the error, and one after that leaks."""
        for size, mapped in self.parts:
            self.card.pool -= size * mapped
            self.card.lost += size * (mapped and self.error)
            self.error = self.error or not mapped
        self.parts = []

    def python_unmap_and_release(self, device: int, size: int, address: int, handle: int) -> None:
        assert (device, size, address) == (0, 0, 0) and handle  # nothing, and a handle that can be read
        self.error, self.resets = False, self.resets + 1
        raise RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:175")


class FakeLLM:
    """As much of vLLM's LLM as the engine uses; completions are the prompt's last token, again and again."""

    def __init__(self, machine: "Machine", options: dict[str, Any]) -> None:
        self.machine, self.options, self.sleeping = machine, options, False
        machine.made.append(options)
        assert not machine.pool.parts, "the allocator can only be used for one instance per process"
        machine.pool.allocate(options["kv_cache_memory_bytes"])
        self.llm_engine = self
        self.engine_core = self
        self.waiting: list[Any] = []

    def enqueue(self, requests: list[Any], settings: list[Any], use_tqdm: bool) -> list[str]:
        assert not self.sleeping
        self.waiting = [(f"{number}-x", request, params)
                        for number, (request, params) in enumerate(zip(requests, settings, strict=True))]
        return [name for name, *_ in self.waiting]

    def step(self) -> list[Any]:
        self.machine.before_step()
        name, request, params = self.waiting[0]
        token, count = request["prompt_token_ids"][-1], params.max_tokens
        del self.waiting[0]
        one = SimpleNamespace(token_ids=[token] * count, finish_reason="length",
                              logprobs=[{token: SimpleNamespace(logprob=-1.0)}] * count)
        return [SimpleNamespace(request_id=name, finished=True, outputs=[one] * params.n)]

    def generate(self, requests: list[Any], settings: list[Any], use_tqdm: bool) -> list[Any]:
        self.enqueue(requests, settings, use_tqdm)
        return [output for _ in requests for output in self.step()]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def reset_prefix_cache(self) -> bool:
        return True

    def is_sleeping(self) -> bool:
        return self.sleeping

    def sleep(self, level: int) -> None:
        if not self.sleeping:
            self.machine.pool.sleep()
            self.sleeping = True

    def wake_up(self) -> None:
        self.machine.wakes += 1
        self.machine.pool.wake_up()
        self.sleeping = False

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert (method, kwargs) == ("sleep", {"level": 1})
        self.machine.pool.sleep()

    def shutdown(self) -> None:
        self.machine.pool.release_pools()


class Machine:
    """A pretended card with a pretended vLLM on it."""

    NAME = "lowmem_grpo"

    def __init__(self, total: int, kind: str) -> None:
        self.card = Card(total)
        self.pool = Pool(self.card, kind)
        self.made: list[dict[str, Any]] = []
        self.wakes = 0
        self.before_step: Callable[[], None] = lambda: None

    def LLM(self, folder: str, **options: Any) -> FakeLLM:  # noqa: N802 - vLLM's name
        return FakeLLM(self, options)

    def SamplingParams(self, **options: Any) -> Any:  # noqa: N802 - vLLM's name
        return SimpleNamespace(**options)

    @contextmanager
    def lending(self, borrowing: Any) -> Iterator[None]:
        yield

    def check_architecture(self, name: str) -> None: ...

    def cleanup_dist_env_and_memory(self) -> None: ...

    def empty_caches(self, device: Any) -> None:
        gc.collect()
        self.card.cached = 0

    @property
    def caches(self) -> list[int]:
        return [options["kv_cache_memory_bytes"] for options in self.made]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(with_adapter(load_model("tiny")))


@pytest.fixture
def unit(policy: Policy) -> int:
    """Bytes of one sequence of the longest length."""
    return least_kv_bytes(policy, CONTEXT)


@pytest.fixture(params=["tracks", "rolls back", "neither"])
def machine(request: pytest.FixtureRequest, unit: int, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A card with room for twenty of the longest sequences."""
    made = Machine(20 * unit, request.param)
    monkeypatch.setattr(vllm_engine, "import_plugin", lambda: made)
    monkeypatch.setattr(vllm_engine, "free", made.empty_caches)
    monkeypatch.setattr(vllm_capacity, "free_bytes", lambda device: made.card.free)
    monkeypatch.setattr(vllm_settings, "on_card", lambda policy: True)
    monkeypatch.setattr(vllm_settings, "write_config", lambda *_: None)  # nobody reads it
    monkeypatch.setattr(VLLMEngine, "living", None)
    monkeypatch.setattr(VLLMEngine, "clean", True)
    for name, owner in ((vllm_pool.ALLOCATOR, SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=made.pool))),
                        (vllm_pool.EXTENSION, made.pool)):
        module = ModuleType(name)
        module.__dict__.update({key: getattr(owner, key) for key in dir(owner) if not key.startswith("__")})
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def engine(machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int) -> Iterator[VLLMEngine]:
    """Its cache holds eight sequences."""
    made = VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=8 * unit, max_num_seqs=16)
    yield made
    made.close()
    assert machine.card.pool == 0


def blind(machine: Machine, monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    """Let the driver say nothing, so that vLLM finds out by itself, where not `seen`."""
    if not seen:
        monkeypatch.setattr(vllm_capacity, "free_bytes", lambda device: None)


def all_sampled(groups: list[list[Rollout]]) -> bool:
    return [[rollout.completion_ids for rollout in group] for group in groups] == [
        [[prompt[-1]] * 3] * 2 for prompt in PROMPTS]


def test_what_torch_has_cached_of_a_step_keeps_the_cache_from_waking(engine: VLLMEngine, machine: Machine) -> None:
    for _ in range(3):
        engine.sleep()
        machine.card.cached = machine.card.free - 1
        assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert engine.bound.failures == 0
    assert len(machine.made) == 1


@pytest.mark.parametrize(("trainer", "left", "failures", "seen"),
                         [(13, 4, 1, True), (13, 4, 1, False), (19, 1, 3, False)])
def test_a_cache_that_cannot_wake_ends_the_run_or_stays_as_large(
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
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == failures
    mib = unit / 2**20
    assert f"with {4 * mib:.1f} MiB of key-value cache (before: {8 * mib:.1f} MiB)" in lines[0]
    assert machine.card.lost == 0
    for _ in range(2):  # the run goes on, as it is now
        engine.sleep()
        assert machine.card.pool == 0
        assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert memory.rollout.failures == failures
    resumed = RunMemory()
    resumed.restore(memory.state())
    assert resumed.rollout.kv_bytes == left * unit


@pytest.mark.parametrize("seen", SEEN)
def test_a_card_without_room_for_one_sequence_is_tried_for_ever_or_says_too_little(
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
    assert VLLMEngine.living is None


@pytest.mark.parametrize("seen", SEEN)
def test_groups_that_were_told_of_are_lost_or_told_of_twice_where_a_new_engine_finds_no_room(
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


def test_sampling_that_runs_out_of_memory_gets_none_of_the_cache_s(engine: VLLMEngine, unit: int, machine: Machine
                                                                   ) -> None:
    left = [3]

    def runs_out() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    machine.before_step = runs_out
    assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert (engine.seqs, engine.kv_bytes, engine.bound.failures) == (2, unit, 3)


def test_an_engine_that_wakes_into_another_error_is_not_made_anew(engine: VLLMEngine, machine: Machine) -> None:
    engine.sleep()
    broken = engine.llm

    def invalid() -> None:
        raise RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:147")

    broken.wake_up = invalid
    assert all_sampled(engine.generate(PROMPTS, PARAMS))
    assert engine.llm is not broken
    assert engine.bound.failures == 0
    assert machine.card.lost == 0


@pytest.mark.parametrize("closed", [True, False])
def test_an_engine_that_ends_asleep_without_room_leaves_an_error_to_the_next_one(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int, closed: bool
) -> None:
    engine = VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=8 * unit)
    engine.sleep()
    machine.card.trainer = 15 * unit  # room for more than half of it
    if closed:
        engine.close()
    del engine
    gc.collect()
    assert machine.card.pool == 0
    machine.card.trainer = 0
    second = VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=8 * unit)
    assert all_sampled(second.generate(PROMPTS, PARAMS))
    second.close()
    assert machine.pool.resets > 0
    assert machine.card.lost == 0


def test_an_engine_that_is_made_again_forgets_what_memory_had_room_for(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.engines.choice.import_from_a_thread", lambda: None)
    keeper = EngineKeeper(CONTEXT, EngineChoice("vllm", "a test"))
    keeper.settings = SimpleNamespace(gpu_memory_utilization=0.5, kv_cache_bytes=8 * unit, max_num_seqs=16,
                                      enforce_eager=None, sampling_weights=None)
    first = keeper.engine(policy, tokenizer)
    first.sleep()
    machine.card.trainer = 15 * unit
    first.generate(PROMPTS, PARAMS)
    keeper.close()
    keeper.engine(policy, tokenizer)
    assert [size // unit for size in machine.caches] == [8, 4, 4]
    keeper.close()


def test_a_start_that_finds_no_room_is_an_error_where_a_smaller_cache_would_do(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.card.trainer = 15 * unit
    with pytest.raises(ValueError, match="are free on the card"):
        VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=8 * unit)  # what was asked for by name is no shortage
    blind(machine, monkeypatch, False)
    engine = VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=8 * unit)
    assert (engine.kv_bytes, engine.bound.failures) == (4 * unit, 1)
    engine.close()
    assert machine.card.lost == 0


@pytest.mark.parametrize("words", [
    "1 validation error for ModelConfig\n  Value error, cumem allocator is not supported on current platform.",
    "Sleep mode is not supported on current platform.", "cumem allocator is not available",
])
def test_a_driver_without_a_pool_ends_the_run_or_the_cache_is_said_to_be_freed(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int, words: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    if machine.pool.kind != "tracks":
        pytest.skip("without a pool its kind does not matter")
    plain = machine.LLM

    def refuses(folder: str, **options: Any) -> FakeLLM:
        if options["enable_sleep_mode"]:
            raise ValueError(words)
        return plain(folder, **options)

    monkeypatch.setattr(machine, "LLM", refuses)
    engine = VLLMEngine(policy, tokenizer, CONTEXT, kv_cache_bytes=8 * unit)
    engine.sleep()
    assert (engine.asleep, engine.kv_bytes) == (False, 8 * unit)
    assert all_sampled(engine.generate(PROMPTS, PARAMS))
    engine.restart()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no memory pool" in line and "9.0 MiB stays on the card while training" in line
    engine.close()
    kept, freed = (build_plan(sleeps=sleeps) for sleeps in (False, True))
    assert kept.train - freed.train == kept.kv_bytes > 0
    assert kept.rollout == freed.rollout


def build_plan(**changes: Any) -> Any:
    return plan(named_config("qwen2.5-3b"), RunSettings(1024, max_tokens=1024, mlp_tile=512, chunk_rows=64,
                                                        optim="adamw_8bit", host_embedding=False, **changes),
                device("24GiB"))


def test_an_engine_decodes_more_than_a_run_samples_or_less_than_was_asked_for(
    machine: Machine, policy: Policy, tokenizer: PreTrainedTokenizerBase, unit: int
) -> None:
    if machine.pool.kind != "tracks":
        pytest.skip("the pool does not matter")
    given = {"kv_cache_bytes": 8 * unit}
    for options, seqs in (({"sampled": 6}, 6), ({"sampled": 600}, 16), ({}, 16), ({"max_num_seqs": 40}, 40),
                          ({"max_num_seqs": 3, "sampled": 6}, 3)):
        engine = VLLMEngine(policy, tokenizer, CONTEXT, **given, **options)
        assert machine.made[-1]["max_num_seqs"] == seqs
        engine.expect(2)
        assert all_sampled(engine.generate(PROMPTS, PARAMS)), "more than fit at once wait"
        assert machine.made[-1]["max_num_seqs"] == seqs
        engine.expect(9)
        engine.generate(PROMPTS, PARAMS)
        assert machine.made[-1]["max_num_seqs"] == (seqs if "max_num_seqs" in options else max(seqs, 9))
        engine.close()


@pytest.mark.parametrize(("gib", "sequences", "tokens"), [
    (15, 64, 2048), (16, 64, 2048), (22.5, 64, 4096), (24, 64, 4096), (32, 64, 8192), (141, 64, 8192), (15, 3000, 3000),
])
def test_the_plan_counts_other_prefills_than_the_engine_makes(
    gib: float, sequences: int, tokens: int, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(gib * 2**30)
    monkeypatch.setattr(vllm_settings.torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=total))
    card = SimpleNamespace(device=torch.device("cuda:0"))
    assert vllm_settings.prefill(card, 512, sequences) == {"max_num_batched_tokens": tokens}  # type: ignore[arg-type]
    shape, settings = ModelShape.of(named_config("qwen2.5-3b")), RunSettings(30_000, sequences=sequences)
    of_token = engine_workspace(shape, replace(settings, context=2), Device("", total, total)) - engine_workspace(
        shape, replace(settings, context=1), Device("", total, total))
    found = engine_workspace(shape, settings, Device("", total, total))
    assert found == engine_workspace(shape, replace(settings, context=1), Device("", total, total)) + of_token * (
        tokens - 1)


def test_a_build_without_a_pool_cannot_close_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, vllm_pool.EXTENSION, None)
    vllm_pool.reset()


@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_the_pool_s_names_have_moved() -> None:
    """Of vLLM 0.32; the extension itself is only in builds for cards."""
    import_plugin()
    allocator = importlib.import_module(vllm_pool.ALLOCATOR).CuMemAllocator
    assert allocator.instance is None
    assert callable(allocator.release_pools)
    source = Path(str(importlib.import_module(vllm_pool.ALLOCATOR).__file__)).read_text()
    assert f"from {vllm_pool.EXTENSION} import" in source


@gpu
@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_the_pool_s_error_is_not_forgotten_by_the_call_that_is_to() -> None:
    import_plugin()
    extension = importlib.import_module(vllm_pool.EXTENSION)
    with pytest.raises(RuntimeError, match="CUDA Error"):
        extension.python_unmap_and_release(0, 0, 0, 0)
    vllm_pool.reset()
    assert torch.ones(3, device=CARD).sum() == 3
