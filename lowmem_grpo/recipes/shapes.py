"""Recipe `shapes`: questions about generated pictures, for models of images. How many, which colour, and where?

    lowmem-grpo run shapes                                      # model and settings fit the card, or gpu=24
    lowmem-grpo run shapes model=Qwen/Qwen3-VL-4B-Instruct gpu=16

On a CPU the recipe trains the embedded model `tiny-shapes`, in minutes on two cores.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from lowmem_grpo.models.vision_processor import need_pillow
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, prepare
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards import answer_match

COLOURS = {"red": (214, 40, 40), "green": (40, 160, 70), "blue": (40, 80, 210), "yellow": (235, 190, 30)}
GROUNDS = ((255, 255, 255), (225, 225, 225), (20, 20, 20))
SHAPES = ("circle", "square", "triangle")
SIDES = ("left", "right", "top", "bottom")
QUESTIONS = {
    "count": "How many shapes are in the picture? Answer with a number.",
    "colour": f"Which colour are the shapes? Answer {', '.join(COLOURS)}.",
    "place": f"Where in the picture are the shapes? Answer {', '.join(SIDES)}.",
}
DEFAULTS = USUAL | {"output_dir": "runs/shapes", "max_steps": 100, "max_completion_length": 32}
PRESETS: Presets = {
    "cpu": Preset("tiny-shapes", 64, 16, 32, {
        "max_steps": 100, "learning_rate": 3e-3, "max_completion_length": 4, "num_generations": 8,
        "per_device_train_batch_size": 256, "gradient_accumulation_steps": 1, "optim": "adamw_torch",
    }),
    "8": Preset("Qwen/Qwen2.5-VL-3B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
    "16": Preset("Qwen/Qwen2.5-VL-3B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-VL-7B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-VL-7B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
    "80": Preset("Qwen/Qwen2.5-VL-7B-Instruct", 512, 32, 64, {"optim": "paged_adamw_8bit"}),
}
OPTIONS = ProblemOptions
MOST, TINY_MOST = 12, 4  # shapes in a picture, for hub models and for the embedded model


@dataclass(frozen=True)
class Scene:
    """A picture of shapes of one colour along one side, and a question about it."""

    kind: str  # of the question
    colour: str
    side: str
    shapes: tuple[tuple[str, int], ...]  # (shape, place along the side)
    most: int  # places along a side
    cell: int  # pixels of a place
    ground: tuple[int, int, int]

    @property
    def answer(self) -> str:
        return {"count": str(len(self.shapes)), "colour": self.colour, "place": self.side}[self.kind]

    def picture(self) -> Any:
        """Return the picture as PIL's image, of `most` x `most` places."""
        from PIL import Image, ImageDraw  # of the extra `vision`

        image = Image.new("RGB", (self.most * self.cell, self.most * self.cell), self.ground)
        for shape, place in self.shapes:
            across = 0 if self.side in ("left", "top") else self.most - 1
            column, row = (across, place) if self.side in ("left", "right") else (place, across)
            x, y, size = column * self.cell + 1, row * self.cell + 1, self.cell - 3
            box = (x, y, x + size, y + size)
            draw, colour = ImageDraw.Draw(image), COLOURS[self.colour]
            if shape == "circle":
                draw.ellipse(box, colour)
            elif shape == "square":
                draw.rectangle(box, colour)
            else:
                draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], colour)
        return image


def draw_scene(rng: random.Random, most: int) -> Scene:
    """Draw a scene with 1 to `most` shapes, of which one is in no corner: a corner is on two sides."""
    first = rng.randrange(1, most - 1)
    others = rng.sample([place for place in range(most) if place != first], rng.randrange(most))
    return Scene(rng.choice(list(QUESTIONS)), rng.choice(list(COLOURS)), rng.choice(SIDES),
                 tuple((rng.choice(SHAPES), place) for place in sorted([first, *others])), most,
                 14 if most == TINY_MOST else 28, rng.choice(GROUNDS))


def scenes(split: str, seed: int, most: int = MOST) -> Iterator[Scene]:
    """Yield different scenes of a split ("train" or "test")."""
    return distinct(split, seed, partial(draw_scene, most=most), repr)


def make_dataset(split: str, size: int, seed: int = 0, most: int = MOST) -> Dataset:
    """Return `size` problems of a split, with the columns `prompt`, `image`, `answer` and `kind`."""
    need_pillow()
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": [{"type": "image", "text": None},
                                                 {"type": "text", "text": QUESTIONS[scene.kind]}]}],
         "image": scene.picture(), "answer": scene.answer, "kind": scene.kind}
        for scene in take(scenes(split, seed, most), size)
    ])


EXACT = answer_match(ignore_case=True).reward()
EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), EXACT, max_tokens=32,
            of_tiny=lambda size, seed, source: make_dataset("test", size, seed, TINY_MOST), tiny_max_tokens=4)


def run(options: ProblemOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    seed, most = setup.config.seed, TINY_MOST if setup.is_tiny else MOST
    teach(setup, Lesson("shapes", make_dataset("train", options.train_size, seed, most), [EXACT],
                        make_dataset("test", options.eval_problems, seed, most), EXACT, kinds="kind"))
