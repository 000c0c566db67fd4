"""The model configs that ship with the package, found by the models' names on the hub."""

import difflib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

VARIANT = re.compile(r"-(instruct|base|it|chat|unsloth|bnb|4bit|bf16|[0-9]{4})$")
NAMESAKES = {"phi-4": "phi-4-14b", "meta-llama-3.1-8b": "llama-3.1-8b", "meta-llama-3.3-70b": "llama-3.3-70b",
             "olmo-3-7b-think": "olmo-3-7b", "ministral-3-8b-reasoning": "ministral-3-8b",
             "qwen3.5-27b": "qwen3.6-27b", "qwen3.8-27b": "qwen3.6-27b"}  # same shape, other weights


def named_shapes() -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in (files("lowmem_grpo") / "assets" / "shapes").iterdir())


def named_config(name: str) -> dict[str, Any]:
    """Return the fields of a model's config.json, by its name here or on the hub, or by a folder or file.

    Case, owner, and endings such as -Instruct are ignored. The ValueError for an unknown name lists similar ones.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return read_config(path / "config.json" if path.is_dir() else path)
    short = shape_name(name)
    if short is None:
        close = difflib.get_close_matches(plain_name(name), named_shapes(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"no model {name!r}; {hint}Give one of {', '.join(named_shapes())}, or a folder with a "
                         "config.json")
    return json.loads((files("lowmem_grpo") / "assets" / "shapes" / f"{short}.json").read_text())


def shape_name(name: str) -> str | None:
    """Return the name of the shipped config that a model's name stands for; None if there is none."""
    plain = plain_name(name)
    plain = NAMESAKES.get(plain, plain)
    return plain if plain in named_shapes() else None


def plain_name(name: str) -> str:
    """Return a model's name in lower case, without its owner and without endings that do not change the shape."""
    plain = name.rpartition("/")[2].lower()
    while (shorter := VARIANT.sub("", plain)) != plain:
        plain = shorter
    return plain


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json; ValueError if it cannot be read, with the reason."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a model's config.json: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no object of fields; a model's config.json is needed")
    return fields
