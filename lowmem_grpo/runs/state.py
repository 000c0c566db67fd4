"""The state of a run and its listeners; callbacks written for transformers' Trainer work here unchanged."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


@dataclass
class TrainerState:
    """Where the run is; reward functions get it as `trainer_state`."""

    global_step: int = 0  # optimizer steps
    max_steps: int = 0
    policy_version: int = 0  # how often the adapter changed
    epoch: float = 0.0
    num_tokens: int = 0  # prompt and completion tokens seen in rollouts
    elapsed: float = 0.0  # seconds of training, over all resumes
    nonfinite_steps: int = 0  # skipped for NaN or infinity
    nonfinite_in_a_row: int = 0
    alarms: dict[str, Any] = field(default_factory=dict)  # what each alarm remembers
    best_metric: float | None = None  # highest mean reward at a save
    best_model_checkpoint: str | None = None
    unlogged: list[dict[str, Any]] = field(default_factory=list)  # lines of the steps since the last logged one
    log_history: list[dict[str, Any]] = field(default_factory=list)
    is_world_process_zero = is_local_process_zero = True  # transformers' callbacks ask; there is one process


@dataclass
class TrainerControl:
    """What listeners may ask for."""

    should_training_stop: bool = False
    should_save: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_epoch_stop: bool = False


class Callbacks:
    """Calls every listener that has a method for an event, in order."""

    def __init__(self, listeners: Iterable[Any]) -> None:
        self.listeners = [listener() if isinstance(listener, type) else listener for listener in listeners]

    def __call__(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert event in EVENTS, event
        for listener in self.listeners:
            method = getattr(listener, event, None)
            if method is not None:
                method(args, state, control, **kwargs)


class Interrupt:
    """The first Ctrl-C stops the run after its step, the second one at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Handle Ctrl-C inside. Only the main thread can: Python allows no handlers in others."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.requested = False
        before = signal.signal(signal.SIGINT, self.on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def on_signal(self, *_: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nCtrl-C: finishing this step, then saving. Once more stops at once, without saving.", flush=True)
