"""Calls reward functions under TRL's contract, each within a time limit, and checks what they return.

A function is called by keyword with `prompts`, `completions` and `completion_ids`, a list for every dataset column,
`trainer_state`, `log_extra(column, values)` and `log_metric(name, value)`. It returns one number or None per
completion; booleans, tensors and arrays are taken as numbers, which a warning says once, anything else is refused.
Without **kwargs it gets only the arguments that it names.

Plain functions run one after another, each in a daemon thread; async ones together, in one event loop that lives as
long as the scorer, so that a client kept between steps stays usable. A notebook's running loop is no obstacle, and a
function that never returns holds up nothing. Not available in these threads: signal.alarm, and what is built on it.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.rewards.verifier import Verifier

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]

RESERVED = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")  # no column may have these names
NOT_PASSED = ("prompt", "completion", "completion_ids")  # columns left out, as in TRL: the arguments carry them
POLL_SECONDS = 0.1  # between looks for failures, and for Ctrl-C, which some systems deliver only between waits


class RewardError(RuntimeError):
    """A reward function raised, took too long, lacked an argument or returned what is not a list of rewards."""


class MissingColumnError(RewardError):
    """A reward function requires an argument that no dataset column provides."""


class TooLateError(RewardError):
    """A reward function did not return within its time limit."""


@dataclass
class Scores:
    """What the functions made of N completions."""

    rewards: dict[str, list[float | None]]  # (N,) of each function; None: does not apply, or was not finite
    invalid: dict[str, int]  # how many NaN and infinite values of each function became None
    extras: dict[str, list[Any]]  # (N,) of each column passed to log_extra
    metrics: dict[str, float]  # means over the calls of log_metric
    returned: dict[str, list[float | None]] = field(default_factory=dict)  # with NaN and infinity
    converted: dict[str, list[str]] = field(default_factory=dict)  # types that each function returned beside numbers


@dataclass
class Recorder:
    """Collects what functions log while one batch of completions is scored."""

    num_completions: int
    extras: dict[str, list[Any]] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep one value per completion; a second call for the same column replaces the first."""
        values = as_list(values)
        if len(values) != self.num_completions:
            raise RewardError(f"log_extra({column!r}) got {len(values)} values, expected {self.num_completions}")
        self.extras[column] = values

    def log_metric(self, name: str, value: Any) -> None:
        """Keep one number towards the mean of `name`."""
        if (number := as_number(value)) is None:
            raise RewardError(f"log_metric({name!r}) got None, expected a number")
        self.values[name].append(number)


class RewardScorer:
    """A fixed set of reward functions, with the names and the weights of their rewards."""

    def __init__(
        self, reward_funcs: RewardFunction | list[RewardFunction] | tuple[RewardFunction, ...],
        weights: list[float] | None = None, timeout: float = 60.0,
    ) -> None:
        """Raises TypeError for what is not a function, ValueError for no functions or a wrong number of weights."""
        functions = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self.funcs: list[RewardFunction] = list(functions)
        if not self.funcs:
            raise ValueError("reward_funcs is empty; give at least one reward function")
        for func in self.funcs:
            check_function(func)
        self.names = unique_names([function_name(func) for func in self.funcs])
        self.weights = [1.0] * len(self.funcs) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"got {len(self.weights)} reward weights for {len(self.funcs)} reward functions")
        if not any(self.weights):
            raise ValueError(f"reward_weights is {self.weights}: nothing pays; weight 0 only logs a function's rewards")
        self.timeout = timeout
        self.said: set[str] = set()  # functions whose conversions have been told of
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]],
        columns: dict[str, list[Any]], trainer_state: Any,
    ) -> Scores:
        """Rewards of N completions; every list has length N. All failures leave as RewardError, in this thread."""
        recorder = Recorder(len(completions))
        lists = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        lists |= passed_columns(columns)
        check_lengths(lists, len(completions))
        shared = {"trainer_state": trainer_state, "log_extra": recorder.log_extra, "log_metric": recorder.log_metric}
        results = self._call_all({**lists, **shared}, completions)
        returned = {name: as_rewards(name, results[name], len(completions)) for name in self.names}
        converted = {name: kinds for name in self.names if (kinds := foreign_types(results[name]))}
        self._tell(converted)
        return Scores(
            rewards={name: [None if is_invalid(v) else v for v in values] for name, values in returned.items()},
            invalid={name: sum(map(is_invalid, values)) for name, values in returned.items()},
            extras=recorder.extras,
            metrics={name: sum(values) / len(values) for name, values in recorder.values.items()},
            returned=returned, converted=converted,
        )

    def _tell(self, converted: dict[str, list[str]]) -> None:
        """Say once of each function what was made into floats."""
        for name in converted.keys() - self.said:
            logger.warning(
                "reward function %s returned %s, taken as floats (True is 1.0, False 0.0); return a list of floats",
                name, " and ".join(converted[name]),
            )
            self.said.add(name)

    def _call_all(self, available: dict[str, Any], completions: list[Any]) -> dict[str, Any]:
        """What each function returned. Arguments of all are checked before the first is called."""
        bound = {name: bind(name, func, available) for name, func in zip(self.names, self.funcs, strict=True)}
        plain = {name: call for name, call in bound.items() if not is_async(call.func)}
        results: dict[str, Any] = {}
        for name, call in plain.items():
            results |= collect({name: start_thread(name, call)}, self.timeout, completions)
        started = {name: self._start_task(call) for name, call in bound.items() if name not in plain}
        return results | collect(started, self.timeout, completions)

    def _start_task(self, call: functools.partial[Any]) -> Future[Any]:
        """Start an async function in the scorer's event loop, which the first such call sets up."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=run_loop, args=(self._loop,), name="async rewards", daemon=True).start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return asyncio.run_coroutine_threadsafe(run_async(call), self._loop)


def check_function(func: Any) -> None:
    """Raises TypeError for a model or a model's name, a verifier, and anything else that cannot be called."""
    if isinstance(func, Verifier):
        raise TypeError(
            f"reward_funcs holds the verifier {func.name}, which says right or wrong and pays nothing; make a reward "
            "function of it with .reward(right=1.0, wrong=0.0)"
        )
    if isinstance(func, str) or any(cls.__module__.startswith("torch.nn.") for cls in type(func).__mro__):
        what = repr(func) if isinstance(func, str) else f"a {type(func).__name__}"
        raise TypeError(f"reward_funcs holds {what}; reward models are not supported, give a function that calls it")
    if not callable(func):
        raise TypeError(f"reward_funcs holds a {type(func).__name__}, which cannot be called; give a function")


def unwrap(func: Any) -> Any:
    """The function inside any number of functools.partial."""
    while isinstance(func, functools.partial):
        func = func.func
    return func


def function_name(func: RewardFunction) -> str:
    """`__name__`, or the class's name for an object that is callable."""
    func = unwrap(func)
    return getattr(func, "__name__", type(func).__name__)


def unique_names(names: list[str]) -> list[str]:
    """The same names, where a repeated one gets the first free suffix of _2, _3, ..."""
    unique: list[str] = []
    for name in names:
        candidates = [name, *(f"{name}_{number}" for number in range(2, len(names) + 1))]
        unique.append(next(candidate for candidate in candidates if candidate not in unique))
    return unique


def is_async(func: RewardFunction) -> bool:
    """Whether a call gives a coroutine; for an object that is callable, its `__call__` decides."""
    func = unwrap(func)
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def passed_columns(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns that functions get. Raises RewardError for one that has an argument's name."""
    clashes = [name for name in columns if name in RESERVED]
    if clashes:
        raise RewardError(f"dataset columns {clashes} have names of reward function arguments; rename them")
    return {name: values for name, values in columns.items() if name not in NOT_PASSED}


def check_lengths(lists: dict[str, list[Any]], expected: int) -> None:
    """Raises RewardError for a list that does not have one entry per completion."""
    wrong = {name: len(values) for name, values in lists.items() if len(values) != expected}
    if wrong:
        raise RewardError(f"{expected} completions need lists of that length; these have another: {wrong}")


def bind(name: str, func: RewardFunction, available: dict[str, Any]) -> functools.partial[Any]:
    """`func` with the arguments that it takes. MissingColumnError where one that it requires is not there."""
    parameters = inspect.signature(func).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in available]
    if missing:
        raise MissingColumnError(
            f"reward function {name} requires {', '.join(missing)}, which no dataset column provides; "
            f"available are {', '.join(available)}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return functools.partial(func, **available)
    return functools.partial(func, **{p.name: available[p.name] for p in named if p.name in available})


def start_thread(name: str, call: functools.partial[Any]) -> Future[Any]:
    """Run `call` in a daemon thread, under the caller's context variables."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run_call, call, future), name=f"reward {name}", daemon=True).start()
    return future


def run_call(call: functools.partial[Any], future: Future[Any]) -> None:
    """Hand the result over, or whatever was raised, for the caller's thread to raise."""
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001, the caller's thread raises it again
        future.set_exception(error)


async def run_async(call: functools.partial[Any]) -> Any:
    """Await `call`. SystemExit would end the event loop for everyone, so it leaves as RewardError."""
    try:
        return await call()
    except SystemExit as error:
        raise RewardError(f"it called sys.exit({error.code!r})") from error


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Serve `loop` until it is stopped."""
    loop.run_forever()
    loop.close()


def collect(calls: dict[str, Future[Any]], timeout: float, completions: list[Any]) -> dict[str, Any]:
    """Results of calls that run side by side. RewardError for the first that fails, TooLateError for late ones."""
    try:
        wait_for(calls, timeout)
        for name, future in calls.items():
            if future.done():
                raise_failure(name, future, completions)
        late = [name for name, future in calls.items() if not future.done()]
        if late:
            raise TooLateError(
                f"reward function {', '.join(late)} did not return within {timeout:g} s; "
                "raise the limit with GRPOConfig(reward_timeout=...)"
            )
        return {name: future.result() for name, future in calls.items()}
    finally:
        for future in calls.values():
            future.cancel()  # stops what is still awaiting; nothing can stop a thread


def wait_for(calls: dict[str, Future[Any]], timeout: float) -> None:
    """Return when all calls are done, one has raised, or `timeout` seconds are over."""
    deadline = time.monotonic() + timeout
    pending = set(calls.values())
    while pending and (left := deadline - time.monotonic()) > 0:
        done, pending = wait(pending, min(left, POLL_SECONDS))
        if any(failure(future) is not None for future in done):
            return


def failure(future: Future[Any]) -> BaseException | None:
    """What a finished call raised; a coroutine that cancelled itself counts too."""
    return asyncio.CancelledError() if future.cancelled() else future.exception()


def raise_failure(name: str, future: Future[Any], completions: list[Any]) -> None:
    """Raises RewardError from what a finished call raised, if it did."""
    if (error := failure(future)) is not None:
        raise RewardError(
            f"reward function {name} raised {type(error).__name__}: {error}; "
            f"the first completion begins {repr(completions[0])[:120] if completions else None}"
        ) from error


def as_rewards(name: str, result: Any, expected: int) -> list[float | None]:
    """A function's result as `expected` floats and Nones. Raises RewardError for anything else."""
    try:
        rewards = [as_number(value) for value in as_list(result)]
    except Exception as error:  # conversions of foreign types raise as they like
        raise RewardError(f"reward function {name} returned a wrong result: {error}") from error
    if len(rewards) != expected:
        raise RewardError(f"reward function {name} returned {len(rewards)} rewards, expected {expected}")
    return rewards


def foreign_types(result: Any) -> list[str]:
    """Names of the types in a function's result that are no float, int or None, but could be made into floats."""
    kinds = set() if isinstance(result, (list, tuple)) else {type(result).__name__}
    values = as_list(result)
    kinds |= {type(v).__name__ for v in values if isinstance(v, bool) or not isinstance(v, (int, float, type(None)))}
    return sorted(kinds)


def as_list(values: Any) -> list[Any]:
    """A list, a tuple, or anything with `tolist()`, as a list. Raises TypeError naming any other type."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (list, tuple)):
        raise TypeError(f"a list with one value per completion is needed, not {type(values).__name__}")
    return list(listed)


def as_number(value: Any) -> float | None:
    """A number, a bool or anything with `item()` as a float; None as None. Raises TypeError naming any other type."""
    item = value.item() if hasattr(value, "item") else value
    if item is None:
        return None
    if not isinstance(item, (int, float)):
        raise TypeError(f"a number or None is needed, not {type(value).__name__}")
    return float(item)


def is_invalid(value: float | None) -> bool:
    """Whether a reward is NaN or infinite."""
    return value is not None and not math.isfinite(value)
