"""Count the peak bytes of PPO's and DPO's steps on fake tensors, beside GRPO's: policy, reference, critic and reward
model are one base with three adapters and two heads.

    python -m bench.memory.several_adapters [MODEL]     8 sequences of 2,048 tokens
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoConfig

from bench.memory.counted_storages import CountedStorages, Known
from bench.memory.fake_models import make_fake, meta_model, stored
from bench.memory.stages import Features
from bench.memory.weigh import CountedCopies, Unmeasured, add_lora, learner_of
from lowmem_grpo.config.preferences import DPOConfig
from lowmem_grpo.losses.objective import StepTotals
from lowmem_grpo.losses.value_loss import value_losses
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.score_head import AdapterSlot, score_of_hidden
from lowmem_grpo.models.trained_set import adapter_values
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.optim import make_optimizer
from lowmem_grpo.trainer.preference_objectives import PairObjective
from lowmem_grpo.trainer.step_accumulator import StepAccumulator
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup
from lowmem_grpo.utils import GIB

PROMPT, COMPLETION, SEQUENCES = 512, 1536, 8


def sequences_of(count: int) -> MicroBatch:
    """Return a prompt with so many completions, 2,048 tokens each, in one micro-batch."""
    rollouts = [Rollout([1] * COMPLETION, [0.0] * COMPLETION, "stop", advantage=1.0) for _ in range(count)]
    (batch,) = pack([RolloutGroup({}, [1] * PROMPT, rollouts)])
    return batch


def weigh_step(config: dict[str, Any], sequences: int, method: str, rank: int = 32) -> int:
    """Return the peak bytes on the device of a step on one micro-batch of so many sequences: with "grpo" and "dpo"
    beside a reference, with "ppo" also beside a critic and a reward model. The optimizers' states are there before."""
    features, batch = Features(), sequences_of(sequences)
    kind = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    model = add_lora(meta_model(kind, torch.bfloat16, nf4=True), rank, PROMPT + COMPLETION, features)
    slots = slots_of(model) if method == "ppo" else []
    known = Known({len(batch.input_ids): int(batch.loss_mask.sum())}, len(batch.rollouts))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        make_fake(model)
        learner = learner_of(model, [PROMPT + COMPLETION], features, Unmeasured)
        if method == "dpo":
            learner.objective = pairs_of(batch)
        for slot in slots:
            refill(slot, learner.policy)
        tensors: dict[str, Any] = {
            name: mode.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
        held = [*stored(model), *tensors.values(), *(slot.head.weight for slot in slots)]
        with CountedStorages(held, known) as live:
            step = Step(learner, replace(batch, **tensors), ActivationOffload(model, CountedCopies(live)), slots)
            step.optimize()
            live.peak, live.peak_is_new = live.now, True
            step.run()
    return live.peak + sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                            for tensor in held}.values())


def pairs_of(batch: MicroBatch) -> PairObjective:
    """Return DPO's objective, which knows the batch's completions as pairs."""
    objective = PairObjective(DPOConfig())
    batch.fields["ref_logprobs"] = torch.zeros(len(batch.input_ids))
    for rollout in batch.rollouts:
        rollout.ref_logprobs = torch.zeros(COMPLETION)
    with unset_fake_temporarily():
        objective.prepared(batch.rollouts)
    return objective


def slots_of(model: Any) -> list[AdapterSlot]:
    """Return a critic and a reward model on the meta device, with LoRA on the same layers as the policy."""
    config = model.peft_config["default"]
    return [AdapterSlot(Policy(model), name, config, trained=name == "critic") for name in ("critic", "reward")]


def refill(slot: AdapterSlot, policy: Policy) -> None:
    """Let a slot hold the fake tensors that stand in the model now."""
    make_fake(slot.head.linear)
    slot.policy = policy
    slot.parameters = {**adapter_values(slot.model, slot.name), "score": slot.head.weight}


class Step:
    """A step on fake tensors: everything is read, then the policy is trained, then the critic."""

    def __init__(self, learner: Learner, batch: MicroBatch, offload: ActivationOffload,
                 slots: list[AdapterSlot]) -> None:
        self.learner, self.batch, self.offload, self.slots = learner, batch, offload, slots
        with unset_fake_temporarily():  # tables of 8-bit codes are computed
            self.optimizers = [learner.optimizer, *(
                make_optimizer([{"params": [*slot.parameters.values()]}], learner.config)
                for slot in slots if slot.trained)]

    def optimize(self) -> None:
        """Step with gradients of zero."""
        for optimizer in self.optimizers:
            self.begin(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    def begin(self, optimizer: Any) -> None:
        """Give the parameters of an optimizer the gradients that an earlier micro-batch has left."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)

    def run(self) -> None:
        policy = self.learner.policy
        with torch.no_grad(), policy.reference():
            policy.at_head(*policy.at_trained(self.batch))
        for slot in self.slots:
            with torch.no_grad(), slot.active():
                score_of_hidden(slot.head, policy.at_trained(self.batch)[0])
        for optimizer, train in zip(self.optimizers, (self.train_policy, self.train_critic), strict=False):
            self.begin(optimizer)
            self.offload.read_ahead(True)
            with self.offload:
                train()
            optimizer.step()
            optimizer.zero_grad()

    def train_policy(self) -> None:
        totals = StepTotals(len(self.batch.rollouts), 1, 1, 1)
        self.learner.accumulate(iter([self.batch]), totals, StepAccumulator(self.learner.policy.device))

    def train_critic(self) -> None:
        critic = self.slots[0]
        with critic.active() as policy, policy.rounding():
            values = score_of_hidden(critic.head, policy.at_trained(self.batch)[0])
            value_losses(values, torch.zeros_like(values), torch.zeros_like(values), 0.2)[0].sum().backward()


def weigh_whole(config: dict[str, Any], sequences: int, method: str) -> int:
    """Return the peak of the whole model, by steps with 2 and 3 layers: each further layer adds as much."""
    two, three = (weigh_step(config | {"num_hidden_layers": layers}, sequences, method) for layers in (2, 3))
    return two + (config["num_hidden_layers"] - 2) * (three - two)


def main() -> None:
    """Print the peaks of the steps."""
    from lowmem_grpo.memory.model_shape import named_config

    name = sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b"
    for sequences, methods in ((1, ("grpo", "ppo")), (2, ("grpo", "dpo")), (SEQUENCES, ("grpo", "ppo", "dpo"))):
        peaks = {method: weigh_whole(named_config(name), sequences, method) for method in methods}
        for method, peak in peaks.items():
            print(f"{name}, micro-batches of {sequences} x 2,048 tokens: {method} {peak / GIB:.3f} GiB, "
                  f"{peak / peaks['grpo']:.3f} times grpo's")


if __name__ == "__main__":
    main()
