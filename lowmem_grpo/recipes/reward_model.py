"""Recipe `reward_model`: pairs teach a reward model what a good answer looks like; GRPO then trains on its scores.

    lowmem-grpo run reward_model                       # model and settings fit the card, or gpu=24
    lowmem-grpo run reward_model paid_by=verifier      # GRPO against the rule itself, to compare

Good answers have a line for each step of the problem, and then `Answer = N`. SFT first teaches the policy four ways to
answer, one of which is good. Pairs of texts teach the reward model, an adapter on the same base model.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from lowmem_grpo import RewardConfig, RewardTrainer, rewards
from lowmem_grpo.config.loading import TRANSFORMERS
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, WarmUp, load_model, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, Setup, on_cards, prepare
from lowmem_grpo.recipes.tasks import take
from lowmem_grpo.recipes.tasks.arithmetic import Problem, problems
from lowmem_grpo.rewards.texts import completion_text
from lowmem_grpo.runs.records import FINAL
from lowmem_grpo.utils import at_least, one_of

DEFAULTS = USUAL | {
    "output_dir": "runs/reward_model", "max_steps": 60, "beta": 0.05, "max_completion_length": 128,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 128, 16, 32, {
        "max_steps": 24, "learning_rate": 1e-3, "max_completion_length": 64, "per_device_train_batch_size": 128,
        "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "save_steps": 8,
    }),
} | on_cards(1024)
JUDGE = "judge"  # folder of the reward model inside that of the run
SFT_RATE, JUDGE_RATE = {True: 5e-3, False: 2e-4}, {True: 2e-3, False: 1e-4}  # by whether the model is tiny
LINE, LAST = re.compile(r"-?\d+ [-+*] \d+ = -?\d+"), re.compile(r"Answer = -?\d+")
HELD_OUT = 256  # pairs


@dataclass
class RewardModelOptions(ProblemOptions):
    paid_by: str = "reward_model"
    """What pays in GRPO: "reward_model", or "verifier" (the rule that the pairs follow)."""
    pairs: int = 2048
    """The number of pairs that the reward model learns from, once each."""
    sft_steps: int = 60
    """The number of SFT steps, in which the policy learns four ways to answer."""

    RANGES = ProblemOptions.RANGES | {
        "paid_by": one_of("reward_model", "verifier"), "pairs": at_least(32), "sft_steps": at_least(1),
    }


OPTIONS = RewardModelOptions


def answers_to(problem: Problem, rng: random.Random) -> tuple[str, list[str]]:
    """Return the good answer, and worse ones: another last line, a step left out, the last line alone, no last line, a
    step more, and a step twice."""
    lines, last, place = problem.lines, f"Answer = {problem.answer}", rng.randrange(len(problem.lines))
    more = f"{rng.randint(1, 99)} {rng.choice('+-*')} {rng.randint(1, 49)} = {rng.randint(1, 99)}"
    before, here, behind = lines[:place], lines[place], lines[place + 1 :]
    worse = [[*lines, last.replace(" =", ":")], [*before, *behind, last], [last], lines,
             [*before, more, here, *behind, last], [*before, here, here, *behind, last]]
    return "\n".join([*lines, last]), ["\n".join(text) for text in worse]


def make_rows(split: str, size: int, seed: int = 0) -> list[tuple[Problem, list[dict[str, str]]]]:
    return [(problem, [{"role": "user", "content": problem.question}]) for problem in take(problems(split, seed), size)]


def make_pairs(split: str, size: int, seed: int = 0) -> Dataset:
    """Return pairs, with columns `prompt`, `chosen` and `rejected`."""
    rng, rows = random.Random(f"pairs-{split}-{seed}"), []
    for problem, prompt in make_rows(split, size, seed):
        good, worse = answers_to(problem, rng)
        sides = {"chosen": good, "rejected": rng.choice(worse)}
        rows.append({"prompt": prompt} | {name: [{"role": "assistant", "content": text}]
                                          for name, text in sides.items()})
    return Dataset.from_list(rows)


def make_demonstrations(size: int, seed: int = 0) -> Dataset:
    """Return problems with the good answer, or with one of the first three worse ones."""
    rng, rows = random.Random(f"demonstrations-{seed}"), []
    for problem, prompt in make_rows("train", size, seed):
        good, worse = answers_to(problem, rng)
        rows.append({"prompt": prompt, "completion": rng.choice([good, *worse[:3]])})
    return Dataset.from_list(rows)


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """Return problems, with columns `prompt`, `answer` and `steps` (their number)."""
    return Dataset.from_list([{"prompt": prompt, "answer": str(problem.answer), "steps": len(problem.steps)}
                              for problem, prompt in make_rows(split, size, seed)])


def in_form(completions: list[Any], steps: list[int], **kwargs: Any) -> list[float]:
    """Return 1 for each completion of as many calculations as its problem has steps and then `Answer = N`, else 0."""
    read = [completion_text(completion).strip().split("\n") for completion in completions]
    return [float(len(lines) == count + 1 and all(map(LINE.fullmatch, lines[:-1])) and bool(LAST.fullmatch(lines[-1])))
            for lines, count in zip(read, steps, strict=True)]


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), in_form, max_tokens=128, tiny_max_tokens=64)


def trained_judge(setup: Setup, pairs: int) -> tuple[Path, dict[str, Any]]:
    """Return a reward model's folder, and what was measured. It is trained, unless a run is resumed that has it.
    SystemExit if a signal such as Ctrl-C stops it."""
    folder, seed = Path(setup.config.output_dir) / JUDGE, setup.config.seed
    if setup.resume and (folder / FINAL).is_dir():
        return folder, {}
    model, tokenizer = load_model(replace(setup, fast_inference=TRANSFORMERS))
    trainer = RewardTrainer(model, RewardConfig(
        str(folder), overwrite_output_dir=True, num_train_epochs=1, per_device_train_batch_size=32,
        learning_rate=JUDGE_RATE[setup.is_tiny], center_rewards_coefficient=0.01, max_length=setup.max_seq_length,
        adam_beta2=0.99, save_strategy="no", seed=seed, disable_tqdm=setup.config.disable_tqdm,
    ), train_dataset=make_pairs("train", pairs, seed), eval_dataset=make_pairs("test", HELD_OUT, seed),
        processing_class=tokenizer)
    trainer.train()
    if trainer.interrupt.requested:
        raise SystemExit(trainer.interrupt.exit_status)
    return folder, {"pairs_in_order": trainer.evaluate()["eval_accuracy"]}


def run(options: RewardModelOptions) -> None:
    """Train the reward model, unless the rule pays, and then the policy. ValueError for settings that do not fit."""
    setup = prepare(options, DEFAULTS, PRESETS)
    seed, by_rule = setup.config.seed, options.paid_by == "verifier"
    folder, facts = (Path(), {}) if by_rule else trained_judge(setup, options.pairs)
    warm_up = WarmUp(make_demonstrations, options.sft_steps, "Answer = N", lambda text: "Answer = " in text, {
        "learning_rate": SFT_RATE[setup.is_tiny], "per_device_train_batch_size": 16, "adam_beta2": 0.99})
    teach(setup, Lesson("reward_model", make_dataset("train", options.train_size, seed),
                        [in_form] if by_rule else [rewards.from_adapter(folder)],
                        make_dataset("test", options.eval_problems, seed), in_form, warm_up=warm_up,
                        facts={"paid_by": options.paid_by} | facts))
