"""The state, control and output of a run, under transformers' names; its clock; and its signal handler."""

import json
import math
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from lowmem_grpo.utils import ZERO_OR_MORE, Rule, is_number, within
from lowmem_grpo.utils import number as numeric

if TYPE_CHECKING:
    from lowmem_grpo.memory.peaks import PhasePeaks  # loads torch, and is needed only as a type

OF_SETTINGS = ("max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs")
TALLY = within(0, 2**53)  # what a checkpoint may say of steps, rows and tokens
NUMBER = numeric("a finite number", math.isfinite)
LINES: Rule = ("a list of lines of numbers", lambda value: isinstance(value, list) and all(
    isinstance(line, dict) and all(held is None or is_number(held) for held in line.values()) for line in value))
NUMBER_LIST: Rule = ("a list of numbers", lambda value: isinstance(value, list) and all(map(is_number, value)))
ALARMS: Rule = ("steps and a list of numbers (kept) of each alarm", lambda value: isinstance(value, dict) and all(
    isinstance(held, dict) and TALLY[1](held.get("steps")) and NUMBER_LIST[1](held.get("kept"))
    for held in value.values()))
OF_STEPS = ("loss", "grad_norm", "learning_rate")  # in log lines, but not in the summary


@dataclass
class TrainerState:
    """The progress of the run; reward functions get it as `trainer_state`."""

    global_step: int = 0  # optimizer steps
    max_steps: int = 0
    policy_version: int = 0  # number of updates of the adapter
    epoch: float = 0.0
    num_tokens: int = 0  # prompt and completion tokens seen in rollouts
    elapsed: float = 0.0  # seconds of training, over all resumes
    nonfinite_steps: int = 0  # skipped for NaN or infinity
    nonfinite_in_a_row: int = 0
    alarms: dict[str, Any] = field(default_factory=dict)  # what each alarm remembers
    best_metric: float | None = None  # best mean reward at a save, or value of metric_for_best_model
    best_model_checkpoint: str | None = None
    best_global_step: int | None = None  # step of the best evaluation, if evaluations decide
    unlogged: list[dict[str, Any]] = field(default_factory=list)  # lines of the steps since the last log line
    log_history: list[dict[str, Any]] = field(default_factory=list)
    # Read by transformers' callbacks; there is one process.
    logging_steps: int = 1
    eval_steps: int | None = None
    save_steps: int = 0
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    is_world_process_zero = is_local_process_zero = True
    RANGES: ClassVar[dict[str, Rule]] = {
        **dict.fromkeys(("global_step", "max_steps", "policy_version", "num_tokens", "nonfinite_steps",
                         "nonfinite_in_a_row", "best_global_step"), TALLY),
        "epoch": ZERO_OR_MORE, "elapsed": ZERO_OR_MORE, "alarms": ALARMS, "unlogged": LINES,
        "best_metric": NUMBER}
    is_hyper_param_search, trial_name, trial_params, total_flos = False, None, None, 0.0

    @property
    def num_input_tokens_seen(self) -> int:
        return self.num_tokens

    def save_to_json(self, json_path: str) -> None:
        Path(json_path).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n", "utf-8")


OF_STEP = ("should_log", "should_evaluate", "should_save")
CLEARED = {"on_train_begin": ("should_training_stop",), "on_epoch_begin": ("should_epoch_stop",),
           "on_step_begin": OF_STEP, "on_log": OF_STEP[:1], "on_evaluate": OF_STEP[1:2], "on_save": OF_STEP[2:]}


@dataclass
class TrainerControl:
    """The requests that listeners and the settings make."""

    should_training_stop: bool = False
    should_save: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_epoch_stop: bool = False

    def follow(self, event: str, args: Any, state: TrainerState, before: int) -> None:
        """Clear the requests that `event` fulfils, and add those of the settings, before listeners see the event. The
        update in progress began after step `before`."""
        for name in CLEARED.get(event, ()):
            setattr(self, name, False)
        if event == "on_epoch_end":
            self.should_evaluate |= args.eval_strategy == "epoch"
            self.should_save |= args.save_strategy == "epoch"
        if event == "on_step_end":
            step, last = state.global_step, state.global_step >= state.max_steps
            log, evaluate, save = (last or step // (every or step) > before // (every or step)
                                   for every in (args.logging_steps, args.eval_steps, args.save_steps))
            self.should_training_stop |= last
            self.should_log |= log or (args.logging_first_step and not before)
            self.should_evaluate |= args.eval_strategy == "steps" and evaluate
            self.should_save |= args.save_strategy == "steps" and save


def error_text(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", [])])


@dataclass(frozen=True)
class TrainOutput:
    """The result of `train`."""

    global_step: int
    metrics: dict[str, Any]  # the last line of the log: `summary`
    finished: bool

    @property
    def training_loss(self) -> float:
        """The mean of the finite losses of this call of `train`; 0.0 if there are none."""
        return float(self.metrics["train_loss"])


def summary(state: TrainerState, losses: list[float], samples: int, seconds: float, parameters: int) -> dict[str, Any]:
    """Return the last line of a run's log: transformers' summary, and the last step's metrics. `losses` has the loss of
    each step. As in transformers, total_flos is 6 * tokens * `parameters`, without embeddings."""
    state.total_flos = 6.0 * state.num_tokens * parameters
    last: dict[str, Any] = next((line for line in reversed(state.log_history) if losses and "loss" in line), {})
    known = [loss for loss in losses if math.isfinite(loss)]
    return {**{name: value for name, value in last.items() if name.partition("/")[0] not in OF_STEPS},
            **speed("train", seconds, samples, len(losses)), "total_flos": state.total_flos,
            "train_loss": fmean(known) if known else 0.0, "step": state.global_step, "epoch": state.epoch}


def speed(prefix: str, seconds: float, samples: int, steps: int) -> dict[str, float]:
    """Return the runtime in seconds, and samples and steps per second, under transformers' names."""
    rates = {"samples": samples / seconds, "steps": steps / seconds} if seconds else {}
    return {f"{prefix}_runtime": seconds, **{f"{prefix}_{name}_per_second": rate for name, rate in rates.items()}}


class Clock:
    """A stopwatch of a step's phases since `restart`. `peaks` measures the peak memory of each phase but "reward"."""

    def __init__(self, peaks: "PhasePeaks | None" = None) -> None:
        self.peaks = peaks
        self.restart()

    def restart(self) -> None:
        self.started = time.perf_counter()
        self.seconds = {"generate": 0.0, "reward": 0.0, "train": 0.0}
        self.reward_hidden = 0.0  # reward seconds during sampling, counted as "generate"
        self.train_hidden: float | None = None  # training seconds during sampling, counted as "generate"
        self.tools: float | None = None  # seconds with nothing to decode while tools ran; None without tools

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds and memory of the block as those of phase `name`."""
        began = time.perf_counter()
        try:
            with nullcontext() if self.peaks is None or name == "reward" else self.peaks.phase(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def moved_to_train(self, seconds: float) -> None:
        """Count `seconds` of the phase "generate" as "train" instead."""
        self.seconds["train"] += seconds
        self.seconds["generate"] -= seconds

    def metrics(self) -> dict[str, float]:
        """Return a step's seconds, and shares of them: each phase, idle time, and other work done while sampling."""
        total = max(time.perf_counter() - self.started, 1e-9)
        shares = {f"time/{name}": seconds / total for name, seconds in self.seconds.items()}
        beside = {"time/tools": self.tools, "time/train_hidden": self.train_hidden}
        known = {name: seconds / total for name, seconds in beside.items() if seconds is not None}
        return {"step_time": total, **shares, "time/idle": max(0.0, 1 - sum(shares.values())),
                "time/reward_hidden": self.reward_hidden / total, **known}


def mean_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the steps that have it; None, which a checkpoint has for NaN, is left out."""
    names = sorted({name for step in steps for name, value in step.items() if value is not None})
    return {name: fmean(step[name] for step in steps if step.get(name) is not None) for name in names}


STOPS = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


class Interrupt:
    """The signal handler of a run. Ctrl-C, SIGTERM (a scheduler) and SIGHUP (a closed terminal) stop the run after its
    step; a second Ctrl-C stops it at once. SIGTERM and SIGHUP stay ignored if they were, as under nohup."""

    def __init__(self) -> None:
        self.got: int | None = None  # the first signal

    @property
    def requested(self) -> bool:
        return self.got is not None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Handle signals inside the block. No effect outside the main thread, where Python allows no handlers."""
        self.got = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in STOPS.values()}
        mine = [number for number, handler in before.items()
                if number == signal.SIGINT or handler not in (signal.SIG_IGN, None)]
        for number in mine:
            signal.signal(number, self.on_signal)
        try:
            yield
        finally:
            for number in mine:
                signal.signal(number, before[number])

    def on_signal(self, number: int, *_: Any) -> None:
        if number == STOPS.get("SIGHUP"):
            leave_the_terminal()
        if self.got is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # tools such as `timeout` send a signal twice
        self.got = number
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        again = " Once more stops at once, without saving." if number == signal.SIGINT else ""
        print(f"\n{name}: finishing this step, then saving.{again}", flush=True)

    def pass_on(self) -> None:
        """Raise the received signal again, unless it was Ctrl-C; by default this ends the process."""
        if self.got not in (None, signal.SIGINT):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            signal.raise_signal(self.got)

    @property
    def exit_status(self) -> int:
        """The exit status of a command that the received signal stopped; 0 if no signal came."""
        return 0 if self.got is None else 128 + self.got


def leave_the_terminal() -> None:
    """Redirect the standard streams to /dev/null, since writes to a closed terminal fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
