"""Settings of GRPO: values, their contradictions and what follows from them."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tables import not_refused

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.losses.loss_types import LOSS_TYPES

NOTEBOOK = {
    "learning_rate": 5e-6, "adam_beta1": 0.9, "adam_beta2": 0.99, "weight_decay": 0.1, "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine", "optim": "paged_adamw_8bit", "logging_steps": 1, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1, "num_generations": 6, "max_prompt_length": 256, "max_completion_length": 200,
    "max_steps": 250, "save_steps": 250, "max_grad_norm": 0.1, "report_to": "none", "output_dir": "outputs",
}
BAD_VALUES = [  # an option, a bad value, and what the message says is allowed
    ("loss_type", "ppo", "dr_grpo"), ("advantage_estimator", "gea", "rloo"), ("kl_estimator", "k4", "k3"),
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
    ("temperature", -0.5, "1e-6 or above"),
    *[("seed", wrong, "from -2**63 to 2**64 - 1") for wrong in (2**64, -(2**63) - 1, True)],
    ("learning_rate", "1e-5", "0 or above"), ("save_steps", None, "at least 1"), ("logging_steps", True, "at least 1"),
]
WITHOUT_MEANING = [
    ("num_train_epochs", 0), ("num_train_epochs", -1), ("epsilon_high", -0.1), ("adam_beta1", 1.5), ("adam_beta2", -1),
    ("adam_epsilon", -1), ("delta", float("nan")), ("learning_rate", float("inf")), ("beta", float("inf")),
    ("temperature", float("inf")), ("warmup_ratio", 3.0), ("num_generations", 2.5),
    ("per_device_train_batch_size", 1.5), ("max_completion_length", 10.5),
    *((name, True) for name in ("learning_rate", "beta", "temperature", "max_steps", "top_p")),
]
CONTRADICTIONS = [
    ({"score_while_sampling": "yes"}, "score_while_sampling is 'yes'; it must be True or False, or None"),
    ({"loss_type": None}, f"{', '.join(LOSS_TYPES)}; leave it out for 'dapo'"),
    ({"beta": None}, "beta is None; it must be 0 or above; leave it out for 0.0"),
    ({"bf16": True, "fp16": True}, "bf16 and fp16 are both set; set one"),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio and warmup_steps are both set; set one"),
    ({"delta": 1.1}, "delta is 1.1; it must be above 1 + epsilon_high = 1.2"),
    ({"steps_per_generation": 6, "gradient_accumulation_steps": 4},
     "steps_per_generation is 6; it must be a multiple of gradient_accumulation_steps (4)"),
    ({"epsilon": 0.2, "loss_type": "reinforce"}, "epsilon is 0.2, and loss_type 'reinforce' does not use it"),
    ({"generation_batch_size": 12}, "generation_batch_size is 12; it must be a multiple of per_device_train_"),
    ({"generation_batch_size": 16, "steps_per_generation": 2}, "and stand without steps_per_generation, which"),
    ({"advantage_estimator": "passk", "pass_at_k": 8}, "pass_at_k is 8; it must be at least 1 and below num_gener"),
    ({"advantage_estimator": "passk", "pass_at_k": 0}, "pass_at_k is 0; it must be at least 1 and below"),
    ({"advantage_estimator": "rloo", "scale_rewards": "group"}, "advantage_estimator 'rloo' with"),
    ({"replay_buffer_size": 8, "vllm_importance_sampling_correction": False}, "replayed completions are of an older"),
    ({"reward_weights": 1.0}, "reward_weights is 1.0; it must be a list of finite numbers, or None"),
    ({"reward_weights": [1.0, float("nan")]}, "reward_weights is [1.0, nan]; it must be a list of finite numbers"),
    ({"lam": 0.9}, "lam is 0.9, a setting of PPO's critic, and advantage_estimator is 'grpo'; set"),
    ({"advantage_estimator": "rloo", "cliprange_value": None}, "cliprange_value is None, a setting of PPO's critic"),
    *[({"advantage_estimator": "gae", name: value}, f"{name} is {value!r}, which goes by rewards that differ within a")
      for name, value in (("dynamic_sampling_rounds", 2), ("difficulty_pools", True), ("replay_buffer_size", 4))],
    ({"advantage_estimator": "gae", "teacher": "base"}, "the loss has a teacher's term; leave one of them out"),
    ({"advantage_estimator": "gae", "train_while_sampling": True}, "and advantage_estimator='gae' needs all of them"),
    ({"advantage_estimator": "gae", "turn_discount": 0.9}, "the advantages are those of gae; take"),
    ({"advantage_estimator": "gae", "scale_rewards": "group"}, "advantage_estimator 'gae' with"),
    ({"advantage_estimator": "gae", "cliprange_value": 0}, "cliprange_value is 0; it must be above 0, or None"),
    ({"advantage_estimator": "gae", "lam": 1.5}, "lam is 1.5; it must be a share, from 0 to 1"),
    ({"parity_steps": -1}, "parity_steps is -1"), ({"parity_bound": 0.0}, "parity_bound is 0.0"),
]


def test_the_completions_of_a_generation_say_its_steps() -> None:
    config = GRPOConfig(generation_batch_size=32, gradient_accumulation_steps=2)
    assert (config.steps_per_generation, config.optimizer_steps_per_generation) == (4, 2)
    assert replace(config, seed=1).steps_per_generation == 4


@pytest.mark.parametrize(("written", "meant"), [
    ({"dataset_num_proc": 2, "dataloader_num_workers": 4}, {}), ({"top_p": None}, {}),  # which keeps every token
    ({"evaluation_strategy": "steps", "logging_steps": 7}, {"eval_strategy": "steps", "logging_steps": 7}),
    ({"eval_strategy": "steps", "logging_steps": 7}, {"eval_strategy": "steps", "logging_steps": 7, "eval_steps": 7}),
    ({"scale_rewards": False}, {"scale_rewards": "none"}), ({"scale_rewards": True}, {"scale_rewards": "group"}),
    *[({"output_dir": folder}, {"output_dir": str(Path.home() / "run")}) for folder in ("~/run", Path("~/run"))],
    *[({name: '{"a": 1}'}, {name: {"a": 1}}) for name in ("chat_template_kwargs", "model_init_kwargs")],  # as parsers
])
def test_settings_in_other_words_mean_the_same(written: dict[str, Any], meant: dict[str, Any]) -> None:
    assert GRPOConfig(**written) == GRPOConfig(**meant)


def test_generations_within_one_optimizer_step_are_sampled_together() -> None:
    config = GRPOConfig(per_device_train_batch_size=1, gradient_accumulation_steps=32, generation_batch_size=4,
                        num_generations=4)  # as TRL's browsergym_llm.py
    assert (config.steps_per_generation, config.optimizer_steps_per_generation) == (4, 1)
    assert config.prompts_per_generation == config.prompts_per_step == 8


def test_unknown_options_are_refused_with_the_closest_names() -> None:
    with pytest.raises(TypeError, match="no option 'num_generation'; did you mean num_generations"):
        GRPOConfig(num_generation=4)
    with pytest.raises(TypeError, match="no option 'importance_sampling_levl'; did you mean importance_sampling_level"):
        GRPOConfig(importance_sampling_levl="token")
    with pytest.raises(TypeError, match="no option 'qqqqq'") as refusal:
        GRPOConfig(qqqqq=1)
    assert "did you mean" not in str(refusal.value)
    with pytest.raises(TypeError, match=r"evaluation_strategy.*the same option"):
        GRPOConfig(evaluation_strategy="steps", eval_strategy="no")


def test_a_typical_notebook_runs_unchanged_and_only_rounding_is_told() -> None:
    config = GRPOConfig(**NOTEBOOK)
    assert config.completions_per_step == 6 and config.prompts_per_step == 1
    assert "= 1 completions" in config.rounding() and "each step uses 6" in config.rounding()
    for name, value in NOTEBOOK.items():
        assert getattr(config, name) == ([value] if name == "report_to" else value)
    config = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=8)
    assert config.rounding() is None
    assert (config.completions_per_step, config.optimizer_steps_per_generation) == (16, 2)
    assert config.prompts_per_generation == 4


def test_bad_values_are_refused_with_what_was_got_and_what_is_allowed() -> None:
    rows: list[Any] = [({name: value}, (name, str(value), allowed)) for name, value, allowed in BAD_VALUES]
    rows += [({name: value}, f"{name} is {value}") for name, value in WITHOUT_MEANING]
    assert not_refused(lambda given: GRPOConfig(**given), rows) == []


def test_contradictions_are_refused() -> None:
    assert not_refused(lambda given: GRPOConfig(**given), CONTRADICTIONS) == []


def test_a_kl_term_is_in_the_loss_and_in_the_reward_too_or_in_neither() -> None:
    assert GRPOConfig(advantage_estimator="reinforce++", beta=0.1).kl_in_reward
    assert not GRPOConfig(advantage_estimator="reinforce++").kl_in_reward
    assert not GRPOConfig(advantage_estimator="reinforce++_baseline", beta=0.1).kl_in_reward


def test_one_completion_of_a_prompt_is_enough_for_estimators_that_do_not_compare_it() -> None:
    config = GRPOConfig(advantage_estimator="gae", num_generations=1, learning_rate=1e-5, beta=0.1)
    assert config.critic_rate == pytest.approx(1e-4) and config.kl_in_reward and config.completions_per_step == 8
    given = {1e-6: 1e-5, 5e-4: 1e-3, 3e-3: 3e-3}  # too fast a critic learns nothing
    assert {rate: replace(config, learning_rate=rate).critic_rate for rate in given} == pytest.approx(given)
    assert replace(config, critic_learning_rate=0.0).critic_rate == 0
    for estimator in ("reinforce++", "remax"):
        assert GRPOConfig(advantage_estimator=estimator, num_generations=1).prompts_per_step == 8
        with pytest.raises(ValueError, match="skips rows whose completions all earn the same, and num_generations"):
            GRPOConfig(advantage_estimator=estimator, num_generations=1, difficulty_pools=True)
    with pytest.raises(ValueError, match=r"num_generations is 1; it must be a whole number, 2 or more.*or 'gae'"):
        GRPOConfig(num_generations=1)


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
    beside = GRPOConfig(vllm_sampling_params=SamplingParams(stop=["x"]), top_p=0.9, top_k=5, min_p=0.1).sampling(None)
    assert (beside.stop, beside.top_p, beside.top_k, beside.min_p) == (["x"], 0.9, 5, 0.1)


def test_records_hold_every_field_and_make_the_same_settings() -> None:
    config = GRPOConfig(**NOTEBOOK, vllm_sampling_params=SamplingParams(min_p=0.1, stop=["</s>"]))
    assert [*config.to_dict()] == [field.name for field in fields(GRPOConfig)]
    assert GRPOConfig(**config.to_dict()) == config


def test_settings_from_numpy_and_torch_and_whole_floats_are_plain_numbers_that_checkpoints_can_hold() -> None:
    config = GRPOConfig(
        max_steps=np.int64(3), learning_rate=np.float32(0.5), reward_weights=np.array([1.0, 2.0]),
        num_generations=torch.tensor(4), disable_dropout=np.bool_(True), chat_template_kwargs={"budget": np.int64(3)},
        max_completion_length=8.0, vllm_sampling_params={"min_p": np.float32(0.5), "max_tokens": 8.0})
    config.save_steps = np.int32(5)
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert (config.max_steps, config.learning_rate, config.reward_weights) == (3, 0.5, [1.0, 2.0])
    assert type(config.max_completion_length) is type(config.vllm_sampling_params.max_tokens) is int


def test_a_value_of_another_type_is_refused_by_the_name_of_its_setting() -> None:
    whole, truth, words = "a whole number", "True or False", "a dict"
    wrong = [
        ("output_dir", "", "a folder's name"), ("output_dir", 5, "a folder's name"), ("max_steps", "10", whole),
        ("max_steps", 1.5, whole), ("seed", 1.5, whole), ("seed", "abc", whole), ("run_name", 5, "a text"),
        *((name, "x", words) for name in ("chat_template_kwargs", "lr_scheduler_kwargs", "model_init_kwargs")),
        *((name, "yes", truth) for name in ("bf16", "use_vllm", "log_completions", "shuffle_dataset", "preflight",
                                            "overwrite_output_dir", "gradient_checkpointing", "disable_tqdm")),
        ("mask_truncated_completions", 3, truth), ("report_to", 5, "a name, or a list of names"),
        ("hub_model_id", "a/b/c", "OWNER/NAME"), ("chat_template_kwargs", {"tokenize": True}, "a dict of the chat"),
    ]
    assert not_refused(lambda given: GRPOConfig(**given), [
        ({name: value}, f"{name} is {value!r}; it must be {words}") for name, value, words in wrong]) == []
    with pytest.raises(TypeError, match=r"sampling_params is a .*str.*; pass a lowmem_grpo\.SamplingParams"):
        GRPOConfig(vllm_sampling_params="abc")
    with pytest.raises(ValueError, match="a step of 100,000,000 completions; at most 1,000,000 are allowed"):
        GRPOConfig(per_device_train_batch_size=100_000_000)
