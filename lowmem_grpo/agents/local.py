"""`LocalBackend`: trains registered models and serves them, in this process."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem_grpo.agents.dev import ModelOptions, with_lora
from lowmem_grpo.agents.local_run import LocalRun
from lowmem_grpo.agents.refused import missing
from lowmem_grpo.agents.sampled import Tally, tally_of
from lowmem_grpo.agents.train_config import TrainConfig
from lowmem_grpo.agents.trajectories import TrajectoryGroup
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.trainer.distributed import ranks
from lowmem_grpo.utils import TEXT, at_least, check_given, require


@dataclass
class LocalTrainResult:
    """The result of one `train` call."""

    step: int  # steps made so far
    metrics: dict[str, float] = field(default_factory=dict)  # the line that was logged
    checkpoint_path: str | None = None  # the step's checkpoint


class LocalBackend:
    """Trains registered models, each in its folder path/project/name, from the newest checkpoint on. The end of an
    `async with` block closes the backend, and so does the end of the program."""

    def __init__(
        self, *, path: str | Path | None = None, model: Any = None, in_process: bool = True,
        gpu_cost_per_hour_usd: float | None = None, **options: Any,
    ) -> None:
        """`options` are keyword options of FastLanguageModel.from_pretrained, get_peft_model and GRPOConfig; a model's
        `_internal_config` overrides them. `model` is a model that is already loaded. `in_process` has no effect.
        TypeError for an unknown option, ValueError for one that is not supported."""
        if gpu_cost_per_hour_usd is not None:
            raise ValueError(f"gpu_cost_per_hour_usd is {gpu_cost_per_hour_usd}: prices are not logged; multiply the "
                             "hours in summary.json (train_seconds), and leave it out")
        self.path, self.given, self.options = Path(path or "runs").absolute(), model, ModelOptions.from_names(options)
        self.runs: dict[tuple[str, str], LocalRun] = {}

    def __getattr__(self, name: str) -> Any:
        raise missing(type(self).__name__, name, ("register", "train", "log", "get_step", "close"))

    # Begin and end

    async def register(self, model: Any) -> None:
        """Load a trainable model and resume its run, or make a prompted model's folder. Repeated calls do nothing."""
        folder, key = self.folder(model), (model.project, model.folder_name)
        if not trains(model):
            folder.mkdir(parents=True, exist_ok=True)
            return
        if key in self.runs:
            if self.runs[key].base_model != model.base_model:
                raise ValueError(f"{model.project}/{model.name} is registered with the base model "
                                 f"{self.runs[key].base_model}, and now it is {model.base_model}; give it another name")
            return
        if self.given is not None and self.runs:
            other = next(iter(self.runs.values())).name
            raise ValueError(f"model= of LocalBackend is one loaded model, which {other!r} trains; make a second "
                             f"LocalBackend for {model.name!r}")
        options = self.options.with_config(
            with_lora(getattr(model, "_internal_config", None), getattr(model, "lora_config", None)), model.base_model)
        run = LocalRun(model.name, model.base_model, folder, options)
        await run.open(self.given)
        self.runs[key] = run

    async def close(self, error: BaseException | None = None) -> None:
        """End every run after the work in progress, and write the reports. With an error, mark the runs as failed."""
        runs, self.runs = list(self.runs.values()), {}
        for run in runs:
            await run.close(error)

    async def __aenter__(self) -> "LocalBackend":
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self.close(error)

    # Training

    async def train(
        self, model: Any, trajectory_groups: Iterable[TrajectoryGroup], *, config: TrainConfig | None = None,
        **options: Any,
    ) -> LocalTrainResult:
        """Train one step on these groups, and write a checkpoint. `options` are ART's (see train_config.py), or
        settings of GRPOConfig that may change from step to step. Calls in the engine are finished first. If nothing can
        be trained on, no step is made, and a warning says why."""
        run = self.run(model)
        groups = list(trajectory_groups)
        if wrong := [group for group in groups if not isinstance(group, TrajectoryGroup)]:
            raise TypeError(f"train takes groups, and {type(wrong[0]).__name__} is among them: pass "
                            "[TrajectoryGroup(trajectories)]")
        settings = TrainConfig.model_validate(config or {}).model_dump(exclude_none=True)  # a dict serves too
        metrics = await run.train(groups, {**settings, **options})
        saved = run.saved.get(run.step)
        return LocalTrainResult(run.step, metrics, None if saved is None else str(saved))

    async def log(
        self, model: Any, groups: Iterable[TrajectoryGroup], split: str = "val",
        metrics: Mapping[str, float] | None = None, step: int | None = None,
    ) -> None:
        """Write `metrics`, and the means of trajectories that are not trained on, into the run's records as SPLIT/NAME.
        Metrics that `train` wrote are not written again. ValueError for a wrong split or step."""
        require("split", split, TEXT)
        check_given({"step": step}, {"step": at_least(0)})
        step = None if step is None else int(step)
        if trains(model):
            await self.run(model).log(list(groups), split, metrics or {}, step)
        else:
            await asyncio.to_thread(self.write_down, model, tally_of(list(groups), metrics or {}), split, step or 0)

    def write_down(self, model: Any, tally: Tally, split: str, step: int) -> None:
        """Record the metrics of a prompted model, summed over all ranks; the first rank writes."""
        joined = ranks()
        line = Tally.total(joined.gather(f"the log of {model.name}", tally)).of_split(split)
        if line and joined.leads:
            RunRecords(self.folder(model)).metrics({"step": step, **line})

    # Checkpoints

    async def get_step(self, model: Any) -> int:
        """Return the number of steps so far; before the model is registered, the step of its newest checkpoint."""
        if not trains(model):
            return 0
        run = self.runs.get((model.project, model.folder_name))
        saved = list_checkpoints(self.folder(model))
        return run.step if run is not None else int(saved[-1].name.rpartition("-")[2]) if saved else 0

    # Inside

    def folder(self, model: Any) -> Path:
        return self.path / str(model.project) / str(model.folder_name)

    def run(self, model: Any) -> LocalRun:
        """Return the run of a model. ValueError if the model is not registered."""
        run = self.runs.get((model.project, model.folder_name))
        if run is None:
            raise ValueError(f"the model {model.name!r} is not registered with this backend, or the backend is closed: "
                             "call `await model.register(backend)` first")
        return run


Backend, TrainResult = LocalBackend, LocalTrainResult  # ART's names


def trains(model: Any) -> bool:
    return bool(getattr(model, "trainable", hasattr(model, "base_model")))
