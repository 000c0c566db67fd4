"""A model as an agent's code sees it: a prompted one behind a URL, or one that is trained here."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, PrivateAttr

from lowmem_grpo.agents.dev import InternalModelConfig
from lowmem_grpo.agents.progress import described
from lowmem_grpo.agents.refused import REFUSED
from lowmem_grpo.agents.trajectories import Metrics, Trajectory, TrajectoryGroup
from lowmem_grpo.config.launcher import this_place
from lowmem_grpo.rewards.judge.judge import Judge
from lowmem_grpo.runs.records import replace_text
from lowmem_grpo.utils import refuse_name

if TYPE_CHECKING:
    from lowmem_grpo.agents.local import LocalBackend

ConfigT = TypeVar("ConfigT")
Thing = TypeVar("Thing")
ADDRESS = ("inference_base_url", "inference_api_key")
STATE = "program_state.json"  # what a program keeps for itself in the folder of its run


class Model(BaseModel, Generic[ConfigT]):
    """A model that is asked and not trained: a prompted one, to compare with. It is reached by openai's own client,
    under `inference_model_name` (its name, if that is None) at `inference_base_url` with `inference_api_key`.

    Without a URL it is OpenAI's, and without a URL and a key the key is OPENAI_API_KEY, as that client reads it.
    `config` is the program's own."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    name: str
    project: str
    entity: str | None = None
    id: str | None = None
    run_id: str | None = None
    config: ConfigT | None = None
    trainable: bool = False
    inference_api_key: str | None = None
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    base_path: str = "runs"
    report_metrics: list[str] | None = None

    _backend: Any = PrivateAttr(None)
    _client: Any = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.report_metrics:
            raise ValueError(f"report_metrics is {self.report_metrics}; every number is in the run's metrics.jsonl, "
                             "and LocalBackend(report_to='wandb') sends them on: leave report_metrics out")

    def __getattr__(self, name: str) -> Any:
        refuse_name(name, type(self).__name__, REFUSED)
        return super().__getattr__(name)  # type: ignore[misc]

    def backend(self) -> "LocalBackend":
        """The backend with which it is registered. ValueError without one."""
        if self._backend is None:
            raise ValueError(f"the model {self.name!r} has no backend yet: call `await model.register(backend)` first")
        return self._backend

    async def register(self, backend: "LocalBackend") -> None:
        """Hand it to a backend, which keeps its folder."""
        if not hasattr(backend, "register"):
            raise TypeError(f"register takes a backend, and got {described(backend)}: LocalBackend()")
        await backend.register(self)
        self._backend = backend

    def openai_client(self) -> Any:
        """A client in the shape of `openai.AsyncOpenAI`."""
        if self._client is None:
            if self.inference_base_url and not self.inference_api_key:
                raise ValueError(f"the model {self.name!r} has an inference_base_url and no inference_api_key: give "
                                 "it; a server of your own takes any text")
            self._client = AsyncOpenAI(base_url=self.inference_base_url, api_key=self.inference_api_key, timeout=1200)
        return self._client

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name to pass as `model` to the client; with `step`, that of an earlier checkpoint."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """The arguments that litellm.completion needs for this model."""
        return {"model": self.get_inference_name(step), "base_url": self.inference_base_url,
                "api_key": self.inference_api_key, "temperature": 1}

    async def get_step(self) -> int:
        """Return how many steps it has been trained."""
        return 0

    async def log(
        self, trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val", *, metrics: Metrics | None = None, step: int | None = None,
    ) -> None:
        """Write trajectories and numbers into the run's records, under the name of their split."""
        await self.backend().log(self, groups_of(trajectories or []), split, metrics=metrics, step=step)

    def share(self, things: Iterable[Thing]) -> list[Thing]:
        """This process's part of the tasks of a step: all of them, but of several processes (torchrun) neighbours, as
        many as any other has or one fewer. All of them call `train`, also one whose part is empty."""
        items = list(things)
        return [items[index] for index in this_place().share(len(items))]

    # What a program keeps for itself

    @property
    def folder_name(self) -> str:
        """The name of its run's folder."""
        return getattr(self, "run_name", None) or self.name

    def folder(self) -> Path:
        """The folder of its run."""
        return Path(getattr(self._backend, "path", None) or self.base_path) / self.project / self.folder_name

    def read_state(self) -> dict[str, Any] | None:
        """Return what `overwrite_state` and `merge_state` wrote, or None. ValueError for a damaged file."""
        path = self.folder() / STATE
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}): mend or remove it") from error

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Keep this state in the run's folder, in place of any other; of several processes the first one writes.
        TypeError for what JSON cannot hold."""
        text, path = json.dumps(dict(state), indent=2), self.folder() / STATE
        if this_place().leads:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Add this to the state, also inside of inner dicts, and return the whole."""
        merged = merge(self.read_state() or {}, state)
        self.overwrite_state(merged)
        return merged

    write_state = overwrite_state  # its old name in ART


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model that is trained here: `TrainableModel(name="agent-1", project="mail", base_model="Qwen/Qwen3-4B")`.

    `_internal_config` holds options of loading, LoRA and training (`art.dev.InternalModelConfig`); it may also be set
    afterwards, before `register`. `lora_config` has LoRA's own by ART's names (`art.LoRAConfig`), and `run_name` names
    the run's folder, where it is not the model's name."""

    base_model: str
    trainable: bool = True
    run_name: str | None = None
    lora_config: dict[str, Any] | None = None

    _internal_config: InternalModelConfig | None = PrivateAttr(None)
    _endpoint: Any = PrivateAttr(None)

    def __init__(self, *, _internal_config: InternalModelConfig | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        self._internal_config = _internal_config

    def __getattribute__(self, name: str) -> Any:
        """Open an address (`serve`) where it is asked for and there is none yet, as ART has one from `register` on."""
        if name in ADDRESS and super().__getattribute__(name) is None:
            self.serve()
        return super().__getattribute__(name)

    async def register(self, backend: "LocalBackend", _openai_client_config: Any = None) -> None:
        """Load it, and go on from its last checkpoint if it has one."""
        if _openai_client_config:
            raise ValueError("_openai_client_config does nothing: there is no server of its own beside the trainer. "
                             "Give options of the address to model.serve()")
        await super().register(backend)

    def judge(self, **options: Any) -> Judge:
        """Its base model as a judge, with the adapter off, asked through the engine of the run: for
        `ruler_score_group(group, model.judge())`. Options are those of `rewards.SelfJudge`. The same options give the
        same judge, with what it has judged."""
        return self.backend().run(self).judge(**options)

    def openai_client(self) -> Any:
        """A client in the shape of `openai.AsyncOpenAI` in this process. Its choices name the turns that they are."""
        if self._client is None:
            self._client = self.backend().run(self).client()
        return self._client

    def serve(self, **options: Any) -> Any:
        """Open an address on this machine for clients in other processes and frameworks. A second call without options
        returns the one that is open, if it still is. `inference_base_url` and `inference_api_key` are set."""
        if options or self._endpoint is None or self._endpoint.closed:
            self._endpoint = self.backend().run(self).serve(**options)
            self.inference_base_url, self.inference_api_key = self._endpoint.base_url, self._endpoint.api_key
        return self._endpoint

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """The arguments that litellm.completion needs for this model; opens an address on this machine (`serve`)."""
        self.serve()
        params = super().litellm_completion_params(step)
        return params | {"model": f"hosted_vllm/{params['model']}"}

    async def get_step(self) -> int:
        return await self.backend().get_step(self)

    async def train(
        self, trajectory_groups: Iterable[TrajectoryGroup] | Iterable[Trajectory], config: Any = None, *,
        _config: Mapping[str, Any] | None = None, verbose: bool = False, **options: Any,
    ) -> Any:
        """One step on these groups, and a checkpoint. Returns a LocalTrainResult.

        `config` is a TrainConfig; `_config` and `options` are options of `backend.train`."""
        del verbose  # what a step says does not depend on it
        return await self.backend().train(self, groups_of(trajectory_groups), config=config, **(dict(_config or {})),
                                          **options)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all checkpoints but the newest and the best, by a number that `model.log` wrote."""
        run = self.backend().run(self)
        best = await run.best_step(best_checkpoint_metric)
        await run.delete_checkpoints([] if best is None else [best])


def groups_of(rollouts: Any) -> list[TrajectoryGroup]:
    """Groups as they are; trajectories and errors as one group. TypeError for anything else."""
    if isinstance(rollouts, TrajectoryGroup):
        return [rollouts]
    is_item = isinstance(rollouts, BaseModel | str) or not isinstance(rollouts, Iterable)
    items = [rollouts] if is_item else list(rollouts)
    groups = [item for item in items if isinstance(item, TrajectoryGroup)]
    if len(groups) == len(items):
        return groups
    for item in items:
        if not isinstance(item, Trajectory | BaseException):
            raise TypeError(f"a list of groups or of trajectories is needed, and {described(item)} is in it: `groups = "
                            "await gather_trajectory_groups(...)`")
    return [TrajectoryGroup(items)]


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both, where `new` wins; mappings that both have are merged in the same way."""
    both = {name: merge(old[name], value) for name, value in new.items()
            if isinstance(value, Mapping) and isinstance(old.get(name), Mapping)}
    return {**old, **new, **both}
