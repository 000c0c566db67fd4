"""Patterns in `target_modules` choose the layers that PEFT chooses with them, and bad ones are refused by name."""

import peft
import pytest
from small_models import TINY
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.models.lora_targets import Scope, lora_targets

UNSLOTHS = (  # what its FastModel makes, shortened
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
)


def adapted_layers(model: peft.PeftModel) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize("pattern", [UNSLOTHS, r".*self_attn\.(q|v)_proj", r"model\.layers\.[24]\..*_proj", r".*_proj"])
def test_a_pattern_puts_lora_on_the_layers_that_peft_puts_it_on(pattern: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(TINY)
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    ours = FastLanguageModel.get_peft_model(bare, target_modules=pattern)
    assert adapted_layers(ours) == adapted_layers(peft.get_peft_model(plain, peft.LoraConfig(target_modules=pattern)))
    assert ours.peft_config["default"].target_modules == pattern


def test_a_pattern_and_the_part_of_the_model_that_is_trained_both_count() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    paths = lora_targets(model, r".*(q|up)_proj", Scope(finetune_mlp_modules=False, layers_to_transform=[1, 2]))
    assert paths == ["model.layers.1.self_attn.q_proj", "model.layers.2.self_attn.q_proj"]


@pytest.mark.parametrize(("pattern", "message"), [
    ("q_proj", "matches no module's whole path"), ("(q", r"no regular expression \(missing \)"),
    (r".*norm", r"matches 'model\.layers\.0\.input_layernorm', which is no linear layer"),
    (r"lm_head|.*q_proj", "names lm_head; the head and the embedding stay frozen"), (".*", "'the model', which is no"),
])
def test_a_pattern_that_cannot_be_trained_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora_targets(AutoModelForCausalLM.from_pretrained(TINY), pattern, Scope())
