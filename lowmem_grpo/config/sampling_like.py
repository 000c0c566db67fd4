"""Sampling parameters of another class with vLLM's field names (vLLM's own, that is) as ours."""

from dataclasses import fields
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams

OURS = tuple(field.name for field in fields(SamplingParams))
DERIVED = ("output_text_buffer_length",)  # vLLM computes it from `stop`


def as_sampling_params(given: Any, longest: int) -> SamplingParams:
    """`given` as our SamplingParams; None gives the defaults. `longest` stands for vLLM's max_tokens=None.

    Raises ValueError for a field that we do not know and that is not at its default, TypeError for another kind of
    object.
    """
    if given is None or isinstance(given, SamplingParams):
        return given or SamplingParams()
    names = field_names(given)
    if not {"n", "temperature", "max_tokens"} <= set(names):
        raise TypeError(f"sampling_params is a {type(given)}; pass a lowmem_grpo.SamplingParams, or vLLM's own")
    check_others(given, [name for name in names if name not in (*OURS, *DERIVED)])
    values = {name: getattr(given, name) for name in names if name in OURS}
    return SamplingParams(**values | {"max_tokens": longest if given.max_tokens is None else given.max_tokens})


def field_names(given: Any) -> list[str]:
    """The public fields of a msgspec struct (vLLM's), a dataclass or a plain object."""
    kind = type(given)
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", None)
    return [name for name in names or getattr(given, "__dict__", {}) if not name.startswith("_")]


def check_others(given: Any, names: list[str]) -> None:
    """Raise ValueError for each of the fields that differs from its default."""
    default = type(given)()  # compared by repr: arrays have no single ==
    shown = {name: (repr(getattr(given, name)), repr(getattr(default, name))) for name in names}
    different = [f"{name}={value}" for name, (value, usual) in shown.items() if value != usual]
    if different:
        raise ValueError(
            f"sampling_params sets {', '.join(different)}, which is not supported; leave it out. Supported are "
            f"{', '.join(OURS)}"
        )
