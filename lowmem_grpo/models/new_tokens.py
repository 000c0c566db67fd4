"""Rows of a model's embedding and head for new tokens. They are put in before LoRA, and an adapter holds them only if
it trains them."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowmem_grpo.config.beside_lora import MATRICES
from lowmem_grpo.memory.offload.embedding import PER_LAYER
from lowmem_grpo.models.policy import check_linear
from lowmem_grpo.models.pretrained import tokenizer_beside
from lowmem_grpo.models.trained_embedding import base_module, is_tied, tables
from lowmem_grpo.runs.adapter_file import MOST_SIDE, PREFIX, base_matrices, check_finite
from lowmem_grpo.runs.checkpoint_state import ADAPTER
from lowmem_grpo.runs.saved_adapter import NEW_ROWS, AdapterError, base_of_adapter
from lowmem_grpo.utils import COUNT, SHARE, count_text, one_of, require

logger = logging.getLogger(__name__)
MOST = 2**16  # rows that a saved adapter may add to a base beyond doubling it: a wrong number would fill the memory
AFTER_LORA = ("the model has LoRA already, which was made for its vocabulary as it is: load the model again, add the "
              "tokens, and then call get_peft_model")


def add_new_tokens(model: Any, tokenizer: Any, new_tokens: Sequence[str] = (), method: str = "mean",
                   interpolation: float = 0.5) -> None:
    """Add tokens to a tokenizer, and rows for them to a model that FastLanguageModel.from_pretrained returned, as
    Unsloth's function of this name does. Rows without a token are used first; then embedding and head are resized.

    A new row is the mean of all old ones or, with method="interpolation", (1 - interpolation) times this mean plus
    `interpolation` times the mean row of the tokens that the new one's text had so far. Tokens that the tokenizer has
    already are left as they are, with a warning. get_peft_model trains the new rows, unless `modules_to_save` or
    `trainable_token_indices` say what to train. Raises TypeError for another model, and ValueError for a model with
    LoRA or with a quantized head."""
    texts = isinstance(new_tokens, list | tuple) and all(isinstance(token, str) and token for token in new_tokens)
    if not texts or not new_tokens:
        raise ValueError(f"new_tokens is {new_tokens!r:.200}; it must be a list of texts, such as ['<think>']. For an "
                         "AddedToken call tokenizer.add_tokens, and then model.resize_token_embeddings(len(tokenizer))")
    require("method", method, one_of("mean", "interpolation"))
    require("interpolation", interpolation, SHARE)
    loaded, tokenizer = loaded_of(model), getattr(tokenizer, "tokenizer", tokenizer)  # inside of a processor
    if not hasattr(tokenizer, "get_vocab"):
        raise TypeError(f"the tokenizer is a {type(tokenizer).__name__}; take the one that "
                        "FastLanguageModel.from_pretrained returned, after the model")
    known, rows = tokenizer.get_vocab(), len(model.get_input_embeddings().weight)
    fresh = [token for token in dict.fromkeys(new_tokens) if known.get(token, rows) >= rows]
    if old := [token for token in new_tokens if token not in fresh]:
        logger.warning("add_new_tokens: the tokenizer has %s already; they stay as they are", ", ".join(map(repr, old)))
    if not fresh:  # also a notebook cell that was run twice
        return
    check_resizable(model, len(tokenizer) + len(fresh) > rows)
    share = interpolation if method == "interpolation" else 0.0
    pieces = [[piece for piece in tokenizer(token, add_special_tokens=False).input_ids if piece < rows]
              for token in fresh]
    means = [mean_row(weight) for weight in matrices(model.inner)]
    tokenizer.add_tokens(fresh)
    ids = tokenizer.convert_tokens_to_ids(fresh)
    if max(ids) >= rows:
        resize(model, max(ids) + 1)
    for weight, mean in zip(matrices(model.inner), means, strict=True):
        for place, written in zip(ids, pieces, strict=True):
            own = weight.data[written].mean(0, dtype=torch.float32) if written else mean
            weight.data[place] = ((1 - share) * mean + share * own).to(weight.dtype)
    loaded.tokenizer, loaded.new_tokens = tokenizer, sorted({*loaded.new_tokens, *ids})
    logger.info("added %s: %s, with the ids %s", count_text(len(fresh), "token"), ", ".join(map(repr, fresh)), ids)


def resize_to(model: Any, rows: int | None, multiple: int | None) -> nn.Module:
    """Do what resize_token_embeddings of transformers does, and return the embedding. Old rows are kept, with a warning
    if fewer were asked for; ValueError for fewer than the tokenizer has tokens."""
    loaded, held = loaded_of(model), len(model.get_input_embeddings().weight)
    rows, multiple = held if rows is None else rows, multiple or 1
    require("new_num_tokens", rows, COUNT)
    require("pad_to_multiple_of", multiple, COUNT)
    if rows < len(loaded.tokenizer):
        raise ValueError(f"new_num_tokens is {rows}, and the tokenizer has {len(loaded.tokenizer)} tokens; give as "
                         "many or more")
    rows = -(-int(rows) // multiple) * multiple
    if rows < held:
        added = [*range(loaded.tokens, len(loaded.tokenizer))]
        logger.warning("the embedding keeps its %d rows, of which %d were asked for: rows that are stored stay, and "
                       "tokens may use them%s", held, rows, f". No text has trained those of tokens that you added: "
                       f"trainable_token_indices={added} of get_peft_model trains them" if added else "")
    elif rows > held:
        check_resizable(model, True)
        resize(model, rows)
    embedding: nn.Module = model.get_input_embeddings()
    return embedding


def resize(model: Any, rows: int) -> None:
    """Add rows to embedding and head, with the mean of the old ones, and record them as those of new tokens."""
    base, means = model.inner, [mean_row(weight) for weight in matrices(model.inner)]
    held = len(base.get_input_embeddings().weight)
    model.close_engine()
    with torch.random.fork_rng():  # transformers draws rows
        base.resize_token_embeddings(rows, mean_resizing=False)
    for weight, mean in zip(matrices(base), means, strict=True):
        weight.data[held:] = mean.to(weight.dtype)
    model.loaded.new_tokens = sorted({*model.loaded.new_tokens, *range(held, rows)})


def save_rows(model: Any, folder: Path) -> None:
    """Write the base's rows of new tokens beside an adapter, so that it is loaded with the same base. While rows are
    trained, the base's own are in PEFT's copy of them."""
    ids = model.loaded.new_tokens
    saved = {"ids": torch.tensor(ids)}
    for name, module in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        saved[name] = base_module(module).weight.detach()[ids].cpu()
        if isinstance(module, TrainableTokensWrapper):
            originals = module.token_adapter.trainable_tokens_original[ADAPTER].cpu()
            own = dict(zip(module.token_adapter.token_indices[ADAPTER], originals, strict=True))
            saved[name] = torch.stack([own.get(row, kept) for row, kept in zip(ids, saved[name], strict=True)])
    save_file(saved, folder / NEW_ROWS)


def fit_vocabulary(model: Any, folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    """Give a base the rows with which the adapter in `folder` was trained: those that were saved beside it or, of an
    adapter that PEFT saved, those in its matrices, or as many as its ids need. Sets `ensure_weight_tying` of the config
    for a tied base. AdapterError for a file of rows that does not fit."""
    config.ensure_weight_tying = config.ensure_weight_tying or bool(config.modules_to_save and is_tied(model.inner))
    chosen = config.trainable_token_indices or ()
    brought = base_matrices(folder)
    ids = [row for rows in (chosen.values() if isinstance(chosen, dict) else [chosen]) for row in rows]
    held = len(model.get_input_embeddings().weight)
    rows = base_of_adapter(folder).vocab_size or next(
        (len(tensor) for name, tensor in {**brought, **tensors}.items() if name.endswith(MATRICES)),
        max([held - 1, *ids]) + 1)
    if rows != held:
        if rows > 2 * held + MOST:
            raise AdapterError(f"the adapter in {folder} names row {rows - 1} of an embedding, and its base has {held} "
                               "rows; one file is of another adapter")
        check_resizable(model, rows > held)
        resize(model, rows)
    if rows > held and tokenizer_beside(folder) is None:
        logger.warning("the adapter has %d tokens and its base %d, and %s holds no tokenizer, so the base's own reads "
                       "new tokens in pieces: save theirs there (tokenizer.save_pretrained)", rows, held, folder)
    own = {f"{PREFIX}{path}.weight": module.weight.data for path, module in model.inner.named_modules()
           if module in (model.get_input_embeddings(), model.get_output_embeddings())}
    for name, values in brought.items():
        if name not in own or (matrix := own[name]).shape != values.shape:
            raise AdapterError(f"the adapter in {folder} brings {name}, {[*values.shape]}, which its base does not "
                               "have: it was trained on another model")
        check_finite(folder, {name: values})
        other = (matrix.to(values) != values).any(1).nonzero()[:, 0]
        matrix[other.to(matrix.device)] = values[other].to(matrix)
        model.loaded.new_tokens = sorted({*model.loaded.new_tokens, *other.tolist()})
    if (path := folder / NEW_ROWS).is_file():
        try:
            saved = load_file(path)
            model.loaded.new_tokens = [range(rows)[row] for row in ids_in(saved) if row >= 0]
            for name, weight in zip(("embedding", "head"), matrices(model.inner), strict=False):
                if [*saved[name].shape] != (wanted := [len(model.loaded.new_tokens), weight.shape[1]]):
                    raise RuntimeError(f"{name} is {[*saved[name].shape]} where {wanted} is expected")
                if not saved[name].isfinite().all():
                    raise RuntimeError(f"{name} holds NaN or infinity")
                weight.data[model.loaded.new_tokens] = saved[name].to(weight)
        except (LookupError, RuntimeError, TypeError, SafetensorError) as error:
            raise AdapterError(f"{path} does not hold rows of this base's new tokens ({error}); take it from the run "
                               "again, or delete it, which begins with the mean of the old rows") from error


def ids_in(saved: Mapping[str, Tensor]) -> list[int]:
    """Return the ids in a file of the rows of new tokens. TypeError, before they are read, for what are none."""
    ids = saved["ids"]
    if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) > MOST_SIDE:
        raise TypeError(f"ids is {[*ids.shape]} of {str(ids.dtype).removeprefix('torch.')}; needed is a list of int64, "
                        f"{MOST_SIDE:,} at most")
    return list(ids.tolist())


def loaded_of(model: Any) -> Any:
    """Return what was loaded with a model of ours; TypeError for another model."""
    if not hasattr(model, "loaded"):
        raise TypeError(f"the model is a {type(model).__name__}; take the one that FastLanguageModel.from_pretrained "
                        "returned")
    return model.loaded


def check_resizable(model: Any, grows: bool) -> None:
    """Raise ValueError for a model with LoRA, or whose head is no plain linear layer. One with an embedding for each
    layer may not grow."""
    if hasattr(model.inner, "peft_config"):
        raise ValueError(AFTER_LORA)
    check_linear(model.inner.get_output_embeddings())
    if grows and getattr(model.inner.get_decoder(), PER_LAYER, None) is not None:
        raise ValueError("the layers of this model have embeddings of their own, which no adapter holds, so it has to "
                         "keep its rows: take tokens that the tokenizer has, such as <unused0>")


def matrices(base: Any) -> list[nn.Parameter]:
    """Return the weights (V, D) of embedding and head; one if they are tied."""
    table, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    return [table] if head is table else [table, head]


def mean_row(weight: Tensor) -> Tensor:
    """Return the mean (D,) of the rows (V, D) in float32, without those that are all zero, which no text has trained
    (Unsloth leaves them out too)."""
    return weight.data.sum(0, dtype=torch.float32) / weight.data.any(1).sum()


def rows_to_train(model: Any) -> Any:
    """Return `trainable_token_indices` that train a bare model's new tokens, and say that they are trained."""
    new = model.loaded.new_tokens
    logger.info("the rows of %s are trained beside LoRA; modules_to_save would train all of embedding and head",
                count_text(len(new), "new token"))
    return new if is_tied(model.inner) else dict.fromkeys(tables(model.inner), new)


def untrained(model: Any, tokens: Iterable[int]) -> list[int]:
    """Return those of the tokens whose rows in embedding and head are not both trained."""
    found: set[int] = set()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        rows = module.token_adapter.token_indices[ADAPTER] if isinstance(module, TrainableTokensWrapper) else ()
        if not isinstance(module, ModulesToSaveWrapper):
            found |= {*tokens} - {*rows}
    return sorted(found)
