"""Recipe `instructions`: follow instructions that a program can check, such as "use no commas". Generated prompts.

    lowmem-grpo run instructions                                # model and settings fit the card, or gpu=24
    lowmem-grpo run instructions instructions=5                 # harder: up to five instructions in a prompt

On a CPU the recipe trains SmolLM2-135M-Instruct with one instruction in each prompt.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards import follows_instructions

DEFAULTS = USUAL | {"output_dir": "runs/instructions", "max_steps": 200, "max_completion_length": 384}
PRESETS: Presets = {
    "cpu": Preset("HuggingFaceTB/SmolLM2-135M-Instruct", 384, 16, 32, {
        "max_steps": 40, "learning_rate": 8e-4, "max_completion_length": 64, "scale_rewards": "group",
        "num_generations": 8, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0,
        "save_steps": 20,
    }, load_in_4bit=False),
} | on_cards(768)
TOPICS = ("the sea", "a small village", "winter", "an old bicycle", "bread", "the moon", "a train journey", "bees",
          "a library", "rain", "a garden", "mountains", "a good friend", "music", "the desert", "a lighthouse",
          "coffee", "a market", "football", "the forest", "a kitchen", "stars", "a river", "paper", "clocks",
          "a bridge", "birds", "sleep", "colours", "a museum", "tea", "wind")
FORMS = ("Write a few sentences about {}.", "Tell me about {}.", "Describe {}.", "What comes to your mind about {}?",
         "Write a short text about {}.", "Explain to a child what is special about {}.")
WORDS = ("light", "quiet", "morning", "people", "stone", "water", "green", "story", "together", "slowly", "door")
ENDS = ("That is all.", "DONE", "Thank you for reading.", "What do you think?")
Drawn = tuple[str, dict[str, Any]]  # the sentence of the prompt, and the arguments of the check


def keywords(rng: random.Random) -> Drawn:
    words = sorted(rng.sample(WORDS, rng.randint(1, 2)))
    return f"Use the word{'s' * (len(words) > 1)} {' and '.join(words)}.", {"keywords": words}


def fewer_words(rng: random.Random) -> Drawn:
    most = rng.choice((15, 20, 25, 30))
    return f"Use less than {most} words.", {"num_words": most, "relation": "less than"}


def bullets(rng: random.Random) -> Drawn:
    count = rng.randint(2, 4)
    return (f"Answer with exactly {count} bullet points, each on its own line, such as: * This is a point.",
            {"num_bullets": count})


def end(rng: random.Random) -> Drawn:
    phrase = rng.choice(ENDS)
    return f"End with this exact phrase, and nothing after it: {phrase}", {"end_phrase": phrase}


def always(sentence: str, **arguments: Any) -> Callable[[random.Random], Drawn]:
    return lambda rng: (sentence, arguments)


# A prompt has at most one instruction of each group: those of a group would contradict each other
GROUPS: tuple[dict[str, Callable[[random.Random], Drawn]], ...] = (
    {"change_case:english_lowercase": always("Write in lower-case letters only, without any capital letter."),
     "change_case:english_capital": always("Write in capital letters only.")},
    {"startend:end_checker": end, "startend:quotation": always("Put your whole answer in double quotation marks."),
     "detectable_content:postscript": always("Add a postscript at the end that begins with P.S.",
                                             postscript_marker="P.S."),
     "detectable_format:number_bullet_lists": bullets},
    {"length_constraints:number_words": fewer_words},
    {"punctuation:no_comma": always("Use no commas.")},
    {"keywords:existence": keywords},
    {"detectable_format:title": always("Give your answer a title in double angular brackets, such as <<my title>>.")},
)


@dataclass(frozen=True)
class Prompt:
    """A request with instructions."""

    question: str
    kinds: tuple[str, ...]
    arguments: tuple[dict[str, Any], ...]


@dataclass
class InstructionOptions(ProblemOptions):
    instructions: int | None = None
    """The most instructions in a prompt; each prompt has 1 to this many. None: 3, or 1 on a CPU."""

    def __post_init__(self) -> None:
        if self.instructions is not None and not 1 <= self.instructions <= len(GROUPS):
            raise ValueError(f"instructions is {self.instructions}; it must be 1 to {len(GROUPS)}")

    @property
    def most(self) -> int:
        """The most instructions in a prompt on this machine."""
        return (3 if torch.cuda.is_available() else 1) if self.instructions is None else self.instructions


OPTIONS = InstructionOptions


def draw_prompt(rng: random.Random, most: int) -> Prompt:
    request = rng.choice(FORMS).format(rng.choice(TOPICS))
    kinds = [rng.choice(sorted(group)) for group in rng.sample(GROUPS, rng.randint(1, most))]
    drawn = [next(group[kind] for group in GROUPS if kind in group)(rng) for kind in kinds]
    return Prompt(" ".join([request, *(sentence for sentence, _ in drawn)]), tuple(kinds),
                  tuple(arguments for _, arguments in drawn))


def make_dataset(split: str, size: int, seed: int = 0, most: int = 1) -> Dataset:
    """Return `size` different prompts of a split ("train" or "test") with IFEval's columns, which hold lists."""
    prompts = take(distinct(split, seed, lambda rng: draw_prompt(rng, most), lambda prompt: prompt.question), size)
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": prompt.question}], "instruction_id_list": list(prompt.kinds),
         "kwargs": [dict.fromkeys(NAMES) | arguments for arguments in prompt.arguments]}
        for prompt in prompts
    ])


NAMES = ("keywords", "num_words", "relation", "num_bullets", "end_phrase", "postscript_marker")
FOLLOWS = follows_instructions(sentence=True)
EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed, InstructionOptions().most), FOLLOWS.reward(),
            max_tokens=384, tiny_max_tokens=64)


def run(options: InstructionOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    seed, most = setup.config.seed, options.most
    teach(setup, Lesson("instructions", make_dataset("train", options.train_size, seed, most),
                        [FOLLOWS.reward(), FOLLOWS.share(0.5)],
                        make_dataset("test", options.eval_problems, seed, most), FOLLOWS.reward(),
                        note=setup.tiny_note("cannot follow instructions")))
