"""The models that an agent's code uses: a prompted one behind a URL, or one that is trained here."""

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
from lowmem_grpo.config.launcher import this_process
from lowmem_grpo.rewards.judge.judge import Judge
from lowmem_grpo.runs.records import replace_text
from lowmem_grpo.utils import refuse_name

if TYPE_CHECKING:
    from lowmem_grpo.agents.local import LocalBackend

ConfigT = TypeVar("ConfigT")
Thing = TypeVar("Thing")
ADDRESS = ("inference_base_url", "inference_api_key")
STATE = "program_state.json"  # a program's own state, in the folder of its run


class Model(BaseModel, Generic[ConfigT]):
    """A model that is prompted and not trained. openai's own client requests it as `inference_model_name` (by default
    its name) at `inference_base_url` with `inference_api_key`. Without a URL, requests go to OpenAI, by default with
    OPENAI_API_KEY. `config` is free for the program's use."""

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
        """Return the backend with which the model is registered. ValueError if there is none."""
        if self._backend is None:
            raise ValueError(f"the model {self.name!r} has no backend yet: call `await model.register(backend)` first")
        return self._backend

    async def register(self, backend: "LocalBackend") -> None:
        """Register the model with a backend. TypeError for anything else."""
        if not hasattr(backend, "register"):
            raise TypeError(f"register takes a backend, and got {described(backend)}: LocalBackend()")
        await backend.register(self)
        self._backend = backend

    def openai_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` client. ValueError for a URL without a key."""
        if self._client is None:
            if self.inference_base_url and not self.inference_api_key:
                raise ValueError(f"the model {self.name!r} has an inference_base_url and no inference_api_key: give "
                                 "it; a server of your own takes any text")
            self._client = AsyncOpenAI(base_url=self.inference_base_url, api_key=self.inference_api_key, timeout=1200)
        return self._client

    def get_inference_name(self, step: int | None = None) -> str:
        """Return the name to pass as `model` to the client; with `step`, the name of an earlier checkpoint."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Return the arguments that litellm.completion needs for this model."""
        return {"model": self.get_inference_name(step), "base_url": self.inference_base_url,
                "api_key": self.inference_api_key, "temperature": 1}

    async def get_step(self) -> int:
        """Return the number of steps for which the model has been trained."""
        return 0

    async def log(
        self, trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = None,
        split: str = "val", *, metrics: Metrics | None = None, step: int | None = None,
    ) -> None:
        """Write the means of trajectories, and metrics, into the run's records as SPLIT/NAME."""
        await self.backend().log(self, groups_of(trajectories or []), split, metrics=metrics, step=step)

    def share(self, things: Iterable[Thing]) -> list[Thing]:
        """Return the part of a step's tasks that this process plays: all in a single process, else (torchrun) a slice.
        The sizes of the slices differ by at most one. Every process must call `train`, even if its slice is empty."""
        items = list(things)
        return [items[index] for index in this_process().share(len(items))]

    # The program's own state

    @property
    def folder_name(self) -> str:
        return getattr(self, "run_name", None) or self.name

    def folder(self) -> Path:
        return Path(getattr(self._backend, "path", None) or self.base_path) / self.project / self.folder_name

    def read_state(self) -> dict[str, Any] | None:
        """Return what `overwrite_state` and `merge_state` wrote, or None. ValueError for a damaged file."""
        path = self.folder() / STATE
        try:
            return {**json.loads(path.read_text(encoding="utf-8"))} if path.exists() else None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no JSON object ({error}): mend or remove it") from error

    def overwrite_state(self, state: Mapping[str, Any]) -> None:
        """Write this state into the run's folder, in place of any earlier one; of several processes only the first one
        writes. TypeError for values that JSON cannot hold."""
        text, path = json.dumps(mapping_of(state), indent=2), self.folder() / STATE
        if this_process().leads:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)

    def merge_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `state` into the saved state, nested dicts included, and return the result."""
        merged = merge(self.read_state() or {}, mapping_of(state))
        self.overwrite_state(merged)
        return merged

    write_state = overwrite_state  # its old name in ART


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model that is trained here: `TrainableModel(name="agent-1", project="mail", base_model="Qwen/Qwen3-4B")`.

    `_internal_config` holds options of loading, LoRA and training (`art.dev.InternalModelConfig`); it may also be set
    afterwards, before `register`. `lora_config` holds LoRA's options under ART's names (`art.LoRAConfig`), and
    `run_name` names the run's folder, by default the model's name."""

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
        """Open an address (`serve`) when `inference_base_url` or its key is first read: ART opens it in `register`."""
        if name in ADDRESS and super().__getattribute__(name) is None:
            self.serve()
        return super().__getattribute__(name)

    async def register(self, backend: "LocalBackend", _openai_client_config: Any = None) -> None:
        """Load the model, and resume from its last checkpoint if it has one."""
        if _openai_client_config:
            raise ValueError("_openai_client_config does nothing: there is no server of its own beside the trainer. "
                             "Give options of the address to model.serve()")
        await super().register(backend)
        self._client = None  # a run that was closed answers no more, nor at its address
        if self._endpoint is not None and self._endpoint.closed:
            self.inference_base_url = self.inference_api_key = None

    def judge(self, **options: Any) -> Judge:
        """Return the base model (the adapter off) as a judge for `ruler_score_group`, with the options of
        `rewards.SelfJudge`. Equal options return the same judge, with its earlier judgements."""
        return self.backend().run(self).judge(**options)

    def openai_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` client of the engine in this process. Each choice has the id of its turn."""
        if self._client is None:
            self._client = self.backend().run(self).client()
        return self._client

    def serve(self, **options: Any) -> Any:
        """Open an address on this machine for clients in other processes and frameworks. A later call without options
        returns the same address while it is open. Sets `inference_base_url` and `inference_api_key`."""
        if options or self._endpoint is None or self._endpoint.closed:
            self._endpoint = self.backend().run(self).serve(**options)
            self.inference_base_url, self.inference_api_key = self._endpoint.base_url, self._endpoint.api_key
        return self._endpoint

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Return the arguments that litellm.completion needs for this model; opens an address (`serve`)."""
        self.serve()
        params = super().litellm_completion_params(step)
        return params | {"model": f"hosted_vllm/{params['model']}"}

    async def get_step(self) -> int:
        return await self.backend().get_step(self)

    async def train(
        self, trajectory_groups: Iterable[TrajectoryGroup] | Iterable[Trajectory], config: Any = None, *,
        _config: Mapping[str, Any] | None = None, verbose: bool = False, **options: Any,
    ) -> Any:
        """Train one step on these groups, and write a checkpoint. Returns a LocalTrainResult. `config` is a
        TrainConfig; `_config` and `options` are options of `backend.train`."""
        del verbose  # no effect here
        return await self.backend().train(self, groups_of(trajectory_groups), config=config, **(dict(_config or {})),
                                          **options)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Delete all checkpoints except the newest, and the best one by a metric that `model.log` wrote."""
        await self.backend().run(self).delete_checkpoints(best_checkpoint_metric)


def groups_of(rollouts: Any) -> list[TrajectoryGroup]:
    """Return groups as they are, or trajectories and errors as one group. TypeError for anything else."""
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


def mapping_of(state: Any) -> dict[str, Any]:
    """Return a state as a dict; TypeError if it is not a mapping."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a dict such as {{'epoch': 1}}, and got {described(state)}")
    return dict(state)


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings merged; `new` wins, and nested mappings are merged in the same way."""
    both = {name: merge(old[name], value) for name, value in new.items()
            if isinstance(value, Mapping) and isinstance(old.get(name), Mapping)}
    return {**old, **new, **both}
