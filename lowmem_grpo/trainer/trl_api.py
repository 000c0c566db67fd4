"""The attributes and methods of TRL's and transformers' trainers that ours have, and advice for the missing ones."""

import json
import logging
from operator import attrgetter
from typing import Any

from lowmem_grpo.models import hub
from lowmem_grpo.runs.files import write_card
from lowmem_grpo.runs.records import replace_text
from lowmem_grpo.trainer.loop import Trainer
from lowmem_grpo.utils import UnsupportedError, time_text

logger = logging.getLogger(__name__)
LOOP = "the visible loop is next_groups(), update(groups), evaluate() and save_state()"
ROWS = "there are no data loaders: trainer.source.take(n) draws the next rows, and trainer.train_dataset has all"
LOSS = "the loss is computed on packed sequences: trainer.forward_backward(groups) gives its gradient and its metrics"
MADE = "the trainer makes its optimizer itself, or takes optimizers=(optimizer, scheduler)"
SAMPLE = ("sample with model.fast_generate(prompts, lora_request=model.current_lora()), or measure with "
          "trainer.evaluate()")
ONE = "every process has the whole model on one device"
PLAY = "the engine samples: say otherwise with rollout_func=, tools= or environment_factory="
INSIDE = "our loop has no such part; a callback (add_callback) is called at its events, and " + LOOP
LOGGED = "a reward function that names log_metric or log_extra as a parameter gets it"
NEVER_CALLED = {
    **dict.fromkeys(("_build_accelerator_args", "_clip_grad_norm", "_determine_best_metric", "_evaluate",
                     "_finalize_training", "_finish_current_push", "_get_grad_norm", "_get_learning_rate",
                     "_get_num_items_in_batch", "_get_output_dir", "_has_mixed_mesh_grads", "_hp_search_setup",
                     "_init_training_state", "_inner_training_loop", "_issue_warnings_after_load", "_load_best_model",
                     "_load_callback_state", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
                     "_load_rng_state", "_load_scaler", "_maybe_log_save_evaluate", "_mixed_mesh_grad_norm",
                     "_move_model_to_device", "_prepare_context_parallel_inputs", "_prepare_for_training",
                     "_push_from_checkpoint", "_report_to_hp_search", "_run_epoch", "_save", "_save_checkpoint",
                     "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "_send_telemetry",
                     "_sync_replicated_trainable_parameters", "_track_num_input_tokens", "_tune_save_checkpoint",
                     "_update_auto_batch_size", "_validate_args", "_wrap_model"), INSIDE),
    **dict.fromkeys(("training_step", "evaluation_loop", "prediction_loop", "get_batch_samples", "call_model_init",
                     "create_accelerator_and_postprocess", "set_initial_training_values", "store_flos",
                     "floating_point_ops", "hyperparameter_search"), LOOP),
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "num_examples",
                     "_get_dataloader", "_get_train_sampler", "_get_eval_sampler", "_get_collator_with_removed_columns",
                     "_prepare_dataset", "_prepare_input", "_prepare_inputs", "_reject_skip_prepare_without_labels",
                     "_remove_unused_columns", "_set_signature_columns_if_needed", "build_tokenized_answer",
                     "tokenize_row"), ROWS),
    **dict.fromkeys(("compute_loss", "_compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager",
                     "get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights",
                     "_get_per_token_logps_and_entropies", "compute_ref_log_probs", "concatenated_forward",
                     "concatenated_inputs", "get_batch_logps", "get_batch_loss_metrics", "odds_ratio_loss"), LOSS),
    **dict.fromkeys(("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_optimizer_group",
                     "get_optimizer_cls_and_kwargs", "get_decay_parameter_names"), MADE),
    **dict.fromkeys(("predict", "prediction_step", "generate_from_model"), SAMPLE),
    **dict.fromkeys(("_generate", "_generate_and_score_completions", "_generate_single_turn", "_get_tool_suffix_ids",
                     "_tokenize_prompts", "_tool_call_loop"), PLAY),
    **dict.fromkeys(("_log_metric", "_log_completion_extra", "store_metrics"), LOGGED),
    **dict.fromkeys(("get_cp_size", "get_sp_size", "get_tp_size"), ONE),
    "init_hf_repo": "push_to_hub makes the repository",
}
NOT_HERE = NEVER_CALLED | {
    "data_collator": ROWS, **dict.fromkeys(("is_fsdp_enabled", "is_deepspeed_enabled"), ONE),
    **dict.fromkeys(("_metrics", "_logs", "_textual_logs"), LOGGED),
    **dict.fromkeys(("compute_metrics", "preprocess_logits_for_metrics"), "SFTTrainer and those on preferences "
                    "take it when they are made"),
    **dict.fromkeys(("compute_loss_func", "loss_is_scaled_for_ga"), LOSS), "rollout_func": PLAY,
    **dict.fromkeys(("epsilon_low", "epsilon_high"), "the loss reads args.epsilon and args.epsilon_high"),
    "generation_config": "sampling is set in args, as in temperature and top_p, before the trainer is made",
    "ref_model": "the reference is the same model with another adapter, or none: with trainer.policy.reference(): ...",
    **dict.fromkeys(("llm", "vllm_generation", "vllm_client"), "the engine that samples is trainer.engine; a "
                    "rollout_func samples with lowmem_grpo.generate_rollout_completions(trainer, prompts)"),
}
NEW = "make a new trainer with the other one"
MADE_ONCE = {  # attributes that the parts of a trainer have read, and how to have another one
    **dict.fromkeys(("model", "tokenizer", "state", "policy", "learner"), NEW),
    "args": "set its fields, as in trainer.args.beta = 0.1, or make a new trainer",
    "train_dataset": "make a new trainer with the other rows",
    "eval_dataset": "pass the other rows to evaluate(eval_dataset=...), or make a new trainer",
    **dict.fromkeys(("optimizer", "lr_scheduler"), "make a new trainer with optimizers=(optimizer, scheduler)"),
}
SETTINGS = (  # attributes of TRL's trainers, which a `rollout_func` reads
    "num_generations", "num_generations_eval", "temperature", "top_p", "top_k", "min_p", "max_completion_length",
    "max_prompt_length", "chat_template_kwargs", "use_vllm", "beta", "num_iterations", "loss_type", "scale_rewards",
    "max_tool_calling_iterations", "mask_truncated_completions", "importance_sampling_level", "top_entropy_quantile",
    "delta", "off_policy_mask_threshold", "multi_objective_aggregation", "steps_per_generation", "log_completions",
    "num_completions_to_print", "log_unique_prompts",
)


class NotHereError(AttributeError, UnsupportedError):
    """An attribute that other trainers have and ours lack; the message says what to use instead."""


class NoLoader:
    """The train_dataloader and eval_dataloader that callbacks get; any use of them is refused with advice."""

    def refuse(self, *_: Any) -> Any:
        raise NotHereError(ROWS)

    __getattr__ = __len__ = __iter__ = refuse

    def __bool__(self) -> bool:
        return False  # there is none


class Processes:
    """The `trainer.accelerator`, reduced to the attributes that scripts commonly read."""

    def __init__(self, device: Any, ranks: Any) -> None:
        self.device, self.ranks = device, ranks
        self.num_processes, self.process_index = ranks.count, ranks.rank
        self.local_process_index = ranks.process.local
        self.is_main_process, self.is_local_main_process = ranks.leads, not ranks.process.local
        self.is_last_process = ranks.rank == ranks.count - 1

    def print(self, *values: Any, **options: Any) -> None:
        if self.is_main_process:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        self.ranks.meet("wait_for_everyone()")

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        return model

    def __getattr__(self, name: str) -> Any:
        raise NotHereError(f"trainer.accelerator has no {name!r} here: accelerate is not used for training; {ONE}")


class TrlApi(Trainer):
    """The base class of public trainers, with attributes and methods of TRL's and transformers' trainers."""

    event_details = {"train_dataloader": NoLoader(), "eval_dataloader": NoLoader()}
    aux_loss_enabled = False  # TRL adds the auxiliary loss of a mixture of experts to its own losses
    given_rows: Any  # as they were passed
    given_eval_rows: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError if a subclass defines a method that TRL's or transformers' loop calls and ours does not."""
        super().__init_subclass__(**options)
        if useless := [name for name in NEVER_CALLED if hasattr(cls, name)]:
            raise TypeError("; ".join(f"{cls.__name__} defines {name}, which is never called here: {NOT_HERE[name]}"
                                      for name in useless))

    def __setattr__(self, name: str, value: Any) -> None:
        is_absent = value is None or value is False
        if name in NEVER_CALLED or (name in NOT_HERE and name[0] != "_" and not is_absent):
            raise NotHereError(f"{type(self).__name__}.{name} is never called here: {NOT_HERE[name]}")
        if name in SETTINGS and hasattr(getattr(self, "args", None), name):
            return setattr(self.args, name, value)  # TRL's loss reads it here at each step, and ours there
        is_made = "saver" in vars(self)  # what a subclass sets before is replaced when the trainer is made
        made = is_made and name in MADE_ONCE and name in vars(self)
        if made or getattr(getattr(type(self), name, None), "fset", name) is None:  # a property that cannot be set
            if not is_made or value is not getattr(self, name):
                raise UnsupportedError(f"{type(self).__name__}.{name} cannot be changed; {MADE_ONCE.get(name, NEW)}")
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS and hasattr(self.args, name):
            return getattr(self.args, name)
        if name in NOT_HERE:
            raise NotHereError(f"{type(self).__name__} has no {name}: {NOT_HERE[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    processing_class = property(attrgetter("tokenizer"))
    model_wrapped = property(attrgetter("model"))  # nothing is wrapped around it
    optimizer = property(attrgetter("learner.optimizer"))
    lr_scheduler = property(attrgetter("learner.scheduler"))
    callback_handler = property(attrgetter("callbacks"))
    train_dataset = property(attrgetter("given_rows"))
    eval_dataset = property(attrgetter("given_eval_rows"))  # evaluate(eval_dataset=...) takes others

    @property
    def accelerator(self) -> Processes:
        """An object like accelerate's Accelerator, with facts about the run's processes."""
        return Processes(self.learner.policy.device, self.ranks)

    @property
    def hub_model_id(self) -> str:
        """The repository that `push_to_hub` uploads to, from the settings, or else the name of output_dir."""
        return self.args.hub_model_id or self.run_dir.resolve().name

    def is_world_process_zero(self) -> bool:
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        return self.state.is_local_process_zero

    def get_learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_num_trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_total_train_batch_size(self, *_: Any) -> int:
        return self.args.completions_per_step

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a class is instantiated first."""
        self.callbacks.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, passed as an object or by its class; None if it was not added."""
        return self.callbacks.pop_callback(callback)

    remove_callback = pop_callback

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter and the tokenizer to a folder, by default output_dir."""
        self.model.save_pretrained(str(output_dir or self.run_dir))

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None,
                          tags: Any = None, **_: Any) -> None:
        """Write README.md into output_dir: what was trained, on what, and for how long. One of another hand stays."""
        write_card(self.run_dir, self.model.card(title=model_name, data=dataset_name, tags=tags))

    def push_to_hub(self, commit_message: str | None = None, blocking: bool = True, token: str | None = None,
                    revision: str | None = None, private: bool = True, dataset_name: str | None = None,
                    model_name: str | None = None, tags: Any = None, **_: Any) -> str:
        """Upload the adapter, the tokenizer and a card to `hub_model_id`; return the address of the commit. The files
        stay in output_dir/adapter. HubError if the hub refuses. `blocking` has no effect."""
        if revision is not None:
            raise ValueError(f"revision is {revision!r}; only the main branch is written, leave it out")
        folder = self.run_dir / "adapter"
        self.save_model(str(folder))
        write_card(folder, self.model.card(title=model_name, data=dataset_name, tags=tags))
        self.notify("on_push_begin")
        return hub.push(folder, hub.full_name(self.hub_model_id, token), private, hub.client(token), commit_message)

    def upload(self) -> None:
        """Push the adapter of a run. If the hub refuses, only log the error, since the run is finished and saved."""
        try:
            logger.info("uploaded to %s", self.push_to_hub())
        except hub.HubError as error:
            logger.error("push_to_hub: %s", error)

    def end(self) -> None:
        """Do nothing: train() has finished the trackers, and processes leave their group when they end."""

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics for display: durations as "2 h 3 min", floats with four places."""
        return {name: time_text(value) if name.endswith(("_runtime", "_time")) else round(value, 4)
                if isinstance(value, float) else value for name, value in metrics.items()}

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        print(f"***** {split} metrics *****")
        for name, value in sorted(self.metrics_format(metrics).items()):
            print(f"  {name} = {value}")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to output_dir/SPLIT_results.json, and add them to all_results.json if `combined`."""
        path = self.run_dir / "all_results.json"
        known = json.loads(path.read_text("utf-8")) if combined and path.is_file() else {}
        for name, content in ((f"{split}_results.json", metrics), (path.name, known | metrics))[: 1 + combined]:
            replace_text(self.run_dir / name, json.dumps(content, indent=4, sort_keys=True, default=str))
