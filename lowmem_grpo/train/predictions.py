"""`compute_metrics` of transformers' Trainer: metrics of an evaluation, from the logits of all its rows.

These are the only logits that a trainer ever holds whole, since the user's function reads them: (T, V) numbers of a row
on the model's device, and those of all rows on the host. `preprocess_logits_for_metrics` makes fewer of a row's, such
as the most likely ids, before they go to the host.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify

from lowmem_grpo.types import Rollout, RolloutGroup

UNTRAINED = -100  # transformers' label of a token that does not count


@dataclass(frozen=True)
class Predictions:
    """The two functions that a user gave: `compute(EvalPrediction)`, and `preprocess(logits, labels)` or None."""

    compute: Callable[[EvalPrediction], Mapping[str, float]]
    preprocess: Callable[[torch.Tensor, torch.Tensor], Any] | None = None

    def metrics(self, model: Any, groups: Iterable[RolloutGroup], prefix: str = "eval_") -> dict[str, float]:
        """Return what the function makes of the model's predictions for these rows, under names without the prefix.

        Predictions are (N, T, ...) and labels (N, T) as transformers has them: not shifted, and -100 behind shorter
        rows and at tokens that are not trained.
        """
        training, predictions, labels = model.training, None, None
        model.eval()
        try:
            for ids, row_labels in (ids_and_labels(*pair) for pair in rows_of(groups)):
                row = torch.tensor([row_labels], device=model.device)
                found = self.predicted(model, torch.tensor([ids], device=model.device), row)
                predictions = found if predictions is None else nested_concat(predictions, found, UNTRAINED)
                labels = row.cpu() if labels is None else nested_concat(labels, row.cpu(), UNTRAINED)
        finally:
            model.train(training)
        given = self.compute(EvalPrediction(predictions=nested_numpify(predictions), label_ids=numpy.asarray(labels)))
        return {name.removeprefix(prefix): value for name, value in numbers_of(given).items()}

    @torch.no_grad()
    def predicted(self, model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the logits (1, T, V) of a row's ids (1, T), or what is made of them, on the host."""
        logits = model(input_ids=ids).logits
        found = logits if self.preprocess is None else self.preprocess(logits, labels)
        return move_to_host(nested_detach(found))


def numbers_of(given: Any) -> dict[str, float]:
    """Return what compute_metrics returned; TypeError, with what it is, for anything but numbers by name."""
    wanted = "compute_metrics is to return a dict of numbers by name, as {'accuracy': 0.5}"
    if not isinstance(given, Mapping):
        raise TypeError(f"{wanted}; it returned {given!r:.80}")
    found: dict[str, float] = {}
    for name, value in given.items():
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError("text is no number")
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{wanted}; {name!r} is {value!r:.80}") from error
    return found


def move_to_host(found: Any) -> Any:
    """Return tensors, in tuples or lists too, on the host, in float32 where numpy has no such dtype."""
    if isinstance(found, (tuple, list)):
        return type(found)(move_to_host(part) for part in found)
    return found.float().cpu() if found.dtype == torch.bfloat16 else found.cpu()


def rows_of(groups: Iterable[RolloutGroup]) -> list[tuple[RolloutGroup, Rollout]]:
    """Return each row as its group and its one completion."""
    return [(group, rollout) for group in groups for rollout in group.rollouts]


def ids_and_labels(group: RolloutGroup, rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return the ids (T,) of a row, and its labels (T,)."""
    trained = rollout.trained or [True] * len(rollout.completion_ids)
    labels = [token if counts else UNTRAINED for token, counts in zip(rollout.completion_ids, trained, strict=True)]
    return [*group.prompt_ids, *rollout.completion_ids], [UNTRAINED] * len(group.prompt_ids) + labels
