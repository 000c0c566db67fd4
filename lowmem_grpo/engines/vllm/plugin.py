"""A quantization method and a model loader, registered with vLLM, that make it compute with the trainer's tensors.

vLLM asks the quantization config for a method for each linear layer, embedding and head. Our methods allocate no
weights. Then the loader points each remaining parameter (the norms) at the trainer's storage. No weight is copied, and
vLLM is not patched. Both registries are public and the same in all versions that `installed.py` allows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm import LLM, ModelRegistry, SamplingParams, envs
from vllm.config.cache import CacheConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from lowmem_grpo.engines.vllm.shared_linear import (
    OTHER_ENGINE,
    BorrowedExperts,
    BorrowError,
    borrowed_linear,
)
from lowmem_grpo.engines.vllm.weight_sharing import BorrowedTable, WeightSharing
from lowmem_grpo.memory.cards import IN_16_BITS

__all__ = [
    "LLM", "NAME", "SamplingParams", "check_architecture", "check_cache_dtype", "check_routes",
    "cleanup_dist_env_and_memory", "envs", "lending",
]
NAME = "lowmem_grpo"  # names the quantization method and the load format
EXPERTS = getattr(fused_moe, "RoutedExperts", None)  # vLLM's experts layer; None in older versions, which differ
ROUTES = "enable_return_routed_experts"
LENT: list[WeightSharing] = []  # the last entry serves vLLM's registries, which make our objects by name


@contextmanager
def lending(loan: WeightSharing) -> Iterator[None]:
    """Let the objects that vLLM makes for us in this context use the trainer's tensors from `loan`. vLLM makes them by
    name, through its registries, and passes them no tensors."""
    LENT.append(loan)
    try:
        yield
    finally:
        LENT.remove(loan)


def current() -> WeightSharing:
    """Return the shared weights of the engine that is starting; BorrowError if none of our engines is starting."""
    if not LENT:
        raise BorrowError("vLLM asked for borrowed weights outside an engine of ours")
    return LENT[-1]


def check_architecture(name: str) -> None:
    """Raise BorrowError if vLLM has no model class of that name; else register the class itself in place of its name.
    To avoid initializing CUDA, vLLM would inspect a class known only by name in a subprocess (about 8 s), but this
    process has initialized CUDA anyway."""
    known = ModelRegistry.models.get(name)
    if known is None:
        raise BorrowError(f"this vLLM has no {name}. {OTHER_ENGINE}")
    ModelRegistry.register_model(name, known.load_model_cls())


def names_in(kind: Any) -> list[str]:
    """Return the strings of a Literal, also inside a union (as in vLLM 0.33, where other packages may add names)."""
    return [name for part in get_args(kind) for name in ([part] if isinstance(part, str) else names_in(part))]


def check_cache_dtype(name: str) -> None:
    """Raise BorrowError if this vLLM does not know the KV cache dtype `name`."""
    kinds = names_in({field.name: field.type for field in fields(CacheConfig)}.get("cache_dtype"))
    if "kv_cache_dtype" not in {field.name for field in fields(EngineArgs)} or name not in kinds:
        raise BorrowError(f"kv_cache_dtype is {name!r}, which this vLLM does not have (it has "
                          f"{', '.join(kinds) or 'no such setting'}). {IN_16_BITS}, or install vLLM 0.32")


class NoWeights:
    """A base for quantization methods that create no weights, because the trainer's are used."""

    def create_weights(self, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        """Create nothing."""


class BorrowedLinearMethod(NoWeights, LinearMethodBase):
    """The quantization method of linear layers. It has no weights and computes with the trainer's, including LoRA and
    bias. It also serves routers, from whose float32 logits vLLM selects the experts."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        self.compute = compute

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.compute(x)  # the trainer's bias is included


class BorrowedExpertsMethod(NoWeights, fused_moe.FusedMoEMethodBase):
    """The quantization method of experts layers. It has no weights and runs the trainer's own experts operation."""

    def __init__(self, experts: BorrowedExperts, moe: Any) -> None:
        super().__init__(moe)
        self.experts = experts

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """Return None: vLLM's own kernels, which this would configure, do not run here."""

    def apply(self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *others: Any,
              **options: Any) -> Tensor:
        return self.experts.forward(x, topk_ids, topk_weights)


class BorrowedEmbeddingMethod(QuantizeMethodBase):
    """The quantization method of an embedding, or of a head with float32 logits, on the trainer's matrix."""

    def __init__(self, table: BorrowedTable) -> None:
        self.table = table

    def create_weights(self, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        layer.register_parameter("weight", nn.Parameter(torch.empty(0), requires_grad=False))

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        return self.table.embed(input_)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.table.logits(x)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        return layer


@register_quantization_config(NAME)
class BorrowedConfig(QuantizationConfig):
    """The quantization config, from which vLLM gets the quantization method of every layer."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BorrowedConfig":
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return a layer's quantization method (None: vLLM's own). BorrowError for a layer unlike the trainer's."""
        loan = current()
        if isinstance(layer, VocabParallelEmbedding):  # includes output heads
            table = loan.embedding(prefix, head=isinstance(layer, ParallelLMHead))
            check_equal(prefix, "(vocabulary, width)", (layer.org_vocab_size, layer.embedding_dim),
                        (*table.held[0].shape,))
            return BorrowedEmbeddingMethod(table)
        if EXPERTS is not None and isinstance(layer, EXPERTS):
            experts = loan.routed(prefix)
            check_experts(experts, layer)
            return BorrowedExpertsMethod(experts, layer.moe_config)
        if isinstance(layer, LinearBase) and loan.is_router(prefix):
            return BorrowedLinearMethod(loan.routed(prefix).logits)
        if isinstance(layer, LinearBase):
            linear = loan.linear(prefix, self.packed_modules_mapping)
            check_equal(linear.name, "(out, in, bias added by another layer)",
                        (layer.output_size, layer.input_size, bool(layer.skip_bias_add)),
                        (linear.out_features, linear.shapes[0][1], False))
            width, name = linear.out_features, linear.name  # all that is held of the layer once the engine is closed
            return BorrowedLinearMethod(lambda x: borrowed_linear(x, width, name))
        return None


def check_experts(experts: BorrowedExperts, layer: Any) -> None:
    """Raise BorrowError if vLLM's experts differ from the trainer's in size, activation or gate normalization."""
    expected = (layer.global_num_experts, layer.hidden_size, layer.moe_config.intermediate_size_per_partition,
                layer.top_k, layer.activation.value, layer.renormalize)
    check_equal(experts.name, "(experts, width, inner width, experts of a token, activation, gates renormalized)",
                expected, (*experts.shape, "silu", experts.block.gate.norm_topk_prob))


def check_routes() -> None:
    """Raise BorrowError if this vLLM's experts cannot be shared, or it cannot return the experts chosen per token."""
    lacking = [name for name, there in (
        ("RoutedExperts", EXPERTS is not None), ("enable_return_routed_experts", ROUTES in signature(LLM).parameters),
    ) if not there]
    if lacking:
        raise BorrowError(f"this vLLM has no {' and no '.join(lacking)}, which a mixture of experts needs; vLLM 0.32 "
                          f"has both. {OTHER_ENGINE}")


def check_equal(name: str, what: str, expected: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    """Raise BorrowError if vLLM's layer of that name differs from the trainer's."""
    if got != expected:
        raise BorrowError(f"{name}: vLLM wants {what} {expected}, the trainer has {got}. {OTHER_ENGINE}")


@register_model_loader(NAME)
class BorrowedLoader(BaseModelLoader):
    """The model loader that points vLLM's remaining parameters at the trainer's tensors."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        if model_config.using_transformers_backend():  # that would change the classes of the trainer's model
            raise BorrowError(f"this vLLM has no {model_config.architectures[0]} of its own, only transformers' model "
                              f"in its place. {OTHER_ENGINE}")
        return super().load_model(vllm_config, model_config, prefix)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the trainer has the weights in memory."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Point the model's parameters and shared buffers at the trainer's; BorrowError if one does not match."""
        loan = current()
        for name, parameter in model.named_parameters():
            layer, _, last = name.rpartition(".")
            if layer in loan.linears and last == "bias":
                parameter.data = parameter.data.new_empty(0)  # the shared linear layer adds the trainer's bias
            elif parameter.numel():
                parameter.data = loan.parameter(name, parameter)
        for name, buffer in model.named_buffers():
            if name in loan.buffers:
                buffer.data = loan.parameter(name, buffer)
        loan.check_complete()
        loan.widen()
