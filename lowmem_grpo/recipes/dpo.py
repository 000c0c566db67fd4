"""Recipe `dpo`: a model learns from pairs of its own answers, a right and a wrong one to the same problem (DPO).

    lowmem-grpo run dpo                                 # model and settings fit the card, or gpu=24
    lowmem-grpo run dpo loss_type=ipo beta=0.3          # another loss

Before training, the model answers each problem several times. Its right and wrong answers become pairs, which
RUN/answered.jsonl keeps. The problems are those of `proximity`.
"""

import json
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset

from lowmem_grpo import DPOConfig, DPOTrainer, SamplingParams
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.recipes import proximity
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import Preset, Presets, Setup, on_cards, prepare
from lowmem_grpo.recipes.proximity import RIGHT, STEPS, WORDS, make_dataset
from lowmem_grpo.rollout.assessment import TOGETHER, parts, seeded
from lowmem_grpo.runs.records import replace_text, to_line
from lowmem_grpo.trainer.distributed import ranks
from lowmem_grpo.utils import at_least

SETTINGS = DPOConfig
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/dpo", "seed": 0, "num_train_epochs": 1, "learning_rate": 1e-5,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_completion_length": 512,
    "adam_beta2": 0.99, "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 128, 16, 32, {
        "learning_rate": 1e-3, "max_length": 128, "max_completion_length": 64, "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1, "save_steps": 10,
    }),
} | on_cards(1024)
ANSWERED = "answered.jsonl"


@dataclass
class DPOOptions(ProblemOptions):
    train_size: int = 1024
    """The number of training problems."""
    answers: int = 4
    """The number of answers that the model gives to each problem before it is trained."""
    most_pairs: int = 2
    """The most pairs of a problem."""

    settings: ClassVar[type[Any]] = SETTINGS
    RANGES = ProblemOptions.RANGES | {"answers": at_least(2), "most_pairs": at_least(1)}


OPTIONS = DPOOptions
EXAM = proximity.EXAM


def pairs_of(problem: dict[str, Any], texts: list[str], most: int) -> list[dict[str, Any]]:
    """Return at most `most` rows of a problem. Each has another wrong answer, beside one of the right ones."""
    verdicts = RIGHT(completions=texts, answer=[problem["answer"]] * len(texts)) if texts else []
    right, wrong = ([text for text, paid in zip(texts, verdicts, strict=True) if bool(paid) is good]
                    for good in (True, False))
    return [{"prompt": problem["prompt"]} | {name: [{"role": "assistant", "content": text}] for name, text in
                                             zip(("chosen", "rejected"), pair, strict=True)}
            for pair in zip(cycle(right), wrong[:most], strict=False)]


def own_pairs(model: FastPeftModel, problems: Dataset, options: DPOOptions, setup: Setup) -> Dataset:
    """Return the pairs of a model's answers to problems, or those of the run that is resumed. ValueError if there are
    none."""
    config, file = setup.config, Path(setup.config.output_dir) / ANSWERED
    if setup.resume and file.is_file():
        return Dataset.from_list([*map(json.loads, file.read_text(encoding="utf-8").splitlines())])
    params = SamplingParams(n=options.answers, temperature=1.0, max_tokens=config.max_completion_length,
                            seed=config.seed)
    outputs = [output for part, number in parts(problems["prompt"], params, TOGETHER)
               for output in model.fast_generate(part, seeded(params, number).of_call(len(part)))]
    rows = []
    for problem, output in zip(problems, outputs, strict=True):
        ended = dict.fromkeys(one.text.strip() for one in output.outputs if one.finish_reason == "stop")
        rows += pairs_of(problem, [*ended], options.most_pairs)
    if not rows:
        raise ValueError(f"no problem of {len(problems)} has both a right and a wrong answer among its "
                         f"{options.answers}, so there are no pairs; raise answers, or take another model")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, "".join(map(to_line, rows)))
    return Dataset.from_list(rows)


def run(options: DPOOptions) -> None:
    """Sample answers, pair right ones with wrong ones of the same problem, and train on the pairs."""
    setup = prepare(options, DEFAULTS, PRESETS)
    task, seed = STEPS if setup.is_tiny else WORDS, setup.config.seed
    problems = make_dataset("train", options.train_size, seed, task)

    def pairs(model: FastPeftModel) -> Dataset:
        return ranks().first("the pairs", lambda: own_pairs(model, problems, options, setup))  # the same in all ranks

    teach(setup, Lesson("dpo", pairs, [],
                        make_dataset("test", options.eval_problems, seed, task), RIGHT, trainer=DPOTrainer))
