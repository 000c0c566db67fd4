"""Saved training state, only as safetensors and JSON: no pickle is read or written.

    checkpoint-{step}/
        adapter_model.safetensors, adapter_config.json    the adapter; plain peft loads the folder
        optimizer.safetensors    tensors of the optimizer's (and scheduler's) state, as `state.3.exp_avg`
        rng.safetensors          torch's random state: `cpu`, and `cuda.0` and so on
        state.json               the caller's state, the remaining optimizer and scheduler state, other random states
        manifest.json            size and sha256 of each other file

A checkpoint is written beside its final place, flushed to disk and renamed. So a folder named checkpoint-{step} is
whole, whenever the process dies. Names that begin with `.checkpoint-` are unfinished.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowmem_grpo.runs.checkpoint_state import (
    ADAPTER,
    FORMAT,
    adapter_tensors,
    collect,
    decode,
    load_tensors,
    optimizer_shape,
    random_tensors,
    restore_optimizer,
    restore_random,
    saved_copy,
)
from lowmem_grpo.runs.whole_folder import aside_of, flush, remove, removed_after, swap_in

ADAPTER_FILE = "adapter_model.safetensors"
FILES = (ADAPTER_FILE, "adapter_config.json", "optimizer.safetensors", "rng.safetensors", "state.json")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or trusted; the message says which file and what to do."""


def save_checkpoint(
    run_dir: Path, step: int, model: PeftModel, optimizer: Optimizer, scheduler: LRScheduler, state: dict[str, Any]
) -> Path:
    """Write `run_dir/checkpoint-{step}`, in place of one that is there already, and return it.

    `state` must be plain JSON values. Raises CheckpointError if the disk refuses; older checkpoints stay.
    """
    folder = run_dir / f"checkpoint-{step}"
    temp = run_dir / f".checkpoint-{step}.tmp-{os.getpid()}"
    tensors: dict[str, Tensor] = {}
    text = json.dumps(collect(optimizer, scheduler, state, tensors))
    needed = sum(tensor.nbytes for tensor in (*tensors.values(), *adapter_tensors(model).values()))
    try:
        with removed_after(temp):
            write_files(temp, model, tensors, text)
            swap_in(temp, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(refused(folder, needed, error)) from error
    remove(aside_of(folder))
    return folder


def load_checkpoint(folder: Path, model: PeftModel, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Restore everything that `save_checkpoint` was given, and the random states; return its `state`.

    Parameters are overwritten in place. Everything is checked first, so that a refusal changes nothing.
    """
    verify(folder)
    content: dict[str, Any] = json.loads((folder / "state.json").read_text())
    adapter, held = load_file(folder / ADAPTER_FILE), adapter_tensors(model)
    check_fits(folder, content, optimizer)
    check_adapter(folder, adapter, held)
    for name, tensor in held.items():
        tensor.copy_(adapter[name])
    tensors = load_tensors(folder / "optimizer.safetensors")
    restore_optimizer(optimizer, decode(content["optimizer"]["content"], tensors), tensors)
    scheduler.load_state_dict(decode(content["scheduler"], tensors))
    restore_random(content["random"], load_tensors(folder / "rng.safetensors"))
    state: dict[str, Any] = content["state"]
    return state


def verify(folder: Path) -> None:
    """Raise CheckpointError, naming the file, unless each file is there as it was written."""
    check_adapter_folder(folder)
    for name, expected in read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; use an older checkpoint")
        if path.stat().st_size < expected["size"]:
            raise CheckpointError(
                f"{path} is truncated: {path.stat().st_size:,} of {expected['size']:,} bytes; use an older checkpoint"
            )
        if fingerprint(path) != expected:
            raise CheckpointError(f"{path} is altered: it differs from what was written; use an older checkpoint")


def check_adapter_folder(folder: Path) -> None:
    """Raise CheckpointError unless the folder holds an adapter in safetensors; pickled weights are never opened."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / ADAPTER_FILE).is_file() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{folder} holds its weights only as adapter_model.bin, a pickle file that can run code when read; save "
            f"the adapter again as {ADAPTER_FILE} (peft's save_pretrained does so)"
        )
    for name in (ADAPTER_FILE, "adapter_config.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; the folder is not a whole adapter")


def check_fits(folder: Path, content: dict[str, Any], optimizer: Optimizer) -> None:
    """Raise CheckpointError unless this version and this optimizer can take over the saved state."""
    if content["format"] != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {content['format']}; this version reads only {FORMAT}")
    saved, mine = content["optimizer"], optimizer_shape(optimizer)
    if (saved["class"], saved["group_sizes"]) != mine:
        raise CheckpointError(
            f"{folder} holds the state of {saved['class']} over {saved['group_sizes']} parameters (a number for each "
            f"group); here it is {mine[0]} over {mine[1]}. Resume with the optimizer and adapter of the saved run"
        )


def check_adapter(folder: Path, saved: dict[str, Tensor], held: dict[str, Tensor]) -> None:
    """Raise CheckpointError at the first tensor whose name, shape or dtype differs between file and model."""
    for name in sorted(saved.keys() | held.keys()):
        there, here = (f"{list(t[name].shape)} {t[name].dtype}" if name in t else "absent" for t in (saved, held))
        if there != here:
            raise CheckpointError(f"{folder}: {name} is {there} in the checkpoint, {here} in the model")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The folders checkpoint-{step} of a run by ascending step, good or not."""
    steps = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run_dir.glob("checkpoint-*")}
    found = [(int(match[1]), path) for path, match in steps.items() if match and path.is_dir()]
    return [path for _, path in sorted(found)]


def last_good(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and what is wrong with each newer one."""
    problems: list[str] = []
    for folder in reversed(list_checkpoints(run_dir)):
        try:
            verify(folder)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return folder, problems
    return None, problems


def prune(run_dir: Path, keep_last: int | None, keep: set[Path]) -> list[Path]:
    """Delete all but the newest `keep_last` checkpoints (None keeps all), those in `keep` and the last good one."""
    folders = list_checkpoints(run_dir)
    kept = {path.resolve() for path in keep}
    old = [] if keep_last is None else folders[: max(len(folders) - keep_last, 0)]
    old = [folder for folder in old if folder.resolve() not in kept]
    good = last_good(run_dir)[0] if old else None
    gone = [folder for folder in old if folder != good]
    for folder in gone:
        aside = run_dir / f".{folder.name}.gone-{os.getpid()}"
        remove(aside)
        os.rename(folder, aside)
        remove(aside)
    return gone


def clean_leftovers(run_dir: Path) -> list[Path]:
    """Remove and return what a killed process left half written; call it before a run's first save.

    A whole checkpoint that was just about to be replaced by a newer copy of itself is put back.
    """
    leftovers = sorted(run_dir.glob(".checkpoint-*"))
    for path in leftovers:
        name, _, kind = path.name[1:].partition(".")
        if kind.startswith("old-") and not (run_dir / name).exists():
            os.rename(path, run_dir / name)
        else:
            remove(path)
    return leftovers


# writing


def write_files(temp: Path, model: PeftModel, tensors: dict[str, Tensor], text: str) -> None:
    """Fill the new folder `temp` and flush it to disk, the manifest last."""
    temp.mkdir(parents=True)
    # "auto" would ask the model hub about the vocabulary at each save; the embeddings are frozen anyway
    model.save_pretrained(str(temp), selected_adapters=[ADAPTER], save_embedding_layers=False)
    save_file({name: saved_copy(tensor) for name, tensor in tensors.items()}, temp / "optimizer.safetensors")
    save_file(random_tensors(), temp / "rng.safetensors")
    (temp / "state.json").write_text(text)
    check_adapter_folder(temp)
    files = sorted(path for path in temp.rglob("*") if path.is_file())
    manifest = {"format": FORMAT, "files": {str(path.relative_to(temp)): fingerprint(path) for path in files}}
    (temp / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in (*files, temp / "manifest.json", temp):
        flush(path)


def refused(folder: Path, needed: int, error: Exception) -> str:
    """What to tell a user whose disk refused a checkpoint."""
    run_dir = folder.parent
    free = shutil.disk_usage(next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())).free
    good, _ = last_good(run_dir)
    resume = f"train(resume_from_checkpoint={str(good)!r}) resumes from the last good one" if good else "there is none"
    return (
        f"{folder} was not written: {error}. It needs about {needed:,} bytes and {free:,} are free there; free some, "
        f"or lower save_total_limit. Checkpoints saved before are untouched: {resume}"
    )


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The expected size and sha256 of each file; raises CheckpointError if the manifest itself is unusable."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {folder} is not a whole checkpoint")
    try:
        listed = json.loads(path.read_text())["files"]
        files = {name: {"size": int(entry["size"]), "sha256": entry["sha256"]} for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is truncated or altered ({error!r}); use an older checkpoint") from error
    absent = [name for name in FILES if name not in files]
    if absent:
        raise CheckpointError(f"{path} is altered: it does not list {absent[0]}; use an older checkpoint")
    return files
