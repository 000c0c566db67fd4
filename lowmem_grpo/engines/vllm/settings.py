"""What vLLM is told when it starts: the model's config without weights, its share of the card, the tokens of a pass."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.vllm.capacity import Capacity
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError
from lowmem_grpo.engines.vllm.shared_linear import NO_ROUTES, BorrowError
from lowmem_grpo.memory.cards import in_8_bits, prefill_tokens
from lowmem_grpo.memory.families import family_of
from lowmem_grpo.models.policy import Policy

NOT_STARTED = "vLLM did not start"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no compilation; decoding replays CUDA graphs
BLOCK_ON_CPU = 32  # tokens of a block of the cache, the fewest that vLLM's attention for CPUs takes; its default is 128
SHORT = 2048  # tokens of a context up to which these are used: at 1,000 tokens attention is a tenth slower with them
PREFILL_TOKENS = 4096  # read in one pass on the CPU, at least
RESIZABLE_ROPE = {"default", "llama3"}  # kinds whose angles do not depend on the length of the table


def write_config(policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, folder: Path) -> None:
    """Write the tokenizer, and the model's config as vLLM reads it: without the quantization, which we handle."""
    config = policy.base.config
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    values["architectures"] = [type(policy.base).__name__]
    rope = rope_settings(config)
    resizable = {str(settings.get("rope_type")) for settings in rope} <= RESIZABLE_ROPE
    if resizable and values.get("max_position_embeddings"):
        original = [settings.get("original_max_position_embeddings") or 0 for settings in rope]
        # rows of vLLM's table of angles; a config with fewer than scaled rope refers to would contradict itself
        values["max_position_embeddings"] = max(max_seq_length, max(original, default=0) + 1)
    row = family_of(config)
    if row is not None and row.attention.stretched:  # vLLM reads it under another name
        (scaling,) = rope
        values["llama_4_scaling"] = {"beta": scaling["llama_4_scaling_beta"],
                                     "original_max_position_embeddings": scaling["original_max_position_embeddings"]}
    type(config).from_dict(values).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """The rope parameters; one entry for each kind of layer where these differ."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [settings] if "rope_type" in settings else [part for part in settings.values() if isinstance(part, dict)]


def on_card(policy: Policy) -> bool:
    """Return whether the engine is on a card, where it can sleep."""
    return policy.device.type == "cuda"


def llm_options(policy: Policy, max_seq_length: int, name: str, capacity: Capacity, eager: bool, sleeps: bool,
                routes: bool = False) -> dict[str, Any]:
    """The options of vLLM's `LLM`. `name` is that of our quantization method and loader; `routes`: whether vLLM returns
    which experts tokens took."""
    cache, sequences = capacity.cache, capacity.seqs
    return {
        "quantization": name, "load_format": name, "dtype": policy.head.weight.dtype, "model_impl": "vllm",
        "max_model_len": max_seq_length, "max_num_seqs": sequences, "kv_cache_memory_bytes": cache,
        "enforce_eager": eager, "compilation_config": None if eager else GRAPHS, "enable_sleep_mode": sleeps,
        "enable_prefix_caching": not has_states(policy), "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm", "disable_log_stats": True,
        **({"enable_return_routed_experts": True} if routes else {}),
        **({"kv_cache_dtype": capacity.cache_dtype} if in_8_bits(capacity.cache_dtype) else {}),
        **memory_share(policy, cache), **prefill(policy, max_seq_length, sequences),
        **block_size(policy, max_seq_length, capacity.block),
    }


def memory_share(policy: Policy, budget: int) -> dict[str, float]:
    """The share of the card that vLLM may ask for; its default would count what the trainer holds."""
    if policy.device.type != "cuda":
        return {}
    return {"gpu_memory_utilization": budget / torch.cuda.mem_get_info(policy.device)[1]}


def has_states(policy: Policy) -> bool:
    """Return whether the model has gated delta nets, whose states vLLM keeps only where it may cut prompts (see
    `prefill`)."""
    family = family_of(policy.base.config)
    return family is not None and bool(family.delta_net)


def block_size(policy: Policy, max_seq_length: int, asked: int | None) -> dict[str, int]:
    """Tokens of a block of the cache, vLLM's own unless `asked`. A turn takes whole blocks of its history, so they are
    small on the CPU too, where contexts are short."""
    if asked is None and (policy.device.type == "cuda" or max_seq_length > SHORT):
        return {}
    return {"block_size": BLOCK_ON_CPU if asked is None else asked}


def prefill(policy: Policy, max_seq_length: int, sequences: int) -> dict[str, Any]:
    """Tokens that vLLM reads in one pass: on a card as many as the memory plan counts. On the CPU a prompt must not be
    cut: vLLM would take random numbers back, which a generator of the CPU cannot do."""
    if policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(policy.device).total_memory
        return {"max_num_batched_tokens": prefill_tokens(total, sequences)}
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_seq_length, PREFILL_TOKENS)}


def is_eager(policy: Policy, asked: bool | None) -> bool:
    """Return whether vLLM decodes without CUDA graphs: what is asked for, or else on the CPU, and with a mixture, whose
    operation reads on the host how many tokens each expert has. ValueError where that is asked for with graphs."""
    if asked is False and policy.routed_layers and on_card(policy):
        raise ValueError("enforce_eager is False and the model is a mixture of experts: how many tokens each expert "
                         "has is read on the host, which CUDA graphs cannot. Leave enforce_eager out")
    return bool(not on_card(policy) or policy.routed_layers) if asked is None else asked


def why_no_routes(error: BaseException) -> str:
    """In vLLM's words, why it cannot return routes; "" where it did not start for another reason."""
    lines = [line.strip() for line in str(error).splitlines() if NO_ROUTES in line]
    return lines[0].partition("[type=")[0].strip() if lines else ""


def explain(error: BaseException, policy: Policy) -> None:
    """Add to the message of a failed start of vLLM what was tried and what to do; our own errors say it already."""
    if isinstance(error, Exception) and not isinstance(error, BorrowError):
        error.add_note(f"{NOT_STARTED} with {type(policy.base).__name__} and these settings. Change them, or "
                       'sample with fast_inference="transformers"')


def is_of_start(error: Exception) -> bool:
    """Return whether vLLM could not be used, or did not start: whatever it raised then has a note of `explain`."""
    noted = any(note.startswith(NOT_STARTED) for note in getattr(error, "__notes__", ()))
    return noted or isinstance(error, EngineUnavailableError | BorrowError)
