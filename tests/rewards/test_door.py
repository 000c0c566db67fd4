"""Reward functions: the contract, its failures and time limit, and the GSM8K set."""

import asyncio
import contextvars
import functools
import json
import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.rewards import (
    SYSTEM_PROMPT,
    RewardError,
    RewardScorer,
    Scores,
    correctness_reward_func,
    extract_hash_answer,
    extract_xml_answer,
    int_reward_func,
    soft_format_reward_func,
    strict_format_reward_func,
    xmlcount_reward_func,
)
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
STRICT = "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>\n"
RIGHT = STRICT.format("48 / 2 = 24\n\n48 + 24 = 72", "72")
COMPLETIONS = ["one", "two", "three"]


def score(
    *funcs: Any, completions: list[Any] | None = None, timeout: float = 10.0, state: Any = None, **columns: list[Any]
) -> Scores:
    completions = COMPLETIONS if completions is None else completions
    count = len(completions)
    scorer = RewardScorer(list(funcs), None, timeout)
    return scorer.score(["p"] * count, completions, [[7]] * count, columns, state)


def returning(result: Any) -> Any:
    return lambda completions, **kwargs: result


def rewards_of(result: Any) -> list[float | None]:
    return score(returning(result)).rewards["<lambda>"]


def sleeper(seconds: float) -> Any:
    async def wait_and_reward(completions: list[Any], **kwargs: Any) -> list[float]:
        await asyncio.sleep(seconds)
        return [seconds] * len(completions)

    return wait_and_reward


def never_returns(completions: list[Any], **kwargs: Any) -> list[float]:
    threading.Event().wait()
    return []


def run_script(body: str) -> "subprocess.Popen[str]":
    head = "import asyncio, threading\nfrom lowmem_grpo.rewards import RewardScorer, RewardError\n"
    return subprocess.Popen([sys.executable, "-c", head + body], cwd=ROOT, text=True, stdout=-1, stderr=-1)


# What may be given as a reward function


def test_names_are_readable_and_no_two_functions_share_one() -> None:
    class Judge:
        def __call__(self, **kwargs: Any) -> list[float]:
            return [0.0]

    once = functools.partial(int_reward_func, scale=2)
    once.note = "partial does not flatten what has attributes"  # type: ignore[attr-defined]
    twice = functools.partial(once, scale=3)
    funcs: list[Any] = [int_reward_func, once, twice, Judge(), lambda **kwargs: [0.0]]
    names = ["int_reward_func", "int_reward_func_2", "int_reward_func_3", "Judge", "<lambda>"]
    assert RewardScorer(funcs, None, 1.0).names == names


def test_a_single_function_needs_no_list() -> None:
    assert RewardScorer(int_reward_func, None, 1.0).names == ["int_reward_func"]


@pytest.mark.parametrize("func", ["org/reward-model", ["org/reward-model"], [torch.nn.Linear(1, 1)]])
def test_reward_models_are_refused_with_a_way_out(func: Any) -> None:
    with pytest.raises(TypeError, match="reward models are not supported, give a function"):
        RewardScorer(func, None, 1.0)


def test_what_cannot_be_called_is_refused_before_training() -> None:
    with pytest.raises(TypeError, match="int, which cannot be called"):
        RewardScorer([3], None, 1.0)  # type: ignore[list-item]


def test_an_empty_list_of_functions_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="empty"):
        RewardScorer([], None, 1.0)


def test_a_wrong_number_of_weights_is_refused_and_the_default_is_one_each() -> None:
    with pytest.raises(ValueError, match="2 reward weights for 1 reward functions"):
        RewardScorer([int_reward_func], [1.0, 2.0], 1.0)
    assert RewardScorer([int_reward_func, int_reward_func], None, 1.0).weights == [1.0, 1.0]


def test_weights_that_pay_nothing_are_taken() -> None:
    with pytest.raises(ValueError, match=r"reward_weights is \[0\.0, 0\.0\]: nothing pays; weight 0 only logs"):
        RewardScorer([int_reward_func, int_reward_func], [0, 0.0])


# What a function is called with


def test_every_argument_of_the_contract_arrives_and_prompt_columns_are_left_out_as_in_trl() -> None:
    seen: dict[str, Any] = {}

    def keep(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 3

    state = SimpleNamespace(global_step=5)
    score(keep, state=state, answer=["1", "2", "3"], prompt=["x"] * 3, completion=["x"] * 3)
    assert callable(seen.pop("log_extra")) and callable(seen.pop("log_metric"))
    assert seen.pop("trainer_state") is state
    ids = [[7], [7], [7]]
    assert seen == {"prompts": ["p"] * 3, "completions": COMPLETIONS, "completion_ids": ids, "answer": ["1", "2", "3"]}


def test_a_function_without_kwargs_gets_only_what_it_names() -> None:
    def named(completions: list[str], level: list[int], unused: int = 3) -> list[float]:
        return [float(unused * number) for number in level]

    assert score(named, level=[1, 2, 3], other=[0, 0, 0]).rewards == {"named": [3.0, 6.0, 9.0]}


def test_a_missing_column_names_function_column_and_what_there_is_before_any_function_runs() -> None:
    calls: list[int] = []

    def first(**kwargs: Any) -> list[float]:
        calls.append(1)
        return [0.0] * 3

    def second(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * 3

    with pytest.raises(RewardError, match=r"second requires solution, .*available are prompts, .*answer, "):
        score(first, second, answer=["1", "2", "3"])
    assert not calls


def test_a_column_named_like_an_argument_or_of_another_length_is_refused() -> None:
    with pytest.raises(RewardError, match=r"columns \['trainer_state'\] .* rename"):
        score(returning([0.0] * 3), trainer_state=["a", "b", "c"])
    with pytest.raises(RewardError, match=r"3 completions .*\{'answer': 2\}"):
        score(returning([0.0] * 3), answer=["1", "2"])


def test_context_variables_of_the_caller_are_visible_in_reward_functions() -> None:
    run_name: contextvars.ContextVar[float] = contextvars.ContextVar("run_name", default=0.0)
    run_name.set(4.0)

    async def later(**kwargs: Any) -> list[float]:
        return [run_name.get()] * 3

    assert score(lambda **kwargs: [run_name.get()] * 3, later).rewards == {"<lambda>": [4.0] * 3, "later": [4.0] * 3}


# What a function may return


def test_none_stays_none_even_for_every_completion_and_is_not_counted_invalid() -> None:
    scores = score(returning([None, None, None]))
    assert scores.rewards == {"<lambda>": [None, None, None]} and scores.invalid == {"<lambda>": 0}


def test_nan_and_infinity_become_none_and_are_counted() -> None:
    scores = score(returning([math.nan, math.inf, 1.0]), returning(torch.tensor([1.0, -math.inf, 2.0])))
    assert scores.rewards == {"<lambda>": [None, None, 1.0], "<lambda>_2": [1.0, None, 2.0]}
    assert scores.invalid == {"<lambda>": 2, "<lambda>_2": 1}


@pytest.mark.parametrize("result", [
    (True, 0, 2), [np.float32(1), np.int64(0), np.float64(2)], [torch.tensor(1), torch.tensor(False), np.array(2.0)],
    np.array([1, 0, 2]), torch.tensor([1.0, 0.0, 2.0], requires_grad=True),
])
def test_numbers_of_any_library_become_floats(result: Any) -> None:
    rewards = rewards_of(result)
    assert rewards == [1.0, 0.0, 2.0] and all(type(value) is float for value in rewards)


@pytest.mark.parametrize(("result", "kinds"), [
    ([True, False, 1.0], "bool"), (np.array([True, False, True]), "bool and ndarray"), (torch.ones(3), "Tensor"),
    ([torch.tensor(1.0), np.float32(2), 3], "Tensor and float32"),
])
def test_a_conversion_is_not_said_or_said_again_at_each_step(
    result: Any, kinds: str, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = RewardScorer([returning(result), int_reward_func])
    for _ in range(2):
        scores = scorer.score(["p"] * 3, COMPLETIONS, [[7]] * 3, {}, None)
        assert scores.converted == {"<lambda>": kinds.split(" and ")}
    assert caplog.text.count(f"reward function <lambda> returned {kinds}, taken as floats") == 1


@pytest.mark.parametrize("result", [[1, 0, None], [0.5, np.float64(1), 2], (1, 2, 3)])
def test_plain_numbers_are_called_converted(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert score(returning(result)).converted == {} and not caplog.text


@pytest.mark.parametrize(("result", "kind"), [
    (["1", 0, 0], "str"), ([1j, 0, 0], "complex"), ([[1], [2], [3]], "list"), (torch.ones(3, 1), "list"),
    (None, "NoneType"), ("abc", "str"), (1.0, "float"), (torch.tensor(1.0), "Tensor"), ({}, "dict"),
    (map(float, [1, 2, 3]), "map"),
])
def test_a_result_of_a_wrong_type_is_named(result: Any, kind: str) -> None:
    with pytest.raises(RewardError, match=f"reward function <lambda> returned a wrong result: .* not {kind}$"):
        rewards_of(result)


@pytest.mark.parametrize("result", [[torch.ones(2), 0, 0], [10**400, 0, 0]])
def test_a_value_that_fails_to_convert_is_a_reward_error(result: Any) -> None:
    with pytest.raises(RewardError, match="reward function <lambda> returned a wrong result"):
        rewards_of(result)


@pytest.mark.parametrize("result", [[], [1.0, 2.0], [1.0] * 4])
def test_a_wrong_number_of_rewards_says_got_and_expected(result: list[float]) -> None:
    with pytest.raises(RewardError, match=f"<lambda> returned {len(result)} rewards, expected 3"):
        rewards_of(result)


# What a function may log


def test_logged_columns_and_means_of_metrics_come_back_from_plain_and_async_functions() -> None:
    def plain(log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        log_extra("length", np.array([3, 3, 5]))
        log_metric("accuracy", 1)
        return [0.0] * 3

    async def later(log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("accuracy", torch.tensor(0.0))
        return [0.0] * 3

    scores = score(plain, later)
    assert scores.extras == {"length": [3, 3, 5]} and scores.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize(("call", "message"), [
    (lambda kwargs: kwargs["log_extra"]("length", [1]), r"log_extra\('length'\) got 1 values, expected 3"),
    (lambda kwargs: kwargs["log_metric"]("accuracy", None), r"log_metric\('accuracy'\) got None"),
    (lambda kwargs: kwargs["log_metric"]("accuracy", "high"), "not str"),
])
def test_logging_something_else_is_a_reward_error(call: Any, message: str) -> None:
    def logs(**kwargs: Any) -> list[float]:
        call(kwargs)
        return [0.0] * 3

    with pytest.raises(RewardError, match=f"reward function logs raised .*{message}"):
        score(logs)


# Weight 0: a metric alone


def scored(weights: list[float], *funcs: Any) -> tuple[list[Any], dict[str, float]]:
    """The four rollouts of a group, "0" to "3", scored as in a run, and what was logged."""
    rollouts = [Rollout([7], [-1.0], "stop", text=str(number)) for number in range(4)]
    config = GRPOConfig(reward_weights=weights, num_generations=4, scale_rewards="none")
    group = RolloutGroup({"prompt": "p"}, [1], rollouts)
    scoring = Scoring(RewardScorer(list(funcs), weights), config, TrainerState())
    logged = scoring.apply([group], scoring.begin([group]).settle([group]))
    return rollouts, logged


def test_a_function_of_weight_0_changes_advantages_or_is_not_recorded() -> None:
    def paying(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, 1.0, 2.0, 3.0]

    def metric(completions: list[str], **kwargs: Any) -> list[float]:
        return [9.0, math.nan, 5.0, 2.0]

    alone, _ = scored([1.0], paying)
    both, logged = scored([1.0, 0.0], paying, metric)
    assert [r.advantage for r in both] == [r.advantage for r in alone] == [0.0, -1.0, 0.0, 1.0]
    assert [r.reward for r in both] == [r.reward for r in alone] == [None, 1.0, 2.0, 3.0]
    assert [r.rewards["metric"] for r in both] == [9.0, None, 5.0, 2.0]
    assert logged["rewards/metric/invalid"] == 1 and not any(r.invalid_rewards for r in both)
    paid, _ = scored([1.0, 1.0], paying, metric)
    assert [r.invalid_rewards for r in paid][1].keys() == {"metric"}


# Failures


async def fails_later(**kwargs: Any) -> list[float]:
    raise KeyError("gold")


def fails(**kwargs: Any) -> list[float]:
    raise KeyError("gold")


@pytest.mark.parametrize("func", [fails, fails_later])
def test_a_raising_function_is_named_with_its_error_and_the_first_completion(func: Any) -> None:
    message = f"reward function {func.__name__} raised KeyError: 'gold'; the first completion begins 'one'"
    with pytest.raises(RewardError, match=message) as caught:
        score(func)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failure_with_no_completions_at_all_is_still_a_reward_error() -> None:
    assert score(returning([]), completions=[]).rewards == {"<lambda>": []}
    with pytest.raises(RewardError, match="fails raised"):
        score(fails, completions=[])


def test_sys_exit_in_a_function_is_an_error_and_not_the_silent_end_of_training() -> None:
    async def leaves_later(**kwargs: Any) -> None:
        sys.exit(3)

    async def cancels(**kwargs: Any) -> None:
        raise asyncio.CancelledError

    for func in (lambda **kwargs: sys.exit(3), leaves_later, cancels):
        with pytest.raises(RewardError, match="raised"):
            score(func)


# Time


@pytest.mark.parametrize("func", [never_returns, sleeper(60)])
def test_a_function_that_never_returns_ends_with_an_error_that_says_how_to_allow_more_time(func: Any) -> None:
    started = time.monotonic()
    message = rf"{func.__name__} did not return within 0.2 s; raise the limit with GRPOConfig\(reward_timeout=\.\.\.\)"
    with pytest.raises(RewardError, match=message):
        score(func, timeout=0.2)
    assert 0.15 < time.monotonic() - started < 2


def test_an_async_function_that_blocks_the_loop_cannot_outlast_the_limit() -> None:
    async def blocks(**kwargs: Any) -> None:
        time.sleep(1)

    with pytest.raises(RewardError, match=r"blocks did not return within 0\.2 s"):
        score(blocks, timeout=0.2)


def test_a_late_async_function_is_stopped() -> None:
    stopped = threading.Event()

    async def waits(**kwargs: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    scorer = RewardScorer([waits], None, 0.1)
    with pytest.raises(RewardError, match="did not return"):
        scorer.score([], [], [], {}, None)
    assert stopped.wait(5)


def test_a_timeout_error_of_the_function_itself_is_not_taken_for_the_limit() -> None:
    def asks_a_judge(**kwargs: Any) -> None:
        raise TimeoutError("judge")

    with pytest.raises(RewardError, match="asks_a_judge raised TimeoutError: judge"):
        score(asks_a_judge)


def test_async_functions_wait_side_by_side() -> None:
    started = time.monotonic()
    scores = score(sleeper(0.2), sleeper(0.2))
    assert time.monotonic() - started < 0.35
    assert scores.rewards == {"wait_and_reward": [0.2] * 3, "wait_and_reward_2": [0.2] * 3}


def test_a_failing_async_function_does_not_wait_for_the_slow_ones() -> None:
    started = time.monotonic()
    with pytest.raises(RewardError, match="fails_later raised"):
        score(sleeper(60), fails_later)
    assert time.monotonic() - started < 5


def test_async_callables_are_awaited_whatever_their_form() -> None:
    class Judge:
        async def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
            return [1.0] * len(completions)

    scores = score(Judge(), functools.partial(sleeper(0), extra=1))
    assert scores.rewards == {"Judge": [1.0] * 3, "wait_and_reward": [0.0] * 3}


def test_an_async_client_kept_between_steps_finds_its_event_loop_again() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def keeps(completions: list[Any], **kwargs: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    scorer = RewardScorer([keeps], None, 5.0)
    for _ in range(2):
        scorer.score([], [], [], {}, None)
    assert loops[0] is loops[1] and not loops[0].is_closed()
    del scorer
    for _ in range(50):
        time.sleep(0 if loops[0].is_closed() else 0.1)
    assert loops[0].is_closed()


def test_scoring_works_inside_a_notebooks_running_event_loop() -> None:
    async def notebook_cell() -> Scores:
        return score(sleeper(0), returning([1.0] * 3))

    assert asyncio.run(notebook_cell()).rewards["wait_and_reward"] == [0.0] * 3


def test_a_stuck_function_does_not_keep_the_process_from_exiting() -> None:
    script = run_script(
        "async def later(**kwargs): await asyncio.sleep(60)\n"
        "async def blocks(**kwargs): threading.Event().wait()\n"
        "scorers = [RewardScorer(f, None, 0.1) for f in (lambda **kwargs: threading.Event().wait(), later, blocks)]\n"
        "for scorer in scorers:\n"
        "    try: scorer.score([], [], [], {}, None)\n"
        "    except RewardError as error: print(error)\n"
    )
    out, err = script.communicate(timeout=30)
    assert out.count("did not return within 0.1 s") == 3 and script.returncode == 0 and not err


def test_ctrl_c_ends_the_wait_for_a_reward_function() -> None:
    script = run_script(
        "def stuck(**kwargs):\n    print('waiting', flush=True)\n    threading.Event().wait()\n"
        "RewardScorer([stuck], None, 600).score([], [], [], {}, None)\n"
    )
    assert script.stdout is not None and script.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    script.send_signal(signal.SIGINT)
    _, err = script.communicate(timeout=30)
    assert "KeyboardInterrupt" in err and script.returncode != 0


# GSM8K


def gsm8k(func: Any, text: str, label: Any = "72") -> float:
    """The reward of `text`, which must be the same for a string and for a chat completion."""
    chat = [{"role": "assistant", "content": text}]
    plain, chatted = func(prompts=["p"] * 2, completions=[text, chat], answer=[label] * 2, trainer_state=None)
    assert plain == chatted
    return plain


@pytest.mark.parametrize(("text", "label", "expected"), [
    (RIGHT, "72", 2.0), (RIGHT, " 72\n", 2.0), (RIGHT, 72, 2.0), (RIGHT, "71", 0.0), (RIGHT, None, 0.0),
    ("72", "72", 0.0), ("<answer>72", "72", 0.0), ("", "", 0.0), ("<answer></answer>", "", 0.0),
    ("<answer>7</answer> no, <answer>72</answer>", "72", 2.0), ("<answer>72</answer> and <answer>", "72", 2.0),
])
def test_correctness_pays_for_the_tagged_answer_only(text: str, label: Any, expected: float) -> None:
    assert gsm8k(correctness_reward_func, text, label) == expected


@pytest.mark.parametrize(("answer", "expected"), [
    ("72", 0.5), ("-72", 0.5), (" 72 ", 0.5), ("72.5", 0.0), ("seventy-two", 0.0), ("", 0.0), ("7 2", 0.0), ("²", 0.0),
])
def test_int_pays_for_integers_only(answer: str, expected: float) -> None:
    assert gsm8k(int_reward_func, f"<answer>\n{answer}\n</answer>") == expected
    assert gsm8k(int_reward_func, answer) == 0.0


@pytest.mark.parametrize(("text", "strict", "soft"), [
    (RIGHT, 0.5, 0.5), (STRICT.format("one line", "72"), 0.5, 0.5), (STRICT.format("r", "7\n2"), 0.5, 0.5),
    (RIGHT[:-1], 0.0, 0.5), (RIGHT + "\n", 0.0, 0.5), (RIGHT + "so", 0.0, 0.5), (RIGHT * 2, 0.0, 0.5),
    ("<reasoning>a\nb</reasoning>  <answer>1</answer>", 0.0, 0.5), ("Sure! " + RIGHT, 0.0, 0.0),
    ("<reasoning>a</reasoning> so <answer>1</answer>", 0.0, 0.0), ("<reasoning>a</reasoning><answer>1", 0.0, 0.0),
    ("<answer>1</answer><reasoning>a</reasoning>", 0.0, 0.0), ("72", 0.0, 0.0), ("", 0.0, 0.0),
])
def test_formats_pay_for_multi_line_blocks_and_not_for_broken_ones(text: str, strict: float, soft: float) -> None:
    assert (gsm8k(strict_format_reward_func, text), gsm8k(soft_format_reward_func, text)) == (strict, soft)


@pytest.mark.parametrize(("text", "expected"), [
    (RIGHT[:-1], 0.5), (RIGHT, 0.499), (RIGHT[:-1] + "x" * 100, 0.4), ("<reasoning>a</reasoning>", 0.25),
    ("<answer>1</answer><answer>", 0.125 - 0.008), ("</answer>" + "x" * 200, 0.125 - 0.2), ("72", 0.0), ("", 0.0),
    ("<answer>1</answer>" * 2, -0.018),
])
def test_xmlcount_pays_per_tag_and_charges_for_text_behind_the_answer(text: str, expected: float) -> None:
    assert gsm8k(xmlcount_reward_func, text) == pytest.approx(expected)


def test_chat_completions_are_read_from_the_last_message_and_other_shapes_are_refused() -> None:
    turns = [{"role": "assistant", "content": None}, {"role": "tool", "content": "x"}]
    assert int_reward_func([[*turns, {"role": "assistant", "content": RIGHT}], turns[:1]]) == [0.5, 0.0]
    for broken in (3, [], [3], [{"content": ["part"]}]):
        with pytest.raises(TypeError, match="a string or a list of chat messages"):
            int_reward_func([broken])


def test_the_five_functions_run_under_the_scorer() -> None:
    five = [
        correctness_reward_func, int_reward_func, strict_format_reward_func, soft_format_reward_func,
        xmlcount_reward_func,
    ]
    scores = score(*five, completions=[RIGHT, "72"], answer=["72", "72"])
    assert list(scores.rewards) == [func.__name__ for func in five]
    assert list(zip(*scores.rewards.values(), strict=True)) == [(2.0, 0.5, 0.5, 0.5, pytest.approx(0.499)), (0.0,) * 5]


def test_answers_are_extracted_as_text_and_labels_as_plain_numbers() -> None:
    assert (extract_xml_answer(RIGHT), extract_xml_answer("none")) == ("72", "")
    assert extract_hash_answer("5 * 2 = 10\n#### 1,234,567 ") == "1234567"
    assert extract_hash_answer("no label") is None


def test_the_system_prompt_shows_the_format_that_is_rewarded() -> None:
    assert soft_format_reward_func([SYSTEM_PROMPT[SYSTEM_PROMPT.index("<reasoning>"):]]) == [0.5]


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not here")
def test_every_gsm8k_label_is_an_integer_that_its_own_answer_satisfies() -> None:
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    labels = [extract_hash_answer(row["answer"]) for row in rows]
    assert len(labels) == 7473 and all(label is not None and str(int(label)) == label for label in labels)
    completions = [STRICT.format(row["answer"], label) for row, label in zip(rows, labels, strict=True)]
    assert set(correctness_reward_func([], completions, labels)) == {2.0}
    assert set(strict_format_reward_func(completions)) == {0.5}
