"""The JSON bodies of the Tinker protocol, checked. ValueError names the field that is wrong."""

import json
import secrets
from dataclasses import dataclass, fields
from typing import Any

from lowmem_grpo.service.tinker.adapters import Adam, LoraSettings

ADAM = ("adam", "adamw")


def json_of(body: bytes) -> dict[str, Any]:
    """A body as a JSON object."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is no JSON ({type(error).__name__}); send a JSON object") from None
    if not isinstance(found, dict):
        raise ValueError(f"the body is a JSON {type(found).__name__}; send an object")
    return found


def whole(given: dict[str, Any], name: str, least: int = 0) -> int:
    """A whole number of a body."""
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    return value


def adam_of(body: bytes) -> Adam:
    """The settings of an optim_step."""
    given = json_of(body)
    if "optimizer_params" in given:
        raise ValueError("optimizer_params is given; only Adam is offered: pass types.AdamParams(...)")
    params = given.get("adam_params")
    if not isinstance(params, dict):
        raise ValueError(f"adam_params is {params!r}; it must be an object, such as {{\"learning_rate\": 1e-4}}")
    names = [field.name for field in fields(Adam)]
    if unknown := sorted(params.keys() - {*names, "type"}):
        raise ValueError(f"adam_params has {unknown[0]!r}, which is not offered; it takes {', '.join(names)}")
    return Adam(**{name: params[name] for name in names if name in params})


def lora_of(given: dict[str, Any]) -> LoraSettings:
    """The settings of a create_model."""
    optimizer = given.get("optimizer_config") or {}
    if not isinstance(optimizer, dict) or optimizer.get("type", "adamw") not in ADAM:
        raise ValueError(f"optimizer_config is {optimizer!r}; only Adam is offered: leave it out")
    lora = given.get("lora_config")
    if not isinstance(lora, dict):
        raise ValueError("lora_config is missing; only LoRA is trained here: use create_lora_training_client")
    allowed = {"rank", "seed", "train_unembed", "train_mlp", "train_attn"}
    if unknown := sorted(lora.keys() - allowed):
        raise ValueError(f"lora_config has {unknown[0]!r}; it takes {', '.join(sorted(allowed))}")
    for name in ("train_unembed", "train_mlp", "train_attn"):
        if not isinstance(lora.get(name, True), bool):
            raise ValueError(f"lora_config.{name} is {lora[name]!r}; it must be true or false")
    seed = secrets.randbits(31) if lora.get("seed") is None else whole(lora, "seed")
    return LoraSettings(whole(lora, "rank", 1), seed, lora.get("train_attn", True), lora.get("train_mlp", True))


@dataclass(frozen=True)
class SaveCall:
    """A save_weights or save_weights_for_sampler."""

    name: str | None
    """What to save under; None is a snapshot of no name."""
    sampler: int
    """The number of the sampling session that a snapshot gets."""
    overwrite: bool
    seconds: int | None
    """How long it is kept; None is for ever."""


def save_of(given: dict[str, Any], nameless: bool) -> SaveCall:
    """The settings of a save, which may have no name where it is `nameless`."""
    name, seconds = given.get("path"), given.get("ttl_seconds")
    if given.get("kind", "snapshot") != "snapshot":
        raise ValueError(f"kind is {given['kind']!r}; only snapshot is offered")
    if name is None and not nameless:
        raise ValueError("path is missing; give the weights a name")
    if not isinstance(given.get("overwrite", False), bool):
        raise ValueError(f"overwrite is {given['overwrite']!r}; it must be true or false")
    return SaveCall(name, whole(given, "sampling_session_seq_id") if name is None else 0, given.get("overwrite", False),
                    None if seconds is None else whole(given, "ttl_seconds", 1))


@dataclass(frozen=True)
class LoadCall:
    """A load_weights."""

    path: str
    optimizer: bool
    """Whether Adam's moments come along."""


def load_of(given: dict[str, Any]) -> LoadCall:
    """The settings of a load."""
    optimizer = given.get("optimizer_config") or {}
    if not isinstance(optimizer, dict) or optimizer.get("type", "adamw") not in ADAM:
        raise ValueError(f"optimizer_config is {optimizer!r}; only Adam is offered: leave it out")
    if given.get("weights_access_token") is not None:
        raise ValueError("weights_access_token is given; only weights of your own key can be loaded")
    if not isinstance(given.get("optimizer"), bool):
        raise ValueError(f"optimizer is {given.get('optimizer')!r}; it must be true or false")
    return LoadCall(str(given.get("path")), given["optimizer"])
