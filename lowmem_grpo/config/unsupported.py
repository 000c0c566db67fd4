"""Options of TRL 1.16, transformers and Unsloth that are not fields here: which values are accepted, and what to do.

A value that asks for what happens anyway is accepted and has no effect, so that settings copied from elsewhere work.
Any other value is refused. No value is accepted and then ignored.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

RENAMED = {"evaluation_strategy": "eval_strategy"}  # transformers' name until 4.46


@cache
def transformers_defaults() -> dict[str, Any]:
    """The default of each field of transformers' TrainingArguments, where it is a plain value.

    They are in a file of ours, because importing the class takes seconds and a wrong option is refused at once. A test
    compares the file with the class.
    """
    source = files("lowmem_grpo") / "assets" / "training_arguments.json"
    defaults: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return defaults


@dataclass(frozen=True)
class Fixed:
    """An option that has one meaning here."""

    advice: str  # what to use instead, or why other values are refused
    values: tuple[Any, ...] = ()  # these ask for what happens anyway
    at_default: bool = False  # and transformers' own default does too
    any_value: bool = False  # it asks how rows are read, which changes no result: every value is accepted

    def accepts(self, name: str, value: Any) -> bool:
        """Whether the option `name` may have this value."""
        return self.any_value or value in self.allowed(name)

    def allowed(self, name: str) -> tuple[Any, ...]:
        """Every accepted value of the option `name`, its default first."""
        return (transformers_defaults()[name], *self.values) if self.at_default else self.values


def at_default(advice: str, *names: str, also: tuple[Any, ...] = ()) -> dict[str, Fixed]:
    """Options that transformers has, which stay at their defaults; `also` are other ways to ask for the same."""
    return {name: Fixed(advice, also, at_default=True) for name in names}


def only(advice: str, **values: Any) -> dict[str, Fixed]:
    """Options that transformers does not have (or has with another meaning), each with its value, or a tuple of
    them."""
    return {name: Fixed(advice, value if isinstance(value, tuple) else (value,)) for name, value in values.items()}


def workers(default: Any, *names: str) -> dict[str, Fixed]:
    """Options that say by how many processes rows are read and tokenised. One is enough here, and all give the same."""
    return {name: Fixed("Rows are read and tokenised in the main process, when they are needed.", (default,),
                        any_value=True) for name in names}


MODEL = {
    **only("Only model classes of transformers itself can be trained.", trust_remote_code=False),
    **only("Set lora_dropout=0 in get_peft_model instead.", disable_dropout=False),
    **only("Logits are always accumulated in float32; leave it out.", cast_lm_head_to_fp32=False),
    **only("No auxiliary loss is added; leave it out.", router_aux_loss_coef=(None, 0.0)),
    **at_default("Sampling always uses a key-value cache and training never does; leave it out.", "use_cache"),
    **at_default("Noise would make training differ from sampling; leave it out.", "neftune_noise_alpha"),
    **only("Logits are computed in chunks; set logits_chunk, in tokens, for another size than the default.",
           unsloth_num_chunks=-1, unsloth_logit_chunk_multiplier=None),
    **only("Use per_device_train_batch_size or max_tokens_per_micro_batch.", unsloth_grpo_mini_batch=None),
}
OPTIMIZER = {
    **at_default("The schedules take no options; choose another lr_scheduler_type.", "lr_scheduler_kwargs",
                 also=({},)),
    **at_default("Use adam_beta1, adam_beta2, adam_epsilon and weight_decay.", "optim_args", also=("", {})),
    **at_default("Choose what is trained with target_modules in get_peft_model.", "optim_target_modules"),
    **only("Use optim, for example optim='paged_adamw_8bit'.", adafactor=False),
}
PRECISION_AND_MEMORY = {
    **at_default("Checkpointing has no options; choose it with use_gradient_checkpointing in get_peft_model.",
                 "gradient_checkpointing_kwargs", also=({}, {"use_reentrant": False}, {"use_reentrant": True})),
    **at_default("Set torch.backends.cuda.matmul.allow_tf32 yourself.", "tf32"),
    **at_default("The cache is emptied between sampling and training; leave it out.", "torch_empty_cache_steps"),
    **at_default("Set max_tokens_per_micro_batch: it bounds memory, and results stay the same.",
                 "auto_find_batch_size"),
    **at_default("The package's own kernels never hold all logits at once; leave it out.", "use_liger_kernel",
                 also=(True,)),  # it asks for memory that is saved anyway
    **at_default("The loss never holds all logits at once; leave it out.", "liger_kernel_config", also=({},)),
    **at_default("Evaluation uses the precision of training; leave it out.", "bf16_full_eval", "fp16_full_eval"),
    **at_default("Sequences change their length all the time, and compiling would not pay; leave it out.",
                 "torch_compile", "torch_compile_backend", "torch_compile_mode"),
}
DATA = {
    **at_default("Use seed, which orders the data too.", "data_seed"),
    **at_default("Shape the dataset itself to drop rows.", "dataloader_drop_last"),
    **at_default("Rows are read in the main process; leave it out.", "dataloader_pin_memory", also=(False,)),
    **at_default("Use shuffle_dataset=False to keep the order of the rows.", "train_sampling_strategy"),
    **only("Micro-batches are always packed by length; leave it out.", group_by_length=False),
    **workers(None, "dataset_num_proc"),
    **workers(0, "dataloader_num_workers"),
    **at_default("No column holds labels; leave it out.", "label_names", also=([],)),
    **at_default("Lengths are counted, not read from a column; leave it out.", "length_column_name"),
    **at_default("Rows are read in the main process; leave it out.",
                 "dataloader_persistent_workers", "dataloader_prefetch_factor",
                 "dataloader_multiprocessing_context", "dataloader_in_order"),
}
RECORDS = {
    **at_default("Use logging_steps; a large value logs almost nothing.", "logging_strategy"),
    **at_default("Use logging_steps=1.", "logging_first_step"),
    **at_default("Losses are logged as they are; leave it out.", "logging_nan_inf_filter", also=(False,)),
    **only("Logs go to output_dir; set that.", logging_dir=None),
    **at_default("There is one node; leave it out.", "log_on_each_node", also=(False,)),
    **at_default("The logs always count tokens; leave it out.", "include_num_input_tokens_seen", also=(False,)),
    **only("The logs always show the speed; leave it out.", include_tokens_per_second=(False, None)),
    **at_default("The logs always show the peak of memory; leave it out.", "skip_memory_metrics"),
    **at_default("Use torch.autograd.set_detect_anomaly to find where a value overflows.", "debug", also=([], None)),
    **at_default("Set the level with Python's logging module.", "log_level", "log_level_replica"),
    **at_default("Set trackio_space_id, or run `trackio sync` afterwards.", "trackio_bucket_id",
                 "trackio_static_space_id"),
}
EVALUATION = {
    **at_default("Call trainer.train().", "do_train", also=(True,)),
    **at_default("Use eval_strategy='steps' to evaluate while training.", "do_eval", also=(True,)),
    **at_default("Call the model's generate to predict.", "do_predict", also=(True,)),
    **only("The metrics of an evaluation are fixed; leave it out.", include_for_metrics=([], None),
           include_inputs_for_metrics=False),
    **at_default("The metrics of an evaluation are fixed; leave it out.", "prediction_loss_only",
                 "batch_eval_metrics"),
    **at_default("Use eval_strategy='steps' with eval_steps.", "eval_delay", "eval_on_start"),
    **at_default("Evaluation keeps a few numbers, so there is nothing to gather; leave it out.",
                 "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
}
CHECKPOINTS = {
    **at_default("Pass it to trainer.train(resume_from_checkpoint=...).", "resume_from_checkpoint", also=(False,)),
    **at_default("A resumed run goes on with the row at which it stopped; leave it out.", "ignore_data_skip"),
    **at_default("Keep the state of callbacks yourself; leave it out.", "restore_callback_states_from_checkpoint"),
    **at_default("Every checkpoint can be resumed; the folder `adapter` in output_dir holds only the adapter.",
                 "save_only_model"),
    **at_default("There is one node; leave it out.", "save_on_each_node", also=(True,)),
    **only("Adapters are always saved as safetensors; leave it out.", save_safetensors=True),
    **at_default("Use a smaller save_steps.", "enable_jit_checkpoint"),
    **at_default("The token is that of `hf auth login`; leave it out.", "hub_token"),
    **at_default("A new repository is private; make it public on its page of the hub.", "hub_private_repo",
                 also=(True,)),
    **at_default("push_to_hub=True uploads the adapter of a finished run, and nothing before; leave it out.",
                 "hub_strategy", "hub_always_push", "hub_revision", also=("end",)),
    **only("Use hub_model_id, its newer name; the token is that of `hf auth login`.",
           push_to_hub_model_id=None, push_to_hub_organization=None, push_to_hub_token=None),
}
DEVICES = {
    **at_default("Training happens on the device that the model was loaded on.", "use_cpu"),
    **only("Training happens on the device that the model was loaded on.", no_cuda=False, use_mps_device=False),
    **at_default("Call torch.use_deterministic_algorithms(True) yourself; seed fixes every draw.", "full_determinism"),
    **at_default("There is one process; leave it out.", "local_rank", also=(0,)),
    **at_default("There is one device; leave it out.", "average_tokens_across_devices", also=(False,)),
    **at_default("There is one device; leave it out.", "ddp_find_unused_parameters", "ddp_broadcast_buffers",
                 "ddp_static_graph", also=(False, True)),
    **at_default("There is one device; leave it out.", "fsdp", also=("", [])),
    **at_default("There is one device; leave it out.", "fsdp_config", also=({},)),
    **at_default("accelerate is not used for training; leave it out.", "accelerator_config", also=({},)),
    **at_default("There is one device; leave it out.",
                 "ddp_bucket_cap_mb", "ddp_backend", "ddp_timeout", "deepspeed", "parallelism_config"),
    **only("There is one device; leave it out.", fsdp_min_num_params=0, fsdp_transformer_layer_cls_to_wrap=None,
           mp_parameters="", ray_scope="last", tpu_num_cores=None, tpu_metrics_debug=False),
}
TRANSFORMERS_4 = {
    **only("Use per_device_train_batch_size.", per_gpu_train_batch_size=None),
    **only("Use per_device_eval_batch_size.", per_gpu_eval_batch_size=None),
    **only("Use bf16 or fp16.", fp16_opt_level="O1", fp16_backend="auto", half_precision_backend="auto"),
    **only("transformers has dropped it; leave it out.", jit_mode_eval=False, past_index=-1, torchdynamo=None,
           use_legacy_prediction_loop=False),
}
EVERY_TRAINER: dict[str, Fixed] = {
    **MODEL, **OPTIMIZER, **PRECISION_AND_MEMORY, **DATA, **RECORDS, **EVALUATION, **CHECKPOINTS, **DEVICES,
    **TRANSFORMERS_4,
}

ROLLOUTS = {
    **only("Pass max_seq_length to FastLanguageModel.from_pretrained.", max_seq_length=None),
    **at_default("The GRPO loss has no labels to smooth; leave it out.", "label_smoothing_factor"),
    **only("The loss never holds all logits at once; leave it out.", use_liger_loss=(False, None, True)),
    **only("The reference (kl_reference) stays fixed; use beta for the strength of the KL term.",
           sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512),
    **only("Use steps_per_generation: it counts micro-batches that share a generation.", generation_batch_size=None),
    **only("Use temperature, top_p, top_k, min_p or vllm_sampling_params.", generation_kwargs=(None, {})),
    **only("Penalised sampling is off-policy; score repetition with a reward function.", repetition_penalty=1.0),
    **only("The key-value cache grows as it is needed; leave it out.", cache_implementation=None),
    **only("Sequences are packed without padding; leave it out.", pad_to_multiple_of=("auto", None)),
    **only("There is no DeepSpeed here; leave it out.", ds3_gather_for_generation=(True, False)),
    **only("Finished rows always leave the batch; leave it out.", use_transformers_continuous_batching=False,
           transformers_continuous_batching_config=None, use_transformers_paged=False),
    **only("Reward functions get every column; drop those you do not want yourself.", remove_unused_columns=False),
    **only("Prompts are only text; leave it out.", log_multimodal=(True, False)),
    **only("It saved little and is gone; train_while_sampling fills the time of the last sequences.",
           speculation=None, partial_rollouts=False, partial_rollouts_ahead=0.5, partial_rollouts_staleness=1),
    **only("It favoured short answers and is gone; raise num_generations instead.", extra_generations=0),
    **only("completions.jsonl in output_dir holds every completion; use log_completions to print a few.",
           num_completions_to_print=None, log_unique_prompts=False, wandb_log_unique_prompts=False,
           log_completions_hub_repo=None),
}
VLLM = {
    **only("There is no server: vLLM works in this process, on the trainer's own weights.", vllm_mode="colocate"),
    **only("Use vllm_importance_sampling_clip_max, its newer name.", vllm_importance_sampling_cap=None),
    **only("There is no vLLM server mode; leave it out.", vllm_server_base_url=None, vllm_server_host="0.0.0.0",
           vllm_server_port=8000, vllm_server_timeout=240.0, vllm_group_port=51216),
    **only("Set it where the model is loaded: from_pretrained(fast_inference=..., gpu_memory_utilization=...).",
           vllm_model_impl="vllm", vllm_enable_sleep_mode=False, vllm_gpu_memory_utilization=0.3,
           vllm_max_model_length=None, vllm_tensor_parallel_size=1),
    **only("Constrained decoding is not supported; reward the format instead.",
           vllm_structured_outputs_regex=None, vllm_guided_decoding_regex=None),
}
FIXED: dict[str, Fixed] = EVERY_TRAINER | ROLLOUTS | VLLM  # of GRPOConfig
OTHER = Fixed("transformers has it, and the trainers here do not; leave it out.", at_default=True)  # in no table
