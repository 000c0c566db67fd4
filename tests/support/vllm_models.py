"""Models and prompts for tests with vLLM's engine: small random ones of every family, in 16, 32 and 4 bits, and small
layers of both sides of a loan."""

import copy
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vllm is imported

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from card import CPU
from card_runs import values_of
from families import family_model
from fp8_weights import dequantized
from nvfp4_weights import rewrite_in_nvfp4
from small_models import HYBRIDS, TINY, scatter, shallow, with_adapter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lowmem_grpo.config.loading import EngineSettings
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.installed import installed
from lowmem_grpo.engines.vllm.shared_linear import LAYERS, borrowed_linear
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.memory.layer_forms import NVFP4
from lowmem_grpo.models.fp8_layers import to_quantize
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.pretrained import Pretrained, fix_frequencies, nf4
from lowmem_grpo.models.quantized_linear import QuantizedLinear
from lowmem_grpo.types import Rollout, RolloutGroup

NEEDS_VLLM = [
    pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason="needs vLLM, which is not installed"),
]
CONTEXT = 512
LONG = [number % 500 + 3 for number in range(300)]  # whole blocks of vLLM's cache, and part of one
SAME = 1e-5  # mean |difference| of log-probabilities in float32
LUCK = 1.3  # by which the errors of two implementations in 16 bits may differ over few tokens
OTHER = 1e-3  # what an adapter that moved changes, at least
GREEDY = SamplingParams(temperature=0, max_tokens=40)
Groups = list[list[Rollout]]
KV_BYTES = 256 << 20
PLAIN = EngineSettings(kv_cache_bytes=KV_BYTES)
# vLLM's attention for CPUs needs heads of a multiple of 32
WIDER: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "initializer_range": 0.02}
HEADS: dict[str, dict[str, Any]] = {
    **{kind: {"head_dim": 32} for kind in ("qwen3", "gemma3_text", "glm4", "ministral3", "exaone4")},
    "phi3": {"original_max_position_embeddings": 24, "rope_parameters": {  # prompts lie on both sides of its window
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 16, "long_factor": [1.0 + place for place in range(16)]}},
    "gemma4_text": {  # few layers and small logits: it rounds more often than others, in both engines alike
        "initializer_range": 0.015, "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 32,
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1},
    "qwen3_5_text": {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                     "rope_parameters": HYBRIDS["Qwen3_5"]["rope_parameters"] | {"mrope_section": [2, 1, 1]}}}
# Large enough for a hundredth of it to have a meaning: vLLM's own tables of angles do not grow with the width.
REAL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
        "vocab_size": 8192, "tie_word_embeddings": True}


def random_model(family: str, **changes: Any) -> PreTrainedModel:
    """A seeded random model of a family, in float32."""
    return family_model(family, **(WIDER | HEADS.get(family, {}) | changes))


def saved_model(family: str, folder: Path, **changes: Any) -> Path:
    """Where the embedded model ("tiny"), two of its layers ("shallow") or a random one lies."""
    if family in ("tiny", "shallow"):
        return TINY if family == "tiny" else shallow()
    random_model(family, **changes).save_pretrained(folder)
    return folder


def policy_of(
    family: str, dtype: torch.dtype, quantized: bool | str, folder: Path, device: torch.device = CPU, **changes: Any
) -> Policy:
    """A policy of a family with an adapter that does nothing yet; linear layers in NF4 with double quantization where
    `quantized` is True, or in a form of FP8 or in NVFP4, as it names."""
    if quantized == NVFP4:
        path = shutil.copytree(saved_model(family, folder / "plain", **changes), folder / "stored")
        rewrite_in_nvfp4(path)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(path)
        stored = Pretrained(str(path), str(path), {}).load(dtype, str(device), NVFP4)[0].eval()
        fix_frequencies(stored, CONTEXT)
        return Policy(with_adapter(stored))
    quantization: Any = nf4(dtype) if quantized is True else to_quantize(str(quantized), dtype)
    model = AutoModelForCausalLM.from_pretrained(
        saved_model(family, folder, **changes), dtype=dtype, device_map={"": str(device)},
        quantization_config=quantization if quantized else None,
    ).eval()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # or bitsandbytes would repack the weights on some CPUs
    fix_frequencies(model, CONTEXT)
    policy = Policy(with_adapter(model.requires_grad_(False)))
    move_adapter(policy, 0.0)
    return policy


def move_adapter(policy: Policy, size: float, seed: int = 1) -> None:
    """Change the adapter in place, as an optimizer does."""
    scatter(policy.model, size, seed)


@contextmanager
def engine_on(policy: Policy, max_seq_length: int = CONTEXT, **options: Any) -> Iterator[VLLMEngine]:
    """An engine that is closed at the end, whatever happens."""
    engine = VLLMEngine(policy, AutoTokenizer.from_pretrained(TINY), max_seq_length, replace(PLAIN, **options))
    try:
        yield engine
    finally:
        engine.close()


def differences(
    policy: Policy, prompts: list[list[int]], groups: list[list[Rollout]], temperature: float = 1.0
) -> Tensor:
    """The trainer's log-probability of each sampled token, minus the sampler's."""
    packed = pack([RolloutGroup({}, *pair) for pair in zip(prompts, groups, strict=True)], 4096, 256)
    batches = [batch.to(policy.device) for batch in packed]
    with torch.no_grad():
        return torch.cat([policy.logprobs(b, temperature)[0] - b.at_trained(b.rollout_logprobs) for b in batches])


def bound_of(policy: Policy, prompts: list[list[int]], groups: Groups) -> float:
    """What the mean |difference| of the sampler from the trainer may be.

    In 16 bits that depends on the family and on the processor: two computations that are each as far from float64 as
    plain transformers, on the same weights and in the same precision, are √2 of that apart where they round
    independently.
    """
    if policy.dtype == torch.float32:
        return SAME
    twin = plain_copy(policy.model)
    rounded = teacher_forced(twin, prompts, groups)
    return LUCK * 2 ** 0.5 * (rounded - teacher_forced(twin.double(), prompts, groups)).abs().mean().item()


def plain_copy(model: nn.Module) -> Any:
    """A copy with plain layers in place of quantized ones, which hold the same values."""
    twin = dequantized(copy.deepcopy(model))
    for path, module in list(twin.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight, plain.bias = nn.Parameter(values_of(module.weight), requires_grad=False), module.bias
            twin.set_submodule(path, plain)
    return twin


@torch.no_grad()
def teacher_forced(model: Any, prompts: list[list[int]], groups: Groups) -> Tensor:
    """The log-probability of each sampled token by plain transformers; completions of a prompt are of one length."""
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt + rollout.completion_ids for rollout in group])
        logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1:-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.append(logits.log_softmax(-1).gather(-1, ids[:, len(prompt):, None]).flatten())
    return torch.cat(found)


def held_by(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its address; what is empty has none."""
    found = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def assert_borrowed(engine: VLLMEngine, policy: Policy) -> int:
    """Every parameter of vLLM's model is the trainer's, or empty; the bytes of its own buffers."""
    (held,) = engine.llm.apply_model(held_by)
    theirs = storages([tensor for _, tensor in held_by(policy.base)])
    parameters = {name: tensor for name, tensor in held if isinstance(tensor, nn.Parameter)}
    assert [name for name, tensor in parameters.items() if not storages([tensor]).keys() <= theirs.keys()] == []
    assert any(tensor.numel() for tensor in parameters.values())
    return sum(size for place, size in storages([tensor for _, tensor in held]).items() if place not in theirs)


def ids_of(groups: Groups) -> list[list[list[int]]]:
    """The token ids of all completions."""
    return [[rollout.completion_ids for rollout in group] for group in groups]


def distance(policy: Policy, prompts: list[list[int]], groups: Groups) -> float:
    """Mean |difference| between the trainer's log-probabilities and the sampler's."""
    return differences(policy, prompts, groups).abs().mean().item()


def states() -> tuple[Any, ...]:
    """The process's random states, and its hook for tracebacks."""
    return (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), sys.excepthook)


def cached_tokens(monkeypatch: pytest.MonkeyPatch, engine: VLLMEngine) -> list[int]:
    """The tokens that vLLM takes from its cache in each of the calls to come."""
    seen: list[int] = []
    enqueue, step = engine.llm.enqueue, engine.llm.llm_engine.step

    def call(*args: Any, **options: Any) -> Any:
        seen.append(0)
        return enqueue(*args, **options)

    def spy() -> Any:
        outputs = step()
        seen[-1] += sum(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(engine.llm, "enqueue", call)
    monkeypatch.setattr(engine.llm.llm_engine, "step", spy)
    return seen


def dying(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """One layer raises at its third call; the names of the layers that did."""
    layer, died, calls = LAYERS["model.layers.1.self_attn.o_proj"], [], []
    forward = layer.forward

    def raising(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            died.append(layer.name)
            raise error
        return forward(x)

    monkeypatch.setattr(layer, "forward", raising)
    return died


PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LAYER = "model.layers.0."
QKV, GATE_UP, OUT = LAYER + "self_attn.qkv_proj", LAYER + "mlp.gate_up_proj", LAYER + "self_attn.o_proj"
MODULES = {QKV: [LAYER + "self_attn." + name for name in PARTS["qkv_proj"]],
           GATE_UP: [LAYER + "mlp." + name for name in PARTS["gate_up_proj"]], OUT: [OUT]}


def inputs(model: Any, layer: str, rows: int = 5) -> Tensor:
    base = model.get_base_model()
    width = base.get_submodule(MODULES[layer][0]).in_features
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(2))
    return x.to(base.get_input_embeddings().weight.dtype)


@torch.no_grad()
def theirs(model: Any, layer: str, x: Tensor) -> Tensor:
    """What the trainer's modules give."""
    return torch.cat([model.get_base_model().get_submodule(path)(x) for path in MODULES[layer]], -1)


def ours(layer: str, x: Tensor) -> Tensor:
    return borrowed_linear(x, LAYERS[layer].out_features, layer)


def close_to(got: Tensor, expected: Tensor) -> None:
    """Equal but for rounding: 1e-5 in float32, 2 units in the last place of the largest value in bfloat16."""
    scale = expected.abs().max().item()
    assert (got.float() - expected.float()).abs().max() <= scale * (1e-5 if got.dtype == torch.float32 else 2 / 128)


def fuse_plain(modules: list[Any]) -> None:
    """Put weights and biases of linear layers into one buffer each."""
    for name in ("weight", "bias"):
        parameters = [getattr(getattr(module, "base_layer", module), name) for module in modules]
        if None not in parameters:
            buffer = torch.cat([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, buffer.split([len(p) for p in parameters]), strict=True):
                parameter.data = part


def fuse(model: Any, layer: str) -> None:
    modules: list[Any] = [model.get_base_model().get_submodule(path) for path in MODULES[layer]]
    if isinstance(modules[0].base_layer, QuantizedLinear):
        modules[0].base_layer.fuse([module.base_layer for module in modules])
    elif hasattr(modules[0].base_layer.weight, "quant_state"):
        NF4Weight.adjacent([module.base_layer.weight for module in modules])
    else:
        fuse_plain(modules)


def borrow(model: Any, adapter: str | None = None) -> WeightSharing:
    """What an engine would borrow of the first layer."""
    loan = WeightSharing(model.get_base_model(), CPU, adapter)
    for name in MODULES:
        loan.linear(name, PARTS)
    loan.embedding("model.embed_tokens", head=False)
    loan.embedding("lm_head", head=True)
    norm = model.get_base_model().model.norm.weight
    loan.parameter("model.norm.weight", norm)
    return loan


def sampled(loan: WeightSharing, layer: str, x: Tensor, base_model: bool = False) -> Tensor:
    """What the next call of an engine computes with."""
    loan.use_policy(base_model)
    return ours(layer, x)


def addresses(layer: str) -> list[int]:
    """Where the adapter lies that a layer is sampled with."""
    return [tensor.data_ptr() for lora in LAYERS[layer].loras if lora for tensor in (lora.a, lora.b)]


def reallocated(parameter: Any) -> None:
    """Move a parameter to another place in memory."""
    parameter.data = parameter.data.clone()


def linear_of(model: Any, path: str = MODULES[QKV][1]) -> Any:
    """A linear layer of the trainer, k_proj unless said otherwise."""
    return model.get_base_model().get_submodule(path)
