"""NaN and infinity: the step is skipped, counted and written down, and three in a row stop."""

import copy
import json
import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_runs
from memory import Failing
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_runs import TEXTS, adapter, load, moved, same

from lowmem_grpo import GRPOTrainer
from lowmem_grpo.models.packing import pack
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.trainer import learner as step
from lowmem_grpo.trainer.nonfinite import FILE, WRITTEN, BadRollout, Flags, Guard, NonFiniteError, lines
from lowmem_grpo.types import TOKEN_FIELDS, Rollout, RolloutGroup, TokenField
from tests.attacks.small_run import StopAt, records

NAN, INF = math.nan, math.inf
TOKENS = 100  # of a micro-batch: the groups below make at least three of them
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 16, "max_completion_length": 12, "max_steps": 6,
                            "disable_tqdm": True, "parity_steps": 0, "max_tokens_per_micro_batch": TOKENS}


def make(folder: Path, reward: Any = None, callbacks: Any = (), **settings: Any) -> GRPOTrainer:
    """A trainer of the embedded model, with dropout and an adapter that matters."""
    return trainer_runs.make(folder, reward or DigitSum(), TEXTS, moved(load(lora_dropout=0.1)),
                             callbacks=list(callbacks), **SETTINGS | settings)


class DigitSum:
    """A reward; in some steps, counted from 1, the second completion's is another value."""

    __name__ = "digit_sum"

    def __init__(self, value: float = NAN, steps: tuple[int, ...] = ()) -> None:
        self.value, self.steps = value, steps

    def __call__(self, completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float | None]:
        rewards: list[float | None] = [float(sum(int(c) for c in t if c in "0123456789")) for t in completions]
        if trainer_state.global_step + 1 in self.steps:
            rewards[1] = self.value
        rewards[2] = None  # no opinion, which is no error
        return rewards


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> list[RolloutGroup]:
    """Four groups of four completions with a spread of rewards, on-policy for a trainer that has made one step."""
    trainer = make(tmp_path_factory.mktemp("sampled"))
    groups = trainer.rollout()
    for group in groups:
        for rollout in group.rollouts:
            rollout.policy_version = 9
    assert all(any(rollout.advantage for rollout in group.rollouts) for group in groups)
    return groups


def broken(groups: list[RolloutGroup], field: str, group: int = 1, rollout: int = 1) -> list[RolloutGroup]:
    """Copies of the groups, with a NaN in one rollout."""
    groups = copy.deepcopy(groups)
    chosen = groups[group].rollouts[rollout]
    if field == "rollout_logprobs":
        chosen.rollout_logprobs[-1] = NAN
    elif field == "advantages":
        chosen.advantage = NAN
    else:
        chosen.invalid_rewards = {"digit_sum": NAN}
    return groups


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """The adapter and all that the optimizer holds of it."""
    held = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    names = {p: name for name, p in trainer.model.named_parameters()}
    for parameter, state in trainer.learner.optimizer.state.items():
        held |= {f"{names[parameter]}.{k}": torch.as_tensor(v).clone() for k, v in state.items()}
    return held


def written(folder: Path) -> list[dict[str, Any]]:
    """The records, by a parser that takes no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return [json.loads(line, parse_constant=refuse) for line in (folder / FILE).read_text("utf-8").splitlines()]


def check_skips(trainer: GRPOTrainer, groups: list[RolloutGroup], what: set[str], rollouts: list[Rollout]) -> None:
    """An update on the groups changes nothing but schedule and step, and writes these rollouts for these reasons."""
    before, objective, done = weights(trainer), trainer.parts.objective.state(), trainer.state.global_step
    rate = trainer.learner.scheduler.get_last_lr()
    metrics = trainer.update(groups)
    assert same(weights(trainer), before)
    assert all(parameter.grad is None for parameter in trainer.policy.trainable)
    assert trainer.parts.objective.state() == objective or what == {"gradient"}  # what was measured then is sound
    assert trainer.state.global_step == done + 1 and trainer.learner.scheduler.get_last_lr() < rate
    assert (metrics["optimizer/skipped"], metrics["nonfinite/rollouts"]) == (1, len(rollouts))
    assert what != {"advantages"} or math.isnan(metrics["grad_norm"])
    found = written(trainer.run_dir)
    assert {line["what"] for line in found} == what
    assert sorted(line["completion_ids"] for line in found) == sorted(r.completion_ids for r in rollouts)
    assert {line["step"] for line in found} == {done + 1}


def started(folder: Path, groups: list[RolloutGroup], **settings: Any) -> GRPOTrainer:
    """A trainer with one step behind it, so that the optimizer has a state."""
    trainer = make(folder, **settings)
    assert trainer.update(copy.deepcopy(groups))["optimizer/skipped"] == 0
    trainer.state.policy_version = 9  # whatever was sampled is on-policy
    return trainer


# Where a value may be


@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_reward_that_is_no_number_is_counted_written_and_not_trained_on(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Any] = []  # the adapter after each step
    listener = SimpleNamespace(on_step_end=lambda *_, **__: kept.append(adapter(trainer)))
    trainer = make(tmp_path, DigitSum(value, (2, 3)), [listener], max_steps=4)
    trainer.train()
    metrics = read_lines(tmp_path / "metrics.jsonl")
    assert [line["optimizer/skipped"] for line in metrics] == [0, 1, 1, 0]
    assert [line["nonfinite/steps"] for line in metrics] == [0, 1, 2, 2]
    assert [line["nonfinite/rollouts"] for line in metrics] == [0, 1, 1, 0]
    assert [line["learning_rate"] for line in metrics] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert same(kept[0], kept[1]) and same(kept[0], kept[2]) and not same(kept[2], kept[3])
    found = written(tmp_path)
    assert [(line["step"], line["what"]) for line in found] == [(2, "reward digit_sum"), (3, "reward digit_sum")]
    assert [line["rewards"] for line in found] == [{"digit_sum": str(value)}] * 2
    completions = [line for line in read_lines(tmp_path / "completions.jsonl") if line["step"] in (2, 3)][1::16]
    for line, completion in zip(found, completions, strict=True):
        assert {k: line[k] for k in ("prompt", "completion")} == {k: completion[k] for k in ("prompt", "completion")}
        assert (line["reward"], line["advantage"]) == (None, 0.0)
        assert len(line["completion_ids"]) == completion["tokens"] and line["prompt_ids"]
    assert "digit_sum gave NaN or infinity for 1 completions" in caplog.text
    assert "a function returns None" in caplog.text
    assert "step 3 is skipped" in caplog.text and "2 of 3 in a row" in caplog.text and FILE in caplog.text


@pytest.mark.parametrize("field", ["rollout_logprobs", "advantages"])
def test_a_nan_that_came_with_a_rollout_is_not_trained_on(
    tmp_path: Path, sampled: list[RolloutGroup], field: str
) -> None:
    trainer, groups = started(tmp_path, sampled), broken(sampled, field)
    check_skips(trainer, groups, {field}, [groups[1].rollouts[1]])


@pytest.mark.parametrize(
    ("field", "settings"), [("old_logprobs", {"num_iterations": 2}), ("ref_logprobs", {"beta": 0.1})]
)
def test_a_nan_in_recomputed_log_probabilities_is_not_trained_on(
    tmp_path: Path, sampled: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch, field: str, settings: Any
) -> None:
    trainer, groups = started(tmp_path, sampled, **settings), copy.deepcopy(sampled)
    fill = trainer.learner.fill_fields

    def fill_broken(parts: list[RolloutGroup], *fields: TokenField) -> None:
        fill(parts, *fields)
        if TOKEN_FIELDS[field] in fields:
            getattr(groups[2].rollouts[0], field)[0] = INF

    monkeypatch.setattr(trainer.learner, "fill_fields", fill_broken)
    before = weights(trainer)
    metrics = trainer.update(groups)
    passes = settings.get("num_iterations", 1)
    assert same(weights(trainer), before)
    assert (metrics["nonfinite/steps"], metrics["nonfinite/rollouts"]) == (passes, passes)
    assert [(line["what"], line["completion_ids"]) for line in written(tmp_path)] == [
        (field, groups[2].rollouts[0].completion_ids)] * passes


def test_a_nan_in_the_policys_own_log_probabilities_names_only_its_rollouts(
    tmp_path: Path, sampled: list[RolloutGroup]
) -> None:
    trainer, groups = started(tmp_path, sampled), copy.deepcopy(sampled)
    batches = pack(trainer.learner.trained_groups(groups), TOKENS, 16)
    assert len(batches) >= 3
    calls: list[int] = []

    def last_place(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(output.shape[1])
        if len(calls) != 2:
            return output
        spoiled = output.clone()
        spoiled[0, -1] = NAN  # the last token of the last sequence in the second micro-batch
        return spoiled

    trainer.policy.backbone.norm.register_forward_hook(last_place)
    check_skips(trainer, groups, {"logprobs"}, [batches[1].rollouts[-1]])
    assert calls == [len(batch.input_ids) for batch in batches]


def test_a_loss_that_overflows_is_not_trained_on_and_its_rollouts_are_written(
    tmp_path: Path, sampled: list[RolloutGroup]
) -> None:
    trainer, groups = started(tmp_path, sampled), copy.deepcopy(sampled)
    for group in groups:
        for rollout in group.rollouts:
            rollout.old_logprobs = torch.tensor(rollout.rollout_logprobs)
    chosen = min((r for g in groups for r in g.rollouts), key=lambda r: r.advantage)
    assert chosen.advantage < 0  # above the bounds its ratio is not clipped
    chosen.old_logprobs = torch.full((len(chosen.completion_ids),), -1e3)
    batches = pack(trainer.learner.trained_groups(groups), TOKENS, 16)
    (together,) = [batch.rollouts for batch in batches if any(r is chosen for r in batch.rollouts)]
    check_skips(trainer, groups, {"loss"}, list(together))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_gradient_that_is_no_number_is_named_and_not_applied(
    tmp_path: Path, sampled: list[RolloutGroup], value: float
) -> None:
    trainer, groups = started(tmp_path, sampled), copy.deepcopy(sampled)
    name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if "layers.1.mlp.up_proj.lora_A" in n)
    parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), value))
    trained = [r for g in groups for r in g.rollouts if r.advantage]
    check_skips(trainer, groups, {"gradient"}, trained)
    assert all(line["parameters"] == [name] for line in written(tmp_path))


def test_a_rollout_is_written_once_where_memory_ran_out_in_between(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    trainer, groups = started(tmp_path, sampled), broken(sampled, "rollout_logprobs")
    trainer.policy.backbone.norm.register_forward_hook(Failing(2))
    check_skips(trainer, groups, {"rollout_logprobs"}, [groups[1].rollouts[1]])
    assert trainer.memory.train.failures == 1


def test_looking_at_a_micro_batch_does_not_wait_for_the_device(
    tmp_path: Path, sampled: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = Flags.read
    monkeypatch.setattr(Flags, "read", lambda flags: reads.append(len(flags.tables)) or read(flags))
    make(tmp_path).learner.forward_backward(copy.deepcopy(sampled))
    assert len(reads) == 1 and reads[0] >= 3
    batch = pack(sampled, TOKENS)[0]
    trained = int(batch.loss_mask.sum())
    with FakeTensorMode() as mode:  # which has no values: reading one raises
        fakes = {name: mode.from_tensor(v) for name, v in vars(batch).items() if torch.is_tensor(v)}
        fakes["fields"] = {name: mode.from_tensor(values) for name, values in batch.fields.items()}
        Flags().check_batch(replace(batch, **fakes), torch.empty(trained), torch.empty(()))


# What is skipped


def test_a_bad_group_leaves_the_other_optimizer_steps_of_its_update(
    tmp_path: Path, sampled: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, per_device_train_batch_size=4, steps_per_generation=4)
    applied: list[int] = []
    apply = trainer.learner.apply
    monkeypatch.setattr(trainer.learner, "apply", lambda p: applied.append(trainer.state.global_step) or apply(p))
    groups = broken(broken(sampled, "rollout_logprobs", group=1), "reward", group=3)
    metrics = trainer.update(groups)
    assert applied == [0, 2]
    assert trainer.state.global_step == 4
    assert (metrics["optimizer/skipped"], metrics["nonfinite/steps"], metrics["nonfinite/rollouts"]) == (0.5, 2, 2)
    assert [(line["step"], line["what"]) for line in written(tmp_path)] == [
        (2, "rollout_logprobs"), (4, "reward digit_sum")]


def test_a_nan_in_a_group_that_is_not_trained_skips_only_its_step(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    trainer, groups = make(tmp_path), broken(sampled, "reward")
    for rollout in groups[1].rollouts:
        rollout.advantage = 0.0
    assert trainer.update(groups)["optimizer/skipped"] == 1
    groups[1].rollouts[1].invalid_rewards = {}
    groups[1].rollouts[1].rollout_logprobs[0] = NAN  # of no consequence: it needs no pass
    assert trainer.update(groups)["optimizer/skipped"] == 0


def test_gradients_from_before_a_bad_pass_are_not_applied(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    trainer = make(tmp_path)
    before = weights(trainer)
    trainer.forward_backward(copy.deepcopy(sampled[:2]))
    trainer.forward_backward(broken(sampled[2:], "reward"))
    assert trainer.optim_step()["optimizer/skipped"] == 1
    assert same(weights(trainer), before)
    trainer.forward_backward(copy.deepcopy(sampled[:2]))
    assert trainer.optim_step()["optimizer/skipped"] == 0


# Three in a row


@pytest.mark.slow
def test_three_in_a_row_stop_the_run_and_leave_what_came_before(tmp_path: Path) -> None:
    expected = make(tmp_path / "steady", DigitSum(NAN, (2, 3)))
    expected.train()
    run = tmp_path / "run"
    said = "in 3 steps in a row, the last of them step 4: reward digit_sum"
    with pytest.raises(NonFiniteError, match=said) as caught:
        make(run, DigitSum(NAN, (2, 3, 4))).train()
    message = str(caught.value)
    assert str(run / FILE) in message and "a division by zero" in message and "nonfinite_steps" in message
    assert f"Saved {run / 'checkpoint-3'}" in "\n".join(caught.value.__notes__)
    assert [line["step"] for line in written(run)] == [2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    resumed = make(run)
    assert resumed.train(resume_from_checkpoint=True).finished
    assert same(weights(resumed), weights(expected))
    kept = records(run)[0]
    assert kept == records(tmp_path / "steady")[0] and [line["step"] for line in kept] == [1, 2, 3, 4, 5, 6]


def test_the_count_in_a_row_outlives_a_resume_and_ends_with_a_good_step(tmp_path: Path) -> None:
    make(tmp_path, DigitSum(NAN, (1, 3, 4, 5)), [StopAt(4)]).train()  # without the good step 2, step 4 were the third
    with pytest.raises(NonFiniteError, match="the last of them step 5"):
        make(tmp_path, DigitSum(NAN, (5,))).train(resume_from_checkpoint=True)


def test_a_loop_of_ones_own_is_stopped_too(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    trainer = make(tmp_path)
    before = weights(trainer)
    for field in ("rollout_logprobs", "advantages"):
        trainer.update(broken(sampled, field))
    with pytest.raises(NonFiniteError, match="rollout_logprobs, advantages, reward digit_sum"):
        trainer.update(broken(sampled, "reward"))
    assert trainer.state.global_step == trainer.learner.scheduler.last_epoch == 2  # the third is taken back
    assert same(weights(trainer), before)
    assert trainer.update(copy.deepcopy(sampled))["optimizer/skipped"] == 0  # who caught it can go on


def test_overflows_by_which_fp16_finds_its_scale_do_not_stop_the_run(
    tmp_path: Path, sampled: list[RolloutGroup]
) -> None:
    trainer = make(tmp_path, nonfinite_steps=2)
    trainer.learner.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True)
    trainer.policy.trainable[3].register_hook(lambda gradient: gradient * INF)
    before = weights(trainer)
    for scale in (4.0, 2.0):
        metrics = trainer.update(copy.deepcopy(sampled))
        assert (metrics["optimizer/skipped"], metrics["nonfinite/steps"]) == (1, 0)
        assert trainer.learner.scaler.get_scale() == scale
    assert not (tmp_path / FILE).exists()
    assert trainer.update(copy.deepcopy(sampled))["nonfinite/steps"] == 1  # at a scale of 1 it is no overflow
    with pytest.raises(NonFiniteError, match="gradient"):
        trainer.update(copy.deepcopy(sampled))
    assert same(weights(trainer), before)


def test_an_overflow_neither_ends_nor_prolongs_a_row() -> None:
    state = TrainerState(nonfinite_in_a_row=1)
    guard = Guard(3, state)
    guard.judge(["a parameter"], handled=True)
    assert state.nonfinite_in_a_row == 1
    guard.judge([])
    assert state.nonfinite_in_a_row == 0


# The file


def test_the_file_holds_the_first_rollouts_of_a_step_and_how_many_more_there_are() -> None:
    rollouts = [Rollout([n], [0.0], "stop", rewards={"a": 1.0}) for n in range(WRITTEN + 3)]
    group = RolloutGroup({"prompt": "p"}, [1], rollouts)
    records = list(lines(7, [BadRollout(group, rollout, ["logprobs", "loss"]) for rollout in rollouts], []))
    assert [record.get("completion_ids") for record in records] == [*[[n] for n in range(WRITTEN)], None]
    assert records[-1] == {"step": 7, "what": "rollouts that are not listed", "left_out": 3}
    assert records[0]["what"] == "logprobs, loss"
    assert len(list(lines(7, [BadRollout(group, rollout, ["loss"]) for rollout in rollouts[:WRITTEN]], []))) == WRITTEN


@pytest.mark.parametrize("trouble", ["a full disk", "no folder"])
def test_what_went_wrong_is_said_even_if_the_file_cannot_be_written(
    tmp_path: Path, sampled: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    folder = tmp_path / "run"
    trainer = make(folder, nonfinite_steps=2)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        if trouble == "a full disk":
            full = Failing(*range(9), error=lambda: OSError(28, "No space left on device"))
            patch.setattr(Path, "open", lambda *_, **__: full())
        else:
            folder.write_text("a file where the run directory should be")
        trainer.update(broken(sampled, "reward"))
        with pytest.raises(NonFiniteError, match=r"reward digit_sum; the rollouts could not be written"):
            trainer.update(broken(sampled, "reward"))
    assert "step 1 is skipped" in caplog.text and "could not be written" in caplog.text


def test_a_nan_from_the_sampler_skips_a_step_of_the_parity_check_and_does_not_end_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, parity_steps=1, max_steps=3, seed=3, max_completion_length=24)
    engine = trainer.engine
    generate = engine.generate

    def spoiled(*args: Any, **kwargs: Any) -> list[list[Rollout]]:
        found = generate(*args, **kwargs)
        if trainer.state.global_step == 1:
            found[0][0].rollout_logprobs[0] = NAN
        return found

    engine.generate = spoiled  # type: ignore[method-assign]
    assert trainer.train().finished
    assert trainer.state.nonfinite_steps == 1
    assert [line["what"] for line in written(tmp_path)] == ["rollout_logprobs"]


# Gradient norms


def test_norms_of_adapter_groups_are_those_before_clipping_which_leaves_the_norm_that_was_asked_for(
    tmp_path: Path, sampled: list[RolloutGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, max_grad_norm=1e-3)
    trainer.learner.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True)
    trainer.forward_backward(copy.deepcopy(sampled))
    squares: Counter[str] = Counter()
    for name, parameter in trainer.learner.trained.items():
        squares[name.split(".lora_")[0].split(".")[-1]] += (parameter.grad.double() / 8).square().sum().item()
    calls: list[int] = []
    norms = step.gradient_norms
    monkeypatch.setattr(step, "gradient_norms", lambda p: calls.append(len(p)) or norms(p))
    clipped: list[float] = []
    trainer.learner.optimizer.register_step_pre_hook(
        lambda *_: clipped.append(sum(p.grad.double().square().sum().item() for p in trainer.policy.trainable) ** 0.5))
    metrics = trainer.optim_step()
    found = {name.removeprefix("grad_norm/"): v for name, v in metrics.items() if name.startswith("grad_norm/")}
    assert set(found) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert found == pytest.approx({name: math.sqrt(square) for name, square in squares.items()}, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5)
    assert metrics["grad_norm"] > 1e-3 and calls == [len(trainer.policy.trainable)]
    assert clipped == [pytest.approx(1e-3, rel=1e-4)], "the optimizer gets the norm that was asked for"
