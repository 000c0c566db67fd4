"""What a recipe says of how it is tested, for `lowmem-grpo eval --recipe`: its module has an attribute EXAM."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.recipes.options import TINY
from lowmem_grpo.recipes.recipe_file import file_hint, is_recipe_file, load_recipe


@dataclass(frozen=True)
class Exam:
    """Held-out problems, and what a right answer is."""

    problems: Callable[[int, int, str | None], Any]
    """(how many, seed, source or None) -> a dataset with `prompt` and the columns that `right` reads."""
    right: Callable[..., Any]
    """A reward function that pays more than 0 for a right answer, or a verifier."""
    max_tokens: int
    size: int = 256
    """Problems where nothing else is asked for."""
    takes_source: bool = False
    """Whether problems can come from a file or a dataset of the hub."""
    of_tiny: Callable[[int, int, str | None], Any] | None = None
    """The problems of the embedded model, where it is trained on others."""

    def problems_of(self, model: str) -> Callable[[int, int, str | None], Any]:
        """What a model is asked, by its name."""
        return self.of_tiny if self.of_tiny is not None and model == TINY else self.problems


def find_exam(recipe: str) -> Exam:
    """The exam of a recipe, or of a file of the user's; ValueError for a recipe that there is not, or that has none."""
    own = is_recipe_file(recipe)
    if recipe not in RECIPES and not own:
        close = difflib.get_close_matches(recipe, RECIPES, n=2)
        hint = file_hint(recipe) or (f"; did you mean {' or '.join(close)}?" if close else "")
        raise ValueError(f"no recipe {recipe!r}{hint}")
    exam = getattr(load_recipe(recipe) if own else import_module(f"lowmem_grpo.recipes.{recipe}"), "EXAM", None)
    if not isinstance(exam, Exam):
        raise ValueError(f"the recipe {recipe!r} has no EXAM; test it with --dataset FILE --reward NAME")
    return exam
