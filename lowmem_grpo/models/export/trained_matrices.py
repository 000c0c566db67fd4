"""What was trained beside LoRA, in an export: the embedding and the head, whole or chosen rows.

An adapter with more rows than its base is of a resized vocabulary, which the exported model has too. Where the base
ties embedding and head, so does the exported model, unless the adapter holds different values for them.
"""

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from lowmem_grpo.models.export.base_weights import Rows, Weight
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.stored_weights import empty_model
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


def trained_matrices(config: LoraConfig, tensors: Mapping[str, Tensor], owner: str,
                     base: Mapping[str, Tensor] | None = None) -> dict[str, TrainedMatrix]:
    """Return {tensor of the base: an adapter's values} for the tensors of its file that are not LoRA's, and for the
    matrices of a resized `base` in it. `owner` begins the message of an AdapterError."""
    found, named = {}, config.trainable_token_indices or []
    for name, values in tensors.items():
        module, rows, _ = name.removeprefix(PREFIX).partition(OF_ROWS)
        if rows:
            ids = named if not isinstance(named, dict) else next(
                (ids for part, ids in named.items() if f".{module}".endswith(f".{part}")), [])
            if len(values) != len({*ids}) or len(ids) != len({*ids}) or min(ids, default=0) < 0:
                raise AdapterError(f"{owner} has {len(values)} rows of {module}, and its trainable_token_indices name "
                                   f"{ids}; one file is of another adapter")
            found[f"{module}.weight"] = TrainedMatrix(values, ids)
        elif ".lora_" not in name:
            found[module] = TrainedMatrix(values, range(len(values)))
    for name, matrix in (base or {}).items():
        own = found.get(name := name.removeprefix(PREFIX), TrainedMatrix(matrix[:0], ()))
        if max(own.ids, default=0) >= len(matrix):
            raise AdapterError(f"{owner} trains row {max(own.ids)} of {name}, which has {len(matrix)} rows; one file "
                               "is of another adapter")
        if not isinstance(own.ids, range):
            places = torch.tensor([*own.ids], dtype=torch.long)
            found[name] = TrainedMatrix(matrix.index_copy(0, places, own.values.to(matrix)), range(len(matrix)))
    return found


def live_matrices(model: Any) -> dict[str, TrainedMatrix]:
    """Return the same of the active adapter of a PEFT model."""
    name = model.active_adapter
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return trained_matrices(model.peft_config[name], tensors, "the model")


def with_matrices(weights: list[Weight], trained: dict[str, TrainedMatrix], config: Any, new: Sequence[int] = ()
                  ) -> tuple[list[Weight], Any]:
    """Return a base's weights with an adapter's values in them, and the config of the model that they make. ExportError
    if they do not fit, or if rows of a resized vocabulary or of `new` tokens are missing."""
    if not trained and not new:
        return weights, config
    own, trained, config = {weight.name: weight for weight in weights}, {**trained}, copy.deepcopy(config)
    model = empty_model(config)
    paths = {module: path for path, module in model.named_modules()}
    ends = [paths[module] for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    embedding, head = f"{ends[0]}.weight", f"{ends[-1]}.weight"
    if trained and model.all_tied_weights_keys.get(head) == embedding:
        if (first := trained.get(embedding)) and not isinstance(first.ids, range):
            trained.setdefault(head, first)  # as PEFT ties trained rows
        if first and first.equals(trained.get(head)):
            trained = {name: matrix for name, matrix in trained.items() if name in own}
        else:
            logger.warning("the base ties embedding and head, and the adapter holds different values for them: both "
                           "are written, with tie_word_embeddings=False")
            own.setdefault(head, replace(own[embedding], name=head))
            for part in (config, config.get_text_config()):
                part.tie_word_embeddings = False
    rows = count_rows(own, trained, [name for name, weight in own.items() if weight.module in ends], {*new})
    config.get_text_config().vocab_size = rows
    return [trained[name].over(weight, rows) if name in trained else weight for name, weight in own.items()], config


def count_rows(own: Mapping[str, Weight], trained: Mapping[str, TrainedMatrix], ends: Collection[str], new: set[int]
               ) -> int:
    """Return how many rows the tensors of embedding and head (`ends`) have. ExportError if a trained tensor is not the
    base's, or if rows are missing: the base's own are not those of `new` tokens."""
    for name, (values, ids) in trained.items():
        had = own[name].shape if name in ends else ()
        if values.shape[1:] != had[1:] or not had or (isinstance(ids, range) and len(ids) < had[0]):
            raise ExportError(f"the adapter's {name}, {tuple(values.shape)}, is {had or 'not'} in the base model: the "
                              "adapter was trained on another model. Name the right one with --base")
    held = {name: {*range(own[name].shape[0])} - new | {*(trained[name].ids if name in trained else ())}
            for name in ends}
    rows = max(new.union(*held.values())) + 1
    if missing := [(name, token) for name in ends for token in sorted({*range(rows)} - held[name])]:
        raise ExportError("neither the adapter nor its base has row {1} of {0}, in a vocabulary of {2}: train the rows "
                          "of all new tokens, in embedding and head, or load the model with this adapter and call "
                          "save_pretrained_merged".format(*missing[0], rows))
    return rows
