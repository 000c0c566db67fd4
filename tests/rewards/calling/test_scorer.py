"""The scorer: which functions it takes, how it calls them, what they may return and log, how they fail, how long."""

import asyncio
import contextvars
import functools
import math
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tables import every_row

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.rewards import RewardError, RewardScorer, Scores, int_reward_func
from lowmem_grpo.rewards.calling import calls
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup

ROOT = Path(__file__).parents[3]
COMPLETIONS = ["one", "two", "three"]


def score(
    *funcs: Any, completions: list[Any] | None = None, timeout: float = 60.0, state: Any = None, **columns: list[Any]
) -> Scores:
    completions = COMPLETIONS if completions is None else completions
    count = len(completions)
    scorer = RewardScorer(list(funcs), None, timeout)
    return scorer.score(["p"] * count, completions, [[7]] * count, columns, state)


def returning(result: Any) -> Any:
    return lambda completions, **kwargs: result


async def waits(**kwargs: Any) -> None:
    """Until it is stopped."""
    await asyncio.Event().wait()


async def zeros(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def script(body: str) -> list[str]:
    """The command of a program that scores."""
    head = "import asyncio, threading\nfrom lowmem_grpo.rewards import RewardScorer, RewardError\n"
    return [sys.executable, "-c", head + body]


# What may be given as a reward function


def test_names_are_readable_and_no_two_functions_share_one() -> None:
    class Judge:
        def __call__(self, **kwargs: Any) -> None:
            """It is not called."""

    once = functools.partial(int_reward_func, scale=2)
    once.note = "partial does not flatten what has attributes"  # type: ignore[attr-defined]
    twice = functools.partial(once, scale=3)
    funcs: list[Any] = [int_reward_func, once, twice, Judge(), lambda **kwargs: [0.0]]
    names = ["int_reward_func", "int_reward_func_2", "int_reward_func_3", "Judge", "<lambda>"]
    assert RewardScorer(funcs).names == names
    assert RewardScorer(int_reward_func).names == ["int_reward_func"], "a single function needs no list"
    assert RewardScorer([int_reward_func, int_reward_func]).weights == [1.0, 1.0]


@every_row(("funcs", "weights", "error", "message"), [
    ([3], None, TypeError, "int, which cannot be called"), ([], None, ValueError, "empty"),
    ([int_reward_func], [1.0, 2.0], ValueError, "reward_weights has 2 numbers for 1 reward function"),
    ([int_reward_func] * 2, [0, 0.0], ValueError, r"\[0\.0, 0\.0\]: nothing pays; weight 0 only logs"),
])
def test_what_cannot_be_called_or_pays_nothing_is_refused_before_training(
    funcs: Any, weights: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RewardScorer(funcs, weights)


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
    scores = score(lambda level, unused=3: [unused * number for number in level], level=[1, 2, 3], other=[0, 0, 0])
    assert scores.rewards == {"<lambda>": [3.0, 6.0, 9.0]}


def test_a_missing_column_names_function_column_and_what_there_is_before_any_function_runs() -> None:
    calls: list[int] = []

    def first(**kwargs: Any) -> list[float]:
        calls.append(1)
        return [0.0] * 3

    with pytest.raises(RewardError, match=r"<lambda> requires solution, .*available are prompts, .*answer, "):
        score(first, lambda completions, solution, **kwargs: [0.0] * 3, answer=["1", "2", "3"])
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


@pytest.mark.parametrize(("result", "rewards", "invalid"), [
    ([None, None, None], [None, None, None], 0), ([math.nan, math.inf, 1.0], [None, None, 1.0], 2),
    (torch.tensor([1.0, -math.inf, 2.0]), [1.0, None, 2.0], 1), ([], [], 0),
])
def test_none_stays_none_and_nan_and_infinity_become_none_and_are_counted(
    result: Any, rewards: list[float | None], invalid: int
) -> None:
    scores = score(returning(result), completions=["one"] * len(rewards))
    assert scores.rewards == {"<lambda>": rewards} and scores.invalid == {"<lambda>": invalid}


@every_row("result", [
    (True, 0, 2), [np.float32(1), np.int64(0), np.float64(2)], [torch.tensor(1), torch.tensor(False), np.array(2.0)],
    np.array([1, 0, 2]), torch.tensor([1.0, 0.0, 2.0], requires_grad=True),
])
def test_numbers_of_any_library_become_floats(result: Any) -> None:
    rewards = score(returning(result)).rewards["<lambda>"]
    assert rewards == [1.0, 0.0, 2.0] and all(type(value) is float for value in rewards)


@pytest.mark.parametrize(("result", "kinds"), [
    ([True, False, 1.0], "bool"), (np.array([True, False, True]), "bool and ndarray"), (torch.ones(3), "Tensor"),
    ([torch.tensor(1.0), np.float32(2), 3], "Tensor and float32"),
    ([1, 0, None], ""), ([0.5, np.float64(1), 2], ""), ((1, 2, 3), ""),
])
def test_a_conversion_is_said_once_and_plain_numbers_are_none(
    result: Any, kinds: str, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = RewardScorer([returning(result), int_reward_func])
    for _ in range(2):
        scores = scorer.score(["p"] * 3, COMPLETIONS, [[7]] * 3, {}, None)
        assert scores.converted == ({"<lambda>": kinds.split(" and ")} if kinds else {})
    said = [f"reward function <lambda> returned {kinds}, taken as floats"] if kinds else []
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == said


@every_row(("result", "kind"), [
    (["1", 0, 0], "str"), ([1j, 0, 0], "complex"), ([[1], [2], [3]], "list"), (torch.ones(3, 1), "list"),
    (None, "NoneType"), ("abc", "str"), (1.0, "float"), (torch.tensor(1.0), "Tensor"), ({}, "dict"),
    (map(float, [1, 2, 3]), "map"), ([torch.ones(2), 0, 0], ""), ([10**400, 0, 0], ""),  # these fail to convert
])
def test_a_result_of_a_wrong_type_is_named(result: Any, kind: str) -> None:
    end = f" not {kind}$" if kind else ""
    with pytest.raises(RewardError, match=f"reward function <lambda> returned a wrong result: .*{end}"):
        score(returning(result))


def test_a_wrong_number_of_rewards_says_got_and_expected() -> None:
    for count in (0, 2, 4):
        with pytest.raises(RewardError, match=f"<lambda> returned {count} rewards, expected 3"):
            score(returning([1.0] * count))


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


# Weight 0: only a metric


def scored(weights: list[float], *funcs: Any) -> tuple[list[Any], dict[str, float]]:
    """Four rollouts of a group, scored as in a run, and what was logged."""
    rollouts = [Rollout([7], [-1.0], "stop") for _ in range(4)]
    config = GRPOConfig(reward_weights=weights, num_generations=4, scale_rewards="none")
    group = RolloutGroup({"prompt": "p"}, [1], rollouts)
    scoring = Scoring(RewardScorer(list(funcs), weights), config, TrainerState())
    logged = scoring.apply([group], scoring.start_batch([group]).settle([group]))
    return rollouts, logged


def test_a_function_of_weight_0_is_recorded_and_changes_no_advantage() -> None:
    paying, metric = returning([None, 1.0, 2.0, 3.0]), returning([9.0, math.nan, 5.0, 2.0])
    both, logged = scored([1.0, 0.0], paying, metric)
    assert [r.advantage for r in both] == [0.0, -1.0, 0.0, 1.0]
    assert [r.reward for r in both] == [None, 1.0, 2.0, 3.0]
    assert [r.rewards["<lambda>_2"] for r in both] == [9.0, None, 5.0, 2.0]
    assert logged["rewards/<lambda>_2/invalid"] == 1 and not any(r.invalid_rewards for r in both)
    paid, _ = scored([1.0, 1.0], paying, metric)
    assert [r.invalid_rewards for r in paid][1].keys() == {"<lambda>_2"}


# Failures


async def fails_later(**kwargs: Any) -> list[float]:
    raise KeyError("gold")


def asks_a_judge(**kwargs: Any) -> list[float]:
    raise TimeoutError("judge")  # not the limit of the run


@pytest.mark.parametrize(("func", "error"), [(asks_a_judge, "TimeoutError: judge"), (fails_later, "KeyError: 'gold'")])
def test_a_raising_function_is_named_with_its_error_and_the_first_completion(func: Any, error: str) -> None:
    message = f"reward function {func.__name__} raised {error}; the first completion begins 'one'"
    with pytest.raises(RewardError, match=message) as caught:
        score(func)
    assert type(caught.value.__cause__).__name__ == error.partition(":")[0]
    with pytest.raises(RewardError, match=f"{func.__name__} raised"):
        score(func, completions=[])


def test_an_environment_that_could_not_be_made_is_told_where_a_function_stumbles_over_it() -> None:
    with pytest.raises(RewardError, match=r"'NoneType' .*environments holds None for each that could not be made"):
        score(lambda environments: [each.reward for each in environments], environments=[None] * 3)


def test_sys_exit_in_a_function_is_an_error_and_not_the_silent_end_of_training() -> None:
    async def leaves_later(**kwargs: Any) -> None:
        sys.exit(3)

    async def cancels(**kwargs: Any) -> None:
        raise asyncio.CancelledError

    for func in (lambda **kwargs: sys.exit(3), leaves_later, cancels):
        with pytest.raises(RewardError, match="raised"):
            score(func)


# Time


@pytest.mark.parametrize("kind", ["plain", "elsewhere", "async", "blocking"])
def test_a_function_that_never_returns_ends_with_an_error_that_says_how_to_allow_more_time(kind: str) -> None:
    end = threading.Event()

    def never_returns(**kwargs: Any) -> None:
        assert end.wait(60)

    async def blocks(**kwargs: Any) -> None:
        """The event loop cannot go on."""
        never_returns()

    def elsewhere() -> Scores:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(score, never_returns, timeout=0.05).result(60)

    func = {"async": waits, "blocking": blocks}.get(kind, never_returns)
    message = rf"{func.__name__} did not return within 0.05 s; raise the limit with GRPOConfig\(reward_timeout=\.\.\.\)"
    try:
        with pytest.raises(RewardError, match=message):
            elsewhere() if kind == "elsewhere" else score(func, timeout=0.05)
    finally:
        end.set()


def test_a_late_async_function_is_stopped_though_its_scorer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped = threading.Event(), threading.Event()

    async def is_stopped(**kwargs: Any) -> None:
        begun.set()
        try:
            await waits()
        finally:
            stopped.set()

    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: 1.0 + 1000.0 * begun.is_set()))
    with pytest.raises(RewardError, match="did not return"):
        score(is_stopped)
    assert stopped.wait(60)


def test_a_failing_async_function_does_not_wait_for_the_slow_ones() -> None:
    with pytest.raises(RewardError, match="fails_later raised"):
        score(waits, fails_later)


def test_async_callables_are_awaited_whatever_their_form() -> None:
    class Judge:
        async def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
            return [1.0] * len(completions)

    scores = score(Judge(), functools.partial(zeros, extra=1))
    assert scores.rewards == {"Judge": [1.0] * 3, "zeros": [0.0] * 3}


def test_an_async_client_kept_between_steps_finds_its_event_loop_again() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    threads: list[threading.Thread] = []

    async def keeps(completions: list[Any], **kwargs: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        threads.append(threading.current_thread())
        return [0.0] * len(completions)

    scorer = RewardScorer([keeps])
    for _ in range(2):
        scorer.score([], [], [], {}, None)
    assert loops[0] is loops[1] and not loops[0].is_closed()
    del scorer
    threads[0].join(60)
    assert loops[0].is_closed()


def test_scoring_works_inside_a_notebooks_running_event_loop() -> None:
    async def notebook_cell() -> Scores:
        return score(zeros, returning([1.0] * 3))

    assert asyncio.run(notebook_cell()).rewards["zeros"] == [0.0] * 3


@pytest.mark.slow
def test_a_stuck_function_does_not_keep_the_process_from_exiting() -> None:
    """Each is late as soon as it has begun."""
    ended = subprocess.run(script(
        "from types import SimpleNamespace\n"
        "from lowmem_grpo.rewards.calling import calls\n"
        "begun = []\n"
        "calls.time = SimpleNamespace(monotonic=lambda: 1.0 + 1000.0 * len(begun))\n"
        "def never(**kwargs): begun.append(1) or threading.Event().wait()\n"
        "async def later(**kwargs): begun.append(1) or await asyncio.Event().wait()\n"
        "async def blocks(**kwargs): never()\n"
        "scorers = [RewardScorer(func) for func in (never, later, blocks)]\n"
        "def score_all():\n"
        "    for scorer in scorers:\n"
        "        try: scorer.score([], [], [], {}, None)\n"
        "        except RewardError as error: print(error)\n"
        "thread = threading.Thread(target=score_all)\n"
        "thread.start()\n"
        "thread.join()\n"
    ), cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.count("did not return within 60 s") == 3 and not ended.stderr


def test_plain_functions_may_use_signal_alarm_and_what_is_built_on_it_as_in_trl() -> None:
    """math-verify swallows the error that signal.alarm raises in other threads: each right answer would be paid 0."""
    ended = subprocess.run(script(
        "import signal, time\n"
        "from math_verify import parse, verify\n"
        "def verified(completions, **kwargs): return [float(verify(parse('$3$'), parse(c))) for c in completions]\n"
        "def rings(*_): raise TimeoutError\n"
        "def cut_off(completions, **kwargs):\n"
        "    signal.signal(signal.SIGALRM, rings)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "    try: threading.Event().wait()\n"
        "    except TimeoutError: return [0.5] * len(completions)\n"
        "print(RewardScorer([verified, cut_off]).score([0, 0], ['$3$', '$4$'], [[1], [1]], {}, None).rewards)\n"
    ), cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "{'verified': [1.0, 0.0], 'cut_off': [0.5, 0.5]}\n"


def test_a_late_function_is_ended_whatever_it_catches_and_leaves_no_handler_behind(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[type[BaseException]] = []

    def catches(kind: type[BaseException]) -> Any:
        def func(**kwargs: Any) -> list[float]:
            while len(caught) < 2:
                try:
                    threading.Event().wait()
                except kind as error:
                    caught.append(type(error))
            return [0.0] * 3

        return func

    monkeypatch.setattr(calls, "AGAIN", 0.01)
    for kind in (Exception, BaseException):
        with pytest.raises(RewardError, match=r"did not return within 0\.01 s"):
            score(catches(kind), timeout=0.01)
    assert caught == [calls.OverTime] * 2
    assert signal.getsignal(calls.SIGNAL) is signal.SIG_DFL


def test_a_function_without_a_limit_is_not_watched_and_runs_in_the_main_thread() -> None:
    seen: list[Any] = []

    def looks(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.append((threading.current_thread(), signal.getsignal(calls.SIGNAL)))
        return [0.0] * len(completions)

    assert GRPOConfig(reward_timeout=None).reward_limit == math.inf
    score(looks, timeout=math.inf)
    assert seen == [(threading.main_thread(), signal.SIG_DFL)]


def test_ctrl_c_ends_the_wait_for_a_reward_function() -> None:
    with subprocess.Popen(script(
        "def stuck(**kwargs):\n    print('waiting', flush=True)\n    threading.Event().wait()\n"
        "RewardScorer([stuck], None, 600).score([], [], [], {}, None)\n"
    ), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in err and process.returncode != 0
