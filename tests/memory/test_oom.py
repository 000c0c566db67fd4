"""Out of memory is told from other errors, frees what it held, and lowers a bound."""

import json
import weakref
from typing import Any

import pytest
import torch
from memory import WORDS

from lowmem_grpo.memory import oom

CPU = torch.device("cpu")


@pytest.mark.parametrize("words", [
    "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139",
    "the worker failed: CUDA Error: out of memory at ../csrc/cumem_allocator.cpp:62\nmore",
    "captures_underway.empty() INTERNAL ASSERT FAILED at \"/pytorch/c10/cuda/CUDACachingAllocator.cpp\":3190",
])
def test_words_of_vllm_and_of_a_recorded_graph_for_out_of_memory_are_recognised(words: str) -> None:
    assert oom.is_out_of_memory(RuntimeError(words))
    assert not oom.is_out_of_memory(ValueError(words))


def test_a_failed_allocation_of_torch_is_recognised() -> None:
    failed = oom.catch_oom(lambda: torch.empty(2**58, dtype=torch.uint8), CPU)
    assert isinstance(failed, oom.OutOfMemory)
    assert failed.asked == 2**58
    assert failed.peak > 0


def test_tensors_of_the_failed_attempt_are_freed_before_the_next_one() -> None:
    held: list[Any] = []

    def attempt() -> None:
        big = torch.zeros(1000)
        held.append(weakref.ref(big))
        ring: list[Any] = [big]
        ring.append(ring)  # goes with a garbage collection alone
        raise torch.OutOfMemoryError(WORDS)

    failed = oom.catch_oom(attempt, CPU)
    assert isinstance(failed, oom.OutOfMemory)
    assert failed.asked == 20 * 2**20
    assert held[0]() is None


def test_a_bound_is_halved_until_it_splits_the_largest() -> None:
    assert oom.smaller(4096, [3000, 500]) == 2048
    assert oom.smaller(16384, [3000]) == 2048  # 8192 and 4096 would change nothing
    assert oom.smaller(5, [2]) == 1
    assert oom.smaller(4096, []) is None


def test_a_checkpoint_never_raises_a_bound() -> None:
    memory = oom.RunMemory()
    memory.train.lowered = 100
    older = {"train": {"lowered": 400, "failures": 2}, "rollout": {"lowered": None, "failures": 0}}
    memory.restore(json.loads(json.dumps(older)))
    assert memory.rollout.kv_bytes is None
    for held, saved, kept in ((None, 300, 300), (200, 300, 200), (300, 200, 200), (300, None, 300)):
        memory.rollout.kv_bytes = held
        memory.restore(older | {"rollout": {"lowered": None, "failures": 0, "kv_bytes": saved}})
        assert memory.rollout.kv_bytes == kept
    assert (memory.train.lowered, memory.train.failures) == (100, 2)
    assert memory.train.under(50) == 50
    assert memory.train.under(None) == 100
    assert memory.rollout.under(None) is None


@pytest.mark.parametrize(("held", "said"), [(5, "Other programs hold about 5.00 GiB of this card"), (1, "")])
def test_what_other_programs_hold_of_a_card_is_said_in_place_of_a_row_of_the_plan(
    held: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A card of 24 GiB, 10 of them torch's here and none free for the 20 MiB that were asked for."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((14 - held) << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 << 30)
    monkeypatch.setattr(oom, "peak_memory", lambda device: {"memory/peak_bytes": 1})
    found = oom.shortage_of(torch.OutOfMemoryError(WORDS), torch.device("cuda"))
    oom.BatchLimit("train", "tokens").lower("a test", found, 50)
    assert (said in caplog.text) and ("Other programs" in caplog.text) == bool(said)
    with pytest.raises(oom.MemoryExhaustedError) as caught:
        oom.BatchLimit("train", "tokens").lower("a test", found, None)
    assert (said in str(caught.value)) and ("Other programs" in str(caught.value)) == bool(said)


def test_exhausted_memory_is_not_a_shortage_again() -> None:
    with pytest.raises(oom.MemoryExhaustedError) as caught:
        shortage = oom.OutOfMemory("DefaultCPUAllocator: can't allocate memory", 1, 1)
        oom.BatchLimit("train", "tokens").lower("a test", shortage, None)
    assert not oom.is_out_of_memory(caught.value)


def test_what_another_phase_keeps_is_given_back_before_less_is_done_at_once() -> None:
    gone: list[int] = []
    bound = oom.BatchLimit("train", "tokens", spare=lambda: gone.append(1))
    shortage = oom.OutOfMemory("CUDA out of memory", None, 0)
    bound.lower("a micro-batch", shortage, None)
    assert (gone, bound.lowered, bound.failures) == ([1], None, 1)
    bound.lower("a micro-batch", shortage, 512)
    assert (gone, bound.lowered, bound.failures) == ([1], 512, 2)
