"""Finds saved adapters, and checks their files and the base model that they were trained on. No torch is needed."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo.config.teacher import OF_MODEL
from lowmem_grpo.runs.files import beside
from lowmem_grpo.runs.records import FINAL, SUMMARY, json_object
from lowmem_grpo.utils import (
    COUNT,
    MIB,
    PATH,
    TEXT,
    TRUTH,
    Rule,
    bytes_of,
    check_given,
    is_adapter,
    leads_out,
    read_json,
)

ADAPTER_FILE = "adapter_model.safetensors"
FILES = (ADAPTER_FILE, "adapter_config.json", "optimizer.safetensors", "rng.safetensors", "state.json")
MANIFEST = "manifest.json"
BASE_FILE = "base_model.json"  # beside the adapter
NEW_ROWS = "new_rows.safetensors"  # beside the adapter: the base's rows of new tokens, from before training
MOST_BYTES = 16 * MIB  # the most that a file of settings has
OF_BASE: dict[str, Rule] = {
    "model": PATH, "load_in_4bit": TRUTH, "dtype": TEXT, "revision": TEXT, "sha256": TEXT, "vocab_size": COUNT,
    "load_in_fp8": ('True, False or "block"', lambda value: isinstance(value, bool) or value == "block"),
}
BASE_SUFFIXES = ("-bnb-4bit", "-unsloth")  # mark 4-bit copies of the same weights


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written, read or trusted; the message names the file, and says what to do."""


class MismatchError(CheckpointError):
    """Raised for a good checkpoint with another adapter, optimizer or format than the run's."""


class AdapterError(ValueError):
    """Raised if a saved adapter cannot be used; the message says why, and what to do."""


class RunError(ValueError):
    """Raised for a path without a usable adapter; the message says what is there, and what to do."""


def verify(folder: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file matches the manifest."""
    try:
        check_adapter_folder(folder)
        for name, expected in read_manifest(folder).items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; use an older checkpoint")
            if path.stat().st_size < expected["size"]:
                raise CheckpointError(f"{path} is truncated: {path.stat().st_size:,} of {expected['size']:,} bytes; "
                                      "use an older checkpoint")
            if path.stat().st_size != expected["size"] or fingerprint(path) != expected:
                raise CheckpointError(f"{path} is altered: it differs from what was written; use an older checkpoint")
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}; use an older checkpoint"
                              ) from error


def check_adapter_folder(folder: Path) -> None:
    """Raise CheckpointError unless the folder holds an adapter in safetensors; pickled weights are never read."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint or of a saved adapter")
    if not (folder / ADAPTER_FILE).is_file() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(f"{folder} holds its weights only as adapter_model.bin, a pickle file that can run code "
                              f"when read; save the adapter again as {ADAPTER_FILE} (peft's save_pretrained does so)")
    for name in (ADAPTER_FILE, "adapter_config.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; the folder is not a whole adapter"
                                  f"{inner_adapters(folder)}")
    links = [path for path in sorted(folder.iterdir()) if path.is_symlink() and path.is_file()]
    if outside := [path for path in links if leads_out(folder, path.name)]:  # an export would copy it
        raise CheckpointError(f"{outside[0]} is a link to a file outside of its folder; put the file itself into the "
                              "folder")


def inner_adapters(folder: Path) -> str:
    inner = sorted(path.parent.name for path in folder.glob(f"[!.]*/{ADAPTER_FILE}"))
    return f"; take {' or '.join(inner)}, which it holds" if inner else ""


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return all folders checkpoint-{step} of a run, damaged ones included, by ascending step."""
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
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {folder} is not a whole checkpoint")
    try:
        listed = json_object(bytes_of(path))["files"]
        files = {name: {"size": int(entry["size"]), "sha256": entry["sha256"]} for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is truncated or altered ({error!r:.200}); use an older checkpoint") from error
    if outside := [name for name in files if leads_out(folder, name)]:
        raise CheckpointError(f"{path} is altered: it lists {outside[0]!r:.80}, which is no file of its folder; use an "
                              "older checkpoint")
    absent = [name for name in FILES if name not in files]
    if absent:
        raise CheckpointError(f"{path} is altered: it does not list {absent[0]}; use an older checkpoint")
    return files


@dataclass(frozen=True)
class RunAdapter:
    """A saved adapter and a description of its origin."""

    folder: Path
    note: str  # describes the adapter for users


def find_adapter(path: Path, unfinished: bool = False) -> RunAdapter:
    """Return the adapter in a run, checkpoint or adapter folder; `unfinished` allows the last good checkpoint of a run
    that never finished. RunError if there is no adapter, CheckpointError for damaged files."""
    if not path.exists():
        raise RunError(f"there is no {path}; give the folder of a run, of a checkpoint or of a saved adapter "
                       f"({beside(path)})")
    if not path.is_dir():
        raise RunError(f"{path} is a file; give the folder of a run, of a checkpoint or of a saved adapter")
    if (path / MANIFEST).is_file():
        verify(path)
        return RunAdapter(path, f"{path.absolute().name}, a checkpoint")
    if is_adapter(path) or any((path / name).is_file() for name in (ADAPTER_FILE, "adapter_model.bin")):
        check_adapter_folder(path)
        return RunAdapter(path, f"{path.absolute().name}, a saved adapter")
    return of_run(path, unfinished)


def adapter_at(teacher: str) -> Path | None:
    """Return the adapter in the folder `teacher` of a run, a checkpoint or an adapter; None if it is no folder, or that
    of a model. RunError or CheckpointError for another folder."""
    folder = Path(teacher).expanduser()
    if teacher in OF_MODEL or not folder.is_dir() or ((folder / "config.json").is_file() and not is_adapter(folder)):
        return None
    return find_adapter(folder).folder.absolute()


def of_run(run_dir: Path, unfinished: bool) -> RunAdapter:
    """Return the final adapter of a run directory, or with `unfinished` its last good checkpoint."""
    summary = read_summary(run_dir)
    good, broken = last_good(run_dir)
    if not summary and good is None and not broken:
        raise RunError(f"{run_dir} is neither a run nor an adapter: it holds no {SUMMARY}, no checkpoint and no "
                       f"{ADAPTER_FILE}{inner_adapters(run_dir)}")
    if summary.get("status") == "finished":
        return final_adapter(run_dir, good)
    state = f"its status is {summary.get('status')!r} after step {summary.get('steps')}" if summary else "no summary"
    if not unfinished:
        last = f"its last good checkpoint, {good.name}" if good else "a checkpoint (it has none that is whole)"
        raise RunError(f"the run in {run_dir} never finished ({state}): go on with it (resume=true), or take {last}, "
                       "with --unfinished")
    if good is None:
        why = f": {broken[0]}" if broken else ""
        raise RunError(f"the run in {run_dir} never finished ({state}) and has no checkpoint that is whole{why}")
    passed = f"; passed over: {'; '.join(broken)}" if broken else ""
    return RunAdapter(good, f"{good.name} of a run that never finished ({state}){passed}")


def final_adapter(run_dir: Path, good: Path | None) -> RunAdapter:
    """Return a finished run's final adapter, or its last good checkpoint `good` if the final adapter is gone."""
    try:
        check_adapter_folder(run_dir / FINAL)
    except CheckpointError:
        if good is None:
            raise
        return RunAdapter(good, f"{good.name} of a finished run whose final adapter is gone")
    return RunAdapter(run_dir / FINAL, f"final adapter of the run {run_dir.absolute().name}")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json of a run; empty if there is none. RunError if it is not JSON."""
    path = run_dir / SUMMARY
    if not path.is_file():
        return {}
    try:
        return json_object(bytes_of(path))
    except ValueError as error:
        raise RunError(f"{path} is not JSON: {error}") from error


@dataclass(frozen=True)
class BaseRecord:
    """The arguments of `FastLanguageModel.from_pretrained` that decide the weights. None means unknown."""

    model: str | None
    load_in_4bit: bool | None = None
    dtype: str | None = None  # "bfloat16"
    revision: str | None = None
    load_in_fp8: bool | str | None = None  # "block" for scales by block
    sha256: str | None = None  # of a GGUF file
    vocab_size: int | None = None  # rows of the embedding, if the base was resized

    def write(self, folder: Path) -> None:
        """Write the record into the adapter's folder; a local model gets its absolute path."""
        local = self.model is not None and Path(self.model).exists()
        fields = asdict(self) | ({"model": str(Path(str(self.model)).absolute())} if local else {})
        for name in ("sha256", "vocab_size"):
            if fields[name] is None:
                del fields[name]
        (folder / BASE_FILE).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def base_of_adapter(folder: Path) -> BaseRecord:
    """Return the record of an adapter's base; without one, PEFT's name of the base. ValueError for a broken record."""
    own = folder / BASE_FILE
    if own.is_file():
        try:
            record = BaseRecord(**read_json(bytes_of(own, MOST_BYTES)))
            check_given(asdict(record), OF_BASE)
            return record
        except (ValueError, TypeError) as error:
            raise ValueError(f"{own} cannot be read ({error}); move it away, and name the base with --base, and how "
                             "it was held with --load-in-4bit, --fp8 or --16bit") from error
    return BaseRecord(adapter_settings(folder).get("base_model_name_or_path") or None)


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json. AdapterError if it cannot be read, or is not of type LoRA."""
    path = folder / "adapter_config.json"
    try:
        settings = read_json(bytes_of(path, MOST_BYTES))
    except ValueError as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {path.name}: {error}; use an older checkpoint"
                           ) from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{path} holds no settings; use an older checkpoint")
    if not isinstance(base := settings.get("base_model_name_or_path") or "", str):
        raise AdapterError(f"{path}: base_model_name_or_path is {base!r:.80}; it must be a text, or null")
    if settings.get("peft_type") != "LORA":
        raise AdapterError(f"the adapter in {folder} is of type {settings.get('peft_type')!s:.40}; only LoRA can be "
                           "loaded")
    return settings


def check_base(folder: Path, name: str, revision: str | None, sha256: str | None = None,
               call: str | None = None) -> None:
    """Raise AdapterError if the adapter's record names another base than the model `name` at `revision`, or a GGUF file
    with another hash than `sha256`. `call` is the function of the user that takes `any_base`, if one does."""
    record = base_of_adapter(folder)
    if record.model is None:
        return
    other = record.sha256 != sha256 if record.sha256 and sha256 else not same_model(record.model, name)
    if other or (record.revision and revision and record.revision != revision):
        trained, here = (f"{model}{f', revision {at}' if at else ''}{f', sha256 {digest[:16]}' if digest else ''}"
                         for model, at, digest in ((record.model, record.revision, record.sha256),
                                                   (name, revision, sha256)))
        file = folder / (BASE_FILE if (folder / BASE_FILE).is_file() else "adapter_config.json")
        say = f"say so: {call}({str(folder)!r}, any_base=True)" if call else f"write this model's name into {file}"
        raise AdapterError(f"the adapter in {folder} was trained on {trained}, and this model is {here}: load that "
                           f"base, or, if both are the same weights under two names, {say}")


def same_model(model: str, other: str) -> bool:
    """Return whether two names or folders mean the same weights: the same folder, or equal `plain_name`."""
    if Path(model).exists() and Path(other).exists() and Path(model).resolve() == Path(other).resolve():
        return True
    return plain_name(model) == plain_name(other)


def plain_name(model: str) -> str:
    """Return the last part of a model name or path, in lower case, without `BASE_SUFFIXES`."""
    snapshot = next((part for part in Path(model).parts if part.startswith("models--")), model)  # in the hub's cache
    name = snapshot.replace("--", "/").rstrip("/").rpartition("/")[2].lower()
    for suffix in BASE_SUFFIXES:
        name = name.removesuffix(suffix)
    return name
