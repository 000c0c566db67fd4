"""The listeners of a run, which transformers calls callbacks: callbacks written for its Trainer work here unchanged.

Each hook is called as `hook(args, state, control, model=, processing_class=, optimizer=, lr_scheduler=, ...)`, where

    on_init_end                              at the end of the trainer's constructor
    on_train_begin, on_train_end
    on_epoch_begin, on_epoch_end             around each pass over the rows
    on_step_begin, on_step_end               around one update: sampling and its optimizer steps
    on_pre_optimizer_step, on_optimizer_step before and after each optimizer step
    on_log (logs=), on_evaluate (metrics=), on_save
    on_push_begin                            before an upload to the hub
    TRL's TEACHER_EVENTS                     with a teacher; all their arguments have names

Order, `state` and `control` are as in transformers. At the end of a step and of an epoch, the training loop carries out
the requests that a listener set in `control` in any hook.
"""

import logging
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from lowmem_grpo.runs.records import TENSORBOARD
from lowmem_grpo.runs.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)
TEACHER_EVENTS = "on_generation_batch_built", "on_teacher_context_built", "on_self_distillation_batch_prepared"
EVENTS = ("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step",
          "on_optimizer_step", "on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end",
          "on_push_begin", *TEACHER_EVENTS)
NEVER = {  # hooks of transformers that are not called here
    "on_substep_end": "micro-batches are cut by length, and have no hook; use on_pre_optimizer_step",
    "on_prediction_step": "an evaluation has no steps; use on_evaluate",
    "on_generation_prompts_selected": "only SDFTTrainer calls it, with generate_from_teacher=True",
    "on_predict": "there is no predict; use on_evaluate",
}
REFUSED = {  # modules whose classes need parts of their own trainer
    "transformers.integrations": "use report_to for wandb, tensorboard and trackio",
    "trl": "it needs the parts of TRL's trainer; log_completions, report_to and records show what happens",
}
PROGRESS = "RichProgressCallback"  # TRL's progress bar and table of metrics
FLOW = "DefaultFlowCallback"  # it sets the requests in `control`, which the training loop sets here


class Callbacks:
    """The listeners, called in order for each event for which they have a method."""

    def __init__(self, listeners: Iterable[Any] = ()) -> None:
        self.callbacks: list[Any] = []
        for listener in listeners:
            self.add_callback(listener)

    def __call__(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert event in EVENTS, event
        for listener in list(self.callbacks):
            method = getattr(listener, event, None)
            if method is None:
                continue
            returned = method(args, state, control, **kwargs)
            if returned is not None and returned is not control:  # a listener may return another control object
                for name in vars(control):
                    setattr(control, name, getattr(returned, name, getattr(control, name)))

    def add_callback(self, listener: Any) -> None:
        """Add a listener (an object or a class). TypeError if it has no hook; warns of hooks that are never called."""
        made = listener() if isinstance(listener, type) else listener
        kind = type(made)
        if kind.__name__ == PROGRESS and kind.__module__.startswith("trl."):
            logger.warning("callbacks: %s is left out, as the live view shows progress and metrics", PROGRESS)
            return
        for module, advice in REFUSED.items():
            if kind.__module__ == module or kind.__module__.startswith(f"{module}."):
                raise TypeError(f"callbacks: {kind.__name__} cannot be used here; {advice}")
        if kind.__name__ == FLOW and kind.__module__.startswith("transformers."):
            raise TypeError(f"callbacks: leave {FLOW} out; the settings say when to log, evaluate and save")
        if not any(callable(getattr(made, event, None)) for event in (*EVENTS, *NEVER)):
            raise TypeError(f"callbacks holds a {kind.__name__}, which has none of the hooks {', '.join(EVENTS)}")
        for hook, advice in NEVER.items():
            home = next((cls for cls in kind.__mro__ if hook in vars(cls)), None)
            if home is not None and not home.__module__.startswith("transformers."):  # whose default does nothing
                logger.warning("%s.%s is never called: %s", kind.__name__, hook, advice)
        self.callbacks.append(made)

    def pop_callback(self, which: Any) -> Any:
        """Remove and return a listener, given as object or class; None if there is none."""
        for place, listener in enumerate(self.callbacks):
            if listener is which or (isinstance(which, type) and isinstance(listener, which)):
                return self.callbacks.pop(place)
        return None

    remove_callback = pop_callback

    @property
    def callback_list(self) -> str:
        return "\n".join(type(listener).__name__ for listener in self.callbacks)


def make_sinks(names: list[str]) -> list[Any]:
    """Return listeners for `report_to`; "all" means every installed library. Raises as `refuse_absent_sinks`."""
    refuse_absent_sinks(names)
    wanted = [name for name in names if name not in ("none", "all")]
    if "all" in names:
        wanted = [name for name in SINKS if find_spec(name) is not None]
        logger.info("report_to='all': %s", ", ".join(wanted) or "none of them is installed")
    return [SINKS[name]() for name in wanted]


def refuse_absent_sinks(names: list[str]) -> None:
    """Raise ImportError, with the pip command, if `report_to` names a library that is not installed."""
    for name in names:
        if name in SINKS and find_spec(name) is None:
            raise ImportError(f'report_to names "{name}", which is not installed: pip install {name}, or leave '
                              "report_to out")


def numbers(logs: dict[str, Any] | None) -> dict[str, float]:
    return {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}


def reward_name(key: str) -> str | None:
    """Return NAME of the key `rewards/NAME/mean`; None for any other key."""
    name = key.removeprefix("rewards/").removesuffix("/mean")
    return name if key == f"rewards/{name}/mean" and name else None


class Sink:
    """The base class of listeners that `write(args, values, step)` every log line, evaluations included. Each begins
    with its first line."""

    write: Any

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "train_runtime" in logs:  # its other metrics were written with the last step
            logs = {name: value for name, value in logs.items() if name.startswith("train_") or name == "total_flos"}
        # under transformers' names: eval/ for evaluations such as eval/loss, test/ likewise, train/ for all others
        named = {f"{name[:4]}/{name[5:]}" if name.startswith(("eval_", "test_")) else f"train/{name}": value
                 for name, value in numbers(logs).items()}
        self.write(args, named, state.global_step)


class RunSink(Sink):
    """The base class of listeners that write to a run of wandb or trackio: to the one that the user has opened, which
    is never closed here, or else to the trainer's own, which goes on in a second `train` and after it."""

    run: Any = None  # the run written to last
    opened: ClassVar[Any] = None  # the newest run that a listener of this kind opened; the user opened all others
    current: Any  # () -> the run that is open in the library, or None
    open: Any  # (args) -> this trainer's own run, which goes on if it was closed
    describe: Any  # (args): writes the settings into `run`

    def ready(self, args: Any) -> Any:
        """Return the run to write to. A run that an earlier trainer opened is closed."""
        kind, run = type(self), self.current()
        if run is not None and run is kind.opened and run is not self.run:
            run.finish()
            run = None
        if run is None:
            run = kind.opened = self.open(args)
        if run is not self.run:
            self.run = run
            self.describe(args)
        return run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ready(args)


class WandbSink(RunSink):
    """A wandb run; project, offline mode and the like come from wandb's own settings. As in transformers, it stays open
    after training: until wandb.finish(), the next trainer, or the end of the process."""

    def current(self) -> Any:
        import wandb

        return wandb.run

    def open(self, args: Any) -> Any:
        import wandb

        same = {} if self.run is None else {"id": self.run.id, "project": self.run.project, "resume": "allow"}
        return wandb.init(name=args.run_name, **same)

    def describe(self, args: Any) -> None:
        self.run.config.update(args.to_dict(), allow_val_change=True)
        for names in ("train/*", "eval/*", "test/*"):
            self.run.define_metric(names, step_metric="train/global_step")

    def write(self, args: Any, values: dict[str, float], step: int) -> None:
        # not as wandb's own step, which never falls: a user's run may have passed it, and a second `train` begins at 1
        self.ready(args).log({**values, "train/global_step": step})


class TensorboardSink(Sink):
    """Event files under output_dir/tensorboard."""

    def __init__(self) -> None:
        self.writer: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.folder = Path(args.home, args.output_dir).absolute() / TENSORBOARD

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.writer is not None and not Path(self.writer.log_dir).is_dir():  # it moved away with an earlier run
            self.writer.close()
            self.writer = None

    def write(self, args: Any, values: dict[str, float], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is None:
            self.writer = SummaryWriter(str(self.folder))
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.writer is not None:
            self.writer.close()  # a later line opens a further file in the folder


class TrackioSink(RunSink):
    """A trackio run, local or in the space `trackio_space_id`. A resumed run continues under its `run_name`."""

    def current(self) -> Any:
        import trackio

        return trackio.context_vars.current_run.get()

    def open(self, args: Any) -> Any:
        import trackio

        project, name = (args.project, args.run_name) if self.run is None else (self.run.project, self.run.name)
        return trackio.init(project, name=name, space_id=args.trackio_space_id, resume="allow", embed=False)

    def describe(self, args: Any) -> None:
        self.run.config.update({name: value for name, value in args.to_dict().items() if value is not None})

    def write(self, args: Any, values: dict[str, float], step: int) -> None:
        self.ready(args).log(values, step=step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import trackio

        if self.run is not None and self.current() is self.run is self.opened:
            trackio.finish()


SINKS = {"wandb": WandbSink, "tensorboard": TensorboardSink, "trackio": TrackioSink}
