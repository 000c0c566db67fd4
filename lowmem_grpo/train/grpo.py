"""The loop: sample, score, forward_backward, optim_step, save_state; `rollout` and `update`; `train`."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.difficulty import DifficultyPools
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, PromptSource, longest_prompt
from lowmem_grpo.engines.base import Engine, OnGroup
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.memory.bounds import MemoryExhaustedError
from lowmem_grpo.memory.peaks import peak_memory
from lowmem_grpo.models.policy import Policy, mixed_dtype
from lowmem_grpo.offload.activations import enable_checkpointing
from lowmem_grpo.planning.run_time import PlannedTime
from lowmem_grpo.preflight.before_run import before_training, preflight
from lowmem_grpo.preflight.first_steps import FirstSteps
from lowmem_grpo.rewards import RewardScorer
from lowmem_grpo.rewards.calling.of_groups import EarlyScoring
from lowmem_grpo.rollout.collector import Collector
from lowmem_grpo.rollout.evaluation import Evaluation
from lowmem_grpo.rollout.parity import ParityGate
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.runs.clock import Clock, mean_of
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.runs.journal import Journal
from lowmem_grpo.runs.records import RecordError, RunRecords
from lowmem_grpo.runs.state import Callbacks, Interrupt, TrainerControl, TrainerState
from lowmem_grpo.train.grpo_objective import GRPOObjective
from lowmem_grpo.train.learner import Learner
from lowmem_grpo.train.nonfinite import Guard, NonFiniteError
from lowmem_grpo.train.optim import make_optimizer, make_scheduler
from lowmem_grpo.train.run_memory import plan_memory
from lowmem_grpo.train.saver import Saver
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.views.live import LiveView
from lowmem_grpo.views.report import write_report
from lowmem_grpo.views.sinks import make_sinks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOutput:
    """What `train` returns."""

    global_step: int
    metrics: dict[str, Any]
    finished: bool


class GRPOTrainer:
    """GRPO with TRL's constructor; `train()` loops over `rollout()` and `update(groups)`, records and saves."""

    def __init__(
        self, model: FastPeftModel, reward_funcs: Callable[..., Any] | list[Callable[..., Any]],
        args: GRPOConfig | None = None, train_dataset: Any = None, eval_dataset: Any = None,
        processing_class: Any = None, callbacks: list[Any] | None = None, engine: Engine | None = None,
    ) -> None:
        if not isinstance(model, FastPeftModel):
            raise TypeError(
                f"model is a {type(model).__name__}; load it with FastLanguageModel.from_pretrained and put LoRA on it "
                "with FastLanguageModel.get_peft_model"
            )
        self.model, self.args = model, args or GRPOConfig()
        self.tokenizer = processing_class or model.loaded.tokenizer
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.scorer = RewardScorer(
            functions, self.args.reward_weights, self.args.reward_timeout, self.args.score_while_sampling
        )
        self.policy = Policy(model, mixed_dtype(model, self.args.bf16, self.args.fp16), self.args.logits_chunk)
        model.loaded.keeper.expect(self.args.prompts_per_generation * self.args.num_generations)
        first = engine or model.engine(self.policy, self.tokenizer)
        if self.args.use_vllm and first.name != "vllm":
            raise ValueError(
                f'use_vllm=True, and the engine is {first.name}: load the model with fast_inference="vllm"'
            )
        if self.args.gradient_checkpointing is not None:
            enable_checkpointing(self.policy.base, self.args.gradient_checkpointing)
        longest, completion = self.args.max_prompt_length, self.args.max_completion_length
        longest = longest_prompt(longest, completion, model.loaded.max_seq_length)
        self.memory, self.peaks = plan_memory(model, self.args, self.policy, first, longest + completion)
        self.planned_time = PlannedTime(self.peaks.plan, model.config)
        encoder = PromptEncoder(self.tokenizer, longest, self.args.chat_template_kwargs)
        pools = DifficultyPools() if self.args.difficulty_pools else None
        self.source = PromptSource(train_dataset or [], encoder, self.args.seed, self.args.shuffle_dataset, pools)
        self.state = TrainerState(max_steps=self.args.total_steps(len(self.source.dataset)))
        self.control, self.interrupt, self.clock = TrainerControl(), Interrupt(), Clock(self.peaks)
        self.run_dir = Path(self.args.output_dir)
        self.records = RunRecords(self.run_dir)
        self.view = None if self.args.disable_tqdm else LiveView()
        self.callbacks = Callbacks([*self.default_listeners(), *(callbacks or [])])
        self.journal = Journal(self.args, self.state, self.records)
        self.objective = GRPOObjective(self.args, exact=not self.policy.drops)
        self.learner = self.make_learner()
        given = engine is not None
        self.sampler = Sampler(
            model, self.policy, self.tokenizer, self.memory, self.state, self.clock, first, given
        )
        self.scoring = Scoring(self.scorer, self.args, self.state, self.clock)
        self.parity = ParityGate(
            self.policy, self.args.sampling(None), self.args.parity_steps, self.args.parity_bound, state=self.state,
            stride=self.args.steps_per_rollout, memory=self.memory.train, mismatch=self.objective.mismatch,
            clock=self.clock,
        )
        self.evaluation = Evaluation(eval_dataset, self.args, encoder, self.sampler, self.scoring)
        self.collector = Collector(
            self.args, self.args.draws, self.source, self.state, self.objective, self.sampler, self.scoring,
            self.parity,
        )
        self.saver = Saver(
            self.run_dir, self.args, self.model, self.learner, self.source, self.state, self.memory,
            self.collector.replay, self.scorer.names,
        )
        if note := self.args.rounding():
            logger.warning(note)
        if self.args.sampling(0).truncates:
            logger.warning("top_p, top_k or min_p cut tokens off: sampled log-probabilities are not the policy's own")

    def default_listeners(self) -> list[Any]:
        """The live view, what looks at the first steps, and the sinks of `report_to`."""
        first = FirstSteps(self.records, self.view.say if self.view else None, self.scorer)
        return [*filter(None, [self.view]), first, *make_sinks(self.args.report_to)]

    def make_learner(self) -> Learner:
        optimizer = make_optimizer(self.policy.trainable, self.args)
        scheduler = make_scheduler(optimizer, self.args, self.state.max_steps)
        fp16 = torch.float16 in (self.policy.autocast_dtype, self.policy.head.weight.dtype)
        offload = self.model.loaded.offload and self.policy.base.is_gradient_checkpointing
        guard = Guard(self.args.nonfinite_steps, self.state, self.records)
        return Learner(
            self.policy, self.args, self.objective, optimizer, scheduler, offload=offload, fp16=fp16,
            bound=self.memory.train, guard=guard,
        )

    @property
    def engine(self) -> Engine:
        """What sampled last."""
        return self.sampler.engine

    # The four verbs, each usable alone.

    def sample(
        self, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[RolloutGroup]:
        """`params.n` rollouts of each prompt by the current policy, without rewards; `on_group` gets those of each
        prompt while others are sampled."""
        return self.sampler.sample(prompts, params, on_group)

    def renew_engine(self) -> None:
        """Take the model's engine again, where another model may have sampled since."""
        self.sampler.renew()

    def forward_backward(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Add the gradient of one optimizer step's loss over scored groups; returns loss metrics."""
        self.learner.prepare(groups, 1, self.state.policy_version)
        return self.learner.forward_backward(groups)

    def optim_step(self) -> dict[str, float]:
        """Apply the gradients and tell the engine that the policy changed; returns norm and learning rate."""
        metrics = self.learner.optim_step()
        self.state.global_step += 1
        self.state.policy_version += 1
        self.engine.on_policy_update(self.state.policy_version)
        return metrics

    def save_state(self) -> Path:
        """Write a checkpoint of everything that a later `train(resume_from_checkpoint=...)` needs."""
        folder = self.saver.save()
        self.notify("on_save")
        return folder

    # The visible loop.

    def rollout(self) -> list[RolloutGroup]:
        """Sample and score the next prompts: groups with rewards and advantages, chosen as `Collector` says."""
        return self.collector.collect()

    def update(self, groups: list[RolloutGroup], at_most: int | None = None) -> dict[str, float]:
        """Train on scored groups: every optimizer step that `num_iterations` and `steps_per_generation` ask for.

        `at_most` bounds their number.
        """
        with self.clock.phase("train"):
            size = self.args.prompts_per_step
            parts = [groups[start : start + size] for start in range(0, len(groups), size)]
            order = (parts * self.args.num_iterations)[:at_most]
            self.learner.prepare(groups, len(order), self.state.policy_version)
            # dapo and its kin count the tokens of the generation, bnpo those of the optimizer step
            shared = LOSS_TYPES[self.args.loss_type].counts_generation
            tokens = self.learner.num_tokens(groups) / len(parts) if shared else None
            steps = [self.learner.forward_backward(part, tokens) | self.optim_step() for part in order]
        return mean_of(steps) | self.learner.guard.over(steps)

    def begin_scoring(self, prompts: list[Prompt]) -> EarlyScoring:
        """What scores finished groups of these prompts while others are sampled; give its `on_group` to `sample`."""
        return self.scoring.begin(prompts)

    def score(self, groups: list[RolloutGroup], scoring: EarlyScoring | None = None) -> dict[str, float]:
        """Set rewards, their weighted sum and the advantage of every rollout; returns what functions logged."""
        return self.collector.score(groups, scoring or self.scoring.begin(groups))

    def preflight(self) -> list[Finding]:
        """What a run would stumble over, errors first: nothing is sampled, called or written."""
        return preflight(self)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Run to `max_steps`, with records, checkpoints and listeners; PreflightError where that would come to nothing.

        `resume_from_checkpoint` is True for the newest good checkpoint of `output_dir`, or a checkpoint's folder.
        """
        before_training(self)
        self.begin(resume_from_checkpoint)
        self.notify("on_train_begin")
        status = "failed"
        try:
            with self.interrupt.watch():
                while self.state.global_step < self.state.max_steps and not self.should_stop():
                    self.train_step()
            status = "finished" if self.state.global_step >= self.state.max_steps else "interrupted"
        except BaseException:
            with suppress(RecordError):  # a full disk is what failed: the first error says so
                self.records.summary(self.describe(status))
            raise
        finally:
            self.notify("on_train_end")
        self.end(status)
        last = self.state.log_history[-1] if self.state.log_history else {}
        return TrainOutput(self.state.global_step, last, status == "finished")

    def notify(self, event: str, **details: Any) -> None:
        """Tell the listeners, with what transformers' Trainer tells them."""
        self.callbacks(
            event, self.args, self.state, self.control, model=self.model, processing_class=self.tokenizer,
            optimizer=self.learner.optimizer, lr_scheduler=self.learner.scheduler, **details,
        )

    def should_stop(self) -> bool:
        return self.interrupt.requested or self.control.should_training_stop

    def train_step(self) -> None:
        """One rollout, its update, its records, and a save where one is due."""
        self.clock.restart()
        self.saver.mark()
        self.notify("on_step_begin")
        before = self.state.global_step
        with self.saved_before(Exception):
            groups = self.rollout()
        with self.saved_before(MemoryExhaustedError, NonFiniteError):
            metrics = self.update(groups, self.state.max_steps - before)
        self.log(before, metrics, groups)
        self.saver.mark()
        self.notify("on_step_end", groups=self.collector.sampled)
        if self.due(before, self.args.eval_steps, self.args.eval_strategy):
            with self.saved_before(MemoryExhaustedError):
                self.records.metrics(self.evaluate())
        if self.due(before, self.args.save_steps, self.args.save_strategy) or self.control.should_save:
            self.control.should_save = False
            self.save_state()

    def due(self, before: int, every: int | None, strategy: str) -> bool:
        """Whether a multiple of `every` lies in the steps just made."""
        return strategy == "steps" and every is not None and self.state.global_step // every > before // every

    @contextmanager
    def saved_before(self, *kinds: type[Exception]) -> Iterator[None]:
        """Where such an error ends the run, save what came before this step's rollout, to be resumed."""
        try:
            yield
        except kinds as error:
            if self.state.global_step:
                self.saver.go_back()
                folder = self.save_state()
                error.add_note(f"Saved {folder}; mend the cause, then go on with train(resume_from_checkpoint=True)")
            raise

    def log(self, before: int, metrics: dict[str, float], groups: list[RolloutGroup]) -> None:
        """Write one step's metrics and completions, and tell the listeners."""
        timing = self.clock.metrics()
        self.state.elapsed += timing["step_time"]
        line = {
            "step": self.state.global_step, "epoch": self.state.epoch, "elapsed": self.state.elapsed,
            **metrics, **self.collector.metrics(groups, self.clock.seconds["generate"]), **timing,
            **self.planned_seconds(before, groups),
            **peak_memory(self.policy.device), **self.peaks.metrics(), "memory/kv_bytes": self.engine.kv_bytes,
            **self.memory.metrics(), "policy_version": self.state.policy_version,
        }
        logged = self.journal.write(before, line, groups)
        if logged is not None:
            self.notify("on_log", logs=logged)

    def planned_seconds(self, before: int, groups: list[RolloutGroup]) -> dict[str, float]:
        """What the step just made should have taken by its plan, on a card."""
        updates = self.state.global_step - before
        fields = self.objective.needed_before(updates)
        return self.planned_time.metrics(self.collector.sampled, groups, updates, self.args.num_iterations, fields)

    def evaluate(self) -> dict[str, float]:
        """Mean rewards on the evaluation dataset, sampled as in training; metrics named eval_*."""
        metrics = {"step": self.state.global_step} | self.evaluation.run()
        self.notify("on_evaluate", metrics=metrics)
        return metrics

    # Beginning and ending.

    def begin(self, resume: bool | str | None) -> None:
        """A fresh run directory, or the state of a checkpoint."""
        torch.manual_seed(self.args.seed)
        self.control.should_training_stop = False  # what stopped an earlier `train`
        if not resume:
            self.records.begin(self.args.overwrite_output_dir)
            self.learner.guard.begin(self.args.overwrite_output_dir)
        elif self.saver.resume(resume):
            self.records.rewind(self.state.global_step)
            self.engine.on_policy_update(self.state.policy_version)
        else:
            logger.warning("%s has no checkpoint yet: starting from step 0", self.run_dir)
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.records.rewind(0)
        self.records.summary(self.describe("running"))

    def end(self, status: str) -> None:
        """Save where the run stopped, and write adapter, summary and report."""
        if self.args.save_strategy != "no" or status == "interrupted":
            folder = self.save_state()
            if status == "interrupted":
                logger.warning("stopped at step %d; go on with train(resume_from_checkpoint=True) from %s",
                               self.state.global_step, folder)
        self.model.save_lora(self.run_dir / "adapter")
        self.finish(self.describe(status))

    def finish(self, summary: dict[str, Any]) -> None:
        """Add to summary.json and remake the report."""
        self.records.summary(summary)
        write_report(self.run_dir)

    def describe(self, status: str) -> dict[str, Any]:
        """The run in plain values, for summary.json."""
        return {
            "status": status, "model": self.model.loaded.name, "seed": self.args.seed, "steps": self.state.global_step,
            "train_seconds": self.state.elapsed, "skipped_rows": dict(self.source.skipped),
            "best_checkpoint": self.state.best_model_checkpoint, "config": self.args.to_dict(),
        }
