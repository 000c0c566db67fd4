"""Runs of TRL's trainers and ours with the same settings: the rows of each step, and the events that callbacks see."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import trl
from datasets import Dataset, IterableDataset
from small_models import shallow
from trainer_runs import adapter_of, load
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl_runs import END, PLAIN

from lowmem_grpo import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

EVENTS = ("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step",
          "on_optimizer_step", "on_substep_end", "on_step_end", "on_prediction_step", "on_log", "on_evaluate",
          "on_save", "on_epoch_end", "on_train_end")
FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
BASE = {**PLAIN, "max_steps": -1, "logging_strategy": "steps", "logging_steps": 1, "learning_rate": 1e-3,
        "lr_scheduler_type": "linear"}
OURS = {"save_strategy": "no", "max_steps": -1, "logging_steps": 1, "learning_rate": 1e-3, "preflight": False,
        "shuffle_dataset": False, "disable_tqdm": True}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@dataclass
class Record:
    """What a run did: the rows of each micro-batch or step, and (event, step, epoch, requests) of each event."""

    rows: list[list[Any]] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)  # of the last step
    trainer: Any = None

    def of(self, trainer: Any, resume: Any) -> "Record":
        trainer.train(resume_from_checkpoint=resume)
        self.trainer = trainer
        return self

    @property
    def state(self) -> Any:
        return self.trainer.state

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.state.log_history if "loss" in line]

    @property
    def weights(self) -> dict[str, Any]:
        return adapter_of(self.trainer.model)

    def count(self, event: str) -> int:
        return sum(name == event for name, *_ in self.events)

    @property
    def drawn(self) -> list[Any]:
        return [row for rows in self.rows for row in rows]

    @property
    def counted(self) -> tuple[Any, ...]:
        """Steps, the largest number of steps, epochs at the end and in all, and the learning rate of each step."""
        state = self.state
        return (state.global_step, state.max_steps, round(state.epoch, 6), state.num_train_epochs,
                [round(rate, 9) for rate in self.rates])


def noting(event: str) -> Any:
    def method(self: Any, args: Any, state: Any, control: Any, **kept: Any) -> None:
        asked = tuple(name for name in FLAGS if getattr(control, name))
        self.record.events.append((event, state.global_step, round(state.epoch or 0, 6), asked))
        if event == "on_pre_optimizer_step":
            self.record.gradients = {name.replace(".default", ""): p.grad.clone() for name, p in
                                     kept["model"].named_parameters() if p.grad is not None}
        if event == "on_optimizer_step":
            self.record.rates.append(kept["optimizer"].param_groups[0]["lr"])
        for name in self.asks.get((event, state.global_step), ()):
            setattr(control, name, True)

    return method


class Watcher(type("Noting", (TrainerCallback,), {event: noting(event) for event in EVENTS})):  # type: ignore[misc]
    """Notes every event, and sets the requests of `asks`, by event and step."""

    def __init__(self, record: Record, asks: dict[tuple[str, int], tuple[str, ...]] | None = None) -> None:
        self.record, self.asks = record, asks or {}


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(shallow())


def kept(rows: list[Any], stream: bool) -> Any:
    rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    if stream:
        return IterableDataset.from_generator(lambda: iter(rows))
    return Dataset.from_list(rows)


def their_sft(folder: Path, texts: list[Any], callbacks: Any = (), asks: Any = None, resume: Any = None,
              stream: bool = False, evaluated: int = 0, model: Any = None, **settings: Any) -> Record:
    record = Record()

    class Recorded(trl.SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            lines = inputs["input_ids"].tolist()
            record.rows.append([tuple(token for token in line if token != self.processing_class.pad_token_id)
                                for line in lines])
            return super().training_step(model, inputs, *rest)

    base = {name: value for name, value in BASE.items() if name not in ("max_completion_length",)}
    args = trl.SFTConfig(str(folder), train_sampling_strategy="sequential", **base | settings)
    trainer = Recorded(
        model or AutoModelForCausalLM.from_pretrained(shallow()), args, processing_class=tokenizer(),
        train_dataset=kept(texts, stream),
        eval_dataset=kept(texts[:evaluated], False) if evaluated else None,
        peft_config=None if model else peft.LoraConfig(**LORA, task_type="CAUSAL_LM"),
        callbacks=[Watcher(record, asks), *callbacks])
    return record.of(trainer, resume)


def our_sft(folder: Path, texts: list[Any], callbacks: Any = (), asks: Any = None, resume: Any = None,
            stream: bool = False, evaluated: int = 0, model: Any = None, **settings: Any) -> Record:
    record = Record()

    class Recorded(SFTTrainer):
        def next_groups(self) -> Any:
            groups = super().next_groups()
            record.rows.append([(*group.prompt_ids, *group.rollouts[0].completion_ids) for group in groups])
            return groups

    trainer = Recorded(
        model or load(), args=SFTConfig(str(folder), **OURS | settings), processing_class=tokenizer(),
        train_dataset=kept(texts, stream),
        eval_dataset=kept(texts[:evaluated], False) if evaluated else None,
        callbacks=[Watcher(record, asks), *callbacks])
    return record.of(trainer, resume)


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(completion)) % 5) for completion in completions]


def their_grpo(folder: Path, rows: int, callbacks: Any = (), asks: Any = None, resume: Any = None,
               stream: bool = False, evaluated: int = 0, **settings: Any) -> Record:
    record = Record()

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        record.rows.append(list(dict.fromkeys(prompts)))
        ids = [[5 + place % 7, 6, END] for place in range(len(prompts))]
        return {"prompt_ids": [[9, 10]] * len(prompts), "completion_ids": ids, "logprobs": None}

    prompts = [{"prompt": f"p{row}"} for row in range(rows)]
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(shallow()), by_length, trl.GRPOConfig(str(folder), **BASE | settings),
        train_dataset=kept(prompts, stream), eval_dataset=Dataset.from_list(prompts[:evaluated]) if evaluated else None,
        processing_class=tokenizer(), peft_config=peft.LoraConfig(**LORA, task_type="CAUSAL_LM"), rollout_func=rollout,
        callbacks=[Watcher(record, asks), *callbacks])
    return record.of(trainer, resume)


def our_grpo(folder: Path, rows: int, callbacks: Any = (), asks: Any = None, resume: Any = None,
             stream: bool = False, evaluated: int = 0, **settings: Any) -> Record:
    record = Record()

    class Recorded(GRPOTrainer):
        def next_groups(self) -> Any:
            groups = super().next_groups()
            record.rows.append([group.row["prompt"] for group in groups])
            return groups

    prompts = [{"prompt": f"p{row}"} for row in range(rows)]
    trainer = Recorded(
        load(), by_length, GRPOConfig(str(folder), **OURS | {"max_completion_length": 2, "parity_steps": 0}
                                            | settings),
        train_dataset=kept(prompts, stream), eval_dataset=prompts[:evaluated] if evaluated else None,
        processing_class=tokenizer(), callbacks=[Watcher(record, asks), *callbacks])
    return record.of(trainer, resume)
