"""`LocalRun`: a model that is sampled from and trained in this process; its openai client needs no socket."""

import asyncio
import atexit
import json
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, TypeVar

import openai
from openai import AsyncOpenAI

from lowmem_grpo.agents.dev import ModelOptions
from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.rewards import OPEN, EngineJudge
from lowmem_grpo.agents.sampled import Sampled, Tally, tally_of
from lowmem_grpo.agents.train_config import settings_of
from lowmem_grpo.agents.trajectories import TrajectoryGroup
from lowmem_grpo.runs.checkpoint import prune
from lowmem_grpo.runs.lock import owned
from lowmem_grpo.runs.records import METRICS, read_lines
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.server.openai.chat_handler import DONE, ChatHandler, Choice, event, model_entry
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request_queue import LIVE
from lowmem_grpo.server.openai.sessions import RECORDER, SESSION
from lowmem_grpo.server.requests import ChatError
from lowmem_grpo.trainer.distributed import ranks
from lowmem_grpo.trainer.trajectories import PER_STEP, TrajectoryTrainer

# the HTTP library under openai's client: httpx, or its successor httpx2
httpx: Any = import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])


def client_of(chat: ChatHandler, timeout: float | None = None) -> openai.AsyncOpenAI:
    """Return an openai client for chat completions and the list of models; other routes answer 404. `choices[i].turn`
    names the sampled turn. Calls in a rollout's asyncio task are recorded for the rollout. `timeout` is in seconds."""
    return openai.AsyncOpenAI(base_url="http://in-this-process/v1", api_key="none", max_retries=0, timeout=timeout,
                              http_client=OpenClient(transport=ChatTransport(chat), trust_env=False))


class OpenClient(openai.DefaultAsyncHttpxClient):
    """An HTTP client that several openai clients share. It stays open when one of them is closed."""

    async def aclose(self) -> None:
        """Do nothing: there is no socket to close."""


class ChatTransport(httpx.AsyncBaseTransport):
    """An httpx transport that passes requests to a ChatHandler."""

    def __init__(self, chat: ChatHandler) -> None:
        self.chat = chat

    async def handle_async_request(self, request: Any) -> Any:
        seconds = request.extensions.get("timeout", {}).get("read")
        try:
            return await asyncio.wait_for(self.answer(request), seconds)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {seconds:g} seconds") from None
        except ChatError as error:
            return as_json(error.body(), error.status)

    async def answer(self, request: Any) -> Any:
        """Return the list of models, or the model's reply. ChatError for any other route."""
        place = f"{request.method} {request.url.path}"
        if place == "GET /v1/models":
            return as_json({"object": "list", "data": list(map(model_entry, self.chat.names()))})
        if place != "POST /v1/chat/completions":
            raise ChatError(404, f"there is no {place}: the model in training answers chat completions only: "
                                 "client.chat.completions.create(...)", None, "unknown_route")
        body, session, recorder = json.loads(request.content), SESSION.get(), RECORDER.get()

        async def record(choices: list[dict[str, Any]]) -> None:
            if recorder is not None:
                recorder.record(body, choices, self.chat.parent)

        if not body.get("stream"):
            return as_json(await self.chat.create(body, session, record))
        chunks = self.chat.stream(body, session, record)
        first = await anext(chunks)
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=ReplyStream(
            first, chunks, request.extensions.get("timeout", {}).get("read")))


class ReplyStream(httpx.AsyncByteStream):
    """The events of a streamed reply. An error after the first chunk is sent as an event."""

    def __init__(self, first: Choice, chunks: AsyncGenerator[Choice, None], seconds: float | None) -> None:
        self.first, self.chunks, self.seconds = first, chunks, seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield event(self.first)
        try:
            while chunk := await asyncio.wait_for(anext(self.chunks, None), self.seconds):
                yield event(chunk)
            yield DONE
        except TimeoutError:
            raise httpx.ReadTimeout(f"nothing came within {self.seconds:g} seconds") from None
        except ChatError as error:
            yield event(error.body())

    async def aclose(self) -> None:
        await self.chunks.aclose()


def as_json(reply: dict[str, Any], status: int = 200) -> Any:
    return httpx.Response(status, content=json.dumps(reply), headers={"Content-Type": "application/json"})


logger = logging.getLogger(__name__)

T = TypeVar("T")
TRAIN = "train"  # the split whose metrics the step itself writes


class LocalRun:
    """A model's run. Everything except loading happens in the worker's thread, which owns the model. Each of several
    ranks plays its own rollouts; all ranks open, train, log, delete and close together, and the first one writes."""

    def __init__(self, name: str, base_model: str, folder: Path, options: ModelOptions) -> None:
        self.name, self.base_model, self.folder, self.options = name, base_model, folder, options
        self.error: BaseException | None = None  # why the last step failed, if it did
        self.training = False
        self.closed = False
        self.endpoints: list[AgentEndpoint] = []
        self.judges: dict[str, EngineJudge] = {}

    # Begin and end

    async def open(self, model: Any = None) -> None:
        """Load the model, or take a loaded one, and resume its run. RunInUseError if another process trains it."""
        self.ranks = await asyncio.to_thread(ranks)
        with self.ranks.together():
            adapted = await asyncio.to_thread(self.loaded, model)
            seed = self.options.settings(self.folder).seed
            own = seed if self.ranks.leads else Random(f"{seed}-{self.ranks.rank}").getrandbits(31)
            self.worker = EngineWorker(adapted, seed=own)  # ranks that play the same task draw different completions
            try:
                await self.in_worker(partial(self.start_run, adapted), sleep=False)
            except BaseException:
                self.worker.close()
                raise
        atexit.register(self.at_exit)
        OPEN.append(self)
        self.chat = ChatHandler(self.worker, self.names, ConversationCache(
            self.worker.tokenizer, template_kwargs=self.trainer.args.chat_template_kwargs))

    def loaded(self, model: Any) -> Any:
        if self.ranks.leads:
            with owned(self.folder):
                pass  # fail before a model is loaded
        return self.options.load(self.base_model) if model is None else self.options.adapt(model)

    def start_run(self, model: Any) -> None:
        self.trainer = TrajectoryTrainer(model, self.options.settings(self.folder), model.loaded.tokenizer)
        self.worker.policy, self.worker.memory = self.trainer.policy, self.trainer.memory
        self.session = self.trainer.running()
        self.session.__enter__()
        self.worker.on_policy_update(self.trainer.state.policy_version)
        self.read_checkpoints()

    async def close(self, error: BaseException | None = None) -> None:
        """End the run after the work in progress; with an error, mark it as failed."""
        if not self.closed:
            self.closed = True
            atexit.unregister(self.at_exit)
            await asyncio.to_thread(self.close_now, error)

    def at_exit(self) -> None:
        """Close the run at the end of a program that has not closed it."""
        if self.training:
            logger.warning("the step in progress is finished and saved first; Ctrl-C once more stops at once")
        self.close_now(getattr(sys, "last_value", None))  # the error that ended the program

    def close_now(self, error: BaseException | None) -> None:
        OPEN.remove(self)
        for endpoint in self.endpoints:
            endpoint.close()
        self.worker.run(partial(self.finish, error), sleep=False).result()
        self.worker.close()

    def finish(self, error: BaseException | None) -> None:
        error = error or self.error
        self.session.__exit__(*((None,) * 3 if error is None else (type(error), error, error.__traceback__)))
        self.trainer.model.close_engine()

    def in_worker(self, function: Callable[[], T], sleep: bool = True) -> "asyncio.Future[T]":
        future: Future[T] = self.worker.run(function, sleep)
        return asyncio.wrap_future(future)

    # Names

    @property
    def step(self) -> int:
        return int(self.trainer.state.global_step)

    def read_checkpoints(self) -> None:
        """Update `saved`, the checkpoints by step; the first rank, which writes them, tells the others."""
        checkpoints = self.ranks.first("the checkpoints", lambda: list_checkpoints(self.folder))
        self.saved = {int(path.name.rpartition("-")[2]): path for path in checkpoints}

    def names(self) -> Mapping[str, Path | str | None]:
        """Return the model names that clients can request: the base model, each checkpoint, the current policy."""
        saved: dict[str, Path | str | None] = {f"{self.name}@{step}": path for step, path in self.saved.items()}
        if not self.training and self.step in self.saved:
            saved[f"{self.name}@{self.step}"] = LIVE  # the live adapter has these weights
        return {self.base_model: None, **saved, self.name: LIVE}

    def client(self) -> AsyncOpenAI:
        return client_of(self.chat)

    def serve(self, **options: Any) -> AgentEndpoint:
        """Open an address on this machine, with the options of `Endpoint`. It closes with the run."""
        endpoint = AgentEndpoint(self.chat, **options)
        self.endpoints.append(endpoint)
        return endpoint

    def judge(self, **options: Any) -> EngineJudge:
        """Return the base model as a judge; the same options return the same judge."""
        key = repr(sorted(options.items()))
        if key not in self.judges:
            self.judges[key] = EngineJudge(self.worker, self.worker.model, **options)
        return self.judges[key]

    # Training

    async def train(self, groups: Sequence[TrajectoryGroup], options: Mapping[str, Any]) -> dict[str, Any]:
        """Train one step, after the calls that are in the engine. Return the logged line, or only counts if nothing can
        be trained on. ValueError or TypeError for wrong options, before anything is done."""
        options = dict(options)
        save = options.pop("save_checkpoint", True)
        settings = settings_of(options, self.trainer.args.loss_type, PER_STEP)
        return await self.in_worker(partial(self.update, groups, settings | ({} if save else {"save_strategy": "no"})))

    def update(self, gathered: Sequence[TrajectoryGroup], settings: Mapping[str, Any]) -> dict[str, Any]:
        sampled = Sampled(self.chat.histories, [name for name in self.names() if name != self.base_model])
        groups = sampled.groups(gathered)
        told = self.ranks.gather("what was played", (len(groups), len(gathered), sampled.tally(gathered, groups)))
        counts = Tally.total(tally for _, _, tally in told).metrics()
        if not any(trained for trained, _, _ in told):
            logger.warning("no step was made: none of %d groups can be trained on; the step stays %d",
                           sum(played for _, played, _ in told), self.step)
            return counts
        self.training = True
        try:
            line = self.trainer.step(groups, counts, **settings)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.training = False
            self.worker.on_policy_update(self.trainer.state.policy_version)
            self.read_checkpoints()
        self.error = None
        return line

    # Records

    async def log(
        self, groups: Sequence[TrajectoryGroup], split: str, metrics: Mapping[str, float], step: int | None
    ) -> None:
        """Log the means of trajectories that are not trained on, and the caller's metrics. For the split `train`, whose
        trajectories the step has logged already, only new metrics are written."""
        at = self.step if step is None else step
        known = {name for line in self.trainer.state.log_history if line.get("step") == at for name in line}
        tally = tally_of([] if split == TRAIN else groups,
                         {name: value for name, value in metrics.items() if split != TRAIN or name not in known})
        await self.in_worker(partial(self.note, tally, split, at), sleep=False)

    def note(self, tally: Tally, split: str, step: int) -> None:
        """Write the sums and means of the tallies of all ranks, unless the tallies are empty."""
        if line := Tally.total(self.ranks.gather(f"the log of {split}", tally)).of_split(split):
            self.trainer.note(line, step)

    def best_step(self, metric: str) -> int | None:
        """Return the step whose checkpoint has the highest mean of a metric (of equal ones the latest), or None."""
        path = self.folder / METRICS
        names = {metric, metric.removeprefix(f"{TRAIN}/")}
        values: dict[int, list[float]] = {}
        for line in read_lines(path) if path.exists() else []:
            for value in (line[name] for name in names if line.get(name) is not None):
                values.setdefault(int(line["step"]), []).append(value)
        means_of = {step: fmean(numbers) for step, numbers in values.items() if step in self.saved}
        if not means_of:
            logger.warning("no checkpoint has %s in %s: none is the best", metric, path)
        return max(means_of, key=lambda step: (means_of[step], step), default=None)

    async def delete_checkpoints(self, metric: str) -> None:
        """Delete all checkpoints except the newest and the best by this metric."""
        await self.in_worker(partial(self.prune, metric), sleep=False)

    def prune(self, metric: str) -> None:
        if self.ranks.leads:
            best = self.best_step(metric)
            prune(self.folder, 1, {path for step, path in self.saved.items() if step == best})
        self.read_checkpoints()
