"""What is known of the options of other libraries."""

import dataclasses

import pytest
from transformers import TrainingArguments

from lowmem_grpo import GRPOConfig, SFTConfig
from lowmem_grpo.config.unsupported import transformers_defaults


def test_the_defaults_in_our_file_are_those_of_the_class() -> None:
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    computed = {"optim", "include_for_metrics"}  # fields of ours, and a factory
    assert transformers_defaults().keys() == fields.keys() - computed
    assert transformers_defaults() == {name: fields[name].default for name in fields.keys() - computed}


@pytest.mark.parametrize("settings", [GRPOConfig, SFTConfig])
def test_an_option_of_transformers_that_no_table_names_may_have_its_default_or_be_off(settings: type) -> None:
    assert settings(ddp_timeout=1800, torch_compile=False, fsdp="", skip_memory_metrics=False) == settings()
    assert settings().ddp_timeout == 1800
    with pytest.raises(ValueError, match=r"ddp_timeout=5 is not supported \(allowed: 1800\)\. .*leave it out"):
        settings(ddp_timeout=5)


@pytest.mark.parametrize(("name", "value", "default", "advice"), [
    ("speculation", "lookup", None, "train_while_sampling"), ("partial_rollouts", True, False, "train_while_sampling"),
    ("extra_generations", 2, 0, "num_generations"),
])
def test_a_switch_that_was_taken_out_is_refused_with_what_to_use_instead(
    name: str, value: object, default: object, advice: str
) -> None:
    assert GRPOConfig(**{name: default}) == GRPOConfig()
    with pytest.raises(ValueError, match=f"{name}={value!r} is not supported.*{advice}"):
        GRPOConfig(**{name: value})
