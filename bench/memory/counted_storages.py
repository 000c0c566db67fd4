"""Count the storages that operations allocate, with real or fake tensors, and report what was alive at the peak.

Fake tensors are on the CPU but stand for a card, so what only the CPU's form of a kernel allocates is left out. They
hold no values. A result that depends on values comes from facts about the batch (`Known`): the number of True places
of a mask, and the number of sequences. Any other number that is read is 1.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OURS = "lowmem_grpo"
PLACES = (OURS, "peft", "transformers", "bitsandbytes")  # packages whose code names a storage
WORTH_NAMING = 2**20  # bytes; smaller storages are only named by their operation
CPU_FORMS = (  # file, function, and operations that allocate only in the CPU's form of a kernel
    ("logprob_kernels.py", "finish_rows_ref", ("aten::exp", "aten::clone", "aten::where")),  # a second chunk of logits
    ("logprob_kernels.py", "forward_rows", ("aten::clone",)),
    ("logprob_kernels.py", "differentiate_ref", ("aten::sub",)),  # a second tile of logits
    ("custom_op.py", "addmm_fp32", ("aten::empty_like",)),  # the product, before it is added
    ("logits.py", "row_dot", ("aten::mul",)),
    ("logits.py", "<listcomp>", ("aten::mul",)),
)
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")


@dataclass(frozen=True)
class Known:
    """Facts that fake tensors do not hold: the True places of a mask by its length, and the sequences of a batch."""

    mask_counts: dict[int, int] = field(default_factory=dict)
    sequences: int = 1
    tied: tuple[int, ...] = ()  # shape of a matrix that is trained as embedding and head: autograd adds up in place


@dataclass(frozen=True)
class Made:
    """A storage: its bytes, the operation that made it, and the code that asked for it."""

    bytes: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str


class CountedStorages(TorchDispatchMode):
    """A mode in which `now` is the bytes alive on the device, `peak` the most so far, and `at_peak` the storages then.

    Storages of `weights` are not counted. Those allocated inside `on_host()` count as `host_now` and `host_peak`.
    """

    def __init__(self, weights: list[Tensor], known: Known) -> None:
        super().__init__()
        self.weights = [tensor.untyped_storage() for tensor in weights]  # held, so that no new one gets their addresses
        self.seen = {storage._cdata for storage in self.weights}
        self.known = known
        self.alive: dict[int, Made] = {}
        self.now = self.peak = self.host_now = self.host_peak = 0
        self.at_peak: list[Made] = []
        self.peak_is_new = self.host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.answer(func._schema.name, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf, func._schema.name)
        return result

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what is allocated inside the block as host memory."""
        self.host = True
        try:
            yield
        finally:
            self.host = False

    def answer(self, name: str, args: Any) -> Any:
        """Return the result of an operation that depends on values; None if it depends only on shapes."""
        if name == "aten::_local_scalar_dense":
            return {torch.bool: True, torch.int64: 1}.get(args[0].dtype, 1.0)
        if name == "aten::equal":  # compares the code tables of two 4-bit weights
            return True
        if name == "aten::bincount":
            return args[0].new_empty(self.known.sequences)
        if name not in INDEXING or not (masks := [index for index in args[1] if is_mask(index)]):
            return None
        if name == "aten::index":
            length = len(masks[0])
            return args[0].new_empty(self.known.mask_counts.get(length, length), *args[0].shape[masks[0].dim() :])
        return args[0] if name == "aten::index_put_" else torch.empty_like(args[0])

    def count(self, tensor: Tensor, operation: str) -> None:
        """Count the tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen or (operation == "aten::add" and tuple(tensor.shape) == self.known.tied):
            return
        size = storage.nbytes()
        self.seen.add(key)
        if size >= WORTH_NAMING and cpu_form(operation):
            weakref.finalize(storage, self.seen.discard, key)
            return
        if self.host:
            self.host_now += size
            self.host_peak = max(self.host_peak, self.host_now)
            weakref.finalize(storage, self.release, key, size)
            return
        where = place() if size >= WORTH_NAMING else ""
        self.alive[key] = Made(size, operation.removeprefix("aten::"), tuple(tensor.shape), tensor.dtype, where)
        weakref.finalize(storage, self.release, key)
        self.now += size
        if self.now > self.peak:
            self.peak, self.peak_is_new = self.now, True

    def release(self, key: int, on_host: int = 0) -> None:
        self.seen.discard(key)
        self.host_now -= on_host
        if key not in self.alive:
            return
        if self.peak_is_new:
            self.at_peak, self.peak_is_new = list(self.alive.values()), False
        self.now -= self.alive.pop(key).bytes

    def breakdown(self, count: int = 25) -> list[tuple[int, int, Made]]:
        """Return (bytes, number, example) of the storages alive at the peak, grouped by equal ones, largest first."""
        alive = list(self.alive.values()) if self.peak_is_new else self.at_peak
        sizes: Counter[Made] = Counter()
        for made in alive:
            sizes[made] += made.bytes
        return [(size, size // max(made.bytes, 1), made) for made, size in sizes.most_common(count)]


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


@cache
def folder(package: str) -> Path | None:
    """Return the folder of a package; None if it is not installed. Its name in a path is not enough: a clone of this
    repository has the package's name too, so the benches' own frames would count as the package's."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent


@cache
def owner(filename: str) -> str | None:
    """Return the package of `PLACES` that a source file belongs to; None for all other code."""
    path = Path(filename).resolve()
    return next((name for name in PLACES if (root := folder(name)) and path.is_relative_to(root)), None)


def cpu_form(operation: str) -> bool:
    """Return whether the innermost frame of this package allocates what it would not on a card."""
    frame: Any = sys._getframe(2)
    while frame is not None and owner(frame.f_code.co_filename) != OURS:
        frame = frame.f_back
    if frame is None:
        return False
    name, function = frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name
    return any((name, function) == form[:2] and operation in form[2] for form in CPU_FORMS)


def place() -> str:
    """Return the innermost line of this package or a library that is not torch, and the model's line that led to it."""
    frame: Any = sys._getframe(2)
    found: list[str] = []
    while frame is not None and len(found) < 2:
        path = frame.f_code.co_filename
        if owner(path) and (not found or "modeling" in path):
            found.append(f"{path.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
