"""A pretended card with a pretended vLLM on it. Its memory pool maps in parts, keeps its last error, and leaks memory
where it is used wrongly, as vLLM's own does."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

PARTS = 4  # of the pool
WORDS = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"


@dataclass
class Card:
    """Bytes of a card, by who has them."""

    total: int
    trainer: int = 0  # what training keeps
    cached: int = 0  # what torch keeps of what training freed
    pool: int = 0  # what vLLM's pool has mapped
    lost: int = 0  # what nobody can give back any more
    others: int = 0  # what other programs have

    @property
    def free(self) -> int:
        return self.total - self.trainer - self.cached - self.pool - self.lost - self.others


@dataclass
class Segment:
    """The pool's record of a part."""

    handle: list[int]
    is_asleep: bool = False


@dataclass
class Pool:
    """vLLM's pool; `kind` is "discards" (0.32), and before it "tracks", "rolls back" or "neither"."""

    card: Card
    kind: str
    error: bool = False
    parts: list[list[int]] = field(default_factory=list)  # bytes, and whether they are mapped
    resets: int = 0
    pointer_to_data: dict[int, "Segment"] = field(default_factory=dict)  # by address

    def allocate(self, size: int) -> None:
        """As torch does by the pool; every part is asked for, and an error that was kept stops the first."""
        for number in range(PARTS):
            part = [size // PARTS, True]
            self.pointer_to_data[number] = Segment(part)  # before it is mapped; nothing drops it where that fails
            if self.error or self.card.free < size // PARTS:
                self.error = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            self.parts.append(part)
            self.card.pool += size // PARTS

    def wake_up(self) -> None:
        woken = []
        for part in self.parts:
            if self.kind in ("discards", "tracks") and part[1]:
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
            if self.kind not in ("discards", "tracks") or part[1]:
                self.unmap(part)

    def __getattr__(self, name: str) -> Any:
        if name == "discard" and self.kind == "discards":
            return self.discards
        raise AttributeError(name)

    def discards(self, tags: tuple[str, ...]) -> None:
        assert tags == ("kv_cache", "sampling_weights")
        for segment in self.pointer_to_data.values():
            if not segment.is_asleep:
                self.unmap(segment.handle)
                segment.is_asleep = True

    def create_and_map(self, part: list[int]) -> None:
        assert not part[1]
        if self.card.free < part[0]:
            raise RuntimeError(WORDS)
        part[1] = True
        self.card.pool += part[0]

    def release_pools(self) -> None:
        """Free every part, as the pool's end does: a part that sleeps sets the error, and one after that leaks."""
        for size, mapped in self.parts:
            self.card.pool -= size * mapped
            self.card.lost += size * (mapped and self.error)
            self.error = self.error or not mapped
        for number in range(len(self.parts)):
            del self.pointer_to_data[number]
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
        assert not machine.pool.pointer_to_data, "CuMem allocator can only be used for one instance per process."
        machine.pool.allocate(options["kv_cache_memory_bytes"])
        self.llm_engine = self
        self.engine_core = self.scheduler = self
        self.waiting: list[Any] = []

    def enqueue(self, requests: list[Any], settings: list[Any], use_tqdm: bool) -> list[str]:
        assert not self.sleeping and all(mapped for _, mapped in self.machine.pool.parts)
        self.waiting = [(f"{number}-x", request, params)
                        for number, (request, params) in enumerate(zip(requests, settings, strict=True))]
        return [name for name, *_ in self.waiting]

    def step(self) -> list[Any]:
        self.machine.before_step()
        name, request, params = self.waiting[0]
        token, count = request["prompt_token_ids"][-1], params.max_tokens
        del self.waiting[0]
        one = SimpleNamespace(token_ids=[token] * count, finish_reason="length",
                              logprobs=SimpleNamespace(start_indices=range(count), logprobs=[-1.0] * count))
        return [SimpleNamespace(request_id=name, finished=True, outputs=[one] * params.n)]

    def get_request_counts(self) -> tuple[int, int]:
        return 0, len(self.waiting)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def reset_prefix_cache(self) -> bool:
        return True

    def is_sleeping(self) -> bool:
        return self.sleeping

    def sleep(self, level: int) -> None:
        if not self.sleeping:
            self.machine.pool.sleep()
            self.machine.empty_caches(None)
            self.sleeping = True

    def wake_up(self) -> None:
        self.machine.empty_caches(None)
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
