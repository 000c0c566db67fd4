"""What is known of the options of other libraries."""

import dataclasses
from typing import Any

import pytest
from tables import not_refused
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from lowmem_grpo import GRPOConfig, SFTConfig
from lowmem_grpo.config.unsupported import ONE_MEANING, OTHER, Fixed, transformers_defaults

both = pytest.mark.parametrize("settings", [GRPOConfig, SFTConfig])


def own_fields(settings: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(settings)}


def refused_by(settings: Any) -> dict[str, Fixed]:
    return {name: fixed for name, fixed in settings.unsupported.items() if name not in own_fields(settings)}


@both
def test_no_option_has_two_fates_and_old_names_mean_options(settings: Any) -> None:
    own = own_fields(settings)
    assert {name for name in own if settings.unsupported.get(name, OTHER) is not OTHER} == own & {*ONE_MEANING}
    assert {*settings.renamed.values()} <= own and not settings.renamed.keys() & (own | settings.unsupported.keys())


@both
def test_values_that_ask_for_what_happens_anyway_are_accepted_and_are_read(settings: Any) -> None:
    refused = refused_by(settings)
    assert settings(**{name: fixed.allowed(name)[0] for name, fixed in refused.items()}) == settings()
    for name, fixed in refused.items():
        first, *others = fixed.allowed(name)
        assert all(getattr(settings(**{name: value}), name) == first for value in (first, *others)), name


@both
@pytest.mark.parametrize("value", ["something else", {"a": 1}])
def test_refused_options_say_name_value_allowed_values_and_advice(settings: Any, value: object) -> None:
    refused = {name: fixed for name, fixed in refused_by(settings).items() if not fixed.any_value}
    rows = [({name: value}, (f"{name}={value!r}", fixed.advice, *map(repr, fixed.allowed(name))))
            for name, fixed in refused.items()]
    assert not_refused(lambda given: settings(**given), rows) == []
    assert [name for name, fixed in refused.items() if not fixed.advice.endswith(".")] == []
    assert settings is GRPOConfig or [name for name, fixed in refused.items() if "GRPO" in fixed.advice] == []


@both
def test_tokens_are_averaged_over_all_processes(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(average_tokens_across_devices=False) == settings()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert settings(average_tokens_across_devices=True) == settings()
    with pytest.raises(ValueError, match=r"=False is not supported \(allowed: True\)\. The tokens of all"):
        settings(average_tokens_across_devices=False)


def test_the_defaults_in_our_file_are_those_of_the_class() -> None:
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    computed = {"optim", "include_for_metrics"}  # fields of ours, and a factory
    assert transformers_defaults().keys() == fields.keys() - computed
    assert transformers_defaults() == {name: fields[name].default for name in fields.keys() - computed}


@both
def test_an_option_of_transformers_that_no_table_names_may_have_its_default_or_be_off(settings: type) -> None:
    assert settings(ddp_timeout=1800, torch_compile=False, fsdp="", skip_memory_metrics=False) == settings()
    assert settings().ddp_timeout == 1800
    with pytest.raises(ValueError, match=r"hub_token='hf_\.\.\.' is not supported"):
        settings(hub_token="hf_secret")
    with pytest.raises(ValueError, match=r"ddp_timeout=5 is not supported \(allowed: 1800\)\. .*leave it out"):
        settings(ddp_timeout=5)


@both
def test_options_of_data_loaders_are_accepted_where_they_change_nothing(settings: Any) -> None:
    for harmless in (AcceleratorConfig(), {"dispatch_batches": False, "even_batches": False}, None):
        assert settings(accelerator_config=harmless) == settings()
    for other in (AcceleratorConfig(split_batches=True), {"gradient_accumulation_kwargs": {"num_steps": 2}}):
        with pytest.raises(ValueError, match="leave split_batches and gradient_accumulation_kwargs out of it"):
            settings(accelerator_config=other)
    assert settings(pad_to_multiple_of=8) == settings() and settings(no_cuda=True).use_cpu
    assert settings(cast_lm_head_to_fp32=True) == settings()


@both
def test_an_unknown_option_is_named_with_the_closest_ones_each_once(settings: Any) -> None:
    with pytest.raises(TypeError, match=r"did you mean learning_rate( or (embedding|critic)_learning_rate)?\?$"):
        settings(learning_rat=1e-3)


@both
def test_an_option_that_is_set_afterwards_is_refused_as_the_constructor_refuses_it(settings: Any) -> None:
    made = settings()
    made.learning_rate, made.gradient_checkpointing, made.no_cuda, made.dataset_num_proc = 1e-3, True, True, 4
    assert (made.learning_rate, made.gradient_checkpointing, made.use_cpu) == (1e-3, True, True)
    made.fsdp = None  # as it is
    for name, value in (("fsdp", "full_shard"), ("trust_remote_code", True), ("adafactor", True)):
        with pytest.raises(ValueError, match=f"{name}={value!r} is not supported"):
            setattr(made, name, value)
