"""One token for all rows of a batch: the model's pass, with everything that changes from step to step at one address.

On a card the step is recorded as a CUDA graph, once for each number of rows and each length of storage, because the
host needs longer to launch the kernels of a small step than the card needs to run them. On a CPU, and where a graph
cannot be had, the same code runs as it is, and one warning says why. Who asks for graphs by name
(`enforce_eager=False`) gets an error in place of that, before weights are loaded as far as it is known by then.

Nothing of this has run on a card. So the first run of each graph is compared with the same step done without one.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.engine import VLLM
from lowmem_grpo.engines.generation_state import DecodeState
from lowmem_grpo.engines.kv_cache import STEP
from lowmem_grpo.engines.passes import Passes
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError
from lowmem_grpo.memory.bounds import is_out_of_memory
from lowmem_grpo.memory.families import family_of, has_experts
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.offload.embedding import on_host

logger = logging.getLogger(__name__)
WARM = 2  # steps of one form without a graph, in which kernels are compiled and libraries start
AGREE = 0.02  # of the largest logit: how far the first run of a graph may be from the same step without one
HOST = "its embedding is on the host"
FIX = "leave enforce_eager out, and token steps run without graphs where they must"

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class CudaGraph:
    """Work that reads and writes tensors that stay where they are, and asks the device for nothing: one launch."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        """Record the work, without running anything. RuntimeError where it cannot be recorded."""
        self.graph = torch.cuda.CUDAGraph()
        # another thread may train meanwhile, and what it asks of the device is none of this graph's concern
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = work()

    def __call__(self) -> Tensor:
        """Run it; the result is the same tensor each time."""
        self.graph.replay()
        return self.result


class TokenStep:
    """Feeds the rows of a batch the tokens they drew last."""

    def __init__(self, passes: Passes, eager: bool | None = None) -> None:
        """`eager` steps are never recorded. With False they must be: EngineUnavailableError says why they cannot."""
        self.passes = passes
        why = not_recorded(passes.policy)
        if eager is False:
            refuse_graphs(why)
        self.must = eager is False  # until a graph has shown that this card and model can have them
        self.record: Record | None = None if why or eager else CudaGraph
        # places that attention reads: a multiple of this, as a graph is of one length
        self.block = STEP if self.record else 1
        self.recorded = 0  # graphs made so far
        self.state: DecodeState | None = None
        self.run: Callable[[], Tensor] | None = None
        if passes.policy.device.type == "cuda" and why and not eager:
            say_plain(why)

    def extend(self, state: DecodeState) -> Tensor:
        """Feed the tokens last drawn; returns the logits (B, V) of the next ones, which hold until the next call."""
        width = state.real.shape[1] + 1
        if state is not self.state or state.positions is not self.positions or width > self.mask.shape[1]:
            self.hold(state, width)
        self.tokens.copy_(state.tokens)
        self.alive.copy_(state.alive)
        self.width = -(-width // self.block) * self.block
        state.cache.cut(self.width)
        logits = self.logits()
        state.real = self.mask[:, :width]
        if self.width > width:
            state.cache.cut(width)
        return logits

    def hold(self, state: DecodeState, width: int) -> None:
        """Give rows a cache, a mask and inputs that stay where they are for the next steps."""
        self.release()
        self.state, capacity = state, capacity_for(width)
        self.at = torch.full((1,), width - 1, device=state.rows.device)
        state.cache.fix(self.at, capacity)
        self.tokens, self.positions, self.alive = state.tokens.clone(), state.positions.clone(), state.alive.clone()
        self.mask = torch.zeros(len(state.rows), capacity, dtype=torch.bool, device=state.rows.device)
        self.mask[:, : width - 1] = state.real
        # what attention adds to its scores: it would make this of a mask of bools in each layer
        self.added = torch.zeros_like(self.mask, dtype=state.cache.growing[0].storage.dtype)
        self.added.masked_fill_(~self.mask, -torch.inf)
        state.positions = self.positions
        self.weights: list[Tensor] = [*self.passes.policy.model.parameters()] if self.record else []

    def release(self) -> None:
        """Let go of the rows and of the graph."""
        self.state, self.run, self.steps = None, None, 0

    def step(self) -> Tensor:
        """Do the work of one step: logits (B, V). Nothing here asks the device for a value."""
        assert self.state is not None
        self.positions.add_(1)
        self.mask.index_fill_(1, self.at, True)
        self.added.index_fill_(1, self.at, 0.0)
        added, named = self.added[:, None, None, : self.width], {"newest": self.at} if self.block > 1 else {}
        # rows that are done are decoded on, but what is kept of them must not change
        hidden = self.passes.hidden(self.tokens[:, None], self.positions[:, None], added, self.alive[:, None],
                                    self.state, **named)
        logits = self.passes.logits(hidden).squeeze(1)
        self.at.add_(1)
        return logits

    def logits(self) -> Tensor:
        """Return those of one step, by the graph where there is one of these weights."""
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
            if is_out_of_memory(error):
                raise  # fewer rows may have room for a graph
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
        """Make no more graphs; EngineUnavailableError where they were asked for by name and there was none yet."""
        device = self.passes.policy.device
        named = f"{why}, on {card_text(device)}" if device.type == "cuda" else why
        if self.must:
            refuse_graphs(f"a token step of this model cannot be one: {named}")
        logger.warning("token steps go on without a CUDA graph, several times slower where rows are few: %s", named)
        self.record = None

    def addresses(self) -> list[int]:
        """Return where the weights and adapters are."""
        return [part.data_ptr() for part in self.weights]


def capacity_for(width: int) -> int:
    """Return the places that are held for rows of `width` places: at most STEP - 1 more."""
    return -(-width // STEP) * STEP


def differs(found: Tensor, logits: Tensor) -> str:
    """Return how the logits of a graph's run, (B, V) as those of the same step without one, differ from these; "" where
    they agree, and where there is nothing to compare with."""
    far = (found - logits).abs().max() / logits.abs().max()
    if bool(far <= AGREE) or bool(logits.isnan().any()):
        return ""
    return f"it gave logits that differ by {float(far):.2g} of the largest from the same step without a graph"


def not_of_model(config: Any) -> str:
    """Return why a model's rows cannot have their cache at fixed addresses, so that no step of it can be a CUDA graph;
    "" where they can."""
    family = family_of(config)
    if family is not None and family.experts is not None and has_experts(config):
        return "its experts' routes are recorded"
    if family is not None and family.delta_net:
        return "the states of its gated delta nets are replaced in each step"
    if family is not None and family.unlike_layers:
        return "its layers lend each other keys"
    return ""


def not_recorded(policy: Policy) -> str:
    """Return why a step of a loaded model cannot be a CUDA graph; "" where it can, as far as is known untried."""
    if policy.device.type != "cuda":
        return f"the model is on the {policy.device.type}"
    if policy.autocast_dtype is not None:
        return f"mixed precision converts weights in each step (load the model in {policy.autocast_dtype})"
    if on_host(policy.base):
        return HOST
    return not_of_model(policy.base.config)


def check_graphs(asked: bool | None, engine: str, device: str, config: Any, offloaded: bool) -> None:
    """Raise EngineUnavailableError where `enforce_eager=False` asks our own engine for CUDA graphs that a model of this
    config cannot have on `device`, with its embedding `offloaded` or not. Nothing is loaded for it; a card is tried
    with a graph of one addition. vLLM judges for itself, but for a mixture of experts on a card."""
    if asked is not False:
        return
    if engine == VLLM:
        refuse_graphs("" if device.startswith("cpu") or not has_experts(config) else
                      "how many tokens each expert has is read on the host", FIX)
        return
    refuse_graphs("" if device.startswith("cuda") else f"the model is on the {device}", FIX)
    refuse_graphs(HOST if offloaded else "", "leave enforce_eager or offload_embedding out")
    refuse_graphs(not_of_model(config) or not_on_card(torch.device(device)), FIX)


def refuse_graphs(why: str, fix: str = FIX) -> None:
    """Raise EngineUnavailableError with the reason and what to do; nothing for no reason."""
    if why:
        raise EngineUnavailableError(f"enforce_eager is False, which asks for token steps as CUDA graphs, and {why}; "
                                     f"{fix}")


def not_on_card(device: torch.device) -> str:
    """Return why a card, or its driver, records no CUDA graph, by the name of the card; "" where it does. One addition
    is recorded and run. What it gives is not looked at: the first run of each graph of steps is compared."""
    numbers = torch.zeros(8, device=device)
    try:
        with torch.cuda.device(device):
            CudaGraph(lambda: numbers.add_(1))()
            torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{card_text(device)} records no graph ({first_line(error)})"
    return ""


def card_text(device: torch.device) -> str:
    """Return the name of a card, its compute capability and the CUDA that torch is built for."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, CUDA {torch.version.cuda})"


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@cache
def say_plain(why: str) -> None:
    """Warn once in a process that steps on a card run as they are."""
    logger.warning("token steps run without CUDA graphs, several times slower where rows are few: %s. "
                   "enforce_eager=True says that this is meant", why)
