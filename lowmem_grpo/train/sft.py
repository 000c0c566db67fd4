"""Supervised fine-tuning of the adapter, before GRPO: a new answer format is taught where sampling would never find it.

Same frozen base, same kernels as GRPO: sequences packed without padding, log-probabilities without logits, steps that
survive a shortage of memory. The loss of an optimizer step is

    loss = -sum(log p(completion token)) / N          N: completion tokens of the whole step, in all its micro-batches

which is TRL's `nll` with completion_only_loss. Its gradient does not depend on how the step is cut into micro-batches.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.sft import SFTConfig
from lowmem_grpo.data.examples import Example, ExampleEncoder, as_examples
from lowmem_grpo.data.prompts import DataError, Prompt, PromptSource
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.losses.objective import Objective, StepTotals
from lowmem_grpo.memory.advice import MemoryAdvice
from lowmem_grpo.memory.bounds import MemoryExhaustedError, RunMemory
from lowmem_grpo.memory.peaks import peak_memory
from lowmem_grpo.models.policy import Policy, mixed_dtype
from lowmem_grpo.offload.activations import enable_checkpointing
from lowmem_grpo.preflight.before_run import before_training, preflight
from lowmem_grpo.preflight.first_steps import FirstSteps
from lowmem_grpo.runs.clock import Clock, mean_of
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.runs.journal import LAST
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import Callbacks, Interrupt, TrainerControl, TrainerState
from lowmem_grpo.train.grpo import TrainOutput
from lowmem_grpo.train.learner import Learner
from lowmem_grpo.train.nonfinite import Guard, NonFiniteError
from lowmem_grpo.train.optim import make_optimizer, make_scheduler
from lowmem_grpo.train.run_memory import plan_training
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup
from lowmem_grpo.views.live import LiveView, shown
from lowmem_grpo.views.sinks import make_sinks

logger = logging.getLogger(__name__)

MEASURED = ("loss", "entropy", "learning_rate", "grad_norm", "optimizer/skipped", "nonfinite/steps",
            "micro_batches")  # of a step, by the learner


class SFTObjective(Objective):
    """-log p of every completion token, averaged over the step."""

    def loss(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, totals: StepTotals) -> LossOutput:
        return LossOutput(-logprobs.sum() / totals.tokens, {"entropy": entropy.detach().mean()})


class SFTTrainer:
    """Fine-tuning with TRL's constructor; `train()` loops over `step()`, records, and saves the adapter.

    The model goes on into GRPOTrainer as it is. GRPO's reference for the KL term stays the base model without adapter.
    """

    def __init__(
        self, model: FastPeftModel, train_dataset: Any, args: SFTConfig | None = None, processing_class: Any = None,
        eval_dataset: Any = None, callbacks: list[Any] | None = None,
    ) -> None:
        if not isinstance(model, FastPeftModel):
            raise TypeError(
                f"model is a {type(model).__name__}; load it with FastLanguageModel.from_pretrained and put LoRA on it "
                "with FastLanguageModel.get_peft_model"
            )
        self.model, self.args = model, args or SFTConfig()
        self.tokenizer = processing_class or model.loaded.tokenizer
        self.policy = Policy(model, mixed_dtype(model, self.args.bf16, self.args.fp16), self.args.logits_chunk)
        if self.args.gradient_checkpointing is not None:
            enable_checkpointing(self.policy.base, self.args.gradient_checkpointing)
        ends = self.policy.eos_token_ids(self.tokenizer)
        encoder = ExampleEncoder(self.tokenizer, self.longest_row(), ends, self.args.chat_template_kwargs)
        self.source = PromptSource(as_examples(train_dataset), encoder, self.args.seed, self.args.shuffle_dataset)
        self.eval_groups = self.encode_all(eval_dataset)
        self.state = TrainerState(max_steps=self.args.total_steps(len(self.source.dataset)))
        self.control, self.interrupt, self.clock = TrainerControl(), Interrupt(), Clock()
        self.run_dir = Path(self.args.output_dir)
        self.records = RunRecords(self.run_dir)
        self.view = None if self.args.disable_tqdm else SFTView()
        listeners = [*filter(None, [self.view]), FirstSteps(self.records, self.view.say if self.view else None),
                     *make_sinks(self.args.report_to)]
        self.callbacks = Callbacks([*listeners, *(callbacks or [])])
        self.memory = training_memory(model, self.args, self.policy, self.longest_row())
        self.learner = self.make_learner()

    def longest_row(self) -> int:
        """Tokens that prompt and completion may have together; ValueError where they would not fit the context."""
        context = self.model.loaded.max_seq_length
        if self.args.max_length is not None and self.args.max_length > context:
            raise ValueError(f"max_length is {self.args.max_length} and the context has {context} tokens; lower it, or "
                             "load with a larger max_seq_length")
        return self.args.max_length or context

    def encode_all(self, dataset: Any) -> list[RolloutGroup]:
        """Every usable row of the evaluation dataset; DataError where there is none."""
        if dataset is None:
            if self.args.eval_strategy != "no":
                raise ValueError(f'eval_strategy is "{self.args.eval_strategy}", which needs an eval_dataset; pass one')
            return []
        source = PromptSource(as_examples(dataset), self.source.encoder, self.args.seed, shuffle=False)
        encoded = [source.encoder.encode(row) for row in (source.dataset[i] for i in range(len(source.dataset)))]
        for index, reason in enumerate(encoded):
            if isinstance(reason, str):
                source.count_skip(index, f"{reason} (evaluation)")
        groups = as_groups(example for example in encoded if isinstance(example, Prompt))
        if not groups:
            raise DataError(f"no row of the evaluation dataset can be used: {source.skip_summary()}")
        return groups

    def make_learner(self) -> Learner:
        optimizer = make_optimizer(self.policy.trainable, self.args)
        scheduler = make_scheduler(optimizer, self.args, self.state.max_steps)
        fp16 = torch.float16 in (self.policy.autocast_dtype, self.policy.head.weight.dtype)
        offload = self.model.loaded.offload and self.policy.base.is_gradient_checkpointing
        guard = Guard(self.args.nonfinite_steps, self.state, self.records)
        return Learner(
            self.policy, self.args, SFTObjective(), optimizer, scheduler, offload=offload, fp16=fp16,
            bound=self.memory.train, guard=guard,
        )

    def step(self) -> dict[str, float]:
        """One optimizer step on the next rows; returns its metrics."""
        groups = as_groups(self.source.take(self.args.batch_size), self.state.policy_version)
        self.learner.prepare(groups, 1, self.state.policy_version)
        found = self.learner.forward_backward(groups) | self.learner.optim_step()
        self.state.global_step += 1
        self.state.policy_version += 1
        self.state.epoch = self.source.epoch
        completions = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
        self.state.num_tokens += completions + sum(len(group.prompt_ids) for group in groups)
        return {name: found[name] for name in MEASURED if name in found} | {"completions/tokens": completions}

    def evaluate(self) -> dict[str, float]:
        """Loss and entropy per completion token of the evaluation dataset, dropout off; metrics named eval_*."""
        if not self.eval_groups:
            raise ValueError("there is no eval_dataset; pass one to SFTTrainer")
        training = self.model.training
        self.model.eval()
        self.learner.fill_logprobs(self.eval_groups, "old_logprobs", "entropy")
        self.model.train(training)
        rollouts: list[Any] = [rollout for group in self.eval_groups for rollout in group.rollouts]
        loss, entropy = (torch.cat([getattr(r, name) for r in rollouts]) for name in ("old_logprobs", "entropy"))
        metrics = {"step": self.state.global_step, "eval_loss": -loss.mean().item(),
                   "eval_entropy": entropy.mean().item()}
        self.notify("on_evaluate", metrics=metrics)
        return metrics

    def preflight(self) -> list[Finding]:
        """What a run would stumble over, errors first: nothing is written."""
        return preflight(self)

    def train(self) -> TrainOutput:
        """Run to `max_steps`; the adapter is saved at the end, and where Ctrl-C or a failing step stops the run."""
        before_training(self)
        torch.manual_seed(self.args.seed)
        self.control.should_training_stop = False
        self.records.begin(self.args.overwrite_output_dir)
        self.learner.guard.begin(self.args.overwrite_output_dir)
        self.records.summary(self.describe("running"))
        self.notify("on_train_begin")
        status = "failed"
        try:
            self.tell_engine(asleep=True)
            with self.interrupt.watch():
                while self.state.global_step < self.state.max_steps and not self.should_stop():
                    self.train_step()
            status = "finished" if self.state.global_step >= self.state.max_steps else "interrupted"
            self.model.save_lora(self.run_dir / "adapter")
        except (NonFiniteError, MemoryExhaustedError) as error:
            self.model.save_lora(self.run_dir / "adapter")
            error.add_note(f"The adapter as it was before this step is in {self.run_dir / 'adapter'}")
            raise
        finally:
            self.tell_engine()
            self.records.summary(self.describe(status))
            self.notify("on_train_end")
        last = self.state.log_history[-1] if self.state.log_history else {}
        return TrainOutput(self.state.global_step, last, status == "finished")

    def should_stop(self) -> bool:
        return self.interrupt.requested or self.control.should_training_stop

    def tell_engine(self, asleep: bool = False) -> None:
        """An engine that sampled with this model frees its cache, or learns that the weights are others."""
        engine = self.model.loaded.keeper.kept
        if engine is not None and asleep:
            engine.sleep()
        elif engine is not None:
            engine.on_policy_update(self.state.policy_version)

    def notify(self, event: str, **details: Any) -> None:
        """Tell the listeners, with what transformers' Trainer tells them."""
        self.callbacks(
            event, self.args, self.state, self.control, model=self.model, processing_class=self.tokenizer,
            optimizer=self.learner.optimizer, lr_scheduler=self.learner.scheduler, **details,
        )

    def train_step(self) -> None:
        """One step, its line in the records where one is due, and an evaluation where one is due."""
        self.clock.restart()
        self.notify("on_step_begin")
        with self.clock.phase("train"):
            metrics = self.step()
        self.log(metrics)
        self.notify("on_step_end")
        if self.args.eval_strategy == "steps" and self.state.global_step % (self.args.eval_steps or 1) == 0:
            self.records.metrics(self.evaluate())

    def log(self, metrics: dict[str, float]) -> None:
        """Collect a step's line; every `logging_steps`, write the means since the last one and tell the listeners."""
        seconds = self.clock.metrics()["step_time"]
        self.state.elapsed += seconds
        line = {
            "step": self.state.global_step, "epoch": self.state.epoch, "elapsed": self.state.elapsed, **metrics,
            "step_time": seconds, "tokens_per_second": metrics["completions/tokens"] / seconds,
            **peak_memory(self.policy.device), "memory/oom_train": self.memory.train.failures,
            "num_tokens": self.state.num_tokens, "data/skipped_rows": sum(self.source.skipped.values()),
        }
        self.state.unlogged.append(line)
        last = self.should_stop() or self.state.global_step >= self.state.max_steps
        if self.state.global_step % self.args.logging_steps and not last:
            return
        logged = mean_of(self.state.unlogged) | {name: line[name] for name in LAST if name in line}
        self.state.unlogged = []
        self.records.metrics(logged)
        self.state.log_history.append(logged)
        self.notify("on_log", logs=logged)

    def describe(self, status: str) -> dict[str, Any]:
        """The run in plain values, for summary.json."""
        return {
            "status": status, "method": "sft", "model": self.model.loaded.name, "seed": self.args.seed,
            "steps": self.state.global_step, "train_seconds": self.state.elapsed,
            "skipped_rows": dict(self.source.skipped), "config": self.args.to_dict(),
        }


def as_groups(examples: Iterable[Prompt], policy_version: int = 0) -> list[RolloutGroup]:
    """Each example as a prompt with one completion, as packing and learner take them."""
    return [
        RolloutGroup(example.row, example.ids, [Rollout(
            example.completion_ids, [0.0] * len(example.completion_ids), "stop", policy_version=policy_version,
        )])
        for example in examples if isinstance(example, Example)
    ]


def training_memory(model: FastPeftModel, args: SFTConfig, policy: Policy, context: int) -> RunMemory:
    """The bound on micro-batches and what is said when memory runs out; on a card the plan's own bound."""
    loaded, settings = model.loaded, ["a lower max_length", "a smaller LoRA rank (r)"]
    if not loaded.offload:
        settings.insert(1, 'use_gradient_checkpointing="offload"')
    memory = RunMemory(MemoryAdvice({"train": settings}))
    if policy.device.type == "cuda":
        plan_training(memory, model, args, policy, "transformers", context)
    return memory


class SFTView(LiveView):
    """The live view with the loss in the place of rewards."""

    def __init__(self) -> None:
        super().__init__(title="SFT")

    def curves(self) -> list[tuple[str, str]]:
        return [("loss", "loss"), ("eval_loss", "evaluation loss"), *super().curves()]

    def line(self, logs: dict[str, float]) -> str:
        head, rest = super().line(logs).split("  ", 1)
        return f"{head}  loss {shown('loss', logs['loss'])}  {rest}" if "loss" in logs else f"{head}  {rest}"
