"""TRL's GRPOTrainer with log-probabilities from `linear_logprobs`; everything else stays TRL's.

    trainer = use_lowmem_kernels()(model=model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=dataset)

TRL computes all log-probabilities and entropies in a private method, `_get_per_token_logps_and_entropies`. The subclass
overrides this method: the kernel takes the hidden states of the completion tokens. `TRL` names the versions on which
the override was checked."""

from collections.abc import Iterator
from typing import Any

import torch
import trl
from packaging.specifiers import SpecifierSet
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from trl.extras.profiling import profiling_decorator

from lowmem_grpo.models.policy import Head, check_linear, logit_shape

TRL = ">=1.16,<1.17"  # versions whose overridden method and its callers were checked
OVERRIDDEN = "_get_per_token_logps_and_entropies"


def use_lowmem_kernels(trainer_class: type | None = None) -> type:
    """Return a subclass of TRL's GRPOTrainer, or of `trainer_class`, that never holds logits (tokens, vocab).

    ImportError for a version of TRL outside `TRL`; TypeError for a class that is no subclass of trl.GRPOTrainer;
    ValueError for a class that overrides the log-probabilities itself. The constructor of the subclass raises
    ValueError, with the remedy, for unsupported settings."""
    check_version(trl.__version__)
    trainer_class = trl.GRPOTrainer if trainer_class is None else trainer_class
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, trl.GRPOTrainer)):
        raise TypeError(f"got {trainer_class!r}; a subclass of trl.GRPOTrainer is needed (the class, not a trainer)")
    if getattr(trainer_class, OVERRIDDEN) is not getattr(trl.GRPOTrainer, OVERRIDDEN):
        raise ValueError(f"{trainer_class.__name__} has a {OVERRIDDEN} of its own, which the kernels would replace; "
                         "pass a trainer class that leaves it to trl.GRPOTrainer")
    return type(f"LowMem{trainer_class.__name__}", (LogprobsWithoutLogits, trainer_class), {})


def check_version(version: str) -> None:
    """Raise ImportError for a version of TRL that was not checked."""
    if version not in SpecifierSet(TRL):
        raise ImportError(f"trl is {version}; allowed is {TRL}, on which the overridden method was checked. "
                          f"pip install 'trl{TRL}'")


class LogprobsWithoutLogits:
    """A mixin that overrides the log-probabilities of a TRL trainer. It must precede the trainer in a class's bases."""

    accelerator: Any
    temperature: float
    entropy_coef: float
    use_adaptive_entropy: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for problem in refused(self):
            raise ValueError(f"{type(self).__name__} cannot train this: {problem}")

    @profiling_decorator
    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (logprobs (B, C), entropies (B, C) or None, None) of each row's last `logits_to_keep` = C tokens."""
        extra = [name for name, value in images.items() if value is not None]
        if extra or compute_aux_loss:
            raise ValueError(f"got {', '.join(extra) or 'compute_aux_loss'}; only text of models without an auxiliary "
                             "loss is computed here. Use TRL's own trainer class")
        rows = batch_size or len(input_ids)
        parts = [self.completion_logprobs(model, *part, logits_to_keep)
                 for part in zip(input_ids.split(rows), attention_mask.split(rows), strict=True)]
        logprobs, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
        return logprobs, entropies if compute_entropy else None, None

    def completion_logprobs(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs, entropies), (B, C) float32, of the last C = `length` tokens; 0 where the mask is 0."""
        base = base_of(self.accelerator.unwrap_model(model, keep_torch_compile=False))
        with self.accelerator.autocast():
            hidden = base.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        head = Head(base.get_output_embeddings(), **logit_shape(base.config))  # its weight is the active adapter's
        device, dtype = head.weight.device, head.weight.dtype
        mask = attention_mask[:, -length:].to(device).bool()
        before = hidden.last_hidden_state[:, -length - 1 : -1].to(device)  # the places that predict the last C tokens
        *values, _ = head.scores(before[mask].to(dtype), input_ids[:, -length:].to(device)[mask], self.temperature,
                                 bool(self.entropy_coef) or self.use_adaptive_entropy)
        logprobs, entropies = (value.new_zeros(mask.shape).masked_scatter(mask, value) for value in values)
        return logprobs, entropies


def base_of(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def refused(trainer: Any) -> Iterator[str]:
    """Yield the settings of a trainer that the kernels do not support, each with the remedy."""
    args = trainer.args
    if trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield "several processes, DeepSpeed or FSDP, whose wrapped forward is not called; train in one process"
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        yield (f"the processing_class is a {type(trainer.processing_class).__name__}, for images; allowed is a "
               "tokenizer. Train text, or use TRL's own trainer class")
    if trainer.aux_loss_enabled:
        yield ("the auxiliary loss of a mixture of experts; set router_aux_loss_coef=0.0 to train without it, or use "
               "TRL's own trainer class")
    if args.use_liger_kernel:
        yield "use_liger_kernel=True was not checked beside these kernels; set use_liger_kernel=False"
    if args.torch_compile:
        yield ("torch_compile=True would compile a forward that is not called; set torch_compile=False, and compile "
               "the backbone in place before the trainer takes the model: model.base_model.compile()")
    yield from refused_adapters(getattr(trainer.model, "peft_config", {}))
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            yield from refused_head(base_of(model))


def refused_adapters(adapters: dict[str, Any]) -> Iterator[str]:
    """Yield the adapters that are not LoRA or need PEFT's own forward, each with the remedy."""
    for name, config in adapters.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            yield f"the adapter {name!r} is {kind}; allowed is LORA (LoRA, DoRA, rsLoRA). Pass a peft.LoraConfig"
        elif getattr(config, "alora_invocation_tokens", None):
            yield f"the adapter {name!r} has alora_invocation_tokens, which PEFT's own forward handles; leave them out"


def refused_head(base: Any) -> Iterator[str]:
    try:
        check_linear(base.get_output_embeddings())
    except ValueError as error:
        yield str(error)
