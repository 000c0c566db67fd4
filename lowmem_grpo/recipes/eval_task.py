"""The exam with which `lowmem-grpo eval --recipe` tests a recipe: the attribute EXAM of the recipe's module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.models.stored_model import EMBEDDED
from lowmem_grpo.recipes.recipe_file import NO_EXAM, find_recipe
from lowmem_grpo.trainer.play import Play


@dataclass(frozen=True)
class Exam:
    """Held-out problems, and what counts as a right answer."""

    problems: Callable[[int, int, str | None], Any]
    """(size, seed, source or None) -> a dataset with `prompt` and the columns that `right` reads."""
    right: Callable[..., Any]  # a reward function that pays more than 0 for a right answer, or a verifier
    max_tokens: int
    size: int = 256  # number of problems, unless --limit gives another
    takes_source: bool = False  # whether problems can come from a file or a hub dataset (--dataset)
    play: Play | None = None  # how an episode is played, where an answer takes several turns
    of_tiny: Callable[[int, int, str | None], Any] | None = None
    """The problems for an embedded model, where it is trained on others."""
    tiny_max_tokens: int | None = None  # `max_tokens` for an embedded model, if it is less

    def problems_of(self, model: str) -> Callable[[int, int, str | None], Any]:
        """Return the function that makes the problems for this model; embedded models may have their own."""
        return self.of_tiny if self.of_tiny is not None and model in EMBEDDED else self.problems

    def max_tokens_of(self, model: str) -> int:
        """Return the token limit of this model's answers."""
        return self.tiny_max_tokens if self.tiny_max_tokens is not None and model in EMBEDDED else self.max_tokens


def find_exam(recipe: str) -> Exam:
    """Return the exam of a recipe or a recipe file. Raises ValueError for an unknown recipe, or one without an exam."""
    exam = getattr(find_recipe(recipe), "EXAM", None)
    if not isinstance(exam, Exam):
        raise ValueError(NO_EXAM.format(recipe))
    return exam
