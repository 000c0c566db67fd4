"""Write a merged model in 4 bits: NF4 with double quantization, in the files of bitsandbytes and transformers.

The merged model in 16 bits is read again, one tensor at a time. What loading in 4 bits would quantize is quantized."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitsandbytes.nn import Params4bit
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from lowmem_grpo.memory.families import has_experts
from lowmem_grpo.models.export.folder import Exported, ExportError, new_folder
from lowmem_grpo.models.export.merge import MergeError
from lowmem_grpo.models.export.merged import live_card, live_merge, write_folder
from lowmem_grpo.models.export.model_card import MERGED_4BIT
from lowmem_grpo.models.export.stored_weights import linears_to_quantize, tensor_files
from lowmem_grpo.models.pretrained import nf4
from lowmem_grpo.models.stored_model import INDEX
from lowmem_grpo.runs.files import write_card


def save_in_4bit(model: Any, out: Path, tokenizer: Any, dtype: str | None, overwrite: bool,
                 name: str | None = None) -> Exported:
    """Merge a loaded model with its adapter and write the folder `out`, in 4 bits."""
    check_in_4bit(model.config)
    merge, done = live_merge(model, tokenizer, dtype), Exported(out, MERGED_4BIT, "a loaded model", name)
    with new_folder(done, overwrite) as temp:
        write_folder(merge, temp / "merged", done)
        write_in_4bit(temp / "merged", temp, done)
        write_card(temp, live_card(model, MERGED_4BIT, name))
    return done


def check_in_4bit(config: Any) -> None:
    """Raise ExportError for the config of a mixture of experts, before hours of merging."""
    if has_experts(config):
        raise ExportError("a mixture of experts is not written in 4 bits: bitsandbytes stores linear layers, and its "
                          "experts would stay in 16 bits. Export it as merged, and load that with load_in_4bit=True")


def write_in_4bit(merged: Path, out: Path, done: Exported) -> None:
    """Write the model in the folder `merged` in 4 bits into `out`, and delete `merged`. MergeError if a file reads back
    otherwise."""
    config = AutoConfig.from_pretrained(merged, trust_remote_code=False)
    modules = linears_to_quantize(config, config.dtype)
    write_quantized(merged, out, nf4(config.dtype, config).to_dict(), lambda file: quantized(file, modules))
    done.checks["in_4bit"] = len(modules)


def write_quantized(merged: Path, out: Path, how: dict[str, Any], tensors_of: Callable[[Path], dict[str, Tensor]]
                    ) -> None:
    """Write into `out` the files of the folder `merged` with the tensors that `tensors_of` makes of each, and `how` as
    the config's `quantization_config`; delete `merged`. MergeError if a file reads back otherwise."""
    places: dict[str, str] = {}
    for file in sorted({*tensor_files(merged).values()}):
        tensors = tensors_of(file)
        save_file(tensors, out / file.name, {"format": "pt"})
        read = load_file(out / file.name)
        if tensors.keys() != read.keys() or any(not tensors[name].equal(read[name]) for name in tensors):
            raise MergeError(f"{out / file.name} was read back and is not what was written")
        places |= dict.fromkeys(tensors, file.name)
    if (merged / INDEX).is_file():
        size = sum((out / name).stat().st_size for name in {*places.values()})
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=1), "utf-8")
    config = AutoConfig.from_pretrained(merged, trust_remote_code=False)
    config.quantization_config = how
    config.save_pretrained(out)
    for path in merged.iterdir():
        if not (out / path.name).exists():
            path.rename(out / path.name)
    shutil.rmtree(merged)


def quantized(file: Path, modules: set[str]) -> dict[str, Tensor]:
    """Return the tensors of a file, those of `modules` in 4 bits with their quantization state beside them."""
    tensors: dict[str, Tensor] = {}
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            tensor = opened.get_tensor(name)
            if not (name.endswith(".weight") and name.removesuffix(".weight") in modules):
                tensors[name] = tensor
                continue
            param: Any = Params4bit(tensor, requires_grad=False, quant_type="nf4", compress_statistics=True,
                                    blocksize=64)
            param = param.to("cpu")  # which quantizes
            tensors[name] = param.data
            tensors |= {f"{name}.{part}": value for part, value in param.quant_state.as_dict(packed=True).items()}
    return tensors
