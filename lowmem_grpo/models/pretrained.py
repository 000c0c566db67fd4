"""A stored model: its weights in 16 bit or in 4-bit NF4, and its tokenizer.

transformers reads a tensor, quantizes it and frees it before the next one, so a 70B checkpoint needs memory for its
4-bit size and one tensor, on host and device. (Files are mapped, so the system may drop their pages at any time.)
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from lowmem_grpo.memory.trim import freed_memory_returned
from lowmem_grpo.models import attention
from lowmem_grpo.models.dtypes import check_dtype

OWN_CODE = ("{!r} is defined by Python code in its repository, and such code is never run here. Take a model whose "
            "architecture transformers itself has")
NO_TEXT = ("{!r} is no causal language model of text: transformers has no class of that kind for it. Only text is "
           "trained here: take a text model, such as Qwen3 instead of Qwen3-VL")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pretrained:
    """Where a model is stored."""

    name: str  # as the user wrote it
    path: str  # a folder, or a name on the hub
    options: dict[str, Any]  # revision and token

    def load(self, dtype: torch.dtype, device: str, load_in_4bit: bool) -> tuple[PreTrainedModel, Any]:
        """The frozen model on its device, and its tokenizer. A checkpoint in 4 bit stays as it is."""
        with self.naming_the_model(), freed_memory_returned():
            check_dtype(self.config(), dtype)
            stored_in_4bit = self.is_stored_in_4bit()
            tokenizer = self.tokenizer()
            quantize = load_in_4bit and not stored_in_4bit  # passing None would overrule the checkpoint's own config
            model = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=dtype, device_map={"": device}, attn_implementation=attention.NAME,
                trust_remote_code=False, **self.options, **{"quantization_config": nf4(dtype)} if quantize else {},
            )
        if stored_in_4bit:
            logger.info("%s is stored in 4 bit: its weights are used as they are", self.name)
            compute_in(model, dtype)
        keep_layout(model)
        return model.requires_grad_(False), tokenizer

    def config(self) -> Any:
        """The model's config."""
        return AutoConfig.from_pretrained(self.path, trust_remote_code=False, **self.options)

    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False, **self.options)

    def is_stored_in_4bit(self) -> bool:
        """Whether bitsandbytes has quantized the checkpoint; ValueError for any other quantization."""
        stored = getattr(self.config(), "quantization_config", None)
        if stored is None:
            return False
        stored = stored if isinstance(stored, dict) else stored.to_dict()
        method = stored.get("quant_method", "bitsandbytes")
        if method == "bitsandbytes" and stored.get("load_in_4bit", stored.get("_load_in_4bit")):
            return True
        raise ValueError(
            f"{self.name!r} is stored quantized ({'bitsandbytes, 8 bit' if method == 'bitsandbytes' else method}); "
            "allowed are checkpoints in 16 or 32 bit, and in 4 bit of bitsandbytes"
        )

    @contextmanager
    def naming_the_model(self) -> Iterator[None]:
        """Inside, an OSError says in one line which model could not be found, and a ValueError which one needs code of
        its own repository."""
        try:
            yield
        except OSError as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise OSError(
                f"no model {self.name!r}: it is not a folder with a model, and the hub did not return one "
                f"(misspelt, gated without token=..., or no network). First line of the cause: {first_line}"
            ) from error
        except ValueError as error:
            if "Unrecognized configuration class" in str(error):
                raise ValueError(NO_TEXT.format(self.name)) from error
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(OWN_CODE.format(self.name)) from error


def nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    """4-bit NF4 with double quantization, computing in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def linears_in_4bit(model: PreTrainedModel) -> Iterator[Any]:
    """The layers of bitsandbytes."""
    return (module for module in model.modules() if getattr(getattr(module, "weight", None), "quant_state", None))


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make weights that were quantized in another dtype compute in `dtype`; the stored numbers do not change."""
    for module in linears_in_4bit(model):
        module.compute_dtype = module.weight.quant_state.dtype = dtype


def keep_layout(model: PreTrainedModel) -> None:
    """Keep 4-bit weights as they are. On CPUs with AVX512-BF16, bitsandbytes would repack them in the first forward
    pass in evaluation mode, and no gradient flows through repacked weights."""
    for module in linears_in_4bit(model):
        module.support_avx512bf16_for_cpu = False
