"""Call reward functions under TRL's contract (docs/rewards.md), each within a time limit, and check their results.

Functions that are not async run one after another in the main thread, as in TRL, so that signal.alarm works; a signal
other than SIGALRM ends a function that takes too long. If the scorer is called in another thread, each function runs in
a daemon thread. Async functions run together in one event loop, also inside a notebook's running loop.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lowmem_grpo.config.grpo import check_weights
from lowmem_grpo.data.harmony import ReadMessage
from lowmem_grpo.rewards.calling import contract
from lowmem_grpo.rewards.calling.background import BackgroundLoop
from lowmem_grpo.rewards.calling.calls import CallRecorder, Lists, RewardCall, wait_for
from lowmem_grpo.rewards.calling.contract import RewardError, RewardFunction
from lowmem_grpo.rewards.reward import is_model

__all__ = ["RewardError", "RewardScorer", "Scores"]

logger = logging.getLogger(__name__)
Override = Callable[[list[dict[str, Any]], list[Any], list[Any], list[list[int]]], Any]
OF_COMPLETIONS = ("prompts", "completions", "completion_ids")
DIGITS = 12  # in a mean over several calls: the split into calls depends on timing, and the log must not


@dataclass
class Scores:
    """The results of the functions on N completions."""

    returned: dict[str, list[float | None]]  # (N,) by function; may hold NaN and infinity; None: not judged
    extras: dict[str, list[Any]]  # (N,) for each column passed to log_extra
    metrics: dict[str, float]  # means of the values passed to log_metric
    converted: dict[str, list[str]]  # by function, the types that it returned other than numbers

    @cached_property
    def rewards(self) -> dict[str, list[float | None]]:
        """(N,) rewards by function; None if a reward does not apply or is not finite."""
        return {name: [None if contract.is_invalid(value) else value for value in values]
                for name, values in self.returned.items()}

    @cached_property
    def invalid(self) -> dict[str, int]:
        """The number of NaN and infinite values by function; `rewards` has None in their place."""
        return {name: sum(map(contract.is_invalid, values)) for name, values in self.returned.items()}


class RewardScorer:
    """A fixed set of reward functions, with the names and the weights of their rewards."""

    def __init__(self, reward_funcs: RewardFunction | list[RewardFunction] | tuple[RewardFunction, ...],
                 weights: list[float] | None = None, timeout: float = 60.0, while_sampling: bool | None = None,
                 episodes: bool = False, late_columns: bool = False, override: Override | None = None,
                 may_be_empty: bool = False) -> None:
        """`timeout`: seconds, for functions without their own `time_limit`. `while_sampling`:
        GRPOConfig.score_while_sampling. `episodes`: completions are episodes, and functions also get `environments` and
        `turns`. `late_columns`: rollouts add columns that are unknown before sampling. `override` is called in place of
        the functions, on all completions of a batch with their rows, and returns rewards (N, number of functions).
        `may_be_empty`: a run with a teacher needs no function.

        A reward model may be passed as an object or by name. TypeError for a value that is neither a function nor a
        model, ValueError for no functions, a wrong number of weights, or only zero weights."""
        functions = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self.funcs: list[RewardFunction] = list(functions)
        if any(map(is_model, self.funcs)):
            from lowmem_grpo.rewards.reward_model import with_models  # imports transformers

            self.funcs = with_models(self.funcs)
        if not self.funcs and not may_be_empty:
            raise ValueError("reward_funcs is empty; give at least one reward function")
        for func in self.funcs:
            contract.check_function(func)
        self.names = contract.names_of(self.funcs)
        check_weights(weights, self.names)
        self.weights = [1.0] * len(self.funcs) if weights is None else [float(weight) for weight in weights]
        if self.funcs and not any(self.weights):
            raise ValueError(f"reward_weights is {self.weights}: nothing pays; weight 0 only logs a function's rewards")
        self.timeout, self.while_sampling = timeout, while_sampling
        self.episodes, self.late_columns = episodes, late_columns
        self.override, self.called = override, dict[str, RewardCall]()  # calls by `call_rows` inside `override`
        self.said: set[str] = set()  # functions whose conversions have been warned of
        self.loop = BackgroundLoop("async rewards")
        self.reads: ReadMessage | None = None  # a completion of a chat as a message; None: its text is the content

    @property
    def early(self) -> list[str]:
        """The names of the functions that may be called during sampling."""
        return [name for name, func in self.by_name.items()
                if contract.may_be_early(func, self.while_sampling) and not (self.late_columns or self.override)]

    @property
    def required(self) -> list[str]:
        """The `required` functions with a weight other than 0: if one returns None, the step leaves the group out."""
        named = zip(self.names, self.funcs, self.weights, strict=True)
        return [name for name, func, weight in named if weight and getattr(contract.unwrap(func), "required", False)]

    @property
    def by_name(self) -> dict[str, RewardFunction]:
        return dict(zip(self.names, self.funcs, strict=True))

    def score(self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]],
              columns: dict[str, list[Any]], trainer_state: Any) -> Scores:
        """Return the scores of N completions; every list has length N. RewardError, in this thread, for any failure."""
        return self.score_lists(self.lists(prompts, completions, completion_ids, columns), trainer_state)

    def score_lists(self, lists: Lists, state: Any) -> Scores:
        return self.scores(self.call_whole(self.names, lists, state), {0: range(len(lists["completions"]))})

    def lists(self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]],
              columns: dict[str, list[Any]]) -> Lists:
        """Return the arguments that have one entry per completion. RewardError for a wrong length or clashing names."""
        lists = dict(zip(OF_COMPLETIONS, (prompts, completions, completion_ids), strict=True))
        lists |= contract.passed_columns(columns, self.episodes)
        contract.check_lengths(lists, len(completions))
        return lists

    def call_whole(self, names: list[str], lists: Lists, state: Any) -> list[RewardCall]:
        """Call the functions `names`, or `override` in their place, on a whole batch; return the finished calls."""
        if self.override is None or not lists["completions"]:
            return self.call_each(names, lists, state)
        others = {name: values for name, values in lists.items() if name not in OF_COMPLETIONS}
        rows = [{"prompt": prompt, **dict(zip(others, values, strict=True))}
                for prompt, *values in zip(lists["prompts"], *others.values(), strict=True)]
        self.called = {}
        table = self.override(rows, *(lists[name] for name in OF_COMPLETIONS)).tolist()
        if [len(row) for row in table] != [len(self.names)] * len(rows):
            raise RewardError(f"_calculate_rewards returned {len(table)} rows of {len(table[0]) if table else 0} "
                              f"rewards; expected are {len(rows)} rows, one for each completion, of {len(self.names)}")
        calls = [self.called.get(name) or self.call(name, lists, state) for name in self.names]
        for call, column in zip(calls, zip(*table, strict=True), strict=True):
            call.future = Future()
            call.future.set_result([None if math.isnan(value) else value for value in column])
        return calls

    def call_rows(
        self, rows: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids: list[list[int]],
        state: Any,
    ) -> list[list[float | None]]:
        """Call all functions on N completions with N dataset rows; return the rewards, (N,) for each function."""
        lists = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        lists |= dict(zip(OF_COMPLETIONS, (prompts, completions, completion_ids), strict=True))
        contract.check_lengths(lists, len(completions))
        self.called = {call.name: call for call in self.call_each(self.names, lists, state)}
        return [self.called[name].rewards for name in self.names]

    def call_each(self, names: list[str], lists: Lists, state: Any) -> list[RewardCall]:
        """Call the functions `names`, the async ones last and together. Arguments are checked before any call."""
        calls = [self.call(name, lists, state) for name in names]
        together = [call for call in calls if contract.is_async(self.by_name[call.name])]
        alone = [call for call in calls if call not in together]
        for call in alone:
            call.run_alone()
            wait_for([call])
        for call in together:
            call.run_in_loop(self.loop)
        wait_for(together)
        return [*alone, *together]

    def call(self, name: str, lists: Lists, state: Any, groups: Sequence[int] = ()) -> RewardCall:
        """Return a call that has not begun. MissingColumnError if a required argument is not available."""
        return RewardCall(name, self.by_name[name], lists, state, self.timeout, groups)

    def scores(self, calls: list[RewardCall], spans: dict[int, range]) -> Scores:
        """Return the batch's scores from `put_together`. Warn once for each function with converted results."""
        scores = put_together(calls, self.names, spans)
        for name in scores.converted.keys() - self.said:
            logger.warning("reward function %s returned %s, taken as floats (True is 1.0, False 0.0); return a list of "
                           "floats", name, " and ".join(scores.converted[name]))
            self.said.add(name)
        return scores


def put_together(calls: list[RewardCall], names: list[str], spans: dict[int, range]) -> Scores:
    """Return the scores of a batch, merged from calls on the whole batch and on some groups; `spans` are the positions
    of each group's completions. RewardError for a result that is not a list of rewards."""
    count = sum(map(len, spans.values()))
    by_name = {name: [call for call in calls if call.name == name] for name in names}
    returned: dict[str, list[float | None]] = {name: [None] * count for name in names}
    extras: dict[str, list[Any]] = {}  # a later function replaces a column of an earlier one
    for call in [call for same in by_name.values() for call in same]:
        places = [place for group in call.groups for place in spans[group]] if call.groups else range(count)
        put(returned[call.name], places, call.rewards)
        for column, logged in call.recorder.extras.items():
            put(extras.setdefault(column, [None] * count), places, logged)
    kinds = {name: {kind for call in same for kind in contract.foreign_types(call.future.result())}
             for name, same in by_name.items()}
    return Scores(returned, extras, means_of([[call.recorder for call in same] for same in by_name.values()]),
                  {name: sorted(each) for name, each in kinds.items() if each})


def put(values: list[Any], places: Sequence[int], parts: list[Any]) -> None:
    for place, part in zip(places, parts, strict=True):
        values[place] = part


def means_of(functions: list[list[CallRecorder]]) -> dict[str, float]:
    """Return the mean of each logged metric, weighted so that several calls give the same mean as a single call."""
    weighed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    cut = {name for recorders in functions if len(recorders) > 1 for recorder in recorders for name in recorder.values}
    for recorders in functions:
        for name in dict.fromkeys(name for recorder in recorders for name in recorder.values):
            logged = [pair for recorder in recorders if name in recorder.values for pair in recorder.weighted(name)]
            total = sum(weight for _, weight in logged)  # in a single call each value has weight 1, as in TRL
            weighed[name] += [(value, weight / total if len(recorders) > 1 else 1.0) for value, weight in logged]
    means = {name: sum(v * w for v, w in values) / sum(w for _, w in values) for name, values in weighed.items()}
    return {name: float(f"{mean:.{DIGITS}g}") if name in cut else mean for name, mean in means.items()}
