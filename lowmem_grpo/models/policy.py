"""The trained model as the training loop uses it: hidden states, log-probabilities, adapter on or off."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem_grpo.kernels import linear_logprobs
from lowmem_grpo.kernels.custom_op import large_products, matmul_fp32, rounding
from lowmem_grpo.kernels.logits import LogitShape
from lowmem_grpo.memory.families import MULTIPLIED, family_of, trained
from lowmem_grpo.memory.offload.activations import drops, enable_checkpointing, keep_last, kept_layers
from lowmem_grpo.memory.offload.embedding import knowing, on_host
from lowmem_grpo.models import attention
from lowmem_grpo.models.card_check import check_dtype, has_amx
from lowmem_grpo.models.delta_net import use_delta_nets
from lowmem_grpo.models.packed_attention import FirstKeys, PackedLayout
from lowmem_grpo.models.routes import RouteRecorder, follow_routes, replay_of
from lowmem_grpo.models.trained_set import TrainedSet
from lowmem_grpo.models.vision import ImageInputs, store_of, whole_of
from lowmem_grpo.types import ImageToken, MicroBatch

if TYPE_CHECKING:
    from lowmem_grpo.models.trained_embedding import TrainedRows

LOGIT_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # the first that a config has is used
ADAPTED = (BaseTunerLayer, AuxiliaryTrainingWrapper)  # the modules that PEFT wraps
HEAD_ROWS = 4096  # rows of the head in memory at a time in `logits_of`
KNOWN = f"Take a model of a family that can be packed: {trained()}"


@dataclass(frozen=True, eq=False)
class Head:
    """A linear layer (V, D) on the last hidden states, frozen or trained, and the scale and soft cap that the model's
    config applies to its logits. A head that gives a number has V = 1."""

    linear: nn.Linear  # or PEFT's wrapper of one that it trains
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_linear(self.linear)

    @property
    def weight(self) -> Tensor:
        """The weight (V, D) of the active adapter, if it trains one, or of the base, with the trained rows in it."""
        return self.linear.weight

    @property
    def rows(self) -> "TrainedRows | None":
        """The rows that are trained now; their gradients do not come through `weight`."""
        return getattr(getattr(self.linear, "token_adapter", None), "rows", None)

    @property
    def is_trained(self) -> bool:
        return self.weight.requires_grad or self.rows is not None

    @property
    def bias(self) -> Tensor | None:  # (V,)
        base: Any = self.linear.original_module if hasattr(self.linear, "token_adapter") else self.linear
        bias: Tensor | None = base.bias
        return bias

    def frozen_copy(self) -> "Head":
        """Return a head with a copy of the weight and bias that this one has now."""
        linear = nn.Linear(1, 1, bias=self.bias is not None, device="meta")
        for name, _ in list(linear.named_parameters()):
            setattr(linear, name, nn.Parameter(getattr(self, name).detach().clone(), requires_grad=False))
        return replace(self, linear=linear)

    def scores(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0, entropy_grad: bool = False,
               chunk_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `Policy.at_head` returns; `chunk_rows` rows of logits are in memory at a time."""
        logprobs, entropy, best = linear_logprobs(
            hidden, self.weight, targets, bias=self.bias, temperature=temperature, logit_scale=self.logit_scale,
            softcap=self.softcap, return_entropy=True, entropy_grad=entropy_grad, chunk_rows=chunk_rows,
            return_best=True)
        if (rows := self.rows) is not None and torch.is_grad_enabled():
            with torch.no_grad():
                logits = self.logits_of(hidden, torch.arange(len(targets), device=targets.device), targets)
            shape = LogitShape(temperature, self.logit_scale, self.softcap)
            logprobs, entropy = rows.with_gradients(hidden, targets, self.bias, shape, logits, logprobs, entropy,
                                                    entropy_grad)
        return logprobs, entropy, best

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits (N, V) for hidden states (N, D), without a gradient."""
        weight, bias = self.weight, self.bias
        with large_products():
            rows = matmul_fp32(hidden.to(weight.dtype), weight.T)
        if bias is None and self.logit_scale == 1.0 and not self.softcap:
            return rows
        return LogitShape(scale=self.logit_scale, softcap=self.softcap).apply_(rows, bias)

    def logits_of(self, hidden: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits (E,) of `tokens` (E,) at rows `places` (E,) of `hidden` (N, D); recomputed in backward."""
        blocks = zip(places.split(HEAD_ROWS), tokens.split(HEAD_ROWS), strict=True)
        return torch.cat([checkpoint(self.block_logits, hidden, *block, use_reentrant=False, preserve_rng_state=False)
                          for block in blocks])

    def block_logits(self, hidden: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        wide, weights, rows = torch.promote_types(hidden.dtype, torch.float32), self.weight[tokens], self.rows
        weights = weights if rows is None or not torch.is_grad_enabled() else rows.put(weights, tokens)
        logits = (hidden[places].to(wide) * weights.to(wide)).sum(-1)
        if (bias := self.bias) is not None:
            logits = logits + bias[tokens]
        logits = logits * self.logit_scale
        return logits if not self.softcap else torch.tanh(logits / self.softcap) * self.softcap


def check_linear(head: Any) -> None:
    """Raise ValueError unless an output head is a plain torch.nn.Linear, or PEFT's wrapper of one that it trains."""
    kind = type(getattr(head, "original_module", head))
    if kind is not nn.Linear:
        raise ValueError(f"the output head is a {kind.__name__}; a plain torch.nn.Linear is needed, frozen or trained. "
                         "Leave lm_head out of LoRA and of quantization")


def logit_shape(config: Any) -> dict[str, Any]:
    """Return the `logit_scale` and `softcap` that a model's config applies to its logits."""
    config = config.get_text_config()
    scale = next((value for name in LOGIT_SCALES if (value := getattr(config, name, None)) is not None), None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if config.model_type in MULTIPLIED else 1 / scaling
    return {"logit_scale": 1.0 if scale is None else scale,
            "softcap": getattr(config, "final_logit_softcapping", None)}


class TextInputs:
    """Makes the inputs of a backbone that reads text. A model of images takes another class with these methods:
    `models.vision.ImageInputs`."""

    never: Tensor | None = None  # tokens (n,) that may not be sampled

    def of_batch(self, batch: MicroBatch) -> dict[str, Any]:
        return self.of_rows(batch.input_ids[None], batch.offsets[None], [[*batch.images.values()]])

    def of_rows(self, ids: Tensor, offsets: Tensor, prompts: Sequence[list[int]] = ()) -> dict[str, Any]:
        """Return the backbone's arguments for tokens (B, Q): parts of whole `prompts`, or sampled ones without any."""
        if any(ImageToken in map(type, prompt) for prompt in prompts):
            raise ValueError("a prompt has images, and the model reads text only; leave the images out")
        return {"input_ids": ids, "position_ids": offsets}

    def prepare(self, prompts: Sequence[list[int]]) -> None:
        """Compute what a call's prompts need beforehand."""

    def shifts(self, prompts: Sequence[list[int]], device: torch.device) -> Tensor | None:
        """Return what is added to the index of a token after each prompt to get its position, (B,); None: nothing."""
        return None


@dataclass(eq=False)
class HeldMode:
    """The modes of a model's modules before a context changed them, and the number of contexts that rely on it."""

    modes: list[tuple[nn.Module, bool]]
    users: int = 0


MODES = Lock()
HELD: WeakKeyDictionary[nn.Module, list[HeldMode]] = WeakKeyDictionary()


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model in train or evaluation mode within this context, and restore each module's mode afterwards: modes
    may differ between modules, as in a model that PEFT has just put LoRA on. If several threads are in contexts of the
    same mode, the last one to leave restores."""
    with MODES:
        held, modes = HELD.setdefault(model, []), [(module, module.training) for module in model.modules()]
        differ = any(before != training for _, before in modes)
        if not held or differ:
            held.append(HeldMode(modes))
        if differ:
            model.train(training)
        mine = held[-1]
        mine.users += 1
    try:
        yield
    finally:
        with MODES:
            mine.users -= 1
            if not mine.users:
                held.remove(mine)
                for module, before in mine.modes:
                    if module.training != before:
                        module.training = before


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the model is in evaluation mode; see `in_mode`."""
    return in_mode(model, False)


class Policy:
    """A causal language model (under PEFT, or bare) that computes on packed micro-batches. `autocast_dtype` is the
    dtype of mixed precision; None computes in the model's own dtype. Mixed precision is torch's autocast, but bfloat16
    on a CPU with AMX means products that round their factors. `logits_chunk` is the number of tokens whose logits are
    in memory at a time; None chooses it by the device's memory. `head` replaces the model's own head."""

    def __init__(self, model: PeftModel | PreTrainedModel, autocast_dtype: torch.dtype | None = None,
                 logits_chunk: int | None = None, head: Head | None = None) -> None:
        self.model = model
        self.logits_chunk = logits_chunk
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self.base, row = base, family_of(base.config)
        # every model sets this flag (a test fails if it goes away); families in our table use the registry in any case
        if row is None and not getattr(base, "_supports_attention_backend", False):
            raise ValueError(f"{type(base).__name__} does not take its attention from transformers' registry, so "
                             f"packed sequences would see each other. {KNOWN}")
        embedding = base.get_input_embeddings()
        self.dtype: torch.dtype = getattr(embedding, "original_module", embedding).weight.dtype
        check_dtype(base.config, self.dtype, autocast_dtype)
        use_delta_nets(base)
        text, whole = base.config.get_text_config(), whole_of(base)
        if text._attn_implementation != attention.NAME:
            base.set_attn_implementation(attention.NAME if whole is None else {"text_config": attention.NAME})
        self.backbone = getattr(base, base.base_model_prefix) if whole is None else whole.language_model
        self.head = head or Head(base.get_output_embeddings(), **logit_shape(base.config))
        self.inputs: TextInputs | ImageInputs = TextInputs() if whole is None else ImageInputs(whole, store_of(base))
        self.autocast_dtype = autocast_dtype
        self.head_groups = 1  # parts in which attention's backward pass takes the heads; a memory plan may set more
        self.keeps_factors = True  # whether the micro-batches of a step share adapters in the dtype of the products
        self.dropped: bool | None = None  # whether the last checkpointed pass had dropout
        self.lends_keys = row is not None and row.unlike_layers  # whether layers share keys and values
        self.host_embeddings = on_host(base)
        self.device: torch.device = next(weight.device for weight in self.backbone.parameters() if not any(
            weight is table.weight for table in self.host_embeddings))
        self.rounds = autocast_dtype == torch.bfloat16 and self.device.type == "cpu" and has_amx()
        self.routed_places = follow_routes(base)  # indices of the layers with experts, which take routes
        self.reference_adapter: dict[str, Tensor] | None = None  # on the host; see `keep_reference`
        self.teacher_adapter: dict[str, Tensor] | None = None  # on the host, of a teacher that follows the policy
        self.route_counts: Tensor | None = None  # (2,) recorded routes that the live router would not choose, and all

    @property
    def trained(self) -> TrainedSet:
        return TrainedSet.of(self.model)

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def routed_layers(self) -> int:
        return len(self.routed_places)

    @property
    def drops(self) -> bool:
        """True if training uses dropout, in LoRA or in the model itself."""
        return drops(self.base)

    def follow_dropout(self) -> None:
        """Before a pass, let checkpointed layers save random states if there is dropout, and else stop saving them."""
        if getattr(self.base, "is_gradient_checkpointing", False) and self.drops != self.dropped:
            kept = len(kept_layers(self.base))
            enable_checkpointing(self.base, True)
            keep_last(self.base, kept)
            self.dropped = self.drops

    def rounding(self) -> AbstractContextManager[None]:
        """Return the context of products that round their factors, for all passes, backward too; a null context if they
        do not."""
        return rounding(self.rounds)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of mixed precision, or a null context without it."""
        if self.autocast_dtype is None or self.rounds:
            return self.rounding()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the backbone's last hidden states (T, D) for a packed batch."""
        self.follow_dropout()
        layout = PackedLayout.from_batch(batch, self.head_groups)
        replay = replay_of(batch, self.base.config, self.routed_layers) if self.routed_layers else None
        known_ids = knowing(self.host_embeddings, batch.host_ids) if self.host_embeddings else nullcontext()
        unused_mask = batch.input_ids.new_empty(1, 1, 1, 1)  # 4-D, so that transformers builds no (T, T) mask
        with self.autocast(), known_ids:
            out = self.backbone(
                **self.inputs.of_batch(batch), attention_mask=unused_mask, use_cache=False, packed=layout,
                **({"shared_kv_states": FirstKeys()} if self.lends_keys else {}),
                **({} if replay is None else {"routes": replay}),
            )
        self.check_packed(layout.calls)
        if replay is not None:
            counts = replay.counts()
            self.route_counts = counts if self.route_counts is None else self.route_counts + counts
        return out.last_hidden_state[0]

    def differing_routes(self) -> dict[str, float]:
        """Return a metric: of the expert choices replayed since the last call, the share that the live router would not
        have made. Return {} if none were replayed."""
        counts, self.route_counts = self.route_counts, None
        if counts is None:
            return {}
        differing, total = counts.tolist()
        return {"sampling/routes/differing": differing / max(total, 1)}

    def recorder(self) -> RouteRecorder | None:
        """Return a recorder for the routes of one pass; None for a model without routed experts."""
        return RouteRecorder(self.base.config.get_text_config().num_experts) if self.routed_layers else None

    def check_packed(self, calls: int) -> None:
        """Raise ValueError if some layers bypassed our attention, which would mix packed sequences."""
        layers = self.base.config.get_text_config().num_hidden_layers
        if calls != layers:
            raise ValueError(
                f"{type(self.base).__name__} computes attention through transformers' attention registry in {calls} of "
                f"its {layers} layers; in the others, packed sequences would see each other. {KNOWN}"
            )

    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Return logprobs (N,) and entropy (N,) of the trained tokens; the entropy has no gradient."""
        with self.rounding():
            return self.at_head(*self.at_trained(batch), temperature)[:2]

    def at_trained(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (hidden states (N, D) in the head's dtype, targets (N,)) of the batch's trained tokens."""
        return batch.at_trained(self.hidden(batch)).to(self.head.weight.dtype), batch.at_trained(batch.targets)

    def at_head(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0,
                entropy_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logprobs (N,), entropy (N,), log p (N,) of each row's likeliest token) for hidden states (N, D) and
        targets (N,). The entropy has a gradient only with `entropy_grad`, the third result has none."""
        return self.head.scores(hidden, targets, temperature, entropy_grad, self.logits_chunk)

    def eos_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return all end-of-sequence ids of the tokenizer and the model's generation config."""
        return end_ids(getattr(self.base, "generation_config", None), tokenizer)

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Disable the adapter within this context: the base model, without a second copy of it."""
        wrapped = [module for module in self.model.modules() if isinstance(module, ADAPTED)]
        live = [module for module in wrapped if not module.disable_adapters]
        try:  # PEFT's own `disable_adapter` looks at every parameter first, which takes as long as a layer's pass
            for module in live:
                module.enable_adapters(False)
            yield
        finally:
            for module in live:
                module.enable_adapters(True)

    def is_trained(self) -> bool:
        """Return whether the adapter has been trained: in a fresh one all `lora_B` factors are 0."""
        return any(not torch.equal(weight.parameter, weight.without_effect) for weight in self.trained)

    def keep_reference(self, moves: bool = False) -> None:
        """Copy the current adapter to the host as the reference. If the adapter is untrained and the reference never
        `moves`, the base model is the reference and nothing is copied."""
        own = self.trained.values() if moves or self.is_trained() else {}
        self.reference_adapter = {name: in_float32(value) if moves else value.to("cpu", copy=True)
                                  for name, value in own.items()}

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """Set each weight of the reference adapter to share * policy + (1 - share) * reference. If the reference is the
        base model, its adapter starts as one without effect."""
        self.reference_adapter = self.reference_adapter or {
            weight.name: in_float32(weight.without_effect) for weight in self.trained}
        self.move(self.reference_adapter, share)

    @property
    def kept_adapters(self) -> dict[str, dict[str, Tensor]]:
        """The adapters kept on the host beside the trained one, by name."""
        named = {"reference": self.reference_adapter, "teacher": self.teacher_adapter}
        return {name: adapter for name, adapter in named.items() if adapter}

    @torch.no_grad()
    def move(self, adapter: dict[str, Tensor], share: float) -> None:
        """Set each weight of `adapter`, on the host, to share * policy + (1 - share) * adapter."""
        own = self.trained.values()
        for name, kept in adapter.items():
            kept.mul_(1 - share).add_(own[name].cpu(), alpha=share)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Turn the model into the reference in this context: with the kept adapter, or without any, and without
        dropout."""
        with self.wearing(self.reference_adapter) if self.reference_adapter else self.base_model(), \
                evaluating(self.model):
            yield

    @contextmanager
    def wearing(self, adapter: dict[str, Tensor]) -> Iterator[None]:
        """Compute with these values of the trained parameters in this context, in evaluation mode."""
        own = dict(self.model.named_parameters())
        live = {name: own[name].data for name in adapter}
        try:
            for name, kept in adapter.items():
                own[name].data = kept.to(live[name])
            with evaluating(self.model):
                yield
        finally:  # restores the same memory: optimizers and engines hold its addresses
            for name, data in live.items():
                own[name].data = data
            for table in (self.base.get_input_embeddings(), self.head.linear):
                if (layer := getattr(table, "token_adapter", None)) is not None:
                    layer.get_merged_weights(layer.active_adapters)  # the trained rows lie in the base's matrix


def in_float32(value: Tensor) -> Tensor:
    """Return a copy on the host for an average, which in 16 bits would stay where it is."""
    return value.to("cpu", torch.promote_types(value.dtype, torch.float32), copy=True)


def end_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return all end-of-sequence ids of a generation config and a tokenizer, either of which may be None."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return sorted({token for token in [*ids, getattr(tokenizer, "eos_token_id", None)] if token is not None})
