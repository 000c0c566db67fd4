"""`compute_metrics` of transformers' Trainer: metrics of an evaluation, from the logits of all its rows, the only
logits that a trainer holds whole ((T, V) of a row on the device, all rows on the host). `preprocess_logits_for_metrics`
makes fewer of them before."""

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
        Predictions are (N, T, ...) and labels (N, T), not shifted, with -100 where nothing is trained."""
        training, predictions, labels = model.training, None, None
        model.eval()
        try:
            pairs = ((group, rollout) for group in groups for rollout in group.rollouts)
            for ids, row_labels in (ids_and_labels(*pair) for pair in pairs):
                row = torch.tensor([row_labels], device=model.device)
                logits = self.predicted(model, torch.tensor([ids], device=model.device), row)
                predictions = logits if predictions is None else nested_concat(predictions, logits, UNTRAINED)
                labels = row.cpu() if labels is None else nested_concat(labels, row.cpu(), UNTRAINED)
        finally:
            model.train(training)
        whole = EvalPrediction(predictions=nested_numpify(predictions), label_ids=numpy.asarray(labels))
        return {name.removeprefix(prefix): value for name, value in numbers_of(self.compute(whole)).items()}

    @torch.no_grad()
    def predicted(self, model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the logits (1, T, V) of a row's ids (1, T), or what is made of them, on the host."""
        logits = model(input_ids=ids).logits
        outputs = logits if self.preprocess is None else self.preprocess(logits, labels)
        return move_to_host(nested_detach(outputs))


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return what compute_metrics returned; TypeError, with what it is, for anything but numbers by name."""
    wanted = "compute_metrics is to return a dict of numbers by name, as {'accuracy': 0.5}"
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{wanted}; it returned {metrics!r:.80}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError("text is no number")
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{wanted}; {name!r} is {value!r:.80}") from error
    return numbers


def move_to_host(tensors: Any) -> Any:
    """Return tensors, in tuples or lists too, on the host, in float32 where numpy has no such dtype."""
    if isinstance(tensors, (tuple, list)):
        return type(tensors)(move_to_host(part) for part in tensors)
    return tensors.float().cpu() if tensors.dtype == torch.bfloat16 else tensors.cpu()


def ids_and_labels(group: RolloutGroup, rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return the ids (T,) of a row, and its labels (T,)."""
    trained = rollout.trained or [True] * len(rollout.completion_ids)
    labels = [token if counts else UNTRAINED for token, counts in zip(rollout.completion_ids, trained, strict=True)]
    return [*group.prompt_ids, *rollout.completion_ids], [UNTRAINED] * len(group.prompt_ids) + labels
