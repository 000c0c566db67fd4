"""Training on complete groups while the last sequences of the step are still sampled. Nothing is off-policy, because
the weights do not change before the optimizer step. If an input of the gradient changes, or the work fails, the
gradient is dropped, and the step is trained as without overlap."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

from lowmem_grpo.config.sampling import LATE, MEND, PARALLEL
from lowmem_grpo.data.prompts import Prompt, as_group
from lowmem_grpo.engines.base import MEANWHILE, ON_GROUP, Engine, capabilities_of
from lowmem_grpo.losses.objective import StepTotals
from lowmem_grpo.memory.offload.embedding import on_host
from lowmem_grpo.memory.oom import RECORDING, free
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy, in_mode
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.step_accumulator import StepAccumulator, facts_of
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

logger = logging.getLogger(__name__)
TAIL = 0.5  # without a worker, micro-batches are trained once at most this share of the sequences is unfinished
STEPS = 8  # decode steps between two micro-batches


class OverlappedTraining:
    """Trains the complete groups of the step that is being sampled; `gradient` hands the result to the update."""

    def __init__(
        self, learner: Learner, scoring: Scoring, longest: int, plan: MemoryPlan | None = None, parallel: bool = False
    ) -> None:
        """`longest` is the maximum completion length; `plan` limits GPU memory; `parallel` trains in a thread."""
        self.learner, self.scoring, self.longest, self.plan = learner, scoring, longest, plan
        self.policy, self.state, self.clock = learner.policy, scoring.state, scoring.clock
        self.worker = ThreadPoolExecutor(1, "train while sampling") if parallel else None
        on_card = parallel and self.policy.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.policy.device) if on_card else None
        self.partial: StepAccumulator | None = None  # beside the gradient itself, which the parameters hold
        self.batches: deque[MicroBatch] = deque()  # not trained yet
        self.jobs: list[tuple[MicroBatch, Future[None]]] = []  # submitted to the worker
        self.dropped = self.said_full = False  # True: this step's gradient was dropped; the lack of room was logged

    def start_step(self, prompts: list[Prompt], calls: RewardBatch) -> None:
        """Begin a step, before its prompts are sampled; `calls` scores their groups."""
        self.drop()
        self.prompts, self.calls, self.waiting = prompts, calls, dict[int, RolloutGroup]()
        self.widest = self.steps = 0
        self.dropped = False

    def on_group(self, index: int, rollouts: list[Rollout]) -> None:
        """Start scoring the complete rollouts of the prompt `index`."""
        self.calls.add_group(index, rollouts)
        self.waiting[index] = as_group(self.prompts[index], rollouts)

    def meanwhile(self, running: int) -> None:
        """Train a micro-batch, or submit it to the worker, between two decode steps of `running` sequences."""
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
        """Run the engine's sampling in this context. On exit wait for the worker; on an error drop the gradient."""
        checkpointing = self.worker is not None and self.policy.base.is_gradient_checkpointing
        # checkpointing needs train mode, and beside a worker, the engine is vLLM, which ignores the mode
        with in_mode(self.policy.model, True) if checkpointing else nullcontext():
            try:
                yield
            except BaseException:
                self.drop()
                raise
            self.join_worker()

    def join_worker(self) -> None:
        """Wait for the worker's current micro-batch, and take back the micro-batches that it has not begun."""
        with self.dropping_on_error():
            self.batches.extendleft([batch for batch, job in reversed(self.jobs) if job.cancel()])
            self.collect_jobs(wait=True)

    def has_room(self) -> bool:
        """Return whether a micro-batch fits beside the KV cache, within the planned peak of GPU memory."""
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
        if self.partial is None:
            self.partial = self.begin_gradient(len(ready[0].rollouts))
        self.learner.prepare(ready, 1, self.state.policy_version)
        self.partial.facts |= facts_of(ready)
        limits = self.learner.limits
        tokens = self.learner.bound.under(limits.tokens)
        self.batches += pack(self.learner.trained_groups(ready), tokens, limits.sequences, limits.spread)

    def begin_gradient(self, count: int) -> StepAccumulator:
        """Begin a gradient for prompts with `count` completions each. The loss is divided by guessed totals, because
        the step's tokens are known only once all groups are sampled; `finish` rescales the gradient."""
        objective = self.learner.objective
        objective.start_update([], self.state.policy_version)
        self.policy.differing_routes()  # clears the counts of earlier passes
        sequences, tokens = len(self.prompts) * count, len(self.prompts) * count * self.longest
        self.totals, self.conditions = StepTotals(sequences, tokens, tokens, sequences), objective.conditions
        return StepAccumulator(self.policy.device)

    def train_some(self) -> None:
        """Train one micro-batch in this thread, or submit all to the worker."""
        if self.worker is not None:
            while self.batches:
                batch = self.batches.popleft()
                self.jobs.append((batch, self.worker.submit(self.train_beside, batch)))
        elif self.batches:
            began = time.perf_counter()
            self.train(self.batches.popleft())
            self.clock.moved_to_train(time.perf_counter() - began)

    def train(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch with the model in train mode."""
        with in_mode(self.policy.model, True):
            self.add(batch)

    def train_beside(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch in the worker thread, on a GPU in a separate CUDA stream."""
        began = time.perf_counter()
        with RECORDING:  # so that a shortage of memory never meets a recording
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream(self.policy.device))
            with torch.cuda.stream(self.stream):  # None: no change
                self.add(batch)
            if self.stream is not None:
                self.stream.synchronize()
        self.clock.train_hidden = (self.clock.train_hidden or 0.0) + time.perf_counter() - began

    def add(self, batch: MicroBatch) -> None:
        assert self.partial is not None
        with torch.enable_grad():
            self.learner.add(batch.to(self.policy.device), self.totals, self.partial)

    def collect_jobs(self, wait: bool) -> None:
        """Remove the finished jobs, after waiting for all jobs if `wait` is True. Raise the error of a failed job."""
        for _, job in self.jobs:
            if not job.cancelled() and (wait or job.done()):
                job.result()
        self.jobs = [(batch, job) for batch, job in self.jobs if not job.done()]

    @contextmanager
    def dropping_on_error(self) -> Iterator[None]:
        """Drop the gradient after an error in this context; the update then trains all groups."""
        try:
            yield
            return
        except Exception as error:  # noqa: BLE001, the update raises it if it recurs
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("training while sampling failed (%s); the step is made of the completions that are held", why)
        self.drop()  # outside the handler: the error's traceback keeps memory alive
        free(self.policy.device)

    def drop(self) -> None:
        """Wait for the worker's current micro-batch, then discard all micro-batches and the gradient."""
        for _, job in reversed(self.jobs):
            if not job.cancel():
                job.exception()
        self.jobs.clear()
        self.batches.clear()
        if self.partial is not None:
            self.learner.optimizer.zero_grad(set_to_none=True)
        self.dropped, self.partial = True, None

    @contextmanager
    def gradient(self, groups: list[RolloutGroup]) -> Iterator[StepAccumulator | None]:
        """Yield the gradient that was computed while sampling (None without a valid one), and clear it on exit."""
        try:
            self.finish(groups)
            yield self.partial
        finally:
            if self.partial is not None:
                self.learner.optimizer.zero_grad(set_to_none=True)
                self.partial = None

    def finish(self, groups: list[RolloutGroup]) -> None:
        """Train the remaining micro-batches and rescale the gradient to the step's totals; drop an invalid gradient."""
        if self.partial is None:
            return
        objective = self.learner.objective
        objective.start_update([rollout for group in groups for rollout in group.rollouts], self.state.policy_version)
        if objective.conditions != self.conditions or not self.partial.facts.items() <= facts_of(groups).items():
            logger.info("what was trained while sampling is dropped: the step's rewards or corrections are others")
            return self.drop()
        while self.batches:
            with self.dropping_on_error():
                self.train(self.batches.popleft())
        if self.partial is not None and self.partial.count:
            factor = objective.rescaled(self.totals, self.learner.totals(groups, None))
            self.partial.rescale(factor, self.learner.trained.values())

    def metrics(self, partial: StepAccumulator | None, groups: list[RolloutGroup]) -> dict[str, float]:
        """Return the share of completions that were trained while sampling, and whether a gradient was dropped."""
        total = sum(len(group.rollouts) for group in groups)
        share = 0.0 if partial is None else len(partial.facts) / max(total, 1)
        return {"train_while_sampling/share": share, "train_while_sampling/dropped": float(self.dropped)}


def check_overlap(mode: bool | str, policy: Policy, engine: Engine, scorer: RewardScorer, plays: bool) -> None:
    """Raise ValueError if groups cannot be trained while others are sampled; `plays` is True for episodes."""
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
        "the model reads images, whose features one thread holds (use train_while_sampling=True)":
            beside and policy.inputs.never is not None,
        "lora_dropout is above 0, and random masks cannot be drawn in two threads": beside and policy.drops,
    }
    if reasons := [why for why, holds in wrong.items() if holds]:
        raise ValueError(f"train_while_sampling={mode!r}: {reasons[0]}; {MEND}")
