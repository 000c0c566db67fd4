"""The score head of a reward model or a critic: a linear layer (1, D) without bias, in float32, on the last hidden
states. `add_score` puts one beside the model's own LoRA; an `AdapterSlot` is a second adapter with a head of its own.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig, PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lowmem_grpo.models.lora_layers import use_kernel_layers
from lowmem_grpo.models.policy import Head, Policy
from lowmem_grpo.models.trained_set import TrainedWeight, adapter_values
from lowmem_grpo.runs.adapter_file import (
    MOST_SIDE,
    PREFIX,
    SCORE,
    SEQ_CLS,
    check_finite,
    check_fits,
    contents_of,
    is_reward_model,
    parts_of,
)
from lowmem_grpo.runs.checkpoint_state import ADAPTER
from lowmem_grpo.runs.saved_adapter import AdapterError, check_base
from lowmem_grpo.types import Rollout, RolloutGroup, Split

logger = logging.getLogger(__name__)
SAVED = f"{PREFIX}{SCORE}.weight"  # the head's name in an adapter's file, as PEFT and transformers have it
CRITIC = "critic"  # the name of a critic's slot
HEADS = {SCORE, "classifier"}  # PEFT adds both to the `modules_to_save` of a classifier


def new_score(model: PeftModel) -> nn.Linear:
    """Return a frozen head of zeros on the device of the model's LoRA."""
    lora = next(value for name, value in model.named_parameters() if ".lora_" in name)
    base: Any = model.get_base_model()
    head = nn.Linear(base.config.get_text_config().hidden_size, 1, bias=False, device=lora.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    return head.requires_grad_(False)


def add_score(model: PeftModel, seed: int, start: Tensor | None = None) -> Head:
    """Put a trained head into the model, under PEFT's `modules_to_save`, and return it. Its values (1, D) are those of
    `start`, or drawn from the seed with the deviation 1 / (D + 1). Without the adapter, all scores are 0."""
    base: Any = model.get_base_model()
    base.score = ModulesToSaveWrapper(new_score(model), ADAPTER)
    own: nn.Parameter = base.score.modules_to_save[ADAPTER].weight
    width = own.shape[1]
    if start is None:
        start = torch.empty(1, width).normal_(0, 1 / (width + 1), generator=torch.Generator().manual_seed(seed))
    own.data.copy_(start)
    own.requires_grad_(True)
    config: Any = model.peft_config[ADAPTER]
    config.modules_to_save = [*(config.modules_to_save or ()), SCORE]
    config.task_type = SEQ_CLS
    return score_of(model)


def without_score(model: Any, peft_config: Any) -> tuple[Any, Any, Tensor | None]:
    """Return a model and a LoraConfig as for a causal model, and the values (1, D) of the model's score head (None: it
    has none). A classifier of transformers, bare or inside a PEFT model, becomes a causal model in place, whose
    head is never read. ValueError for a classifier with several labels."""
    if peft_config is not None:
        named = [*(getattr(peft_config, "modules_to_save", None) or ())]
        if str(getattr(peft_config.task_type, "value", peft_config.task_type)) != SEQ_CLS and SCORE not in named:
            logger.warning("peft_config has task_type=%r and no modules_to_save=[\"score\"]: the score head is trained "
                           "and saved all the same, as with task_type=\"SEQ_CLS\"", peft_config.task_type)
        peft_config = for_words(peft_config)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if (head := getattr(base, SCORE, None)) is None:
        return model, peft_config, None
    if (labels := len(head.weight)) != 1:
        raise ValueError(f"the model has num_labels={labels}, and a reward model scores with one number: load it with "
                         "num_labels=1")
    start = head.weight.detach().float().clone()
    if "SequenceClassification" in type(base).__name__:
        base = as_causal(base)
    else:
        del base.score
    if isinstance(model, PeftModel):
        for name, config in [*model.peft_config.items()]:
            model.peft_config[name] = for_words(config)
        model.base_model.model = base
        return model, peft_config, start
    return base, peft_config, start


def for_words(config: Any) -> Any:
    """Return a classifier's LoraConfig as that of a causal model."""
    config = copy.copy(config)
    left = [name for name in getattr(config, "modules_to_save", None) or () if name not in HEADS]
    config.modules_to_save, config.task_type = left or None, "CAUSAL_LM"
    return config


def as_causal(classifier: Any) -> Any:
    """Return a causal model on a classifier's layers. The weight of its head is the embedding."""
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(classifier.config, trust_remote_code=False)
    made.config = classifier.config
    setattr(made, made.base_model_prefix, getattr(classifier, classifier.base_model_prefix))
    made.get_output_embeddings().weight = made.get_input_embeddings().weight
    vars(made).update({name: value for name, value in vars(classifier).items() if name not in vars(made)})
    return made


def score_of(model: PeftModel) -> Head:
    """Return the head that `add_score` put into the model."""
    base: Any = model.get_base_model()
    return Head(base.score)


def score_of_hidden(head: Head, hidden: Tensor) -> Tensor:
    """Return the scores (N,) of hidden states (N, D), with gradients for both."""
    return (hidden.to(head.weight.dtype) @ head.weight.T)[:, 0]


def group_to_score(texts: Sequence[list[int]]) -> RolloutGroup:
    """Return a group of the token ids of whole texts, which share the packed tokens of their common beginning. The only
    trained token of each is one after its end, which no model reads: hidden states (N, D) are those at the ends."""
    columns = enumerate(zip(*texts, strict=False))
    shared = next((place for place, column in columns if len({*column}) > 1), min(map(len, texts)))
    shared = max(1, shared)  # texts that differ from the first token on are each behind their own
    return RolloutGroup({}, texts[0][:shared], [
        Rollout([*ids[shared:], ids[-1]], [0.0] * (len(ids) - shared + 1), "stop",
                trained=[False] * (len(ids) - shared) + [True],
                splits=[] if ids[:shared] == texts[0][:shared] else [Split(0, ids[:shared])])
        for ids in texts])


def read_reward_model(folder: Path) -> tuple[LoraConfig, dict[str, Tensor], Tensor]:
    """Return the settings of a reward model's LoRA, its tensors, and the head (1, D), as we or PEFT saved them.
    AdapterError for an adapter without a head, or with more than LoRA and a head."""
    settings, stored = contents_of(folder)
    score = stored.pop(SAVED, None)
    if score is None:
        why = ("its settings say a reward model, and PEFT saves the head only with modules_to_save=[\"score\"]"
               if is_reward_model(settings) else "it is no reward model; give one that RewardTrainer made")
        raise AdapterError(f"the adapter in {folder} holds no {SAVED}: {why}")
    others = [name for name in settings.get("modules_to_save") or () if name not in HEADS]
    plain = settings | {"modules_to_save": others or None, "task_type": "CAUSAL_LM"}
    config, tensors, matrices = parts_of(folder, plain, stored)
    if beside := next((name for name in (*tensors, *matrices) if ".lora_" not in name), None):
        raise AdapterError(f"the adapter in {folder} brings {beside} beside LoRA and score, and the base keeps its own "
                           "here: train the reward model without it")
    if variant := next((name for name in ("use_dora", "lora_bias") if getattr(config, name)), None):
        raise AdapterError(f"the adapter in {folder} has {variant}=True, and only plain LoRA scores here")
    if score.ndim != 2 or len(score) != 1 or score.numel() > MOST_SIDE or not score.isfinite().all():
        raise AdapterError(f"the adapter in {folder} holds {SAVED} as {[*score.shape]}, or not finite; needed are "
                           "finite numbers [1, hidden size], of num_labels=1")
    return config, tensors, score.float()


class AdapterSlot:
    """A second adapter on a policy's model, with a head of its own: a frozen reward model, or a trained critic. Outside
    of `active()` the model computes, trains and is saved as without it."""

    def __init__(self, policy: Policy, name: str, config: LoraConfig, seed: int = 0, trained: bool = False) -> None:
        """`config` says the LoRA, whose first factors are drawn from the seed; the head begins at zero. A slot of the
        same name is replaced."""
        model: Any = policy.model
        self.policy, self.model, self.name, self.trained = policy, model, name, trained
        linear: Any = new_score(model)
        self.head = Head(linear)
        config = copy.deepcopy(config)
        config.modules_to_save = config.trainable_token_indices = None
        config.ensure_weight_tying, config.inference_mode = False, False
        use_kernel_layers(config, policy.base)
        before = gradients_of(model)
        delete_slot(model, name)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model.loaded.slots.append(name)
            model.add_adapter(name, config)
        model.set_adapter(model.active_adapter)
        train_only(model, before)
        factors = adapter_values(model, name)
        self.parameters: dict[str, nn.Parameter] = {
            TrainedWeight(path, factor, None).saved_name: factor for path, factor in factors.items()}
        self.parameters[SAVED] = linear.weight

    @classmethod
    def of_folder(cls, policy: Policy, name: str, folder: Path, trained: bool = False, any_base: bool = False) -> Self:
        """Return a slot with the reward model in a folder. AdapterError if it has other layers or another base model
        than the policy; `any_base` skips the comparison of the base models' names."""
        model: Any = policy.model
        loaded = model.loaded
        config, tensors, _ = read_reward_model(folder)
        if not any_base:
            check_base(folder, loaded.name, loaded.revision, loaded.sha256, None if trained else "from_adapter")
        check_fits(model, folder, config, tensors)
        check_finite(folder, tensors)
        slot = cls(policy, name, config, trained=trained)
        slot.load(folder)
        return slot

    @property
    def nbytes(self) -> int:
        """The bytes of the adapter and its head."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @contextmanager
    def active(self, _: Any = None) -> Iterator[Policy]:
        """Inside, the policy computes with this adapter and this head, and only they are trained, if the slot is.
        Backward passes must be inside too, since checkpointed layers compute again."""
        held = {id(parameter) for parameter in (*self.model.parameters(), self.head.weight)}
        if any(id(parameter) not in held for parameter in self.parameters.values()):
            raise RuntimeError(f"the adapter {self.name!r} was removed, or replaced by one of a later trainer of this "
                               "model; make a new trainer, or load the model again")
        own, head, before = self.model.active_adapter, self.policy.head, gradients_of(self.model)
        try:
            self.model.set_adapter(self.name)
            train_only(self.model, {id(parameter): self.trained for parameter in self.parameters.values()})
            self.head.weight.requires_grad_(self.trained)
            self.policy.head = self.head
            yield self.policy
        finally:
            self.policy.head = head
            self.model.set_adapter(own)
            self.head.weight.requires_grad_(False)
            train_only(self.model, before)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the values of a saved reward model. AdapterError if its layers or its rank are others."""
        _, tensors, score = read_reward_model(folder)
        values = tensors | {SAVED: score}
        for name in sorted({*values, *self.parameters}):
            there, here = ([*held[name].shape] if name in held else "absent" for held in (values, self.parameters))
            if there != here:
                raise AdapterError(f"the adapter in {folder} does not fit: {name} is {there} there, and {here} here")
            check_finite(folder, {name: values[name]})
            self.parameters[name].copy_(values[name])


def delete_slot(model: Any, name: str) -> None:
    """Remove the adapter of a slot from a model, if it is there."""
    if name in model.loaded.slots:
        model.delete_adapter(name)
        model.loaded.slots.remove(name)


def gradients_of(model: nn.Module) -> dict[int, bool]:
    """Return whether each parameter requires a gradient, by its id."""
    return {id(parameter): parameter.requires_grad for parameter in model.parameters()}


def train_only(model: nn.Module, chosen: dict[int, bool]) -> None:
    """Let those parameters require gradients that the dict says, and no others."""
    for parameter in model.parameters():
        if parameter.requires_grad != (wanted := chosen.get(id(parameter), False)):
            parameter.requires_grad_(wanted)
