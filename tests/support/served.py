"""A model that is served at a loopback address, with keys of two users; a worker whose engine says what a script says,
the chat over it, and a backend for agents."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import torch
from scripted import TEMPLATE, ScriptedEngine
from small_models import shallow
from template_tokenizers import tokenizer_of

from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.local_run import client_of
from lowmem_grpo.agents.rewards import EngineJudge
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, Request
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request_queue import LIVE, EngineCall
from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import made_for, make_server_app, open_socket
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.tinker.serving import ServedModel, serve_model
from lowmem_grpo.server.users import Allowances, User, Users
from lowmem_grpo.types import OnGroup, Rollout

OWNER, OTHER = "tml-" + "k" * 32, "tml-" + "o" * 32
MODEL = str(shallow())  # what it says matters to no test


class HeldUp:
    """A model that is served, whose worker can be held up."""

    model: ServedModel

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Inside, the worker does something else; then it begins all that was asked for meanwhile, together."""
        gate = threading.Event()
        self.model.worker.run(gate.wait)
        try:
            yield
        finally:
            gate.set()


@dataclass
class Serving(HeldUp):
    """A model, and where it answers."""

    model: ServedModel
    url: str

    def openai(self, key: str = OWNER) -> openai.OpenAI:
        """OpenAI's own client of it. Close it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


@contextmanager
def serving(folder: Path, name: str = MODEL, context: int = 64, allowances: Allowances | None = None,
            **loading: Any) -> Iterator[Serving]:
    """Inside, the model is served; its clients are to be closed before the end."""
    database = Database(folder / "server.sqlite")
    loading = {"load_in_4bit": False, "max_seq_length": context} | loading
    model = serve_model(name, database, folder / "models", allowances, **loading)
    listening = open_socket("127.0.0.1", 0)
    server = made_for(make_server_app(model.routers(), Users(OWNER, [(User("other"), OTHER)]), Limits()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Serving(model, f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(60)
        model.close()
        database.close()
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def tinker_client(served: Serving, key: str = OWNER) -> Iterator[Any]:
    """The real client of the Tinker protocol, which is closed afterwards: else its thread would go on asking, and
    warning in the logs of other tests."""
    import tinker

    made = tinker.ServiceClient(base_url=served.url, api_key=key)
    try:
        yield made
    finally:
        made.close("success").result(60)


class DeskEngine(ScriptedEngine):
    """A scripted engine with all that a worker asks for. A `gate` that is cleared holds up each round."""

    def __init__(self, says: Callable[[str], str], template: str = TEMPLATE, slots: int | None = None) -> None:
        super().__init__(says)
        self.tokenizer, self.slots = tokenizer_of(template), slots
        self.gate, self.began = threading.Event(), threading.Event()
        self.gate.set()
        self.rounds: list[tuple[float, int]] = []  # of each: temperature, turns
        self.requests: list[Request] = []
        self.slept = self.version = self.conversations = 0

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        self.rounds.append((params.temperature, len(prompts)))
        self.began.set()
        assert self.gate.wait(60)
        found = super().generate(prompts, params, on_group)
        self.asked.clear()
        return found

    def answer(self, prompt: list[int], most: int) -> Rollout:
        found = super().answer(prompt, most)
        found.policy_version = self.version
        return found

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        self.conversations += 1
        super().converse(Noted(conversation, self), params)

    def on_policy_update(self, policy_version: int) -> None:
        self.version = policy_version

    def sleep(self) -> None:
        self.slept += 1


class TypingEngine(DeskEngine):
    """A scripted engine that decodes `turns` side by side, a token of each per step, which takes a permit of `steps`.
    `ended` has the keys of turns that `on_tokens` ended; `breaks` is raised in place of a step."""

    def __init__(self, says: Callable[[str], str]) -> None:
        super().__init__(says)
        self.steps, self.ended, self.breaks = threading.Semaphore(0), list[int](), list[Exception]()
        self.turns: dict[int, tuple[Request, Rollout, int]] = {}  # with the number of tokens so far
        self.anew = ""  # what a turn's text becomes at its end

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        turns = self.turns = {}
        while True:
            requests = conversation.next_requests(busy=bool(turns))
            turns |= {one.key: (one, self.answer(one.ids, one.max_tokens), 0) for one in requests}
            if not turns:
                return
            if not self.steps.acquire(timeout=0.005):
                continue  # others may enter
            if self.breaks:
                raise self.breaks.pop()
            for key, (request, rollout, at) in list(turns.items()):
                turns[key], on_tokens = (request, rollout, at + 1), request.on_tokens
                if at + 1 < len(rollout.completion_ids):
                    if not on_tokens or on_tokens([rollout.completion_ids[at]], [-0.5]):
                        continue
                    self.ended.append(key)
                del turns[key]
                conversation.add_rollout(key, replace(rollout, text=self.anew or rollout.text))


class Noted:
    """A conversation whose last requests the engine remembers."""

    def __init__(self, inner: Conversation, engine: DeskEngine) -> None:
        self.inner, self.engine, self.add_rollout = inner, engine, inner.add_rollout

    def next_requests(self, busy: bool) -> list[Request]:
        found = self.inner.next_requests(busy)
        self.engine.requests = [*self.engine.requests[-99:], *found]
        return found


def scripted_worker(says: Callable[[str], str] = lambda prompt: "Yes.", context: int = 4096, seed: int = 0,
                  **more: Any) -> EngineWorker:
    """A worker; `worker.engine` is a DeskEngine. Close it."""
    engine: Any = DeskEngine(says, **more)
    weight = torch.empty(len(engine.tokenizer), 0)
    model = SimpleNamespace(loaded=SimpleNamespace(tokenizer=engine.tokenizer, max_seq_length=context), inner=None)
    policy: Any = SimpleNamespace(head=SimpleNamespace(weight=weight))
    return EngineWorker(model, policy=policy, engine=engine, seed=seed)


def chat_over(worker: EngineWorker, **more: Any) -> ChatHandler:
    """Its chat; the live model is called "agent"."""
    histories = more.pop("histories", None) or ConversationCache(worker.tokenizer)
    return ChatHandler(worker, lambda: {"agent": LIVE}, histories, **more)


def call_of(worker: EngineWorker, text: str, temperature: float = 1.0, **more: Any) -> EngineCall:
    """A call with this prompt."""
    ids = worker.tokenizer(text, add_special_tokens=False).input_ids
    return EngineCall(ids, SamplingParams(max_tokens=64, temperature=temperature), **more)


class ScriptedBackend:
    """Answers as told, and notes what it is asked to train, log and delete. Close it with `worker.close()`."""

    def __init__(self, path: Path, says: Callable[[str], str] = lambda prompt: "Yes.") -> None:
        self.path, self.worker, self.step = path, scripted_worker(says), 0
        self.worker.model.loaded.name = "scripted"
        self.adapters: list[Any] = []  # other than the live one, with which there was computed
        worker: Any = self.worker
        worker.computing_with = self.computing_with
        self.chat = chat_over(self.worker)
        self.trained: list[tuple[Any, dict[str, Any]]] = []
        self.logged: list[tuple[Any, ...]] = []

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

    def run(self, model: Any) -> "ScriptedBackend":
        return self

    async def delete_checkpoints(self, metric: str) -> None:
        self.logged.append(metric)

    def client(self) -> openai.AsyncOpenAI:
        return client_of(self.chat)

    def serve(self, **options: Any) -> AgentEndpoint:
        return AgentEndpoint(self.chat, **options)

    def judge(self, **options: Any) -> EngineJudge:
        return EngineJudge(self.worker, self.worker.model, **options)

    async def close(self) -> None:
        self.worker.close()
