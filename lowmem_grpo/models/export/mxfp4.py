"""Write a merged model with its experts in MXFP4, as gpt-oss is published, and all else in 16 bits.

The merged model in 16 bits is read again, one file at a time. An expert whose LoRA is zero, or that has none, keeps the
bytes of the base. The others are quantized again, with an error that is often larger than the update: it is measured.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lowmem_grpo.kernels.mxfp4 import mxfp4_quantize
from lowmem_grpo.memory.families import experts_in_mxfp4
from lowmem_grpo.models.export.base_weights import Weight
from lowmem_grpo.models.export.folder import Exported, ExportError, new_folder
from lowmem_grpo.models.export.four_bit import write_quantized
from lowmem_grpo.models.export.merge import LoraPair, pair_of
from lowmem_grpo.models.export.merged import Merge, live_card, live_merge, write_folder
from lowmem_grpo.models.export.model_card import MERGED_MXFP4
from lowmem_grpo.models.export.stored_weights import CODES, SCALES
from lowmem_grpo.runs.expert_names import is_stack
from lowmem_grpo.runs.files import write_card

logger = logging.getLogger(__name__)
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}


def save_in_mxfp4(model: Any, out: Path, tokenizer: Any, dtype: str | None, overwrite: bool,
                  name: str | None = None) -> Exported:
    """Merge a loaded model with its adapter and write the folder `out`, its experts in MXFP4."""
    check_in_mxfp4(model.config)
    merge, done = live_merge(model, tokenizer, dtype), Exported(out, MERGED_MXFP4, "a loaded model", name)
    with new_folder(done, overwrite) as temp:
        write_folder(merge, temp / "merged", done)
        write_in_mxfp4(merge, temp / "merged", temp, done)
        write_card(temp, live_card(model, MERGED_MXFP4, name))
    return done


def check_in_mxfp4(config: Any) -> None:
    """Raise ExportError for the config of another family, before hours of merging."""
    if not experts_in_mxfp4(config):
        raise ExportError(f"a {config.model_type} is not written in MXFP4: only gpt-oss is stored so. Export it as "
                          "merged, in 16 bits")


def write_in_mxfp4(merge: Merge, merged: Path, out: Path, done: Exported) -> None:
    """Write the model in the folder `merged` into `out`, its experts in MXFP4, and delete `merged`."""
    stacks = {weight.name: weight for weight in merge.weights if is_stack(weight.name)}
    count = Requantized()

    def tensors_of(file: Path) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in stacks:
                    tensors |= packed(stacks[name], pair_of(stacks[name], merge.pairs), opened.get_slice(name), count)
                else:
                    tensors[name] = opened.get_tensor(name)
        return tensors

    write_quantized(merged, out, QUANTIZATION, tensors_of)
    done.checks |= {"in_mxfp4": count.matrices, "requantized": count.rounded, "requantized_error": count.error}
    if count.rounded:
        logger.warning("%d of %d matrices of experts were rounded to MXFP4 again: the error (root mean square) is %.2g "
                       "times the update by their LoRA. save_method=\"merged_16bit\" keeps the update",
                       count.rounded, count.matrices, count.error)


@dataclass
class Requantized:
    """How many matrices of experts were written, and how many of these were quantized."""

    matrices: int = 0
    rounded: int = 0
    lost: float = 0.0  # sum of (written - merged) ** 2
    norm: float = 0.0  # sum of update ** 2

    @property
    def error(self) -> float:
        """The error of quantization, as a multiple of the update; 0 without LoRA."""
        return math.sqrt(self.lost / self.norm) if self.norm else 0.0


def packed(weight: Weight, pair: LoraPair | None, written: Any, count: Requantized) -> dict[str, Tensor]:
    """Return the two tensors of a stack in MXFP4: of each expert the base's bytes, or those of its merged matrix in
    `written`, a slice of the file (E, in, out)."""
    parts = [packed_expert(weight, pair, written, number, count) for number in range(weight.shape[0])]
    codes, scales = (torch.stack([getattr(part, name).cpu() for part in parts]) for name in ("codes", "scales"))
    return {f"{weight.name}{CODES}": codes.unflatten(-1, (-1, 16)), f"{weight.name}{SCALES}": scales}


def packed_expert(weight: Weight, pair: LoraPair | None, written: Any, number: int, count: Requantized) -> Any:
    """Return the matrix (out, in) of one expert."""
    count.matrices += 1
    update = None if pair is None else pair.rows(number, number + 1, torch.device("cpu"))[0].T
    if weight.packed is not None and (update is None or not update.any()):
        return weight.packed(number, number + 1)
    merged = written[number : number + 1][0].T.contiguous()
    made = mxfp4_quantize(merged)
    count.rounded += 1
    if update is not None:
        count.lost += (made.dequantized() - merged).float().square().sum().item()
        count.norm += update.square().sum().item()
    return made
