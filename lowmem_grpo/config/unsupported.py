"""Options of TRL 1.16, transformers and Unsloth that are not fields of our GRPOConfig: what is accepted, what to do.

A value that asks for what happens anyway is accepted and has no effect, so that settings copied from elsewhere work.
Any other value is refused: none is ever taken and then ignored.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fixed:
    """An option that has one meaning here."""

    allowed: tuple[Any, ...]  # the values that ask for what happens anyway
    advice: str  # what to use instead, or why other values are refused


def off(default: Any, advice: str, *more: Any) -> Fixed:
    """An option that stays at `default`; `more` are other ways to say the same."""
    return Fixed((default, *more), advice)


def group(advice: str, **defaults: Any) -> dict[str, Fixed]:
    """Options that stay at their defaults for one common reason."""
    return {name: off(default, advice) for name, default in defaults.items()}


RENAMED = {"evaluation_strategy": "eval_strategy"}  # transformers' name until 4.46

LOSS = {
    "label_smoothing_factor": off(0.0, "The GRPO loss has no labels to smooth; leave it out."),
    "router_aux_loss_coef": off(None, "No auxiliary loss is added; leave it out.", 0.0),
    "use_liger_loss": off(False, "The loss never holds all logits as it is; leave it out.", None),
    **group(
        "The reference is the model without its adapter and stays fixed; use beta for the strength of the KL term.",
        sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512,
    ),
}

MODEL = {
    "model_init_kwargs": off(None, "Pass loading options to FastLanguageModel.from_pretrained.", {}),
    "trust_remote_code": off(False, "Only model classes of transformers itself can be trained."),
    "disable_dropout": off(False, "Set lora_dropout=0 in get_peft_model instead."),
    "cast_lm_head_to_fp32": off(False, "Logits are accumulated in float32 as it is; leave it out."),
    "use_cache": off(False, "Sampling always uses a key-value cache and training never does; leave it out."),
    "neftune_noise_alpha": off(None, "Noise would set training apart from sampling; leave it out."),
    "max_seq_length": off(None, "Pass max_seq_length to FastLanguageModel.from_pretrained."),
}

GENERATION = {
    "generation_batch_size": off(None, "Use steps_per_generation: it counts micro-batches that share a generation."),
    "generation_kwargs": off(None, "Use temperature, top_p, top_k, min_p or vllm_sampling_params.", {}),
    "repetition_penalty": off(1.0, "Penalised sampling is off-policy; score repetition with a reward function."),
    "cache_implementation": off(None, "The key-value cache grows as it is needed; leave it out."),
    "max_tool_calling_iterations": off(None, "Completions are single turns without tools; leave it out."),
    "pad_to_multiple_of": off("auto", "Sequences are packed without padding; leave it out.", None),
    "ds3_gather_for_generation": off(True, "There is no DeepSpeed here; leave it out.", False),
    **group(
        "Finished rows leave the batch as it is; leave it out.",
        use_transformers_continuous_batching=False, transformers_continuous_batching_config=None,
        use_transformers_paged=False,
    ),
}

VLLM = {
    "vllm_mode": off("colocate", "There is no server: vLLM runs in this process, on the trainer's own weights."),
    "vllm_importance_sampling_cap": off(None, "Use vllm_importance_sampling_clip_max, its newer name."),
    **group(
        "There is no vLLM server mode; leave it out.",
        vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000, vllm_server_timeout=240.0,
        vllm_group_port=51216,
    ),
    **group(
        "Set it where the model is loaded: from_pretrained(fast_inference=..., gpu_memory_utilization=...).",
        vllm_model_impl="vllm", vllm_enable_sleep_mode=False, vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=None, vllm_tensor_parallel_size=1,
    ),
    **group(
        "Constrained decoding is not supported; reward the format instead.",
        vllm_structured_outputs_regex=None, vllm_guided_decoding_regex=None,
    ),
}

UNSLOTH = group(
    "Logits are computed in chunks; set logits_chunk, in tokens, for another size than the default.",
    unsloth_num_chunks=-1, unsloth_logit_chunk_multiplier=None,
) | {
    "unsloth_grpo_mini_batch": off(None, "Use per_device_train_batch_size or max_tokens_per_micro_batch."),
}

OPTIMIZER = {
    "lr_scheduler_kwargs": off(None, "The schedules take no options; choose another lr_scheduler_type.", {}),
    "optim_args": off(None, "Use adam_beta1, adam_beta2, adam_epsilon and weight_decay.", "", {}),
    "optim_target_modules": off(None, "Choose what is trained with target_modules in get_peft_model."),
    "adafactor": off(False, "Use optim, for example optim='paged_adamw_8bit'."),
}

PRECISION_AND_MEMORY = {
    "gradient_checkpointing_kwargs": off(
        None, "Checkpointing has no options; choose it with use_gradient_checkpointing in get_peft_model.", {},
        {"use_reentrant": False}, {"use_reentrant": True},
    ),
    "tf32": off(None, "Set torch.backends.cuda.matmul.allow_tf32 yourself."),
    "torch_empty_cache_steps": off(None, "The cache is emptied between sampling and training; leave it out."),
    "auto_find_batch_size": off(False, "Set max_tokens_per_micro_batch: it bounds memory, and results stay the same."),
    "use_liger_kernel": off(False, "The loss never holds all logits as it is; leave it out."),
    "liger_kernel_config": off(None, "The loss never holds all logits as it is; leave it out.", {}),
    **group("Evaluation runs in the precision of training; leave it out.", bf16_full_eval=False, fp16_full_eval=False),
    **group(
        "Sequences change their length all the time, and compiling would not pay; leave it out.",
        torch_compile=False, torch_compile_backend=None, torch_compile_mode=None,
    ),
}

DATA = {
    "remove_unused_columns": off(False, "Reward functions get every column; drop those you do not want yourself."),
    "data_seed": off(None, "Use seed, which orders the data too."),
    "dataloader_drop_last": off(False, "Shape the dataset itself to drop rows."),
    "dataloader_pin_memory": off(True, "Prompts are read on the main process; leave it out.", False),
    "train_sampling_strategy": off("random", "Use shuffle_dataset=False to keep the order of the rows."),
    "group_by_length": off(False, "Micro-batches are packed by length as it is; leave it out."),
    "dataset_num_proc": off(None, "Prompts are tokenised when they are needed; leave it out."),
    "label_names": off(None, "GRPO has no labels; leave it out.", []),
    "length_column_name": off("length", "Lengths are counted, not read from a column; leave it out."),
    **group(
        "Prompts are read on the main process; leave it out.",
        dataloader_num_workers=0, dataloader_persistent_workers=False, dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None, dataloader_in_order=True,
    ),
}

RECORDS = {
    "logging_strategy": off("steps", "Use logging_steps; a large value logs next to nothing."),
    "logging_first_step": off(False, "Use logging_steps=1."),
    "logging_nan_inf_filter": off(True, "Losses are logged as they are; leave it out.", False),
    "logging_dir": off(None, "Logs go to output_dir; set that."),
    "log_on_each_node": off(True, "There is one node; leave it out.", False),
    "log_multimodal": off(True, "Prompts are text alone; leave it out.", False),
    "include_num_input_tokens_seen": off("no", "Tokens are counted in the logs as it is; leave it out.", False),
    "include_tokens_per_second": off(False, "Speed is in the logs as it is; leave it out.", None),
    "skip_memory_metrics": off(True, "Peak memory is in the logs as it is; leave it out."),
    "debug": off("", "Use torch.autograd.set_detect_anomaly to find where a value overflows.", [], None),
    **group("Set the level with Python's logging module.", log_level="passive", log_level_replica="warning"),
    **group(
        "completions.jsonl in output_dir holds every completion; use log_completions to print a few.",
        num_completions_to_print=None, log_unique_prompts=False, wandb_log_unique_prompts=False,
        log_completions_hub_repo=None,
    ),
    **group(
        "Trackio is not supported; use report_to='wandb' or 'tensorboard'.",
        project="huggingface", trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None,
    ),
}

EVALUATION = {
    "do_train": off(False, "Call trainer.train().", True),
    "do_eval": off(False, "Use eval_strategy='steps' to evaluate while training.", True),
    "do_predict": off(False, "Call the model's generate to predict.", True),
    "include_for_metrics": off([], "Rewards are the metrics; leave it out.", None),
    **group(
        "Rewards are the only metrics of an evaluation; leave it out.",
        prediction_loss_only=False, batch_eval_metrics=False, include_inputs_for_metrics=False,
    ),
    **group("Use eval_strategy='steps' with eval_steps.", eval_delay=0, eval_on_start=False),
    **group(
        "Evaluation keeps rewards alone, so there is nothing to gather; leave it out.",
        eval_do_concat_batches=True, eval_use_gather_object=False, eval_accumulation_steps=None,
    ),
}

CHECKPOINTS = {
    "resume_from_checkpoint": off(None, "Pass it to trainer.train(resume_from_checkpoint=...).", False),
    "ignore_data_skip": off(False, "A resumed run goes on with the row it stopped at; leave it out."),
    "restore_callback_states_from_checkpoint": off(False, "Keep the state of callbacks yourself; leave it out."),
    "save_only_model": off(False, "Checkpoints can always be resumed; save the model for the adapter alone."),
    "save_on_each_node": off(False, "There is one node; leave it out.", True),
    "save_safetensors": off(True, "Adapters are always saved as safetensors; leave it out."),
    "enable_jit_checkpoint": off(False, "Use a smaller save_steps."),
    **group(
        "Every kept checkpoint is a candidate: compare them by their logged rewards, with save_total_limit=None.",
        load_best_model_at_end=False, metric_for_best_model=None, greater_is_better=None,
    ),
    **group(
        "Nothing is uploaded while training; upload the saved model afterwards.",
        push_to_hub=False, hub_token=None, hub_private_repo=None, hub_model_id=None, hub_strategy="every_save",
        hub_always_push=False, hub_revision=None, push_to_hub_model_id=None, push_to_hub_organization=None,
        push_to_hub_token=None,
    ),
}

DEVICES = {
    "use_cpu": off(False, "Training runs on the device that the model was loaded on."),
    "no_cuda": off(False, "Training runs on the device that the model was loaded on."),
    "use_mps_device": off(False, "Training runs on the device that the model was loaded on."),
    "full_determinism": off(False, "Call torch.use_deterministic_algorithms(True) yourself; seed fixes every draw."),
    "local_rank": off(-1, "There is one process; leave it out.", 0),
    "average_tokens_across_devices": off(True, "There is one device; leave it out.", False),
    "ddp_find_unused_parameters": off(None, "There is one device; leave it out.", False, True),
    "ddp_broadcast_buffers": off(None, "There is one device; leave it out.", False, True),
    "ddp_static_graph": off(None, "There is one device; leave it out.", False, True),
    "fsdp": off(None, "There is one device; leave it out.", "", []),
    "fsdp_config": off(None, "There is one device; leave it out.", {}),
    "accelerator_config": off(None, "accelerate is not used for training; leave it out.", {}),
    **group(
        "There is one device; leave it out.",
        ddp_bucket_cap_mb=None, ddp_backend=None, ddp_timeout=1800, deepspeed=None, parallelism_config=None,
        fsdp_min_num_params=0, fsdp_transformer_layer_cls_to_wrap=None, mp_parameters="", ray_scope="last",
        tpu_num_cores=None, tpu_metrics_debug=False,
    ),
}

TRANSFORMERS_4 = {
    "per_gpu_train_batch_size": off(None, "Use per_device_train_batch_size."),
    "per_gpu_eval_batch_size": off(None, "Use per_device_eval_batch_size."),
    **group(
        "Use bf16 or fp16.", fp16_opt_level="O1", fp16_backend="auto", half_precision_backend="auto"
    ),
    **group(
        "transformers has dropped it; leave it out.",
        jit_mode_eval=False, past_index=-1, torchdynamo=None, use_legacy_prediction_loop=False,
    ),
}

FIXED: dict[str, Fixed] = {
    **LOSS, **MODEL, **GENERATION, **VLLM, **UNSLOTH, **OPTIMIZER, **PRECISION_AND_MEMORY, **DATA, **RECORDS,
    **EVALUATION, **CHECKPOINTS, **DEVICES, **TRANSFORMERS_4,
}
