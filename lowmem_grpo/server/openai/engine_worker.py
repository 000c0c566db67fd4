"""`EngineWorker`: the one thread that owns a model and its engine, and runs completions and training by turns."""

import atexit
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.engines.decoding import budget_of, converse
from lowmem_grpo.engines.request_output import Logprob, OutputProcessor, as_request
from lowmem_grpo.fast_model import adapter_for
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.server.openai.request_queue import (
    LIVE,
    NO_ROUND,
    EngineCall,
    EngineSession,
    Keys,
    RequestQueue,
    WorkerClosedError,
    WorkerTask,
)
from lowmem_grpo.types import Rollout, Turn

logger = logging.getLogger(__name__)

T = TypeVar("T")
REMEMBERED = 8  # engine sessions whose widest rounds predict how many calls arrive together
AT_EXIT = 10.0  # seconds that the program's exit waits for calls in the engine


class EngineWorker:
    """Decodes calls from any thread with continuous batching, and runs tasks such as training in between.

    Calls of one `batch_key` (adapter, temperature ...) share an engine session. It ends when other calls or tasks wait
    and its own calls are finished, or were interrupted for another user. The KV cache of the adapter in training and of
    the base model is kept between sessions, until the engine sleeps."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase | None = None, *, seed: int = 0,
        policy: Policy | None = None, engine: Engine | None = None,
    ) -> None:
        """`model` comes from FastLanguageModel. `tokenizer` and `policy` are the trainer's (None: the model's own). An
        `engine` that is passed here is never replaced."""
        self.model, self.tokenizer, self.seed = model, tokenizer or model.loaded.tokenizer, seed
        self.policy, self.memory = policy or Policy(model.inner), RunMemory()
        self.vocabulary = len(self.policy.head.weight)  # which is read in one thread: it writes trained rows
        self.engine, self.given = engine, engine is not None
        self.policy_version = 0
        self.context: int = model.loaded.max_seq_length
        self.waiting, self.numbers, self.keys = RequestQueue(), itertools.count(), Keys()
        self.rounds: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # the last sessions' widest rounds
        self.thread = threading.Thread(target=self.work, name="lowmem_grpo worker", daemon=True)
        self.thread.start()
        atexit.register(self.close, AT_EXIT)

    # Called from any thread

    def submit(self, call: EngineCall) -> "Future[Turn]":
        """Queue a call, and return a future of its turn; for an invalid call the future raises ValueError. A cancelled
        call that is already in the engine ends there (in vLLM, it is sampled to its end), and its result is dropped."""
        self.check_elsewhere("whoever waits for a call there waits for ever: ask before or after it")
        own, number = call.params.seed, next(self.numbers)
        call.seed = random.Random(f"{self.seed}-{number}").getrandbits(62) if own is None else own
        try:  # what would make the engine session fail
            budget_of(call.ids, call.params.max_tokens, self.context)
            if unknown := [token for token in call.ids if not 0 <= token < self.vocabulary]:
                raise ValueError(f"the prompt has the token {unknown[0]}; the model's tokens are 0 to "
                                 f"{self.vocabulary - 1}")
        except ValueError as error:
            call.future.set_exception(error)
        else:
            self.waiting.add(call)
        return call.future

    def run(self, function: Callable[[], T], sleep: bool = True, user: str = "", adapter: Any = None) -> "Future[T]":
        """Run a function in the worker's thread while no call is in the engine, and return a future of its result. With
        `sleep`, the engine frees its memory first. `adapter` is a saved one that the function reads. RuntimeError if
        called in the worker's thread."""
        self.check_elsewhere("call the function itself")
        job = WorkerTask(function, sleep, user, adapter)
        self.waiting.add(job)
        return job.future

    def likeliest(self, call: EngineCall, turn: Turn, count: int) -> "Future[list[dict[int, Logprob]]]":
        """Return a future with the log-probs of the sampled token and of the `count` likeliest tokens, for each
        completion token. They take one more forward pass."""
        return self.run(partial(self.look_again, call, turn, count), False, call.user, call.adapter)

    def of_prompt(self, call: EngineCall, version: int, count: int) -> "Future[list[dict[int, Logprob]]]":
        """Return a future with what `likeliest` returns, for each prompt token behind the first. `version` is the
        policy version that should compute it."""
        first, rest = call.ids[:1], call.ids[1:]
        turn = Turn(first, rest, [0.0] * len(rest), "length", policy_version=version)
        if rest:
            return self.likeliest(replace(call, ids=first), turn, count)
        (empty := Future[list[dict[int, Logprob]]]()).set_result([])
        return empty

    def close(self, timeout: float | None = None) -> None:
        """Refuse waiting and later items with WorkerClosedError, and wait at most `timeout` seconds for the calls in
        the engine. The model stays loaded."""
        atexit.unregister(self.close)
        for item in self.waiting.close():
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(WorkerClosedError("the worker was closed before this was begun"))
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout)

    # Called in the worker's thread

    def on_policy_update(self, version: int) -> None:
        """Drop the KV cache of the old weights. RuntimeError unless a function that was passed to `run` calls this."""
        if threading.current_thread() is not self.thread:
            raise RuntimeError("the policy may change only while no call is in the engine; call on_policy_update in a "
                               "function given to run")
        self.policy_version = version
        if self.engine is not None:
            self.engine.on_policy_update(version)

    def work(self) -> None:
        while (item := self.waiting.next()) is not None:
            if isinstance(item, WorkerTask):
                self.do(item)
            else:
                self.serve(item)
        if self.engine is not None:
            self.engine.sleep()

    def do(self, job: WorkerTask) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            if job.sleep and self.engine is not None:
                self.engine.sleep()
            job.future.set_result(job.function())
        except BaseException as error:  # noqa: BLE001, the thread must survive any error
            job.future.set_exception(error)

    def serve(self, call: EngineCall) -> None:
        """Run one engine session for calls with the `batch_key` of `call`. An error fails the session's calls."""
        engine_session = EngineSession(self.waiting, call.batch_key, self.keys, max(self.rounds, default=NO_ROUND))
        try:
            engine = engine_session.engine = self.awake()
            with self.computing_with(call.adapter):
                converse(engine, engine_session, replace(call.params, n=1, seed=None), self.tokenizer)
            engine_session.check_done()
        except BaseException as error:
            logger.debug("a conversation with the engine broke off", exc_info=True)
            engine_session.fail(error.with_traceback(None))  # frames of a traceback would keep tensors alive
        self.rounds.append(engine_session.widest)

    def awake(self) -> Engine:
        """Return the engine; request it from the model if there is none for the current `policy`. vLLM is always
        requested: a process has only one, which another model may have used."""
        now: Any = self.engine
        if now is None or (not self.given and (now.name == "vllm" or now.policy is not self.policy)):
            engine = self.model.engine(self.policy, self.tokenizer)
            if engine is not self.engine:
                self.engine = engine
                self.memory.watch(engine)
                engine.on_policy_update(self.policy_version)
        assert self.engine is not None
        return self.engine

    @contextmanager
    def computing_with(self, adapter: Any) -> Iterator[None]:
        if adapter == LIVE:
            yield
        else:
            with adapter_for(self.model.inner, as_request(adapter)):
                yield

    def look_again(self, call: EngineCall, turn: Turn, count: int) -> list[dict[int, Logprob]]:
        """Compute `likeliest`. RuntimeError if the policy was trained since the turn was sampled."""
        if call.adapter == LIVE and turn.policy_version != self.policy_version:
            raise RuntimeError("the model was trained between this completion and its top_logprobs; ask again")
        drawn = Rollout(turn.completion_ids, turn.logprobs, turn.finish_reason, routes=turn.routes)
        answers = OutputProcessor(self.policy, self.tokenizer, SamplingParams(logprobs=count))
        with self.computing_with(call.adapter):
            return answers.likeliest(call.ids, drawn)

    def check_elsewhere(self, advice: str) -> None:
        """Raise RuntimeError if called in the worker's thread, which runs one item at a time."""
        if threading.current_thread() is self.thread:
            raise RuntimeError(f"this runs at the worker already, which does one thing at a time; {advice}")
