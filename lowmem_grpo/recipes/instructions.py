"""Recipe `instructions`: follow instructions that a program can check, such as "use no commas". Generated prompts.

    lowmem-grpo run instructions                                # model and settings fit the card, or gpu=24
    lowmem-grpo run instructions instructions=5                 # harder: up to five instructions in a prompt

On a CPU the recipe trains SmolLM2-135M-Instruct with one instruction in each prompt, with bf16=true on a CPU with AMX.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, mixed_on_cpu, on_cards, prepare
from lowmem_grpo.recipes.tasks import check_split
from lowmem_grpo.rewards import follows_instructions, soft_overlong_penalty
from lowmem_grpo.utils import some_of, within

DEFAULTS = USUAL | {"output_dir": "runs/instructions", "max_steps": 200, "max_completion_length": 384}
PRESETS: Presets = {
    "cpu": Preset("HuggingFaceTB/SmolLM2-135M-Instruct", 384, 16, 32, {
        "max_steps": 30, "learning_rate": 5e-4, "max_completion_length": 48, "scale_rewards": "group",
        "num_generations": 8, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0,
        "save_steps": 15,
        "shuffle_dataset": False,  # each step has one prompt of each kind
    }, load_in_4bit=False),
} | on_cards(768)
# Held-out prompts have topics, words, numbers and last phrases that are never trained on
TOPICS = {
    "train": ("the sea", "a small village", "winter", "bread", "the moon", "a train journey", "bees", "a library",
              "rain", "a garden", "a good friend", "music", "the desert", "coffee", "a market", "football",
              "the forest", "a kitchen", "stars", "paper", "clocks", "a bridge", "sleep", "colours"),
    "test": ("a lighthouse", "birds", "tea", "an old bicycle", "mountains", "a museum", "wind", "a river"),
}
FORMS = ("Write a sentence or two about {}.", "Tell me briefly about {}.", "Describe {} in a sentence or two.",
         "Explain to a child in a sentence or two what is special about {}.")
WORDS = {"train": ("light", "quiet", "morning", "people", "water", "green", "story", "door"),
         "test": ("slowly", "stone", "together", "warm")}
ENDS = {"train": ("That is all.", "DONE", "Thank you for reading.", "What do you think?"),
        "test": ("That was my answer.", "Goodbye!", "Do you agree?")}
MOST_WORDS = {"train": (15, 20, 25, 30), "test": (18, 22, 28)}
DRAWS = 20  # of which the first is taken that is new
Drawn = tuple[str, dict[str, Any]]  # the sentence of the prompt, and the arguments of the check
Draw = Callable[[random.Random, str], Drawn]  # of a split


def keywords(rng: random.Random, split: str) -> Drawn:
    words = sorted(rng.sample(WORDS[split], rng.randint(1, 2)))
    return f"Use the word{'s' * (len(words) > 1)} {' and '.join(words)}.", {"keywords": words}


def fewer_words(rng: random.Random, split: str) -> Drawn:
    most = rng.choice(MOST_WORDS[split])
    return f"Use less than {most} words.", {"num_words": most, "relation": "less than"}


def bullets(rng: random.Random, split: str) -> Drawn:
    count = rng.randint(2, 4)
    return (f"Answer with exactly {count} bullet points, each on its own line, such as: * This is a point.",
            {"num_bullets": count})


def end(rng: random.Random, split: str) -> Drawn:
    phrase = rng.choice(ENDS[split])
    return f"End with this exact phrase, and nothing after it: {phrase}", {"end_phrase": phrase}


def always(sentence: str, **arguments: Any) -> Draw:
    return lambda rng, split: (sentence, arguments)


# By kind: its group, and its draw. A prompt has at most one kind of each group: those would contradict each other
KINDS: dict[str, tuple[str, Draw]] = {
    "change_case:english_lowercase": ("case", always("Write in lower-case letters only, without any capital letter.")),
    "change_case:english_capital": ("case", always("Write in capital letters only.")),
    "startend:end_checker": ("whole", end),
    "startend:quotation": ("whole", always("Put your whole answer in double quotation marks.")),
    "detectable_content:postscript": ("whole", always("Add a postscript at the end that begins with P.S.",
                                                      postscript_marker="P.S.")),
    "detectable_format:number_bullet_lists": ("whole", bullets),
    "length_constraints:number_words": ("length", fewer_words),
    "punctuation:no_comma": ("commas", always("Use no commas.")),
    "keywords:existence": ("words", keywords),
    "detectable_format:title": (
        "title", always("Give your answer a title in double angular brackets, such as <<my title>>.")),
}
# SmolLM2-135M-Instruct follows these sometimes: from kinds that it never or always follows it would learn nothing
LEARNED_FIRST = ("postscript", "no_comma", "existence", "number_bullet_lists")


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
    kinds: str | None = None
    """Kinds of instructions, with commas between them. None: all; on a CPU, if `instructions` is not set either, four
    that a small model learns first."""

    RANGES = ProblemOptions.RANGES | {"instructions": within(1, 6), "kinds": some_of(*KINDS)}

    def __post_init__(self) -> None:
        groups = len({KINDS[kind][0] for kind in self.chosen})
        if self.instructions is not None and not 1 <= self.instructions <= groups:
            raise ValueError(f"instructions is {self.instructions}; it must be 1 to {groups}")

    @property
    def most(self) -> int:
        """The most instructions in a prompt on this machine."""
        return (3 if torch.cuda.is_available() else 1) if self.instructions is None else self.instructions

    @property
    def chosen(self) -> list[str]:
        """The kinds of instructions on this machine; ValueError for a name that is no kind."""
        names = {kind.partition(":")[2]: kind for kind in KINDS}
        asked = [name.strip() for name in self.kinds.split(",")] if self.kinds is not None else \
            list(LEARNED_FIRST if self.instructions is None and not torch.cuda.is_available() else names)
        if unknown := [name for name in asked if name not in names]:
            raise ValueError(f"kinds has {unknown[0]!r}; allowed are {', '.join(names)}")
        return [names[name] for name in asked]

    def dataset(self, split: str, size: int, seed: int) -> Dataset:
        """Return `make_dataset` with these options."""
        return make_dataset(split, size, seed, self.most, self.chosen)


OPTIONS = InstructionOptions


def draw_prompt(rng: random.Random, split: str, most: int, kinds: Sequence[str]) -> Prompt:
    """Draw a prompt with the first of the kinds and, if `most` allows, some others."""
    request = rng.choice(FORMS).format(rng.choice(TOPICS[split]))
    by_group: dict[str, str] = {}
    for kind in [kinds[0], *rng.sample(kinds, len(kinds))]:
        by_group.setdefault(KINDS[kind][0], kind)
    chosen = list(by_group.values())[: rng.randint(1, most)]
    drawn = [KINDS[kind][1](rng, split) for kind in chosen]
    return Prompt(" ".join([request, *(sentence for sentence, _ in drawn)]), tuple(chosen),
                  tuple(arguments for _, arguments in drawn))


def make_dataset(split: str, size: int, seed: int = 0, most: int = 1, kinds: Sequence[str] = tuple(KINDS)) -> Dataset:
    """Return `size` prompts of a split ("train" or "test") with IFEval's columns, which hold lists. The kinds take
    turns: the first prompt has the first kind. A prompt is repeated only if hardly another one is left."""
    check_split(split)
    rng = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    prompts = []
    for place in range(size):
        turn = place % len(kinds)
        draws = [draw_prompt(rng, split, most, [*kinds[turn:], *kinds[:turn]]) for _ in range(DRAWS)]
        prompts.append(next((prompt for prompt in draws if prompt.question not in seen), draws[0]))
        seen.add(prompts[-1].question)
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": prompt.question}], "instruction_id_list": list(prompt.kinds),
         "kwargs": [dict.fromkeys(NAMES) | arguments for arguments in prompt.arguments]}
        for prompt in prompts
    ])


NAMES = ("keywords", "num_words", "relation", "num_bullets", "end_phrase", "postscript_marker")
FOLLOWS = follows_instructions(sentence=True)
EXAM = Exam(lambda size, seed, source: InstructionOptions().dataset("test", size, seed), FOLLOWS.reward(),
            max_tokens=384, tiny_max_tokens=64, of_options=lambda options, tiny: {
                "problems": lambda size, seed, source: options.dataset("test", size, seed)})


def run(options: InstructionOptions) -> None:
    setup = prepare(options, DEFAULTS | mixed_on_cpu(options), PRESETS)
    seed, needed = setup.config.seed, setup.config.max_steps * setup.config.prompts_per_step
    rows = min(options.train_size, needed) if needed > 0 else options.train_size  # more are not read
    longest = setup.config.max_completion_length
    teach(setup, Lesson("instructions", options.dataset("train", rows, seed),
                        [FOLLOWS.reward(), FOLLOWS.share(0.5), soft_overlong_penalty(longest, max(longest // 4, 1))],
                        options.dataset("test", options.eval_problems, seed), FOLLOWS.reward(),
                        kinds="instruction_id_list", note=setup.tiny_note("cannot follow instructions")))
