"""vLLM's start options: the model's config without weights, the form of the weights, the KV cache size, the sequences
decoded together, vLLM's share of the card, and the tokens per pass."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.loading import FOUR, SIXTEEN, EngineSettings, EngineUnavailableError
from lowmem_grpo.engines.vllm.process_state import why_no_pool
from lowmem_grpo.engines.vllm.sampling_weights import aligned, known_of
from lowmem_grpo.engines.vllm.shared_linear import rows_of_a
from lowmem_grpo.engines.vllm.weight_sharing import active_adapter, loras_of
from lowmem_grpo.memory.cards import AUTO, DEFAULT_SHARE, MOST_SEQUENCES, cache_itemsize, in_8_bits, prefill_tokens
from lowmem_grpo.memory.families import family_of
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.oom import OutOfMemory, RolloutLimit, RunMemory
from lowmem_grpo.memory.time_plan import faster_in_16_bit
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.quantized_linear import quantized_linears
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30  # default KV cache on the CPU, where no card's memory sets the size
BLOCK = 128  # the most tokens in a cache block, unless the user set more; vLLM leaves one block unused
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no compilation; decoding replays CUDA graphs
BLOCK_ON_CPU = 32  # tokens in a cache block, the fewest that vLLM's CPU attention takes; its default is 128
SHORT = 2048  # context length up to which BLOCK_ON_CPU is used: it makes attention 10% slower at 1,000 tokens
PREFILL_TOKENS = 4096  # the least tokens per pass on the CPU
NO_ROUTES = "AuxOutput Connector"  # appears in vLLM's error when it cannot return routes
RESIZABLE_ROPE = {"default", "llama3"}  # rope types whose angles do not depend on the length of the table


class Capacity:
    """The requested sizes, and `bound`, the limits that memory sets, which shrink whenever memory runs out.

    If `settings.max_num_seqs` is None, up to `sampled` sequences are decoded together, as far as the cache has room. If
    `kv_cache_bytes` is None, the cache takes what is free of the card's `gpu_memory_utilization` share. One sequence of
    `max_seq_length` always fits.
    """

    def __init__(self, policy: Policy, max_seq_length: int, settings: EngineSettings, sampled: int | None = None,
                 bound: RolloutLimit | None = None) -> None:
        self.policy, self.max_seq_length, self.settings, self.sampled = policy, max_seq_length, settings, sampled
        self.kv_budget = settings.kv_cache_bytes or default_kv_bytes(policy, settings.gpu_memory_utilization)
        self.least_cache = least_kv_bytes(policy, max_seq_length, max(BLOCK, settings.block_size or 0),
                                          settings.kv_cache_dtype)
        self.bound = bound or RunMemory().rollout

    @property
    def cache(self) -> int:
        return max(self.bound.cache_under(self.kv_budget) or 0, self.least_cache)

    @property
    def wanted_seqs(self) -> int:
        """The number of sequences to decode together if memory has room: the user's, or else the completions per call,
        limited to MOST_SEQUENCES and to twice the number of sequences of full length that the cache holds."""
        most = min(self.sampled or MOST_SEQUENCES, MOST_SEQUENCES, 2 * (self.kv_budget // self.least_cache))
        return self.settings.max_num_seqs or max(1, most)

    @property
    def seqs(self) -> int:
        return self.bound.under(self.wanted_seqs) or self.wanted_seqs

    def check(self) -> None:
        """Raise ValueError if one sequence of `max_seq_length` does not fit in the cache, or the cache exceeds the free
        memory. Nothing is checked once `bound` limits the cache, because a shortage then shrinks it further."""
        if self.bound.kv_bytes is not None:
            return
        if self.kv_budget < self.least_cache:
            raise ValueError(
                f"the key-value cache has {self.kv_budget:,} bytes; one sequence of max_seq_length="
                f"{self.max_seq_length} needs {self.least_cache:,}. Raise gpu_memory_utilization or kv_cache_bytes, "
                "or lower max_seq_length"
            )
        free = free_bytes(self.policy.device)
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
    """Return the cache bytes of one sequence of `tokens` tokens, as if no layer had a sliding window."""
    itemsize = cache_itemsize(cache_dtype, policy.dtype.itemsize)
    return ModelShape.from_config(policy.base.config).paged_bytes(tokens, block, itemsize)


def least_kv_bytes(policy: Policy, max_seq_length: int, block: int = BLOCK, cache_dtype: str = AUTO) -> int:
    """Return the bytes of the smallest cache: one sequence of `max_seq_length`, and the block that vLLM never uses."""
    itemsize = cache_itemsize(cache_dtype, policy.dtype.itemsize)
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


def choose_weights(capacity: Capacity, eager: bool) -> tuple[str, int]:
    """Return the form of weights to sample with, and the bytes left for the KV cache. The form is `FOUR`, as the
    weights are stored (4 bits or FP8), or `SIXTEEN`, dequantized.

    Dequantized weights take their room from the cache, unless the user set its size. With CUDA graphs (not `eager`)
    they must lie in vLLM's memory pool. If the user asked for no form, weights are dequantized only on a card, and only
    if `is_worth_widening`. ValueError if the user asked for a form and the model is not quantized,
    EngineUnavailableError if the user asked for 16 bits and the pool cannot be used.
    """
    asked, policy, kept = capacity.settings.sampling_weights, capacity.policy, (FOUR, capacity.kv_budget)
    size, fixed = wide_bytes(policy), capacity.settings.kv_cache_bytes is not None
    check_four_bit(asked, size > 0)
    if asked == FOUR or not size or (asked is None and policy.device.type != "cuda"):
        return kept
    left = capacity.kv_budget if fixed or policy.device.type != "cuda" else capacity.kv_budget - size
    if asked is None and not is_worth_widening(capacity, size, left, fixed):
        return kept
    why = None if eager else why_no_pool()
    if why is None:
        return SIXTEEN, left
    if asked is not None:
        raise EngineUnavailableError(f'sampling_weights="16bit" is not possible: {why}. Leave it out, or load with '
                                     "enforce_eager=True, which needs no fixed addresses")
    logger.warning("sampling with weights in 4 bits, though there is room for 16: %s", why)
    return kept


def is_worth_widening(capacity: Capacity, size: int, left: int, fixed: bool) -> bool:
    """Return True if dequantized weights of `size` bytes fit and, as far as the card's data sheet tells, save enough
    time. If the user set the size of the KV cache (`fixed`), they must fit beside it. Otherwise the `left` bytes must
    hold the cache of all wanted sequences."""
    policy, tokens, sequences = capacity.policy, capacity.max_seq_length, capacity.wanted_seqs
    known = known_of(policy.base, policy.device)
    if known is not None and not faster_in_16_bit(*known[:2], sequences, tokens, known[2]):
        return False
    wanted = sequences * kv_bytes_of(policy, (-(-tokens // BLOCK) + 1) * BLOCK,
                                     cache_dtype=capacity.settings.kv_cache_dtype)
    fits = size + capacity.kv_budget <= free_share(policy.device) if fixed else left >= wanted
    logger.info("sampling with weights in %s: dequantized they take %s, the cache of %d sequences %s",
                "16 bits" if fits else "the form they are held in", size_text(size), sequences, size_text(wanted))
    return fits


def wide_bytes(policy: Policy) -> int:
    """Return the bytes of a model's quantized weights once dequantized to its compute dtype, with LoRA's A; 0 if it has
    none."""
    weights = [weight for _, weight in policy.base.named_parameters() if hasattr(weight, "quant_state")]
    shapes = [w.quant_state.shape for w in weights]
    shapes += [(layer.out_features, layer.in_features) for layer in quantized_linears(policy.base)]
    loras = loras_of(policy.base, active_adapter(policy.base)) if shapes else []
    shapes += [(rows_of_a([lora]), lora.a.shape[1]) for lora in loras]
    return sum(map(aligned, shapes)) * policy.dtype.itemsize


def check_four_bit(asked: str | None, quantized: bool) -> None:
    """Raise ValueError if the user `asked` for a form of weights and the model has no quantized weights."""
    if asked is not None and not quantized:
        raise ValueError(f"sampling_weights is {asked!r} and the model is not in 4 bits or FP8, so there is nothing to "
                         "dequantize. Leave it out, or load with load_in_4bit=True or load_in_fp8=True")


def free_share(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return free - int((1 - DEFAULT_SHARE) * total)


def write_config(policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, folder: Path) -> None:
    """Write the tokenizer and the model's config for vLLM, without its quantization, which the plugin handles."""
    config = policy.base.config
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    values["architectures"] = [type(policy.base).__name__]
    parameters = getattr(config, "rope_parameters", None) or {}  # one entry, or one per layer type if these differ
    rope = [parameters] if "rope_type" in parameters else [
        part for part in parameters.values() if isinstance(part, dict)]
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


def llm_options(capacity: Capacity, name: str, eager: bool, sleeps: bool, routes: bool = False) -> dict[str, Any]:
    """Return the options of `LLM`. `name` is that of our quantization method and our loader. With `routes`, vLLM
    returns the chosen experts too."""
    policy, context, cache_dtype = capacity.policy, capacity.max_seq_length, capacity.settings.kv_cache_dtype
    family = family_of(policy.base.config)
    # vLLM caches the states of gated delta nets only with chunked prefill (see `device_options`)
    has_states = family is not None and bool(family.delta_net)
    return {
        "quantization": name, "load_format": name, "dtype": policy.dtype, "model_impl": "vllm",
        "max_model_len": context, "max_num_seqs": capacity.seqs, "kv_cache_memory_bytes": capacity.cache,
        "enforce_eager": eager, "compilation_config": None if eager else GRAPHS, "enable_sleep_mode": sleeps,
        "enable_prefix_caching": not has_states, "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm", "disable_log_stats": True,
        **({"enable_return_routed_experts": True} if routes else {}),
        **({"kv_cache_dtype": cache_dtype} if in_8_bits(cache_dtype) else {}),
        **device_options(capacity), **block_size(policy.device, context, capacity.settings.block_size),
    }


def device_options(capacity: Capacity) -> dict[str, Any]:
    """Return the options for the card's share and the tokens per pass. On a card, the share covers the cache alone,
    because vLLM's default would count the trainer's memory too; the memory plan sets the tokens. On the CPU prompts are
    not chunked, because vLLM would then rewind the random generator, which CPU generators cannot do."""
    device = capacity.policy.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return {"gpu_memory_utilization": capacity.cache / torch.cuda.mem_get_info(device)[1],
                "max_num_batched_tokens": prefill_tokens(total, capacity.seqs)}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(capacity.max_seq_length, PREFILL_TOKENS)}


def block_size(device: torch.device, max_seq_length: int, asked: int | None) -> dict[str, int]:
    """Return vLLM's option for the cache's block size in tokens: the size `asked` for, else BLOCK_ON_CPU for short
    contexts on the CPU, else no option. Turns reuse only whole blocks of their history: smaller blocks reuse more."""
    if asked is None and (device.type == "cuda" or max_seq_length > SHORT):
        return {}
    return {"block_size": asked or BLOCK_ON_CPU}


def on_card(policy: Policy) -> bool:
    return policy.device.type == "cuda"


def is_eager(policy: Policy, asked: bool | None) -> bool:
    """Return `asked`: True if vLLM decodes without CUDA graphs. If `asked` is None, return True on the CPU and for
    mixtures of experts, which read the tokens per expert on the host. ValueError if `asked` is False for a mixture on a
    card."""
    if asked is False and policy.routed_layers and on_card(policy):
        raise ValueError("enforce_eager is False and the model is a mixture of experts: how many tokens each expert "
                         "has is read on the host, which CUDA graphs cannot. Leave enforce_eager out")
    return bool(not on_card(policy) or policy.routed_layers) if asked is None else asked


def why_no_routes(error: BaseException) -> str:
    """Return vLLM's own reason why it cannot return routes; "" if the error has another cause."""
    lines = [line.strip() for line in str(error).splitlines() if NO_ROUTES in line]
    return lines[0].partition("[type=")[0].strip() if lines else ""
