"""Export an adapter as a PEFT folder, as a merged model in 16 or 4 bits, or as a GGUF file.

Everything is written into a temporary folder, read back and compared. Only then does the folder get its name.
"""

import json
import logging
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.utils.save_and_load import load_peft_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from lowmem_grpo.config.beside_lora import base_names
from lowmem_grpo.config.loading import form_of_weights
from lowmem_grpo.memory.families import reads_images
from lowmem_grpo.models.export import gguf, model_card
from lowmem_grpo.models.export.folder import Exported, ExportError, new_folder
from lowmem_grpo.models.export.four_bit import check_in_4bit, write_in_4bit
from lowmem_grpo.models.export.merge import pairs_of
from lowmem_grpo.models.export.merged import (
    DTYPES,
    Merge,
    adapter_logits,
    base_in_training,
    live_card,
    live_merge,
    output_dtype,
    write_folder,
)
from lowmem_grpo.models.export.mxfp4 import check_in_mxfp4, write_in_mxfp4
from lowmem_grpo.models.export.stored_weights import empty_model, stored_weights, tensor_files
from lowmem_grpo.models.export.trained_matrices import trained_matrices, with_matrices
from lowmem_grpo.models.gguf_file import digest_of
from lowmem_grpo.models.hub import check_repo, model_folder, push
from lowmem_grpo.models.new_tokens import ids_in
from lowmem_grpo.models.policy import end_ids
from lowmem_grpo.models.pretrained import Pretrained, generation_of, tokenizer_beside
from lowmem_grpo.models.stored_model import resolve
from lowmem_grpo.models.vision_processor import OF_IMAGES, load_processor, with_saved_bounds
from lowmem_grpo.runs.adapter_file import base_matrices, check_patterns, layers_of, read_adapter
from lowmem_grpo.runs.files import CARD, write_card
from lowmem_grpo.runs.saved_adapter import (
    ADAPTER_FILE,
    BASE_FILE,
    NEW_ROWS,
    BaseRecord,
    RunAdapter,
    adapter_settings,
    base_of_adapter,
    find_adapter,
)
from lowmem_grpo.utils import PATH, is_gguf

logger = logging.getLogger(__name__)
FORMATS = ("adapter", "merged", "merged_4bit", "merged_mxfp4", "gguf")
COMPUTED = ("float32", *DTYPES)  # compute dtypes of a run
ADAPTER_FILES = (ADAPTER_FILE, "adapter_config.json", BASE_FILE, NEW_ROWS, CARD, "generation_config.json", *OF_IMAGES)
YARN = ("llama.cpp rounds the two bounds of YaRN's ramp to whole dimensions, and this model's config says not to "
        "(truncate: false), which no GGUF file can say: some dimensions of heads turn at other speeds than in training")
NO_GGUF = ("a model of images is not written as GGUF: llama.cpp reads its tower from a second file. Export it as "
           "merged, and call llama.cpp's convert_hf_to_gguf.py on that folder, once as it is and once with --mmproj")


@dataclass(frozen=True)
class ExportSettings:
    """The options of an export. None takes `base`, the form of weights and `dtype` from the adapter's record."""

    base: str | None = None
    load_in_4bit: bool | None = None
    load_in_fp8: bool | str | None = None
    dtype: str | None = None
    device: str | None = None
    gguf_type: str = "bf16"
    llama_cpp: Path | None = None


def export(run: Path | str, kind: str, out: Path | str, settings: ExportSettings | None = None,
           unfinished: bool = False, overwrite: bool = False, repo: str | None = None, private: bool = True,
           api: Any = None) -> Exported:
    """Export the adapter of `run` (a run, a checkpoint or a saved adapter) as one of FORMATS into `out`. With `repo`,
    push the folder to the hub as well.

    Raises ExportError, RunError, CheckpointError, AdapterError, MergeError, GGUFError, HubError or OSError. After an
    error `out` is unchanged, except after a failed push: then it holds the complete export.
    """
    settings = settings or ExportSettings()
    check_choices(kind, settings)
    if wrong := [path for path in (run, out) if not PATH[1](path)]:
        raise ExportError(f"run and out are {run!r} and {out!r}; {wrong[0]!r} must be {PATH[0]}")
    run, out = Path(run), Path(out)
    if repo is not None:
        check_repo(repo)
    adapter = find_adapter(run, unfinished)
    converter = gguf.find_converter(settings.llama_cpp, [settings.gguf_type], settings.base or base_of_adapter(
        adapter.folder).model) if kind == "gguf" else None
    done = Exported(out, kind, adapter.note, None)
    with new_folder(done, overwrite, adapter.folder) as temp:
        if kind == "adapter":
            record = export_adapter(adapter, temp, done)
        elif kind == model_card.MERGED_4BIT:
            record, _ = export_merged(adapter, settings, temp / "merged", done)
            write_in_4bit(temp / "merged", temp, done)
        elif kind == model_card.MERGED_MXFP4:
            record, merge = export_merged(adapter, settings, temp / "merged", done)
            write_in_mxfp4(merge, temp / "merged", temp, done)
        elif converter is None:
            record, _ = export_merged(adapter, settings, temp, done)
        else:
            record = export_gguf(adapter, settings, converter, temp, done)
        if not (temp / CARD).exists():
            lora, history = adapter_settings(adapter.folder), model_card.PastRuns.of_card(adapter.folder)
            with safe_open(adapter.folder / ADAPTER_FILE, "pt") as file:
                of_base = base_names([*file.keys()], bool(lora.get("modules_to_save")))
                shapes = {name: file.get_slice(name).get_shape() for name in {*file.keys()} - of_base.keys()}
            write_card(temp, model_card.card_text(kind, record, lora, history, shapes=shapes))
    if repo is not None:
        done.address = push(out, repo, private, api)
    return done


def check_choices(kind: str, settings: ExportSettings) -> None:
    """Raise ExportError for an unknown format, a wrong value of a setting, or settings that are not ExportSettings."""
    if not isinstance(settings, ExportSettings):
        raise ExportError(f"settings is {settings!r}; give ExportSettings, as in ExportSettings(load_in_4bit=True)")
    choices = {"format": (kind, FORMATS), "dtype": (settings.dtype, (None, *DTYPES)),
               "gguf_type": (settings.gguf_type, gguf.TYPES),
               "load_in_4bit": (settings.load_in_4bit, (None, True, False))}
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ExportError(f"{name} is {value!r}; allowed are {', '.join(str(a) for a in allowed if a is not None)}")
    if settings.device is not None and not re.fullmatch(r"cpu|mps|\d+|(cuda|xpu)(:\d+)?", str(settings.device)):
        raise ExportError(f"device is {settings.device!r}; allowed are cpu, cuda, cuda:0, cuda:1, ...")


def export_adapter(adapter: RunAdapter, temp: Path, done: Exported) -> BaseRecord:
    """Copy the adapter's files and read them back with PEFT. ExportError if the tensors differ."""
    _, tensors = read_adapter(adapter.folder)
    for name in ADAPTER_FILES:
        if (adapter.folder / name).is_file():
            shutil.copyfile(adapter.folder / name, temp / name)
    if tokenizer := tokenizer_beside(adapter.folder):
        tokenizer.save_pretrained(temp)
    record = base_of_adapter(adapter.folder)
    done.base = record.model
    PeftConfig.from_pretrained(str(temp))
    read = load_peft_weights(str(temp), device="cpu")
    if not all(name in read and torch.equal(tensor, read[name]) for name, tensor in tensors.items()):
        raise ExportError(f"PEFT read back other tensors than {adapter.folder} holds")
    done.checks = {"layers": len(layers_of(tensors)), "tensors_equal": len(tensors)}
    return record


def export_merged(adapter: RunAdapter, settings: ExportSettings, temp: Path, done: Exported
                  ) -> tuple[BaseRecord, Merge]:
    """Merge a saved adapter into the stored base, and return which that is, and what was written. Only a small model is
    loaded, to compare its logits."""
    adapter_config, tensors = read_adapter(adapter.folder)
    pairs = pairs_of(adapter_config, tensors, adapter.folder)
    trained = trained_matrices(adapter_config, tensors, adapter.note, base_matrices(adapter.folder))
    record = settled(base_of_adapter(adapter.folder), settings, adapter.folder)
    name, form = str(record.model), form_of_weights(record.load_in_4bit, False, record.load_in_fp8)
    done.base, computed = name, getattr(torch, str(record.dtype))
    device = settings.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    stored = Pretrained(name, str(model_folder(resolve(name), record.revision)), {}, vision=True)
    if record.sha256 not in (None, digest_of(stored.path)):
        raise ExportError(f"{stored.path} is not the file that the adapter was trained on: its sha256 is not "
                          f"{record.sha256}. Name that file with --base")
    with stored.naming_the_model():
        (config, names), tokenizer = stored.parts(), tokenizer_beside(adapter.folder) or stored.tokenizer()
        form = stored.form(form)
    if done.format == model_card.MERGED_4BIT:
        check_in_4bit(config)
    if done.format == model_card.MERGED_MXFP4:
        check_in_mxfp4(config)
    processor = None
    if reads_images(config):
        if done.format == "gguf":
            raise ExportError(NO_GGUF)
        processor = with_saved_bounds(load_processor(stored.path, tokenizer), adapter.folder)
    check_patterns(adapter_config, (path for path, _ in empty_model(config).named_modules()), adapter.note)
    base, base_config = stored_weights(Path(stored.path), config, form, computed, device, names), config
    stored_rows = config.get_text_config().vocab_size
    weights, config = with_matrices(base, trained, config, new_tokens_of(adapter.folder / NEW_ROWS))
    if (rows := config.get_text_config().vocab_size) != stored_rows and tokenizer_beside(adapter.folder) is None:
        raise ExportError(f"the adapter has {rows} tokens and its base {stored_rows}, and {adapter.folder} holds no "
                          "tokenizer with the new ones: save it there (tokenizer.save_pretrained), and export again")
    dtype, generation = output_dtype(settings.dtype, computed), generation_of(stored.path)
    ends = end_ids(generation_of(adapter.folder) or generation or config, tokenizer)
    merge = Merge(weights, pairs, dtype, config, generation, tokenizer, ends, device,
                  lambda: adapter_logits(base_in_training(stored, base, base_config, computed, device, form),
                                         adapter.folder, rows), processor)
    write_folder(merge, temp, done)
    return record, merge


def new_tokens_of(file: Path) -> list[int]:
    """Return the tokens whose rows were put into the base before training; ExportError for a file that does not say."""
    try:
        return ids_in(load_file(file)) if file.is_file() else []
    except (LookupError, TypeError, SafetensorError) as error:
        raise ExportError(f"{file} does not say the base's new tokens ({error}); take it from the run again") from error


def export_gguf(adapter: RunAdapter, settings: ExportSettings, converter: gguf.Converter, temp: Path,
                done: Exported) -> BaseRecord:
    """Merge a saved adapter into a temporary folder and convert that to a GGUF file."""
    record, _ = export_merged(adapter, settings, temp / "merged", done)
    convert_merged(converter, temp / "merged", [settings.gguf_type], done)
    return record


def save_gguf(model: Any, out: Path, tokenizer: Any, kinds: list[str], llama_cpp: Path | None, overwrite: bool,
              name: str) -> Exported:
    """Merge a loaded model with its adapter, if it has one, and write one GGUF file per kind."""
    for kind in kinds:
        check_choices("gguf", ExportSettings(gguf_type=kind))
    if reads_images(model.config):
        raise ExportError(NO_GGUF)
    converter = gguf.find_converter(llama_cpp, kinds, name)
    merge, done = live_merge(model, tokenizer, None), Exported(out, "gguf", "a loaded model", name)
    with new_folder(done, overwrite) as temp:
        write_folder(merge, temp / "merged", done)
        convert_merged(converter, temp / "merged", kinds, done)
        write_card(temp, live_card(model, model_card.GGUF, name))
    return done


def convert_merged(converter: gguf.Converter, merged: Path, kinds: list[str], done: Exported) -> None:
    """Convert a merged model to a GGUF file per kind beside it, then delete it. ExportError if a file lacks weights."""
    warn_of_yarn(merged)
    name, wanted = Path(str(done.base)).name.lower() or "model", matrix_elements(merged)
    for kind in kinds:
        content = converter.convert(merged, merged.parent / f"{name}-{kind}.gguf", kind)
        if content.elements != wanted:
            raise ExportError(f"the GGUF file holds {content.elements:,} weights in matrices, the merged model "
                              f"{wanted:,}")
        done.checks |= {"gguf_architecture": content.architecture, "gguf_tensors": len(content.shapes)}
    shutil.rmtree(merged)


def warn_of_yarn(folder: Path) -> None:
    """Warn if llama.cpp computes other RoPE frequencies than transformers does for the model in a folder."""
    rope = json.loads((folder / "config.json").read_text("utf-8")).get("rope_parameters") or {}
    if rope.get("rope_type") == "yarn" and rope.get("truncate") is False:
        logger.warning("%s", YARN)


def settled(record: BaseRecord, settings: ExportSettings, folder: Path) -> BaseRecord:
    """Return the adapter's record, overridden by the settings. ExportError if neither names the base model or its form
    in training (4 bit, FP8 or 16 bit), or if the recorded dtype is not in COMPUTED."""
    model = settings.base or record.model
    chosen: Any = record if settings.load_in_4bit is None and not settings.load_in_fp8 else settings
    four_bit, in_fp8 = False if chosen.load_in_fp8 else chosen.load_in_4bit, chosen.load_in_fp8
    if model is None:
        raise ExportError(f"the adapter in {folder} does not say which model it was trained on; name it with --base")
    if four_bit is None:
        raise ExportError(f"the adapter in {folder} does not say whether {model} was held in 4 bit while it was "
                          "trained; say --load-in-4bit, --fp8 or --16bit, because the adapter only fits the weights "
                          "that it was trained on")
    if record.dtype not in (None, *COMPUTED):
        raise ExportError(f"{folder / BASE_FILE} says dtype {record.dtype!r}; allowed are {', '.join(COMPUTED)}")
    revision = None if settings.base else record.revision
    sha256 = record.sha256 if is_gguf(model) else None
    return BaseRecord(model, four_bit, record.dtype or "bfloat16", revision, in_fp8, sha256)


def matrix_elements(folder: Path) -> int:
    """Return the number of weights in a folder's safetensors files, without those in vectors and scalars."""
    total = 0
    for file in sorted(set(tensor_files(folder).values())):
        with safe_open(file, "pt") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118 - not a dict
        total += sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    return total
