"""Checks that checkpoints and adapters on the disk are complete and unaltered. No torch is needed."""

import hashlib
import re
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.records import json_object

ADAPTER_FILE = "adapter_model.safetensors"
FILES = (ADAPTER_FILE, "adapter_config.json", "optimizer.safetensors", "rng.safetensors", "state.json")


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written, read or trusted; the message names the file, and says what to do."""


class MismatchError(CheckpointError):
    """Raised for a good checkpoint with another adapter, optimizer or format than the run's."""


class AdapterError(ValueError):
    """Raised if a saved adapter cannot be used; the message says why, and what to do."""


def verify(folder: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file matches the manifest."""
    try:
        check_files(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}; use an older checkpoint"
                              ) from error


def check_files(folder: Path) -> None:
    """Do the checks of `verify`; raises OSError if the disk cannot be read."""
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
    """Raise CheckpointError unless the folder holds an adapter in safetensors; pickled weights are never read."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / ADAPTER_FILE).is_file() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(f"{folder} holds its weights only as adapter_model.bin, a pickle file that can run code "
                              f"when read; save the adapter again as {ADAPTER_FILE} (peft's save_pretrained does so)")
    for name in (ADAPTER_FILE, "adapter_config.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; the folder is not a whole adapter")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return all folders checkpoint-{step} of a run, by ascending step, good or not."""
    steps = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run_dir.glob("checkpoint-*")}
    numbered = [(int(match[1]), path) for path, match in steps.items() if match]
    return [path for _, path in sorted(numbered)]


def last_good(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that verifies (None: none), and the errors of newer ones."""
    problems: list[str] = []
    for folder in reversed(list_checkpoints(run_dir)):
        try:
            verify(folder)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return folder, problems
    return None, problems


def fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the expected size and sha256 of each file; CheckpointError if the manifest is unusable."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {folder} is not a whole checkpoint")
    try:
        listed = json_object(path.read_bytes())["files"]
        files = {name: {"size": int(entry["size"]), "sha256": entry["sha256"]} for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is truncated or altered ({error!r}); use an older checkpoint") from error
    absent = [name for name in FILES if name not in files]
    if absent:
        raise CheckpointError(f"{path} is altered: it does not list {absent[0]}; use an older checkpoint")
    return files
