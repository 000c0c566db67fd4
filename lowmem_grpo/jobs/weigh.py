"""Prints what the plan of a recipe says for this machine's card, as one line of JSON.

    python -m lowmem_grpo.jobs.weigh RECIPE [key=value ...]
"""

import sys
from typing import Any

from lowmem_grpo.jobs.room import Weighed, to_text


def weighed(recipe: str, arguments: list[str]) -> Weighed:
    """The plan of a recipe on this machine's card. Nothing is known without a card, and of a recipe without presets."""
    import torch

    from lowmem_grpo.memory.peaks import keep_to, this_card
    from lowmem_grpo.recipes.options import fill
    from lowmem_grpo.recipes.planned import planned
    from lowmem_grpo.recipes.presets import prepare
    from lowmem_grpo.recipes.recipe_file import find_recipe

    if not torch.cuda.is_available():
        return Weighed()
    module: Any = find_recipe(recipe)
    if not hasattr(module, "PRESETS"):
        return Weighed()
    setup = prepare(fill(module.OPTIONS, arguments), module.DEFAULTS, module.PRESETS)
    keep_to(setup.card_share)
    card = this_card(torch.device("cuda"))
    found = planned(setup, card)
    return Weighed(found.peak, card.budget, torch.cuda.mem_get_info()[0], "; ".join(found.advice))


if __name__ == "__main__":
    print(to_text(weighed(sys.argv[1], sys.argv[2:])))
