"""Agents in plain Python, under ART's names: `from lowmem_grpo import agents as art`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.agents.dev import LoRAConfig
    from lowmem_grpo.agents.endpoint import (
        auto_trajectory,
        capture_auto_trajectory,
        capture_yielded_trajectory,
        yield_trajectory,
    )
    from lowmem_grpo.agents.gather import gather_trajectories, gather_trajectory_groups, limit_concurrency, retry
    from lowmem_grpo.agents.local import Backend, LocalBackend, LocalTrainResult, TrainResult
    from lowmem_grpo.agents.model import Model, TrainableModel
    from lowmem_grpo.agents.train_config import TrainConfig
    from lowmem_grpo.agents.trajectories import FailedRollout, History, Trajectory, TrajectoryGroup
    from lowmem_grpo.agents.types import Message, Messages, MessagesAndChoices, Tools

__all__ = [
    "Backend", "FailedRollout", "History", "LoRAConfig", "LocalBackend", "LocalTrainResult", "Message",
    "Messages", "MessagesAndChoices", "Model", "Tools", "TrainConfig", "TrainResult", "TrainableModel", "Trajectory",
    "TrajectoryGroup", "auto_trajectory", "capture_auto_trajectory", "capture_yielded_trajectory",
    "gather_trajectories", "gather_trajectory_groups", "limit_concurrency", "retry", "yield_trajectory",
]

HOMES = {name: home for home, names in {
    "agents.local": "Backend LocalBackend LocalTrainResult TrainResult",
    "agents.dev": "LoRAConfig",
    "agents.endpoint": "auto_trajectory capture_auto_trajectory capture_yielded_trajectory yield_trajectory",
    "agents.gather": "gather_trajectories gather_trajectory_groups limit_concurrency retry",
    "agents.model": "Model TrainableModel",
    "agents.train_config": "TrainConfig",
    "agents.trajectories": "FailedRollout History Trajectory TrajectoryGroup",
    "agents.types": "Message Messages MessagesAndChoices Tools",
}.items() for name in names.split()}
MODULES = ("dev", "local", "rewards", "types")  # submodules that programs use as attributes, such as `art.dev`
NEEDED = ("openai", "pydantic", "tenacity", "tqdm", "fastapi", "uvicorn")  # packages that lowmem-grpo[agents] installs


def __getattr__(name: str) -> Any:
    if name not in HOMES and name not in MODULES:
        raise import_module("lowmem_grpo.agents.refused").missing(__name__, name, [*__all__, *MODULES])
    try:
        home = import_module(f"lowmem_grpo.{HOMES.get(name, f'agents.{name}')}")
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        raise ModuleNotFoundError(f"agents need the package {error.name}: pip install lowmem-grpo[agents]",
                                  name=error.name) from error
    globals()[name] = value = home if name in MODULES else getattr(home, name)  # so this runs once a name
    return value
