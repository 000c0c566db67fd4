"""The optimizer and the learning-rate schedule of a run, and the copy that undoes an optimizer step."""

import inspect
import logging
import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT
from transformers import get_scheduler

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.models.trained_set import MODULE, TrainedSet

logger = logging.getLogger(__name__)
WITHOUT_OPTIONS = ("linear", "constant", "constant_with_warmup")
ALIGNED = 64  # bytes: any dtype may begin there
PROJECTION = re.compile(r"([^.]+)\.lora_")  # the adapted module, in a parameter's name


def own_or_made(
    optimizers: Any, trained: TrainedSet, config: TrainSettings, total_steps: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the user's optimizer and schedule, or new ones from the settings. TypeError or ValueError if unusable."""
    if optimizers is None:
        optimizers = (None, None)
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise TypeError(f"optimizers is a {type(optimizers).__name__}; it must be a pair, (optimizer, schedule or "
                        "None)")
    optimizer, scheduler = optimizers
    for part, kind in ((optimizer, torch.optim.Optimizer), (scheduler, LRScheduler)):
        if part is not None and not isinstance(part, kind):
            raise TypeError(f"optimizers holds a {type(part).__name__}; needed is a torch {kind.__name__}, or None")
        if needs := needed_to_step(part):
            raise ValueError(f"optimizers holds a {type(part).__name__}, whose step() needs {needs[0]}; a run calls it "
                             "without arguments: take another one")
    if optimizer is None and scheduler is not None:
        raise ValueError("optimizers is (None, schedule); a schedule needs its optimizer: (optimizer, schedule)")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ValueError("the schedule in optimizers is of another optimizer than the one beside it")
    if optimizer is not None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        left = [weight.name for weight in trained if id(weight.parameter) not in held]
        if 0 < len(left) < len(trained):
            logger.warning("the optimizer in optimizers holds %d of the %d trained parameters, and the others stay as "
                           "they are, %s among them: if that is not meant, make it after get_peft_model",
                           len(trained) - len(left), len(trained), left[0])
        if len(left) == len(trained):
            raise ValueError("the optimizer in optimizers holds no parameter of the adapter; make it after "
                             "get_peft_model, of [p for p in model.parameters() if p.requires_grad]")
        if config.embedding_learning_rate is not None:
            raise ValueError(f"embedding_learning_rate is {config.embedding_learning_rate}, and optimizers brings its "
                             "own rates: set it there, as the lr of a group, and leave it out here")
    groups = trained.groups(config.group_settings(trained.modules))
    made = make_optimizer(groups, config) if optimizer is None else optimizer
    return made, scheduler or make_scheduler(made, config, total_steps)


def needed_to_step(part: Any) -> list[str]:
    """Return the names of the arguments without which `part.step` cannot be called."""
    taken = [] if part is None else list(inspect.signature(type(part).step).parameters.values())[1:]  # without self
    return [part.name for part in taken if part.default is part.empty and part.kind is part.POSITIONAL_OR_KEYWORD]


def make_optimizer(parameters: ParamsT, config: TrainSettings) -> torch.optim.Optimizer:
    """Return AdamW for parameters, or groups of them, with 32-bit or 8-bit (and paged) states (bitsandbytes). Of groups
    with a name, which are trained beside LoRA, an EmbeddingOptimizer makes the steps."""
    groups: list[Any] = list(parameters)
    if beside := [group for group in groups if isinstance(group, dict) and "name" in group]:
        from lowmem_grpo.trainer.embedding_optimizer import EmbeddingOptimizer

        usual = make_optimizer([group for group in groups if "name" not in group], config)
        return EmbeddingOptimizer(usual, beside, config.seed, "8bit" in config.optim)
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2),
                                "eps": config.adam_epsilon, "weight_decay": config.weight_decay}
    if config.optim == "adamw_torch":
        return torch.optim.AdamW(groups, **settings)
    if config.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **settings)
    import bitsandbytes

    eight_bit = bitsandbytes.optim.PagedAdamW8bit if "paged" in config.optim else bitsandbytes.optim.AdamW8bit
    return eight_bit(groups, **settings)


def allocates_each_step(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether every step allocates memory, even once all states exist, as torch's unfused AdamW does. The few
    MiB of an EmbeddingOptimizer's bands are not counted."""
    optimizer = getattr(optimizer, "inner", optimizer)
    if type(optimizer) is torch.optim.AdamW:
        return not optimizer.defaults["fused"]
    return device.type != "cuda" or not type(optimizer).__module__.startswith("bitsandbytes.")


def make_scheduler(optimizer: torch.optim.Optimizer, config: TrainSettings, total_steps: int) -> LRScheduler:
    """Return the schedule; a warm-up given as a fraction rounds up, as in transformers. ValueError for bad settings."""
    share = config.warmup_steps or config.warmup_ratio
    warmup = int(share) if config.warmup_steps >= 1 else math.ceil(total_steps * share)
    if config.lr_scheduler_type == "constant" and warmup:
        raise ValueError('lr_scheduler_type is "constant", which has no warm-up; use "constant_with_warmup"')
    options: Any = config.lr_scheduler_kwargs or {}
    if options and config.lr_scheduler_type in WITHOUT_OPTIONS:
        raise ValueError(f"lr_scheduler_kwargs is {options}, and lr_scheduler_type {config.lr_scheduler_type!r} takes "
                         "none; leave it out, or choose another schedule")
    try:
        return get_scheduler(config.lr_scheduler_type, optimizer, warmup, total_steps, options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"lr_scheduler_kwargs is {options}, which lr_scheduler_type {config.lr_scheduler_type!r} does "
                         f"not take: {error}") from error


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return metrics: the learning rate of the first group, and those of named groups (`learning_rate/lm_head`)."""
    first, *others = optimizer.param_groups
    return {"learning_rate": first["lr"], **{
        f"learning_rate/{group['name']}": group["lr"] for group in others if "name" in group}}


def gradient_norms(parameters: dict[str, nn.Parameter]) -> tuple[Tensor, dict[str, float]]:
    """Return the norm of all gradients, on their device, and the norms to log as numbers: of all gradients, and of each
    adapted projection over all layers and each module beside (`grad_norm/q_proj`, `grad_norm/lm_head`)."""
    groups: dict[str, list[Tensor]] = {"other": []}
    for name, parameter in parameters.items():
        match = PROJECTION.search(name) or MODULE.search(name)
        if parameter.grad is not None:
            groups.setdefault(match[1] if match else "other", []).append(parameter.grad)
    devices = [held[0].device for held in groups.values() if held]  # the host's, of an embedding that is trained there
    device = next((device for device in devices if device.type != "cpu"), devices[0])
    norms = {name: torch.nn.utils.get_total_norm(held).to(device, torch.float32)
             for name, held in groups.items() if held}
    total = torch.linalg.vector_norm(torch.stack([*norms.values()]))
    logged = {"grad_norm": total, **{f"grad_norm/{name}": norm for name, norm in norms.items()}}
    return total, dict(zip(logged, torch.stack(list(logged.values())).tolist(), strict=True))


class OptimizerCopy:
    """Host copies of the parameters and their optimizer state, to undo an optimizer step that breaks off halfway."""

    def __init__(self, optimizer: torch.optim.Optimizer, each_step: bool) -> None:
        """`each_step` is True if every step allocates memory, not only the first."""
        self.optimizer, self.each_step = optimizer, each_step
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.copied: list[tuple[Tensor, Tensor]] = []  # each tensor, and its view of the buffer
        self.states: list[tuple[nn.Parameter, dict[str, Any]]] = []

    @torch.no_grad()
    def copy_state(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Copy the current state and return True. If the next step allocates nothing, return False without a copy."""
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
        """Assign a part of the buffer to each tensor. Nothing changes if the tensors are those of the last step."""
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
        """Restore the tensors in place, since a rollout engine may use them too; remove optimizer state that is new."""
        tensors = [tensor for tensor, _ in self.copied]
        wait_for_paged(tensors, tensors)
        for tensor, copy in self.copied:
            tensor.copy_(copy, non_blocking=True)
        for parameter, state in self.states:
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state


def wait_for_paged(tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Wait for kernels that use paged states, before the host reads the states; otherwise WSL would end the process."""
    if any(getattr(tensor, "is_paged", False) for tensor in tensors):
        for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
            torch.cuda.synchronize(device)
