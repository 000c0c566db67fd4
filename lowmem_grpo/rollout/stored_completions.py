"""Completions from the dataset's columns in place of sampled ones, with the likeliest tokens of a teacher that is not
asked during the run. Beside `prompt`, a row has `completion_ids` (C,), `teacher_top_ids` (C, K) and
`teacher_top_logprobs` (C, K): at each token, at temperature 1, the likeliest first. `ServedTeacher.columns` makes them.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompt_inputs import plain_value
from lowmem_grpo.data.prompts import DataError, Prompt
from lowmem_grpo.rollout.rollout_func import ROUNDING, finish_reason
from lowmem_grpo.types import OnGroup, Rollout

COMPLETION, TOP_IDS, TOP_LOGPROBS = COLUMNS = ("completion_ids", "teacher_top_ids", "teacher_top_logprobs")


class StoredCompletions:
    """A `Player` whose rollouts are the rows' completions, with the teacher's values as fields. The log-probabilities
    of a sampler are unknown: they are 0, and a loss must not read them."""

    waited = 0.0  # always 0, as there is nothing to wait for

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer  # which is not complete yet

    @cached_property
    def facts(self) -> tuple[int, int, set[int]]:
        """The context of the model, its number of tokens, and the tokens that end a completion."""
        model, trainer = self.trainer.model, self.trainer
        return (model.loaded.max_seq_length, len(model.get_input_embeddings().weight),
                set(trainer.policy.eos_token_ids(trainer.tokenizer)))

    def play(
        self, engine: Any, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """Return the rollout of each prompt's row. DataError for more than one of a prompt, or a row that cannot be
        trained on."""
        if params.n != 1:
            raise DataError(f"num_generations is {params.n}, and a row has one stored completion; set it to 1")
        groups = [[self.rollout(prompt)] for prompt in prompts]
        if on_group is not None:
            for index, group in enumerate(groups):
                on_group(index, group)
        return groups

    def rollout(self, prompt: Prompt) -> Rollout:
        context, vocabulary, ends = self.facts
        ids, top_ids, top_logprobs = stored_values(prompt.row, prompt.index, vocabulary)
        if len(prompt.ids) + len(ids) > context:
            raise DataError(f"row {prompt.index}: the prompt has {len(prompt.ids)} tokens and {COMPLETION} {len(ids)}, "
                            f"and the model was loaded for {context} together; load with a larger max_seq_length")
        if (most := self.trainer.args.distillation_topk) > top_ids.shape[1]:
            raise DataError(f"row {prompt.index}: {TOP_IDS} has {top_ids.shape[1]} tokens at each place, and "
                            f"distillation_topk is {most}; set at most what all rows have")
        return Rollout(ids, [0.0] * len(ids), finish_reason(ids, [True] * len(ids), ends),
                       text=self.trainer.tokenizer.decode(ids, skip_special_tokens=True),
                       policy_version=self.trainer.state.policy_version,
                       fields={TOP_IDS: top_ids[:, :most], TOP_LOGPROBS: top_logprobs[:, :most]})


def stored_values(row: Mapping[str, Any], number: int | None, vocabulary: int) -> tuple[list[int], Tensor, Tensor]:
    """Return a row's completion (C,), and the teacher's likeliest tokens (C, K) int64 with their log-probabilities
    (C, K) float32. DataError, with the row's `number` in the dataset, for values that cannot be trained on."""
    values = []
    for name in COLUMNS:
        try:
            values.append(torch.tensor(plain_value(row[name], arrays=True), dtype=torch.float64))
        except KeyError:
            raise DataError(f"row {number} has no column {name}; it needs {', '.join(COLUMNS)}") from None
        except (TypeError, ValueError):
            raise DataError(f"row {number}: {name} is {str(row[name])[:60]}; it must hold numbers, and as many at each "
                            "token") from None
    ids, top_ids, top_logprobs = values
    if fault := fault_in(ids, top_ids, top_logprobs, vocabulary):
        raise DataError(f"row {number}: {fault}")
    return [int(token) for token in ids.tolist()], top_ids.long(), top_logprobs.float()


def fault_in(ids: Tensor, top_ids: Tensor, top_logprobs: Tensor, vocabulary: int) -> str:
    """Return what is wrong with the values of a row, and what is allowed; "" if nothing is."""
    if ids.ndim != 1 or not len(ids):
        return f"{COMPLETION} has the shape {tuple(ids.shape)}; it must be a list of one token id or more"
    for name, values in ((TOP_IDS, top_ids), (TOP_LOGPROBS, top_logprobs)):
        if values.ndim != 2 or len(values) != len(ids) or not values.shape[1] or values.shape != top_ids.shape:
            return (f"{name} has the shape {tuple(values.shape)}, and {COMPLETION} has {len(ids)} tokens; both teacher "
                    f"columns must have the shape ({len(ids)}, K), with K of 1 or more")
    for name, values in ((COMPLETION, ids), (TOP_IDS, top_ids)):
        if bool((wrong := (values < 0) | (values >= vocabulary) | (values % 1 != 0)).any()):
            return f"{name} has {values[wrong][0]:g}; the model's token ids are 0 to {vocabulary - 1}"
    if bool((wrong := ~top_logprobs.isfinite() | (top_logprobs > ROUNDING)).any()):
        return f"{TOP_LOGPROBS} has {top_logprobs[wrong][0]:g}; a log-probability is a finite number, 0 at most"
    twice = (top_ids.sort(-1).values.diff(dim=-1) == 0).any(-1)
    for wrong, says in (
        ((top_logprobs.diff(dim=-1) > 0).any(-1), f"{TOP_LOGPROBS} rises; sort the tokens, the likeliest first"),
        (twice, f"{TOP_IDS} has an id twice; each id may stand there once"),
        (top_logprobs.exp().sum(-1) > 1 + ROUNDING, f"the probabilities of {TOP_LOGPROBS} sum to more than 1; store "
         "log-probabilities at temperature 1, not logits"),
    ):
        if bool(wrong.any()):
            return f"at token {int(wrong.nonzero()[0])}, {says}"
    return ""
