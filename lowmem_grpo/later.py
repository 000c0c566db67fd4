"""Torch, which takes seconds to import, where a module needs it only once it computes: settings are checked before."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


class Later:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)  # asked for once
        return value


if TYPE_CHECKING:  # a type checker sees the module itself
    import torch as torch
else:
    torch = Later("torch")
