"""vLLM's start options: the model's config without weights, the KV cache size, the sequences decoded together, vLLM's
share of the card, and the tokens per pass."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.vllm.shared_linear import NO_ROUTES
from lowmem_grpo.memory.cards import AUTO, cache_itemsize, in_8_bits, prefill_tokens, sequences_at_once
from lowmem_grpo.memory.families import family_of
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.oom import OutOfMemory, RolloutLimit, RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.utils import size_text

CPU_KV_BYTES = 1 << 30  # default KV cache on the CPU, where no card's memory sets the size
BLOCK = 128  # the most tokens in a cache block, unless the user set more; vLLM leaves one block unused
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no compilation; decoding replays CUDA graphs
BLOCK_ON_CPU = 32  # tokens in a cache block, the fewest that vLLM's CPU attention takes; its default is 128
SHORT = 2048  # context length up to which BLOCK_ON_CPU is used: it makes attention 10% slower at 1,000 tokens
PREFILL_TOKENS = 4096  # the least tokens per pass on the CPU
RESIZABLE_ROPE = {"default", "llama3"}  # rope types whose angles do not depend on the length of the table


class Capacity:
    """The requested sizes, and the limits that memory sets (`bound`, which shrinks whenever memory runs out).

    `max_num_seqs` None takes the `sampled` sequences of a call, as far as the cache has room; `kv_bytes` None takes
    what is free of the card's `utilization` share. One sequence of `max_seq_length` tokens always fits. `block` is the
    user's block size in tokens, if set.
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
        """Sequences to decode together if memory has room: the user's number, else a run's completions per call."""
        if self.given_seqs is not None:
            return self.given_seqs
        return sequences_at_once(self.sampled, self.kv_budget // self.least_cache)

    @property
    def seqs(self) -> int:
        bound = self.bound.under(self.wanted_seqs)
        return self.wanted_seqs if bound is None else bound

    def check(self, policy: Policy) -> None:
        """Raise ValueError if one sequence of `max_seq_length` does not fit in the cache, or the cache exceeds the free
        memory. Once `bound` limits the cache, nothing is checked: a shortage then shrinks it further."""
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
        """Halve the cache, and also the sequences if memory ran out while `sampling`, down to one sequence of
        `max_seq_length`. MemoryExhaustedError if neither can shrink."""
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
    """Return the cache bytes of one sequence of `tokens` tokens, without sliding windows."""
    itemsize = cache_itemsize(cache_dtype, policy.head.weight.dtype.itemsize)
    return ModelShape.from_config(policy.base.config).paged_bytes(tokens, block, itemsize)


def least_kv_bytes(policy: Policy, max_seq_length: int, block: int = BLOCK, cache_dtype: str = AUTO) -> int:
    """Return the bytes of the smallest cache: one sequence of `max_seq_length`, and the block that vLLM never uses."""
    itemsize = cache_itemsize(cache_dtype, policy.head.weight.dtype.itemsize)
    whole = ModelShape.from_config(policy.base.config).paged_block(block, itemsize)
    blocks = -(-max_seq_length // whole) + 1
    return kv_bytes_of(policy, blocks * whole, block, cache_dtype)


def default_kv_bytes(policy: Policy, utilization: float) -> int:
    """Return `utilization` of the card's memory minus what is in use; a fixed size on the CPU. If the process is
    limited to a fraction of the card, `utilization` applies to that fraction, minus what the process itself uses."""
    if policy.device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(policy.device)
    share = torch.cuda.get_per_process_memory_fraction(policy.device)
    used = total - free if share == 1 else torch.cuda.memory_reserved(policy.device)
    return max(0, int(utilization * share * total) - used)


def check_room(device: torch.device, size: int) -> None:
    """Raise OutOfMemoryError if `size` bytes are not free now. Checked before vLLM allocates, as its memory pool cannot
    recover from an allocation that fails half-way."""
    free = free_bytes(device)
    if free is not None and size > free:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes for the key-value cache; "
                                     f"{free:,} are free on the card")


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of the card; None on the CPU, where the operating system manages memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def write_config(policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, folder: Path) -> None:
    """Write the tokenizer and the model's config for vLLM, without its quantization, which the plugin handles."""
    config = policy.base.config
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    values["architectures"] = [type(policy.base).__name__]
    rope = rope_settings(config)
    resizable = {str(settings.get("rope_type")) for settings in rope} <= RESIZABLE_ROPE
    if resizable and values.get("max_position_embeddings"):
        original = [settings.get("original_max_position_embeddings") or 0 for settings in rope]
        # the rows of vLLM's rope table; scaled rope requires more than its original_max_position_embeddings
        values["max_position_embeddings"] = max(max_seq_length, max(original, default=0) + 1)
    row = family_of(config)
    if row is not None and row.attention.stretched:  # vLLM reads this scaling under another name
        (scaling,) = rope
        values["llama_4_scaling"] = {"beta": scaling["llama_4_scaling_beta"],
                                     "original_max_position_embeddings": scaling["original_max_position_embeddings"]}
    type(config).from_dict(values).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rope parameters: one entry, or one per layer type if these differ."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [settings] if "rope_type" in settings else [part for part in settings.values() if isinstance(part, dict)]


def on_card(policy: Policy) -> bool:
    """Return True if the model is on a card, where vLLM can sleep."""
    return policy.device.type == "cuda"


def llm_options(policy: Policy, max_seq_length: int, name: str, capacity: Capacity, eager: bool, sleeps: bool,
                routes: bool = False) -> dict[str, Any]:
    """Return the options of vLLM's `LLM`. `name` is that of our quantization method and loader; with `routes`, vLLM
    returns the experts chosen for each token."""
    cache, sequences, family = capacity.cache, capacity.seqs, family_of(policy.base.config)
    # vLLM caches the states of gated delta nets only with chunked prefill (see `prefill`)
    has_states = family is not None and bool(family.delta_net)
    # the cache alone: vLLM's default share of the card would count the trainer's memory
    share = cache / torch.cuda.mem_get_info(policy.device)[1] if policy.device.type == "cuda" else None
    return {
        "quantization": name, "load_format": name, "dtype": policy.head.weight.dtype, "model_impl": "vllm",
        "max_model_len": max_seq_length, "max_num_seqs": sequences, "kv_cache_memory_bytes": cache,
        "enforce_eager": eager, "compilation_config": None if eager else GRAPHS, "enable_sleep_mode": sleeps,
        "enable_prefix_caching": not has_states, "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm", "disable_log_stats": True,
        **({"enable_return_routed_experts": True} if routes else {}),
        **({"kv_cache_dtype": capacity.cache_dtype} if in_8_bits(capacity.cache_dtype) else {}),
        **({} if share is None else {"gpu_memory_utilization": share}),
        **prefill(policy, max_seq_length, sequences), **block_size(policy, max_seq_length, capacity.block),
    }


def block_size(policy: Policy, max_seq_length: int, asked: int | None) -> dict[str, int]:
    """Return the cache's block size in tokens: the one `asked` for, else vLLM's default, but BLOCK_ON_CPU for short
    contexts on the CPU. Turns reuse only whole blocks of their history, so smaller blocks reuse more."""
    if asked is None and (policy.device.type == "cuda" or max_seq_length > SHORT):
        return {}
    return {"block_size": BLOCK_ON_CPU if asked is None else asked}


def prefill(policy: Policy, max_seq_length: int, sequences: int) -> dict[str, Any]:
    """Return the options for tokens per pass: on a card as many as the memory plan assumes. On the CPU prompts must not
    be chunked: vLLM would rewind the random generator, which CPU generators cannot do."""
    if policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(policy.device).total_memory
        return {"max_num_batched_tokens": prefill_tokens(total, sequences)}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_seq_length, PREFILL_TOKENS)}


def is_eager(policy: Policy, asked: bool | None) -> bool:
    """Return True if vLLM decodes without CUDA graphs: as `asked`, else True on the CPU and for mixtures of experts,
    whose operation reads the tokens per expert on the host. ValueError if graphs are `asked` for such a mixture on a
    card."""
    if asked is False and policy.routed_layers and on_card(policy):
        raise ValueError("enforce_eager is False and the model is a mixture of experts: how many tokens each expert "
                         "has is read on the host, which CUDA graphs cannot. Leave enforce_eager out")
    return bool(not on_card(policy) or policy.routed_layers) if asked is None else asked


def why_no_routes(error: BaseException) -> str:
    """Return vLLM's own reason why it cannot return routes; "" if the error has another cause."""
    lines = [line.strip() for line in str(error).splitlines() if NO_ROUTES in line]
    return lines[0].partition("[type=")[0].strip() if lines else ""
