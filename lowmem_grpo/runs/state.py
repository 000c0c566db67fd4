"""The state of a run, what its listeners and Ctrl-C may ask of it, and where it ended, under transformers' names."""

import math
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

OF_STEPS = ("loss", "grad_norm", "learning_rate")  # in a line of the log, and not in the summary


@dataclass
class TrainerState:
    """The position of the run; reward functions get it as `trainer_state`."""

    global_step: int = 0  # optimizer steps
    max_steps: int = 0
    policy_version: int = 0  # how often the adapter changed
    epoch: float = 0.0
    num_tokens: int = 0  # prompt and completion tokens seen in rollouts
    elapsed: float = 0.0  # seconds of training, over all resumes
    nonfinite_steps: int = 0  # skipped for NaN or infinity
    nonfinite_in_a_row: int = 0
    alarms: dict[str, Any] = field(default_factory=dict)  # what each alarm remembers
    best_metric: float | None = None  # highest mean reward at a save, or of what metric_for_best_model names
    best_model_checkpoint: str | None = None
    best_global_step: int | None = None  # when the best evaluation was, where one says which checkpoint is the best
    unlogged: list[dict[str, Any]] = field(default_factory=list)  # lines of the steps since the last logged one
    log_history: list[dict[str, Any]] = field(default_factory=list)
    # What transformers' callbacks also ask for; there is one process.
    is_world_process_zero = is_local_process_zero = True
    is_hyper_param_search, trial_name, trial_params, total_flos = False, None, None, 0.0

    @property
    def num_input_tokens_seen(self) -> int:
        """`num_tokens`, by transformers' name."""
        return self.num_tokens


@dataclass
class TrainerControl:
    """Requests of listeners."""

    should_training_stop: bool = False
    should_save: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_epoch_stop: bool = False

    def taken(self) -> "TrainerControl":
        """A copy; what holds for one step alone is no longer asked for."""
        asked = replace(self)
        self.should_save = self.should_log = self.should_evaluate = False
        return asked


def error_text(error: BaseException) -> str:
    """Return an error's kind and message, with the notes that say what to do."""
    return "\n".join([f"{type(error).__name__}: {error}".rstrip(": "), *getattr(error, "__notes__", [])])


@dataclass(frozen=True)
class TrainOutput:
    """The result of `train`."""

    global_step: int
    metrics: dict[str, Any]  # the last line of the log: `summary`
    finished: bool

    @property
    def training_loss(self) -> float:
        """The mean loss of this call's steps; 0.0 where it made none."""
        return float(self.metrics["train_loss"])


def summary(state: TrainerState, losses: list[float], samples: int, seconds: float, parameters: int) -> dict[str, Any]:
    """Return the last line of a run's log: transformers' figures, and what the last step's line measured. `losses` are
    those of the steps that this call of `train` made, on so many `samples`. As in transformers, total_flos is 6 for
    each token and each of the `parameters` that are no embedding, over all calls."""
    state.total_flos = 6.0 * state.num_tokens * parameters
    last: dict[str, Any] = next((line for line in reversed(state.log_history) if losses and "loss" in line), {})
    known = [loss for loss in losses if math.isfinite(loss)]
    return {**{name: value for name, value in last.items() if name.partition("/")[0] not in OF_STEPS},
            **speed("train", seconds, samples, len(losses)), "total_flos": state.total_flos,
            "train_loss": fmean(known) if known else 0.0, "step": state.global_step, "epoch": state.epoch}


def speed(prefix: str, seconds: float, samples: int, steps: int) -> dict[str, float]:
    """Return how long something took, and its samples and steps a second, under transformers' names."""
    rates = {"samples": samples / seconds, "steps": steps / seconds} if seconds else {}
    return {f"{prefix}_runtime": seconds, **{f"{prefix}_{name}_per_second": rate for name, rate in rates.items()}}


STOPS = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


class Interrupt:
    """Ctrl-C, SIGTERM (a scheduler) and SIGHUP (a closed terminal) stop the run after its step; a second Ctrl-C stops
    it at once. A signal that was ignored before, as SIGHUP is under nohup, stays so."""

    def __init__(self) -> None:
        self.got: int | None = None  # the first signal

    @property
    def requested(self) -> bool:
        return self.got is not None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Handle signals inside. Only the main thread can: Python allows no handlers in others."""
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
            return  # tools such as `timeout` send the same signal twice
        self.got = number
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        again = " Once more stops at once, without saving." if number == signal.SIGINT else ""
        print(f"\n{name}: finishing this step, then saving.{again}", flush=True)

    def pass_on(self) -> None:
        """Let a signal other than Ctrl-C have the effect that it has without us: by default it ends the process."""
        if self.got not in (None, signal.SIGINT):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            signal.raise_signal(self.got)

    @property
    def exit_status(self) -> int:
        """The exit status of a command stopped by this signal; 0 without one."""
        return 0 if self.got is None else 128 + self.got


def leave_the_terminal() -> None:
    """A terminal that was closed refuses all that is written to it: write nowhere instead."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
