"""Training with the embedded model: gradients, records, listeners, bad input. Each name says what fails the user."""

import copy
import gc
import json
import logging
import math
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from small_models import TINY
from trainer_runs import (
    QUESTIONS,
    ROWS,
    SMALL,
    Gradients,
    adapter,
    digit_sum,
    load,
    make,
    naive_logprobs,
    plain_peft,
    relative,
    same,
)
from transformers import AutoModelForCausalLM, TrainerCallback

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.losses import loss_types
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rewards.calling.scorer import RewardError
from lowmem_grpo.runs.records import RecordError, read_lines
from lowmem_grpo.train import grpo_objective as objective
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.views import sinks

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")  # which `naive_gradients` knows

def equal(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.5] * len(completions)


def moved(model: FastPeftModel) -> FastPeftModel:
    """The model with an adapter that matters."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05, generator=generator)
    return model


def gradients(trainer: GRPOTrainer, groups: list[RolloutGroup]) -> Gradients:
    """The gradient of one step on `groups`, which is then cleared."""
    trainer.learner.prepare(groups, 1)
    trainer.forward_backward(groups)
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trainer.model.named_parameters()
             if p.requires_grad}
    trainer.learner.optimizer.zero_grad(set_to_none=True)
    return found


def naive_gradients(
    model: peft.PeftModel, groups: list[RolloutGroup], loss_type: str, beta: float = 0.0, correct_kl: bool = True,
    masked: Callable[[Any], bool] = lambda rollout: False,
) -> Gradients:
    """On-policy GRPO written from the papers: every completion alone, nothing packed, nothing left out."""
    sums, lengths = [], []
    for group in groups:
        for rollout in group.rollouts:
            logprobs = naive_logprobs(model, group.prompt_ids, rollout.completion_ids)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -ratio * rollout.advantage
            if beta:
                with torch.no_grad(), model.disable_adapter():
                    apart = naive_logprobs(model, group.prompt_ids, rollout.completion_ids)
                apart = apart - logprobs
                kl = apart.exp() - apart - 1
                loss = loss + beta * (kl * ratio if correct_kl else kl)
            kept = 0.0 if masked(rollout) else 1.0
            sums.append(kept * loss.sum())
            lengths.append(kept * len(loss))
    total = torch.stack(sums)
    if loss_type == "grpo":
        loss = (total / torch.tensor(lengths).clamp(min=1)).mean()
    elif loss_type == "dr_grpo":
        loss = total.sum() / (len(sums) * SMALL["max_completion_length"])
    else:
        loss = total.sum() / sum(lengths)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return found


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOTrainer, peft.PeftModel, list[RolloutGroup]]:
    """A trainer with a moved adapter, its twin in plain peft, and one generation: finished and truncated ones."""
    folder = tmp_path_factory.mktemp("sampled")
    trainer = make(folder / "run", model=moved(load()))
    groups = trainer.rollout()
    assert {r.finish_reason for g in groups for r in g.rollouts} == {"stop", "length"}
    assert all(any(r.advantage for r in g.rollouts) for g in groups)
    return trainer, plain_peft(trainer.model, folder / "adapter"), groups


@contextmanager
def settings_of(trainer: GRPOTrainer, **settings: Any) -> Iterator[None]:
    """Other settings for a while."""
    before = {name: getattr(trainer.args, name) for name in settings}
    vars(trainer.args).update(settings)
    try:
        yield
    finally:
        vars(trainer.args).update(before)


@contextmanager
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many sequences each forward pass of the policy (not of the sampler) held."""
    seen: list[int] = []
    hidden = Policy.hidden

    def counted(self: Policy, batch: Any) -> torch.Tensor:
        seen.append(len(batch.cu_seqlens) - 1)
        return hidden(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "hidden", counted)
        yield seen


# The gradient of a step


@pytest.mark.parametrize(("loss_type", "beta"), [
    *((loss_type, 0.0) for loss_type in loss_types.LOSS_TYPES), *((loss_type, 0.1) for loss_type in LOSS_TYPES),
])
def test_the_gradient_depends_on_micro_batches_or_on_the_order_of_groups(
    sampled: Any, loss_type: str, beta: float
) -> None:
    trainer, _, groups = sampled
    with settings_of(trainer, loss_type=loss_type, beta=beta):
        whole = gradients(trainer, groups)
        assert relative(gradients(trainer, groups[::-1]), whole) < 1e-5
        for split in ({"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 3},
                      {"max_tokens_per_micro_batch": 130}):
            with settings_of(trainer, **split):
                assert relative(gradients(trainer, groups), whole) < 1e-5, split


@pytest.mark.parametrize(("tokens", "spread"), [(10_000, 4.0), (300, 4.0), (300, 1.0), (10_000, 0.0)])
def test_a_plan_does_not_cut_alone_or_its_cut_changes_the_gradient(
    sampled: Any, tokens: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, groups = sampled
    whole = gradients(trainer, groups)
    bound = trainer.learner.bound
    monkeypatch.setattr(bound, "planned", tokens)
    monkeypatch.setattr(bound, "spread", spread)
    with settings_of(trainer, per_device_train_batch_size=1), forwards(monkeypatch) as seen:
        metrics = trainer.forward_backward(groups)
    found = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.model.zero_grad(set_to_none=True)
    assert relative(found, whole) < 1e-5
    assert metrics["micro_batches"] == len(seen)
    assert (max(seen) > 1) == bool(spread), "per_device_train_batch_size cut, or the plan did not"


@pytest.mark.parametrize(("beta", "correct_kl"), [(0.0, True), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_is_not_that_of_the_papers(sampled: Any, loss_type: str, beta: float, correct_kl: bool) -> None:
    trainer, plain, groups = sampled
    with settings_of(trainer, loss_type=loss_type, beta=beta, use_bias_correction_kl=correct_kl):
        expected = naive_gradients(plain, groups, loss_type, beta, correct_kl)
        assert relative(gradients(trainer, groups), expected) < 1e-4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_groups_without_signal_cost_a_forward_pass_or_change_the_gradient(
    sampled: Any, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, plain, groups = sampled
    groups = copy.deepcopy(groups)
    for rollout in groups[0].rollouts:
        rollout.reward, rollout.advantage = 0.5, 0.0
    with settings_of(trainer, loss_type=loss_type), forwards(monkeypatch) as seen:
        metrics = trainer.forward_backward(groups)
        trainer.learner.optimizer.zero_grad(set_to_none=True)
        assert sum(seen) == metrics["completions/trained"] <= 4
        assert metrics["completions/total"] == 8
        assert relative(gradients(trainer, groups), naive_gradients(plain, groups, loss_type)) < 1e-4


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_an_unjudged_group_is_moved_by_its_kl_term_or_moves_what_the_others_are_worth(
    sampled: Any, loss_type: str
) -> None:
    trainer, _, groups = sampled
    first, second = (replace(group, unjudged=True) for group in groups)
    with settings_of(trainer, loss_type=loss_type, beta=0.1):
        whole = gradients(trainer, groups)
        parts = gradients(trainer, [groups[0], second]), gradients(trainer, [first, groups[1]])
        assert relative({name: parts[0][name] + parts[1][name] for name in whole}, whole) < 1e-5
        assert not any(gradient.any() for gradient in gradients(trainer, [first, second]).values())


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_truncated_completions_still_count(sampled: Any, loss_type: str, beta: float) -> None:
    trainer, plain, groups = sampled
    cut = [r for g in groups for r in g.rollouts if r.finish_reason == "length"]
    with settings_of(trainer, loss_type=loss_type, beta=beta, mask_truncated_completions=True):
        whole = sum(len(r.completion_ids) for g in groups for r in g.rollouts)
        assert trainer.learner.num_tokens(groups) == whole - sum(len(r.completion_ids) for r in cut)
        expected = naive_gradients(plain, groups, loss_type, beta, masked=lambda r: r.finish_reason == "length")
        assert relative(gradients(trainer, groups), expected) < 1e-4


def test_an_on_policy_update_makes_an_extra_forward_pass_or_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    groups = trainer.rollout()
    given: list[Any] = []
    loss = objective.grpo_loss
    monkeypatch.setattr(objective, "grpo_loss", lambda *a, **k: given.append(k["old_logprobs"]) or loss(*a, **k))
    with forwards(monkeypatch) as seen:
        metrics = trainer.update(groups)
    trained = sum(bool(r.advantage) for g in groups for r in g.rollouts)
    assert sum(seen) == trained
    assert given == [None] * math.ceil(trained / 4)  # no old log-probabilities: the ratio is exactly 1
    assert [metrics[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("loss_type", loss_types.LOSS_TYPES)
def test_a_single_step_of_a_generation_recomputes_log_probabilities_or_has_ratios(
    sampled: Any, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, groups = sampled
    with settings_of(trainer, loss_type=loss_type), forwards(monkeypatch) as seen:
        trainer.learner.prepare(groups, 1)
        assert not seen
        metrics = trainer.forward_backward(groups)
        trainer.learner.optimizer.zero_grad(set_to_none=True)
    assert metrics["ratio/p01"] == metrics["ratio/p99"] == 1 and metrics["tokens/with_gradient"] == 1
    assert not any(value for name, value in metrics.items() if "clip" in name)
    assert metrics["mismatch/corrected"] == 0 and metrics["mismatch/k3"] < 1e-6


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_old_logprobs_are_filled_twice_or_after_the_first_step_or_nothing_is_ever_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path / "run", per_device_train_batch_size=4, gradient_accumulation_steps=2,
                   steps_per_generation=4, num_iterations=2, epsilon=0.01, max_steps=4)
    plain = plain_peft(trainer.model, tmp_path / "adapter")
    groups = trainer.rollout()
    assert len(groups) == 4
    events: list[str] = []
    fill, optimize = trainer.learner.fill_logprobs, trainer.learner.optimizer.step
    monkeypatch.setattr(trainer.learner, "fill_logprobs", lambda g, field: events.append(field) or fill(g, field))
    monkeypatch.setattr(trainer.learner.optimizer, "step", lambda *a, **k: events.append("step") or optimize(*a, **k))
    metrics = trainer.update(groups)
    assert events == ["old_logprobs", *["step"] * 4]
    assert trainer.state.global_step == 4
    assert metrics["clip_ratio/region_mean"] > 0
    for group in groups:
        for rollout in group.rollouts:
            if rollout.advantage:
                with torch.no_grad():
                    expected = naive_logprobs(plain, group.prompt_ids, rollout.completion_ids)
                torch.testing.assert_close(rollout.old_logprobs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("loss_type", "of_generation"), [
    ("dapo", True), ("cispo", True), ("vespo", True), ("bnpo", False), ("reinforce", False),
])
def test_dapo_counts_the_tokens_of_an_optimizer_step_instead_of_the_generation_or_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, of_generation: bool
) -> None:
    trainer = make(tmp_path, steps_per_generation=2, max_steps=2, loss_type=loss_type)
    groups = trainer.rollout()
    given: list[float] = []
    loss = objective.grpo_loss
    monkeypatch.setattr(objective, "grpo_loss", lambda *a, **k: given.append(k["num_tokens_in_step"]) or loss(*a, **k))
    trainer.update(groups)
    tokens = [sum(len(r.completion_ids) for r in group.rollouts) for group in groups]
    both = [sum(tokens[:2]), sum(tokens[2:])]
    assert len(tokens) == 4 and both[0] != both[1]
    assert list(dict.fromkeys(given)) == ([sum(tokens) / 2] if of_generation else both)


def test_kl_is_not_measured_from_the_model_without_the_adapter(tmp_path: Path) -> None:
    trainer = make(tmp_path, beta=0.1)
    assert trainer.update(trainer.rollout())["kl"] == pytest.approx(0, abs=1e-9)  # lora_B is zero
    assert trainer.update(trainer.rollout())["kl"] > 1e-6


def embeddings_alive() -> int:
    """Storages of the size of the embedding matrix, which every copy of the model has."""
    size = (384, 128)
    parameters = [o for o in gc.get_objects() if type(o) is torch.nn.Parameter and tuple(o.shape) == size]
    return len({parameter.data_ptr() for parameter in parameters})


def test_a_reference_model_is_loaded_beside_the_trained_one(tmp_path: Path) -> None:
    trainer = make(tmp_path, beta=0.1)
    before = embeddings_alive()
    assert before >= 1
    during: list[int] = []
    fill = trainer.learner.fill_logprobs
    trainer.learner.fill_logprobs = lambda *a: during.append(embeddings_alive()) or fill(*a)  # type: ignore[method-assign]
    trainer.update(trainer.rollout())
    assert during == [before]


def test_a_step_with_a_nan_gradient_changes_the_adapter_or_is_not_counted(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=9)
    trainer.update(trainer.rollout())
    before, groups = adapter(trainer), trainer.rollout()
    groups[0].rollouts[0].advantage = float("nan")
    metrics = trainer.update(groups)
    assert metrics["optimizer/skipped"] == 1
    assert math.isnan(metrics["grad_norm"])
    assert same(adapter(trainer), before)
    assert trainer.update(trainer.rollout())["optimizer/skipped"] == 0
    assert not same(adapter(trainer), before)
    assert all(value.isfinite().all() for value in adapter(trainer).values())


# The visible loop


def test_rollout_and_update_alone_train_something_else_than_train(tmp_path: Path) -> None:
    whole, visible = make(tmp_path / "whole"), make(tmp_path / "visible")
    whole.train()
    for _ in range(2):
        visible.update(visible.rollout())
    assert same(adapter(visible), adapter(whole))


def test_the_four_verbs_alone_train_something_else_than_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, verbs = make(tmp_path / "whole"), make(tmp_path / "verbs")
    drawn: list[Any] = []
    generate = whole.engine.generate
    monkeypatch.setattr(whole.engine, "generate", lambda ids, p: drawn.append(p) or generate(ids, p))
    whole.train()
    for params in drawn:
        groups = verbs.sample(verbs.source.take(2), params)
        assert groups[0].rollouts[0].reward is None
        verbs.score(groups)
        verbs.forward_backward(groups)
        verbs.optim_step()
    assert same(adapter(verbs), adapter(whole))
    assert (verbs.save_state() / "adapter_model.safetensors").is_file()


def test_forward_backward_twice_does_not_accumulate(sampled: Any) -> None:
    trainer, _, groups = sampled
    once = gradients(trainer, groups)
    trainer.forward_backward(groups)
    twice = gradients(trainer, groups)
    assert relative({name: value / 2 for name, value in twice.items()}, once) < 1e-5


# Records


class Recorder(TrainerCallback):
    """A listener as people write them for transformers' Trainer."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_train_begin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_step_begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_step_end")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert args.learning_rate == SMALL["learning_rate"]
        self.logs.append(logs)
        self.events.append("on_log")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"on_save {state.global_step}/{state.max_steps}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        assert metrics["eval_reward"] >= 0
        self.events.append("on_evaluate")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_train_end")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOTrainer, Recorder, Any]:
    """A whole run of three steps, with saves and evaluations."""
    recorder = Recorder()
    trainer = make(
        tmp_path_factory.mktemp("finished") / "run", callbacks=[recorder], max_steps=3, save_strategy="steps",
        save_steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=ROWS, num_generations_eval=2, beta=0.01,
        report_to="tensorboard",
    )
    return trainer, recorder, trainer.train()


def test_metrics_lack_trls_names_or_shares_of_time_do_not_add_up(finished: Any) -> None:
    trainer, _, output = finished
    lines = [line for line in read_lines(trainer.run_dir / "metrics.jsonl") if "eval_reward" not in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    names = {
        "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "rewards/digit_sum/mean",
        "rewards/digit_sum/std", "completions/mean_length", "completions/min_length", "completions/max_length",
        "completions/clipped_ratio", "completions/mean_terminated_length", "completions/min_terminated_length",
        "completions/max_terminated_length", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "entropy", "kl", "num_tokens", "epoch", "step_time", "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max", "ratio/p01", "ratio/p50", "ratio/p99", "mismatch/p99",
        "mismatch/k3", "mismatch/effective_samples", "mismatch/corrected", "tokens/with_gradient", "groups/with_signal",
    }
    for line in lines:
        assert names <= line.keys(), names - line.keys()
        assert all(isinstance(value, (int, float)) for value in line.values())
        shares = [line[f"time/{name}"] for name in ("generate", "reward", "train", "idle")]
        assert sum(shares) == pytest.approx(1, abs=0.02)
        assert min(shares) >= 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-3  # sampler and trainer agree
        assert line["memory/peak_bytes"] > 0
    assert lines[0]["learning_rate"] > lines[1]["learning_rate"] > 0
    assert [line["epoch"] for line in lines] == [0.5, 1.0, 1.5]
    assert lines[2]["elapsed"] == pytest.approx(sum(line["step_time"] for line in lines))
    assert (output.global_step, output.finished) == (3, True)
    assert output.metrics == trainer.state.log_history[-1]


def test_completions_are_not_all_recorded(finished: Any) -> None:
    trainer, _, _ = finished
    lines = read_lines(trainer.run_dir / "completions.jsonl")
    assert [line["step"] for line in lines] == [1] * 8 + [2] * 8 + [3] * 8
    for line in lines:
        assert line["prompt"] in QUESTIONS
        assert line["reward"] == line["rewards"]["digit_sum"] == digit_sum([line["completion"]])[0]
        assert 1 <= line["tokens"] <= 24
        assert line["finish_reason"] in ("stop", "length")
    for start in range(0, 24, 4):
        assert sum(line["advantage"] for line in lines[start : start + 4]) == pytest.approx(0, abs=1e-3)


def test_summary_or_report_is_missing(finished: Any) -> None:
    trainer, _, _ = finished
    summary = json.loads((trainer.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 3
    assert summary["model"] == "tiny"
    assert summary["config"]["num_generations"] == 4
    assert (trainer.run_dir / "report.html").stat().st_size > 10_000


def test_the_saved_adapter_is_not_the_trained_one_or_plain_peft_cannot_load_it(finished: Any) -> None:
    trainer, _, _ = finished
    base = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="eager")
    ids = torch.tensor([trainer.source.encoder.encode(ROWS[0]).ids])
    with torch.no_grad():
        untrained = base(input_ids=ids).logits
        plain = peft.PeftModel.from_pretrained(base, trainer.run_dir / "adapter").eval()
        expected, trained = plain(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits
    torch.testing.assert_close(trained, expected, atol=1e-4, rtol=1e-4)
    assert (expected - untrained).abs().max() > 0.1


def test_tensorboard_gets_no_events(finished: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, _, _ = finished
    events = EventAccumulator(str(trainer.run_dir / "tensorboard")).Reload()
    recorded = [line["reward"] for line in read_lines(trainer.run_dir / "metrics.jsonl") if "reward" in line]
    assert [event.value for event in events.Scalars("train/reward")] == pytest.approx(recorded)


def test_a_missing_library_for_report_to_is_found_out_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install wandb"):
        make(tmp_path, report_to="wandb")


def test_a_second_run_costs_the_first_ones_records(finished: Any) -> None:
    trainer, _, _ = finished
    files = [path for path in trainer.run_dir.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(RecordError, match=r"already holds a run.*overwrite_output_dir"):
        make(trainer.run_dir).train()
    assert {path: path.read_bytes() for path in trainer.run_dir.rglob("*") if path.is_file()} == before


def test_overwriting_keeps_lines_of_the_run_before(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    make(tmp_path, max_steps=1, overwrite_output_dir=True).train()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\u2029", "\r", "\x0b", "\x1e"])
def test_a_line_separator_in_a_completion_breaks_the_records(tmp_path: Path, character: str) -> None:
    trainer = make(tmp_path)
    trainer.records.begin(overwrite=False)
    groups = trainer.rollout()
    groups[0].rollouts[0].text = f"a{character}b"
    trainer.records.completions(1, groups)
    trainer.records.rewind(1)
    assert read_lines(tmp_path / "completions.jsonl")[0]["completion"] == f"a{character}b"


def test_a_line_cut_inside_a_character_breaks_the_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xe2\x82')
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, the system refuses to let a file grow beyond `size` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("full", ["metrics.jsonl", "completions.jsonl"])
def test_a_full_disk_leaves_half_a_line_or_a_run_that_cannot_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    straight = make(tmp_path / "straight", max_steps=3)
    straight.train()
    run = tmp_path / "run"
    trainer = make(run, max_steps=3, save_strategy="steps", save_steps=1)
    append = trainer.records.append

    def limited(name: str, lines: Any) -> None:
        if name == full and trainer.state.global_step == 2:
            with largest_file((run / name).stat().st_size + 100):
                append(name, lines)
        append(name, lines)

    monkeypatch.setattr(trainer.records, "append", limited)
    with pytest.raises(RecordError, match=rf"{full}.*make room"):
        trainer.train()
    assert (run / full).read_bytes().endswith(b"}\n")
    assert {line["step"] for line in read_lines(run / full)} == {1}
    resumed = make(run, max_steps=3, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in read_lines(run / "completions.jsonl")] == [1] * 8 + [2] * 8 + [3] * 8
    assert same(adapter(resumed), adapter(straight))


def test_a_failed_run_still_says_that_it_is_running(tmp_path: Path) -> None:
    with pytest.raises(RewardError):
        make(tmp_path, reward=lambda completions, **kwargs: [1.0]).train()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


# Listeners


def test_a_callback_written_for_transformers_misses_events(finished: Any) -> None:
    _, recorder, _ = finished
    one = ["on_step_begin", "on_log", "on_step_end"]
    assert recorder.events == [
        "on_train_begin", *one, *one, "on_evaluate", "on_save 2/3", *one, "on_train_end", "on_save 3/3",
    ]
    assert [logs["step"] for logs in recorder.logs] == [1, 2, 3]


class Greedy(TrainerCallback):
    """Reads what common callbacks read."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.is_world_process_zero
        assert state.is_local_process_zero
        assert kwargs["model"] is not None
        assert kwargs["processing_class"] is not None
        assert kwargs["optimizer"].param_groups
        assert kwargs["lr_scheduler"].get_last_lr()


def test_a_callback_cannot_reach_the_model_or_what_transformers_tells_it(tmp_path: Path) -> None:
    make(tmp_path, callbacks=[Greedy], max_steps=1).train()


class StopAt(TrainerCallback):
    """Asks for a stop after a step."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.stop


def test_a_callback_cannot_stop_or_the_same_trainer_cannot_go_on(tmp_path: Path) -> None:
    trainer = make(tmp_path, callbacks=[StopAt(1)], max_steps=3)
    first = trainer.train()
    assert (first.global_step, first.finished) == (1, False)
    assert (tmp_path / "checkpoint-1").is_dir()  # although save_strategy is "no": the run is not over
    second = trainer.train(resume_from_checkpoint=True)
    assert (second.global_step, second.finished) == (3, True)


class SaveAt(TrainerCallback):
    """Asks for one save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == 1


def test_a_callback_cannot_ask_for_a_save(tmp_path: Path) -> None:
    make(tmp_path, callbacks=[SaveAt()]).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_train_step_goes_beyond_max_steps(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_iterations=2, max_steps=3)
    assert trainer.train().global_step == 3


def test_rounding_to_whole_groups_happens_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=1)
    assert "3) x gradient_accumulation_steps (2) = 6 completions" in caplog.text
    assert "each step uses 8" in caplog.text
    assert len(trainer.rollout()) == 2
    caplog.clear()
    make(tmp_path)
    assert "gradient_accumulation_steps" not in caplog.text


# Evaluation


def test_evaluation_is_not_recorded_or_not_every_eval_steps(finished: Any) -> None:
    trainer, _, _ = finished
    lines = [line for line in read_lines(trainer.run_dir / "metrics.jsonl") if "eval_reward" in line]
    assert [line["step"] for line in lines] == [2]
    assert {"eval_reward", "eval_reward_std", "eval_rewards/digit_sum/mean", "eval_completions/mean_length",
            "eval_completions/clipped_ratio"} <= lines[0].keys()


def test_evaluation_changes_the_training(tmp_path: Path, finished: Any) -> None:
    trainer, _, _ = finished
    without = make(tmp_path, max_steps=3, beta=0.01)
    without.train()
    assert same(adapter(without), adapter(trainer))


def test_evaluation_before_training_fails_or_blocks_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", eval_dataset=ROWS, max_steps=1)
    first = trainer.evaluate()
    assert first["eval_reward"] > 0
    assert first == trainer.evaluate()
    trainer.train()


def test_unusable_evaluation_data_is_found_out_late(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'prompt'"):
        make(tmp_path, eval_strategy="steps", eval_dataset=[{"question": "?"}])
    with pytest.raises(ValueError, match="eval_dataset"):
        make(tmp_path, eval_strategy="steps")


def test_evaluation_rows_that_are_all_unusable_raise_something_cryptic(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row"):
        make(tmp_path, eval_dataset=[{"prompt": ""}]).evaluate()


# Data that cannot be used


def test_a_dataset_that_is_none_is_accepted_or_refused_without_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'prompt'.*question.*rename_column"):
        make(tmp_path, rows=[{"question": "?"}])
    with pytest.raises(DataError, match="no rows"):
        make(tmp_path, rows=None)
    with pytest.raises(DataError, match="from_list"):
        make(tmp_path, rows=iter(ROWS))


def test_bad_rows_stop_a_run_or_are_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [{"prompt": question} for question in QUESTIONS[:2]]
    bad: list[Any] = ["", " \n", None, 7, [], [{"role": "user", "content": ""}], [{"content": "?"}], ["?"], "1+1 " * 99]
    trainer = make(tmp_path, rows=[*good, *({"prompt": prompt} for prompt in bad)], max_prompt_length=60, max_steps=3)
    trainer.train()
    # rows are drawn in a seeded order: three steps of two good rows are three whole passes, but for a tail of bad rows
    counted = sum(trainer.source.skipped.values())
    assert 2 * len(bad) <= counted <= 3 * len(bad)
    assert "prompt longer than 60 tokens" in trainer.source.skipped
    assert "prompt is int, not text or chat" in trainer.source.skipped
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["data/skipped_rows"] == counted
    assert sum(json.loads((tmp_path / "summary.json").read_text())["skipped_rows"].values()) == counted
    assert "row 2 skipped: empty prompt" in caplog.text
    assert {line["prompt"] for line in read_lines(tmp_path / "completions.jsonl")} <= set(QUESTIONS)


def test_a_dataset_of_bad_rows_alone_loops_for_ever(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row of the dataset can be used.*empty prompt \(2\)"):
        make(tmp_path, rows=[{"prompt": ""}, {"prompt": None}]).train()


def test_rows_with_different_columns_stop_the_run_or_shift_values(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], answer: list[Any], source: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(zip(answer, source, strict=True))
        return digit_sum(completions)

    rows = [{"prompt": QUESTIONS[0], "answer": "1"}, {"prompt": QUESTIONS[1], "source": "x"}]
    make(tmp_path, reward=reward, rows=rows, max_steps=1, shuffle_dataset=False).train()
    assert seen == [("1", None)] * 4 + [(None, "x")] * 4


def test_chat_rows_without_a_chat_template_give_a_library_error(tmp_path: Path) -> None:
    model = load()
    model.loaded.tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template: set tokenizer\.chat_template"):
        make(tmp_path, model=model).train()


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_training_depends_on_the_pad_token(tmp_path: Path, pad: str | None) -> None:
    usual, other = make(tmp_path / "usual"), load()
    other.loaded.tokenizer.pad_token = pad
    without = make(tmp_path / "without", model=other)
    assert without.tokenizer.pad_token == pad
    usual.train()
    without.train()
    texts = [(tmp_path / name / "completions.jsonl").read_text() for name in ("usual", "without")]
    assert texts[0] == texts[1]
    assert same(adapter(without), adapter(usual))


def test_a_completion_longer_than_the_context_is_found_out_late(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_completion_length \(128\).*context of 128"):
        make(tmp_path, max_completion_length=128)
    with pytest.raises(ValueError, match=r"prompt of 120 tokens.*max_seq_length"):
        make(tmp_path, max_prompt_length=120)


def test_a_single_generation_is_accepted() -> None:
    with pytest.raises(ValueError, match="num_generations is 1"):
        GRPOConfig(num_generations=1)


def test_a_model_without_an_adapter_is_accepted(tmp_path: Path) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    with pytest.raises(TypeError, match="get_peft_model"):
        make(tmp_path, model=bare)


# Reward functions that misbehave


def raises(completions: list[Any], **kwargs: Any) -> list[float]:
    raise ZeroDivisionError("no units")


def miscounts(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0]


def hangs(completions: list[Any], **kwargs: Any) -> list[float]:
    threading.Event().wait(5)
    return digit_sum(completions)


FAILURES = {
    raises: r"raises raised ZeroDivisionError: no units", miscounts: r"miscounts returned 1 rewards, expected 8",
    hangs: r"hangs did not return within 0\.3 s",
}


def from_second_call(failing: Callable[..., Any]) -> Callable[..., Any]:
    """Good at first, then `failing`."""
    calls: list[int] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        calls.append(1)
        return (failing if len(calls) > 1 else digit_sum)(completions)

    reward.__name__ = failing.__name__
    return reward


@pytest.mark.parametrize("failing", FAILURES, ids=lambda f: f.__name__)
def test_a_failing_reward_costs_the_steps_before_it(tmp_path: Path, failing: Any, finished: Any) -> None:
    settings = {"max_steps": 3, "reward_timeout": 0.3, "save_strategy": "steps", "beta": 0.01}
    with pytest.raises(RewardError, match=FAILURES[failing]) as caught:
        make(tmp_path, reward=from_second_call(failing), **settings).train()
    assert f"Saved {tmp_path / 'checkpoint-1'}" in "\n".join(caught.value.__notes__)
    resumed = make(tmp_path, **settings)
    assert resumed.train(resume_from_checkpoint=True).finished
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert same(adapter(resumed), adapter(finished[0]))


@pytest.mark.parametrize("failing", FAILURES, ids=lambda f: f.__name__)
def test_a_reward_that_fails_at_once_is_not_named(tmp_path: Path, failing: Any) -> None:
    with pytest.raises(RewardError, match=FAILURES[failing]):
        make(tmp_path, reward=failing, reward_timeout=0.3).train()
    assert not list(tmp_path.glob("checkpoint-*"))


def not_a_number(completions: list[Any], **kwargs: Any) -> list[float]:
    return [math.nan, *digit_sum(completions)[1:]]


def test_a_nan_reward_reaches_the_gradient_or_is_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, reward=not_a_number)
    trainer.train()
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert line["rewards/not_a_number/invalid"] == 1
        assert line["optimizer/skipped"] == 1
    assert "not_a_number gave NaN or infinity for 1 completions" in caplog.text
    first = read_lines(tmp_path / "completions.jsonl")[0]
    assert (first["reward"], first["advantage"]) == (None, 0.0)
    assert all(value.isfinite().all() for value in adapter(trainer).values())


def no_opinion(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_none_for_all_completions_stops_the_run_moves_the_adapter_or_makes_torch_complain(tmp_path: Path) -> None:
    trainer = make(tmp_path, reward=no_opinion)
    before = adapter(trainer)
    trainer.train()
    assert same(adapter(trainer), before)
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert (line["groups/with_signal"], line["optimizer/skipped"], line["completions/trained"]) == (0, 1, 0)
        assert "reward" not in line
    assert (tmp_path / "report.html").is_file()


def test_a_function_without_an_opinion_changes_the_other_ones_rewards(tmp_path: Path) -> None:
    trainer = make(tmp_path, reward=[digit_sum, no_opinion], reward_weights=[2.0, 1.0], max_steps=1)
    trainer.train()
    for line in read_lines(tmp_path / "completions.jsonl"):
        assert line["rewards"]["no_opinion"] is None
        assert line["reward"] == 2 * line["rewards"]["digit_sum"]


def test_nobody_is_told_that_there_is_nothing_to_learn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    trainer = make(tmp_path, reward=equal, nothing_to_learn_steps=2, max_steps=5)
    before = adapter(trainer)
    trainer.train()
    told = [record.getMessage() for record in caplog.records if "nothing to learn" in record.getMessage()]
    assert [text.split(":")[0] for text in told] == ["nothing to learn for 2 steps", "nothing to learn for 4 steps"]
    assert "mean 0.5" in told[0]
    assert "easier problems" in told[0]
    assert same(adapter(trainer), before)
    assert all(line["frac_reward_zero_std"] == 1 for line in read_lines(tmp_path / "metrics.jsonl"))
