"""Plays a batch of episodes: the engine decodes turns in this thread while environments and tools run in workers. If an
environment fails, the episode is played once more with the same seeds; if that fails too, the step leaves it out."""

import logging
import math
import random
import traceback
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.engines.base import Engine, Request
from lowmem_grpo.engines.decoding import converse
from lowmem_grpo.environments.env_spec import EnvSpecs, messages_of
from lowmem_grpo.environments.episode import Episode, EpisodeBounds
from lowmem_grpo.environments.protocol import Answer, AskBase, EnvHandle, EnvironmentFailedError
from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.results import ToolOutage
from lowmem_grpo.environments.workers import WorkerJob, Workers
from lowmem_grpo.rewards.calling.background import BackgroundLoop
from lowmem_grpo.rollout.speakers import BaseModelPlayer
from lowmem_grpo.types import OnGroup, Rollout

logger = logging.getLogger(__name__)
TRIES = 2  # attempts at an episode whose environment fails
BESIDE = 1.5  # episodes in play per sequence that the engine decodes at a time
CLOSING = 5.0  # seconds for environments to close when a batch is interrupted
ALL_FAILED = 3  # a run ends after so many batches in a row whose episodes all fail; after 1 until an episode succeeds
NAMED = 3  # failures per batch that are logged in full
PACKAGE = str(Path(__file__).parents[1])
Failure = tuple[str, BaseException]  # (message, error)


class Episodes:
    """Plays a run's episodes, batch by batch."""

    def __init__(self, specs: EnvSpecs, bounds: EpisodeBounds, stopping: Callable[[], bool] = lambda: False) -> None:
        """`stopping` returns True if the run is about to end; a failed episode is then not played again."""
        self.specs, self.bounds, self.stopping = specs, bounds, stopping
        self.loop = BackgroundLoop("environments")  # one for the run: connections of async tools are tied to it
        self.waited = 0.0  # seconds in the last batch in which the engine had nothing to decode
        self.worked = False  # True once an episode has succeeded
        self.failed_batches = 0  # consecutive batches in which all episodes failed
        self.shown: set[str] = set()  # tracebacks already logged
        self.said_empty = False

    def play(
        self, engine: Engine, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """Play `params.n` episodes of each prompt's row, and set each prompt's ids to the tokens that the policy read.
        EnvironmentFailedError if all episodes of the first batch, or of three batches in a row, fail."""
        slots = getattr(engine, "slots", None)
        live = None if slots is None else math.ceil(BESIDE * slots)
        batch = EpisodeBatch(self, prompts, params, on_group, live, in_rounds=engine.name != "vllm")
        try:
            batch.play(engine, params)
        finally:
            batch.close()
        self.waited = batch.workers.waited
        result = [batch.results[index] for index in range(len(prompts))]
        if batch.too_long:
            logger.warning("what reset returned did not fit in %d episodes: the first prompt has %d tokens, and the "
                           "context has room for %d. Return less, or load the model with a larger max_seq_length",
                           len(batch.too_long), max(batch.too_long), self.bounds.context)
        self.name_failures(batch.failures)
        self.check_working([rollout for group in result for rollout in group], batch.failures)
        return result

    def warn_of_empty_prompt(self) -> None:
        if not self.said_empty:
            self.said_empty = True
            logger.warning("reset returned nothing and the row has no prompt, so the policy reads an empty message of "
                           "the user, as in TRL; to give it a task let reset return a text, or give the rows a prompt")

    def name_failures(self, failures: list[Failure]) -> None:
        """Log the first failures of a batch. A traceback, limited to the user's code, is logged once."""
        for said, error in failures[:NAMED]:
            lines = where_it_failed(error)
            logger.warning("an environment failed: %s%s", said, "" if lines in self.shown else lines)
            self.shown.add(lines)
        if len(failures) > NAMED:
            logger.warning("environments failed %d times in this batch", len(failures))

    def check_working(self, rollouts: list[Rollout], failures: list[Failure]) -> None:
        """Raise EnvironmentFailedError if all episodes failed in too many consecutive batches (see ALL_FAILED)."""
        failed = all(rollout.failed for rollout in rollouts)
        self.worked, self.failed_batches = self.worked or not failed, self.failed_batches + 1 if failed else 0
        if self.failed_batches >= (ALL_FAILED if self.worked else 1):
            in_a_row = f" in {self.failed_batches} batches in a row" if self.worked else ""
            said, error = failures[-1]
            raise EnvironmentFailedError(f"all {len(rollouts)} episodes failed{in_a_row}, so there is nothing to train "
                                         f"on: {said}. Fix the environment, then start again or resume") from error


def where_it_failed(error: BaseException) -> str:
    """Return the traceback of the error's cause, in the user's code only, for the log; "" if there is none."""
    if error.__cause__ is None:
        return ""
    told = traceback.TracebackException.from_exception(error.__cause__)
    own = [frame for frame in told.stack if not frame.filename.startswith(PACKAGE)]
    told.stack = traceback.StackSummary.from_list(own)
    return "\n" + "".join(told.format(chain=False)).rstrip() if told.stack else ""


class EpisodeBatch:
    """The episodes of one call of `Episodes.play`, as a `Conversation` for the engine."""

    def __init__(
        self, episodes: Episodes, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None,
        most: int | None, in_rounds: bool,
    ) -> None:
        """At most `most` episodes are in play, so that groups finish one after the other. With `in_rounds`, each round
        of decoding waits for all workers, so that its turns do not depend on timing."""
        self.owner, self.prompts, self.n = episodes, prompts, params.n
        self.on_group, self.in_rounds = on_group, in_rounds
        self.seed = random.getrandbits(62) if params.seed is None else params.seed
        self.first = 0 if params.part is None else params.part[0]  # index of the first prompt in the whole batch
        self.workers = Workers(max(64, params.n), episodes.loop)
        self.tries: Counter[int] = Counter()
        self.live: dict[int, Episode] = {}
        self.ready: list[Request] = []
        self.other = BaseModelPlayer(self.heard, self.collect_all)
        self.ended: dict[int, Episode] = {}
        self.results: dict[int, list[Rollout]] = {}
        self.failures: list[Failure] = []
        self.too_long: list[int] = []  # lengths, in tokens, of first prompts that do not fit
        self.waiting = deque(range(len(prompts) * params.n))
        self.most = most or len(self.waiting)
        self.admit()

    def play(self, engine: Engine, params: SamplingParams) -> None:
        """Play all episodes, alternating between the policy's turns and the questions to the base model."""
        tokenizer = self.owner.specs.tokenizer
        converse(engine, self, params, tokenizer)
        while self.other.waiting:
            self.other.speak(engine, tokenizer)
            converse(engine, self, params, tokenizer)

    def next_requests(self, busy: bool) -> list[Request]:
        """Return the requests for ready turns (see `Conversation`); none if the base model should speak first."""
        self.collect_all(not busy)
        while not busy and self.workers.running and not (self.ready or self.held):
            self.collect(wait=True)
        if self.held:
            return []
        taken, self.ready = self.ready, []
        return sorted(taken, key=lambda request: request.key)

    @property
    def held(self) -> bool:
        """True if the policy's turns must wait: half or more of the episodes in play wait for the base model."""
        return 2 * len(self.other.waiting) >= len(self.live) > 0

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        """Add a sampled turn to its episode. A worker then runs tool calls, an environment step or `finish`."""
        episode = self.live[key]
        self.submit(key, episode.add_turn(rollout) or episode.finish)

    def admit(self) -> None:
        while self.waiting and len(self.live) < self.most:
            self.start(self.waiting.popleft())

    def start(self, key: int) -> None:
        """Start an episode, for the first time or again after a failure."""
        row, specs = self.prompts[key // self.n].row, self.owner.specs
        self.tries[key] += 1
        self.live[key] = Episode(key, row, messages_of(row), self.owner.bounds, specs.renderer(row),
                                 specs.toolbox_for(row), None, partial(self.seed_of, key), specs.within)
        self.submit(key, partial(self.reset, self.live[key]))

    def reset(self, episode: Episode, job: WorkerJob) -> Answer:
        """Make the environment and return its first observation. Runs in a worker."""
        specs = self.owner.specs
        if specs.factories is not None:
            made = specs.factories.make(episode.row)
            episode.handle = EnvHandle(made, job.call)
            episode.toolbox = specs.toolbox_for(episode.row, made)
            episode.row = specs.factories.columns_for(episode.row)
        return episode.reset(job)

    def seed_of(self, key: int, turn: int | str) -> int:
        """Return the seed of a turn, which does not depend on timing."""
        index, member = divmod(key, self.n)
        return random.Random(f"{self.seed}-{self.first + index}-{member}-{turn}").getrandbits(62)

    def submit(self, key: int, work: Callable[[WorkerJob], Any]) -> None:
        self.workers.submit(key, work, self.owner.bounds.call_seconds)

    def collect_all(self, wait: bool) -> None:
        """Process the results of finished jobs. If `wait` and turns are decoded in rounds, wait for all jobs."""
        self.collect(wait=False)
        while wait and self.in_rounds and self.workers.running:
            self.collect(wait=True)

    def collect(self, wait: bool) -> None:
        for job in sorted(self.workers.collect(wait), key=lambda job: job.key):
            if job.key >= 0:  # jobs with key -1 only close environments
                self.settle(job, self.live[job.key])

    def settle(self, job: WorkerJob, episode: Episode) -> None:
        """Continue or end an episode with the result of its job. If the job raised an error, fail the episode."""
        episode.seconds += job.seconds
        if isinstance(job.error, EnvironmentFailedError | ToolOutage | TimeoutError):
            self.fail(episode, job.error)
        elif isinstance(job.error, SystemExit):
            self.fail(episode, EnvironmentFailedError(f"it called sys.exit({job.error.code!r})"))
        elif job.error is not None:
            raise job.error
        elif episode.ending:  # this was the job of `finish`
            self.end_episode(episode, job.result)
        elif episode.seconds > self.owner.bounds.episode_seconds:
            self.fail(episode, TimeoutError(f"its calls took {episode.seconds:.0f} s together"))
        else:
            self.go_on(episode, job)

    def go_on(self, episode: Episode, job: WorkerJob) -> None:
        """Continue after a worker's answer: request the next turn, ask the base model, or end the episode."""
        try:
            if job.result.asks is not None:
                return self.ask(episode, job.result.asks, job.seconds)
            (episode.answered(job.result, job.seconds) if episode.turns else episode.open_prompt(job.result))
            if episode.empty:
                self.owner.warn_of_empty_prompt()
        except (RendererError, EnvironmentFailedError) as error:  # text that the template cannot render, or no text
            return self.fail(episode, error)
        if episode.ending == "context" and not episode.turns:
            self.too_long.append(len(episode.prompt))
        if episode.ending:
            self.submit(episode.key, episode.finish)
        else:
            self.ready.append(episode.request())

    def ask(self, episode: Episode, ask: AskBase, seconds: float) -> None:
        if episode.turns:
            episode.turns[-1].seconds += seconds
        ids = self.owner.specs.asking(ask.messages)
        room = min(ask.max_tokens, self.owner.bounds.context - len(ids))
        seed = self.seed_of(episode.key, f"other-{episode.asked}")
        episode.asked += 1
        self.other.ask(Request(episode.key, ids, room, seed), ask)

    def heard(self, key: int, ask: AskBase, said: str) -> None:
        episode = self.live[key]
        self.submit(key, lambda job: episode.pass_reply(job, ask, said))

    def fail(self, episode: Episode, error: BaseException) -> None:
        """Restart an episode whose environment failed or took too long, or end it if that was its last try."""
        self.failures.append((f"{error} (group {episode.key // self.n})", error))
        self.workers.submit(-1, episode.close, self.owner.bounds.call_seconds)
        if self.tries[episode.key] < TRIES and not self.owner.stopping():
            self.start(episode.key)
        else:
            episode.ending = "timeout" if isinstance(error, TimeoutError) else "environment_error"
            self.end_episode(episode, None)

    def end_episode(self, episode: Episode, pay: float | None) -> None:
        """End an episode with `pay` added to its last turn's reward, and report its group if that is complete."""
        if pay is not None and episode.turns:
            episode.turns[-1].reward = (episode.turns[-1].reward or 0.0) + pay
        self.ended[episode.key] = self.live.pop(episode.key)
        index = episode.key // self.n
        members = range(index * self.n, index * self.n + self.n)
        if all(key in self.ended for key in members):
            episodes = [self.ended[key] for key in members]
            prompt = next((each.prompt for each in episodes if each.prompt), [])
            self.prompts[index].ids, self.results[index] = prompt, [each.rollout(prompt) for each in episodes]
            if self.on_group is not None:
                self.on_group(index, self.results[index])
        self.admit()

    def close(self) -> None:
        """Close all environments and the workers. After an interrupt, pending calls have CLOSING seconds to end."""
        if self.live:
            self.workers.hurry(CLOSING)
        for episode in self.live.values():
            if episode.handle is not None and not episode.handle.closed:
                self.workers.submit(-1, episode.close, CLOSING)
        self.live.clear()
        self.waiting.clear()
        while self.workers.running:
            self.workers.collect(wait=True)
        self.workers.close()
