"""Losses and LoRA gradients with a teacher, against TRL 1.16's DistillationTrainer and SDPOTrainer on the same weights
and completions, in float64: in float32 the model's own rounding hides small mistakes."""

import copy
import tempfile
from itertools import product
from typing import Any

import pytest
import torch
from datasets import Dataset
from parity_runs import difference, our_groups, our_policy, precision
from small_models import TINY, load_model, scatter
from torch import Tensor, nn
from transformers import AutoTokenizer
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl_runs import PLAIN, Rollouts, gradients, lora, padded, random_rollouts

from lowmem_grpo import DistillationConfig as OurDistillationConfig
from lowmem_grpo import GRPOConfig
from lowmem_grpo import SDPOConfig as OurSDPOConfig
from lowmem_grpo.losses.advantages import assign_advantages
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.teacher import Teacher
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.teacher_objective import TeacherObjective

TOLERANCE = 1e-5  # relative; TRL's kernel compares logits in float32, whatever the model computes in
ROLLOUTS = random_rollouts()
PLAIN_ROWS = Dataset.from_list([{"prompt": "0"}])
ALONE = {name: value for name, value in PLAIN.items() if name != "logging_strategy"}
HINTS = [[60 + row, 61, 62, 63][: 1 + row % 4] for row in range(12)]  # before each prompt, for the teacher alone
TAUGHT = [float(row % 5 != 1) for row in range(12)]
Run = tuple[float, dict[str, Tensor]]


def left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Prompts padded on their left, and their mask."""
    width = max(map(len, rows))
    return (torch.tensor([[0] * (width - len(row)) + row for row in rows]),
            torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]))


def batch_of(rollouts: Rollouts) -> dict[str, Any]:
    prompt_ids, prompt_mask = left(rollouts.prompt_ids)
    ids, mask = (padded(rows).long() for rows in (rollouts.completion_ids, [[1] * n for n in rollouts.lengths]))
    return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids, "completion_mask": mask,
            "num_items_in_batch": mask.sum()}


def settings(**own: Any) -> dict[str, Any]:
    return {**ALONE, "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 12} | own


def theirs(trainer: Any, batch: dict[str, Any]) -> Run:
    scatter(trainer.model)
    trainer.model.double().train()
    trainer.current_gradient_accumulation_steps = 1
    with precision(True):
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    return loss.item(), gradients(trainer.model)


def ours(weights: nn.Module, config: GRPOConfig, teacher: Any, groups: list[Any]) -> Run:
    policy = Policy(copy.deepcopy(our_policy().model).double())
    policy.model.load_state_dict(weights.state_dict())
    objective = TeacherObjective(config, True, policy, teacher(policy))
    learner = Learner(policy, config, objective, torch.optim.SGD(policy.trainable, lr=0.0))
    with precision(True):
        learner.prepare(groups, 1)
        loss = learner.forward_backward(groups)["loss"]
    return loss, gradients(policy.model)


def same(found: Run, wanted: Run) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE, abs=1e-12)
    assert difference(found[1], wanted[1]) < TOLERANCE


def other_model() -> Any:
    """A teacher with weights of its own."""
    model = load_model("Llama")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.double()


@pytest.mark.parametrize(("beta", "temperature"), [*product((0.0, 0.3, 1.0), (1.0, 0.7))])
def test_a_students_loss_or_gradient_would_not_be_that_of_trls_distillation(beta: float, temperature: float) -> None:
    args = DistillationConfig(**settings(beta=beta, temperature=temperature))
    trainer = DistillationTrainer(load_model("Llama"), other_model(), args, PLAIN_ROWS, peft_config=lora(
        load_model("Llama")), processing_class=AutoTokenizer.from_pretrained(TINY))
    wanted = theirs(trainer, batch_of(ROLLOUTS))
    config = OurDistillationConfig(beta=beta, temperature=temperature, per_device_train_batch_size=64, teacher="x")
    found = ours(trainer.model, config, lambda policy: Teacher("x", policy, other=Policy(other_model())),
                 our_groups(ROLLOUTS))
    same(found, wanted)


MODES: tuple[dict[str, Any], ...] = (
    {"distillation_mode": "sampled_token"},
    *({"distillation_mode": "topk_logits", "distillation_topk": 5, "distillation_add_tail": tail,
       "distillation_alpha": alpha} for tail in (True, False) for alpha in (0.0, 0.5, 1.0)),
    *({"distillation_mode": "full_logits", "distillation_alpha": alpha} for alpha in (0.0, 0.5, 1.0)),
)


@pytest.mark.parametrize("own", [*MODES, *({**mode, "old": True} for mode in (MODES[0], MODES[1], MODES[-1])),
                                 *({**mode, "distillation_weight": 0.3} for mode in (MODES[0], MODES[-1]))],
                         ids=lambda own: "-".join(f"{value}" for value in own.values()))
def test_a_loss_or_gradient_would_not_be_that_of_trls_sdpo(own: dict[str, Any]) -> None:
    own, old = dict(own), None
    if own.pop("old", False):
        generator = torch.Generator().manual_seed(1)
        old = [(-4 + torch.randn(n, generator=generator)).tolist() for n in ROLLOUTS.lengths]
    args = SDPOConfig(**settings(num_generations=4, teacher_model_kind="base", **own))
    trainer = SDPOTrainer(load_model("Llama"), lambda completions, **_: [0.0] * len(completions), args, PLAIN_ROWS,
                          peft_config=lora(load_model("Llama")), processing_class=AutoTokenizer.from_pretrained(TINY))
    groups = our_groups(ROLLOUTS, old)
    config = OurSDPOConfig(per_device_train_batch_size=64, num_generations=4, teacher="base", max_completion_length=12,
                           vllm_importance_sampling_correction=False, **own)
    assign_advantages(groups, ["reward"], config)
    batch = batch_of(ROLLOUTS)
    hinted = [hint + prompt for hint, prompt in zip(HINTS, ROLLOUTS.prompt_ids, strict=True)]
    ids, mask = left(hinted)
    batch |= {"teacher_input_ids": torch.cat([ids, batch["completion_ids"]], 1),
              "teacher_attention_mask": torch.cat([mask, batch["completion_mask"]], 1),
              "self_distillation_mask": torch.tensor(TAUGHT),
              "advantages": torch.tensor([r.advantage for group in groups for r in group.rollouts])}
    if old is not None:
        batch["old_per_token_logps"] = padded(old)
    wanted = theirs(trainer, batch)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, prompt, taught in zip(rollouts, hinted, TAUGHT, strict=True):
        rollout.teacher_prompt, rollout.fields["teacher_mask"] = prompt, torch.tensor(taught)
    same(ours(trainer.model, config, lambda policy: Teacher("base", policy), groups), wanted)
