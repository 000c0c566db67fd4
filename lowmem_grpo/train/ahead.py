"""Groups that are complete are trained while the last sequences of their step are still sampled.

The policy stays as it is until all groups are sampled and the optimizer steps, so nothing is off-policy: the gradient
of a step is a sum over its groups, whatever their order. What it has to be divided by may only be known in the end; it
is linear, so it is multiplied then. If anything that the gradient depends on turns out otherwise (a correction that
begins in this step, a reward that is no number), or if it fails, what was added is dropped, and the step is made of the
completions as without this.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lowmem_grpo.config.strategies import PARALLEL
from lowmem_grpo.data.prompts import Prompt, as_group
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.engines.rounds import takes
from lowmem_grpo.losses.objective import StepTotals
from lowmem_grpo.memory.bounds import free
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.offload.embedding import on_host
from lowmem_grpo.rewards.calling.of_groups import EarlyScoring
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.runs.clock import Clock
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.train.begun import Begun
from lowmem_grpo.train.learner import Learner
from lowmem_grpo.train.sums import Sums
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

TAIL = 0.5  # in turn with decoding, micro-batches are trained once fewer than this share of the sequences are left
STEPS = 8  # of decoding between two micro-batches


class Ahead:
    """Trains the complete groups of one step at a time; `settle` gives what was begun to the update."""

    def __init__(
        self, learner: Learner, scoring: Scoring, state: TrainerState, clock: Clock, longest: int,
        plan: MemoryPlan | None = None, parallel: bool = False,
    ) -> None:
        """`longest` is the most tokens of a completion; `plan` bounds the memory on a card."""
        self.learner, self.scoring, self.state, self.clock = learner, scoring, state, clock
        self.longest, self.plan, self.parallel = longest, plan, parallel
        self.begun: Begun | None = None
        self.batches: deque[MicroBatch] = deque()
        self.worker: threading.Thread | None = None
        self.failure = ""  # in words, until what was begun is dropped
        self.dropped = self.told = False  # what was begun in this step; that memory had no room, once

    # While sampling

    def begin(self, prompts: list[Prompt], calls: EarlyScoring) -> None:
        """The sampling of these prompts begins; `calls` score them."""
        self.drop()
        self.prompts, self.calls, self.waiting = prompts, calls, dict[int, RolloutGroup]()
        self.widest = self.steps = 0
        self.dropped, self.open = False, True

    def on_group(self, index: int, rollouts: list[Rollout]) -> None:
        """All rollouts of a prompt are there: have them scored."""
        self.calls.take_in(index, rollouts)
        self.waiting[index] = as_group(self.prompts[index], rollouts)

    def meanwhile(self, running: int) -> None:
        """Between two steps of decoding: train a micro-batch, or hand what is scored to the worker."""
        self.widest = max(self.widest, running)
        if self.dropped or self.failure or not (self.parallel or running <= TAIL * self.widest):
            return
        self.steps += 1
        if self.steps % STEPS == 0 and self.room():
            with self.surely():
                self.take_scored()
                self.go_on()

    def end(self) -> None:
        """All is sampled: the worker ends after its micro-batch."""
        self.open = False
        if self.worker is not None:
            self.worker.join()
            self.worker = None
        if self.failure:
            self.give_up()

    def room(self) -> bool:
        """Whether a micro-batch fits beside the cache without more memory than the larger phase is planned to take."""
        device = self.learner.policy.device
        if device.type != "cuda" or self.plan is None:
            return True
        unused, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needed = self.plan.train - sum(min(row.train, row.rollout) for row in self.plan.rows)
        fits = total - unused - cached + needed <= self.plan.peak
        if not fits and not self.told:
            self.told = True
            logger.info("train_while_sampling waits: the key-value cache leaves no room for a micro-batch yet")
        return fits

    def take_scored(self) -> None:
        """Make micro-batches of the complete groups whose rewards are known."""
        ready: list[RolloutGroup] = []
        for index in list(self.waiting):
            if (scores := self.calls.scored(index)) is not None:
                group = self.waiting.pop(index)
                self.scoring.apply_early(group, scores)
                ready.append(group)
        if not ready:
            return
        self.begun = self.begun or self.first(len(ready[0].rollouts))
        self.learner.prepare(ready, 1, self.state.policy_version)
        for group in ready:
            self.begun.take_in(group)
        limits = self.learner.limits
        tokens = self.learner.bound.under(limits.tokens)
        self.batches += pack(self.learner.trained_groups(ready), tokens, limits.sequences, limits.spread)

    def first(self, count: int) -> Begun:
        """Nothing yet, of prompts with `count` completions each; the number of tokens is guessed."""
        objective = self.learner.objective
        objective.begin([], self.state.policy_version)
        self.learner.policy.differing_routes()  # those of other passes are not this step's
        sequences = len(self.prompts) * count
        tokens = sequences * self.longest
        return Begun(StepTotals(sequences, tokens, tokens), Sums(self.learner.policy.device), objective.conditions)

    def go_on(self) -> None:
        """Train one micro-batch here, or see to it that the worker works."""
        if not self.batches:
            return
        if not self.parallel:
            began = time.perf_counter()
            self.train(self.batches.popleft())
            self.clock.moved_to_train(time.perf_counter() - began)
        elif self.worker is None or not self.worker.is_alive():
            self.worker = threading.Thread(target=self.work, name="train while sampling", daemon=True)
            self.worker.start()

    def work(self) -> None:
        """In the worker: train micro-batch after micro-batch while others are sampled, on a card in its own stream."""
        policy, began = self.learner.policy, time.perf_counter()
        device, on_card = policy.device, policy.device.type == "cuda"
        if policy.base.is_gradient_checkpointing:
            policy.model.train()  # else nothing is recomputed. The engine, vLLM, looks at no mode
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)) if on_card else nullcontext():
                while self.open and self.batches:
                    self.add(self.batches.popleft())
                if on_card:
                    torch.cuda.current_stream(device).synchronize()
        except Exception as error:  # noqa: BLE001, the thread that samples drops what was begun
            self.failure = said(error)
        self.clock.train_hidden = (self.clock.train_hidden or 0.0) + time.perf_counter() - began

    def train(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch, in the mode of training; the engine's mode comes back."""
        model = self.learner.policy.model
        training = model.training
        model.train()
        try:
            self.add(batch)
        finally:
            model.train(training)

    def add(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch."""
        assert self.begun is not None
        with torch.enable_grad():
            self.learner.add(batch.to(self.learner.policy.device), self.begun.totals, self.begun.sums)

    @contextmanager
    def surely(self) -> Iterator[None]:
        """Inside, an error drops what was begun: the update trains all groups, and raises what that does not mend."""
        try:
            yield
        except Exception as error:  # noqa: BLE001, it is raised again if it comes again
            self.failure = said(error)
        if self.failure:
            self.give_up()

    def give_up(self) -> None:
        """Drop what was begun after a failure, and say so."""
        logger.warning("training while sampling failed (%s); the step is made of the completions that are held",
                       self.failure)
        self.failure = ""
        self.drop()
        free(self.learner.policy.device)

    def drop(self) -> None:
        """Forget what was begun, and its gradient."""
        if self.begun is not None:
            self.learner.optimizer.zero_grad(set_to_none=True)
        self.dropped, self.begun = True, None
        self.batches.clear()

    # Afterwards

    def settle(self, groups: list[RolloutGroup]) -> Begun | None:
        """What of an update on these groups, the step's, is begun, with its last micro-batches trained; None where
        nothing is, or where it does not hold any more."""
        if self.begun is None:
            return None
        objective = self.learner.objective
        objective.begin([rollout for group in groups for rollout in group.rollouts], self.state.policy_version)
        if not self.begun.agrees(groups, objective.conditions):
            logger.info("what was trained while sampling is dropped: the step's rewards or corrections are others")
            self.drop()
            return None
        while self.batches and not self.dropped:
            with self.surely():
                self.train(self.batches.popleft())
        begun, self.begun = self.begun, None
        return begun

    def metrics(self, begun: Begun | None, groups: list[RolloutGroup]) -> dict[str, float]:
        """The share of completions that were trained, or looked at, before all were sampled; and whether that was
        dropped."""
        total = sum(len(group.rollouts) for group in groups)
        share = 0.0 if begun is None else len(begun.rollouts) / max(total, 1)
        return {"train_while_sampling/share": share, "train_while_sampling/dropped": float(self.dropped)}


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def check_ahead(mode: bool | str, policy: Policy, engine: Engine, scorer: RewardScorer, plays: bool) -> None:
    """Raise ValueError where groups cannot be trained while others are sampled; `plays` says that completions are
    episodes."""
    late = [name for name in scorer.names if name not in scorer.early]
    wrong = {
        "episodes of several turns are sampled": plays,
        f"the rewards {', '.join(late)} are computed after sampling (score_while_sampling=True computes them before)":
            bool(late),
        f"the engine {engine.name} does not say when a step of decoding is done (its generate takes no meanwhile)":
            not (takes(engine.generate, "meanwhile") and takes(engine.generate, "on_group")),
    }
    if mode == PARALLEL:
        wrong |= {why: engine.name != "vllm" and shared for why, shared in shared_state(policy).items()}
        wrong |= {"lora_dropout is above 0, and random masks cannot be drawn in two threads": policy.drops}
    if reasons := [why for why, holds in wrong.items() if holds]:
        raise ValueError(f"train_while_sampling={mode!r}: {reasons[0]}; mend that, or leave train_while_sampling out")


def shared_state(policy: Policy) -> dict[str, Any]:
    """What training changes in the model while our own engine decodes with it: (in words) whether it does."""
    return {
        "gradient checkpointing is on, which cannot be told from decoding with the same model at the same time (use "
        "train_while_sampling=True, or use_gradient_checkpointing=False)": policy.base.is_gradient_checkpointing,
        "the embedding is on the host and serves one of both at a time (use train_while_sampling=True, or "
        "offload_embedding=False)": bool(on_host(policy.base)),
    }
