"""`rewards.check`: what it finds before a run, what it shows, and that it changes nothing."""

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from tables import every_row
from trainer_runs import loaded

from lowmem_grpo import GRPOConfig, rewards
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.recipes.arithmetic import correct_answer, make_dataset
from lowmem_grpo.rewards.checking.check import print_check
from lowmem_grpo.rewards.checking.diagnosis import RewardTrial
from lowmem_grpo.rewards.texts import completion_texts

ARGS: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 24}
DATA = make_dataset("train", 16)


def check(*funcs: Any, dataset: Any = DATA, groups: int = 4, timeout: float = 60.0, **settings: Any
          ) -> rewards.RewardCheck:
    args = GRPOConfig(**(ARGS | settings))
    return rewards.check(list(funcs), dataset, loaded("tiny", 128, False), args, groups=groups, timeout=timeout,
                         show=False)


def each(name: str, rule: Callable[[str], float | None]) -> Any:
    """A reward function of this name that pays each text by a rule."""
    def reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return [rule(text) for text in completion_texts(completions)]

    reward.__name__ = name
    return reward


length = each("length", len)
constant = each("constant", lambda text: 0.5)


def only(result: rewards.RewardCheck, function: str) -> rewards.Finding:
    (finding,) = result.of(function)
    assert finding.fix
    return finding


def test_sound_rewards_are_not_complained_about() -> None:
    result = check(correct_answer, rewards.number_equal(), rewards.proximity(), groups=8,
                   max_completion_length=48)
    assert result.ok and not [finding for finding in result.findings if finding.about != "number_equal"]
    assert [trial.kind for trial in result.trials] == ["reward", "verifier", "reward"]
    right = result.trials[0].paid
    assert result.trials[1].verdicts == sum(right) / len(right)
    assert (result.groups, len(result.completions), len(result.prompts)) == (8, 32, 8)
    assert result.signal_share == result.groups_with_signal / 8
    assert 0 <= result.signal_interval[0] <= result.signal_share <= result.signal_interval[1] <= 1


def broken(result: Callable[[int], Any]) -> Any:
    return lambda completions, **kwargs: result(len(completions))


BREAKS = [
    (lambda n: [1.0], "it returned 1 rewards, expected 16"), (lambda n: ["1"] * n, "number or None is needed, not str"),
    (lambda n: "1" * n, "not str"), (lambda n: torch.zeros(n, 1), "not list"), (lambda n: 1 / 0, "it raised ZeroDivis"),
    (lambda n: [float("nan")] * n, "NaN or infinity for 16 of 16 completions"), (lambda n: None, "not NoneType"),
]


def test_functions_that_break_the_contract_are_found_each_by_itself() -> None:
    found = check(*(broken(result) for result, _ in BREAKS), length)
    names = ["<lambda>", *(f"<lambda>_{number}" for number in range(2, len(BREAKS) + 1))]
    assert not found.ok and [finding.about for finding in found.findings[: len(BREAKS)]] == names
    for name, (_, problem) in zip(names, BREAKS, strict=True):
        assert only(found, name).severity == "error" and problem in only(found, name).problem
    assert len(found.trials[-1].pays) == 16, "the failures hide what another function pays"


def test_a_conversion_is_said() -> None:
    found = check(broken(torch.arange), broken(lambda n: [bool(k % 3) for k in range(n)]))
    for name, kind in (("<lambda>", "Tensor"), ("<lambda>_2", "bool")):
        (note,) = [finding for finding in found.of(name) if finding.severity == "note"]
        assert note.problem.endswith("taken as floats") and kind in note.problem


def test_a_missing_column_is_named() -> None:
    requires, reads = lambda solution, **kwargs: solution, lambda **kwargs: kwargs["gold"]
    result = check(requires, reads, rewards.number_match("label").reward(), lambda environments: environments)
    named = {"<lambda>": "solution", "<lambda>_2": "gold", "number_match": "label", "<lambda>_3": "environments"}
    for name, column in named.items():
        finding = only(result, name)
        assert column in finding.problem and "the dataset's columns are answer, prompt" in finding.problem
        assert finding.severity == "error"
        assert ("rename" in finding.fix) == (column != "environments")


def test_a_function_that_pays_all_alike_is_found() -> None:
    result = check(constant, lambda prompts: [-float(len(prompt[0]["content"])) for prompt in prompts],
                   each("silent", lambda text: None))
    assert "it pays 0.5 for all 16 completions" in only(result, "constant").problem
    assert "never differs inside a group" in only(result, "<lambda>").problem
    assert "None for all 16 completions" in only(result, "silent").problem
    assert result.groups_with_signal == 0 and result.signal_share == 0
    assert "0 of 4 groups carry signal" in result.of("")[-1].problem and result.ok


def test_functions_that_always_pay_the_same_are_found() -> None:
    found = [f for f in check(length, each("again", len), length).findings if "pays what" in f.problem]
    assert [(finding.about, finding.problem.rpartition(" ")[0].rpartition(" ")[2]) for finding in found] == [
        ("again", "length"), ("length_2", "length"), ("length_2", "again")]


def test_pay_for_the_empty_answer_is_found() -> None:
    brief = each("brief", lambda text: 1 / (1 + len(text)))
    result = check(brief, each("ragged", lambda text: 1 / len(text)), rewards.number_equal(), correct_answer)
    assert "it pays 1 for the empty answer; the best sample got 0.0" in only(result, "brief").problem
    failed = [finding for finding in result.of("ragged") if finding.severity == "error"]
    assert "on an empty completion" in failed[0].problem and "ZeroDivisionError" in failed[0].problem
    assert "empty" not in " ".join(finding.problem for finding in result.of("number_equal"))
    assert "empty" not in " ".join(f.problem for f in check(brief, length, reward_weights=[-1, 1]).of("brief"))


def test_a_function_that_is_too_slow_is_not_waited_for() -> None:
    end = threading.Event()

    def hangs(completions: list[Any], **kwargs: Any) -> list[float]:
        assert end.wait(60)
        return length(completions)

    finding = only(check(hangs, timeout=0.05, reward_timeout=1.0), "hangs")
    assert finding.problem == "it did not return within 0.05 s" and finding.severity == "warning"
    assert only(check(hangs, timeout=0.05, reward_timeout=0.05), "hangs").severity == "error"
    end.set()


def test_a_function_that_is_too_slow_for_a_step_is_found() -> None:
    """It needs at least 8 * 0.01 s for a step, and a run would allow 0.05 s."""
    def slow(completions: list[Any], **kwargs: Any) -> list[float]:
        time.sleep(0.01)
        return length(completions)

    result = check(slow, timeout=60.0, reward_timeout=0.05, gradient_accumulation_steps=16)
    assert "the 128 of a step may take" in only(result, "slow").problem
    slow.time_limit = 60.0  # type: ignore[attr-defined]  # its own, as a judge's
    assert not check(slow, timeout=60.0, reward_timeout=0.05, gradient_accumulation_steps=16).of("slow")


def test_completions_that_are_cut_off_and_rows_that_are_skipped_are_found() -> None:
    rows = [{"prompt": "", "answer": "1"}, *DATA.select(range(4))]
    result = check(length, dataset=rows, max_completion_length=4, shuffle_dataset=False)
    problems = " ".join(finding.problem for finding in result.of(""))
    assert "rows were skipped: empty prompt (1)" in problems
    assert "100% of the completions were cut off" in problems


def test_the_check_refuses_what_a_trainer_would_refuse_at_once() -> None:
    with pytest.raises(TypeError, match="the verifier number_match"):
        check(rewards.number_match())
    with pytest.raises(ValueError, match="reward_weights has 2 numbers for 1"):
        check(length, reward_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="groups is 0"):
        check(length, groups=0)
    with pytest.raises(DataError, match="no column 'prompt'"):
        check(length, dataset=[{"question": "1"}])


def test_the_check_changes_no_weights_and_no_random_state_and_repeats_itself() -> None:
    model = loaded("tiny", 128, False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(5)
    state, training = torch.get_rng_state(), model.training
    first, second = check(length), check(length)
    assert torch.equal(state, torch.get_rng_state()) and model.training == training
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert first.completions == second.completions and len(set(first.completions)) > 8


def test_pay_signal_and_what_to_do_are_printed_and_the_models_text_is_not_obeyed() -> None:
    rows = [{"prompt": "[red]\x1b[31m What is 2 + 2?", "answer": "4"}] * 2
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    result = rewards.check([each("nothing", lambda text: 0.0), rewards.number_equal()], rows,
                           loaded("tiny", 128, False), GRPOConfig(**ARGS), groups=2, console=console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("nothing", "number_equal", "verifier", "groups with signal:", "95% interval", "sum ", "[red]",
                 "warning nothing: it pays 0 for all 8 completions", "What to do: grade in smaller steps"):
        assert text in printed, text
    assert printed.startswith("sampling 8 completions, each of at most max_completion_length=24 tokens\n")
    assert "\x1b" not in printed and len(result.trials) == 2


@every_row("width", [60, 80, 100])
def test_a_narrow_terminal_keeps_the_names_of_functions_whole(width: int) -> None:
    names = ["number_match", "code_passes_tests", "shared_words"]
    trials = [RewardTrial(name, "verifier", -0.25, [0.123, -0.333], [0.0], verdicts=0.5, seconds=12.5)
              for name in names]
    result = rewards.RewardCheck([], trials, ["prompt " * 50], ["text " * 80] * 2, [0.1, -0.3], 1, 1, 0.0)
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_check(result, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line) for line in lines if "groups with signal" not in line) <= width
    assert all(sum(name in line for line in lines) == 3 for name in names)  # in the table, and beside two completions
    assert any("function" in line and "mean" in line and "right" in line for line in lines)


def test_a_group_that_a_required_function_cannot_judge_has_no_signal() -> None:
    class Judge(rewards.Reward):
        required = True

        def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
            return [None if number == 1 else float(number) for number in range(len(texts))]

    judge = Judge("judge")
    assert check(judge).groups_with_signal == 3
    judge.required = False
    assert check(judge).groups_with_signal == 4
