"""Embedding and head beside LoRA: whole (PEFT's `modules_to_save`), or chosen rows (`trainable_token_indices`).

PEFT trains a copy of a whole matrix and keeps the base's. Of chosen rows it trains new values, and writes them into a
copy of the whole matrix in each pass. Here they are written into the base's matrix itself for as long as the adapter is
active, so that engines and kernels, which read this matrix, see them, and no copy is made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn.functional import linear

from lowmem_grpo.config.beside_lora import last_parts
from lowmem_grpo.kernels.custom_op import large_products, matmul_fp32, once_differentiable
from lowmem_grpo.kernels.logits import LogitShape

NUMBERS = 2**20  # logits of chosen rows that are in memory at a time, for their gradient


@dataclass(frozen=True, eq=False)
class TrainedRows:
    """Rows of an embedding or a head that are trained. `ids` (n,) rise; `values` (n, D) have the order of `order`."""

    ids: Tensor
    order: Tensor  # (n,) index into `values` of each id
    values: nn.Parameter

    def put(self, weights: Tensor, tokens: Tensor, scale: Tensor | None = None, ignored: int | None = None) -> Tensor:
        """Write the trained values, times `scale`, over the weights (..., D) of `tokens` (...), in place. The values
        get a gradient, except for the token `ignored`. The number of tokens found is read, which synchronizes."""
        place = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        found = (self.ids[place] == tokens).nonzero(as_tuple=True)
        values = self.values[self.order[place[found]]]
        if ignored is not None:
            values = torch.where((tokens[found] == ignored)[:, None], values.detach(), values)
        values = values.to(weights.dtype)
        return weights.index_put_(found, values if scale is None else values * scale.to(values))

    def logits(self, hidden: Tensor, head: Any) -> Tensor:
        """Return the logits (..., n) of these rows of a linear `head`, with a gradient for the values."""
        return linear(hidden, self.values[self.order].to(hidden.dtype), None if head.bias is None else
                      head.bias[self.ids])

    def with_gradients(
        self, hidden: Tensor, targets: Tensor, bias: Tensor | None, shape: LogitShape, target_logits: Tensor,
        logprobs: Tensor, entropy: Tensor, entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropy (N,), each with a gradient for these rows of the head besides the one it has.
        `target_logits` (N,) are the targets' logits, not divided by the temperature."""
        log_sum = (target_logits / shape.temperature - logprobs).detach()
        of_logprobs, of_entropy = RowGradients.apply(
            self.values[self.order], hidden.detach(), targets, self.ids, None if bias is None else bias[self.ids],
            shape, log_sum, entropy.detach())
        return logprobs + of_logprobs, entropy + of_entropy if entropy_grad else entropy


class SharedRows(TrainableTokensLayer):
    """PEFT's layer of chosen rows, whose values are in the base's matrix while its adapter is active."""

    def __init__(self, made: TrainableTokensLayer, device: torch.device, tied: "SharedRows | None" = None) -> None:
        """Take the place of a layer that PEFT made; `tied` has the same matrix and rows. The values are trained on the
        device, where the matrix may not be."""
        (name,) = made.active_adapters
        super().__init__(made.base_layer, name, tied_adapter=tied)
        self.device = device
        if tied is None:
            self.trainable_tokens_delta = made.trainable_tokens_delta
            self.trainable_tokens_original = made.trainable_tokens_original
            self.token_indices = made.token_indices
            self.move_to_device(name)
        self.sorted: dict[str, tuple[Tensor, Tensor]] = {}  # of each adapter: its ids, and their order

    @property
    def rows(self) -> TrainedRows | None:
        """The rows of the active adapter; None without one."""
        name = next((name for name in self.active_adapters if name in self.trainable_tokens_delta), None)
        if name is None or self.disable_adapters or self.merged:
            return None
        values = self.trainable_tokens_delta[name]
        if name not in self.sorted or self.sorted[name][0].device != values.device:
            with torch.inference_mode(False):  # passes with gradients read them, later
                ids, order = torch.tensor(self.token_indices[name], device=values.device).sort()
            self.sorted[name] = ids, order
        return TrainedRows(*self.sorted[name], values)

    @torch.no_grad()
    def write(self, values: Tensor, rows: TrainedRows) -> None:
        """Write values (n, D) into the rows of the base's matrix, unless it lies on the host, which would wait."""
        base: Any = self.base_layer
        matrix: Tensor = base.weight.data
        if matrix.device == values.device:
            matrix.index_copy_(0, rows.ids, values.detach()[rows.order].to(matrix.dtype))

    def restore(self) -> None:
        """Write the base's own values into its matrix."""
        if (rows := self.rows) is not None:
            name = next(name for name in self.active_adapters if name in self.trainable_tokens_delta)
            self.write(self.trainable_tokens_original[name], rows)

    def get_merged_weights(self, active_adapters: Any) -> Tensor:
        """Return the base's matrix (V, D), with the active adapter's rows in it."""
        if (rows := self.rows) is not None:
            self.write(rows.values, rows)
        base: Any = self.base_layer
        weight: Tensor = base.weight
        return weight

    def forward_adapters(self, x: Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Look up rows, or compute logits as transformers does."""
        self.get_merged_weights(active_adapters)
        result: Tensor = self.base_layer(x, *args, **kwargs)
        rows, base = self.rows, self.base_layer
        if rows is None:
            return result
        if base.weight.device == rows.values.device and not torch.is_grad_enabled():
            return result
        if not isinstance(base, nn.Embedding):
            return result.index_copy_(-1, rows.ids, rows.logits(x, base).to(result))
        # `enable_input_require_grads` makes a frozen result a leaf that requires gradients: nothing may write into it
        return rows.put(result.detach(), x, self._get_embed_scale(), base.padding_idx)

    def enable_adapters(self, enabled: bool) -> None:
        if self.merged and not enabled:
            self.unmerge()  # as PEFT does at the next forward pass
        self.restore()
        super().enable_adapters(enabled)
        self.get_merged_weights(None)  # an engine may go on with the matrix before anything else reads it

    def set_adapter(self, adapter_names: Any, inference_mode: bool = False) -> None:
        self.restore()
        super().set_adapter(adapter_names, inference_mode)
        self.get_merged_weights(None)

    def delete_adapter(self, adapter_name: str) -> None:
        self.restore()
        self.sorted.pop(adapter_name, None)
        super().delete_adapter(adapter_name)

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        self.restore()  # PEFT reads the new adapter's first values from the matrix
        super().update_layer(adapter_name, *args, **kwargs)
        self.move_to_device(adapter_name)

    def move_to_device(self, name: str) -> None:
        own, original = self.trainable_tokens_delta[name], self.trainable_tokens_original[name]
        self.trainable_tokens_delta[name] = nn.Parameter(own.detach().to(self.device), own.requires_grad)
        self.trainable_tokens_original[name] = original.to(self.device)


class RowGradients(torch.autograd.Function):
    """Two terms (N,) of zeros, whose gradients are those of logprobs and entropy for trained rows (n, D) of the head.

        d logp / d z(k) = [k = target] - p(k)        d entropy / d z(k) = -p(k) (log p(k) + entropy)
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, hidden: Tensor, targets: Tensor, ids: Tensor, bias: Tensor | None,
                shape: LogitShape, log_sum: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(values, hidden, targets, ids, bias, log_sum, entropy)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        return torch.zeros_like(log_sum), torch.zeros_like(log_sum)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Compute the logits of the rows again, for some tokens at a time."""
        values, hidden, targets, ids, bias, log_sum, entropy = ctx.saved_tensors
        total, weights = log_sum.new_zeros(values.shape), values.to(hidden.dtype).T
        step = max(1, NUMBERS // len(ids))
        for start in range(0, len(hidden), step):
            band = slice(start, start + step)
            of_logprobs, of_entropy = (None if part is None else part[band, None] for part in gradients)
            with large_products():
                z = ctx.shape.apply_(matmul_fp32(hidden[band], weights), bias)
            log_p = (z - log_sum[band, None]).clamp_(max=0)
            p = log_p.exp()
            slopes = torch.zeros_like(p)
            if of_logprobs is not None:
                slopes += ((targets[band, None] == ids).to(p.dtype) - p) * of_logprobs
            if of_entropy is not None:
                slopes -= p * (log_p.clamp_(min=torch.finfo(p.dtype).min) + entropy[band, None]) * of_entropy
            slopes *= ctx.shape.slope_(z, torch.zeros_like(z[:, :1]))
            total.addmm_(slopes.T, hidden[band].to(total.dtype))
        return total.to(values.dtype), *[None] * 7


# A model's embedding and head


def base_module(module: Any) -> Any:
    """Return the base's own embedding or head, without PEFT's wrapper."""
    return module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module


def tables(model: Any) -> dict[str, Any]:
    """Return the model's embedding and head by the last part of their paths, such as embed_tokens and lm_head."""
    wanted = model.get_input_embeddings(), model.get_output_embeddings()
    return {path.rpartition(".")[2]: module for path, module in model.named_modules()
            if any(module is each for each in wanted)}


def is_tied(model: Any) -> bool:
    """Return whether the base's head is its embedding."""
    embedding, head = map(base_module, (model.get_input_embeddings(), model.get_output_embeddings()))
    return bool(head is not None and head.weight is embedding.weight)


def check_beside(model: Any, config: LoraConfig) -> None:
    """Raise ValueError if LoRA's settings train modules other than embedding and head, or not as they can be."""
    known, chosen = tables(model), config.trainable_token_indices
    whole, rows = last_parts(config.modules_to_save), rows_by_name(model, config)
    paths = [f".{path}" for path, module in model.named_modules() if module in known.values()]
    named = [*(config.modules_to_save or ()), *(chosen if isinstance(chosen, dict) else ())]
    if other := [name for name in named if not any(path.endswith(f".{name}") for path in paths)]:
        raise ValueError(f"{other[0]} cannot be trained beside LoRA: allowed in modules_to_save and "
                         f"trainable_token_indices are {' and '.join(known)}; leave it out")
    if both := sorted((known.keys() if whole and is_tied(model) else whole) & rows.keys()):
        raise ValueError(f"modules_to_save and trainable_token_indices both name {both[0]}: train all of its rows, or "
                         "the chosen ones")
    for name in sorted({*whole, *rows}):
        if not isinstance(own := base_module(known[name]), nn.Embedding) and type(own) is not nn.Linear:
            raise ValueError(f"{name} is a {type(own).__name__}, and only plain weights in 16 or 32 bits are trained "
                             "beside LoRA: load the model with its embedding and head unquantized, or leave it out")
    if biased := next((name for name in sorted(whole) if getattr(base_module(known[name]), "bias", None) is not None),
                      None):
        raise ValueError(f"{biased} has a bias, which PEFT would train with it and no adapter holds here: name rows of "
                         "it in trainable_token_indices, or leave it out of modules_to_save")
    if whole and is_tied(model) and not config.ensure_weight_tying:
        raise ValueError("the model ties its embedding to its head, and PEFT's default would train two copies that "
                         "drift apart: set ensure_weight_tying=True, which trains the one matrix")
    embedding = next(iter(known))
    if rows and is_tied(model) and any(ids != rows.get(embedding) for ids in rows.values()):
        raise ValueError("the model ties its embedding to its head, so both have the same rows: give "
                         f"trainable_token_indices as a list, or name only {embedding} in it")
    for name, ids in rows.items():
        check_ids(name, ids, len(base_module(known[name]).weight))


def rows_by_name(model: Any, config: LoraConfig) -> dict[str, Any]:
    """Return {last part of a module's path: ids of its rows} of `trainable_token_indices`."""
    chosen = config.trainable_token_indices
    named = chosen if isinstance(chosen, dict) else {next(iter(tables(model))): chosen} if chosen else {}
    return {name.rpartition(".")[2]: ids for name, ids in named.items()}


def check_ids(name: str, ids: Any, rows: int) -> None:
    """Raise ValueError for ids of rows that a matrix of `rows` rows does not have, or that are repeated."""
    if not ids:
        raise ValueError(f"trainable_token_indices names no row of {name}; leave it out")
    if outside := next((each for each in ids if not 0 <= each < rows), None):
        raise ValueError(f"trainable_token_indices names row {outside} of {name}, which has the rows 0 to {rows - 1}; "
                         "for new tokens call add_new_tokens(model, tokenizer, [...]) before get_peft_model")
    if len({*ids}) < len(ids):
        twice = next(each for place, each in enumerate(ids) if each in ids[:place])
        raise ValueError(f"trainable_token_indices names row {twice} of {name} twice; name each row once")


def prepare_embeddings(model: nn.Module) -> None:
    """After PEFT has wrapped a model: let trained rows share the base's matrix, and hold copies of float16 matrices in
    float32, because loss scaling takes no float16 gradients."""
    made: dict[int, SharedRows] = {}  # by the matrix
    device = next((own.device for own in model.parameters() if own.device.type != "cpu"), torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, TrainableTokensWrapper) and not isinstance(module.token_adapter, SharedRows):
            layer = module.token_adapter
            module.token_adapter = SharedRows(layer, device, made.get(id(layer.base_layer.weight))
                                              if layer.tied_adapter else None)
            made.setdefault(id(layer.base_layer.weight), module.token_adapter)
    wide: dict[int, nn.Parameter] = {}  # of each copy in float16
    for copied in copies(model):
        if (own := copied.weight).dtype == torch.float16:
            copied.weight = wide.setdefault(id(own), nn.Parameter(own.detach().float(), own.requires_grad))
            copied.register_forward_pre_hook(cast_floats(torch.float32))
            copied.register_forward_hook(lambda _, args, out: out.half() if not args[0].is_floating_point() else out)


def copies(model: nn.Module) -> Iterator[Any]:
    """Yield PEFT's trained copies of whole matrices."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield from module.modules_to_save.values()


def cast_floats(dtype: torch.dtype) -> Any:
    return lambda _, args: tuple(each.to(dtype) if each.is_floating_point() else each for each in args)
