"""Converts training state to tensors and plain JSON, and back, without pickle."""

import hashlib
import importlib.metadata
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowmem_grpo.runs.state import NUMBER, NUMBER_LIST, TALLY, TrainerState
from lowmem_grpo.utils import NUMBER_DICT, OF_KINDS, TRUTH, Rule, check_ranges, is_number, require

FORMAT = 1
OF_STATE: dict[str, Rule] = {  # of what a run saves beside `trainer`, by their places; each may be null or missing
    **dict.fromkeys(("source.position", "source.rows", "source.rounds", "source.drawn", "source.taken",
                     "memory.train.lowered", "memory.train.failures", "memory.rollout.lowered",
                     "memory.rollout.failures", "memory.rollout.kv_bytes", "objective.steps", "threads"), TALLY),
    **dict.fromkeys(("objective.last_k3", "objective.entropy.coef", "objective.entropy.last_entropy",
                     "source.pools.worst", "source.pools.best"), NUMBER),
    **dict.fromkeys(("objective.large_mismatch", "keeps_reference"), TRUTH),
    **dict.fromkeys(("trainer", "config"), OF_KINDS[dict]),
    **dict.fromkeys(("source.skipped", "records", "scaler"), NUMBER_DICT), "source.unusable": NUMBER_LIST,
    "source.pools.rows": ("a list of four values of each row", lambda value: isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 4 and all(held is None or is_number(held) for held in row)
        for row in value)),
}
ADAPTER = "default"  # peft's default name, whose adapter it saves at the top level of the folder


def collect(
    optimizer: Optimizer, scheduler: LRScheduler, state: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the content of state.json, and put the tensors of the state into `tensors`."""
    kind, sizes = optimizer_shape(optimizer)
    return {
        "format": FORMAT,
        "versions": {name: version(name) for name in ("lowmem_grpo", "torch", "transformers", "peft")},
        "state": state,
        "optimizer": {"class": kind, "group_sizes": sizes, "content": encode(optimizer.state_dict(), "", tensors)},
        "scheduler": encode(scheduler.state_dict(), "scheduler", tensors),
        "random": {
            "python": encode(random.getstate(), "", {}),
            "numpy": [value.tolist() if isinstance(value, np.ndarray) else value for value in np.random.get_state()],
        },
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """Return the adapter's parameters (not copies), under their names in the saved file."""
    held: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return held


def base_digest(model: PeftModel) -> str:
    """Return "DTYPES A B", which tells base models of equal shapes apart. A and B are digests of 64 values per frozen
    tensor: A of the tensors as they are stored, B of the scales of 4-bit ones, which devices may round differently. A
    matrix with trained rows (`token_adapter`), which lie in it, is left out."""
    digests, dtypes = (hashlib.sha256(), hashlib.sha256()), set()
    for name, held in model.named_parameters():
        state = getattr(held, "quant_state", None)
        part = held if state is None else state.absmax  # 4-bit codes may be repacked
        if not (held.requires_grad or "lora_" in name or "token_adapter." in name or part.is_meta):
            digests[state is not None].update(part.detach().flatten()[:64].view(torch.uint8).cpu().numpy().tobytes())
            dtypes |= {str(held.dtype), str(part.dtype)}
    return " ".join([",".join(sorted(dtypes)), *(digest.hexdigest() for digest in digests)])


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return copies of a file's tensors: `load_file` may memory-map the file, which may be deleted later."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def random_tensors() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for index in range(torch.cuda.device_count()):
        states[f"cuda.{index}"] = torch.cuda.get_rng_state(index)
    return states


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return nested values as JSON, without functions. Tensors go to `tensors` under their path (`state.3.exp_avg`)."""
    if torch.is_tensor(value):
        tensors[name] = value
        return {"tensor": name}
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if not callable(inner)}
        return {"dict": [[key, encode(inner, f"{prefix}{key}", tensors)] for key, inner in kept.items()]}
    if isinstance(value, tuple | list):
        items = [encode(inner, f"{prefix}{index}", tensors) for index, inner in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    return value


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `encode`."""
    if isinstance(value, list):
        return [decode(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in inner}
    return tuple(decode(inner, tensors))


def check_state(state: dict[str, Any]) -> None:
    """Raise ValueError, naming the field, for a value in a caller's state that no run saves there."""
    for place, rule in OF_STATE.items():
        value: Any = state
        names = place.split(".")
        for depth, name in enumerate(names):
            require(".".join(names[:depth]) or "state", value, OF_KINDS[dict])
            if (value := value.get(name)) is None:
                break
        else:
            require(place, value, rule)
    check_ranges(TrainerState, state.get("trainer") or {})


def is_like(saved: Any, own: Any) -> bool:
    """Return whether a saved value is of the kind of the value that this run has in its place."""
    if own is None or is_number(own):
        return own is None or is_number(saved)
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        return len(own) == len(saved) and all(map(is_like, saved, own))
    return type(saved) is type(own)


def checked(saved: dict[str, Any], own: dict[str, Any], whose: str) -> dict[str, Any]:
    """Return the saved fields that `own` has too. ValueError for one of another kind."""
    kept = {name: value for name, value in saved.items() if name in own}
    for name, value in kept.items():
        if not is_like(value, own[name]):
            raise ValueError(f"{name} of {whose} is {value!r:.80}, and {own[name]!r:.80} here")
    return kept


def optimizer_shape(optimizer: Optimizer) -> tuple[str, list[int]]:
    kind = type(getattr(optimizer, "inner", optimizer))  # LoRA's, where more is trained beside it
    return kind.__name__, [len(group["params"]) for group in optimizer.param_groups]


def restore_optimizer(optimizer: Optimizer, state: dict[str, Any], saved: dict[str, Tensor]) -> None:
    """Load an optimizer's state in its saved dtypes, not the parameters'. `fused`, `foreach` and what the saved state
    lacks stay as they are."""
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        checked(group, {name: value for name, value in own.items() if name != "params"}, "the optimizer")
        group.update({name: value for name, value in own.items() if name in ("fused", "foreach") or name not in group})
    optimizer.load_state_dict(state)
    held: dict[str, Tensor] = {}
    encode(optimizer.state_dict(), "", held)
    for name, tensor in held.items():
        if tensor.dtype != saved[name].dtype:
            tensor.data = saved[name].to(tensor.device)
    inner = getattr(optimizer, "inner", optimizer)
    if getattr(inner, "is_paged", False):
        page(inner)


def page(optimizer: Any) -> None:
    """Move a paged bitsandbytes optimizer's moments back to paged memory after a load."""
    for parameter, held in optimizer.state.items():
        for name in {"state1", "state2"} & held.keys():
            buffer = optimizer.get_state_buffer(parameter, dtype=held[name].dtype)
            buffer.copy_(held[name])
            held[name] = buffer


def restore_random(state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Set the random states of Python, numpy, torch and the GPUs that exist here."""
    random.setstate(decode(state["python"], {}))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
