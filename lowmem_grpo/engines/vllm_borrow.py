"""How vLLM is made to compute with the trainer's tensors: a quantization method and a model loader, both registered.

vLLM asks the quantization config for a method for each linear layer, embedding and head; ours makes no weights and
computes with the trainer's. Then it asks the loader for the rest; ours points each remaining parameter (norms) at the
trainer's storage. Nothing is copied and nothing of vLLM is changed. Both registries are public and are the same in the
versions of `vllm_import.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from lowmem_grpo.engines.borrowed import LAYERS, BorrowedLinear, BorrowError, borrowed_linear
from lowmem_grpo.kernels.matmul import matmul_fp32

NAME = "lowmem_grpo"  # of the quantization method and of the load format


@dataclass
class Borrowing:
    """What one engine borrows, from whom."""

    base: Any  # the trainer's transformers model, with peft's layers in place
    switch: Tensor  # () of the adapter
    linears: dict[str, BorrowedLinear] = field(default_factory=dict)

    def modules(self, prefix: str, parts: dict[str, list[str]]) -> list[nn.Module]:
        """The trainer's modules behind a layer of vLLM, by the parts that its model class names."""
        parent, _, name = prefix.rpartition(".")
        found = []
        for part in parts.get(name, [name]):
            try:
                found.append(self.base.get_submodule(f"{parent}.{part}"))
            except AttributeError as error:
                raise BorrowError(
                    f"{type(self.base).__name__} has no module {parent}.{part}, which vLLM's {prefix} stands for; "
                    'sample with fast_inference="transformers"'
                ) from error
        return found

    def check(self) -> None:
        """Raise BorrowError where the trainer's tensors are not those that were borrowed."""
        for linear in self.linears.values():
            linear.check()

    def close(self) -> None:
        """Let go of the trainer's modules."""
        for name in self.linears:
            LAYERS.pop(name, None)
        self.linears.clear()


LENT: list[Borrowing] = []  # the borrowing that vLLM's registries serve now: vLLM makes its objects by name


@contextmanager
def lending(borrowing: Borrowing) -> Iterator[None]:
    """Inside, what vLLM loads in this format is borrowed from `borrowing`."""
    LENT.append(borrowing)
    try:
        yield
    finally:
        LENT.remove(borrowing)


def current() -> Borrowing:
    if not LENT:
        raise BorrowError("vLLM asked for borrowed weights outside an engine of ours")
    return LENT[-1]


class BorrowedLinearMethod(LinearMethodBase):
    """A linear layer that has no weights and computes with the trainer's, LoRA and bias included."""

    def __init__(self, linear: BorrowedLinear) -> None:
        self.linear = linear

    def create_weights(self, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        """None: they are the trainer's."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return borrowed_linear(x, self.linear.out_features, self.linear.name)  # the trainer's bias is in it


class BorrowedEmbeddingMethod(QuantizeMethodBase):
    """An embedding, or a head with float32 logits, on the trainer's matrix."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def create_weights(self, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        layer.register_parameter("weight", nn.Parameter(torch.empty(0), requires_grad=False))

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        return F.embedding(input_, self.module.weight)

    @torch.no_grad()
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = matmul_fp32(x, self.module.weight.T)
        own = getattr(self.module, "bias", None)
        return logits if own is None else logits + own

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        return layer


@register_quantization_config(NAME)
class BorrowedConfig(QuantizationConfig):
    """Asked by vLLM for the method of every layer."""

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
        borrowing = current()
        if isinstance(layer, ParallelLMHead):
            return BorrowedEmbeddingMethod(borrowing.base.get_output_embeddings())
        if isinstance(layer, VocabParallelEmbedding):
            return BorrowedEmbeddingMethod(borrowing.base.get_input_embeddings())
        if isinstance(layer, LinearBase):
            modules = borrowing.modules(prefix, self.packed_modules_mapping)
            linear = BorrowedLinear(prefix, modules, borrowing.switch)
            check_width(prefix, linear, layer)
            borrowing.linears[prefix] = linear
            return BorrowedLinearMethod(linear)
        return None


def check_width(prefix: str, linear: BorrowedLinear, layer: Any) -> None:
    """Raise BorrowError where vLLM expects other sizes than the trainer has."""
    expected = (layer.output_size, layer.input_size)
    got = (linear.out_features, linear.weights[0].shape[1])
    if got != expected:
        raise BorrowError(f"{prefix}: vLLM's layer is {expected} (out, in), the trainer's {got}")


@register_model_loader(NAME)
class BorrowedLoader(BaseModelLoader):
    """Points vLLM's remaining parameters at the trainer's."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        borrowing = current()
        theirs = dict(borrowing.base.named_parameters())
        unknown = []
        for name, parameter in model.named_parameters():
            parent, _, last = name.rpartition(".")
            if parameter.numel() == 0:
                continue
            if parent in borrowing.linears and last == "bias":
                parameter.data = parameter.data.new_empty(0)  # the borrowed module adds its own
            elif name in theirs and theirs[name].shape == parameter.shape:
                parameter.data = theirs[name].data
            else:
                unknown.append(f"{name} {tuple(parameter.shape)}")
        if unknown:
            raise BorrowError(
                f"{type(borrowing.base).__name__}: vLLM's parameters {unknown[:5]} have no counterpart in the trainer; "
                'sample with fast_inference="transformers"'
            )
