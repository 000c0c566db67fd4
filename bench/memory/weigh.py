"""Run a real training step on fake tensors and count its peak bytes on device and host, for any model's config.

    python -m bench.memory.weigh MODEL [TOKENS [MODULES_TO_SAVE]]     what is alive at the peak of one sequence

The loader, LoRA layers, Policy, Learner and optimizer are the real ones; only memory and arithmetic are missing. Each
feature that saves memory can be switched off.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoConfig

from bench.memory.counted_storages import CountedStorages, Known
from bench.memory.fake_models import make_fake, meta_model, stored
from bench.memory.stages import Features
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.fast_model import BareModel, Loaded
from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.losses.objective import Reducer, StepTotals
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.memory.offload.embedding import tables
from lowmem_grpo.memory.offload.pages import Copies
from lowmem_grpo.models.experts import STACKS
from lowmem_grpo.models.lora_targets import ALL_LINEAR
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.teacher import Teacher
from lowmem_grpo.models.vision import ImageInputs, PatchedImage
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.optim import make_optimizer
from lowmem_grpo.trainer.run_memory import keep_layers
from lowmem_grpo.trainer.step_accumulator import StepAccumulator
from lowmem_grpo.trainer.teacher_objective import TeacherObjective
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup
from lowmem_grpo.utils import GIB

PROMPT = 512  # tokens, at most half of the longest sequence


@dataclass(frozen=True)
class Weighed:
    """Bytes of one step: peaks on `device` and `host`, and what they consist of."""

    device: int
    host: int
    weights: int  # the model's, on the device
    adapters: int
    gradients: int
    optimizer: int
    activations: int  # the most that forward and backward held beside all of these
    engine: int
    breakdown: list[tuple[int, int, Any]]


def weigh(
    config: dict[str, Any], lengths: list[int], features: Features | None = None, rank: int = 32,
    batch: MicroBatch | None = None, teacher: dict[str, Any] | None = None,
) -> Weighed:
    """Count the bytes of one optimizer step over a group of completions; `lengths` are tokens of whole sequences.

    Only the largest micro-batch, or `batch`, is run, as if after another one. All micro-batches together hold no more,
    because one ends before the next begins.
    `config` holds the fields of a config.json. Weights are NF4 with double quantization, computing in bfloat16.
    `teacher` holds settings of a teacher, which has read the completions before.
    """
    features = features or Features()
    kind = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    model = add_lora(meta_model(kind, torch.bfloat16, nf4=True), rank, max(lengths), features)
    keep_layers(model.get_base_model(), features.kept_layers)
    batch = batch or largest(groups_of(lengths, features), max(lengths) if features.packing else None)
    table = model.get_input_embeddings().weight
    tied = tuple(table.shape) if table.requires_grad and table is model.get_output_embeddings().weight else ()
    known = Known({1: len(batch.images), len(batch.input_ids): int(batch.loss_mask.sum())}, len(batch.rollouts), tied)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        make_fake(model)
        learner = learner_of(model, lengths, features, Unmeasured, teacher or {})
        policy, optimizer = learner.policy, learner.optimizer
        tensors: dict[str, Any] = {
            name: mode.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
        held = know_images(policy, batch)
        with CountedStorages([*stored(model), *held, *tensors.values()], known) as live:
            if features.packing:  # an earlier micro-batch has left the adapters' gradients
                for parameter in policy.trainable:
                    parameter.grad = torch.zeros_like(parameter)
            copies = CountedCopies(live) if features.checkpointing == "offload" else None
            with live.on_host():
                teach(batch, learner)
            offload = ActivationOffload(model, copies)
            offload.read_ahead(features.head_groups == 1)
            with offload:
                totals = StepTotals(len(lengths), sum(lengths), sum(lengths))
                learner.accumulate(iter([replace(batch, **tensors)]), totals, StepAccumulator(policy.device))
            peak, gradients, found = live.peak, live.now, live.breakdown()
            optimizer.step()
            states = live.now - gradients
    sizes, on_host = sizes_of(model, policy, features), host_table(policy, features)
    return Weighed(
        device=sum(sizes.values()) + states + max(peak, live.peak - states), host=live.host_peak + on_host,
        gradients=gradients, optimizer=states, activations=peak - gradients, breakdown=found, **sizes,
    )


def teach(batch: MicroBatch, learner: Learner) -> None:
    """Give a batch what the pass of a teacher leaves on the host."""
    size = learner.policy.head.weight.shape[1]
    for field in learner.objective.needed_before(1):
        if field.packed:
            batch.fields[field.name] = torch.empty(len(batch.input_ids))
        for rollout in () if field.packed else batch.rollouts:
            rollout.fields[field.name] = torch.empty(len(rollout.completion_ids), size, dtype=learner.policy.dtype)


def know_images(policy: Policy, batch: MicroBatch) -> list[Tensor]:
    """Give a model of images the features of a batch's images, as the host holds them; return these."""
    inputs = policy.inputs
    for name, size in Counter(token.image for token in batch.images.values()).items():
        assert isinstance(inputs, ImageInputs)
        inputs.store.put(PatchedImage(name, torch.empty(0), (1, inputs.merge, inputs.merge * size)))
        levels = len(getattr(inputs.tower, "deepstack_merger_list", ()))
        inputs.store.features[name] = torch.empty(1 + levels, size, inputs.embed.weight.shape[1], dtype=policy.dtype)
    return list(inputs.store.features.values()) if isinstance(inputs, ImageInputs) else []


class Unmeasured(GRPOObjective):
    """An objective that measures nothing after a step, because values of fake tensors cannot be read."""

    def measured(self, reducer: Reducer) -> dict[str, float]:
        return {}


class UnmeasuredTeaching(Unmeasured, TeacherObjective):
    """The same with a teacher."""


def learner_of(model: Any, lengths: list[int], features: Features, objective: type[GRPOObjective],
               teacher: dict[str, Any] | None = None) -> Learner:
    """Return the learner for a step of sequences of these lengths; `teacher` holds settings of a teacher."""
    settings = GRPOConfig(max_completion_length=max(lengths), optim=features.optim, **(teacher or {}))
    policy = (Policy if features.no_logits else LogitsPolicy)(model, logits_chunk=features.logits_chunk)
    policy.head_groups = features.head_groups
    with unset_fake_temporarily():  # its tables of 8-bit codes are computed
        optimizer = make_optimizer(policy.trained.groups(settings.group_settings(policy.trained.modules)), settings)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    made = objective(settings) if not teacher else UnmeasuredTeaching(
        settings, True, policy, Teacher(str(settings.teacher), policy))
    return Learner(policy, settings, made, optimizer, schedule)


def add_lora(model: Any, rank: int, context: int, features: Features) -> Any:
    """Add LoRA to all linears of a model on any device, as the loader does (`kernels`), or as PEFT does."""
    if features.kernels:
        engine = SimpleNamespace(close=lambda: None)
        fast = BareModel(model, Loaded("fake", None, context, engine))  # type: ignore[arg-type]
        return FastLanguageModel.get_peft_model(
            fast, r=rank, use_gradient_checkpointing=features.checkpointing, mlp_tile=features.mlp_tile,
            modules_to_save=[*features.modules_to_save] or None,
            target_parameters=[*STACKS] if features.expert_lora else None,
        )
    targets = [name for name in ALL_LINEAR if any(path.endswith(name) for path, _ in model.named_modules())]
    lora = LoraConfig(r=rank, task_type="CAUSAL_LM", target_modules=targets or "all-linear")
    with torch.device(model.device):
        peft_model = get_peft_model(model, lora)
    if features.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return peft_model


class LogitsPolicy(Policy):
    """A policy that computes all logits, in the model's dtype and in float32."""

    def at_head(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0,
                entropy_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities (N,), and twice their values in place of the other results."""
        logits = torch.nn.functional.linear(hidden, self.head.weight).float() / temperature
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return logprobs, logprobs.detach(), logprobs.detach()


class CountedCopies(Copies):
    """Copies to pages that count as host memory."""

    def __init__(self, live: CountedStorages) -> None:
        self.live = live

    def page(self, num_bytes: int) -> Tensor:
        with self.live.on_host():
            return super().page(num_bytes)

    def start(self, pairs: Any) -> None:
        """Do nothing: fake tensors hold no values."""


def groups_of(lengths: list[int], features: Features) -> list[RolloutGroup]:
    """Return one group of completions; without packing a group per completion, all of the longest length."""
    prompt = min(PROMPT, max(lengths) // 2)
    lengths = lengths if features.packing else [max(lengths)] * len(lengths)
    rollouts = [Rollout([1] * (n - prompt), [0.0] * (n - prompt), "stop", advantage=1.0) for n in lengths]
    if features.packing:
        return [RolloutGroup({}, [1] * prompt, rollouts)]
    return [RolloutGroup({}, [1] * prompt, [rollout]) for rollout in rollouts]


def largest(groups: list[RolloutGroup], max_tokens: int | None) -> MicroBatch:
    """Return the largest micro-batch; attention's padded layout of it takes at most `max_tokens` tokens."""
    return max(pack(groups, max_tokens, spread=1.0), key=lambda batch: (len(batch.input_ids), len(batch.sources)))


def sizes_of(model: Any, policy: Policy, features: Features) -> dict[str, int]:
    """Return the bytes of weights, adapters and the rollout engine's own weights, on the device."""
    adapters = sum(parameter.nbytes for parameter in policy.trainable)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in stored(model)}
    own = {id(weight): weight_count(weight) for weight in policy.base.parameters() if not weight.requires_grad}
    engine = 0 if features.shared_weights else 2 * sum(own.values())
    weights = sum(storages.values()) - adapters - host_table(policy, features)
    return {"weights": weights, "adapters": adapters, "engine": engine}


def host_table(policy: Policy, features: Features) -> int:
    """Return the bytes of the embeddings that the host holds; one that is tied to the head stays on the device."""
    if not features.host_embedding:
        return 0
    weights = [table.weight for table in tables(policy.base)]
    return sum(weight.nbytes for weight in weights if weight is not policy.base.get_output_embeddings().weight)


def weight_count(weight: Tensor) -> int:
    """Return the elements of a weight, before quantization."""
    state = getattr(weight, "quant_state", None)
    return int(weight.numel() if state is None else state.shape.numel())


def main() -> None:
    """Print the peak of one sequence, and what was alive then."""
    from lowmem_grpo.memory.model_shape import named_config

    name, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20480
    modules = tuple(sys.argv[3].split(",")) if len(sys.argv) > 3 else ()
    found = weigh(named_config(name), [tokens], Features(modules_to_save=modules))
    for field, value in vars(found).items():
        if field != "breakdown":
            print(f"{field:<12} {value / GIB:8.3f} GiB")
    for size, count, made in found.breakdown:
        dtype = str(made.dtype).removeprefix("torch.")
        print(f"{size / GIB:8.3f} {count:4d} x {made.operation} {made.shape} {dtype} {made.place}")


if __name__ == "__main__":
    main()
