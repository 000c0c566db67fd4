"""Options of other libraries that do not exist here. A value that asks for what happens anyway is accepted, so that
copied settings work. Any other value is refused, with what to do instead; no value is ignored silently."""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from lowmem_grpo.config.launcher import this_process
from lowmem_grpo.utils import field_value

ONE_MEANING = ("trust_remote_code", "dataset_num_proc", "vllm_mode")  # fields that exist for the
# argument parsers of TRL's scripts; the table of unsupported options says which values are accepted
RENAMED = {"evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu"}  # older names of transformers


@cache
def transformers_defaults() -> dict[str, Any]:
    """Return the plain defaults of TrainingArguments from a file, as importing the class takes seconds."""
    source = files("lowmem_grpo") / "assets" / "training_arguments.json"
    defaults: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return defaults


@dataclass(frozen=True)
class Fixed:
    """An option that has the same effect here for all accepted values."""

    advice: str  # what to use instead, or why other values are refused
    values: tuple[Any, ...] = ()  # these ask for what happens anyway
    at_default: bool = False  # transformers' own default is accepted too
    may_be_off: bool = False  # any value that turns it off is accepted too
    any_value: bool = False  # it changes no result: every value is accepted
    one_process: bool = False  # `values` change no result of one process; with several they are refused

    def accepts(self, name: str, value: Any) -> bool:
        """Return whether a value asks for what happens anyway."""
        named = getattr(value, "__name__", getattr(value, "value", value))  # a class, an enumeration or a plain value
        return self.any_value or (self.may_be_off and is_off(value)) or named in self.allowed(name)

    def allowed(self, name: str) -> tuple[Any, ...]:
        """Return the accepted values of the option `name`, its default first."""
        usual = (transformers_defaults()[name],) if self.at_default else (None, False) if self.may_be_off else ()
        return (*usual, *self.values) if not self.one_process or this_process().count == 1 else usual


@dataclass(frozen=True)
class Harmless(Fixed):
    """An option whose value is an object or dict. Entries in `free` may have any value, others only the default."""

    free: tuple[str, ...] = ()
    usual: tuple[tuple[str, Any], ...] = ()

    def accepts(self, name: str, value: Any) -> bool:
        options, usual = value.to_dict() if hasattr(value, "to_dict") else value or {}, dict(self.usual)
        return isinstance(options, Mapping) and all(key in self.free or (key in usual and usual[key] == setting)
                                                  for key, setting in options.items())


Table = dict[str, Fixed]


def at_default(advice: str, *names: str, also: tuple[Any, ...] = ()) -> Table:
    """Return a table of transformers' options that must keep their defaults; `also` are values of the same meaning."""
    return {name: Fixed(advice, also, at_default=True) for name in names}


def only(advice: str, **values: Any) -> Table:
    """Return a table of options, each with the only value (or the tuple of values) that is allowed, and the advice."""
    return {name: Fixed(advice, value if isinstance(value, tuple) else (value,)) for name, value in values.items()}


def off(advice: str, *names: str, also: tuple[Any, ...] = ()) -> Table:
    """Return a table of options that may only be turned off: None, False, an empty value, or one of `also`."""
    return {name: Fixed(advice, also, may_be_off=True) for name in names}


def any_value(*names: str, usual: Any = None) -> Table:
    return {name: Fixed("", (usual,), any_value=True) for name in names}


def is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (dict, list, tuple, set, str)) and not value)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean A or B?" with the known names most like this one; "" if none is similar."""
    close = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def refuse(options: Mapping[str, Any], table: Mapping[str, Fixed], known: Collection[str], owner: str) -> None:
    """Raise TypeError for an option that `owner` does not have, ValueError for a value that is not supported."""
    for name, value in options.items():
        if name not in table:
            raise TypeError(f"{owner} has no option {name!r}{suggestion(name, {*table, *known})}")
        if not table[name].accepts(name, value):
            allowed = " or ".join(map(repr, table[name].allowed(name)))
            shown = "'hf_...'" if str(value).startswith("hf_") else repr(value)  # a token is a secret
            raise ValueError(f"{owner}: {name}={shown} is not supported (allowed: {allowed}). {table[name].advice}")


LEAVE_OUT = "There is no such choice here; leave it out."
ONE_DEVICE = "There is one device; leave it out."
OTHER = Fixed("transformers has it, and the trainers here do not; leave it out.", at_default=True, may_be_off=True)
EVERY_TRAINER: Table = dict.fromkeys(transformers_defaults(), OTHER) | {
    # the model, the optimizer, precision and memory
    **only("Only model classes of transformers itself can be trained.", trust_remote_code=False),
    **only("Set it where the model is loaded, or in model_init_kwargs={'dtype': ...}.", dtype=None, torch_dtype=None),
    **only("Logits are computed in chunks; set logits_chunk, in tokens, for another size than the default.",
           unsloth_num_chunks=-1, unsloth_logit_chunk_multiplier=None),
    **only("Use per_device_train_batch_size or max_tokens_per_micro_batch.", unsloth_grpo_mini_batch=None),
    **at_default("Use adam_beta1, adam_beta2, adam_epsilon and weight_decay.", "optim_args", also=("", {})),
    **at_default("Choose what is trained with target_modules in get_peft_model.", "optim_target_modules"),
    **only("Use optim, for example optim='paged_adamw_8bit'.", adafactor=False),
    **at_default("Checkpointing has no options; choose it with use_gradient_checkpointing in get_peft_model.",
                 "gradient_checkpointing_kwargs", also=({}, {"use_reentrant": False}, {"use_reentrant": True})),
    **at_default("Set torch.backends.cuda.matmul.allow_tf32 yourself.", "tf32"),
    **at_default("Set max_tokens_per_micro_batch: it bounds memory, and results stay the same.",
                 "auto_find_batch_size"),
    **at_default("The package's own kernels never hold all logits at once; leave it out.", "use_liger_kernel",
                 also=(True,)),  # that memory is saved anyway
    "average_tokens_across_devices": Fixed("The tokens of all processes have one mean; leave it out.", (False,),
                                           at_default=True, one_process=True),
    # rows, records and evaluation
    **at_default("compute_metrics gets all rows at once; leave it out.", "eval_do_concat_batches"),
    **at_default("Shape the dataset itself to drop rows.", "dataloader_drop_last"),
    **at_default("Use shuffle_dataset=False to keep the order of the rows.", "train_sampling_strategy"),
    **any_value("dataset_num_proc"),  # the number of processes that read rows changes no result
    **any_value("dataloader_num_workers", usual=0),
    "accelerator_config": Harmless(
        "There are no data loaders to split; leave split_batches and gradient_accumulation_kwargs out of it.",
        (None, {}), free=("dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
                          "use_configured_state"),
        usual=(("split_batches", False), ("gradient_accumulation_kwargs", None)),
    ),
    **any_value("pad_to_multiple_of"),  # sequences are packed, without padding
    **at_default("Use logging_steps; a large value logs almost nothing.", "logging_strategy"),
    **only("Logs go to output_dir; set that.", logging_dir=None),
    **at_default("Use torch.autograd.set_detect_anomaly to find where a value overflows.", "debug", also=([], None)),
    **at_default("Set the level with Python's logging module.", "log_level_replica"),
    **at_default("Set trackio_space_id, or run `trackio sync` afterwards.", "trackio_bucket_id",
                 "trackio_static_space_id"),
    **at_default("Call trainer.train().", "do_train", also=(True,)),
    **at_default("Call the model's generate to predict.", "do_predict", also=(True,)),
    **at_default("Use eval_strategy='steps' to evaluate while training, with eval_steps.", "do_eval", also=(True,)),
    **at_default("Use eval_strategy='steps' with eval_steps.", "eval_delay"),
    # checkpoints and the hub
    **at_default("Pass it to trainer.train(resume_from_checkpoint=...).", "resume_from_checkpoint", also=(False,)),
    **at_default("Every checkpoint can be resumed; the folder `adapter` in output_dir holds only the adapter.",
                 "save_only_model"),
    **at_default("There is one node; leave it out.", "save_on_each_node", also=(True,)),
    **at_default("Use a smaller save_steps.", "enable_jit_checkpoint"),
    **at_default("The token is that of `hf auth login`; leave it out.", "hub_token"),
    **at_default("A new repository is private; make it public on its page of the hub.", "hub_private_repo",
                 also=(True,)),
    **at_default("push_to_hub=True uploads the adapter of a finished run, and nothing before; leave it out.",
                 "hub_strategy", "hub_always_push", "hub_revision", also=("end",)),
    **only("Use hub_model_id, its newer name; the token is that of `hf auth login`.",
           push_to_hub_model_id=None, push_to_hub_organization=None, push_to_hub_token=None),
    # devices
    **only("Training happens on the device that the model was loaded on.", use_mps_device=False),
    **at_default("Call torch.use_deterministic_algorithms(True) yourself; seed fixes every draw.", "full_determinism"),
    **at_default("There is one process; leave it out.", "local_rank", also=(0,)),
    **at_default(ONE_DEVICE, "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph",
                 also=(False, True)),
    **only(ONE_DEVICE, fsdp_min_num_params=0, fsdp_transformer_layer_cls_to_wrap=None, mp_parameters="",
           ray_scope="last", tpu_num_cores=None, tpu_metrics_debug=False),
    # older names
    **only("Use per_device_train_batch_size.", per_gpu_train_batch_size=None),
    **only("Use per_device_eval_batch_size.", per_gpu_eval_batch_size=None),
    **only("Use bf16 or fp16.", fp16_opt_level="O1", fp16_backend="auto", half_precision_backend="auto"),
    **only("Logits are computed in float32 in any case.", cast_lm_head_to_fp32=(False, True)),
    **only(LEAVE_OUT, router_aux_loss_coef=(None, 0.0), group_by_length=False,
           include_tokens_per_second=(False, None), include_for_metrics=([], None), include_inputs_for_metrics=False,
           save_safetensors=True, jit_mode_eval=False, past_index=-1, torchdynamo=None,
           use_legacy_prediction_loop=False),
}
OF_GRPO: Table = EVERY_TRAINER | {
    **only("Pass max_seq_length to FastLanguageModel.from_pretrained.", max_seq_length=None),
    **at_default("The GRPO loss has no labels to smooth; leave it out.", "label_smoothing_factor"),
    **only("Use temperature, top_p, top_k, min_p or vllm_sampling_params.", generation_kwargs=(None, {})),
    **only("Penalised sampling is off-policy; score repetition with a reward function.", repetition_penalty=1.0),
    **only("Reward functions get every column; drop those you do not want yourself.", remove_unused_columns=False),
    **only("It saved little and is gone; train_while_sampling fills the time of the last sequences.",
           speculation=None, partial_rollouts=False, partial_rollouts_ahead=0.5, partial_rollouts_staleness=1),
    **only("With advantage_estimator='gae' it is num_iterations; leave it out.", num_ppo_epochs=None),
    **only("Each optimizer step takes per_device_train_batch_size x gradient_accumulation_steps completions; leave it "
           "out.", num_mini_batches=None),
    **only("It is epsilon (and epsilon_high) here.", cliprange=None),
    **only("The critic has an optimizer of its own, with critic_learning_rate; leave it out.", vf_coef=None),
    **only("It is beta here.", kl_coef=None),
    **only("Reward functions see every completion, truncated ones too; let one pay less for them.",
           missing_eos_penalty=None),
    **only("With advantage_estimator='gae' the critic is an adapter on the same base; critic_adapter names the reward "
           "model that it starts from.", value_model=None),
    **only("It favoured short answers and is gone; raise num_generations instead.", extra_generations=0),
    **only("completions.jsonl in output_dir holds every completion; use log_completions to print a few.",
           log_completions_hub_repo=None),
    **only("There is no server: vLLM works in this process, on the trainer's own weights; leave it out.",
           vllm_mode="colocate", vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000,
           vllm_server_timeout=240.0, vllm_group_port=51216),
    **only("Use vllm_importance_sampling_clip_max, its newer name.", vllm_importance_sampling_cap=None),
    **only("Set it where the model is loaded: from_pretrained(fast_inference=..., gpu_memory_utilization=...).",
           vllm_model_impl="vllm", vllm_tensor_parallel_size=1),
    **any_value("vllm_enable_sleep_mode", usual=False),  # vLLM sleeps while the model trains, always
    **only("Constrained decoding is not supported; reward the format instead.",
           vllm_structured_outputs_regex=None, vllm_guided_decoding_regex=None),
    **only(LEAVE_OUT, use_liger_loss=(False, None, True), cache_implementation=None,
           ds3_gather_for_generation=(True, False), log_multimodal=(True, False)),
    # continuous batching is always on
    **any_value("use_transformers_continuous_batching", "use_transformers_paged", usual=False),
    **any_value("transformers_continuous_batching_config"),
}


def field_names(cls: Any) -> set[str]:
    return {field.name for field in fields(cls)}


class CheckedCall(type):
    """A metaclass: the constructors of its classes refuse unknown options, with what to use instead."""

    unsupported: Table = OF_GRPO
    renamed: dict[str, str] = RENAMED

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for old, new in cls.renamed.items():
            if old in kwargs and new in kwargs:
                raise TypeError(f"{cls.__name__} got {old!r} and {new!r}, which are the same option; give one of them")
        options, known = {cls.renamed.get(name, name): value for name, value in kwargs.items()}, field_names(cls)
        if others := {name: value for name, value in options.items() if name not in known or name in ONE_MEANING}:
            refuse(others, cls.unsupported, known, cls.__name__)
        return super().__call__(*args, **{name: field_value(cls, name, value) for name, value in options.items()
                                           if name in known})
