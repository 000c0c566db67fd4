"""The trained model as the loop sees it: hidden states of a micro-batch, log-probabilities, adapter on or off."""

from collections import UserDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem_grpo.kernels import linear_logprobs
from lowmem_grpo.kernels.logits import LogitShape
from lowmem_grpo.kernels.matmul import matmul_fp32
from lowmem_grpo.memory.families import MULTIPLIED, family_of, trained
from lowmem_grpo.memory.offload.activations import drops, enable_checkpointing
from lowmem_grpo.memory.offload.embedding import knowing, on_host
from lowmem_grpo.models import attention
from lowmem_grpo.models.card_check import check_dtype
from lowmem_grpo.models.delta_net import use_delta_nets
from lowmem_grpo.models.packed_attention import PackedLayout
from lowmem_grpo.models.routes import Replay, RouteRecorder, follow_routes
from lowmem_grpo.types import MicroBatch

LOGIT_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # we take the first that a config has
HEAD_ROWS = 4096  # that are in memory at a time for single logits
KNOWN = f"Take a model of a family that can be packed: {trained()}"


class FirstKeys(UserDict):
    """Keys and values that layers lend to later ones, those of the forward pass only. A layer that is recomputed for
    backward makes them again; to hold these as well would keep most of what it recomputed on the device."""

    def __setitem__(self, kind: str, keys_and_values: Any) -> None:
        if kind not in self:
            super().__setitem__(kind, keys_and_values)


@dataclass(frozen=True)
class OutputHead:
    """The frozen output head, and what the model's config does to its logits."""

    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    logit_scale: float
    softcap: float | None

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "OutputHead":
        """Return a model's head; ValueError unless it is a plain linear layer."""
        linear = model.get_output_embeddings()
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"the output head is a {type(linear).__name__}; a plain, frozen torch.nn.Linear is needed. "
                "Leave lm_head out of target_modules and modules_to_save, and out of quantization"
            )
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(linear.weight.detach(), bias, **logit_shape(model.config))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits (N, V) after hidden states (N, D)."""
        rows = matmul_fp32(hidden.to(self.weight.dtype), self.weight.T)
        return LogitShape(scale=self.logit_scale, softcap=self.softcap).apply_(rows, self.bias)

    def logits_of(self, hidden: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """The logits (E,) of some tokens at some places of `hidden` (N, D), a block at a time, made again for
        backward."""
        blocks = zip(places.split(HEAD_ROWS), tokens.split(HEAD_ROWS), strict=True)
        return torch.cat([checkpoint(self.block_logits, hidden, *block, use_reentrant=False, preserve_rng_state=False)
                          for block in blocks])

    def block_logits(self, hidden: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """Return the same of one block, in float32 at least."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = (hidden[places].to(wide) * self.weight[tokens].to(wide)).sum(-1)
        if self.bias is not None:
            logits = logits + self.bias[tokens]
        logits = logits * self.logit_scale
        return logits if not self.softcap else torch.tanh(logits / self.softcap) * self.softcap


def logit_shape(config: Any) -> dict[str, Any]:
    """Return what a model's config does to its logits: `logit_scale` and `softcap`."""
    config = config.get_text_config()
    scale = next((value for name in LOGIT_SCALES if (value := getattr(config, name, None)) is not None), None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if config.model_type in MULTIPLIED else 1 / scaling
    return {"logit_scale": 1.0 if scale is None else scale,
            "softcap": getattr(config, "final_logit_softcapping", None)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; its mode comes back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def mixed_dtype(model: Any, bf16: bool | None, fp16: bool | None) -> torch.dtype | None:
    """The dtype of mixed precision; None if the user asks for none, or the model already has it."""
    own: torch.dtype = model.get_input_embeddings().weight.dtype
    wanted = torch.bfloat16 if bf16 else torch.float16 if fp16 else own
    if wanted == own:
        return None
    if own != torch.float32:
        raise ValueError(f"the model was loaded in {own}, and GRPOConfig asks for {wanted}; make them agree")
    return wanted


class Policy:
    """A causal language model with a frozen head (under PEFT, or bare), computing on packed micro-batches.

    `autocast_dtype` is the dtype of mixed precision; None computes in the model's own dtype. `logits_chunk` is the
    number of tokens whose logits exist at a time; None chooses it by the device's memory.
    """

    def __init__(self, model: PeftModel | PreTrainedModel, autocast_dtype: torch.dtype | None = None,
                 logits_chunk: int | None = None) -> None:
        self.model = model
        self.logits_chunk = logits_chunk
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self.base = base
        if not attention.uses_registry(base):
            raise ValueError(f"{type(base).__name__} does not take its attention from transformers' registry, so "
                             f"packed sequences would see each other. {KNOWN}")
        check_dtype(base.config, base.get_input_embeddings().weight.dtype, autocast_dtype)
        use_delta_nets(base)
        if base.config.get_text_config()._attn_implementation != attention.NAME:
            base.set_attn_implementation(attention.NAME)
        self.backbone = getattr(base, base.base_model_prefix)
        self.head = OutputHead.from_model(base)
        self.autocast_dtype = autocast_dtype
        self.head_groups = 1  # parts in which attention's backward pass takes the heads; a memory plan may want more
        self.dropped: bool | None = None  # whether the last checkpointed pass had dropout
        row = family_of(base.config)
        self.lends_keys = row is not None and row.unlike_layers  # whether layers lend each other keys and values
        self.host_embeddings = on_host(base)
        self.routed_places = follow_routes(base)  # the layers that have experts, and take routes
        self.reference_adapter: dict[str, Tensor] | None = None  # on the host; see `keep_reference`
        self.route_counts: Tensor | None = None  # (2,) recorded routes that the live router would not take, and all

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def routed_layers(self) -> int:
        return len(self.routed_places)

    @property
    def drops(self) -> bool:
        """Whether training has dropout, of LoRA or of the model itself."""
        return drops(self.base)

    def follow_dropout(self) -> None:
        """Checkpointed layers must keep random states while there is dropout, which may change at any time."""
        if getattr(self.base, "is_gradient_checkpointing", False) and self.drops != self.dropped:
            enable_checkpointing(self.base, True)
            self.dropped = self.drops

    def autocast(self) -> AbstractContextManager:
        """Return the context of mixed precision; one that does nothing without it."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """The backbone's last hidden states (T, D) of a packed batch."""
        self.follow_dropout()
        layout, replay = PackedLayout.from_batch(batch, self.head_groups), self.replay_of(batch)
        unused_mask = batch.input_ids.new_empty(1, 1, 1, 1)  # 4-D, so that transformers builds no (T, T) mask
        with self.autocast(), self.known_ids(batch):
            out = self.backbone(
                input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], attention_mask=unused_mask,
                use_cache=False, packed=layout, **({"shared_kv_states": FirstKeys()} if self.lends_keys else {}),
                **({} if replay is None else {"routes": replay}),
            )
        self.check_packed(layout.calls)
        if replay is not None:
            counts = replay.counts()
            self.route_counts = counts if self.route_counts is None else self.route_counts + counts
        return out.last_hidden_state[0]

    def known_ids(self, batch: MicroBatch) -> AbstractContextManager:
        """Return the context in which embeddings on the host know the ids of a pass."""
        return knowing(self.host_embeddings, batch.host_ids) if self.host_embeddings else nullcontext()

    def replay_of(self, batch: MicroBatch) -> Replay | None:
        """Return the routes of a micro-batch for one pass of a mixture; None where all are routed live."""
        if not self.routed_layers or batch.routes is None:
            return None
        config = self.base.config.get_text_config()
        got, needed = tuple(batch.routes.shape[1:]), (self.routed_layers, config.num_experts_per_tok)
        if got != needed:
            raise ValueError(f"rollouts have routes of (layers, experts) {got}, and this model needs {needed}: they "
                             "are another model's. Sample anew, or set the rollouts' `routes` to None")
        return Replay(batch.routes, batch.routed)

    def differing_routes(self) -> dict[str, float]:
        """The share of the replayed routes since the last call that the live router would not have taken, as a metric;
        nothing where none were replayed."""
        counts, self.route_counts = self.route_counts, None
        if counts is None:
            return {}
        differing, total = counts.tolist()
        return {"sampling/routes/differing": differing / max(total, 1)}

    def recorder(self) -> RouteRecorder | None:
        """Return the recorder of the routes of one pass; None for a model without experts that take them."""
        return RouteRecorder(self.base.config.get_text_config().num_experts) if self.routed_layers else None

    def check_packed(self, calls: int) -> None:
        """Raise ValueError if some layers have another kind of attention, which would mix packed sequences."""
        layers = self.base.config.get_text_config().num_hidden_layers
        if calls != layers:
            raise ValueError(
                f"{type(self.base).__name__} computes attention through transformers' attention registry in {calls} of "
                f"its {layers} layers; in the others, packed sequences would see each other. {KNOWN}"
            )

    def logprobs(self, batch: MicroBatch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs (N,), entropy (N,)) of the batch's N completion tokens; the entropy has a gradient on demand."""
        return self.at_head(*self.at_trained(batch), temperature, entropy_grad)[:2]

    def at_trained(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(hidden states (N, D) in the head's dtype, targets (N,)) of the batch's trained tokens."""
        return batch.at_trained(self.hidden(batch)).to(self.head.weight.dtype), batch.at_trained(batch.targets)

    def at_head(self, hidden: Tensor, targets: Tensor, temperature: float = 1.0,
                entropy_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(logprobs (N,), entropy (N,)) of targets (N,) where the head is given hidden states (N, D), and the log p of
        each row's likeliest token (N,), without gradient."""
        head = self.head
        result = linear_logprobs(
            hidden, head.weight, targets, bias=head.bias, temperature=temperature, logit_scale=head.logit_scale,
            softcap=head.softcap, return_entropy=True, entropy_grad=entropy_grad, chunk_rows=self.logits_chunk,
            return_best=True,
        )
        return result[0], result[1], result[2]

    def several_logprobs(self, batch: MicroBatch, places: Tensor, tokens: Tensor) -> Tensor:
        """log p (E,) of `tokens` (E,) int64 at `places` (E,) int64, indices into the N trained tokens of a batch:

            log p(k) = log p(0) + z(k) - z(0)        0: the target of the place, whose logits are never made; z: logits

        in one pass through the backbone, and one row of the head for each token. Gradients reach the hidden states.
        """
        hidden, targets = self.at_trained(batch)
        everywhere = torch.arange(len(targets), device=targets.device)
        base = self.at_head(hidden, targets)[0] - self.head.logits_of(hidden, everywhere, targets)
        return base[places] + self.head.logits_of(hidden, places, tokens)

    def eos_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Every end-of-sequence id that the tokenizer or the model's generation config names."""
        return end_ids(getattr(self.base, "generation_config", None), tokenizer)

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Inside, the adapter is off: the base model, without a second one."""
        with self.model.disable_adapter() if isinstance(self.model, PeftModel) else nullcontext():
            yield

    def is_trained(self) -> bool:
        """Return whether the adapter has been trained before: in a fresh one the second factors are 0."""
        return any(bool(factor.any()) for name, factor in self.model.named_parameters() if "lora_B" in name)

    def live_adapter(self) -> dict[str, Tensor]:
        """Return the adapter's parameters as they are, by name, without gradient."""
        return {name: factor.detach() for name, factor in self.model.named_parameters() if factor.requires_grad}

    def keep_reference(self, moves: bool = False) -> None:
        """Make the adapter as it is now the reference; the base model alone, where the adapter adds nothing yet and the
        reference does not move."""
        own = self.live_adapter() if moves or self.is_trained() else {}
        self.reference_adapter = {name: factor.to("cpu", copy=True) for name, factor in own.items()}

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """Make each number of the reference's adapter share * policy + (1 - share) * reference. Where the reference is
        the base model, its adapter is the policy's with second factors of 0."""
        own = {name: factor.cpu() for name, factor in self.live_adapter().items()}
        base = {name: torch.zeros_like(factor) if "lora_B" in name else factor.clone() for name, factor in own.items()}
        self.reference_adapter = self.reference_adapter or base
        for name, kept in self.reference_adapter.items():
            kept.mul_(1 - share).add_(own[name], alpha=share)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model is what the KL term compares with: with the adapter that was kept, without its dropout, or
        with none."""
        if not self.reference_adapter:
            with self.base_model():
                yield
            return
        own = dict(self.model.named_parameters())
        live = {name: own[name].data for name in self.reference_adapter}
        try:
            for name, kept in self.reference_adapter.items():
                own[name].data = kept.to(self.device)
            with evaluating(self.model):
                yield
        finally:  # the same memory as before: optimizers and engines know its addresses
            for name, data in live.items():
                own[name].data = data


def end_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return every end-of-sequence id that a generation config or a tokenizer names; each may be None."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return sorted({token for token in [*ids, getattr(tokenizer, "eos_token_id", None)] if token is not None})
