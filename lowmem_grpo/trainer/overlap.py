"""Groups that are complete are trained while the last sequences of their step are still sampled. The policy stays as it
is until the step, so nothing is off-policy: the gradient is a sum over groups, and linear in what it is divided by,
which may only be known in the end. If anything that it depends on turns out otherwise, or fails, what was added is
dropped, and the step is made as without this."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from lowmem_grpo.config.strategies import LATE, MEND, PARALLEL
from lowmem_grpo.data.prompts import Prompt, as_group
from lowmem_grpo.engines.base import MEANWHILE, ON_GROUP, Engine, capabilities_of
from lowmem_grpo.losses.objective import StepTotals
from lowmem_grpo.memory.offload.embedding import on_host
from lowmem_grpo.memory.oom import free
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.step_accumulator import PartialGradient, StepAccumulator, facts_of
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

logger = logging.getLogger(__name__)
TAIL = 0.5  # in turn with decoding, micro-batches are trained once fewer than this share of the sequences are left
STEPS = 8  # token steps between two micro-batches


class OverlappedTraining:
    """Trains the complete groups of one step at a time; `gradient` gives what was trained to the update."""

    def __init__(
        self, learner: Learner, scoring: Scoring, longest: int, plan: MemoryPlan | None = None, parallel: bool = False
    ) -> None:
        """`longest` is the most tokens of a completion; `plan` bounds the memory on a card."""
        self.learner, self.scoring, self.longest, self.plan = learner, scoring, longest, plan
        self.policy, self.state, self.clock = learner.policy, scoring.state, scoring.clock
        self.worker = ThreadPoolExecutor(1, "train while sampling") if parallel else None
        on_card = parallel and self.policy.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.policy.device) if on_card else None
        self.partial: PartialGradient | None = None
        self.batches: deque[MicroBatch] = deque()  # to be trained
        self.jobs: list[tuple[MicroBatch, Future[None]]] = []  # given to the worker
        self.dropped = self.said_full = False  # what was begun in this step; that memory has no room

    def start_step(self, prompts: list[Prompt], calls: RewardBatch) -> None:
        """Take note that the sampling of these prompts begins; `calls` score them."""
        self.drop()
        self.prompts, self.calls, self.waiting = prompts, calls, dict[int, RolloutGroup]()
        self.widest = self.steps = 0
        self.dropped = False

    def on_group(self, index: int, rollouts: list[Rollout]) -> None:
        """Have the rollouts of a prompt scored, all of which are there."""
        self.calls.add_group(index, rollouts)
        self.waiting[index] = as_group(self.prompts[index], rollouts)

    def meanwhile(self, running: int) -> None:
        """Between two steps of decoding: train a micro-batch, or hand what is scored to the worker."""
        self.widest = max(self.widest, running)
        if self.dropped or not (self.worker or running <= TAIL * self.widest):
            return
        self.steps += 1
        if self.steps % STEPS == 0 and self.has_room():
            with self.dropping_on_error():
                self.collect_jobs(wait=False)
                self.take_scored_groups()
                self.train_some()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside the engine samples; behind it the worker has ended, and an error has left no gradient behind."""
        try:
            yield
        except BaseException:
            self.drop()
            raise
        self.join_worker()

    def join_worker(self) -> None:
        """Wait for the worker's micro-batch; those that it has not begun are left to the update."""
        with self.dropping_on_error():
            self.batches.extendleft([batch for batch, job in reversed(self.jobs) if job.cancel()])
            self.collect_jobs(wait=True)

    def has_room(self) -> bool:
        """Return whether a micro-batch fits beside the cache, within what the larger phase is planned to take."""
        device = self.policy.device
        if device.type != "cuda" or self.plan is None:
            return True
        unused, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needed = self.plan.train - sum(min(row.train, row.rollout) for row in self.plan.rows)
        fits = total - unused - cached + needed <= self.plan.peak
        if not fits and not self.said_full:
            self.said_full = True
            logger.info("train_while_sampling waits: the key-value cache leaves no room for a micro-batch yet")
        return fits

    def take_scored_groups(self) -> None:
        """Make micro-batches of the complete groups whose rewards are known."""
        scored = {index: scores for index in self.waiting if (scores := self.calls.scored(index)) is not None}
        ready = [self.waiting.pop(index) for index in scored]
        for group, scores in zip(ready, scored.values(), strict=True):
            self.scoring.apply_early(group, scores)
        if not ready:
            return
        self.partial = self.partial or self.nothing_yet(len(ready[0].rollouts))
        self.learner.prepare(ready, 1, self.state.policy_version)
        self.partial.groups |= {id(group.rollouts[0]): facts_of(group) for group in ready}
        limits = self.learner.limits
        tokens = self.learner.bound.under(limits.tokens)
        self.batches += pack(self.learner.trained_groups(ready), tokens, limits.sequences, limits.spread)

    def nothing_yet(self, count: int) -> PartialGradient:
        """Return nothing of a gradient, of prompts with `count` completions each; the number of tokens is guessed."""
        objective = self.learner.objective
        objective.start_update([], self.state.policy_version)
        self.policy.differing_routes()  # those of other passes are not this step's
        sequences, tokens = len(self.prompts) * count, len(self.prompts) * count * self.longest
        totals = StepTotals(sequences, tokens, tokens)
        return PartialGradient(totals, StepAccumulator(self.policy.device), objective.conditions)

    def train_some(self) -> None:
        """Train one micro-batch here, or give all to the worker."""
        if self.worker is not None:
            while self.batches:
                batch = self.batches.popleft()
                self.jobs.append((batch, self.worker.submit(self.train_beside, batch)))
        elif self.batches:
            began = time.perf_counter()
            self.train(self.batches.popleft())
            self.clock.moved_to_train(time.perf_counter() - began)

    def train(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch, in the mode of training; the engine's mode comes back."""
        training = self.policy.model.training
        self.policy.model.train()
        try:
            self.add(batch)
        finally:
            self.policy.model.train(training)

    def train_beside(self, batch: MicroBatch) -> None:
        """Do the same in the worker while others are sampled, on a card in a stream of its own."""
        began = time.perf_counter()
        if self.policy.base.is_gradient_checkpointing:
            self.policy.model.train()  # else nothing is recomputed. The engine, vLLM, looks at no mode
        if self.stream is None:
            self.add(batch)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self.policy.device))
            with torch.cuda.stream(self.stream):
                self.add(batch)
            self.stream.synchronize()
        self.clock.train_hidden = (self.clock.train_hidden or 0.0) + time.perf_counter() - began

    def add(self, batch: MicroBatch) -> None:
        assert self.partial is not None
        with torch.enable_grad():
            self.learner.add(batch.to(self.policy.device), self.partial.totals, self.partial.sums)

    def collect_jobs(self, wait: bool) -> None:
        """Forget the jobs that have ended, or wait for all that began; raises what one of them has met."""
        for _, job in self.jobs:
            if not job.cancelled() and (wait or job.done()):
                job.result()
        self.jobs = [(batch, job) for batch, job in self.jobs if not job.done()]

    @contextmanager
    def dropping_on_error(self) -> Iterator[None]:
        """Inside, an error drops what was begun: the update trains all groups, and raises what that does not mend."""
        try:
            yield
            return
        except Exception as error:  # noqa: BLE001, it is raised again if it comes again
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("training while sampling failed (%s); the step is made of the completions that are held", why)
        self.drop()  # not in the handler: the error's traceback keeps memory
        free(self.policy.device)

    def drop(self) -> None:
        """Forget what was begun, and its gradient, once the worker adds nothing more to it."""
        for _, job in reversed(self.jobs):
            if not job.cancel():
                job.exception()
        self.jobs.clear()
        self.batches.clear()
        if self.partial is not None:
            self.learner.optimizer.zero_grad(set_to_none=True)
        self.dropped, self.partial = True, None

    @contextmanager
    def gradient(self, groups: list[RolloutGroup]) -> Iterator[PartialGradient | None]:
        """Inside, the update is made with the gradient that was begun; None where nothing was trained, or where it does
        not hold any more. An error inside leaves no gradient behind."""
        try:
            self.finish(groups)
            yield self.partial
        finally:
            if self.partial is not None:
                self.learner.optimizer.zero_grad(set_to_none=True)
                self.partial = None

    def finish(self, groups: list[RolloutGroup]) -> None:
        """Train what is left of the gradient, and divide it by the totals of the step; drop it where it is another."""
        if self.partial is None:
            return
        objective = self.learner.objective
        objective.start_update([rollout for group in groups for rollout in group.rollouts], self.state.policy_version)
        if not self.partial.agrees(groups, objective.conditions):
            logger.info("what was trained while sampling is dropped: the step's rewards or corrections are others")
            return self.drop()
        while self.batches:
            with self.dropping_on_error():
                self.train(self.batches.popleft())
        if self.partial is not None:
            self.partial.divide_by(self.learner.totals(groups, None), objective, self.policy.trainable)

    def metrics(self, partial: PartialGradient | None, groups: list[RolloutGroup]) -> dict[str, float]:
        """Return the share of completions that were trained before all were sampled; and whether that was dropped."""
        total = sum(len(group.rollouts) for group in groups)
        share = 0.0 if partial is None else len(partial.rollouts) / max(total, 1)
        return {"train_while_sampling/share": share, "train_while_sampling/dropped": float(self.dropped)}


def check_overlap(mode: bool | str, policy: Policy, engine: Engine, scorer: RewardScorer, plays: bool) -> None:
    """Raise ValueError where groups cannot be trained while others are sampled; `plays`: they are episodes."""
    late = [name for name in scorer.names if name not in scorer.early]
    beside = mode == PARALLEL
    own = beside and engine.name != "vllm"
    wrong = {
        "episodes of several turns are sampled": plays,
        LATE.format(", ".join(late)): bool(late),
        f"the engine {engine.name} does not say when a step of decoding is done (its capabilities lack on_group or "
        "meanwhile)": not {ON_GROUP, MEANWHILE} <= capabilities_of(engine),
        "gradient checkpointing is on, which cannot be told from decoding with the same model at the same time (use "
        "train_while_sampling=True, or use_gradient_checkpointing=False)":
            own and policy.base.is_gradient_checkpointing,
        "the embedding is on the host and serves one of both at a time (use train_while_sampling=True, or "
        "offload_embedding=False)": own and bool(on_host(policy.base)),
        "lora_dropout is above 0, and random masks cannot be drawn in two threads": beside and policy.drops,
    }
    if reasons := [why for why, holds in wrong.items() if holds]:
        raise ValueError(f"train_while_sampling={mode!r}: {reasons[0]}; {MEND}")
