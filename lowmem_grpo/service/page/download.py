"""The adapter of a run as one file: a zip with what PEFT reads."""

import re
import tempfile
import zipfile
from pathlib import Path

from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from lowmem_grpo.views.dashboard.plain_file import open_plain

SAVED = (".json", ".safetensors", ".txt", ".jinja", ".model", ".md")  # ends of names; states of an optimizer are not
STATES = ("optimizer", "scheduler", "rng", "trainer", "manifest")  # beginnings of names in a checkpoint
PIECE = 1024 * 1024


def zipped_adapter(run_dir: Path, name: str) -> FileResponse:
    """A reply that a browser saves. ValueError or RuntimeError says why a run has no adapter."""
    from lowmem_grpo.runs.saved_adapter import find_adapter  # which needs torch: a page is there at once without it

    found = find_adapter(run_dir, unfinished=True)
    if not found.folder.resolve().is_relative_to(run_dir.resolve()):
        raise ValueError(f"the adapter of {name} lies outside of its folder, behind a link; it is not given away")
    title = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    with tempfile.NamedTemporaryFile(prefix="lowmem-grpo-", suffix=".zip", delete=False) as file:
        path = Path(file.name)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for each in sorted(found.folder.iterdir()):
                if each.suffix in SAVED and not each.name.startswith(STATES):
                    add(archive, each, f"{title}/{each.name}")
    return FileResponse(path, filename=f"{title}-adapter.zip", media_type="application/zip",
                        background=BackgroundTask(path.unlink, missing_ok=True))


def add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    """Copy a file piece by piece. OSError for a link."""
    with open_plain(path) as source, archive.open(name, "w", force_zip64=True) as target:
        while piece := source.read(PIECE):
            target.write(piece)
