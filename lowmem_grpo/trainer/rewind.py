"""Copies of random states, gradients and optimizer state, which are restored before work is repeated."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

ALIGNED = 64  # bytes: any dtype may begin there


class RandomStates:
    """Torch's random states, of the CPU and of one device, captured at construction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capture()

    def capture(self) -> None:
        self.cpu = torch.get_rng_state()
        self.card = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.card is not None:
            torch.cuda.set_rng_state(self.card, self.device)


class Gradients:
    """The parameters' gradients, captured at construction. Existing gradients are copied to the host, because backward
    adds to them in place. At the start of a step no gradients exist, so nothing is copied."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.held = [(p, p.grad, None if p.grad is None else p.grad.to("cpu", copy=True)) for p in parameters]

    def restore(self) -> None:
        """Restore the same tensors with the same values; parameters that had no gradient have none."""
        for parameter, gradient, copy in self.held:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient


class OptimizerCopy:
    """Host copies of the parameters and their optimizer state, taken before each optimizer step, because a step that
    breaks off may have updated only some parameters. All steps use the same buffer."""

    def __init__(self, optimizer: torch.optim.Optimizer, each_step: bool) -> None:
        """`each_step` is True if every step can run out of memory, not only the first, which allocates the states."""
        self.optimizer, self.each_step = optimizer, each_step
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.copied: list[tuple[Tensor, Tensor]] = []  # each tensor, and its view of the buffer
        self.states: list[tuple[nn.Parameter, dict[str, Any]]] = []

    @torch.no_grad()
    def copy_state(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Copy the current state. Returns False, and copies nothing, if the next step allocates nothing."""
        if not self.each_step and all(self.optimizer.state.get(parameter) for parameter in parameters):
            self.buffer, self.copied, self.states = self.buffer.new_empty(0), [], []
            return False
        self.states = [(p, dict(self.optimizer.state[p]) if p in self.optimizer.state else {}) for p in parameters]
        held = {id(v): v for _, state in self.states for v in state.values() if torch.is_tensor(v)}
        self.lay_out([*parameters, *held.values()])
        wait_for_paged(held.values(), parameters)
        for tensor, copy in self.copied:
            copy.copy_(tensor, non_blocking=True)  # the step follows on the same stream
        return True

    def lay_out(self, tensors: list[Tensor]) -> None:
        """Give each tensor a place in the buffer; the same tensors as in the last step keep their places."""
        if list(map(id, tensors)) == [id(tensor) for tensor, _ in self.copied]:  # tensors are held, so no id is reused
            return
        starts = list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors), initial=0))
        if len(self.buffer) < starts[-1]:
            pinned = self.each_step and any(tensor.is_cuda for tensor in tensors)
            self.buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
        self.copied = [(tensor, self.buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                       for tensor, start in zip(tensors, starts, strict=False)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore in place, since a rollout engine may use the same tensors; new optimizer state is removed."""
        tensors = [tensor for tensor, _ in self.copied]
        wait_for_paged(tensors, tensors)
        for tensor, copy in self.copied:
            tensor.copy_(copy, non_blocking=True)
        for parameter, state in self.states:
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state


def wait_for_paged(tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Wait for kernels that use paged states before the host reads them, or WSL would end the process."""
    if any(getattr(tensor, "is_paged", False) for tensor in tensors):
        for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
            torch.cuda.synchronize(device)
