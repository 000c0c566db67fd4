"""Train on a lesson (data, rewards, a test of right answers) in one call, up to the report. A lesson may begin with SFT
on a new answer format (`WarmUp`), since GRPO can only reward a format that the model writes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from lowmem_grpo import FastVisionModel, GRPOTrainer, SamplingParams, SFTConfig, SFTTrainer
from lowmem_grpo.engines.request_output import LoraRequest
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.memory.peaks import keep_to
from lowmem_grpo.models.new_tokens import add_new_tokens
from lowmem_grpo.recipes.presets import Setup
from lowmem_grpo.rewards import RewardCheck, check
from lowmem_grpo.rollout.assessment import answer, rows_of
from lowmem_grpo.runs.accuracy import Answers, accuracy_by_kind, changed_first
from lowmem_grpo.runs.accuracy import compared as difference
from lowmem_grpo.runs.files import write_card
from lowmem_grpo.runs.records import FINAL, RunRecords, prompt_text
from lowmem_grpo.runs.saved_adapter import last_good
from lowmem_grpo.runs.views.console import any_console, print_accuracy, print_kinds, print_line, print_samples
from lowmem_grpo.trainer.distributed import ranks
from lowmem_grpo.trainer.lifecycle import update_summary
from lowmem_grpo.trainer.parts import keep_start
from lowmem_grpo.trainer.play import Play, episode_settings
from lowmem_grpo.trainer.preflight.checks import refuse_errors
from lowmem_grpo.utils import count_text

logger = logging.getLogger(__name__)
SHOWN = 6  # samples in the report
SFT = "sft"  # folder of the warm-up inside that of the run
SHARED = ("seed", "optim", "bf16", "fp16", "max_tokens_per_micro_batch", "logits_chunk", "disable_tqdm")
RewardFunctions = list[Any]  # callables; `Any` because list is invariant: list[Reward] is no list[Callable]


@dataclass(frozen=True)
class WarmUp:
    """A format that is taught before GRPO begins."""

    demonstrations: Callable[[int, int], Dataset]  # (size, seed) -> different rows with `prompt` and `completion`
    steps: int
    form: str  # the format, as messages show it
    has_form: Callable[[str], bool]  # whether a completion has the format
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of SFTConfig. They override the run's values of the fields in SHARED."""

    def trainer(self, model: FastPeftModel, setup: Setup) -> SFTTrainer:
        """Return the warm-up's trainer. It takes the fields in SHARED from the run unless `settings` has them."""
        config = setup.config
        shared = {name: getattr(config, name) for name in SHARED}
        settings = SFTConfig(**({"save_strategy": "no"} | shared | self.settings | {
            "output_dir": f"{config.output_dir}/{SFT}", "max_steps": self.steps,
            "overwrite_output_dir": config.overwrite_output_dir or setup.resume,
        }))
        rows = self.demonstrations(self.steps * settings.batch_size, config.seed)
        return SFTTrainer(model, rows, settings)

    def share(self, answers: Answers) -> float:
        return sum(self.has_form(texts[0]) for texts in answers.texts) / len(answers.texts)


@dataclass(frozen=True)
class Lesson:
    """A task to train on, and the test that shows whether it was learned."""

    name: str
    train: Dataset | Callable[[FastPeftModel], Dataset] | None
    """Columns `prompt` and those that the rewards read, or a function that makes them once the model is loaded; None
    where an environment makes its tasks of seeds."""
    rewards: RewardFunctions | Callable[[FastPeftModel], RewardFunctions]
    """Reward functions, or a function that makes them once the model is loaded."""
    test: Dataset | None = None
    """Held-out problems with the column `prompt`, and `answer` to show; None measures nothing before and after."""
    right: Callable[..., Sequence[float | None]] | None = None
    """A reward function that pays more than 0 for a right answer; needed with `test`."""
    kinds: str = ""  # a column of `test` with a problem's kind, or kinds, whose accuracies are shown apart
    warm_up: WarmUp | None = None  # supervised fine-tuning before GRPO
    play: Play | None = None  # the environment and the tools of episodes; None where one completion is the whole answer
    note: str = ""  # printed before the run begins
    facts: dict[str, Any] = field(default_factory=dict)  # further entries of summary.json
    new_tokens: tuple[str, ...] = ()  # added to the tokenizer; their rows are trained
    trainer: type[Any] = GRPOTrainer  # one whose constructor takes what GRPOTrainer's does, of what the lesson has

    def __post_init__(self) -> None:
        if (self.test is None) != (self.right is None):
            raise ValueError("a lesson has both `test` and `right`, or neither")


def teach(setup: Setup, lesson: Lesson) -> GRPOTrainer:
    """Load the model, measure its accuracy, train, measure again, and write the report. If a signal stops training,
    raise SystemExit with the signal's exit status (130 for Ctrl-C)."""
    with ranks().together():
        return taught(setup, lesson, opened(lesson))


def taught(setup: Setup, lesson: Lesson, console: Console) -> GRPOTrainer:
    """Do the work of `teach` in one of the run's ranks."""
    folder = Path(setup.config.output_dir)
    if not (setup.resume or setup.config.overwrite_output_dir):
        for place in (folder, *[folder / SFT] * (lesson.warm_up is not None)):
            RunRecords(place).refuse_another_run()
    model, trainer = load(setup, lesson)
    if trainer.args.preflight:  # before minutes are spent on held-out answers; train() repeats it and logs warnings
        refuse_errors(trainer.preflight())
    if setup.resume and trainer.ranks.first("whether all is done", lambda: is_done(trainer, lesson)):
        made = count_text(trainer.state.max_steps, "step")
        print_line(console, f"{trainer.run_dir} is finished: {made}; raise max_steps to go on")
        return trainer
    before = measured(model, setup, lesson, None)
    trainer.told |= {"recipe": lesson.name, "options": setup.options,
                     "right": getattr(lesson.right, "__name__", None), **lesson.facts}
    if before is not None:
        trainer.told |= {"eval_problems": len(before.texts), "accuracy_before": before.accuracy}
        trainer.told |= dict.fromkeys(  # not known before the end
            ("accuracy_after", "difference", *["kinds"] * bool(lesson.kinds), "samples"))
    if lesson.warm_up is not None:
        warmed = warm_up(lesson.warm_up, model, setup, lesson, before, console)
        if warmed is None:
            return trainer
        trainer.told |= warmed
        keep_start(trainer.policy, setup.config)  # the trainer was made before
    result = trainer.train(resume_from_checkpoint=setup.resume or None)
    last = f"stopped at step {result.global_step}; the same command with resume=true goes on"
    if result.finished:
        after = measured(model, setup, lesson, model.current_lora())
        if before is not None and after is not None:
            trainer.told |= compared(lesson, before, after, console)
            update_summary(trainer, trainer.told)
            if trainer.records.writes:
                write_card(trainer.run_dir / FINAL, trainer.model.card())  # now with the answers
        made, seconds = count_text(result.global_step, "step"), trainer.state.elapsed
        last = f"{made} in {seconds:.0f} s; report: {trainer.run_dir}/report.html"
    print_line(console, last)
    if trainer.interrupt.requested:
        raise SystemExit(trainer.interrupt.exit_status)
    return trainer


def try_rewards(setup: Setup, lesson: Lesson) -> RewardCheck:
    """Sample a few groups and show the rewards of their completions. Nothing is trained."""
    console = opened(lesson)
    model, _ = load_model(setup, lesson.new_tokens)
    return check(reward_functions(lesson, model), lesson.train, model, setup.config, console=console)


def opened(lesson: Lesson) -> Console:
    """Print the lesson's note on a new console, and return the console."""
    console = any_console()
    if lesson.note:
        print_line(console, lesson.note)
    return console


def is_done(trainer: GRPOTrainer, lesson: Lesson) -> bool:
    """Return whether the run in the output folder made every step, was measured and saved its final adapter."""
    known = trainer.records.known()
    tested = lesson.test is None or (
        known.get("accuracy_after") is not None and known.get("eval_problems") == len(lesson.test))
    made = known.get("status") == "finished" and known.get("steps") == trainer.state.max_steps
    return tested and made and (trainer.run_dir / FINAL).is_dir()


def load(setup: Setup, lesson: Lesson) -> tuple[FastPeftModel, GRPOTrainer]:
    model, tokenizer = load_model(setup, lesson.new_tokens)
    rewards, play = reward_functions(lesson, model), lesson.play
    given: dict[str, Any] = {"reward_funcs": rewards} if rewards else {}
    if play is not None:
        given |= {"tools": list(play.tools) or None, "environment_factory": play.environment}
    rows = lesson.train(model) if callable(lesson.train) else lesson.train
    return model, lesson.trainer(model=model, processing_class=tokenizer, args=setup.config, train_dataset=rows,
                                 **given)


def load_model(setup: Setup, new_tokens: Sequence[str] = ()) -> tuple[FastPeftModel, Any]:
    """Load the model of a setup, and add new tokens and LoRA to it; return it with its tokenizer or, if it reads
    images, its processor."""
    keep_to(setup.card_share)
    logger.info("loading %s, %s weights, context %d", setup.model, setup.weights, setup.max_seq_length)
    bare, tokenizer = FastVisionModel.from_pretrained(  # which loads models of text too
        setup.model, max_seq_length=setup.max_seq_length, load_in_4bit=setup.load_in_4bit,
        load_in_fp8=setup.load_in_fp8, fast_inference=setup.fast_inference, kv_cache_dtype=setup.kv_cache_dtype,
    )
    if new_tokens:
        add_new_tokens(bare, tokenizer, new_tokens)
    return FastVisionModel.get_peft_model(bare, r=setup.lora_rank, lora_alpha=setup.lora_alpha,
                                          random_state=setup.config.seed,
                                          use_gradient_checkpointing=setup.checkpointing), tokenizer


def reward_functions(lesson: Lesson, model: FastPeftModel) -> RewardFunctions:
    return lesson.rewards if isinstance(lesson.rewards, list) else lesson.rewards(model)


def measured(model: FastPeftModel, setup: Setup, lesson: Lesson, adapter: LoraRequest | None) -> Answers | None:
    """Return one answer to each held-out problem, sampled at temperature 1 by all ranks; None without a test."""
    if lesson.test is None or lesson.right is None:
        return None
    logger.info("answering %s", count_text(len(lesson.test), "held-out problem"))
    params = SamplingParams(temperature=1.0, max_tokens=setup.config.max_completion_length, seed=setup.config.seed)
    rows, together, all_of_them = rows_of(lesson.test, None), len(lesson.test), ranks()
    share = all_of_them.process.share(len(rows))
    if all_of_them.count > 1:
        rows, params = [rows[place] for place in share], replace(params, part=(share.start, len(rows)))

    answers = None
    if rows and lesson.play is None:
        answers = answer(model, rows, [lesson.right], params, adapter, together)
    elif rows and lesson.play is not None:
        answers = lesson.play.answers(model, rows, [lesson.right], params, adapter, together,
                                      episode_settings(setup.config))
    parts = all_of_them.gather("answers to held-out problems", answers)
    return Answers.joined([part for part in parts if part is not None])


def warm_up(
    taught: WarmUp, model: FastPeftModel, setup: Setup, lesson: Lesson, before: Answers | None, console: Console
) -> dict[str, Any] | None:
    """Fine-tune before GRPO, unless a checkpoint is resumed. Return entries for summary.json, None if the warm-up was
    stopped. SystemExit if a signal such as Ctrl-C stopped it."""
    facts: dict[str, Any] = {"sft_steps": taught.steps}
    if setup.resume and last_good(Path(setup.config.output_dir))[0]:
        return facts
    trainer = taught.trainer(model, setup)
    result = trainer.train()
    if not result.finished:
        console.print(f"stopped in step {result.global_step} of the warm-up; with resume=true it begins again")
    if trainer.interrupt.requested:
        raise SystemExit(trainer.interrupt.exit_status)
    if not result.finished:
        return None
    after = measured(model, setup, lesson, model.current_lora())
    if before is not None and after is not None:
        shares = taught.share(before), taught.share(after)
        print_line(console, f"answers as `{taught.form}`: {shares[0]:.1%} before, {shares[1]:.1%} after {taught.steps} "
                            f"steps of fine-tuning; accuracy {after.accuracy:.1%}")
        facts |= {"accuracy_after_sft": after.accuracy, "taught_format_before": shares[0],
                  "taught_format_after_sft": shares[1]}
    return facts


def compared(lesson: Lesson, before: Answers, after: Answers, console: Console) -> dict[str, Any]:
    """Print how training changed the answers; return entries for summary.json."""
    changes: dict[str, Any] = {"accuracy_after": after.accuracy, "difference": difference(before, after)}
    print_accuracy(console, before.accuracy, after.accuracy, len(after.texts), changes["difference"]["interval"])
    if lesson.test is not None and lesson.kinds:
        changes["kinds"] = accuracy_by_kind(lesson.test[lesson.kinds], before, after)
        print_kinds(console, changes["kinds"])
    if lesson.warm_up is not None:
        changes["taught_format_after"] = lesson.warm_up.share(after)
        kept = f"answers as `{lesson.warm_up.form}`: {changes['taught_format_after']:.1%} after GRPO"
        console.print(kept, markup=False)
    changes["samples"] = side_by_side(lesson.test, before, after)
    print_samples(console, changes["samples"])
    return changes


def side_by_side(dataset: Any, before: Answers, after: Answers) -> list[dict[str, Any]]:
    """Return SHOWN problems with the answers before and after. Problems that turned right or wrong come first."""
    verdicts = [(old[0], new[0]) for old, new in zip(before.right, after.right, strict=True)]
    return [
        {"prompt": prompt_text(dataset[place]["prompt"][-1:]), "answer": dataset[place].get("answer"),
         "before": before.texts[place][0], "after": after.texts[place][0],
         "right_before": verdicts[place][0], "right_after": verdicts[place][1]}
        for place in changed_first(verdicts, SHOWN)
    ]
