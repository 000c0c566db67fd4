"""What was trained beside LoRA, in an export: the embedding and the head, whole or chosen rows.

An adapter with more rows than its base is of a resized vocabulary, which the exported model has too. Where the base
ties embedding and head, so does the exported model, unless the adapter holds different values for them.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from lowmem_grpo.models.export.base_weights import Rows, Weight, empty_model
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.runs.adapter_file import PREFIX
from lowmem_grpo.runs.saved_adapter import AdapterError

logger = logging.getLogger(__name__)

OF_ROWS = ".token_adapter.trainable_tokens_delta"


class TrainedMatrix(NamedTuple):
    """An adapter's values (n, D) for the rows of n tokens, which are a range if the whole matrix was trained."""

    values: Tensor
    ids: Sequence[int]

    def equals(self, other: "TrainedMatrix | None") -> bool:
        return other is not None and self.ids == other.ids and torch.equal(self.values, other.values)

    def over(self, weight: Weight, rows: int) -> Weight:
        """Return a base's weight with `rows` rows, these values among them."""
        return replace(weight, shape=(rows, *weight.shape[1:]), open=lambda: self.reader(weight), trained=True)

    def reader(self, weight: Weight) -> Rows:
        """Return a reader of the rows of that weight, in float32."""
        base, ids, count = weight.open(), torch.tensor([*self.ids]), weight.shape[0]

        def rows(start: int, stop: int) -> Tensor:
            band = base(min(start, count), min(stop, count))
            out = torch.empty(stop - start, *band.shape[1:], device=band.device)
            out[:len(band)] = band
            mine = ((start <= ids) & (ids < stop)).nonzero()[:, 0]
            out[(ids[mine] - start).to(out.device)] = self.values[mine.to(self.values.device)].to(out)
            return out

        return rows


def trained_matrices(config: LoraConfig, tensors: Mapping[str, Tensor], owner: str) -> dict[str, TrainedMatrix]:
    """Return {tensor of the base: an adapter's values} for the tensors of its file that are not LoRA's. `owner` begins
    the message of an AdapterError."""
    found, named = {}, config.trainable_token_indices or []
    for name, values in sorted(tensors.items()):
        module, rows, _ = name.removeprefix(PREFIX).partition(OF_ROWS)
        if ".lora_" in name:
            continue
        ids: Sequence[int] = range(len(values))
        if rows:
            module = f"{module}.weight"
            ids = named if not isinstance(named, dict) else next(
                (ids for part, ids in named.items() if f".{module}".endswith(f".{part}.weight")), [])
            if len(ids) != len(values):
                raise AdapterError(f"{owner} has {len(values)} rows of {module}, and its trainable_token_indices name "
                                   f"{len(ids)} tokens; one file is of another adapter")
        found[module] = TrainedMatrix(values, ids)
    return found


def live_matrices(model: Any) -> dict[str, TrainedMatrix]:
    """Return the same of the active adapter of a PEFT model."""
    name = model.active_adapter
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return trained_matrices(model.peft_config[name], tensors, "the model")


def with_matrices(weights: list[Weight], trained: dict[str, TrainedMatrix], config: Any) -> tuple[list[Weight], Any]:
    """Return a base's weights with an adapter's values in them, and the config of the model that they make. ExportError
    if they do not fit, or if rows of a resized vocabulary are missing."""
    if not trained:
        return weights, config
    own, trained, config = {weight.name: weight for weight in weights}, {**trained}, copy.deepcopy(config)
    model = empty_model(config)
    paths = {module: f"{path}.weight" for path, module in model.named_modules()}
    embedding, head = paths[model.get_input_embeddings()], paths.get(model.get_output_embeddings(), "")
    if trained.keys() & {embedding, head} and model.all_tied_weights_keys.get(head) == embedding:
        if (first := trained.get(embedding)) and not isinstance(first.ids, range):
            trained.setdefault(head, first)  # as PEFT ties trained rows
        if not first or not first.equals(trained.get(head)):
            logger.warning("the base ties embedding and head, and the adapter holds different values for them: both "
                           "are written, with tie_word_embeddings=False")
            own.setdefault(head, replace(own[embedding], name=head))
            for part in (config, config.get_text_config()):
                part.tie_word_embeddings = False
        elif head not in own:
            del trained[head]
    rows = vocabulary(own, trained, [name for name in (embedding, head) if name in own])
    own |= {name: matrix.over(own[name], rows.get(name, len(matrix.values))) for name, matrix in trained.items()}
    config.get_text_config().vocab_size = rows[embedding]
    return [*own.values()], config


def vocabulary(own: Mapping[str, Weight], trained: Mapping[str, TrainedMatrix], ends: list[str]) -> dict[str, int]:
    """Return how many rows embedding and head (`ends`) have. ExportError if rows are missing, or if a trained tensor
    is not the base's."""
    for name, (values, ids) in trained.items():
        had = own[name].shape if name in own else ()
        least = had[0] if had and isinstance(ids, range) else 0
        if not had or values.shape[1:] != had[1:] or len(ids) < least or (name not in ends and len(ids) != least):
            raise ExportError(f"the adapter's {name}, {tuple(values.shape)}, is {had or 'not'} in the base model: the "
                              "adapter was trained on another model. Name the right one with --base")
    held = {name: {*range(own[name].shape[0]), *(trained[name].ids if name in trained else ())} for name in ends}
    rows = max(max(tokens) for tokens in held.values()) + 1
    for name, tokens in held.items():
        if missing := {*range(rows)} - tokens:
            raise ExportError(f"neither the adapter nor its base has row {min(missing)} of {name}, in a vocabulary of "
                              f"{rows}: train the rows of all new tokens, in both, or merge it into its base with "
                              "plain peft and save that")
    return dict.fromkeys(ends, rows)
