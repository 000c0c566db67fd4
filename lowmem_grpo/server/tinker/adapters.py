"""`Adapters`: several LoRA models on one base, each a PEFT adapter with its own gradients and moments. Only the active
adapter's parameters have `requires_grad`, so that no call changes the gradients of another model."""

import itertools
import json
import math
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.losses.objective import Objective
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.memory.oom import BatchLimit
from lowmem_grpo.models.lora_layers import use_kernel_layers
from lowmem_grpo.models.lora_targets import Scope
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.trained_embedding import is_tied, prepare_embeddings
from lowmem_grpo.models.trained_set import TrainedSet
from lowmem_grpo.runs.files import CARD, flush, move, remove, removed_after
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.server.requests import Body
from lowmem_grpo.server.tinker.datum import Pass
from lowmem_grpo.server.tinker.token_objective import TokenObjective
from lowmem_grpo.trainer.embedding_optimizer import EmbeddingOptimizer
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.nonfinite import Flags, Guard
from lowmem_grpo.types import Rollout, RolloutGroup

ALPHA = 32  # as in the protocol's own service, for every rank, so that its programs' learning rates fit
MOST_RANK = 512
MOST_SEQUENCES = 1_000_000  # of a micro-batch, which only tokens bound
MOST_NOTES = 65536  # bytes of the metadata of a model, or of saved weights
AnySeed = BeforeValidator(lambda seed: secrets.randbits(31) if seed is None else seed)
Seed = Annotated[int, Field(ge=0, lt=2**31), AnySeed]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Moderate = Annotated[float, Field(ge=0, le=1e4)]  # above, a product or a weight overflows float32
# A client's notes on a model, or on its saved weights; the client reads texts
Metadata = Annotated[dict[str, str] | None, BeforeValidator(lambda notes: {
    key: note if isinstance(note, str) else json.dumps(note) for key, note in notes.items()
} if isinstance(notes, dict) else notes)]


FROZEN_HEAD = ("train_unembed is on by default, and this server trains no output head: LoRA goes on attention and MLP "
               "only. Pass train_unembed=False to say so yourself, or start it with `lowmem-grpo serve "
               "--train-unembed N`.")
WHOLE_HEAD = ("train_unembed is on by default: this server trains the whole output head, not LoRA on it. Pass "
              "train_unembed=False to train LoRA alone.")


class LoraSettings(Body, extra="forbid", populate_by_name=True):
    """The LoRA settings that a client requests. With `unembed`, the output head is trained too, whole."""

    rank: Annotated[int, Field(ge=1, le=MOST_RANK)]
    seed: Seed = Field(None, validate_default=True)
    attention: bool = Field(True, alias="train_attn")
    mlp: bool = Field(True, alias="train_mlp")
    unembed: bool = Field(False, alias="train_unembed")
    user_metadata: Metadata = None

    def with_metadata(self, metadata: Metadata) -> Self:
        """Return a copy with a client's notes. ValueError if they are too long: lists return those of all models."""
        copy = self.model_copy(update={"user_metadata": metadata})
        if copy.notes_size > MOST_NOTES:
            raise ValueError(f"user_metadata has {copy.notes_size:,} bytes; at most {MOST_NOTES:,} are kept")
        return copy

    @property
    def parts(self) -> dict[str, bool]:
        """What is trained, under the protocol's names."""
        return {"train_unembed": self.unembed, "train_mlp": self.mlp, "train_attn": self.attention}

    @property
    def notes_size(self) -> int:
        return 0 if self.user_metadata is None else len(json.dumps(self.user_metadata).encode())

    @model_validator(mode="after")
    def check_trained(self) -> Self:
        if not (self.attention or self.mlp):
            raise ValueError("has train_attn and train_mlp both false, which leaves no LoRA, and the output head is "
                             "trained beside it only; set one of them")
        return self


class Adam(Body, extra="forbid"):
    """Adam's settings for one optimizer step, under the protocol's names."""

    learning_rate: Moderate = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Moderate = 1e-12
    weight_decay: Moderate = 0.0
    grad_clip_norm: NotNegative = 0.0  # 0 does not clip
    type: Any = None  # ignored


class DroppedError(ValueError):
    """An optimizer step was not made, and the gradient was dropped."""


class ClientGuard(Guard):
    """Refuses a pass or an optimizer step with NaN or infinity in the gradient at once, by an error."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(1, TrainerState())
        self.parameters = [*parameters]

    def passed(self, groups: list[RolloutGroup], flags: Flags) -> bool:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and not bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all()):
            raise ValueError("the gradient is NaN or infinite, and was dropped: advantages or weights are too large, "
                             "or logprobs are not those of the targets")
        return False

    def judge(self, parameters: list[str], handled: bool = False) -> dict[str, float]:
        if parameters:
            raise DroppedError("the norm of the gradient is not finite, and the gradient was dropped: advantages or "
                               "weights are too large; call forward_backward with smaller ones")
        return {}


@dataclass
class ClientModel:
    adapter: str  # the adapter's name in PEFT
    parameters: dict[str, nn.Parameter]  # by their names in a file
    learner: Learner
    head: bool = False  # whether its output head is trained

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.learner.optimizer


class Adapters:
    """Trains models by their ids. Not thread-safe. KeyError for an id that was not created."""

    def __init__(self, policy: Policy, bound: BatchLimit, tokens: int | None = None, offload: bool = False,
                 heads: int = 0) -> None:
        """`policy` holds a PEFT model. The adapter that this model already has is never trained here. A micro-batch has
        at most `tokens` tokens. At most `heads` models whose output head is trained are held; 0 refuses them."""
        if not isinstance(policy.model, PeftModel):
            raise TypeError(f"the model is a {type(policy.model).__name__}; several adapters need a PEFT model")
        if heads and is_tied(policy.base):
            raise ValueError("--train-unembed: the model ties its output head to its embedding, which would be trained "
                             "too; serve a model with a head of its own, or leave it out")
        self.policy, self.bound, self.tokens, self.heads = policy, bound, tokens, heads
        self.model: Any = policy.model
        self.own: str = self.model.active_adapter
        self.layers = [path for path, layer in policy.base.named_modules() if isinstance(layer, BaseTunerLayer)]
        self.offload = ActivationOffload(policy.model) if offload else None  # its host pages serve all models
        self.held: dict[str, ClientModel] = {}
        self.numbers = itertools.count()
        self.rest()

    def create(self, model_id: str, settings: LoraSettings) -> None:
        """Create a model: A is drawn from the seed, B is zero. It replaces any model that has the same id; and, if too
        many trained heads were held, the least recently used model that has one."""
        self.delete(model_id)
        if settings.unembed and not self.heads:
            raise ValueError("train_unembed is True of this model, and the server trains no output heads: it has to be "
                             "started with --train-unembed N")
        others = [model for model, each in self.held.items() if each.head and settings.unembed]
        for model in others[: len(others) + 1 - self.heads]:
            self.delete(model)
        name = f"client{next(self.numbers)}"  # an id may have dots, which no module's name can
        scope = Scope(finetune_attention_modules=settings.attention, finetune_mlp_modules=settings.mlp)
        chosen = [path for path in self.layers if scope.takes(path)]
        if not chosen:
            raise ValueError("train_attn is False, and of a mixture of experts only attention is trained; leave it out")
        head = next(path for path, module in self.policy.base.named_modules()
                    if module is self.policy.base.get_output_embeddings())
        config = LoraConfig(r=settings.rank, lora_alpha=ALPHA, task_type="CAUSAL_LM", target_modules=chosen,
                            modules_to_save=[head] if settings.unembed else None)
        use_kernel_layers(config, self.policy.base)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            self.model.add_adapter(name, config)
        prepare_embeddings(self.model)
        self.policy.head = replace(self.policy.head, linear=self.policy.base.get_output_embeddings())
        self.model.set_adapter(name)
        parameters = {weight.saved_name: weight.parameter for weight in self.policy.trained}
        optimizer = make_optimizer(self.policy.trained, settings.seed)
        learner = self.learner_of(parameters.values(), optimizer)
        self.held[model_id] = ClientModel(name, parameters, learner, settings.unembed)
        self.rest()

    def learner_of(self, parameters: Collection[nn.Parameter], optimizer: torch.optim.Optimizer) -> Learner:
        settings = TrainSettings(max_tokens_per_micro_batch=self.tokens, per_device_train_batch_size=MOST_SEQUENCES)
        numbered = {str(number): parameter for number, parameter in enumerate(parameters)}  # one norm for all of them
        return Learner(self.policy, settings, Objective(), optimizer, parameters=numbered,
                       offload=self.offload, bound=self.bound, guard=ClientGuard(parameters), undoes_steps=False)

    def delete(self, model_id: str) -> None:
        if (held := self.held.pop(model_id, None)) is not None:
            self.model.delete_adapter(held.adapter)
            self.rest()

    def rest(self) -> None:
        """Activate the PEFT model's own adapter, with no parameter trainable."""
        self.model.set_adapter(self.own)
        for parameter in self.policy.trainable:
            parameter.requires_grad_(False)

    @contextmanager
    def active(self, model_id: str) -> Iterator[ClientModel]:
        """Activate this model inside the block: only its parameters get gradients."""
        held = self.held[model_id]
        self.model.set_adapter(held.adapter)
        try:
            yield held
        finally:
            self.rest()

    def run(self, model_id: str, asked: Pass) -> tuple[list[Tensor], dict[str, float]]:
        """Return the log-probabilities, (T,) or (T, K), of each datum's targets, and metrics. Unless
        `asked.forward_only`, add the gradient of the loss, summed over tokens; ValueError, without adding it, if a
        log-probability or the gradient is not finite."""
        groups = [group_of([*datum.ids, int(datum.targets[-1])]) for datum in asked.data]
        objective = TokenObjective(asked, groups)
        with self.active(model_id) as held, torch.set_grad_enabled(not asked.forward_only):
            held.learner.objective = objective
            metrics = held.learner.forward_backward(groups)
        told = {"loss:sum": metrics["loss:sum"], "num_tokens:sum": sum(len(datum.ids) for datum in asked.data)}
        return [objective.logprobs[id(group.rollouts[0])] for group in groups], told

    def optim_step(self, model_id: str, adam: Adam) -> dict[str, float]:
        """Run a step of AdamW on the gradients since the last step, and clear them. ValueError if there are none,
        DroppedError if their norm is not finite."""
        with self.active(model_id) as held:
            if all(parameter.grad is None for parameter in held.parameters.values()):
                raise ValueError(f"there is no gradient of {model_id}: call forward_backward before optim_step")
            for group in held.optimizer.param_groups:
                group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps,
                             weight_decay=adam.weight_decay)
            held.learner.config.max_grad_norm = adam.grad_clip_norm or math.inf
            metrics = held.learner.optim_step()
        return {"grad_norm": metrics["grad_norm"], "learning_rate": adam.learning_rate}

    def size(self, model_id: str, moments: bool = False) -> int:
        """Return the bytes of a model's weights, with `moments` also those of Adam's moments."""
        weights = self.held[model_id].parameters.values()
        return sum(each.nbytes + 2 * max(each.nbytes, 4 * each.numel()) * moments for each in weights)

    def state(self, model_id: str) -> dict[str, Tensor]:
        """Return the weights and moments of a model, on the host, as `restore` takes them."""
        held, tensors = self.held[model_id], {}
        for name, parameter in held.parameters.items():
            tensors[name] = parameter.detach().cpu().clone()
            moments = held.optimizer.state.get(parameter, {})
            tensors |= {f"{name}/{part}": torch.as_tensor(value).cpu().clone() for part, value in moments.items()}
        return tensors

    def snapshot(self, model_id: str, folder: Path) -> None:
        """Write the factors in PEFT's format, flushed to the disk before this returns."""
        name, aside = self.held[model_id].adapter, folder.with_name(f"{folder.name}.new")
        with removed_after(aside):
            with self.active(model_id):  # the card tells of the active adapter
                self.model.save_pretrained(str(aside), selected_adapters=[name])
            move(aside / CARD, aside / name / CARD)
            for path in (aside / name).iterdir():
                flush(path)
            remove(folder)
            move(aside / name, folder)
        flush(folder.parent)

    def restore(self, model_id: str, state: dict[str, Tensor]) -> None:
        """Set factors and moments from a `state`, and drop gradients. If `state` has no moments, they start anew.
        ValueError if the state does not fit the model's rank and layers."""
        held = self.held[model_id]
        shapes = {name: parameter.shape for name, parameter in held.parameters.items()}
        if {name: factor.shape for name, factor in state.items() if "/" not in name} != shapes:
            raise ValueError(f"the saved weights do not fit {model_id}: they have another rank or other layers")
        held.optimizer.zero_grad(set_to_none=True)
        held.optimizer.state.clear()
        for name, parameter in held.parameters.items():
            parameter.data.copy_(state[name])
            moments = {key.partition("/")[2]: value for key, value in state.items() if key.startswith(f"{name}/")}
            if moments:  # torch keeps the step count on the host; that of a head is an int
                held.optimizer.state[parameter] = {
                    part: value.clone().to(parameter.device) if part != "step" else
                    value.clone() if value.is_floating_point() else int(value) for part, value in moments.items()}


def make_optimizer(trained: TrainedSet, seed: int) -> torch.optim.Optimizer:
    """Return AdamW; of a head, it rounds weights in bfloat16 at random."""
    usual, *heads = trained.groups({name: {} for name in trained.modules})
    optimizer = torch.optim.AdamW([usual])
    return EmbeddingOptimizer(optimizer, heads, seed, False) if heads else optimizer


def group_of(ids: list[int]) -> RolloutGroup:
    """Return a sequence in the packer's form: the first token is the prompt, and all others are trained."""
    return RolloutGroup({}, ids[:1], [Rollout(ids[1:], [0.0] * (len(ids) - 1), "length")])
