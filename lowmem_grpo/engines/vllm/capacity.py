"""How much vLLM's engine does at once: the bytes of its key-value cache, and the sequences that it decodes together."""

import torch

from lowmem_grpo.memory.cards import AUTO, cache_itemsize, sequences_at_once
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.oom import OutOfMemory, RolloutLimit, RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.utils import size_text

CPU_KV_BYTES = 1 << 30  # key-value cache on the CPU, where no card's memory sets the size
BLOCK = 128  # tokens in a block of the cache, at most, unless the user gave more; vLLM never uses one of the blocks


class Capacity:
    """The sizes that were asked for, and those that memory had room for (`bound`, which shrinks at each shortage).

    `max_num_seqs` None takes the `sampled` sequences of a call, as far as the cache has room; `kv_bytes` None takes
    what `utilization` of the card leaves. One sequence of `max_seq_length` tokens always fits. `block`: tokens of a
    block, where the user gave them.
    """

    def __init__(self, policy: Policy, max_seq_length: int, kv_bytes: int | None, utilization: float,
                 max_num_seqs: int | None, sampled: int | None, bound: RolloutLimit | None, block: int | None = None,
                 cache_dtype: str = AUTO) -> None:
        self.max_seq_length, self.kv_given = max_seq_length, kv_bytes is not None
        self.kv_budget = default_kv_bytes(policy, utilization) if kv_bytes is None else kv_bytes
        self.given_seqs, self.sampled, self.block = max_num_seqs, sampled, block
        self.cache_dtype = cache_dtype
        self.least_cache = least_kv_bytes(policy, max_seq_length, max(BLOCK, block or 0), cache_dtype)
        self.bound = bound or RunMemory().rollout

    @property
    def cache(self) -> int:
        return max(self.bound.cache_under(self.kv_budget) or 0, self.least_cache)

    @property
    def wanted_seqs(self) -> int:
        """Sequences decoded together if memory has room: the given number, otherwise what a run samples."""
        if self.given_seqs is not None:
            return self.given_seqs
        return sequences_at_once(self.sampled, self.kv_budget // self.least_cache)

    @property
    def seqs(self) -> int:
        bound = self.bound.under(self.wanted_seqs)
        return self.wanted_seqs if bound is None else bound

    def check(self, policy: Policy) -> None:
        """ValueError where one sequence of the longest length does not fit, or the cache has more bytes than are free.
        A cache that was too large before (`bound`) is no error: it is answered like any shortage."""
        if self.bound.kv_bytes is not None:
            return
        if self.kv_budget < self.least_cache:
            raise ValueError(
                f"the key-value cache has {self.kv_budget:,} bytes; one sequence of max_seq_length="
                f"{self.max_seq_length} needs {self.least_cache:,}. Raise gpu_memory_utilization or kv_cache_bytes, "
                "or lower max_seq_length"
            )
        free = free_bytes(policy.device)
        if free is not None and self.kv_budget > free:
            raise ValueError(f"the key-value cache should have {self.kv_budget:,} bytes, but only {free:,} are free on "
                             "the card. Lower gpu_memory_utilization or kv_cache_bytes")

    def lower(self, shortage: OutOfMemory, sampling: bool) -> None:
        """Halve the cache, and the sequences where memory ran out while `sampling`: down to one sequence of the longest
        length. MemoryExhaustedError where neither can be less."""
        before, less = self.cache, max(self.least_cache, self.cache // 2)
        seqs, fewer = self.seqs, max(1, self.seqs // 2) if sampling else self.seqs
        what = f"sampling at most {seqs} at once" if sampling else "making room for vLLM's cache"
        if (less, fewer) == (before, seqs):
            self.bound.raise_exhausted(f"{what} ({size_text(before)}, what one sequence of max_seq_length="
                                       f"{self.max_seq_length} needs)", shortage)
        self.bound.kv_bytes = less
        if sampling:
            self.bound.lowered = fewer
        answer = f"for at most {fewer:,} sequences at once (before: {seqs:,}) and " if sampling else ""
        self.bound.note(what, shortage, f"vLLM is restarted {answer}with {size_text(less)} of key-value cache "
                                        f"(before: {size_text(before)}), and the work is repeated")


def kv_bytes_of(policy: Policy, tokens: int, block: int = BLOCK, cache_dtype: str = AUTO) -> int:
    """Bytes that one sequence of `tokens` tokens takes of the cache, without sliding windows."""
    return ModelShape.from_config(policy.base.config).paged_bytes(tokens, block, itemsize_of(policy, cache_dtype))


def least_kv_bytes(policy: Policy, max_seq_length: int, block: int = BLOCK, cache_dtype: str = AUTO) -> int:
    """Bytes of the smallest cache: that of one sequence of the longest length, and a block that is never used."""
    whole = ModelShape.from_config(policy.base.config).paged_block(block, itemsize_of(policy, cache_dtype))
    blocks = -(-max_seq_length // whole) + 1
    return kv_bytes_of(policy, blocks * whole, block, cache_dtype)


def itemsize_of(policy: Policy, cache_dtype: str) -> int:
    return cache_itemsize(cache_dtype, policy.head.weight.dtype.itemsize)


def default_kv_bytes(policy: Policy, utilization: float) -> int:
    """Return what `utilization` of the card leaves beside what is in use; a fixed size on the CPU. A process that keeps
    to a share of its card takes this part of its share, beside what it uses itself."""
    if policy.device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(policy.device)
    share = torch.cuda.get_per_process_memory_fraction(policy.device)
    used = total - free if share == 1 else torch.cuda.memory_reserved(policy.device)
    return max(0, int(utilization * share * total) - used)


def check_room(device: torch.device, size: int) -> None:
    """Raise OutOfMemoryError where a cache of `size` bytes cannot be had now. We ask before vLLM tries: it would stop
    half-way, and its memory pool has no way back from there."""
    free = free_bytes(device)
    if free is not None and size > free:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes for the key-value cache; "
                                     f"{free:,} are free on the card")


def free_bytes(device: torch.device) -> int | None:
    """Bytes of the card that nobody holds; None on the CPU, where the operating system manages memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
