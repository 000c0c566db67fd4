"""Rewards computed while other groups are sampled: the same scores, sooner; and what goes wrong on the way."""

import asyncio
import copy
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from episodes import episode, turn
from gpt_oss import gpt_oss_tokenizer
from trainer_runs import adapter, make, same

from lowmem_grpo.data.harmony import message_reader
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.engines.batch import Batch
from lowmem_grpo.rewards import MeanOf, Reward, RewardError, RewardScorer, Scores, number_match
from lowmem_grpo.rewards.calling import calls
from lowmem_grpo.rewards.calling.contract import MissingColumnError, TooLateError
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch, covered, score_groups
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup

SIZE = 3  # completions of a group
ORDER = (2, 0, 3, 1)  # in which groups are finished
LINGER = "lowmem_grpo.rewards.calling.reward_batch.LINGER"


class Length(Reward):
    """The length of each text, after `work`; keeps the completions of each call."""

    def __init__(self, work: Callable[[list[str]], None] = lambda texts: None, name: str = "length") -> None:
        super().__init__(name)
        self.work, self.calls = work, []  # type: ignore[var-annotated]

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        self.calls.append(texts)
        self.work(texts)
        return [float(len(text)) for text in texts]


def prompts_of(count: int) -> list[Prompt]:
    """The answer's column is missing in the first row."""
    return [Prompt({"prompt": f"p{n}", **({"answer": str(n)} if n else {})}, [n], "") for n in range(count)]


def groups_of(prompts: list[Prompt]) -> list[RolloutGroup]:
    """Group n has the completions "n", "nn" and "nnn"."""
    return [
        RolloutGroup(prompt.row, prompt.ids, [Rollout([7] * (k + 1), [-1.0] * (k + 1), "stop", prompt.row["prompt"][1:]
                                                      * (k + 1)) for k in range(SIZE)])
        for prompt in prompts
    ]


@contextmanager
def early(
    rewards: Any, count: int = 4, state: TrainerState | None = None, **settings: Any
) -> Iterator[tuple[RewardBatch, list[RolloutGroup]]]:
    """The scoring of a batch of `count` groups, and these groups. `rewards` are functions, or a scorer of them."""
    scorer = rewards if isinstance(rewards, RewardScorer) else RewardScorer(rewards, **settings)
    prompts = prompts_of(count)
    with RewardBatch(scorer, prompts, state) as scoring:
        yield scoring, groups_of(prompts)


def add_groups(scoring: RewardBatch, groups: list[RolloutGroup], *order: int) -> None:
    """Tell of the groups in this order, or of all in theirs."""
    for index in order or range(len(groups)):
        scoring.add_group(index, groups[index].rollouts)


def wait_until(scoring: RewardBatch, holds: Callable[[], bool]) -> None:
    """Wait for what the calls tell of as soon as it holds."""
    with scoring.changed:
        assert scoring.changed.wait_for(holds, 60)


def wait_until_idle(scoring: RewardBatch) -> None:
    """Wait until all that was handed in is scored, or nothing more will be called."""
    wait_until(scoring, lambda: not scoring.working and all(
        call.future.done() and call.ended for call in scoring.calls if call.began))


def early_scores(
    rewards: Any, count: int = 4, order: tuple[int, ...] = ORDER, apart: bool = False, **settings: Any
) -> Scores:
    """Scores where groups are finished in this order: `apart`, each when those before it are scored."""
    with early(rewards, count, TrainerState(), **settings) as (scoring, groups):
        for index in order:
            add_groups(scoring, groups, index)
            if apart:
                wait_until_idle(scoring)
        return scoring.settle(groups)


@contextmanager
def held() -> Iterator[tuple[threading.Event, threading.Event, Callable[[Any], None]]]:
    """(entered, go on, work): work that says when it begins and waits until it may go on."""
    entered, go_on = threading.Event(), threading.Event()

    def work(_: Any) -> None:
        entered.set()
        assert go_on.wait(60)

    try:
        yield entered, go_on, work
    finally:
        go_on.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the calls, which goes on only where a test says so."""
    found = SimpleNamespace(now=1.0, monotonic=lambda: found.now)
    monkeypatch.setattr(calls, "time", found)
    return found


# The same scores


def logs(completions: list[str], answer: list[str | None], log_metric: Any, log_extra: Any, **_: Any) -> list[Any]:
    """Booleans, None and NaN, with logs."""
    log_metric("mean_length", sum(map(len, completions)) / len(completions))
    log_extra("shout", [text.upper() + "!" for text in completions])
    return [None if label is None else math.nan if text == "33" else text == label
            for text, label in zip(completions, answer, strict=True)]


async def logs_later(completions: list[str], log_metric: Any, prompts: list[str], **_: Any) -> torch.Tensor:
    await asyncio.sleep(0)
    log_metric("later", float(prompts[0][1:]))
    return torch.tensor([float(len(text)) for text in completions])


def judges(completions: list[str], log_metric: Any) -> list[float | None]:
    """No reward for the group 1. Logs a mean over completions, a value for each, and a share of some."""
    judged = [text for text in completions if text[0] != "1"]
    log_metric("failed", 1 - len(judged) / len(completions))
    for text in completions:
        log_metric("digit", int(text[0]))
    if judged:
        log_metric("threes", MeanOf(sum(text[0] == "3" for text in judged) / len(judged), len(judged)))
    return [None if text[0] == "1" else 1.0 for text in completions]


def test_scores_and_logs_do_not_depend_on_how_a_batch_was_cut_into_calls(caplog: pytest.LogCaptureFixture) -> None:
    funcs = [logs, number_match().reward(2.0, -1.0), logs_later, judges, Length()]
    with early(RewardScorer(list(funcs), while_sampling=True), state=TrainerState()) as (scoring, groups):
        del groups[2].rollouts[1:]  # calls on 3, 1, 3 and 3 completions
        for index in ORDER:
            add_groups(scoring, groups, index)
            wait_until_idle(scoring)
        found = scoring.settle(groups)
    told = [record.message for record in caplog.records]
    caplog.clear()
    whole = score_groups(RewardScorer(list(funcs)), groups, TrainerState())
    assert told == [record.message for record in caplog.records] and len(told) == 2
    assert (found.rewards, found.invalid, found.extras) == (whole.rewards, whole.invalid, whole.extras)
    assert found.converted == whole.converted == {"logs": ["bool"], "logs_later": ["Tensor"]}
    assert found.invalid["logs"] == 1 and found.rewards["logs"][:4] == [None, None, None, 1.0]
    assert whole.metrics.pop("later") == 0 and found.metrics.pop("later") == 1.4, "the mean over the completions"
    assert found.metrics == {name: pytest.approx(value, abs=1e-11) for name, value in whole.metrics.items()}
    assert [whole.metrics[name] for name in ("failed", "digit", "threes")] == pytest.approx([0.3, 1.4, 3 / 7])


def test_each_group_is_scored_once_whatever_the_engine_tells_and_those_finished_at_once_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LINGER, 60.0)  # on a slow machine, too, all are at once
    reward = Length()
    for order in ((), (1, 1, 0, 1), ORDER):
        assert early_scores(reward, order=order).rewards["length"] == [1.0, 2.0, 3.0] * 4
        assert sorted(text for texts in reward.calls for text in texts) == sorted(
            str(n) * k for n in range(4) for k in (1, 2, 3))
        assert len(reward.calls) == 1, "finished at once: one call"
        reward.calls.clear()


# Which functions, and how they are called


def plain(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize(("chosen", "early"), [
    (None, ["length"]), (True, ["length", "plain", "logs_later"]), (False, [])
])
def test_the_setting_and_the_functions_decide_which_are_called_early(chosen: bool | None, early: list[str]) -> None:
    last, whole = Length(name="last"), Length(name="all")
    last.after_sampling, whole.by_group = True, False
    scorer = RewardScorer([Length(), plain, logs_later, last, whole], while_sampling=chosen)
    assert scorer.early == early
    scoring = RewardBatch(scorer, prompts_of(1), None)
    assert (scoring.on_group is None) == (not early)


def test_plain_functions_run_one_after_another_on_all_groups_that_wait() -> None:
    threads: set[threading.Thread] = set()

    def runs(_: Any) -> None:
        threads.add(threading.current_thread())

    with held() as (entered, go_on, work):
        first, second = Length(work), Length(runs, "second")
        with early([first, second, Length(runs, "third")]) as (scoring, groups):
            add_groups(scoring, groups, 2)
            assert entered.wait(60)
            add_groups(scoring, groups, 3, 0, 1)
            go_on.set()
            scores = scoring.settle(groups)
    assert [[text[0] for text in texts] for texts in second.calls] == [["2"] * 3, [*"333000111"]]
    assert len(threads) == 1
    assert scores.rewards["third"] == [1.0, 2.0, 3.0] * 4


def test_async_functions_do_not_wait_for_each_other() -> None:
    all_of_them = asyncio.Barrier(4)

    async def meets(completions: list[str], **_: Any) -> list[float]:
        await all_of_them.wait()
        return [0.0] * len(completions)

    early_scores(meets, while_sampling=True)


def test_groups_are_scored_while_others_decode_and_that_time_is_hidden(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(texts: list[str]) -> None:
        clock.now += len(texts)

    reward = Length(work)
    with early(reward) as (scoring, groups):
        for index in ORDER[:-1]:
            add_groups(scoring, groups, index)
            wait_until_idle(scoring)
        assert [len(texts) for texts in reward.calls] == [SIZE] * 3
        monkeypatch.setattr(LINGER, 60.0)  # the last call does not begin before the wait for it
        assert scoring.wait(groups) == 3 * SIZE
    assert [len(texts) for texts in reward.calls] == [SIZE] * 4


def test_functions_see_the_state_in_which_sampling_began() -> None:
    seen = []

    def looks(completions: list[str], trainer_state: TrainerState, **_: Any) -> list[float]:
        seen.append((trainer_state.global_step, trainer_state.num_tokens))
        return [0.0] * len(completions)

    state = TrainerState(global_step=3, num_tokens=50)
    with early(looks, 1, state, while_sampling=True) as (scoring, groups):
        state.num_tokens += 12  # as the collector counts, before it settles
        scoring.settle(groups)
    assert seen == [(3, 50)]


# What goes wrong


def fails(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("gold")


async def fails_later(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("gold")


def test_after_a_failure_no_other_call_begins() -> None:
    second = Length(name="second")
    with pytest.raises(RewardError, match="fails raised"):
        early_scores([fails, second], apart=True, while_sampling=True)
    assert second.calls == []
    with early(fails_later, 2, while_sampling=True) as (scoring, groups):
        add_groups(scoring, groups, 0)
        wait_until(scoring, lambda: scoring.closed)
        with pytest.raises(RewardError, match="fails_later raised"):
            scoring.settle(groups)
    assert len(scoring.calls) == 1


class Slow(Length):
    time_limit = 0.05


async def waits(completions: list[str], **_: Any) -> list[float]:
    await asyncio.Event().wait()
    return []


@pytest.mark.parametrize(("kind", "timeout", "message"), [
    ("plain", 0.05, r"length did not return within 0\.05 s; raise the limit with GRPOConfig\(reward_timeout=\.\.\.\)"),
    ("own", 60.0, r"length did not return within 0\.05 s; raise the limit with its time_limit"),
    ("async", 0.05, r"waits did not return within 0\.05 s; raise the limit with GRPOConfig"),
])
def test_a_function_that_never_returns_does_not_hold_up_the_step(kind: str, timeout: float, message: str) -> None:
    with held() as (_, _, work):
        func = {"plain": Length(work), "own": Slow(work), "async": waits}[kind]
        with pytest.raises(TooLateError, match=message):
            early_scores(func, timeout=timeout, while_sampling=True)


def test_calls_that_a_failure_stopped_are_not_blamed_for_it() -> None:
    with pytest.raises(RewardError, match="fails raised KeyError: 'gold'"):
        early_scores([waits, fails], apart=True, while_sampling=True)


def test_a_call_that_took_too_long_fails_although_nobody_waited_for_it(clock: SimpleNamespace) -> None:
    def work(_: Any) -> None:
        clock.now += 1.0

    with early(Slow(work), 1) as (scoring, groups):
        add_groups(scoring, groups)
        wait_until_idle(scoring)
        with pytest.raises(TooLateError, match=r"length did not return within 0\.05 s"):
            scoring.settle(groups)


def test_seconds_of_calls_side_by_side_are_counted_once() -> None:
    assert covered([(2.0, 3.0), (0.0, 1.0), (0.5, 0.75), (0.5, 1.5)]) == 2.5


def test_a_missing_column_is_found_before_anything_is_sampled() -> None:
    with pytest.raises(MissingColumnError, match=r"<lambda> requires gold, which no dataset column provides"):
        RewardBatch(RewardScorer([plain, lambda gold: gold]), prompts_of(2), None)


def test_columns_that_come_with_the_rollouts_stand_before_those_of_the_rows() -> None:
    def won(completions: list[str], score: list[float], answer: list[Any], **_: Any) -> list[float]:
        assert answer == [None, None, None, 9, "1", "1"]
        return score

    with early(won, 2, late_columns=True) as (scoring, groups):
        assert scoring.on_group is None
        for number, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
            rollout.columns = {"score": number, **({"answer": 9} if number == SIZE else {})}
        assert scoring.settle(groups).rewards["won"] == [*range(2 * SIZE)]
    with early(won, 2, late_columns=True) as (scoring, groups), pytest.raises(MissingColumnError, match="score"):
        scoring.settle(groups)


def test_sampling_that_fails_leaves_no_calls_behind() -> None:
    with held() as (entered, go_on, work):
        reward = Length(work)
        scorer = RewardScorer(reward)
        with pytest.raises(RuntimeError, match="the card is gone"), early(scorer, 3) as (scoring, groups):
            add_groups(scoring, groups, 0)
            assert entered.wait(60)
            add_groups(scoring, groups, 1)
            raise RuntimeError("the card is gone")
        go_on.set()
        reward.work = lambda texts: None
        scores = early_scores(scorer, count=2, order=(1, 0))
    add_groups(scoring, groups, 2)
    wait_until_idle(scoring)
    assert scores.rewards["length"] == [1.0, 2.0, 3.0] * 2
    assert reward.calls[0] == ["0", "00", "000"] and sum(map(len, reward.calls)) == 3 + 6


def test_ctrl_c_ends_the_wait_for_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LINGER, 60.0)  # the call begins when it is waited for
    with held() as (_, _, work):
        def interrupted(texts: list[str]) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            work(texts)

        with pytest.raises(KeyboardInterrupt):
            early_scores(Length(interrupted))


# In a run


class Digits(Length):
    """Differs between most completions."""

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        super().pay(texts, columns, call)
        call["log_extra"]("length", [len(text) for text in texts])
        return [float(sum(int(c) for c in text if c in "0123456789")) for text in texts]


def test_a_run_that_scores_early_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no other group is sampled until a finished one is scored."""
    add_group, begin = RewardBatch.add_group, Batch.take_rows

    def add_group_and_wait(scoring: RewardBatch, index: int, rollouts: list[Rollout]) -> None:
        add_group(scoring, index, rollouts)
        wait_until_idle(scoring)

    def noted(batch: Batch) -> Any:
        scored.add(len(reward.calls))
        return begin(batch)

    monkeypatch.setattr(RewardBatch, "add_group", add_group_and_wait)
    monkeypatch.setattr(Batch, "take_rows", noted)
    runs = {}
    for chosen in (None, False):
        reward, scored = Digits(), set[int]()  # how many calls there were when rows began to be sampled
        trainer = make(tmp_path / str(chosen), reward, score_while_sampling=chosen, per_device_train_batch_size=16,
                       max_completion_length=12)
        trainer.memory.rollout.lowered = 4  # a group at a time
        trainer.train()
        runs[chosen] = adapter(trainer), read_lines(trainer.run_dir / "completions.jsonl"), [
            line["time/reward_hidden"] for line in read_lines(trainer.run_dir / "metrics.jsonl")], reward.calls, scored
    early, whole = runs[None], runs[False]
    assert same(early[0], whole[0]) and early[1] == whole[1]
    assert all(early[2]) and not any(whole[2])
    assert [len(texts) for texts in whole[3]] == [16, 16] and [len(texts) for texts in early[3]] == [4] * 8
    assert whole[4] == {0, 1} and len(early[4]) > 2, "groups are scored while others are sampled"


def test_an_engine_that_takes_no_on_group_is_used_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = Digits()
    trainer = make(tmp_path, reward)
    monkeypatch.setattr(trainer.engine, "capabilities", frozenset({"converse"}))
    trainer.sampler.is_callers = True
    for _ in range(2):
        trainer.rollout()
    assert sum("capabilities lack on_group" in record.message for record in caplog.records) == 1
    assert len(reward.calls) == 2  # whole batches, after sampling


# What functions are given is theirs to change


def chat_row() -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "2+2?"}], "notes": {"of": {"read": []}}}


@pytest.mark.parametrize("way", ["whole", "early", "async"])
def test_what_a_function_changes_is_seen_by_no_other_completion_call_or_record(way: str) -> None:
    """The usual way to make a judge's conversation of a chat: it changes what it was given."""
    counts: list[list[int]] = []

    def judged(prompts: list[Any], completions: list[Any], notes: list[Any], **kwargs: Any) -> list[float]:
        for prompt, completion, note in zip(prompts, completions, notes, strict=True):
            prompt += completion
            completion[0]["content"] = "spoilt"
            note["of"]["read"].append(1)
        counts.append([len(prompt) for prompt in prompts])
        counts.append([len(note["of"]["read"]) for note in notes])
        return [1.0] * len(prompts)

    async def judged_later(**given: Any) -> list[float]:
        return judged(**given)

    scorer = RewardScorer([judged_later if way == "async" else judged] * 2, while_sampling=way == "early")
    row, rollouts = chat_row(), [Rollout([7], [0.0], "stop", text) for text in ("4", "5", "6", "7")]
    groups = [RolloutGroup(row, [1], rollouts)]
    for _ in range(2):
        RewardBatch(scorer, groups, TrainerState()).settle(groups)
    assert counts == [[2] * 4, [1] * 4] * 4  # as in TRL, whose rows are read anew for each completion
    assert row == chat_row() and [rollout.text for rollout in rollouts] == ["4", "5", "6", "7"]


def test_turns_and_answers_of_episodes_are_copies_and_environments_are_those_that_were_played() -> None:
    game, seen = object(), []

    def spoils(completions: list[Any], turns: list[Any], environments: list[Any], **kwargs: Any) -> list[float]:
        seen.append((completions[0][0]["content"], len(completions[0]), environments[0]))
        completions[0].clear()
        turns[0][0].completion_ids.append(99)
        turns[0][0].message["content"] = turns[0][0].replies[0]["content"] = "spoilt"
        return [1.0]

    played = episode(turn("50", {"role": "user", "content": "Lower."}), turn("25"), environment=game)
    row, before = chat_row(), copy.deepcopy(played.turns)
    for _ in range(2):
        score_groups(RewardScorer([spoils], episodes=True), [RolloutGroup(row, [1, 2, 3], [played])], None)
    assert seen == [("25", 3, game)] * 2 and played.turns == before


@pytest.mark.parametrize("while_sampling", [True, False])
def test_functions_read_the_channels_of_gpt_oss_apart(while_sampling: bool) -> None:
    """In the text alone, which prompts without messages still get, nothing stands between thoughts and answer."""
    tokenizer, said = gpt_oss_tokenizer(), list[Any]()
    ids = tokenizer("<|channel|>analysis<|message|>4 or 5<|end|><|start|>assistant<|channel|>final<|message|>5",
                    add_special_tokens=False).input_ids
    text = tokenizer.decode(ids, skip_special_tokens=True)

    def reads(completions: list[Any], **_: Any) -> list[float]:
        said.extend(completions)
        return [1.0] * len(completions)

    scorer = RewardScorer([reads, number_match().reward()], while_sampling=while_sampling)
    scorer.reads = message_reader(tokenizer)
    groups = [RolloutGroup({"prompt": prompt, "answer": "5"}, [1], [Rollout(ids, [0.0] * len(ids), "stop", text)])
              for prompt in ([{"role": "user", "content": "2 + 3?"}], "2 + 3?")]
    with RewardBatch(scorer, groups, None) as batch:
        for index, group in enumerate(groups):
            batch.add_group(index, group.rollouts)
        scores = batch.settle(groups)
    assert said == [[{"role": "assistant", "thinking": "4 or 5", "content": "5"}], "analysis4 or 5assistantfinal5"]
    assert scores.rewards["number_match"][0] == 1
