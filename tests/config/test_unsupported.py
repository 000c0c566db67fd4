"""What is known of the options of other libraries."""

import dataclasses

import pytest
from transformers import TrainingArguments

from lowmem_grpo import GRPOConfig
from lowmem_grpo.config.unsupported import transformers_defaults


def test_the_defaults_in_our_file_are_those_of_the_class() -> None:
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    computed = {"optim", "include_for_metrics"}  # fields of ours, and a factory
    assert transformers_defaults().keys() == fields.keys() - computed
    assert transformers_defaults() == {name: fields[name].default for name in fields.keys() - computed}


def test_an_option_that_only_a_newer_transformers_has_is_accepted_at_its_default() -> None:
    known = transformers_defaults()
    known["made_up_option"] = 5
    try:
        assert GRPOConfig(made_up_option=5) == GRPOConfig()
        with pytest.raises(ValueError, match="made_up_option=6 is not supported"):
            GRPOConfig(made_up_option=6)
    finally:
        del known["made_up_option"]


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
