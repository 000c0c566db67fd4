"""What recipes share: from a lesson (data, rewards, what is right) to a trained model and its report, in one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from lowmem_grpo import FastLanguageModel, GRPOTrainer
from lowmem_grpo.fast_model import FastPeftModel, LoraRequest
from lowmem_grpo.preflight.before_run import PreflightError, report
from lowmem_grpo.recipes.held_out import Answers, measure, side_by_side
from lowmem_grpo.recipes.presets import Setup
from lowmem_grpo.recipes.warm_up import SFT, WarmUp
from lowmem_grpo.rewards import RewardCheck, check
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.saved_adapter import FINAL, read_summary
from lowmem_grpo.views.live import print_accuracy, print_samples

RewardFunctions = list[Any]  # callables; `Any`, since lists of one kind of them are no list[Callable]


@dataclass(frozen=True)
class Lesson:
    """What is taught, and how one sees that it was learnt."""

    name: str
    train: Dataset
    """Columns `prompt` and those that the rewards read."""
    rewards: RewardFunctions | Callable[[FastPeftModel], RewardFunctions]
    """Reward functions, or what makes them once the model is loaded."""
    test: Dataset | None = None
    """Held-out problems with the columns `prompt` and `answer`; None measures nothing before and after."""
    right: Callable[..., Sequence[float | None]] | None = None
    """A reward function that pays more than 0 for a right answer; `test` needs it."""
    warm_up: WarmUp | None = None
    """Supervised fine-tuning before GRPO."""
    note: str = ""
    """Said before the run begins."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further lines of summary.json."""

    def __post_init__(self) -> None:
        if (self.test is None) != (self.right is None):
            raise ValueError("a lesson has both `test` and `right`, or neither")


def teach(setup: Setup, lesson: Lesson, console: Console | None = None) -> GRPOTrainer:
    """Load, measure, train, measure again, report; the trainer, whose `state` says how far it came."""
    console = console or Console()
    if lesson.note:
        console.print(lesson.note, soft_wrap=True, markup=False, highlight=False)
    if not setup.resume:
        check_folders(setup, lesson)
    model, trainer = load(setup, lesson)
    check_run(trainer)
    if setup.resume and is_done(trainer, lesson):
        console.print(f"{trainer.run_dir} is finished: {steps(trainer.state.max_steps)}; a larger max_steps goes on",
                      soft_wrap=True, markup=False, highlight=False)
        return trainer
    before = measured(model, setup, lesson, None)
    found: dict[str, Any] = {"recipe": lesson.name, **lesson.facts}
    if before is not None:
        found |= {"eval_problems": len(before.texts), "accuracy_before": before.accuracy}
    if lesson.warm_up is not None:
        found["sft_steps"] = lesson.warm_up.steps
        if not lesson.warm_up.is_over(setup):
            if not lesson.warm_up.teach(model, setup, console):
                return trainer
            warm = measured(model, setup, lesson, model.current_lora())
            if before is not None and warm is not None:
                found |= lesson.warm_up.told(before, warm, console)
    result = trainer.train(resume_from_checkpoint=setup.resume or None)
    if not result.finished:
        trainer.finish(found)
        console.print(f"stopped at step {result.global_step}; the same command with resume=true goes on")
        return trainer
    after = measured(model, setup, lesson, model.current_lora())
    if before is not None and after is not None:
        found |= compared(lesson, before, after, console)
    trainer.finish(found)
    took = f"{steps(result.global_step)} in {trainer.state.elapsed:.0f} s; report: {trainer.run_dir}/report.html"
    console.print(took)
    return trainer


def steps(number: int) -> str:
    """In words."""
    return f"{number} step{'s' if number != 1 else ''}"


def check_folders(setup: Setup, lesson: Lesson) -> None:
    """RecordError where a fresh run would lie over another one: before minutes go into held-out answers."""
    folder = Path(setup.config.output_dir)
    for place in [folder, *([folder / SFT] if lesson.warm_up else [])]:
        RunRecords(place).held(setup.config.overwrite_output_dir)


def check_run(trainer: GRPOTrainer) -> None:
    """PreflightError for what training would be refused for, before anything is sampled; the rest `train()` says."""
    found = [finding for finding in trainer.preflight() if finding.severity != "note"] if trainer.args.preflight else []
    if any(finding.severity == "error" for finding in found):
        raise PreflightError(report(found))


def is_done(trainer: GRPOTrainer, lesson: Lesson) -> bool:
    """Whether the run in the folder has made every step and was measured: nothing is left to do."""
    known = read_summary(trainer.run_dir)
    tested = lesson.test is None or ("accuracy_after" in known and known.get("eval_problems") == len(lesson.test))
    return tested and known.get("status") == "finished" and known.get("steps") == trainer.state.max_steps \
        and (trainer.run_dir / FINAL).is_dir()


def try_rewards(setup: Setup, lesson: Lesson, console: Console | None = None) -> RewardCheck:
    """Train nothing: sample a few groups, and show what the rewards make of them."""
    console = console or Console()
    if lesson.note:
        console.print(lesson.note, soft_wrap=True, markup=False, highlight=False)
    model, _ = load_model(setup)
    return check(reward_functions(lesson, model), lesson.train, model, setup.config, console=console)


def load(setup: Setup, lesson: Lesson) -> tuple[FastPeftModel, GRPOTrainer]:
    """The model under LoRA, and its trainer."""
    model, tokenizer = load_model(setup)
    return model, GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward_functions(lesson, model), args=setup.config,
        train_dataset=lesson.train,
    )


def load_model(setup: Setup) -> tuple[FastPeftModel, Any]:
    """The model under LoRA, and its tokenizer."""
    bare, tokenizer = FastLanguageModel.from_pretrained(
        setup.model, max_seq_length=setup.max_seq_length, load_in_4bit=setup.load_in_4bit,
        fast_inference=setup.fast_inference,
    )
    return FastLanguageModel.get_peft_model(
        bare, r=setup.lora_rank, lora_alpha=setup.lora_alpha, random_state=setup.config.seed,
        use_gradient_checkpointing=setup.checkpointing,
    ), tokenizer


def reward_functions(lesson: Lesson, model: FastPeftModel) -> RewardFunctions:
    """The lesson's own, or those that it makes of the model."""
    return lesson.rewards if isinstance(lesson.rewards, list) else lesson.rewards(model)


def measured(model: FastPeftModel, setup: Setup, lesson: Lesson, adapter: LoraRequest | None) -> Answers | None:
    """Answers to the held-out problems, of the base model or with the adapter; None where there are no problems."""
    if lesson.test is None or lesson.right is None:
        return None
    return measure(model, lesson.test, adapter, setup.config, lesson.right)


def compared(lesson: Lesson, before: Answers, after: Answers, console: Console) -> dict[str, Any]:
    """What training has changed, said and for summary.json."""
    found: dict[str, Any] = {"accuracy_after": after.accuracy}
    print_accuracy(console, before.accuracy, after.accuracy, len(after.texts))
    if lesson.warm_up is not None:
        found |= lesson.warm_up.told_after(after, console)
    found["samples"] = side_by_side(lesson.test, before.texts, after.texts)
    print_samples(console, found["samples"])
    return found
