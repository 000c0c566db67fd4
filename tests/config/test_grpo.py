"""Settings: every option of TRL is honoured or refused by name, and defaults are TRL's."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
from tables import not_refused

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams

TRL_FIELDS = [
    line for line in (Path(__file__).parents[1] / "support" / "trl_1_16_grpo_config_fields.txt")
    .read_text().splitlines()
    if not line.startswith("#")
]
OWN = {field.name: field.default for field in fields(GRPOConfig)}
ELSEWHERE = {"max_prompt_length", "overwrite_output_dir", "warmup_ratio", "vllm_sampling_params",  # Unsloth, older TRL
             "max_tokens_per_micro_batch", "logits_chunk", "reward_timeout", "nothing_to_learn_steps", "kl_reference",
            
             "truncate_prompts", "score_while_sampling", "parity_steps", "parity_bound", "nonfinite_steps",
             "max_turns", "max_turn_tokens", "history", "environment_timeout", "episode_timeout", "max_tool_tokens",
             "turn_discount", "state_weight", "kl_estimator", "advantage_estimator", "pass_at_k", "preflight",
             "dynamic_sampling_rounds", "difficulty_pools", "replay_buffer_size", "replay_max_age",
             "train_while_sampling", "normalize_advantages", "reward_clip_range"}  # the last two are RLOOConfig's
TRL_DEFAULTS = {
    "run_name": None, "trust_remote_code": False, "vllm_mode": "colocate", "seed": 42, "shuffle_dataset": True,
    "chat_template_kwargs": None, "max_steps": -1,
    "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "steps_per_generation": None, "num_iterations": 1, "num_generations": 8, "max_completion_length": 512,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "use_vllm": False, "loss_type": "dapo",
    "beta": 0.0, "use_bias_correction_kl": True, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
    "entropy_target": 0.2, "off_policy_mask_threshold": None, "vllm_importance_sampling_clip_min": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "reward_weights": None, "mask_truncated_completions": False, "learning_rate": 1e-6,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "optim": "adamw_torch_fused", "bf16": None,
    "metric_for_best_model": None, "greater_is_better": None, "load_best_model_at_end": False, 
    "model_init_kwargs": None, "push_to_hub": False, "hub_model_id": None,
    "project": "huggingface", "trackio_space_id": None, "report_to": "none", "log_completions": False,
    "save_strategy": "steps", "eval_strategy": "no", "eval_steps": None, "per_device_eval_batch_size": 8,
    "num_generations_eval": None, "data_seed": None, "disable_dropout": False, "use_cpu": False, "log_level": "passive",
    "logging_first_step": False, "eval_on_start": False, "lr_scheduler_kwargs": None, "num_completions_to_print": None,
    "log_unique_prompts": False, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
    "vllm_max_model_length": None, "generation_batch_size": None,
}
OF_THE_CHOICE = {  # TRL's defaults of options that are None here: that of the loss type or of the estimator
    "epsilon": 0.2, "epsilon_high": None, "delta": None, "importance_sampling_level": "token",
    "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "scale_rewards": "group",
}
OTHER_DEFAULTS = {
    "max_tool_calling_iterations": None, "vllm_gpu_memory_utilization": None,
    "disable_tqdm": None, "output_dir": "outputs", "fp16": None,
    "gradient_checkpointing": None, "logging_steps": 1, "save_steps": 100, "save_total_limit": 3,
    "vllm_importance_sampling_correction": None, "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0, **dict.fromkeys(OF_THE_CHOICE),
}
OWN_DEFAULTS = {"cispo": {"epsilon_high": 5.0}}  # by design: TRL's shrinks every gradient to a fifth
NOTEBOOK = {
    "learning_rate": 5e-6, "adam_beta1": 0.9, "adam_beta2": 0.99, "weight_decay": 0.1, "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine", "optim": "paged_adamw_8bit", "logging_steps": 1, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1, "num_generations": 6, "max_prompt_length": 256, "max_completion_length": 200,
    "max_steps": 250, "save_steps": 250, "max_grad_norm": 0.1, "report_to": "none", "output_dir": "outputs",
}
BAD_VALUES = [  # an option, a bad value, and what the message says is allowed
    ("loss_type", "ppo", "dr_grpo"), ("advantage_estimator", "gae", "rloo"), ("kl_estimator", "k4", "k3"),
    ("importance_sampling_level", "word", "sequence"), ("vllm_importance_sampling_mode", "token", "token_mask"),
    ("multi_objective_aggregation", "sum", "normalize_then_sum"), ("top_entropy_quantile", 0, "(0, 1]"),
    ("scale_rewards", "both", "batch"), ("optim", "sgd", "adamw_torch"),
    ("lr_scheduler_type", "reduce_lr_on_plateau", "cosine"), ("save_strategy", "best", "steps"),
    ("eval_strategy", "always", "epoch"), ("log_level", "loud", "warning"), ("report_to", "mlflow", "tensorboard"),
    ("num_generations", 1, "2 or more"), ("num_generations", 0, "2 or more"),
    *[(name, 0, "at least 1") for name in (
        "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "max_completion_length",
        "logging_steps", "save_steps", "steps_per_generation", "eval_steps", "max_prompt_length", "save_total_limit",
        "per_device_eval_batch_size", "num_generations_eval", "max_tokens_per_micro_batch", "logits_chunk",
        "nothing_to_learn_steps", "nonfinite_steps",
    )],
    *[(name, -0.5, "0 or above") for name in (
        "learning_rate", "beta", "epsilon", "weight_decay", "warmup_steps", "entropy_coef",
    )],
    ("off_policy_mask_threshold", 0, "above 0"),
    ("learning_rate", float("nan"), "0 or above"), ("max_grad_norm", 0, "above 0"), ("reward_timeout", 0, "above 0"),
    ("top_p", 0, "(0, 1]"), ("top_p", 1.5, "(0, 1]"), ("top_k", -2, "-1 or 0"), ("min_p", 2.0, "[0, 1]"),
    ("warmup_ratio", -0.5, "from 0 to 1"),
    ("max_steps", 0, "above 0, or -1"), ("max_steps", -2, "above 0, or -1"), ("temperature", 0, "1.0 is usual"),
    ("temperature", -0.5, "above 0"),
    ("learning_rate", "1e-5", "0 or above"), ("save_steps", None, "at least 1"), ("logging_steps", True, "at least 1"),
]
WITHOUT_MEANING = [
    ("num_train_epochs", 0), ("num_train_epochs", -1), ("epsilon_high", -0.1), ("adam_beta1", 1.5), ("adam_beta2", -1),
    ("adam_epsilon", -1), ("delta", float("nan")), ("learning_rate", float("inf")), ("beta", float("inf")),
    ("temperature", float("inf")), ("warmup_ratio", 3.0), ("num_generations", 2.5),
    ("per_device_train_batch_size", 1.5), ("max_completion_length", 10.5),
]
CONTRADICTIONS = [
    ({"score_while_sampling": "yes"}, "score_while_sampling is 'yes'; it must be True or False, or None"),
    ({"loss_type": None}, "vespo, gmpo, rloo, reinforce; leave it out for 'dapo'"),
    ({"beta": None}, "beta is None; it must be 0 or above; leave it out for 0.0"),
    ({"bf16": True, "fp16": True}, "bf16 and fp16 are both set; set one"),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio and warmup_steps are both set; set one"),
    ({"delta": 1.1}, "delta is 1.1; it must be above 1 + epsilon_high = 1.2"),
    ({"delta": 1.5, "epsilon_high": 0.5}, "delta is 1.5; it must be above 1 + epsilon_high = 1.5"),
    ({"steps_per_generation": 6, "gradient_accumulation_steps": 4},
     "steps_per_generation is 6; it must be a multiple of gradient_accumulation_steps (4)"),
    ({"epsilon": 0.2, "loss_type": "reinforce"}, "epsilon is 0.2, and loss_type 'reinforce' does not use it"),
    ({"generation_batch_size": 12}, "generation_batch_size is 12; it must be a multiple of per_device_train_"),
    ({"generation_batch_size": 16, "steps_per_generation": 2}, "and stand without steps_per_generation, which"),
    ({"advantage_estimator": "passk", "pass_at_k": 8}, "pass_at_k is 8; it must be at least 1 and below num_gener"),
    ({"advantage_estimator": "passk", "pass_at_k": 0}, "pass_at_k is 0; it must be at least 1 and below"),
    ({"advantage_estimator": "rloo", "scale_rewards": "group"}, "advantage_estimator 'rloo' with"),
    ({"replay_buffer_size": 8, "vllm_importance_sampling_correction": False}, "replayed completions are of an older"),
    ({"reward_weights": 1.0}, "reward_weights is 1.0; it must be a list of numbers, or None"),
    ({"parity_steps": -1}, "parity_steps is -1"), ({"parity_bound": 0.0}, "parity_bound is 0.0"),
]


def test_fields_that_trl_does_not_have_are_known() -> None:
    assert set(OWN) - set(TRL_FIELDS) == ELSEWHERE


def test_the_completions_of_a_generation_say_its_steps() -> None:
    config = GRPOConfig(generation_batch_size=32, gradient_accumulation_steps=2)
    assert (config.steps_per_generation, config.optimizer_steps_per_generation) == (4, 2)
    assert replace(config, seed=1).steps_per_generation == 4


def test_generations_within_one_optimizer_step_are_sampled_together() -> None:
    config = GRPOConfig(per_device_train_batch_size=1, gradient_accumulation_steps=32, generation_batch_size=4,
                        num_generations=4)  # as TRL's browsergym_llm.py
    assert (config.steps_per_generation, config.optimizer_steps_per_generation) == (4, 1)
    assert config.prompts_per_generation == config.prompts_per_step == 8


def test_defaults_are_trls() -> None:
    assert {name: default for name, default in OWN.items() if name not in ELSEWHERE} == TRL_DEFAULTS | OTHER_DEFAULTS


def test_none_stands_for_something_else_than_trls_default() -> None:
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        config = GRPOConfig(loss_type=loss_type)
        expected = OF_THE_CHOICE | OWN_DEFAULTS.get(loss_type, {})
        assert config.chosen() and config.chosen() == {name: expected[name] for name in config.chosen()}, loss_type
        assert config.scale == OF_THE_CHOICE["scale_rewards"] and config.level == "token", loss_type
        assert {name: getattr(config, name) for name in OF_THE_CHOICE} == dict.fromkeys(OF_THE_CHOICE), loss_type


def test_some_default_of_trl_is_none_of_ours() -> None:
    chosen = [GRPOConfig(loss_type=loss_type).chosen() for loss_type in ("dapo", "sapo", "vespo")]
    assert {"scale_rewards"}.union(*chosen) == set(OF_THE_CHOICE)


def test_how_many_processes_read_the_rows_may_be_asked_for_in_any_number() -> None:
    assert GRPOConfig(dataset_num_proc=2, dataloader_num_workers=4) == GRPOConfig()


def test_no_top_p_keeps_every_token() -> None:
    assert GRPOConfig(top_p=None) == GRPOConfig()  # type: ignore[arg-type]


def test_unknown_options_are_refused_with_the_closest_names() -> None:
    with pytest.raises(TypeError, match="no option 'num_generation'; did you mean num_generations"):
        GRPOConfig(num_generation=4)
    with pytest.raises(TypeError, match="no option 'importance_sampling_levl'; did you mean importance_sampling_level"):
        GRPOConfig(importance_sampling_levl="token")
    with pytest.raises(TypeError, match="no option 'qqqqq'") as refusal:
        GRPOConfig(qqqqq=1)
    assert "did you mean" not in str(refusal.value)


def test_old_names_mean_the_new_ones() -> None:
    assert GRPOConfig(evaluation_strategy="steps").eval_strategy == "steps"


def test_a_typical_notebook_runs_unchanged_and_its_rounding_is_told() -> None:
    config = GRPOConfig(**NOTEBOOK)
    assert config.completions_per_step == 6 and config.prompts_per_step == 1
    assert "= 1 completions" in config.rounding() and "each step uses 6" in config.rounding()
    for name, value in NOTEBOOK.items():
        assert getattr(config, name) == ([value] if name == "report_to" else value)


def test_whole_groups_are_not_rounded() -> None:
    config = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=8)
    assert config.rounding() is None
    assert (config.completions_per_step, config.optimizer_steps_per_generation) == (16, 2)
    assert config.prompts_per_generation == 4


def test_bad_values_are_refused_with_what_was_got_and_what_is_allowed() -> None:
    rows = [({name: value}, (name, str(value), allowed)) for name, value, allowed in BAD_VALUES]
    assert not_refused(lambda given: GRPOConfig(**given), rows) == []


def test_numbers_without_meaning_are_refused() -> None:
    rows = [({name: value}, f"{name} is {value}") for name, value in WITHOUT_MEANING]
    assert not_refused(lambda given: GRPOConfig(**given), rows) == []


def test_an_option_under_two_names_is_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="evaluation_strategy"):
        GRPOConfig(evaluation_strategy="steps", eval_strategy="no")


def test_contradictions_are_refused() -> None:
    assert not_refused(lambda given: GRPOConfig(**given), CONTRADICTIONS) == []


def test_evaluation_steps_follow_logging_steps() -> None:
    assert GRPOConfig(eval_strategy="steps", logging_steps=7).eval_steps == 7


def test_a_kl_term_is_in_the_loss_and_in_the_reward_too_or_in_neither() -> None:
    assert GRPOConfig(advantage_estimator="reinforce++", beta=0.1).kl_in_reward
    assert not GRPOConfig(advantage_estimator="reinforce++").kl_in_reward
    assert not GRPOConfig(advantage_estimator="reinforce++_baseline", beta=0.1).kl_in_reward


def test_old_spellings_of_values_are_understood() -> None:
    config = GRPOConfig(scale_rewards=False, report_to=["wandb", "tensorboard"])
    assert config.scale_rewards == "none" and config.report_to == ["wandb", "tensorboard"]
    assert GRPOConfig(scale_rewards=True).scale_rewards == "group"


def test_sampling_takes_the_options_of_generation() -> None:
    params = GRPOConfig(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_completion_length=33).sampling(seed=1)
    assert replace(params, stop_token_ids=[]) == SamplingParams(
        n=8, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=33, seed=1
    )


def test_sampling_params_give_stop_strings_and_truncation() -> None:
    given = SamplingParams(min_p=0.1, top_k=-1, stop=["</s>"], stop_token_ids=[3], include_stop_str_in_output=True)
    params = GRPOConfig(vllm_sampling_params=given, num_generations=4).sampling(seed=None, n=2)
    assert (params.min_p, params.stop, params.stop_token_ids, params.n) == (0.1, ["</s>"], [3], 2)
    assert params.include_stop_str_in_output and params.max_tokens == 512


def test_records_hold_every_field_and_make_the_same_settings() -> None:
    config = GRPOConfig(**NOTEBOOK, vllm_sampling_params=SamplingParams(min_p=0.1, stop=["</s>"]))
    assert config.to_dict().keys() == OWN.keys()
    assert GRPOConfig(**config.to_dict()) == config


def test_settings_can_be_changed_with_replace() -> None:
    config = replace(GRPOConfig(**NOTEBOOK), seed=1)
    assert config.seed == 1 and config.report_to == ["none"]


def test_a_value_of_another_type_is_refused_by_the_name_of_its_setting() -> None:
    whole, truth, words = "a whole number", "True or False", "a dict"
    wrong = [
        ("output_dir", "", "a folder's name"), ("output_dir", 5, "a folder's name"), ("max_steps", "10", whole),
        ("max_steps", 1.5, whole), ("seed", 1.5, whole), ("seed", "abc", whole), ("run_name", 5, "a text"),
        *((name, "x", words) for name in ("chat_template_kwargs", "lr_scheduler_kwargs", "model_init_kwargs")),
        *((name, "yes", truth) for name in ("bf16", "use_vllm", "log_completions", "shuffle_dataset", "preflight",
                                            "overwrite_output_dir", "gradient_checkpointing", "disable_tqdm")),
        ("mask_truncated_completions", 3, truth), ("report_to", 5, "a name, or a list of names"),
        ("hub_model_id", "a/b/c", "OWNER/NAME"),
    ]
    assert not_refused(lambda given: GRPOConfig(**given), [
        ({name: value}, f"{name} is {value!r}; it must be {words}") for name, value, words in wrong]) == []
    with pytest.raises(TypeError, match=r"sampling_params is a .*str.*; pass a lowmem_grpo\.SamplingParams"):
        GRPOConfig(vllm_sampling_params="abc")
    with pytest.raises(ValueError, match="a step of 100,000,000 completions; at most 1,000,000 are allowed"):
        GRPOConfig(per_device_train_batch_size=100_000_000)
