"""GRPO on the embedded model: the gradient of a step, what an update computes, and the verbs."""

import copy
import gc
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from trainer_runs import ENDS, SMALL, Gradients, adapter, load, make, moved, naive_logprobs, plain_peft, relative, same

from lowmem_grpo import GRPOTrainer
from lowmem_grpo.losses import loss_types
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.trainer import grpo_objective as objective
from lowmem_grpo.types import RolloutGroup

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")  # which `naive_gradients` knows

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
    trainer = make(folder / "run", model=moved(load()), seed=2, **ENDS)
    groups = trainer.rollout()
    assert {r.finish_reason for g in groups for r in g.rollouts} == {"stop", "length"}
    assert all(r.advantage for g in groups for r in g.rollouts)
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
    *((loss_type, 0.1 if loss_type in LOSS_TYPES else 0.0) for loss_type in loss_types.LOSS_TYPES), ("grpo", 0.0),
])
@pytest.mark.every(2)
def test_the_gradient_depends_neither_on_micro_batches_nor_on_the_order_of_groups(
    sampled: Any, loss_type: str, beta: float
) -> None:
    trainer, _, groups = sampled
    with settings_of(trainer, loss_type=loss_type, beta=beta):
        whole = gradients(trainer, groups)
        with settings_of(trainer, per_device_train_batch_size=3):  # of groups of four
            assert relative(gradients(trainer, groups[::-1]), whole) < 1e-5
        with settings_of(trainer, max_tokens_per_micro_batch=130):
            assert relative(gradients(trainer, groups), whole) < 1e-5


@pytest.mark.parametrize(("tokens", "spread"), [(10_000, 4.0), (300, 4.0), (300, 1.0), (10_000, 0.0)])
def test_only_a_plan_cuts_micro_batches_where_there_is_one_and_its_cut_leaves_the_gradient(
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


@pytest.mark.parametrize(("loss_type", "beta", "correct_kl"), [
    ("grpo", 0.0, True), ("grpo", 0.1, True), ("grpo", 0.1, False), ("bnpo", 0.1, True), ("dr_grpo", 0.1, False),
    ("dapo", 0.0, True), ("dapo", 0.1, True),
])
@pytest.mark.every(2)
def test_the_gradient_is_that_of_the_papers(sampled: Any, loss_type: str, beta: float, correct_kl: bool) -> None:
    trainer, plain, groups = sampled
    with settings_of(trainer, loss_type=loss_type, beta=beta, use_bias_correction_kl=correct_kl):
        expected = naive_gradients(plain, groups, loss_type, beta, correct_kl)
        assert relative(gradients(trainer, groups), expected) < 1e-4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_groups_without_signal_cost_no_forward_pass_and_leave_the_gradient(
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
def test_an_unjudged_group_trains_nothing_and_the_others_count_as_before(sampled: Any, loss_type: str) -> None:
    trainer, _, groups = sampled
    first, second = (replace(group, unjudged=True) for group in groups)
    with settings_of(trainer, loss_type=loss_type, beta=0.1):
        whole = gradients(trainer, groups)
        parts = gradients(trainer, [groups[0], second]), gradients(trainer, [first, groups[1]])
        assert relative({name: parts[0][name] + parts[1][name] for name in whole}, whole) < 1e-5
        assert not any(gradient.any() for gradient in gradients(trainer, [first, second]).values())


@pytest.mark.parametrize(("loss_type", "beta"), [*((name, 0.1) for name in LOSS_TYPES), ("dapo", 0.0)])
def test_masked_truncated_completions_count_for_nothing(sampled: Any, loss_type: str, beta: float) -> None:
    trainer, plain, groups = sampled
    cut = [r for g in groups for r in g.rollouts if r.finish_reason == "length"]
    with settings_of(trainer, loss_type=loss_type, beta=beta, mask_truncated_completions=True):
        whole = sum(len(r.completion_ids) for g in groups for r in g.rollouts)
        assert trainer.learner.num_tokens(groups) == whole - sum(len(r.completion_ids) for r in cut)
        expected = naive_gradients(plain, groups, loss_type, beta, masked=lambda r: r.finish_reason == "length")
        assert relative(gradients(trainer, groups), expected) < 1e-4


def test_an_on_policy_update_makes_one_forward_pass_and_clips_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    groups = trainer.rollout()
    given: list[Any] = []
    loss = objective.grpo_loss
    monkeypatch.setattr(objective, "grpo_loss", lambda *a, **k: given.append(k.get("old_logprobs")) or loss(*a, **k))
    with forwards(monkeypatch) as seen:
        metrics = trainer.update(groups)
    trained = sum(bool(r.advantage) for g in groups for r in g.rollouts)
    assert sum(seen) == trained
    assert given == [None] * math.ceil(trained / 4)  # no old log-probabilities: the ratio is exactly 1
    assert [metrics[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region")] == [0.0, 0.0, 0.0]


def test_a_single_step_of_a_generation_recomputes_nothing_and_its_ratios_are_1(
    sampled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, groups = sampled
    for loss_type in loss_types.LOSS_TYPES:
        with settings_of(trainer, loss_type=loss_type), forwards(monkeypatch) as seen:
            trainer.learner.prepare(groups, 1)
            assert not seen
            metrics = trainer.forward_backward(groups)
            trainer.learner.optimizer.zero_grad(set_to_none=True)
        assert metrics["ratio/p01"] == metrics["ratio/p99"] == 1 and metrics["tokens/with_gradient"] == 1, loss_type
        assert not any(value for name, value in metrics.items() if "clip" in name), loss_type
        assert metrics["mismatch/corrected"] == 0 and metrics["mismatch/k3"] < 1e-6, loss_type


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_old_logprobs_are_filled_once_before_the_first_step_and_later_steps_are_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path / "run", per_device_train_batch_size=4, gradient_accumulation_steps=2,
                   steps_per_generation=4, num_iterations=2, epsilon=0.01, max_steps=4)
    plain = plain_peft(trainer.model, tmp_path / "adapter")
    groups = trainer.rollout()
    assert len(groups) == 4
    events: list[str] = []
    fill, optimize = trainer.learner.fill_fields, trainer.learner.optimizer.step
    monkeypatch.setattr(trainer.learner, "fill_fields", lambda g, field: events.append(field.name) or fill(g, field))
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


@pytest.mark.parametrize(("loss_type", "of_generation"), [("dapo", True), ("bnpo", False)])
def test_dapo_counts_the_tokens_of_the_generation_and_others_those_of_the_optimizer_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, of_generation: bool
) -> None:
    trainer = make(tmp_path, steps_per_generation=2, max_steps=2, loss_type=loss_type, **ENDS)
    groups = trainer.rollout()
    given: list[float] = []
    loss = objective.grpo_loss
    monkeypatch.setattr(objective, "grpo_loss", lambda *a, **k: given.append(k["num_tokens_in_step"]) or loss(*a, **k))
    trainer.update(groups)
    tokens = [sum(len(r.completion_ids) for r in group.rollouts) for group in groups]
    both = [sum(tokens[:2]), sum(tokens[2:])]
    assert len(tokens) == 4 and both[0] != both[1]
    assert list(dict.fromkeys(given)) == ([sum(tokens) / 2] if of_generation else both)
    of_all = {name for name, kind in loss_types.LOSS_TYPES.items() if kind.counts_generation}
    assert of_all == {"dapo", "cispo", "vespo"}


def embeddings_alive() -> int:
    """Storages of the size of the embedding matrix, which every copy of the model has."""
    size = (384, 128)
    parameters = [o for o in gc.get_objects() if type(o) is torch.nn.Parameter and tuple(o.shape) == size]
    return len({parameter.data_ptr() for parameter in parameters})


def test_no_reference_model_is_loaded_beside_the_trained_one(tmp_path: Path) -> None:
    trainer = make(tmp_path, beta=0.1)
    before = embeddings_alive()
    assert before >= 1
    during: list[int] = []
    fill = trainer.learner.fill_fields
    trainer.learner.fill_fields = lambda *a: during.append(embeddings_alive()) or fill(*a)  # type: ignore[method-assign]
    trainer.update(trainer.rollout())
    assert during == [before]


# The visible loop


def test_rollout_and_update_and_the_four_verbs_train_what_train_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, visible, verbs = (make(tmp_path / name) for name in ("whole", "visible", "verbs"))
    drawn: list[Any] = []
    generate = whole.engine.generate
    monkeypatch.setattr(whole.engine, "generate", lambda ids, p: drawn.append(p) or generate(ids, p))
    whole.train()
    for params in drawn:
        visible.update(visible.rollout())
        groups = verbs.sample(verbs.source.take(2), params)
        assert groups[0].rollouts[0].reward is None
        verbs.score(groups)
        verbs.forward_backward(groups)
        verbs.optim_step()
    assert same(adapter(verbs), adapter(whole)) and same(adapter(visible), adapter(whole))
    assert (verbs.save_state() / "adapter_model.safetensors").is_file()


def test_train_reaches_the_formula_in_12_calls_of_7_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, walk, package = loss_types.LOSS_TYPES["dapo"], list[str](), str(Path(loss_types.__file__).parents[1])

    def formula(*values: Any) -> torch.Tensor:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        walk[:] = [loss_types.__file__, *(file for file in files if file.startswith(package))]
        return kind.token_loss(*values)

    monkeypatch.setitem(loss_types.LOSS_TYPES, "dapo", replace(kind, token_loss=formula))
    make(tmp_path, max_steps=1, loss_type="dapo").train()
    assert 0 < len(walk) <= 12 and len({*walk}) <= 7, walk


def test_forward_backward_twice_accumulates(sampled: Any) -> None:
    trainer, _, groups = sampled
    once = gradients(trainer, groups)
    trainer.forward_backward(groups)
    twice = gradients(trainer, groups)
    assert relative({name: value / 2 for name, value in twice.items()}, once) < 1e-5
