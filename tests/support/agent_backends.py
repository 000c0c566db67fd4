"""A backend whose model says what a script says: for agents' code, without a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from served import chat_over, scripted_desk

from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.judges import DeskJudge
from lowmem_grpo.service.call import LIVE
from lowmem_grpo.service.client import Client


class ScriptedBackend:
    """Answers as told, and notes what it is asked to train, log and delete. Close it with `desk.close()`."""

    def __init__(self, path: Path, says: Callable[[str], str] = lambda prompt: "Yes.") -> None:
        self.path, self.desk, self.step = path, scripted_desk(says), 0
        self.desk.model.loaded.name = "scripted"
        self.adapters: list[Any] = []  # other than the live one, with which there was computed
        desk: Any = self.desk
        desk.computing_with = self.computing_with
        self.chat = chat_over(self.desk)
        self.trained: list[tuple[Any, dict[str, Any]]] = []
        self.logged: list[tuple[Any, ...]] = []
        self.kept: list[int] = []
        self.best: int | None = None

    @contextmanager
    def computing_with(self, adapter: Any) -> Iterator[None]:
        """In place of switching the adapter of a model."""
        if adapter != LIVE:
            self.adapters.append(adapter)
        yield

    async def register(self, model: Any) -> None:
        pass

    async def train(self, model: Any, groups: Any, **options: Any) -> int:
        self.trained.append((groups, options))
        self.step += 1
        return self.step

    async def log(self, model: Any, groups: Any, split: str = "val", metrics: Any = None, step: Any = None) -> None:
        self.logged.append((groups, split, metrics, step))

    async def get_step(self, model: Any) -> int:
        return self.step

    async def best_step(self, model: Any, metric: str = "") -> int | None:
        return self.best

    async def delete_checkpoints(self, model: Any, keep: list[int]) -> None:
        self.kept = keep

    def client(self, model: Any) -> Client:
        return Client(self.chat)

    def serve(self, model: Any, **options: Any) -> AgentEndpoint:
        return AgentEndpoint(self.chat, **options)

    def judge(self, model: Any, **options: Any) -> DeskJudge:
        return DeskJudge(self.desk, self.desk.model, **options)

    def inference_name(self, model: Any, step: int | None = None) -> str:
        return "agent" if step is None else f"agent@{step}"

    async def close(self) -> None:
        self.desk.close()
