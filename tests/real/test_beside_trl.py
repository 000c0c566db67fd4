"""One step on a published model beside TRL 1.16: its loss and LoRA gradients, for chats of different lengths whose
completions end or are cut. tests/against_trl compares all settings, on a random model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from parity_runs import our_groups, our_learner
from published_model import published_model
from small_models import scatter
from trainer_runs import relative
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_runs import END, PLAIN, Rollouts, given_reward, gradients, make_trainer, model_logprobs, move, prepare, window

from lowmem_grpo import FastLanguageModel, SFTConfig, SFTTrainer
from lowmem_grpo.losses.advantages import assign_advantages
from lowmem_grpo.models.policy import Policy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*(rollout_func|supports vLLM).*")]
TOLERANCE = 1e-5  # of the loss, and of the gradient by its norm
TARGETS = ["q_proj", "v_proj", "down_proj"]
GENERATIONS, LONGEST = 2, 12
CHATS = [
    [{"role": "user", "content": "Name three rivers."}],
    [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Why do leaves turn red?"}],
]
SAID = [("The Nile, the Rhine and the Danube.", True), ("1. Nile\n2. Danube\n3.", False), ("They do not.", True),
        ("In autumn, leaves turn", False)]  # and whether it ends


@pytest.fixture(scope="module")
def folder() -> str:
    return str(published_model().folder)


@pytest.fixture(scope="module")
def loaded(folder: str) -> tuple[Any, Any]:
    """Our model with LoRA, and its tokenizer."""
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=256, dtype=torch.float32,
                                                         load_in_16bit=True)
    return FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=TARGETS,
                                            use_gradient_checkpointing=False), tokenizer


@pytest.fixture(scope="module")
def rollouts(loaded: tuple[Any, Any]) -> Rollouts:
    tokenizer = loaded[1]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in CHATS]
    assert len(prompts[0]) != len(prompts[1])
    completions = [tokenizer.encode(text) + [END] * ends for text, ends in SAID]
    return Rollouts([prompt for prompt in prompts for _ in range(GENERATIONS)], completions,
                    {"reward": [1.0, 0.25, 0.0, 0.5]}, GENERATIONS)


def plain(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")


def assert_same_step(
    trainer: Any, rollouts: Rollouts, model: Any, printed: Any, drift: float = 0.0, **settings: Any
) -> None:
    """Compare a step. With `drift`, the policy moves between sampling and the step."""
    batch = prepare(trainer, rollouts)
    learner = our_learner(trainer.model, Policy(model), num_generations=GENERATIONS, max_completion_length=LONGEST,
                          **settings)
    groups = our_groups(rollouts)
    assign_advantages(groups, list(rollouts.rewards), learner.config)
    learner.prepare(groups, 2 if drift else 1)
    if drift:
        move(trainer, drift)
        model.load_state_dict(trainer.model.state_dict())
    theirs = window(trainer, batch)
    assert_same(theirs.loss, theirs.gradients, learner.forward_backward(groups)["loss"], model, printed)


def assert_same(loss: torch.Tensor, wanted: dict[str, torch.Tensor], ours: float, model: Any, printed: Any) -> None:
    off = relative(gradients(model), wanted)
    printed("printed", f"beside TRL: loss {float(loss):.6f} and {ours:.6f}, gradients differ by {off:.1e}")
    model.zero_grad()
    assert ours == pytest.approx(float(loss), rel=TOLERANCE, abs=1e-6)
    assert off <= TOLERANCE


@pytest.mark.parametrize(("settings", "drift"), [
    ({"loss_type": "grpo"}, 0.0), ({"loss_type": "dr_grpo", "scale_rewards": "none"}, 0.0),
    ({"loss_type": "dapo", "beta": 0.05, "use_bias_correction_kl": False, "num_iterations": 2}, 0.002),
], ids=["GRPO", "Dr. GRPO", "DAPO with KL, second iteration"])
def test_a_step_of_grpo_is_trls(
    settings: dict[str, Any], drift: float, loaded: tuple[Any, Any], folder: str, rollouts: Rollouts,
    record_property: Any
) -> None:
    trainer = make_trainer(rollouts, plain(folder), adapter=lora(), tokenizer=folder,
                           settings=settings | {"max_completion_length": LONGEST})
    assert_same_step(trainer, rollouts, loaded[0], record_property, drift, **settings)


class Given(trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOO, whose completions are given; it makes the prompts itself."""

    given: list[list[int]]

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any) -> list[list[int]]:
        return self.given


def test_a_step_of_rloo_is_trls(
    loaded: tuple[Any, Any], folder: str, rollouts: Rollouts, tmp_path: Path, record_property: Any
) -> None:
    settings = {"beta": 0.05, "num_generations": GENERATIONS, "max_completion_length": LONGEST}
    args = trl.RLOOConfig(str(tmp_path), **PLAIN | settings, per_device_train_batch_size=len(SAID))
    trainer = Given(plain(folder), given_reward("reward", rollouts.rewards["reward"]), args,
                    processing_class=AutoTokenizer.from_pretrained(folder),
                    train_dataset=Dataset.from_list([{"prompt": chat} for chat in CHATS]), peft_config=lora())
    trainer.given = rollouts.completion_ids
    scatter(trainer.model.train())
    # the KL term in our rewards is of the sampler's log-probabilities
    rollouts = replace(rollouts, rollout_logprobs=model_logprobs(trainer.model, rollouts))
    assert_same_step(trainer, rollouts, loaded[0], record_property, beta=0.05, loss_type="rloo",
                     advantage_estimator="rloo")


def test_a_step_of_fine_tuning_is_trls_without_the_line_break_behind_the_end_token(
    loaded: tuple[Any, Any], folder: str, tmp_path: Path, record_property: Any
) -> None:
    model, tokenizer = loaded
    rows = [{"prompt": chat, "completion": [{"role": "assistant", "content": text}]}
            for chat, (text, _) in zip(CHATS, SAID[1:3], strict=True)]
    args = trl.SFTConfig(str(tmp_path / "trl"), **{name: value for name, value in PLAIN.items()
                                                   if name != "max_completion_length"}, per_device_train_batch_size=2)
    theirs = trl.SFTTrainer(plain(folder), args, train_dataset=Dataset.from_list(rows), peft_config=lora(),
                            processing_class=AutoTokenizer.from_pretrained(folder))
    scatter(theirs.model.train())
    batch = next(iter(theirs.get_train_dataloader()))
    labels = batch["labels"]
    ends = (labels[:, :-1] == END).nonzero()
    assert [tokenizer.decode(labels[row, place + 1]) for row, place in ends] == ["\n", "\n"]
    labels[ends[:, 0], ends[:, 1] + 1] = -100
    loss = theirs.compute_loss(theirs.model, batch)
    loss.backward()
    model.load_state_dict(theirs.model.state_dict())
    ours = SFTTrainer(model, rows, SFTConfig(str(tmp_path / "ours"), per_device_train_batch_size=2, max_steps=1))
    said = ours.learner.forward_backward(ours.next_groups())["loss"]
    assert_same(loss, gradients(theirs.model), said, model, record_property)
