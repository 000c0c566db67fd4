"""The problems (inputs, reference, upstream gradients) and providers that bench/kernels/bench.py measures."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.common.rows import OWN, version_of

FWD, FWD_BWD = "fwd", "fwd+bwd"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Results = dict[str, Tensor]
Forward = Callable[..., Results]
OURS = "lowmem_grpo"


class UnsupportedError(Exception):
    """A provider cannot do this problem; the message says why."""


@dataclass(frozen=True)
class Case:
    """An op at a shape, forward only or with backward."""

    op: str
    passes: str
    shape: dict[str, int]
    dtype: str
    device: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def label(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{self.op} {self.passes}, {sizes}, {self.dtype}, {self.device}"

    def generator(self) -> torch.Generator:
        """Return a seeded generator, so that every run has the same inputs."""
        return torch.Generator(self.device).manual_seed(0)

    def randn(self, *sizes: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Return normal numbers in the dtype of the case."""
        values = torch.randn(*sizes, generator=generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(self.torch_dtype)


NEEDS: dict[str, tuple[Callable[[Case], bool], str]] = {  # (whether a case has it, the message if not)
    "card": (lambda case: case.device == "cuda", "its kernels need a card"),
    "16 bits": (lambda case: case.dtype != "float32", "its kernels need 16 bits"),
    "forward": (lambda case: case.passes == FWD, "it has no gradients"),
    "backward": (lambda case: case.passes == FWD_BWD, "returns the loss, and always with its gradients"),
    "one row": (lambda case: case.shape["M"] == 1, "for one row"),
}


@dataclass
class Problem:
    """Inputs, upstream gradients, and the true results in float64."""

    case: Case
    leaves: Results  # inputs that take a gradient
    given: dict[str, Any]  # the other inputs
    upstream: Results  # gradient of each output, for fwd+bwd
    truth: Callable[[], Results]  # outputs and grad_x for each leaf x, in float64
    moved_bytes: dict[str, int] = field(default_factory=dict)  # least traffic of each pass, for ops bound by memory
    flops: dict[str, int] = field(default_factory=dict)  # operations of the matrix products of each pass


@dataclass(frozen=True)
class Run:
    """A call to be timed, and a reset before each call, which is not timed."""

    call: Callable[[], Results]
    reset: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Provider:
    """One implementation. `make` imports what it needs and returns the forward of a problem, or the call to be timed.
    One that `overwrites` leaves or upstream gradients gets its own copies, restored before each call."""

    name: str
    make: Callable[[Problem], Forward | Run]
    package: str = "torch"
    note: str = ""
    needs: tuple[str, ...] = ()
    overwrites: bool = False

    def package_version(self) -> str | None:
        return version_of(OWN if self.package == OURS else self.package)

    def build(self, problem: Problem) -> Run:
        """Return the call to time. ImportError if it is not installed, UnsupportedError if the case lacks a need."""
        made = self.make(problem)
        for has, words in map(NEEDS.__getitem__, self.needs):
            if not has(problem.case):
                raise UnsupportedError(words)
        return made if isinstance(made, Run) else autograd_run(problem, made, self.overwrites)


def plain(name: str, forward: Forward, package: str = OURS, note: str = "", **options: Any) -> Provider:
    """Return the provider of a plain function."""
    return Provider(name, lambda problem: forward, package, note, **options)


def pair(ours: Forward, reference: Forward, note: str = "") -> list[Provider]:
    """Return our provider and the plain reference's, which has a note."""
    return [plain(OURS, ours), plain("reference", reference, note=note)]


def compiled(forward: Forward, note: str) -> Provider:
    """Return the provider of a plain function under torch.compile."""

    def make(problem: Problem) -> Forward:
        torch._dynamo.reset()
        return torch.compile(forward, dynamic=False)

    return Provider("torch_compile", make, note=note)


def autograd_run(problem: Problem, forward: Forward, overwrites: bool) -> Run:
    """Return a call of `forward(**leaves, **given)`, and of autograd if the case has a backward pass."""
    backward = problem.case.passes == FWD_BWD
    leaves = {name: leaf.clone() if overwrites else leaf.detach() for name, leaf in problem.leaves.items()}
    upstream = {name: grad.clone() if overwrites else grad for name, grad in problem.upstream.items()}
    for leaf in leaves.values():
        leaf.requires_grad_(backward)

    def call() -> Results:
        with torch.set_grad_enabled(backward):
            outputs = forward(**leaves, **problem.given)
        if not backward:
            return outputs
        wanted = {name: value for name, value in outputs.items() if value.requires_grad}
        sources = [upstream.get(name) for name in wanted]
        grads = torch.autograd.grad(list(wanted.values()), list(leaves.values()), sources)
        return outputs | {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    return Run(call, lambda: restore(problem, leaves, upstream)) if overwrites else Run(call)


def restore(problem: Problem, leaves: Results, upstream: Results) -> None:
    """Restore the copies; otherwise their numbers would shrink from call to call and become denormal."""
    with torch.no_grad():
        for copies, originals in ((leaves, problem.leaves), (upstream, problem.upstream)):
            for name, copy in copies.items():
                copy.copy_(originals[name])


def truth_of(forward: Forward, leaves: Results, given: dict[str, Any], upstream: Results) -> Results:
    """Return outputs and gradients in float64, by autograd through a plain function."""
    wide = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
    others = {name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
              for name, value in given.items()}
    outputs = forward(**wide, **others)
    wanted = [name for name in outputs if name in upstream]
    grads = torch.autograd.grad([outputs[name] for name in wanted], list(wide.values()),
                                [upstream[name].double() for name in wanted])
    return {name: value.detach() for name, value in outputs.items()} | {
        f"grad_{name}": grad for name, grad in zip(wide, grads, strict=True)
    }
