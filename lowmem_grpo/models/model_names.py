"""A model's name as a folder, or as a name on the hub; needs no torch, so that a wrong one is refused at once."""

from importlib.resources import files
from pathlib import Path
from typing import Any

TINY = "tiny"  # the model that ships with the package, which a CPU trains in minutes
TINY_GAMES = "tiny-games"  # the one that plays games
TINY_INBOX = "tiny-inbox"  # the one that searches mails
TINY_TALKS = "tiny-talks"  # the one that plays 2048, asks questions and answers them
EMBEDDED = (TINY, TINY_GAMES, TINY_INBOX, TINY_TALKS)


def resolve(model_name: str) -> str:
    """The folder of an embedded model or of a path, else the name itself; OSError for a path that leads to no model."""
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
    """Return the name by which programs on this machine find a model and its tokenizer: its folder, or its name on the
    hub."""
    folder = Path(resolve(model_name))
    return str(folder.resolve()) if folder.is_dir() else model_name


def find(model_name: str, **options: Any) -> str:
    """The same, and OSError for a name that is neither in the hub's cache nor to be had from the hub in seconds.
    `options` are those of `hub.find_model`."""
    path = resolve(model_name)
    if not Path(path).is_dir():
        from lowmem_grpo.models.hub import (
            find_model,  # its library takes half a second, which a folder need not wait for
        )

        find_model(path, **options)
    return path


def config_of(model_name: str) -> Any:
    """The config of a model: of an embedded one, of a built-in shape, of a folder or file, or from the hub."""
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
