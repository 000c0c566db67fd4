"""Finds the saved adapter in a run, a checkpoint or an adapter folder, and checks the base that it was trained on."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo.runs import whole_files
from lowmem_grpo.runs.records import FINAL, SUMMARY, json_object
from lowmem_grpo.runs.whole_files import ADAPTER_FILE, AdapterError, CheckpointError, check_adapter_folder

MANIFEST = "manifest.json"
BASE_FILE = "base_model.json"  # beside the adapter


class RunError(ValueError):
    """Raised for a path without a usable adapter; the message says what is there, and what to do."""


@dataclass(frozen=True)
class RunAdapter:
    """A saved adapter and a description of its origin."""

    folder: Path
    note: str  # describes the adapter for users


def find_adapter(path: Path, unfinished: bool = False) -> RunAdapter:
    """Return the adapter in a run, checkpoint or adapter folder. RunError if there is none, or if the run never
    finished and `unfinished` does not allow its last good checkpoint; CheckpointError for damaged files."""
    if not path.exists():
        raise RunError(f"there is no {path}; give the folder of a run, of a checkpoint or of a saved adapter")
    if not path.is_dir():
        raise RunError(f"{path} is a file; give the folder of a run, of a checkpoint or of a saved adapter")
    if (path / MANIFEST).is_file():
        whole_files.verify(path)
        return RunAdapter(path, f"{path.absolute().name}, a checkpoint")
    if any((path / name).is_file() for name in (ADAPTER_FILE, "adapter_config.json", "adapter_model.bin")):
        check_adapter_folder(path)
        return RunAdapter(path, f"{path.absolute().name}, a saved adapter")
    return of_run(path, unfinished)


def of_run(run_dir: Path, unfinished: bool) -> RunAdapter:
    """Return the final adapter of a run directory, or with `unfinished` its last good checkpoint."""
    summary = read_summary(run_dir)
    good, broken = whole_files.last_good(run_dir)
    if not summary and good is None and not broken:
        raise RunError(f"{run_dir} is neither a run nor an adapter: it holds no {SUMMARY}, no checkpoint and no "
                       f"{ADAPTER_FILE}")
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
    """Return a finished run's final adapter, or its checkpoint `good` if that is gone."""
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
        return json_object(path.read_bytes())
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

    def write(self, folder: Path) -> None:
        """Write the record into the adapter's folder; a local model gets its absolute path."""
        local = self.model is not None and Path(self.model).is_dir()
        fields = asdict(self) | ({"model": str(Path(str(self.model)).absolute())} if local else {})
        (folder / BASE_FILE).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def base_of_adapter(folder: Path) -> BaseRecord:
    """Return the record of an adapter's base, or else PEFT's name of it; ValueError for a broken record."""
    own = folder / BASE_FILE
    if own.is_file():
        try:
            return BaseRecord(**json.loads(own.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{own} cannot be read ({error}); name the base with --base, and how it was held with "
                             "--load-in-4bit, --fp8 or --16bit") from error
    return BaseRecord(adapter_settings(folder).get("base_model_name_or_path") or None)


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json. AdapterError if it cannot be read, or is not of type LoRA."""
    path = folder / "adapter_config.json"
    try:
        settings = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {path.name}: {error}; use an older checkpoint"
                           ) from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{path} holds no settings; use an older checkpoint")
    if settings.get("peft_type") != "LORA":
        raise AdapterError(f"the adapter in {folder} is of type {settings.get('peft_type')}; only LoRA can be loaded")
    return settings


BASE_SUFFIXES = ("-bnb-4bit", "-unsloth")  # mark 4-bit copies of the same weights


def check_base(folder: Path, name: str, revision: str | None) -> None:
    """Raise AdapterError if the adapter's record names another base than the model `name` at `revision`."""
    record = base_of_adapter(folder)
    if record.model is None:
        return
    other = not same_model(record.model, name)
    if other or (record.revision and revision and record.revision != revision):
        trained, here = (f"{model}{f', revision {at}' if at else ''}"
                         for model, at in ((record.model, record.revision), (name, revision)))
        raise AdapterError(f"the adapter in {folder} was trained on {trained}, and this model is {here}: load that "
                           "base, or, if both are the same weights under two names, say so: "
                           f"load_lora({str(folder)!r}, any_base=True)")


def same_model(model: str, other: str) -> bool:
    """Return whether two names or folders mean the same weights: the same folder, or equal `plain_name`."""
    if Path(model).is_dir() and Path(other).is_dir() and Path(model).resolve() == Path(other).resolve():
        return True
    return plain_name(model) == plain_name(other)


def plain_name(model: str) -> str:
    """Return the last part of a model name or path, in lower case, without `BASE_SUFFIXES`."""
    snapshot = next((part for part in Path(model).parts if part.startswith("models--")), model)  # in the hub's cache
    name = snapshot.replace("--", "/").rstrip("/").rpartition("/")[2].lower()
    for suffix in BASE_SUFFIXES:
        name = name.removesuffix(suffix)
    return name
