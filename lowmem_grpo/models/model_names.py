"""Resolve a model's name to a folder or a name on the hub, without importing torch, so that a wrong one fails fast."""

from importlib.resources import files
from pathlib import Path
from typing import Any

TINY = "tiny"  # a model that ships with the package, and trains on a CPU in minutes
TINY_GAMES = "tiny-games"  # plays games
TINY_INBOX = "tiny-inbox"  # searches mails
TINY_TALKS = "tiny-talks"  # plays 2048, asks questions and answers them
EMBEDDED = (TINY, TINY_GAMES, TINY_INBOX, TINY_TALKS)


def resolve(model_name: str) -> str:
    """Return the folder of an embedded model or of a path, else the name itself; OSError for a path without a model."""
    if model_name in EMBEDDED:
        return str(files("lowmem_grpo") / "assets" / model_name)
    looks_like_path = str(model_name).startswith((".", "/", "~")) or str(model_name).count("/") > 1
    folder = Path(model_name).expanduser()
    if not looks_like_path and not folder.is_dir():
        return model_name
    if not (folder / "config.json").is_file():
        why = "the folder holds no config.json" if folder.is_dir() else "there is no such folder"
        raise OSError(f"no model {model_name!r}: {why}")
    return str(folder)


def public_name(model_name: str) -> str:
    """Return a name that other programs on this machine can load: an absolute folder, or a name on the hub."""
    folder = Path(resolve(model_name))
    return str(folder.resolve()) if folder.is_dir() else model_name


def find(model_name: str, **options: Any) -> str:
    """Resolve a name, and raise OSError within seconds if it is neither in the hub's cache nor on the hub. `options`
    are those of `hub.find_model`."""
    path = resolve(model_name)
    if not Path(path).is_dir():
        from lowmem_grpo.models.hub import (
            find_model,  # imported here: huggingface_hub takes half a second, and folders do not need it
        )

        find_model(path, **options)
    return path


def config_of(model_name: str) -> Any:
    """Return the config of an embedded model, a shipped config, a folder or file, or a model on the hub. ValueError if
    none is found."""
    from lowmem_grpo.memory.named_configs import named_config

    try:
        return named_config(resolve(model_name) if model_name in EMBEDDED else model_name)
    except ValueError as unknown:
        if model_name.count("/") != 1 or Path(model_name).exists():
            raise
        try:
            find(model_name, weights=False)
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(model_name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0]
            raise ValueError(f"{unknown}. From the hub: {cause}") from error
