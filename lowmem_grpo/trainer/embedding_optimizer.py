"""`EmbeddingOptimizer`: AdamW for embedding and head, whole or some of their rows, beside the optimizer of LoRA."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

CACHED, AT_ONCE = 2**18, 2**22  # numbers computed at a time, in float32, on a CPU and on a card
BLOCKS = (256, 128, 64)  # numbers that share a scale in 8 bits: those of one row, so that a rare token has its own
LEAST = 4096  # numbers of a weight with moments in 8 bits, as in bitsandbytes
MOMENTS = ("exp_avg", "exp_avg_sq")
CUT = 2**16  # bfloat16 is float32 without its last 16 bits


class EmbeddingOptimizer(torch.optim.Optimizer):
    """Steps `inner`, the optimizer of LoRA, and makes AdamW's step for the weights of further groups. Its groups and
    state are those of both, so that schedules, checkpoints and loss scaling reach all.

    Rows that never had a gradient are not decayed. Weights in bfloat16 are rounded at random, as the nearest number is
    mostly the old one: the values of 16 bits around 0.02 are 1e-4 apart. The random numbers follow from the seed and
    the step: they are the same in all ranks, after a step that was undone, and in a resumed run."""

    def __init__(
        self, inner: torch.optim.Optimizer, groups: list[dict[str, Any]], seed: int, eight_bit: bool
    ) -> None:
        """`groups` have a "name". With `eight_bit`, moments are kept in bitsandbytes' 8 bits where rows divide into
        blocks, else in float32."""
        super().__init__([*inner.param_groups, *groups], inner.defaults)
        self.inner, self.seed, self.state = inner, seed, inner.state
        self.codes: dict[str, Tensor] = {}
        if eight_bit:
            from bitsandbytes import functional

            self.functional: Any = functional
            self.codes = {name: functional.create_dynamic_map(name == "exp_avg") for name in MOMENTS}  # with a sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups[len(self.inner.param_groups) :]:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group, f"{group['name']}.{number}")
        return loss

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], name: str) -> None:
        """Make a step of one weight, some rows at a time."""
        weight, gradient = parameter.view(len(parameter), -1), gradient.reshape(len(parameter), -1)
        state = self.state[parameter] = self.state.get(parameter) or self.begun(weight)
        drawn = random.Random(f"{self.seed}-{name}-{state['step']}").getrandbits(32)
        generator = torch.Generator(weight.device).manual_seed(drawn)
        count = max((CACHED if weight.device.type == "cpu" else AT_ONCE) // weight.shape[1], 1)
        for start in range(0, len(weight), count):
            rows = slice(start, start + count)
            values, slope = weight[rows].float(), gradient[rows].float()
            seen = state["occurred"][rows].logical_or_(slope.any(1))
            values.mul_(torch.where(seen, 1 - group["lr"] * group["weight_decay"], 1.0)[:, None])
            moments = self.moments(state, rows)
            steps = torch.full((), float(state["step"]), dtype=torch.float32, device=weight.device)
            adamw([values], [slope], moments[:1], moments[1:], [], [steps], fused=True, amsgrad=False, lr=group["lr"],
                  beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], weight_decay=0, maximize=False)
            self.keep(moments, state, rows)
            if weight.dtype != torch.float32:
                weight[rows] = rounded(values, generator) if weight.dtype == torch.bfloat16 else values
        state["step"] += 1

    def begun(self, weight: Tensor) -> dict[str, Any]:
        """Return the state of a weight (rows, D) before its first step."""
        wide = not self.codes or weight.numel() < LEAST
        block = 0 if wide else next((size for size in BLOCKS if weight.shape[1] % size == 0), 0)
        state: dict[str, Any] = {"step": 0, "occurred": weight.new_zeros(len(weight), dtype=torch.bool)}
        for name in MOMENTS:
            state[name] = torch.zeros_like(weight, dtype=torch.uint8 if block else torch.float32)
            if block:
                state[f"{name}_scale"] = weight.new_zeros(len(weight), weight.shape[1] // block, dtype=torch.float32)
        return state

    def moments(self, state: dict[str, Any], rows: slice) -> list[Tensor]:
        """Return both moments of these rows in float32: the state itself, or what its 8 bits say."""
        if "exp_avg_scale" not in state:
            return [state[name][rows] for name in MOMENTS]
        block = state["exp_avg"].shape[1] // state["exp_avg_scale"].shape[1]
        first, root = (self.functional.dequantize_blockwise(
            state[name][rows], absmax=state[f"{name}_scale"][rows].flatten(), code=self.codes[name], blocksize=block)
            for name in MOMENTS)
        return [first, root.square_()]

    def keep(self, moments: list[Tensor], state: dict[str, Any], rows: slice) -> None:
        """Put changed moments into the state in 8 bits, unless they are the state itself. Of the second, the root is
        kept: in 8 bits the square of a small number would be 0, and the step in its place large."""
        if "exp_avg_scale" not in state:
            return
        for name, moment in zip(MOMENTS, (moments[0], moments[1].sqrt_()), strict=True):
            scale = state[f"{name}_scale"][rows]
            state[name][rows], made = self.functional.quantize_blockwise(
                moment, code=self.codes[name], blocksize=moment.numel() // scale.numel())
            scale.copy_(made.absmax.view_as(scale))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without changing its dtypes."""
        count = len(self.inner.param_groups)
        own, saved = self.param_groups[count:], state_dict["param_groups"]
        numbers = {number for group in saved[:count] for number in group["params"]}
        self.inner.load_state_dict({"state": {n: held for n, held in state_dict["state"].items() if n in numbers},
                                    "param_groups": saved[:count]})
        self.state, self.param_groups = self.inner.state, [*self.inner.param_groups, *own]
        for group, loaded in zip(own, saved[count:], strict=True):
            for parameter, number in zip(group["params"], loaded["params"], strict=True):
                if held := state_dict["state"].get(number):
                    self.state[parameter] = {name: value.to(parameter.device, copy=True) if torch.is_tensor(value)
                                             else value for name, value in held.items()}
            group.update({name: value for name, value in loaded.items() if name != "params"})


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 values in bfloat16, each as one of its two neighbours, so likely that the mean is the value."""
    noise = torch.randint(CUT, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-CUT)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).bfloat16()  # NaN has no neighbours
