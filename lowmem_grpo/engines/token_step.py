"""One token for all rows of a batch: the model's pass, with everything that changes from step to step at one address.

On a card the step is recorded as a CUDA graph, once for each number of rows and each length of storage, because the
host needs longer to launch the kernels of a small step than the card needs to run them. On a CPU, and where a graph
cannot be had, the same code runs as it is. A model whose cache has another form is decoded by `Passes.extend`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lowmem_grpo.engines.decode import Decode
from lowmem_grpo.engines.fixed_cache import STEP, FixedCache, capacity_for
from lowmem_grpo.engines.passes import Passes
from lowmem_grpo.engines.recordable import (
    card_text,
    first_line,
    not_recorded,
    other_cache,
    refuse_graphs,
    say_plain,
)
from lowmem_grpo.engines.recorded import Recorded

logger = logging.getLogger(__name__)
WARM = 2  # steps of one form without a graph, in which kernels are compiled and libraries start
AGREE = 0.02  # of the largest logit: how far the first run of a graph may be from the same step without one

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def differs(found: Tensor, logits: Tensor) -> str:
    """How the logits of a graph's run, (B, V) as those of the same step without one, differ from these; "" where they
    agree, and where there is nothing to compare with."""
    far = (found - logits).abs().max() / logits.abs().max()
    if bool(far <= AGREE) or bool(logits.isnan().any()):
        return ""
    return f"it gave logits that differ by {float(far):.2g} of the largest from the same step without a graph"


class TokenStep:
    """Feeds the rows of a batch the tokens they drew last."""

    def __init__(self, passes: Passes, eager: bool | None = None) -> None:
        """`eager` steps are never recorded. With False they must be: EngineUnavailableError says why they cannot."""
        self.passes = passes
        self.unfit = other_cache(passes.policy.base.config)
        why = self.unfit or not_recorded(passes.policy)
        if eager is False:
            refuse_graphs(why)
        self.must = eager is False  # until a graph has shown that this card and model can have them
        self.record: Record | None = None if why or eager else Recorded
        # places that attention reads: a multiple of this, as a graph is of one length
        self.block = STEP if self.record else 1
        self.recorded = 0  # graphs made so far
        self.state: Decode | None = None
        self.run: Callable[[], Tensor] | None = None
        if passes.policy.device.type == "cuda" and why and not eager:
            say_plain(why)

    def extend(self, state: Decode) -> Tensor:
        """Feed the tokens last drawn; returns the logits (B, V) of the next ones, which hold until the next call."""
        if self.unfit:
            return self.passes.extend(state)
        width = state.real.shape[1] + 1
        if state is not self.state or state.positions is not self.positions or width > self.mask.shape[1]:
            self.hold(state, width)
        self.tokens.copy_(state.tokens)
        self.width = -(-width // self.block) * self.block
        state.cache.cut(self.width)
        logits = self.logits()
        state.real = self.mask[:, :width]
        if self.width > width:
            state.cache.cut(width)
        return logits

    def hold(self, state: Decode, width: int) -> None:
        """Give rows a cache, a mask and inputs that stay where they are for the next steps."""
        self.release()
        self.state, capacity = state, capacity_for(width)
        for layer in state.cache.layers:
            if layer.storage.shape[3] < capacity:
                layer.reserve(capacity)
        self.at = torch.full((1,), width - 1, device=state.rows.device)
        self.tokens, self.positions = state.tokens.clone(), state.positions.clone()
        self.mask = torch.zeros(len(state.rows), capacity, dtype=torch.bool, device=state.rows.device)
        self.mask[:, : width - 1] = state.real
        # what attention adds to its scores: it would make this of a mask of bools in each layer
        self.added = torch.zeros_like(self.mask, dtype=state.cache.layers[0].storage.dtype)
        self.added.masked_fill_(~self.mask, -torch.inf)
        state.positions = self.positions
        self.cache = FixedCache(state.cache, self.at)
        self.fed = replace(state, cache=self.cache)
        self.weights: list[Tensor] = [*self.passes.policy.model.parameters()] if self.record else []

    def release(self) -> None:
        """Let go of the rows and of the graph."""
        self.state, self.run, self.steps = None, None, 0
        self.fed = self.cache = None  # type: ignore[assignment]

    def step(self) -> Tensor:
        """The work of one step: logits (B, V). Nothing here asks the device for a value."""
        self.positions.add_(1)
        self.mask.index_fill_(1, self.at, True)
        self.added.index_fill_(1, self.at, 0.0)
        added, named = self.added[:, None, None, : self.width], {"newest": self.at} if self.block > 1 else {}
        hidden = self.passes.hidden(self.tokens[:, None], self.positions[:, None], added, self.fed.alive[:, None],
                                    self.fed, **named)
        logits = self.passes.logits(hidden).squeeze(1)
        self.at.add_(1)
        return logits

    def logits(self) -> Tensor:
        """Of one step, by the graph where there is one of these weights."""
        if self.run is not None and self.addresses() == self.held:
            return self.run()
        if self.run is not None:
            self.run, self.steps = None, 0  # weights have moved
        logits = self.step()
        self.steps += 1
        if self.record is not None and self.steps >= WARM:
            self.make(self.record, logits)
        return logits

    def make(self, record: Record, logits: Tensor) -> None:
        """Record the step that has just given `logits` (B, V), and hold its first run against them."""
        at, positions = self.at - 1, self.positions - 1
        try:
            run = record(self.step)
            self.at.copy_(at)
            self.positions.copy_(positions)
            why = differs(run(), logits)
        except RuntimeError as error:
            why = f"it could not be recorded ({first_line(error)})"
        if not why:
            self.run, self.held, self.must = run, self.addresses(), False
            self.recorded += 1
            return
        self.give_up(why)
        self.at.copy_(at)
        self.positions.copy_(positions)
        self.step()  # a wrong graph has written wrong keys and values at that place

    def give_up(self, why: str) -> None:
        """No graphs from now on; EngineUnavailableError where they were asked for by name and there was none yet."""
        device = self.passes.policy.device
        named = f"{why}, on {card_text(device)}" if device.type == "cuda" else why
        if self.must:
            refuse_graphs(f"a token step of this model cannot be one: {named}")
        logger.warning("token steps go on without a CUDA graph, several times slower where rows are few: %s", named)
        self.record = None

    def addresses(self) -> list[int]:
        """Where the weights and adapters are."""
        return [part.data_ptr() for part in self.weights]
