"""What a CUDA graph does, on the CPU: the operations of a step run again, on the same memory and without its Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem_grpo.engines.fixed_cache import STEP
from lowmem_grpo.engines.transformers_engine import TransformersEngine


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Operations(TorchDispatchMode):
    """Records torch's operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        given = {part.untyped_storage().data_ptr() for part in tensors((args, kwargs))}
        made = [part for part in tensors(result) if part.untyped_storage().data_ptr() not in given]
        if made or func._schema.is_mutable:  # a view stays what it is
            self.kept.append((func, args, kwargs, [] if func._schema.is_mutable else tensors(result)))
        return result

    def again(self) -> None:
        """All of them, into the results that they had."""
        for func, args, kwargs, results in self.kept:
            for held, new in zip(results, tensors(func(*args, **kwargs)), strict=False):
                held.copy_(new)


class Recorder:
    """Records steps of an engine, and counts how often it did and how often they ran."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.step, self.recorded, self.ran = engine.step, 0, 0
        engine.step.record, engine.step.block = self, STEP

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """This runs the work, which recording on a card does not, so that what it did is undone."""
        with Operations() as operations:
            result = work()
        self.step.at.sub_(1)
        self.step.mask.index_fill_(1, self.step.at, False)
        self.step.added.index_fill_(1, self.step.at, -torch.inf)
        self.step.positions.sub_(1)
        self.recorded += 1

        def run() -> Tensor:
            self.ran += 1
            with torch.no_grad():
                operations.again()
            return result

        return run
