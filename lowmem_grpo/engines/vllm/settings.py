"""What vLLM is told when it starts: the model's config without weights, and the bytes of its key-value cache."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.vllm.lent_layers import BorrowError
from lowmem_grpo.memory.cards import prefill_tokens
from lowmem_grpo.models.policy import Policy

CPU_KV_BYTES = 1 << 30  # of the key-value cache on the CPU, where no card's memory says how much
PREFILL_TOKENS = 4096  # read in one pass on the CPU, at least
BLOCK = 128  # tokens of a block of the cache at most; one block is never used
RESIZABLE_ROPE = {"default", "llama3"}  # whose angles do not depend on the length of the table


def write_config(policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, folder: Path) -> None:
    """The model's config as vLLM reads it (without the quantization, which is ours to do), and the tokenizer."""
    config = policy.base.config
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    values["architectures"] = [type(policy.base).__name__]
    if rope_types(config) <= RESIZABLE_ROPE and values.get("max_position_embeddings"):
        values["max_position_embeddings"] = max(max_seq_length, longest_original(config))  # rows of vLLM's rope table
    type(config).from_dict(values).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """The rope parameters, of each kind of layer where these differ."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [part for part in found.values() if isinstance(part, dict)]


def rope_types(config: Any) -> set[str]:
    return {str(settings.get("rope_type")) for settings in rope_settings(config)}


def longest_original(config: Any) -> int:
    """The context that scaled rope parameters refer to; a config with less would contradict itself."""
    found = [settings.get("original_max_position_embeddings") or 0 for settings in rope_settings(config)]
    return max(found, default=0) + 1


def on_card(policy: Policy) -> bool:
    """Whether the engine is on a card, where it can sleep."""
    return policy.device.type == "cuda"


def kv_bytes_of(policy: Policy, tokens: int) -> int:
    """Bytes of keys and values of one sequence of `tokens` tokens, without sliding windows."""
    config = policy.base.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * policy.head.weight.dtype.itemsize * tokens


def least_kv_bytes(policy: Policy, max_seq_length: int) -> int:
    """Bytes of the smallest cache: that of one sequence of the longest length."""
    blocks = -(-max_seq_length // BLOCK) + 1
    return kv_bytes_of(policy, blocks * BLOCK)


def check_kv_budget(policy: Policy, budget: int, max_seq_length: int) -> None:
    """Raise ValueError where one sequence of the longest length does not fit, or the budget is more than there is."""
    needed = least_kv_bytes(policy, max_seq_length)
    if budget < needed:
        raise ValueError(
            f"the key-value cache has {budget:,} bytes; one sequence of max_seq_length={max_seq_length} needs "
            f"{needed:,}. Raise gpu_memory_utilization or kv_cache_bytes, or lower max_seq_length"
        )
    free = free_bytes(policy.device)
    if free is not None and budget > free:
        raise ValueError(f"the key-value cache shall have {budget:,} bytes, and {free:,} are free on the card. "
                         "Lower gpu_memory_utilization or kv_cache_bytes")


def free_bytes(device: torch.device) -> int | None:
    """What nobody holds of the card; None on the CPU, where the system sees to it."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def check_room(device: torch.device, size: int) -> None:
    """Raise OutOfMemoryError where a cache of so many bytes cannot be had now: before vLLM has tried, which would stop
    half-way, and whose pool has no way back from there."""
    free = free_bytes(device)
    if free is not None and size > free:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes for the key-value cache; "
                                     f"{free:,} are free on the card")


def default_kv_bytes(policy: Policy, utilization: float) -> int:
    """What `utilization` of the card leaves beside what is in use; a fixed size on the CPU."""
    if policy.device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(policy.device)
    return max(0, int(utilization * total) - (total - free))


def memory_share(policy: Policy, budget: int) -> dict[str, float]:
    """The share of the card that vLLM may ask for. It looks whether so much is free, also where the cache has a size:
    its own default would count what the trainer holds."""
    if policy.device.type != "cuda":
        return {}
    return {"gpu_memory_utilization": budget / torch.cuda.mem_get_info(policy.device)[1]}


def explain(error: BaseException, policy: Policy) -> None:
    """Add to vLLM's own words, where it does not start, what was tried and what to do; ours say it already."""
    if isinstance(error, Exception) and not isinstance(error, BorrowError):
        error.add_note(f"vLLM did not start with {type(policy.base).__name__} and these settings. Change them, or "
                       'sample with fast_inference="transformers"')


def prefill(policy: Policy, max_seq_length: int, sequences: int) -> dict[str, Any]:
    """Tokens that are read in one pass: on a card those that the plan counts. On the CPU a prompt is never cut: vLLM
    takes a half-read prompt's random numbers back, which a generator of the CPU cannot do, so that a call with a seed
    would fail."""
    if policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(policy.device).total_memory
        return {"max_num_batched_tokens": prefill_tokens(total, sequences)}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_seq_length, PREFILL_TOKENS)}
