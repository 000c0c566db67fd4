"""Compares the logits of a merged model with those of base and adapter, on a few prompts.

Both compute in float32. A merge may only round weights to 16 bits. The allowed difference is therefore a small multiple
of what 16 bits change anyway: the merged model's own difference between float32 and its dtype.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lowmem_grpo.export.merge import MergeError
from lowmem_grpo.models import attention
from lowmem_grpo.models.pretrained import Pretrained, compute_in
from lowmem_grpo.models.rope_context import fix_frequencies

TEXTS = (
    "Start with 17. Add 8. Subtract 13. What is the result?", "The capital of France is", "def add(a, b):\n    return",
)
LARGEST = 2**31  # bytes in float32; of larger models only the weights are compared, not the logits
ALLOWED = 2.0  # times the difference between float32 and 16 bits: base and adapter may be in 16 bits too
Logits = Callable[[Tensor], Tensor]  # ids (1, T) -> (1, T, V)


@dataclass(frozen=True)
class LogitCheck:
    """Root mean squares over all positions and tokens."""

    difference: float  # between the merged model and the adapter
    rounding: float  # between the merged model in float32 and in 16 bits
    same_choice: float  # share of positions where both give the same token the highest logit


def compare_logits(
    reference: Logits, folder: Path, dtype: torch.dtype, tokenizer: Any, device: str, context: int = 0
) -> LogitCheck:
    """Load a merged model with transformers and compare. MergeError if it differs by more than rounding explains.

    `context`: that of a loaded model, whose position embeddings were fixed for it.
    """
    prompts = [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in TEXTS]
    wanted = [reference(ids).float() for ids in prompts]
    exact, rounded = (answers(folder, kind, prompts, device, context) for kind in (torch.float32, dtype))
    difference, rounding = rms(exact, wanted), rms(exact, rounded)
    agree = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in zip(exact, wanted, strict=True)])
    check = LogitCheck(difference, rounding, agree.float().mean().item())
    if not difference <= ALLOWED * rounding:
        raise MergeError("the merged model was loaded back, and its logits differ from the adapter's by "
                         f"{difference:.3g} (rounding to {dtype} explains {rounding:.3g}); nothing was exported")
    return check


def answers(folder: Path, dtype: torch.dtype, prompts: list[Tensor], device: str, context: int = 0) -> list[Tensor]:
    """Logits of a model in `folder`, loaded with plain transformers in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": device}, trust_remote_code=False
    ).eval()
    if context:
        fix_frequencies(model, context)
    try:
        with torch.no_grad():
            return [model(input_ids=ids).logits.float() for ids in prompts]
    finally:
        gc.collect()


def rms(left: list[Tensor], right: list[Tensor]) -> float:
    """Root mean square of the difference."""
    squares = torch.cat([(a - b).double().square().flatten() for a, b in zip(left, right, strict=True)])
    return squares.mean().sqrt().item()


def adapter_logits(base: Pretrained, adapter: Path, dtype: torch.dtype, device: str, form: str) -> Logits:
    """Return the logits of plain PEFT in float32. The base is held in `dtype`, FP8 or 4 bit, as in training."""
    model, _ = base.load(dtype, device, form)
    adapted: Any = PeftModel.from_pretrained(in_float32(model), str(adapter)).eval()
    adapted.get_base_model().set_attn_implementation("sdpa")

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = adapted(input_ids=ids).logits
        return result

    return logits


def in_float32(model: Any) -> Any:
    """The same model, computing in float32. Weights in 4 bit or FP8 stay as they are: quantizing them again out of
    another dtype would change their values."""
    compute_in(model, torch.float32)
    for parameter in model.parameters():
        if not isinstance(parameter, Params4bit) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def live_logits(model: Any) -> Logits:
    """Return the logits of a loaded model as it is now. Its training mode is restored afterwards."""
    def logits(ids: Tensor) -> Tensor:
        training = model.training
        try:
            with torch.no_grad():
                result: Tensor = model.eval()(input_ids=ids).logits
        finally:
            model.train(training)
        return result

    return logits


def check_loads(folder: Path, names: set[str]) -> None:
    """MergeError unless `names` has every parameter of the model that the folder's config describes."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise MergeError(f"{folder}/config.json still has a quantization_config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.NAME, trust_remote_code=False
        )
    own = {name for name, _ in model.named_parameters()}
    if missing := sorted(own - names - {loaded_name(name, model) for name in names if name not in own}):
        raise MergeError(f"{folder} holds no {missing[0]}, which a {type(model).__name__} has")


def loaded_name(name: str, model: Any) -> str:
    """The parameter that a stored tensor becomes a part of: an expert's, that of all experts."""
    conversions = get_model_conversion_mapping(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    own = dict(model.named_parameters())
    return str(rename_source_key(name, renamings, converters, model.base_model_prefix, own)[0])
