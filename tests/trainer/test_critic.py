"""PPO: advantages and both gradients against plain transformers and formulas written token by token in float64; then
warm-up, clipping, resume, and what becomes of a critic that explodes."""

import copy
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from small_models import scatter, shallow
from torch import Tensor
from trainer_runs import ROWS, SMALL, adapter, digit_sum, load, moved, naive_logprobs, plain_peft, same
from transformers import AutoModelForSequenceClassification

from lowmem_grpo import GRPOConfig, GRPOTrainer
from lowmem_grpo.losses.advantages import assign_advantages
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.rows import fixed_rows
from lowmem_grpo.models.score_head import add_score
from lowmem_grpo.runs.saved_adapter import AdapterError, MismatchError, RunError
from lowmem_grpo.trainer.critic import CriticLearner
from lowmem_grpo.trainer.step_accumulator import members
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

PPO: dict[str, Any] = SMALL | {"advantage_estimator": "gae", "num_generations": 1, "per_device_train_batch_size": 4,
                               "disable_tqdm": True, "gamma": 0.9, "lam": 0.8, "lr_scheduler_type": "constant"}


def make(folder: Path, reward: Any = digit_sum, model: Any = None, **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(output_dir=str(folder), **(PPO | settings))
    return GRPOTrainer(model or load(), reward, config, ROWS)


def beside(trainer: GRPOTrainer) -> CriticLearner:
    assert isinstance(trainer.learner, CriticLearner)
    return trainer.learner


def critic_of(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in beside(trainer).slot.parameters.items()}


def shaken(trainer: GRPOTrainer, scale: float = 0.2) -> GRPOTrainer:
    """With a critic whose values matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in beside(trainer).slot.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return trainer


# Against formulas


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, token by token."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * later - v for r, later, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def white(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return [(value - mean) / (std + 1e-4) for value in values]


def played() -> Rollout:
    """Two turns of 2 and 3 tokens with 2 tokens between; the game pays 0.5 and -1, the style function 2."""
    turns = [Turn([1], [5, 6], [0.0, 0.0], "stop", reward=0.5), Turn([1], [7, 8, 9], [0.0] * 3, "stop", reward=-1.0)]
    return Rollout([5, 6, 3, 3, 7, 8, 9], [-0.5] * 7, "stop", trained=[True, True, False, False, True, True, True],
                   turns=turns, rewards={"Game": -0.5, "style": 2.0})


def test_advantages_and_returns_are_those_of_a_loop_over_tokens_with_turn_rewards_and_kl(tmp_path: Path) -> None:
    trainer = make(tmp_path, beta=0.3)
    objective: Any = trainer.parts.objective
    objective.critic.weights, objective.critic.paid = {"Game": 2.0, "style": 0.25}, ["Game"]
    single, silent = (Rollout([4, 5, 6], [-0.1, -0.2, -0.3], "stop", rewards={"Game": 1.0, "style": one})
                      for one in (0.0, None))
    silent.rewards = {"Game": None, "style": None}
    rollouts, generator = [played(), single, silent], torch.Generator().manual_seed(0)
    assign_advantages([RolloutGroup({}, [1], [rollout]) for rollout in rollouts], ["Game", "style"],
                      GRPOConfig(**PPO, reward_weights=[2.0, 0.25]))
    for rollout in rollouts:
        count = len(rollout.completion_ids)
        rollout.fields["values"], rollout.old_logprobs, rollout.ref_logprobs = (
            torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3))
    rollouts[0].fields["values"][2:4] = math.nan  # values at what the policy did not sample count nowhere
    objective.prepared(rollouts)
    expected, targets = [], []
    for rollout, paid in ((rollouts[0], [0, 1.0, 0, 0, -2.0 + 0.5]), (single, [0, 0, 2.0])):
        logp, ref, values = (rollout.at_trained(each).tolist() for each in (
            rollout.old_logprobs, rollout.ref_logprobs, rollout.fields["values"]))
        rewards = [r - 0.3 * (own - other) for r, own, other in zip(paid, logp, ref, strict=True)]
        own = by_hand(rewards, values, 0.9, 0.8)
        expected += own
        targets += [a + v for a, v in zip(own, values, strict=True)]
    for name, wanted in (("token_advantages", white(expected)), ("returns", targets)):
        given = [getattr(rollout, name, None) if name == "token_advantages" else rollout.fields.get(name)
                 for rollout in rollouts]
        found = torch.cat([rollout.at_trained(each) for rollout, each in zip(rollouts[:2], given[:2], strict=True)])
        assert given[2] is (None if name == "token_advantages" else silent.fields["values"])
        assert (found - torch.tensor(wanted, dtype=torch.float64)).abs().max() < 1e-10
        assert not given[0][2:4].any()
    assert single.advantage == pytest.approx(sum(white(expected)[5:]) / 3)


def plain_values(model: PeftModel, head: Tensor, prompt: list[int], completion: list[int]) -> Tensor:
    """(C,) of the texts before each token."""
    out = model(input_ids=torch.tensor([prompt + completion]), output_hidden_states=True)
    return (out.hidden_states[-1][0, len(prompt) - 1 : -1] @ head.T)[:, 0]


def gradients(named: Any) -> dict[str, Tensor]:
    return {name.replace(".default", ""): p.grad for name, p in named if p.grad is not None}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(found) > 4
    scale = max(float(grad.abs().max()) for grad in wanted.values())
    worst = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    assert scale > 1e-4 and worst < 2e-4 * scale


@pytest.mark.parametrize("step", [0, 1])
def test_both_gradients_are_those_of_plain_models_in_both_steps_of_an_update(step: int, tmp_path: Path) -> None:
    """In the second step the ratio of the policy and the bound of the values have moved away from the sampler's."""
    trainer = shaken(make(tmp_path / "run", model=moved(load()), num_iterations=2, cliprange_value=0.02,
                          critic_learning_rate=3e-3))
    groups, made = trainer.rollout(), beside(trainer)
    made.prepare(groups, 2)
    plain = plain_peft(trainer.model, tmp_path / "plain")
    first = copy.deepcopy(plain)
    if step:
        made.forward_backward(groups)
        made.optim_step()
        plain = plain_peft(trainer.model, tmp_path / "moved")
    own = copy.deepcopy(plain)
    head = made.slot.head.weight.detach().clone().requires_grad_(True)
    set_peft_model_state_dict(own, {name: value.detach().clone() for name, value in made.slot.parameters.items()
                                    if "lora" in name})
    pieces, old, targets = [], [], []
    for rollout, group in zip(members(groups), groups, strict=True):
        prompt, ids = group.prompt_ids, rollout.completion_ids
        before = rollout.fields["values"].double()
        advantages = by_hand([*[0.0] * (len(ids) - 1), rollout.reward], before.tolist(), 0.9, 0.8)
        with torch.no_grad():
            sampled = naive_logprobs(first, prompt, ids)
        pieces.append((naive_logprobs(plain, prompt, ids) - sampled, plain_values(own, head, prompt, ids), advantages))
        old.append(before)
        targets.append(torch.tensor(advantages) + before)
    advantages = torch.tensor(white([one for piece in pieces for one in piece[2]]))
    ratio = torch.cat([piece[0] for piece in pieces]).exp()
    (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()).backward()
    values, before, returns = torch.cat([piece[1] for piece in pieces]), torch.cat(old), torch.cat(targets)
    bounded = before + (values - before).clamp(-0.02, 0.02)
    loss = torch.maximum((values - returns) ** 2, (bounded - returns) ** 2).mean() / 2
    loss.backward()
    metrics = made.forward_backward(groups)
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert (metrics["critic/clipped"] > 0.05) == (step == 1) and (step == 1 or not metrics["critic/clipped"])
    equal(gradients((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad),
          gradients(plain.named_parameters()))
    equal(gradients(made.slot.parameters.items()) | {"head": made.slot.head.weight.grad},
          {**gradients(own.named_parameters()), "head": head.grad,
           **{name: head.grad for name in made.slot.parameters if "lora" not in name}})


def test_with_lambda_1_and_a_critic_that_never_learns_it_is_reinforce_with_whitened_rewards(tmp_path: Path) -> None:
    trainer = make(tmp_path, gamma=1.0, lam=1.0, critic_learning_rate=0.0)
    groups = trainer.rollout()
    trainer.update(groups)
    rollouts = members(groups)
    wanted = torch.tensor(white([rollout.reward for rollout in rollouts for _ in rollout.completion_ids]),
                          dtype=torch.float64)
    found = torch.cat([rollout.token_advantages for rollout in rollouts])
    assert (found - wanted).abs().max() < 1e-10 and found.std() > 0.5
    assert not beside(trainer).slot.head.weight.any()


def test_advantages_are_not_whitened_and_rewards_are_if_the_settings_say_so(tmp_path: Path) -> None:
    trainer = make(tmp_path, whiten_advantages=False, whiten_rewards=True)
    groups = trainer.rollout()
    trainer.learner.prepare(groups, 1)
    rollouts = members(groups)
    paid = [one for rollout in rollouts for one in [*[0.0] * (len(rollout.completion_ids) - 1), rollout.reward]]
    mean, start = sum(paid) / len(paid), 0
    scaled = [one + mean for one in white(paid)]
    for rollout in rollouts:
        end = start + len(rollout.completion_ids)
        wanted = by_hand(scaled[start:end], [0.0] * (end - start), 0.9, 0.8)
        assert rollout.token_advantages.tolist() == pytest.approx(wanted, abs=1e-10)
        start = end


class Counting:
    """Pays each turn its number."""

    def reset(self, seed: int = 0) -> str:
        self.turn = 0
        return f"Say {seed}."

    def step(self, reply: str) -> tuple[str, float, bool]:
        self.turn += 1
        return "More.", float(self.turn), self.turn == 2


def test_an_environments_turns_pay_their_own_last_tokens(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), **PPO | {"max_completion_length": 96, "max_turn_tokens": 6,
                                                           "whiten_advantages": False})
    trainer = GRPOTrainer(load(), None, config, environment_factory=Counting)
    groups = trainer.rollout()
    trainer.learner.prepare(groups, 1)
    for rollout in members(groups):
        first, second = (len(turn.completion_ids) for turn in rollout.turns)
        paid = [*[0.0] * (first - 1), 1.0, *[0.0] * (second - 1), 2.0]
        wanted = by_hand(paid, [0.0] * len(paid), 0.9, 0.8)
        assert rollout.at_trained(rollout.token_advantages).tolist() == pytest.approx(wanted, abs=1e-10)


class Kept(Counting):
    """Turns of equal number are in the same state."""

    def state_key(self) -> str:
        return str(self.turn)


@pytest.mark.parametrize(("settings", "fix"), [
    ({"advantage_estimator": "gae"}, "state_weight=0$"),
    ({"advantage_estimator": "reinforce++", "beta": 0.1}, "state_weight=0, or beta=0$")])
def test_states_that_cannot_be_compared_are_refused_when_the_trainer_is_made(
    settings: dict[str, Any], fix: str, tmp_path: Path
) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), **SMALL | {"max_completion_length": 96} | settings)
    with pytest.raises(ValueError, match="no place for the comparison of turns in the same state; set " + fix):
        GRPOTrainer(load(), None, config, environment_factory=Kept)


# A run


def test_a_critic_that_starts_as_a_reward_model_values_a_text_as_peft_scores_it(tmp_path: Path) -> None:
    judge = load(r=2)
    add_score(judge, seed=1)
    scatter(judge).save_pretrained(tmp_path / "judge")
    trainer = make(tmp_path / "run", critic_adapter=str(tmp_path / "judge"))
    saved = load_file(tmp_path / "judge" / "adapter_model.safetensors")
    assert same(critic_of(trainer), saved) and any("lora_B" in name and value.any() for name, value in saved.items())
    groups = trainer.rollout()
    trainer.learner.prepare(groups, 1)
    prompt, rollout = groups[0].prompt_ids, groups[0].rollouts[0]
    base = AutoModelForSequenceClassification.from_pretrained(shallow(), num_labels=1, pad_token_id=None)
    plain = PeftModel.from_pretrained(base, tmp_path / "judge").eval()
    with torch.no_grad():
        wanted = torch.stack([plain(input_ids=torch.tensor([prompt + rollout.completion_ids[:place]])).logits[0, 0]
                              for place in range(len(rollout.completion_ids))])
    assert (rollout.fields["values"] - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_a_folder_without_a_reward_model_is_refused_by_name(tmp_path: Path) -> None:
    load().save_lora(tmp_path / "words")
    with pytest.raises(AdapterError, match="it is no reward model; give one that RewardTrainer made"):
        make(tmp_path / "run", critic_adapter=str(tmp_path / "words"))
    with pytest.raises(RunError, match="there is no"):
        make(tmp_path / "run", critic_adapter=str(tmp_path / "nothing"))


def test_a_run_with_one_sample_a_prompt_trains_both_and_measures_the_critic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, max_steps=3, beta=0.1, num_iterations=1)
    before, values = adapter(trainer), critic_of(trainer)
    trainer.train()
    after = critic_of(trainer)
    assert not same(before, adapter(trainer)) and all(not torch.equal(values[name], after[name]) for name in values
                                                      if "lora_A" not in name)
    line = trainer.state.log_history[0]
    assert line["critic/learning_rate"] == line["learning_rate"] == pytest.approx(0.01)
    assert line["critic/values"] == 0 and line["critic/returns"] > 0 and line["critic/grad_norm"] > 0
    assert line["groups/with_signal"] == 4 and not line["critic/skipped"]
    assert "critic/explained_variance" in trainer.state.log_history[1]
    assert "carry signal" not in caplog.text and "earn the same" not in caplog.text
    report = (tmp_path / "report.html").read_text()
    assert "explained variance" in report
    saved = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert not any("critic" in name for name in saved)


def test_an_evaluation_with_completions_that_nobody_paid_measures_the_others(tmp_path: Path) -> None:
    def half(completions: list[str], **_: Any) -> list[float | None]:
        return [None if place % 2 else 1.0 for place, _ in enumerate(completions)]

    trainer = make(tmp_path, half, max_steps=1)
    assert math.isfinite(trainer.evaluate(ROWS[:4])["eval_loss"])


def test_a_warm_up_that_never_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="critic_warmup_steps is 3, and the run has 3 steps"):
        make(tmp_path, max_steps=3, critic_warmup_steps=3)


def test_an_adapter_that_a_later_trainer_replaced_is_not_trained_in_its_place(tmp_path: Path) -> None:
    model = load()
    first = make(tmp_path / "first", model=model, max_steps=1)
    make(tmp_path / "second", model=model, max_steps=1)
    with pytest.raises(RuntimeError, match="replaced by one of a later trainer"), beside(first).slot.active():
        pass


def test_the_next_trainer_of_a_model_frees_the_critic_and_trains(tmp_path: Path) -> None:
    model = load()
    make(tmp_path / "ppo", model=model, max_steps=1).train()
    assert any(".critic." in name for name, _ in model.named_parameters())
    second = GRPOTrainer(model, digit_sum, GRPOConfig(str(tmp_path / "grpo"), **SMALL | {"max_steps": 1}), ROWS)
    assert model.loaded.slots == [] and not any(".critic." in name for name, _ in model.named_parameters())
    before = adapter(second)
    second.train()
    assert not same(before, adapter(second))


def test_a_warm_up_leaves_the_policy_bit_for_bit_and_trains_the_critic(tmp_path: Path) -> None:
    trainer = make(tmp_path, model=moved(load()), max_steps=3, critic_warmup_steps=2, weight_decay=0.1)
    before, steps = adapter(trainer), []

    class Watch:
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append((same(before, adapter(trainer)), critic_of(trainer)))

    trainer.add_callback(Watch())
    trainer.train()
    assert [unchanged for unchanged, _ in steps] == [True, True, False]
    assert not same(steps[0][1], steps[1][1])


def test_a_resumed_run_goes_on_bit_for_bit_with_its_critic(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "critic_warmup_steps": 1,
                                "num_iterations": 2, "lr_scheduler_type": "linear"}
    whole = make(tmp_path / "whole", **settings)
    whole.train()
    (tmp_path / "half").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "half" / "checkpoint-2")
    again = make(tmp_path / "half", **settings)
    again.train(resume_from_checkpoint=True)
    assert same(adapter(whole), adapter(again)) and same(critic_of(whole), critic_of(again))
    first, second = (beside(trainer).critic.optimizer.state_dict()["state"] for trainer in (whole, again))
    assert all(torch.equal(first[key][name], second[key][name]) for key in first for name in ("exp_avg", "exp_avg_sq"))
    metrics = [{name: value for name, value in trainer.state.log_history[-2].items() if name.startswith("critic")}
               for trainer in (whole, again)]
    assert metrics[0] == metrics[1] and metrics[0]


def test_a_new_run_of_a_trainer_keeps_the_critic_and_begins_its_optimizer_again(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    before = critic_of(trainer)
    trainer.saver.begin_again()
    assert same(before, critic_of(trainer)) and not beside(trainer).critic.optimizer.state_dict()["state"]
    assert beside(trainer).objective.steps == 0


def test_a_checkpoint_without_a_critic_is_refused_by_name(tmp_path: Path) -> None:
    GRPOTrainer(load(), digit_sum, GRPOConfig(output_dir=str(tmp_path), **SMALL | {
        "save_strategy": "steps", "save_steps": 1, "max_steps": 1}), ROWS).train()
    with pytest.raises(MismatchError, match="of a run without a critic"):
        make(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_critic_step_with_infinite_gradients_is_skipped_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, max_steps=2)
    values, before = critic_of(trainer), adapter(trainer)
    with (slot := beside(trainer).slot).active():
        slot.head.weight.register_hook(lambda gradient: gradient * math.inf)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert same(values, critic_of(trainer)) and not same(before, adapter(trainer))
    assert [line["critic/skipped"] for line in trainer.state.log_history[:2]] == [1, 1]
    assert "NaN or infinity in the critic" in caplog.text and "critic_learning_rate" in caplog.text


def test_the_plan_counts_what_a_critic_holds(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1)
    trainer.update(trainer.rollout())
    made = beside(trainer)
    weights = sum(p.nbytes for name, p in made.slot.parameters.items() if "lora" in name)
    states = sum(value.nbytes for name, p in made.slot.parameters.items() if "lora" in name
                 for value in made.critic.optimizer.state[p].values() if value.ndim)
    shape = ModelShape.from_config(trainer.model.config)
    settings = RunSettings(context=128, lora_rank=4, form="16bit", checkpointing=False, engine="transformers",
                           optim="adamw_torch_fused", keeps_critic=True, host_embedding=False)
    row = next(row for row in fixed_rows(shape, settings) if row.name == "critic")
    assert row.rollout == weights + states and row.train == 2 * weights + states
    assert not any(row.name == "critic" for row in fixed_rows(shape, replace(settings, keeps_critic=False)))
