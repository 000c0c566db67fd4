"""Alarms on made-up metrics lines: each sounds when it must, once, and is quiet otherwise."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.runs.alarms import ALARMS, Alarms
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.trainer.lifecycle import Journal

Line = dict[str, float]

HEALTHY: Line = {
    "groups/with_signal": 3, "reward": 0.5, "completions/clipped_ratio": 0.9, "mismatch/k3": 5e-4,
    "completions/repetition": 0.2,
    "mismatch/effective_samples": 0.95, "clip_ratio/region_mean": 0.2, "kl": 0.3, "entropy": 0.4, "grad_norm": 0.7,
    "nonfinite/rollouts": 0, "rewards/right/mean": 0.5, "rewards/right/std": 0.5, "episodes/parse_error": 0.1,
    "tools/failure_frequency": 0.2, "episodes/max_tokens": 0.1, "episodes/context": 0.0, "episodes/timeout": 0.0,
    "episodes/environment_error": 0.0,
    "critic/loss": 0.2, "critic/explained_variance": 0.4, "critic/skipped": 0.0,
    "turns/cut_ratio": 0.1, "tools/call_frequency": 1.0, "sampling/preemptions": 3, "sampling/most_together": 64,
}
TAUGHT = HEALTHY | {"distillation/divergence": 0.4, "completions/mean_length": 60.0,
                    "self_distillation/success_group_fraction": 0.25}
EDGE: Line = {  # as far as it may go
    "groups/with_signal": 1, "completions/clipped_ratio": 0.99, "mismatch/k3": 0.01,
    "completions/repetition": 0.4, "mismatch/effective_samples": 0.5,
    "clip_ratio/region_mean": 0.3, "kl": 1.0, "entropy": 0.0041, "grad_norm": 7.0, "rewards/right/std": 1e-9,
    "episodes/parse_error": 0.5, "tools/failure_frequency": 0.5, "episodes/max_tokens": 0.5, "episodes/timeout": 0.1,
    "turns/cut_ratio": 0.99, "tools/call_frequency": 0.01, "sampling/preemptions": 32,
    "critic/loss": 19.9, "critic/explained_variance": -1.0,
}
BAD = [  # of an alarm: a line that is wrong, after how many of them it must sound, and what it must say
    ("nothing_to_learn", {"groups/with_signal": 0}, 10,
     "(mean 0.5), so the rewards give no gradient. What to do: if the mean reward is low, use easier"),
    ("no_success", {"self_distillation/success_group_fraction": 0.0}, 10,
     "success_group_fraction is 0, and no feedback is read, so SDPO's teacher has nothing to show"),
    ("shorter_answers", {"completions/mean_length": 29, "distillation/divergence": 0.3}, 3,
     "mean_length is 29, and was 60 in the first steps, while distillation/divergence fell from 0.4 to 0.3, so"),
    ("divergence_rises", {"distillation/divergence": 0.61}, 5, "divergence is 0.61, and was 0.4 in the first steps"),
    ("truncated", {"completions/clipped_ratio": 1.0}, 3, "max_completion_length"),
    ("mismatch", {"mismatch/k3": 0.011}, 3, "mismatch/k3 is 0.011, so completions come from another distribution"),
    ("mismatch", {"mismatch/effective_samples": 0.49}, 3, "mismatch/effective_samples is 0.49"),
    ("clipping", {"clip_ratio/region_mean": 0.31}, 3, "clip_ratio/region_mean is 0.31"),
    ("clipping", {"cispo_clip_ratio": 0.31}, 3, "learning_rate"),
    ("kl", {"kl": 1.1}, 3, "kl is 1.1"),
    ("entropy_collapse", {"entropy": 0.0039}, 3, "entropy is 0.0039, and was 0.4 in the first steps"),
    ("repetition", {"completions/repetition": 0.41, "reward": 0.6}, 3,
     "completions/repetition is 0.41, and was 0.2 in the first steps, while the reward rose from 0.5 to 0.6"),
    ("gradient_spike", {"grad_norm": 7.1}, 1, "grad_norm is 7.1, 10 times the usual 0.7"),
    ("nonfinite", {"nonfinite/rollouts": 1}, 1, "nonfinite.jsonl"),
    ("unreadable_calls", {"episodes/parse_error": 0.51}, 3, "episodes/parse_error is 0.51, so the policy does not"),
    ("unreadable_calls", {"tools/failure_frequency": 0.6}, 3, "docstrings"),
    ("no_room", {"episodes/max_tokens": 0.51}, 3, "raise max_completion_length"),
    ("no_room", {"episodes/context": 0.51}, 3, "max_tool_tokens"),
    ("turns_cut", {"turns/cut_ratio": 1.0}, 3, "turns/cut_ratio is 1, so no turn came to its end"),
    ("unused_tools", {"tools/call_frequency": 0.0}, 10, "tools/call_frequency is 0, so the policy does not learn"),
    ("failing_environments", {"episodes/timeout": 0.11}, 1, "episodes/timeout is 0.11, so the affected episodes"),
    ("failing_environments", {"episodes/environment_error": 0.11}, 1, "environment_timeout"),
    ("critic", {"critic/explained_variance": -1.1}, 10, "critic/explained_variance is -1.1, so its values mislead"),
    ("critic", {"critic/loss": 20.1}, 10, "critic/loss is 20.1, and was 0.2 in the first steps, so its values mislead"),
    ("critic_nonfinite", {"critic/skipped": 0.5}, 1, "critic/skipped is 0.5, so its optimizer step was skipped"),
    ("preempted", {"sampling/preemptions": 33}, 3, "33 times in a step a sequence had to leave the full"),
    ("constant_reward", {"rewards/right/mean": 1.0, "rewards/right/std": 0.0}, 20, "reward right is 1 for every"),
]
IDS = [f"{name}-{next(iter(line))}" for name, line, *_ in BAD]


def watch(alarms: Alarms, lines: Iterable[Line]) -> list[list[str]]:
    """The alarms that sounded at each line."""
    sounded = []
    for line in lines:
        alarms.state.global_step += 1
        found = alarms.watch(line)
        assert all(value == 1 for value in found.values())
        sounded.append([name.removeprefix("alarms/") for name in found])
    return sounded


def fresh(nothing_to_learn_steps: int = 10) -> Alarms:
    return Alarms(TrainerState(), nothing_to_learn_steps)


def settled(healthy: Line = HEALTHY) -> Alarms:
    """Alarms after twelve healthy steps, in which none sounds."""
    alarms = fresh()
    assert watch(alarms, [healthy] * 12) == [[]] * 12
    return alarms


def without(wrong: Line) -> Line:
    """The healthy line of a run that has the metrics of a wrong one."""
    return TAUGHT if any("distillation" in name for name in wrong) else HEALTHY


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("name", "wrong", "patience", "says"), BAD, ids=IDS)
def test_an_alarm_sounds_in_time_and_once_in_each_episode_and_says_what_to_do(
    name: str, wrong: Line, patience: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = without(wrong)
    alarms = settled(healthy)
    if patience > 1:  # a single good step ends an episode
        assert watch(alarms, ([healthy | wrong] * (patience - 1) + [healthy]) * 3) == [[]] * 3 * patience
    assert watch(alarms, [healthy | wrong] * patience) == [*[[]] * (patience - 1), [name]]
    (message,) = told(caplog)
    (alarm,) = [alarm for alarm in ALARMS if alarm.name == name]
    assert says in message and alarm.title in message and alarm.means in message and alarm.fix in message
    assert (f"for {patience} steps" if patience > 1 else "in step 13") in message
    watch(alarms, [healthy])
    episode = [healthy | wrong] * (2 * patience - 1)  # of the one alarm that repeats, twice its patience is the next
    assert watch(alarms, [*episode, healthy]) == [*[[]] * (patience - 1), [name], *[[]] * patience]


def test_a_run_within_the_bounds_sounds_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    edge = HEALTHY | EDGE
    assert watch(settled(), [edge | {"rewards/right/mean": 0.5 + 0.01 * n} for n in range(30)]) == [[]] * 30
    assert told(caplog) == []


def test_a_healthy_run_with_a_teacher_would_sound_an_alarm() -> None:
    """Groups without signal are no loss to it; it nears its teacher, whose answers are somewhat shorter."""
    lines = [TAUGHT | {"groups/with_signal": 0, "distillation/divergence": 0.6 - 0.02 * step + 0.05 * (step % 3),
                       "completions/mean_length": 60 - step, "self_distillation/success_group_fraction": step % 9 / 9}
             for step in range(30)]
    assert watch(fresh(), lines) == [[]] * 30
    silent = [HEALTHY | {"completions/mean_length": 5.0}] * 30  # no completion had a teacher
    assert watch(fresh(), [TAUGHT] * 5 + silent) == [[]] * 35


def test_feedback_in_place_of_successes_would_sound_an_alarm() -> None:
    wrong = TAUGHT | {"self_distillation/success_group_fraction": 0.0, "self_distillation/feedback_used_fraction": 0.5}
    assert watch(fresh(), [wrong] * 20) == [[]] * 20


@pytest.mark.parametrize(("cache_dtype", "healthy", "wrong"), [
    ("auto", 0.0014, 0.011), ("fp8", 0.034, 0.11), ("fp8_e4m3", 0.034, 0.11), ("fp8_e5m2", 0.144, 0.41),
])
def test_a_healthy_cache_in_8_bits_sounds_no_alarm_and_a_wrong_sampler_does(
    cache_dtype: str, healthy: float, wrong: float
) -> None:
    """The healthy values were measured with vLLM on a published model (docs/rollouts.md)."""
    alarms = Alarms(TrainerState(), 10, cache_dtype)
    assert watch(alarms, [HEALTHY | {"mismatch/k3": healthy}] * 6) == [[]] * 6
    assert watch(alarms, [HEALTHY | {"mismatch/k3": wrong}] * 3)[-1] == ["mismatch"]


def test_every_alarm_is_tested_and_has_its_words() -> None:
    assert {alarm.name for alarm in ALARMS} == {name for name, *_ in BAD}
    assert len({alarm.name for alarm in ALARMS}) == len(ALARMS)
    for alarm in ALARMS:
        assert all((alarm.title, alarm.when, alarm.means, alarm.fix)) and alarm.patience >= 1, alarm.name


@pytest.mark.parametrize("missing", [{}, dict.fromkeys([*TAUGHT, "cispo_clip_ratio"], float("nan"))])
def test_a_missing_metric_counts_neither_for_nor_against(missing: Line) -> None:
    for _, wrong, patience, _ in BAD:
        bad = without(wrong) | wrong
        sounded = watch(settled(without(wrong)), [*[bad] * (patience - 1), *[missing] * 40, bad])
        assert [bool(names) for names in sounded] == [*[False] * (patience + 39), True], wrong


def test_nothing_to_learn_is_repeated_after_each_patience_of_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    sounded = watch(fresh(nothing_to_learn_steps=2), [HEALTHY | {"groups/with_signal": 0}] * 5)
    assert sounded == [[], ["nothing_to_learn"], [], ["nothing_to_learn"], []]
    assert [message.split(":")[0] for message in told(caplog)] == [
        "nothing to learn for 2 steps", "nothing to learn for 4 steps"]
    caplog.clear()
    watch(fresh(nothing_to_learn_steps=1), [{"groups/with_signal": 0}])
    assert "(mean none)" in told(caplog)[0]


def test_entropy_is_measured_by_the_first_steps_and_by_a_floor() -> None:
    assert watch(fresh(), [{"entropy": 0.0011}] * 9) == [[]] * 9
    assert watch(fresh(), [{"entropy": 0.0009}] * 4) == [[], [], ["entropy_collapse"], []]
    slowly = [{"entropy": 0.5 * 0.9**n} for n in range(40)]  # 1% of the mean of the first five is 0.0041, at n = 46
    alarms = fresh()
    assert watch(alarms, slowly) == [[]] * 40
    assert watch(alarms, [{"entropy": 0.5 * 0.9**n} for n in range(40, 60)]).index(["entropy_collapse"]) == 46 - 40 + 2


def test_a_gradient_norm_is_measured_by_enough_recent_norms_above_0() -> None:
    assert watch(fresh(), [*[{"grad_norm": 1.0}] * 9, {"grad_norm": 99.0}]) == [[]] * 10
    alarms = fresh()
    watch(alarms, [{"grad_norm": 1.0}] * 10 + [{"grad_norm": 0.0}] * 50)
    assert watch(alarms, [{"grad_norm": 11.0}]) == [["gradient_spike"]]
    watch(alarms, [{"grad_norm": 2.0}] * 60)
    assert watch(alarms, [{"grad_norm": 19.0}]) == [[]]


def test_of_several_reward_functions_the_constant_one_is_named(caplog: pytest.LogCaptureFixture) -> None:
    alarms = fresh()
    changing = [{"rewards/a/mean": 0.25, "rewards/a/std": 0.1, "rewards/b/mean": 1.0, "rewards/b/std": 0.0,
                 "rewards/c/mean": float(n % 2), "rewards/c/std": 0.0} for n in range(25)]
    sounded = watch(alarms, changing)
    assert [step for step, names in enumerate(sounded) if names] == [19]
    (message,) = told(caplog)
    assert "reward b is 1 for every completion" in message


def test_a_resumed_run_remembers_what_its_alarms_had_seen() -> None:
    lines = [HEALTHY | {"entropy": 0.4 + 0.01 * n, "grad_norm": 1.0 + n} for n in range(12)]
    lines += [HEALTHY | {"grad_norm": 90.0}, *[HEALTHY | wrong for _, wrong, *_ in BAD for _ in range(5)]]
    lines += [HEALTHY | {"rewards/right/mean": 1.0, "rewards/right/std": 0.0, "kl": 2.0}] * 40
    whole = watch(fresh(), lines)
    assert sum(map(bool, whole)) >= 5
    for stop in range(len(lines)):
        first = fresh()
        before = watch(first, lines[:stop])
        second = fresh()
        second.state.alarms = json.loads(json.dumps(first.state.alarms, allow_nan=False))
        assert before + watch(second, lines[stop:]) == whole, stop


def test_an_alarm_is_in_the_line_to_log(tmp_path: Path) -> None:
    state = TrainerState()
    journal = Journal(state, RunRecords(tmp_path), GRPOConfig(logging_steps=2), Alarms(state, 10))
    lines = []
    for step in range(1, 5):
        state.global_step = step
        wrong = {"nonfinite/rollouts": 2.0, "nonfinite/steps": 1.0} if step == 3 else {"nonfinite/steps": step // 3}
        journal.write(HEALTHY | wrong | {"step": step}, [])
        if not step % 2:
            lines.append(journal.flush() or {})
    assert [line.get("alarms/nonfinite") for line in lines] == [None, 1]
    assert [line["nonfinite/steps"] for line in lines] == [0, 1]  # the last value, where others are means
