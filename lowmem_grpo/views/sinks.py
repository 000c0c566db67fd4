"""Metrics to Weights & Biases and TensorBoard, through their own libraries, as listeners of a run."""

from importlib.util import find_spec
from typing import Any

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}


def make_sinks(names: list[str]) -> list[Any]:
    """Listeners for `report_to`; ImportError with the pip line where a library is missing."""
    wanted = [name for name in names if name != "none"]
    for name in wanted:
        if find_spec(PACKAGES[name]) is None:
            raise ImportError(f'report_to names "{name}", which is not installed: pip install {PACKAGES[name]}')
    return [SINKS[name]() for name in wanted]


def numbers(logs: dict[str, Any] | None) -> dict[str, float]:
    """The logged values that can be drawn."""
    return {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}


class WandbSink:
    """One wandb run; settings such as project and offline mode are wandb's own."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import wandb

        self.run = wandb.init(name=args.run_name, config=args.to_dict())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.run.log({f"train/{name}": value for name, value in numbers(logs).items()}, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.finish()


class TensorboardSink:
    """Event files under output_dir/tensorboard."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(f"{args.output_dir}/tensorboard")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for name, value in numbers(logs).items():
            self.writer.add_scalar(f"train/{name}", value, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.writer.close()


SINKS = {"wandb": WandbSink, "tensorboard": TensorboardSink}
