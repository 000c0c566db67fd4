"""Writes the folder of a merged model (weights, config, tokenizer, generation config) and checks it."""

import copy
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from lowmem_grpo.export.base_weights import Weight, live_weights, tensor_files
from lowmem_grpo.export.check import LARGEST, Logits, check_loads, compare_logits, live_logits
from lowmem_grpo.export.folder import Exported, ExportError, check_disk, finish, new_folder
from lowmem_grpo.export.lora_pairs import LoraPair, live_pairs
from lowmem_grpo.export.merge import check_merged, size_of, write_merged
from lowmem_grpo.memory.bounds import freed_memory_returned
from lowmem_grpo.models.policy import end_ids

logger = logging.getLogger(__name__)

MUCH = 0.9  # share of an update; if rounding keeps less, a warning says so
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Merge:
    """A merged model to be written: the tensors, what is added to them, and the files beside them."""

    weights: list[Weight]
    pairs: dict[str, LoraPair]
    dtype: torch.dtype
    config: Any
    generation_config: Any
    tokenizer: Any
    ends: list[int]  # ids that end a completion


def save_merged(
    model: Any, out: Path, tokenizer: Any, dtype: str | None, overwrite: bool, name: str | None = None
) -> Exported:
    """Write a loaded model, merged with its adapter if it has one."""
    merge, done = live_merge(model, tokenizer, dtype), Exported(out, "merged", "a loaded model", name)
    with new_folder(out, overwrite) as temp:
        write_live(model, merge, temp, done)
        finish(temp, done)
    return done


def live_merge(model: Any, tokenizer: Any, dtype: str | None) -> Merge:
    """A loaded model and its adapter, if it has one, as a merge."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    weights, wanted = live_weights(model), output_dtype(dtype, base.get_input_embeddings().weight.dtype)
    pairs = live_pairs(model) if hasattr(model, "peft_config") else {}
    ends = {*end_ids(base.generation_config, tokenizer), *getattr(getattr(model, "loaded", None), "stop_ids", ())}
    return Merge(weights, pairs, wanted, base.config, base.generation_config, tokenizer, sorted(ends))


def write_live(model: Any, merge: Merge, temp: Path, done: Exported) -> None:
    """Write the merge of a loaded model into a folder, and compare it with the model."""
    with freed_memory_returned():
        write_folder(merge, temp, done)
        if elements(merge.weights) * 4 <= LARGEST and merge.tokenizer is not None:
            context = getattr(getattr(model, "loaded", None), "max_seq_length", 0)
            compare(live_logits(model), merge, temp, str(model.device), done, context)


def save_adapter(model: Any, out: Path, tokenizer: Any, overwrite: bool, name: str | None = None) -> Exported:
    """Write the adapter of a loaded PEFT model as `save_pretrained` does, and mark the folder as an export."""
    done = Exported(out, "adapter", "a loaded model", name)
    with new_folder(out, overwrite) as temp:
        model.save_pretrained(str(temp))
        tokenizer.save_pretrained(temp)
        finish(temp, done)
    return done


def write_folder(merge: Merge, temp: Path, done: Exported) -> None:
    """Write weights, config, tokenizer and generation config. Then check everything except the logits."""
    check_disk(temp, sum(size_of(weight, merge.dtype) for weight in merge.weights))
    total = write_merged(temp, merge.weights, merge.pairs, merge.dtype)
    config = copy.deepcopy(merge.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = merge.dtype
    config.save_pretrained(temp)
    generation = copy.deepcopy(merge.generation_config) or GenerationConfig.from_model_config(config)
    generation.eos_token_id = merge.ends[0] if len(merge.ends) == 1 else merge.ends or None
    for part in (generation, merge.tokenizer):
        if part is not None:
            part.save_pretrained(temp)
    checked = check_merged(temp, tensor_files(temp), merge.weights, merge.pairs)
    tied = {"lm_head.weight"} if getattr(config.get_text_config(), "tie_word_embeddings", False) else set()
    check_loads(temp, {weight.name for weight in merge.weights} | tied)
    if checked.kept < MUCH:
        logger.warning("of the adapter's update %.0f%% is left after rounding to %s: most of its elements are smaller "
                       "than the steps between 16-bit numbers. The adapter itself loses nothing; float16 is finer",
                       100 * checked.kept, merge.dtype)
    done.checks |= {"tensors": checked.tensors, "merged": checked.merged, "worst_rounding": checked.worst_rounding,
                    "rounded_otherwise": checked.rounded_otherwise, "update_kept": checked.kept, "tensor_bytes": total,
                    "dtype": str(merge.dtype).removeprefix("torch.")}


def compare(reference: Logits, merge: Merge, temp: Path, device: str, done: Exported, context: int = 0) -> None:
    """Compare the logits, and add the result to the record."""
    check = compare_logits(reference, temp, merge.dtype, merge.tokenizer, device, context)
    done.checks |= {f"logits_{name}": value for name, value in asdict(check).items()}


def output_dtype(asked: str | None, computed: torch.dtype) -> torch.dtype:
    """The dtype that was asked for, else the one that the model computes in, with bfloat16 in place of float32.

    ExportError for a dtype that is not in DTYPES."""
    if asked is not None:
        if asked not in DTYPES:
            raise ExportError(f"dtype is {asked!r}; allowed are {', '.join(DTYPES)}")
        return DTYPES[asked]
    return torch.bfloat16 if computed == torch.float32 else computed


def elements(weights: list[Weight]) -> int:
    """The number of elements in all tensors."""
    return sum(torch.Size(weight.shape).numel() for weight in weights)
