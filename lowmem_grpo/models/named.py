"""A model's name as a folder, or as a name on the hub; needs no torch, so that a wrong path is refused at once."""

from importlib.resources import files
from pathlib import Path

TINY = "tiny"  # the model that ships with the package


def resolve(model_name: str) -> str:
    """The folder of "tiny" or of a path, otherwise the name itself; OSError for a path that leads to no model."""
    if model_name == TINY:
        return str(files("lowmem_grpo") / "assets" / TINY)
    looks_like_path = str(model_name).startswith((".", "/", "~")) or str(model_name).count("/") > 1
    folder = Path(model_name).expanduser()
    if not looks_like_path and not folder.is_dir():
        return model_name
    if not (folder / "config.json").is_file():
        why = "the folder holds no config.json" if folder.is_dir() else "there is no such folder"
        raise OSError(f"no model {model_name!r}: {why}")
    return str(folder)
