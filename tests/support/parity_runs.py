"""Our side of the parity with TRL: the same weights, completions and rewards through `Learner`; and both in float64.

    theirs, ours = both(rollouts, old_logprobs=old, loss_type="dapo", beta=0.04)      # TRL's names for all settings
    exact = Exact(theirs.trainer.model, rollouts)                                     # for formulas in float64
    exact.gradients(loss made of exact.logprobs and exact.entropy)
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from small_models import SPLIT, TINY, load_model, with_adapter
from torch import Tensor, nn
from transformers import AutoTokenizer

if os.environ.get("CI") != "true":  # in CI its absence fails the import below
    pytest.importorskip("trl", reason="TRL is a development dependency")

from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.utils import split_tensor_dict
from trl_runs import END, Rollouts, TrlRun, given_reward, gradients, make_trainer, model_logprobs, prepare, window

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.losses.advantages import assign_advantages
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.scoring import rollout_metrics
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.optim import make_optimizer, make_scheduler
from lowmem_grpo.types import Rollout, RolloutGroup

LONGEST = 12  # max_completion_length, of both
ADAM_EPSILON = 1e-2  # large, so that a step is smooth in the gradient where that is tiny
Logprobs = list[list[float]]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class OurRun:
    """What we made of the completions: one optimizer step's loss and gradients, and every metric that is logged."""

    loss: float
    metrics: dict[str, float]
    gradients: Gradients
    groups: list[RolloutGroup]

    @property
    def advantages(self) -> list[float]:
        return [rollout.advantage for group in self.groups for rollout in group.rollouts]


def both(
    rollouts: Rollouts, *, old_logprobs: Logprobs | None = None, correction: bool = False, micro_batches: int = 1,
    loss_type: str = "dapo", ours: dict[str, Any] | None = None, exact: bool = False, **settings: Any,
) -> tuple[TrlRun, OurRun]:
    """One optimizer step by TRL and by us; `ours` are settings of our side alone. With `exact` both compute in
    float64, so that what differs is a formula and not the rounding of this processor."""
    run = theirs(rollouts, old_logprobs, correction, micro_batches, loss_type, exact, **settings)
    same = {"loss_type": loss_type} | settings
    if correction:
        same["vllm_importance_sampling_correction"] = True
    learner = our_learner(run.trainer.model, **same | (ours or {}))
    with precision(exact):
        if exact:
            learner.policy = Policy(copy.deepcopy(learner.policy.model).double())
        return run, our_step(learner, rollouts, old_logprobs)


@contextmanager
def precision(exact: bool) -> Iterator[None]:
    """Inside, new tensors are float64 where `exact`."""
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def theirs(
    rollouts: Rollouts, old_logprobs: Logprobs | None = None, correction: bool = False, micro_batches: int = 1,
    loss_type: str = "dapo", exact: bool = False, **settings: Any,
) -> TrlRun:
    """TRL's step; GMPO has a trainer of its own there, and GSPO is the sequence level of grpo."""
    options, classes = {"loss_type": loss_type} | settings, {}
    if loss_type == "gmpo":
        classes["trainer_class"] = GMPOTrainer
        options = {"epsilon": 0.4} | settings
    elif loss_type in ("gspo", "gspo_token"):
        options = {"epsilon": 3e-4, "epsilon_high": 4e-4} | settings
        options |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    trainer = make_trainer(rollouts, settings=options, micro_batches=micro_batches, **classes)
    if exact:
        trainer.model.double()
    with precision(exact):
        return window(trainer, prepare(trainer, rollouts, correction, old_logprobs))


@cache
def our_policy() -> Policy:
    """The model that trl_runs trains, with LoRA on the same layers."""
    return Policy(with_adapter(load_model("Llama")))


def our_learner(weights: nn.Module, policy: Policy | None = None, **settings: Any) -> Learner:
    """A learner with the given model's weights, base and adapter copied by name."""
    policy = policy or our_policy()
    policy.model.load_state_dict(weights.state_dict())
    defaults = {"num_generations": 4, "per_device_train_batch_size": 64, "max_completion_length": LONGEST,
                "vllm_importance_sampling_correction": False}
    config = GRPOConfig(**defaults | settings)
    optimizer = make_optimizer(policy.trainable, config)
    optimizer.zero_grad()
    return Learner(policy, config, GRPOObjective(config), optimizer, make_scheduler(optimizer, config, 1))


def our_run(
    weights: nn.Module, rollouts: Rollouts, old_logprobs: Logprobs | None = None, **settings: Any
) -> OurRun:
    """One step of `Learner` on the completions."""
    return our_step(our_learner(weights, **settings), rollouts, old_logprobs)


def our_step(learner: Learner, rollouts: Rollouts, old_logprobs: Logprobs | None = None) -> OurRun:
    groups, names = our_groups(rollouts, old_logprobs), list(rollouts.rewards)
    assign_advantages(groups, names, learner.config)
    learner.prepare(groups, 1)
    metrics = learner.forward_backward(groups) | rollout_metrics(groups, names)
    found = gradients(learner.policy.model)
    learner.optimizer.zero_grad()
    return OurRun(metrics["loss"], metrics, found, groups)


def our_groups(rollouts: Rollouts, old_logprobs: Logprobs | None = None) -> list[RolloutGroup]:
    """The completions as we hold them; a sampler always gives log-probabilities here."""
    sampled = rollouts.rollout_logprobs or [[0.0] * length for length in rollouts.lengths]
    found = []
    for row, ids in enumerate(rollouts.completion_ids):
        old = None if old_logprobs is None else torch.tensor(old_logprobs[row])
        rewards = {name: values[row] for name, values in rollouts.rewards.items()}
        reason = "stop" if ids[-1] == END else "length"
        found.append(Rollout(ids, sampled[row], reason, rewards=rewards, old_logprobs=old))
    size = rollouts.num_generations
    return [RolloutGroup({"prompt": ""}, rollouts.prompt_ids[at], found[at : at + size])
            for at in range(0, len(found), size)]


@cache
def weights_of_the_runs() -> nn.Module:
    """TRL's model as every run begins with it."""
    rollouts = Rollouts([[3]] * 2, [[4]] * 2, {"reward": [0.0, 1.0]}, 2)
    return make_trainer(rollouts).model


def stale(rollouts: Rollouts, temperature: float = 1.0) -> tuple[Rollouts, Logprobs]:
    """The completions as a policy drew them that is neither the old one nor the present one; and the old one's.

    Both differ from the present policy by noise on every token, and by much on some, so that bounds are crossed on
    both sides.
    """
    now = model_logprobs(weights_of_the_runs(), rollouts, temperature)
    old = with_noise(now, 0.25, every=11, by=2.0, seed=5)
    return replace(rollouts, rollout_logprobs=with_noise(old, 0.25, every=13, by=1.5, seed=6)), old


def with_noise(logprobs: Logprobs, scale: float, every: int, by: float, seed: int) -> Logprobs:
    """Noise on all of them, and on one of `every` a step `by`, down and up in turn."""
    generator, number, results = torch.Generator().manual_seed(seed), 0, []
    for row in logprobs:
        results.append([])
        for value in row:
            jump = 0.0 if number % every else (-by if number // every % 2 == 0 else by)
            noisy = value + scale * float(torch.randn((), generator=generator)) + jump
            results[-1].append(torch.tensor(noisy, dtype=torch.float32).item())  # as our records hold it
            number += 1
    return results


class GivenEngine:
    """Samples nothing: hands the given completions to our trainer."""

    name, kv_bytes = "given", 0

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []

    def generate(self, prompts: list[list[int]], params: Any) -> list[list[Rollout]]:
        assert prompts == [group.prompt_ids for group in self.groups]
        return [group.rollouts for group in self.groups]

    def on_policy_update(self, policy_version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def our_trainer(folder: Path, rollouts: Rollouts, **settings: Any) -> tuple[GRPOTrainer, Rollouts]:
    """Our whole trainer on the model of the runs, saved and loaded, with the rewards and completions; and these with
    the prompts of its dataset. It steps as `trl_steps` does."""
    load_model("Llama").save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "model")
    bare, _ = FastLanguageModel.from_pretrained(
        str(folder / "model"), max_seq_length=64, load_in_4bit=False, dtype=torch.float32
    )
    model = FastLanguageModel.get_peft_model(
        bare, r=4, lora_alpha=8, lora_dropout=0.0, target_modules=SPLIT, use_gradient_checkpointing=False
    )
    model.load_state_dict(weights_of_the_runs().state_dict())
    config = GRPOConfig(
        output_dir=str(folder / "run"), max_completion_length=LONGEST, num_generations=rollouts.num_generations,
        shuffle_dataset=False, max_grad_norm=1e9, lr_scheduler_type="constant", adam_epsilon=ADAM_EPSILON,
        disable_tqdm=True, save_strategy="no",
        # TRL's runs get their LoRA from a peft_config, so they compare with the base
        **{"parity_steps": 0, "vllm_importance_sampling_correction": False, "kl_reference": "base"} | settings,
    )
    rows = [{"prompt": f"{row}"} for row in range(len(rollouts.prompt_ids) // rollouts.num_generations)]
    rewards, engine = [given_reward(*each) for each in rollouts.rewards.items()], GivenEngine()
    trainer = GRPOTrainer(model, rewards, config, rows, engine=engine)
    encoded = [trainer.source.encoder.encode(row).ids for row in rows for _ in range(rollouts.num_generations)]
    rollouts = replace(rollouts, prompt_ids=encoded)
    engine.groups = our_groups(rollouts)
    return trainer, rollouts


def trl_steps(
    rollouts: Rollouts, steps: int, micro_batches: int, gradient_accumulation_steps: int, **settings: Any
) -> list[Gradients]:
    """The gradients of so many optimizer steps of TRL on one generation, in the order of its rows."""
    settings |= {"gradient_accumulation_steps": gradient_accumulation_steps, "steps_per_generation": micro_batches}
    trainer = make_trainer(rollouts, settings=settings, micro_batches=micro_batches)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=trainer.args.learning_rate, eps=ADAM_EPSILON, weight_decay=0.0)
    parts = split_tensor_dict(prepare(trainer, rollouts), micro_batches)
    found = []
    for step in range(steps):
        for number in range(gradient_accumulation_steps):
            place = (step * gradient_accumulation_steps + number) % micro_batches
            trainer.compute_loss(trainer.model, parts[place]).backward()
        found.append(gradients(trainer.model))
        optimizer.step()
        optimizer.zero_grad()
    return found


class Exact:
    """The same model in float64: each completion alone, plain transformers and autograd; no code of TRL's or ours.

    `logprobs`, `entropy` (with gradient) and `reference` (without the adapter) are (C,) of each completion.
    """

    def __init__(self, weights: nn.Module, rollouts: Rollouts, temperature: float = 1.0) -> None:
        self.model = exact_model()
        self.model.load_state_dict(weights.state_dict())
        self.logprobs, self.entropy = token_values(self.model, rollouts, temperature)
        with torch.no_grad(), self.model.disable_adapter():
            self.reference, _ = token_values(self.model, rollouts, temperature)

    def gradients(self, loss: Tensor) -> Gradients:
        """Of every adapter weight; may be called again for another loss."""
        self.model.zero_grad()
        loss.backward(retain_graph=True)
        return gradients(self.model)


def token_values(model: nn.Module, rollouts: Rollouts, temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """(log-probabilities, entropies), each (C,) of each completion."""
    logprobs, entropies = [], []
    for prompt, ids in zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
        every = logits.log_softmax(-1)
        logprobs.append(every.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1))
        entropies.append(-(every.exp() * every).sum(-1))
    return logprobs, entropies


@cache
def exact_model() -> peft.PeftModel:
    return with_adapter(load_model("Llama")).double()


def difference(found: Gradients, expected: Gradients) -> float:
    """The largest relative difference of any parameter's gradient, by its norm."""
    assert found.keys() == expected.keys() and expected
    norms = {name: float(value.norm()) for name, value in expected.items()}
    assert all(norms.values()), "a gradient is zero"
    return max(float((found[name] - value).norm()) / norms[name] for name, value in expected.items())
