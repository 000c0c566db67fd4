"""Write the folder of a merged model (weights, config, tokenizer, generation config) and check it.

A small model's logits are compared with those of base and adapter, both in float32. They may differ by ALLOWED times
the effect of 16-bit rounding: the difference between the merged model's logits in float32 and in its own dtype.
"""

import copy
import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lowmem_grpo.memory.families import lora_on_experts
from lowmem_grpo.memory.oom import freed_memory_returned
from lowmem_grpo.models.export.base_weights import Weight, live_weights
from lowmem_grpo.models.export.folder import Exported, ExportError, check_disk, new_folder
from lowmem_grpo.models.export.merge import LoraPair, MergeError, check_merged, live_pairs, size_of, write_merged
from lowmem_grpo.models.export.model_card import MERGED, card_text
from lowmem_grpo.models.export.stored_weights import empty_model, tensor_files
from lowmem_grpo.models.export.trained_matrices import live_matrices, with_matrices
from lowmem_grpo.models.policy import end_ids, evaluating
from lowmem_grpo.models.pretrained import Pretrained, class_of, compute_in, fix_frequencies
from lowmem_grpo.models.trained_embedding import base_module
from lowmem_grpo.runs.files import write_card
from lowmem_grpo.runs.saved_adapter import BaseRecord

logger = logging.getLogger(__name__)

MUCH = 0.9  # share of an update; a warning is logged if rounding keeps less
TEXTS = (
    "Start with 17. Add 8. Subtract 13. What is the result?", "The capital of France is", "def add(a, b):\n    return",
)
LARGEST = 2**31  # bytes in float32; for larger models only the weights are compared, not the logits
ALLOWED = 2.0  # most logit difference, as a multiple of that between float32 and 16 bits: the base may have 16 bits too
Logits = Callable[[Tensor], Tensor]  # ids (1, T) -> (1, T, V)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Merge:
    """A merged model to be written: the base tensors, the LoRA pairs to add, and the contents of the other files."""

    weights: list[Weight]
    pairs: dict[str, LoraPair]
    dtype: torch.dtype
    config: Any
    generation_config: Any
    tokenizer: Any
    ends: list[int]  # ids that end a completion
    device: str
    reference: Callable[[], Logits]  # the logits of base and adapter; only called for a small model
    processor: Any = None  # of a model of images; its files are written with the tokenizer's
    context: int = 0  # the `max_seq_length` for which a loaded model's RoPE frequencies were fixed; 0 for none


def save_merged(model: Any, out: Path, tokenizer: Any, dtype: str | None, overwrite: bool,
                name: str | None = None) -> Exported:
    """Merge a loaded model with its adapter and write the folder `out`."""
    merge, done = live_merge(model, tokenizer, dtype), Exported(out, "merged", "a loaded model", name)
    with new_folder(done, overwrite) as temp:
        write_folder(merge, temp, done)
        write_card(temp, live_card(model, MERGED, name))
    return done


def live_card(model: Any, kind: str, name: str | None) -> str:
    """Return the card of a loaded model, with its adapter merged if it has one."""
    text: str = model.card(kind) if hasattr(model, "card") else card_text(kind, BaseRecord(name))
    return text


def live_merge(model: Any, tokenizer: Any, dtype: str | None) -> Merge:
    """Return the merge of a loaded model and its adapter, if it has one."""
    loaded = getattr(model, "loaded", None)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    pairs, trained = (live_pairs(model), live_matrices(model)) if hasattr(model, "peft_config") else ({}, {})
    wanted = output_dtype(dtype, base_module(base.get_input_embeddings()).weight.dtype)
    weights, config = with_matrices(live_weights(model), trained, base.config)
    processor = tokenizer if hasattr(tokenizer, "image_processor") else getattr(loaded, "processor", None)
    tokenizer = tokenizer.tokenizer if processor is tokenizer is not None else tokenizer
    ends = {*end_ids(base.generation_config, tokenizer), *getattr(loaded, "stop_ids", ())}
    return Merge(weights, pairs, wanted, config, base.generation_config, tokenizer, sorted(ends),
                 str(model.device), lambda: live_logits(model), processor, getattr(loaded, "max_seq_length", 0))


def save_adapter(model: Any, out: Path, tokenizer: Any, overwrite: bool, name: str | None = None) -> Exported:
    """Write the adapter of a loaded PEFT model as `save_pretrained` does, and mark the folder as an export."""
    done = Exported(out, "adapter", "a loaded model", name)
    with new_folder(done, overwrite) as temp:
        model.save_pretrained(str(temp))
        tokenizer.save_pretrained(temp)
    return done


def write_folder(merge: Merge, temp: Path, done: Exported) -> None:
    """Write a merged model and check it. The check of a small model includes its logits."""
    with freed_memory_returned():
        write_files(merge, temp, done)
        if sum(math.prod(weight.shape) for weight in merge.weights) * 4 <= LARGEST and merge.tokenizer is not None:
            compare(merge, temp, done)


def write_files(merge: Merge, temp: Path, done: Exported) -> None:
    """Write weights, config, tokenizer and generation config, then check everything except the logits."""
    temp.mkdir(exist_ok=True)
    check_disk(temp, sum(size_of(weight, merge.dtype) for weight in merge.weights))
    total = write_merged(temp, merge.weights, merge.pairs, merge.dtype)
    config = copy.deepcopy(merge.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = merge.dtype
    config.save_pretrained(temp)
    generation = copy.deepcopy(merge.generation_config) or GenerationConfig.from_model_config(config)
    generation.eos_token_id = merge.ends[0] if len(merge.ends) == 1 else merge.ends or None
    write_generation(generation, temp)
    if merge.tokenizer is not None:
        (merge.processor or merge.tokenizer).save_pretrained(temp)
    checked = check_merged(temp, tensor_files(temp), merge.weights, merge.pairs)
    check_loads(temp, {weight.name for weight in merge.weights})
    if checked.kept < MUCH:
        logger.warning("of the adapter's update %.0f%% is left after rounding to %s: most of its elements are smaller "
                       "than the steps between 16-bit numbers. The adapter itself loses nothing; float16 is finer",
                       100 * checked.kept, merge.dtype)
    done.checks |= {"tensors": checked.tensors, "merged": checked.merged, "trained": checked.trained,
                    "worst_rounding": checked.worst_rounding, "rounded_otherwise": checked.rounded_otherwise,
                    "update_kept": checked.kept, "tensor_bytes": total,
                    "dtype": str(merge.dtype).removeprefix("torch.")}


def write_generation(generation: GenerationConfig, folder: Path) -> None:
    """Write generation_config.json. One that transformers reads but refuses to save is written as it stands."""
    try:
        generation.save_pretrained(folder)
    except ValueError as error:
        logger.warning("the base's generation_config.json is written as it stood, although transformers would not save "
                       "it: %s", " ".join(str(error).split("\n")[:2]))
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def compare(merge: Merge, temp: Path, done: Exported) -> None:
    """Compare the written model's logits with the reference; MergeError if they differ by more than rounding."""
    prompts = [merge.tokenizer(text, return_tensors="pt").input_ids.to(merge.device) for text in TEXTS]
    reference = merge.reference()
    wanted = [reference(ids).float() for ids in prompts]
    exact, rounded = (answers(temp, kind, prompts, merge.device, merge.context)
                      for kind in (torch.float32, merge.dtype))
    difference, rounding = rms(exact, wanted), rms(exact, rounded)
    agree = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in zip(exact, wanted, strict=True)])
    if not difference <= ALLOWED * rounding:
        raise MergeError("the merged model was loaded back, and its logits differ from the adapter's by "
                         f"{difference:.3g} (rounding to {merge.dtype} explains {rounding:.3g}); nothing was exported")
    done.checks |= {"logits_difference": difference, "logits_rounding": rounding,
                    "logits_same_choice": agree.float().mean().item()}


def output_dtype(asked: str | None, computed: torch.dtype) -> torch.dtype:
    """Return the dtype `asked` for (ExportError if not in DTYPES), or `computed`, with bfloat16 in place of float32."""
    if asked is not None:
        if asked not in DTYPES:
            raise ExportError(f"dtype is {asked!r}; allowed are {', '.join(DTYPES)}")
        return DTYPES[asked]
    return torch.bfloat16 if computed == torch.float32 else computed


def answers(folder: Path, dtype: torch.dtype, prompts: list[Tensor], device: str, context: int = 0) -> list[Tensor]:
    """Return the float32 logits (1, T, V) of a stored model for each of the prompts (1, T)."""
    model = class_of(AutoConfig.from_pretrained(folder, trust_remote_code=False)).from_pretrained(
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
    squares = torch.cat([(a - b).double().square().flatten() for a, b in zip(left, right, strict=True)])
    return squares.mean().sqrt().item()


def base_in_training(stored: Pretrained, weights: list[Weight], config: Any, dtype: torch.dtype, device: str,
                     form: str) -> Any:
    """Return the base with its weights rounded as in training, as a model that PEFT puts any adapter on."""
    if lora_on_experts(config):
        return plain_model(weights, config, device)
    model, _ = stored.load(dtype, device, form)
    model.set_attn_implementation("sdpa")
    return model


def adapter_logits(model: Any, adapter: Path, rows: int) -> Logits:
    """Return a function for the float32 logits of a base and its adapter by PEFT, with `rows` tokens in the vocabulary.
    """
    if rows != model.config.get_text_config().vocab_size:
        model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has the values of new rows
    compute_in(model, torch.float32)
    for parameter in model.parameters():  # requantizing weights in 4 bit or FP8 would change their values
        if not isinstance(parameter, Params4bit) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    adapted: Any = PeftModel.from_pretrained(model, str(adapter)).eval()
    return live_logits(adapted)


def plain_model(weights: list[Weight], config: Any, device: str) -> Any:
    """Return transformers' own model with these weights, in float32."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = class_of(config).from_config(config, dtype=torch.float32, trust_remote_code=False).to(device)
    model.load_state_dict({weight.name: weight.open()(0, weight.shape[0]) for weight in weights})
    return model


def live_logits(model: Any) -> Logits:
    """Return a function that computes a loaded model's logits in evaluation mode."""
    def logits(ids: Tensor) -> Tensor:
        with evaluating(model), torch.no_grad():
            result: Tensor = model(input_ids=ids).logits
        return result

    return logits


def check_loads(folder: Path, names: set[str]) -> None:
    """Raise MergeError unless `names` has every parameter of the model that the folder's config describes."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise MergeError(f"{folder}/config.json still has a quantization_config")
    model = empty_model(config)
    own, conversions = dict(model.named_parameters()), get_model_conversion_mapping(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    loaded = {rename_source_key(name, renamings, converters, model.base_model_prefix, own)[0]  # experts share one name
              for name in names if name not in own}
    if missing := sorted(own.keys() - names - loaded - model.all_tied_weights_keys.keys()):
        raise MergeError(f"{folder} holds no {missing[0]}, which a {type(model).__name__} has")
