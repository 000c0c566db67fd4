"""Checkpoints of the training state, in safetensors and JSON only: no pickle is read or written.

    checkpoint-{step}/
        adapter_model.safetensors, adapter_config.json    the adapter; plain peft loads the folder
        optimizer.safetensors    tensors of the optimizer's (and scheduler's) state, as `state.3.exp_avg`
        reference.safetensors    the reference adapter of the KL term, if there is one
        teacher.safetensors      the adapter of a teacher that follows the policy, if there is one
        critic.safetensors       PPO's critic, if there is one
        critic_optimizer.safetensors    tensors of the state of the critic's optimizer and schedule
        rng.safetensors          torch's random state: `cpu`, and `cuda.0` and so on
        state.json               the caller's state, the remaining optimizer and scheduler state, other random states
        manifest.json            size and sha256 of each other file

A checkpoint is written to a temporary folder, flushed to disk and renamed, so a folder named checkpoint-{step} is
complete whenever the process dies. Folders named `.checkpoint-...` are unfinished, being replaced or being deleted.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowmem_grpo.runs import checkpoint_state
from lowmem_grpo.runs.checkpoint_state import FORMAT, adapter_tensors, checked, decode, load_tensors
from lowmem_grpo.runs.expert_names import named_in_model
from lowmem_grpo.runs.files import aside_of, flush, free_bytes, move, refused, remove, removed_after, swap_in
from lowmem_grpo.runs.records import FINAL, json_object
from lowmem_grpo.runs.saved_adapter import (
    ADAPTER_FILE,
    CheckpointError,
    MismatchError,
    adapter_settings,
    check_adapter_folder,
    fingerprint,
    last_good,
    list_checkpoints,
    same_model,
    verify,
)
from lowmem_grpo.utils import GIB, bytes_of

logger = logging.getLogger(__name__)
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, SafetensorError)
KEPT = "{}.safetensors"  # an adapter that the run keeps beside the trained one, by what it is for


def save_checkpoint(
    run_dir: Path, step: int, model: PeftModel, optimizer: Optimizer, scheduler: LRScheduler, state: dict[str, Any],
    kept: Mapping[str, dict[str, Tensor]] = MappingProxyType({}),
) -> Path:
    """Write `run_dir/checkpoint-{step}`, replacing an existing one, and return its path. `state` must be plain JSON
    values; `kept` are further adapters by name. CheckpointError if the disk refuses; older checkpoints stay."""
    folder = run_dir / f"checkpoint-{step}"
    temp = run_dir / f".checkpoint-{step}.tmp-{os.getpid()}"
    tensors: dict[str, Tensor] = {}
    base = {"base": checkpoint_state.base_digest(model)}
    text = json.dumps(checkpoint_state.collect(optimizer, scheduler, state, tensors) | base)
    held = [tensors, adapter_tensors(model), *kept.values()]
    needed = sum(tensor.nbytes for named in held for tensor in named.values()) + len(text)
    free = free_bytes(run_dir)
    try:
        with removed_after(temp):
            write_files(temp, model, tensors, text, kept)
            swap_in(temp, folder)
    except (OSError, SafetensorError) as error:
        good, _ = last_good(run_dir)
        older = "there is none" if good is None else (
            f"train(resume_from_checkpoint={str(good)!r}) resumes from the last good one")
        raise CheckpointError(f"{refused(folder, error, needed, free)}. Checkpoints saved before are untouched: {older}"
                              ) from error
    remove(aside_of(folder))
    return folder


def save_adapter(folder: Path, save: Callable[[Path], None]) -> None:
    """Let `save` write an adapter, then put it in place of an existing one. CheckpointError if the disk refuses."""
    temp, free = folder.with_name(f".{folder.name}.tmp-{os.getpid()}"), free_bytes(folder)
    try:
        with removed_after(temp):
            temp.mkdir(parents=True)
            save(temp)
            for path in (*temp.iterdir(), temp):
                flush(path)
            swap_in(temp, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{refused(folder, error, 0, free)}. The checkpoints hold the adapter too") from error
    remove(aside_of(folder))


def load_checkpoint(folder: Path, model: PeftModel, optimizer: Optimizer, scheduler: LRScheduler,
                    method: str | None = None) -> dict[str, Any]:
    """Verify a checkpoint, restore adapter, optimizer, scheduler and random states in place, and return `state`.
    MismatchError for a checkpoint that does not fit, or of another method than `method`, the kind of training."""
    verify(folder)
    with trusted(folder):
        content = json_object(bytes_of(folder / "state.json", GIB))
        settings, config = adapter_settings(folder), model.peft_config[checkpoint_state.ADAPTER]
        held = adapter_tensors(model)
        adapter = named_in_model(load_file(folder / ADAPTER_FILE), settings, folder)
        check_method(folder, content["state"], method)
        checkpoint_state.check_state(content["state"])
        check_step(folder, content["state"])
        check_fits(folder, content, optimizer)
        check_adapter(folder, adapter, held)
        check_scaling(settings, config, folder)
        saved, own = content.get("base"), checkpoint_state.base_digest(model)
        if saved not in (None, own):  # older checkpoints have none
            here = config.base_model_name_or_path or getattr(model.get_base_model(), "name_or_path", None)
            there = settings.get("base_model_name_or_path")
            (dtypes, stored, _), (own_dtypes, own_stored, _) = saved.split(" "), own.split(" ")
            tell_other_base(there, here, dtypes == own_dtypes and stored != own_stored, folder)
        tensors, random = load_tensors(folder / "optimizer.safetensors"), load_tensors(folder / "rng.safetensors")
        steps = decode(content["optimizer"]["content"], tensors)
        schedule = checked(decode(content["scheduler"], tensors), scheduler.state_dict(), "the schedule")
        state: dict[str, Any] = content["state"]
        checkpoint_state.restore_random(content["random"], random)
        checkpoint_state.restore_optimizer(optimizer, steps, tensors)
        scheduler.load_state_dict(schedule)
        for name, tensor in held.items():
            tensor.copy_(adapter[name])
    return state


@contextmanager
def trusted(folder: Path, *own: type[Exception]) -> Iterator[None]:
    """Turn errors that malformed files raise in the block into CheckpointError, except errors of the types `own`."""
    kept: tuple[type[Exception], ...] = (CheckpointError, *own)
    try:
        yield
    except kept:
        raise
    except MALFORMED as error:
        said = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError(f"{folder / 'state.json'}, or a file beside it, is altered: it does not hold what a run "
                              f"saves ({said:.300}); use an older checkpoint") from error


def load_weights(folder: Path, model: PeftModel) -> None:
    """Load only the adapter weights of a checkpoint; CheckpointError if the checkpoint is damaged or does not fit."""
    verify(folder)
    held = adapter_tensors(model)
    adapter = named_in_model(load_file(folder / ADAPTER_FILE), adapter_settings(folder), folder)
    check_adapter(folder, adapter, held)
    for name, tensor in held.items():
        tensor.copy_(adapter[name])


def tensors_of(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors that a run kept under this name; {} if it kept none."""
    path = folder / KEPT.format(name)
    return load_tensors(path) if path.is_file() else {}


def load_kept(folder: Path, name: str, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter that the saved run kept beside the trained one, such as the reference of its KL term; empty if
    it kept none and computed with the base model. `held` is the adapter in the model."""
    if not (kept := tensors_of(folder, name)):
        return {}
    check_adapter(folder, {n: t.to(held[n].dtype) if n in held else t for n, t in kept.items()}, held)  # wider averages
    return kept


def check_method(folder: Path, state: dict[str, Any], method: str | None) -> None:
    """Raise MismatchError for a checkpoint of another kind of training; older checkpoints do not say theirs."""
    if method and (there := state.get("method", method)) != method:
        raise MismatchError(f"{folder} is a checkpoint of {there!r:.40}, and this run is {method!r}, which has "
                            "another loss, schedule and reference. To go on with its adapter, load it with "
                            f"FastLanguageModel.from_pretrained({str(folder)!r}), and begin a new run")


def check_step(folder: Path, state: dict[str, Any]) -> None:
    """Raise CheckpointError for the state of another step than the folder's name says."""
    step, named = (state.get("trainer") or {}).get("global_step"), re.fullmatch(r"checkpoint-(\d+)", folder.name)
    if step is not None and named and int(named[1]) != step:
        raise CheckpointError(f"{folder / 'state.json'} is altered: its global_step is {step!r:.40}, and the folder is "
                              f"{folder.name}; use an older checkpoint, or give the folder its name back")


def check_fits(folder: Path, content: dict[str, Any], optimizer: Optimizer) -> None:
    """Raise MismatchError unless the checkpoint's format and optimizer match those of this run."""
    if content["format"] != FORMAT:
        raise MismatchError(f"{folder} has checkpoint format {content['format']!r:.40}; this version reads only "
                            f"{FORMAT}")
    saved, mine = content["optimizer"], checkpoint_state.optimizer_shape(optimizer)
    if (saved["class"], saved["group_sizes"]) != mine:
        kind, sizes = f"{saved['class']!s:.40}", f"{saved['group_sizes']!s:.200}"
        raise MismatchError(f"{folder} holds the state of {kind} over {sizes} parameters (a number for each group); "
                            f"here it is {mine[0]} over {mine[1]}. Resume with the optimizer and adapter of the saved "
                            "run")


def check_adapter(folder: Path, saved: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Raise MismatchError at the first tensor whose name, shape or dtype differs between file and model."""
    for name in sorted(saved.keys() | held.keys()):
        there, here = (f"{list(t[name].shape)} {t[name].dtype}" if name in t else "absent" for t in (saved, held))
        if there != here:
            raise MismatchError(f"{folder}: {name} is {there} in the checkpoint, {here} in the model")


def check_scaling(saved: dict[str, Any], config: Any, folder: Path) -> None:
    """Raise MismatchError if settings that scale the adapter, or that say the tokens of its rows, differ between the
    checkpoint and the model."""
    for name in ("lora_alpha", "use_rslora", "alpha_pattern", "trainable_token_indices"):
        if (there := saved.get(name) or None) != ((here := getattr(config, name)) or None):
            does = "says whose rows it trains" if name == "trainable_token_indices" else "scales the adapter"
            raise MismatchError(f"{folder}: {name} is {there} in the checkpoint, {here} in the model, which {does}; "
                                "add LoRA as the saved run did")


def tell_other_base(there: str | None, here: str | None, is_other: bool, folder: Path) -> None:
    """Raise MismatchError if the saved run had a base model with other weights (`is_other`) and another name. Otherwise
    log a warning, as the weights may be the same in another precision."""
    if there and here and is_other and not same_model(there, here):
        raise MismatchError(f"{folder} was trained on {there}, and this model is {here}, with other weights; resume on "
                            "the base of the saved run, or begin a new run")
    logger.warning("%s was trained on other weights of %s than this model has, or on the same in another precision; "
                   "the run goes on with these", folder, there or "its base")


def prune(run_dir: Path, keep_last: int | None, keep: set[Path]) -> list[Path]:
    """Delete and return all checkpoints but the newest `keep_last` (None: all), those in `keep` and the last good."""
    folders = list_checkpoints(run_dir)
    kept = {path.resolve() for path in keep}
    old = [] if keep_last is None else folders[: max(len(folders) - keep_last, 0)]
    old = [folder for folder in old if folder.resolve() not in kept]
    good = last_good(run_dir)[0] if old else None
    gone = [folder for folder in old if folder != good]
    for folder in gone:
        aside = run_dir / f".{folder.name}.gone-{os.getpid()}"
        remove(aside)
        move(folder, aside)
        remove(aside)
    return gone


def clean_leftovers(run_dir: Path) -> list[Path]:
    """Remove temporary folders of killed processes, or rename back those without a replacement; return all of them."""
    leftovers = sorted([*run_dir.glob(".checkpoint-*"), *run_dir.glob(f".{FINAL}.*")])
    for path in leftovers:
        name, _, kind = path.name[1:].partition(".")
        try:
            if kind.startswith("old-") and not (run_dir / name).exists():
                move(path, run_dir / name)
            else:
                remove(path)
        except OSError as error:
            raise CheckpointError(refused(path, error, 0, free_bytes(run_dir))) from error
    return leftovers


def write_files(
    temp: Path, model: PeftModel, tensors: dict[str, Tensor], text: str, kept: Mapping[str, dict[str, Tensor]]
) -> None:
    """Fill the new folder `temp` and flush it to disk, the manifest last."""
    temp.mkdir(parents=True)
    model.save_pretrained(str(temp), selected_adapters=[checkpoint_state.ADAPTER], save_embedding_layers=False)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, temp / "optimizer.safetensors")  # copies, since tensors of a file may not share memory
    save_file(checkpoint_state.random_tensors(), temp / "rng.safetensors")
    for name, adapter in kept.items():
        save_file(adapter, temp / KEPT.format(name))
    (temp / "state.json").write_text(text)
    check_adapter_folder(temp)
    files = sorted(path for path in temp.rglob("*") if path.is_file())
    manifest = {"format": FORMAT, "files": {str(path.relative_to(temp)): fingerprint(path) for path in files}}
    (temp / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in (*files, temp / "manifest.json", temp):
        flush(path)
