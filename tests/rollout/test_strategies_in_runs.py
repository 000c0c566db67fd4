"""Runs of the embedded model that choose their groups: stopped and resumed, failing halfway, and computed plainly."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import make as make_plain
from trainer_runs import make_dropping as make
from trainer_runs import naive_logprobs, plain_peft, relative

from tests.attacks.small_run import StopAt, digit_sum, records

REMAX: dict[str, Any] = {"advantage_estimator": "remax"}
ALL: dict[str, Any] = {  # all strategies at once, in two optimizer steps for each rollout
    "dynamic_sampling_rounds": 1, "difficulty_pools": True, "replay_buffer_size": 3, "replay_max_age": 4,
    "scale_rewards": "batch", "steps_per_generation": 2, "beta": 0.0, "max_steps": 8, "max_completion_length": 16,
}


class Sevens:
    """Pays for a 7: rare enough that many groups have no spread. One call of it may fail."""

    def __init__(self, failing: int = 0) -> None:
        self.calls, self.failing = 0, failing

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        if self.calls == self.failing:
            raise RuntimeError("the judge is away")
        return [float("7" in text) for text in completions]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of an undisturbed run with ALL, and how often its reward function was called."""
    folder, reward = tmp_path_factory.mktemp("whole"), Sevens()
    make(folder, reward, **ALL).train()
    return folder, reward.calls


def check_same(parts: Path, whole: Path) -> None:
    adapters = [load_file(path / "adapter" / "adapter_model.safetensors") for path in (whole, parts)]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert records(parts) == records(whole)


@pytest.mark.slow
def test_a_run_that_fails_in_an_extra_round_and_is_stopped_later_is_resumed_as_the_undisturbed_one(
    tmp_path: Path, whole: tuple[Path, int]
) -> None:
    """An update that fails uses up no prompts and no kept groups, and a checkpoint holds what each strategy keeps."""
    lines = records(whole[0])[0]
    calls = [int(1 + line["sampling/rounds"]) for line in lines]
    assert whole[1] == sum(calls)
    failing = next(n for n, made in enumerate(calls) if n and made > 1)  # an update with an extra round
    assert failing < 4
    with pytest.raises(Exception, match="the judge is away"):
        make(tmp_path, Sevens(failing=sum(calls[:failing]) + 2), **ALL).train()
    make(tmp_path, Sevens(), callbacks=[StopAt(4)], **ALL).train(resume_from_checkpoint=True)
    assert make(tmp_path, Sevens(), **ALL).train(resume_from_checkpoint=True).finished
    for metric in ("sampling/rounds", "sampling/replayed_groups", "data/pool_hard"):
        assert any(line[metric] for line in lines if line["step"] > 4), metric  # each is at work after the stop
    check_same(tmp_path, whole[0])


def test_a_resumed_run_with_remax_is_the_undisturbed_one(tmp_path: Path) -> None:
    settings = REMAX | {"max_steps": 2, "max_completion_length": 8}
    make(tmp_path / "whole", digit_sum, **settings).train()
    make(tmp_path / "parts", digit_sum, callbacks=[StopAt(1)], **settings).train()
    assert make(tmp_path / "parts", digit_sum, **settings).train(resume_from_checkpoint=True).finished
    check_same(tmp_path / "parts", tmp_path / "whole")


def test_the_records_hold_what_is_trained_on_and_mark_what_is_replayed(whole: tuple[Path, int]) -> None:
    lines, completions = records(whole[0])
    assert {line["groups/total"] for line in lines} == {4}
    assert len(completions) == 16 * len(lines)
    marked = [line for line in completions if "replayed_from" in line]
    assert len(marked) == 4 * sum(line["sampling/replayed_groups"] for line in lines) > 0
    assert all(line["replayed_from"] < line["step"] - 2 for line in marked)


def shifted(completions: list[str], **_: Any) -> list[float]:
    return [float("7" in text) + 0.01 * ("1" in text) for text in completions]


def switched(outcomes: Iterator[bool]) -> Any:
    """Rewards that differ within a group while `outcomes` say so, and else do not."""

    def reward(completions: list[Any], **_: Any) -> list[float]:
        differ = next(outcomes)
        return [float(differ and index % 4 == 0) for index, _ in enumerate(completions)]

    return reward


def test_a_replayed_rollout_is_weighed_for_the_policy_that_sampled_it(tmp_path: Path) -> None:
    """Gradient of one step on stale completions, against the formula with every completion alone."""
    trainer = make_plain(tmp_path / "run", switched(iter([True, True, False])), replay_buffer_size=4, learning_rate=0.1)
    for _ in range(2):
        trainer.update(trainer.rollout())
    groups = trainer.rollout()
    assert [(group.replayed, {r.policy_version for r in group.rollouts}) for group in groups] == [(True, {1})] * 2
    plain = plain_peft(trainer.model, tmp_path / "adapter")
    sums, weights = [], []
    for group in groups:
        for rollout in group.rollouts:
            logprobs = naive_logprobs(plain, group.prompt_ids, rollout.completion_ids)
            ratio = (logprobs.detach() - torch.tensor(rollout.rollout_logprobs)).exp()
            weights.append(ratio)
            sums.append(-(ratio.clamp(max=2.0) * rollout.advantage * (logprobs - logprobs.detach()).exp()).sum())
    ratios = torch.cat(weights)
    assert ratios.max() > 2
    assert ratios.min() < 0.5
    (torch.stack(sums).sum() / len(ratios)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    metrics = trainer.forward_backward(groups)
    found = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert metrics["mismatch/corrected"] == 1
    assert relative(found, expected) < 1e-4


def test_an_update_that_is_given_up_uses_up_no_kept_group(tmp_path: Path) -> None:
    """Memory or NaN may end a run in its update; the saved step is the one before the rollout."""
    trainer = make_plain(tmp_path, switched(iter([True, False, False])), replay_buffer_size=4, difficulty_pools=True)
    trainer.update(trainer.rollout())
    trainer.saver.mark()
    before = trainer.saver.snapshot()
    first = trainer.rollout()
    trainer.learner.prepare(first, 2, trainer.state.policy_version)  # fills in old log-probabilities
    trainer.saver.go_back()
    assert trainer.saver.snapshot() == before
    again = trainer.rollout()
    assert [group.replayed for group in again] == [True, True]
    assert all(rollout.old_logprobs is None for group in again for rollout in group.rollouts)
    ids = [[[rollout.completion_ids for rollout in group.rollouts] for group in groups] for groups in (first, again)]
    assert ids[0] == ids[1]


def test_remax_compares_with_the_most_likely_completion(tmp_path: Path) -> None:
    trainer = make_plain(tmp_path / "run", shifted_chat, advantage_estimator="remax", temperature=2.0)
    groups = trainer.rollout()
    plain = plain_peft(trainer.model, tmp_path / "adapter")
    for group in groups:
        tokens = islice(greedy_tokens(plain, group.prompt_ids, trainer.tokenizer.eos_token_id), 24)
        text = trainer.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert group.baseline == shifted([text])[0]
        for rollout in group.rollouts:
            assert rollout.advantage == pytest.approx(rollout.reward - group.baseline)
    assert trainer.update(groups)["optimizer/skipped"] == 0


def shifted_chat(completions: list[Any], **_: Any) -> list[float]:
    return shifted([completion[0]["content"] for completion in completions])


def greedy_tokens(model: Any, prompt: list[int], end: int) -> Iterator[int]:
    """The most likely token each time, the whole sequence computed anew."""
    ids = list(prompt)
    while True:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        yield ids[-1]
        if ids[-1] == end:
            return
