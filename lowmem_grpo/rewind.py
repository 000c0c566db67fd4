"""Going back: random states, gradients and an optimizer as they were, so that an attempt can be made again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class RandomStates:
    """Torch's random states, of the CPU and of one device, at the moment this is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.take()

    def take(self) -> None:
        """Keep the states as they are now."""
        self.cpu = torch.get_rng_state()
        self.card = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.card is not None:
            torch.cuda.set_rng_state(self.card, self.device)


class Gradients:
    """The parameters' gradients at the moment this is made. Those that are there are copied to the host: backward
    adds to them in place. At the start of a step there are none, and nothing is copied."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.held = [(p, p.grad, None if p.grad is None else on_host(p.grad)) for p in parameters]

    def restore(self) -> None:
        """The same tensors with the same values; what had no gradient has none."""
        for parameter, gradient, copy in self.held:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient


class OptimizerCopy:
    """Parameters and their optimizer state on the host: a step that breaks off may have updated some of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.values = [(parameter, on_host(parameter.detach())) for parameter in parameters]
        held = [(p, optimizer.state[p]) for p in parameters if p in optimizer.state]
        self.states = [(p, dict(state), {k: on_host(v) for k, v in state.items() if torch.is_tensor(v)})
                       for p, state in held]

    @torch.no_grad()
    def restore(self) -> None:
        """In place, since others (a rollout engine) use the same tensors; state that was not there goes."""
        for parameter, copy in self.values:
            parameter.copy_(copy)
            self.optimizer.state.pop(parameter, None)
        for parameter, state, copies in self.states:
            for name, copy in copies.items():
                state[name].copy_(copy)
            self.optimizer.state[parameter] = state


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    copy: Any = tensor.to("cpu", copy=True)
    return copy
