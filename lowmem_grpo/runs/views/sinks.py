"""Listeners that send metrics to Weights & Biases, TensorBoard and trackio, through their own libraries."""

import logging
from importlib.util import find_spec
from typing import Any

logger = logging.getLogger(__name__)


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


def named(logs: dict[str, Any] | None) -> dict[str, float]:
    """Return the metrics under transformers' names: eval/ for evaluations such as eval/loss, train/ for all others."""
    return {f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
            for name, value in numbers(logs).items()}


class Sink:
    """The base of sinks, which writes every log line, including evaluations."""

    def write(self, values: dict[str, float], step: int) -> None:
        """Write the metrics of a step."""
        raise NotImplementedError

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "train_runtime" in logs:  # its other metrics were written with the last step
            logs = {name: value for name, value in logs.items() if name.startswith("train_") or name == "total_flos"}
        self.write(named(logs), state.global_step)


class WandbSink(Sink):
    """A wandb run; project, offline mode and the like come from wandb's own settings."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import wandb

        self.run = wandb.init(name=args.run_name, config=args.to_dict())

    def write(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.finish()


class TensorboardSink(Sink):
    """Event files under output_dir/tensorboard."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(f"{args.output_dir}/tensorboard")

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.writer.close()


class TrackioSink(Sink):
    """A trackio run, local or in the space `trackio_space_id`. A resumed run continues under its `run_name`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(
            args.project, name=args.run_name, space_id=args.trackio_space_id, resume="allow", embed=False,
            config={name: value for name, value in args.to_dict().items() if value is not None},
        )

    def write(self, values: dict[str, float], step: int) -> None:
        self.trackio.log(values, step=step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trackio.finish()


SINKS = {"wandb": WandbSink, "tensorboard": TensorboardSink, "trackio": TrackioSink}
