"""LoRA as PEFT makes it of a LoraConfig: the same layers, ranks, scales and first values here, or a refusal by name.

The settings are a table (tests/support/lora_settings.py); what is right is what plain peft does with them.
"""

import copy
import functools
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_settings import LOADED, REFUSED, SAMPLED
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from small_models import SPLIT, TINY, scatter, shallow
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.lora_layers import OneNode
from lowmem_grpo.models.lora_targets import Scope, lora_targets
from lowmem_grpo.trainer.model_setup import Brought

IDS = torch.tensor([[5, 9, 11, 200, 31, 7, 8, 90, 14, 301]])
SEED = GRPOConfig().seed
ALSO: dict[str, dict[str, Any]] = {"of the family": {"target_modules": None}, "odd rank": {"r": 3},
                                   "no task": {"task_type": None}, "for use": {"inference_mode": True}}
EQUAL = LOADED | ALSO


@functools.cache
def loaded(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(shallow(), dtype=dtype)


def base(dtype: torch.dtype = torch.float32) -> Any:
    """Two layers of the embedded model as transformers loads them, a copy for each caller."""
    return copy.deepcopy(loaded(dtype))


def settings_of(case: str) -> LoraConfig:
    usual = {"r": 4, "target_modules": SPLIT, "task_type": "CAUSAL_LM"}
    return LoraConfig(**(usual | EQUAL[case]))


def peft_model(model: Any, config: LoraConfig) -> PeftModel:
    """Return PEFT's model, created at the trainer's seed as in TRL."""
    torch.manual_seed(SEED)
    with warnings.catch_warnings(action="ignore"):
        return get_peft_model(model, config)


def brought(model: Any, config: Any = None, **settings: Any) -> FastPeftModel:
    return Brought(model, None, config, None, GRPOConfig(**settings), 64).trainable()


def adapted(model: Any) -> dict[str, tuple[int, float, float]]:
    """Rank, scale and dropout of every layer with LoRA."""
    return {name: (module.r["default"], module.scaling["default"], getattr(module.lora_dropout["default"], "p", 0.0))
            for name, module in model.named_modules() if hasattr(module, "lora_A")}


def values(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters() if ".lora_" in name}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS).logits


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Within 1e-6 of the largest; norms of transformers compute in float32 even in a model in float64."""
    assert (got - wanted).abs().max() < 1e-6 * wanted.abs().max()


def saved(model: Any, folder: Path) -> dict[str, Any]:
    """The settings that a model leaves beside its adapter."""
    model.save_pretrained(str(folder))
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.fixture(autouse=True)
def no_warnings_of_peft() -> Any:
    """Silence PEFT's warnings of settings without effect."""
    with warnings.catch_warnings(action="ignore"):
        yield


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.every(2)
def test_a_config_puts_the_layers_ranks_scales_and_first_values_there_that_peft_puts(case: str) -> None:
    theirs, ours = peft_model(base(), settings_of(case)), brought(base(), settings_of(case))
    assert adapted(ours) == adapted(theirs)
    assert all(isinstance(module, OneNode) for module in ours.modules() if hasattr(module, "lora_A"))
    mine, wanted = values(ours), values(theirs)
    assert mine.keys() == wanted.keys() and all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert {name for name, one in ours.named_parameters() if one.requires_grad} == wanted.keys()


def test_names_that_only_other_families_have_get_no_lora_as_with_peft_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture
) -> None:
    lfm2 = ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"]
    config = LoraConfig(r=4, target_modules=lfm2, task_type="CAUSAL_LM")
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        ours = brought(base(), config)
    assert adapted(ours) == adapted(peft_model(base(), config))
    assert [text for text in caplog.messages if "in_proj, out_proj, w1, w2, w3" in text] == caplog.messages
    assert ours.peft_config["default"].target_modules == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.every(3)
def test_adapters_go_both_ways_with_equal_logits_and_the_same_settings(case: str, tmp_path: Path) -> None:
    theirs = scatter(peft_model(base(torch.float64), settings_of(case)))
    ours = brought(base(torch.float64), settings_of(case))
    wanted, written = logits(theirs), saved(theirs, tmp_path / "theirs")
    set_peft_model_state_dict(ours, load_file(tmp_path / "theirs" / "adapter_model.safetensors"))
    assert (wanted - logits(base(torch.float64))).abs().max() > 1e-3  # the adapter matters
    assert_close(logits(ours), wanted)
    here = saved(ours, tmp_path / "ours")
    again = PeftModel.from_pretrained(base(torch.float64), str(tmp_path / "ours"))
    assert_close(logits(again), wanted)
    words = {"task_type", "auto_mapping", "base_model_name_or_path", "peft_version"}
    for settings in (here, written):
        for name, value in settings.items():
            settings[name] = sorted(value) if isinstance(value, list) else value
    assert {name for name in written if written[name] != here[name]} <= words


@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.every(3)
def test_the_lora_of_a_peft_model_moves_to_our_layers_and_the_callers_model_goes_on_with_it(
    case: str, tmp_path: Path
) -> None:
    theirs = scatter(peft_model(base(torch.float64), settings_of(case)))
    wanted, layers = logits(theirs), adapted(theirs)
    kept = {name: one for name, one in theirs.named_parameters() if ".lora_" in name}
    ours = brought(theirs)
    assert_close(logits(ours), wanted)
    assert adapted(ours) == layers and all(ours.get_parameter(name) is one for name, one in kept.items())
    assert all(isinstance(module, OneNode) for module in ours.modules() if hasattr(module, "lora_A"))
    scatter(ours, seed=7)  # as training would
    after = logits(ours)
    assert torch.equal(logits(theirs), after) and (after - wanted).abs().max() > 1e-3
    theirs.save_pretrained(str(tmp_path))
    assert_close(logits(PeftModel.from_pretrained(base(torch.float64), str(tmp_path))), after)


@pytest.mark.parametrize("case", ["one", "all-linear without", "layers", "ranks and alphas"])
def test_gradients_are_pefts_where_layers_lack_lora_or_differ_in_rank(case: str) -> None:
    theirs = scatter(peft_model(base(torch.float64), settings_of(case)))
    theirs(input_ids=IDS, labels=IDS).loss.backward()
    wanted = {name: one.grad for name, one in theirs.named_parameters() if one.requires_grad}
    theirs.zero_grad(set_to_none=True)
    ours = brought(theirs).train()
    ours(input_ids=IDS, labels=IDS).loss.backward()
    for name, one in ours.named_parameters():
        if one.requires_grad:
            assert (one.grad - wanted[name]).abs().max() < 1e-4 * wanted[name].abs().max(), name


def test_a_saved_adapter_that_peft_loaded_is_trained_on_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scatter(peft_model(base(torch.float64), settings_of("ranks and alphas"))).save_pretrained(str(tmp_path))
    for trainable in (True, False):
        theirs = PeftModel.from_pretrained(base(torch.float64), str(tmp_path), is_trainable=trainable)
        wanted = logits(theirs)
        with caplog.at_level(logging.WARNING):
            ours = brought(theirs)
        assert ("is_trainable=False; it is trained all the same" in caplog.text) is not trainable
        assert_close(logits(ours), wanted)
        assert all(one.requires_grad == (".lora_" in name) for name, one in ours.named_parameters())


@pytest.mark.parametrize("case", [*REFUSED, *SAMPLED])
@pytest.mark.parametrize("kind", ["config", "model"])
def test_what_is_more_than_lora_is_refused_by_name_before_anything_changes(case: str, kind: str) -> None:
    settings, message = REFUSED.get(case) or (SAMPLED[case], "(use_dora|lora_bias)=True is not supported")
    config = LoraConfig(**({"r": 4, "target_modules": SPLIT, "task_type": "CAUSAL_LM"} | settings))
    model = base() if kind == "config" else peft_model(base(), config)
    before = [name for name, _ in model.named_parameters()]
    message = message.replace("holds .*", "target_modules names ")
    with pytest.raises(ValueError, match=message):
        brought(model, config if kind == "config" else None)
    assert [name for name, _ in model.named_parameters()] == before


@pytest.mark.parametrize(("settings", "message"), [
    ({"target_modules": ["q_proj"], "layers_to_transform": [9]}, "names layer 9; the model has the layers 0 to 1"),
    ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "leave no layer of this model"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"}, "layers_pattern='blocks'"),
    ({"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 0}},
     r"rank_pattern\['q_proj'\] is 0; it must be a whole number"),
    ({"target_modules": ["q_proj"], "r": 3, "init_lora_weights": "orthogonal"}, "needs even ranks, and one is 3"),
])
def test_settings_at_which_peft_would_stop_half_way_are_refused_before_the_model_changes(
    settings: dict[str, Any], message: str
) -> None:
    model = base()
    with pytest.raises(ValueError, match=message):
        brought(model, LoraConfig(**settings))
    assert not any("lora" in name or "base_layer" in name for name, _ in model.named_modules())


EMPTY: list[tuple[dict[str, Any], str]] = [  # a setting, and what is refused; "" where it is done as PEFT does it
    *(({"target_modules": names}, "names nothing to train: name layers") for names in ([], "", (), set())),
    *(({"target_modules": names}, r"names \[''\], which this model does not") for names in ([""], ["q_proj", ""])),
    ({"modules_to_save": []}, ""), ({"modules_to_save": ["nowhere"]}, "nowhere cannot be trained beside LoRA"),
    *(({"r": rank}, f"r is {rank}; it must be a whole number, from 1 to") for rank in (0, -1, None, True, 2.5)),
    *(({"lora_alpha": alpha}, f"lora_alpha is {alpha}; it must be above 0") for alpha in (0, -1, None)),
    *(({"lora_dropout": share}, f"lora_dropout is {share}; it must be at least 0 and below 1")
      for share in (1, -0.1, None, True)),
    *(({"exclude_modules": names}, "") for names in ([], "", [""], ["nowhere"])),
    ({"exclude_modules": "("}, r"exclude_modules is '\('; it must be a regular expression, or a list of texts"),
    ({"exclude_modules": ".*"}, "leave no layer of this model to put LoRA on"),
    *(({"layers_to_transform": layers}, "") for layers in ([], 0, [0, 0])),
    ({"layers_to_transform": ()}, "leave no layer"), ({"layers_to_transform": [-1]}, "names layer -1; the model has"),
    *(({"layers_to_transform": layers}, "must be a whole number, or a list of them") for layers in ("", True, [True])),
    *(({"layers_to_transform": [0], "layers_pattern": names}, "") for names in ([], "", "layers")),
    *(({"layers_to_transform": [0], "layers_pattern": names}, "layers_pattern is .*; it must be a regular expression")
      for names in (5, "(")),
    *(({name: value}, "") for name in ("rank_pattern", "alpha_pattern") for value in ({}, None)),
    ({"rank_pattern": {"q_proj": 2.5}}, r"rank_pattern\['q_proj'\] is 2.5; it must be a whole number"),
    *(({"alpha_pattern": {"q_proj": alpha}}, r"alpha_pattern\['q_proj'\] is .*; it must be above 0")
      for alpha in (0, -2)),
    *(({"bias": bias}, 'only "none" is supported') for bias in (None, "", False)),
    *(({"init_lora_weights": start}, "init_lora_weights=.* is not supported") for start in ("", 0)),
    *(({name: []}, "") for name in ("trainable_token_indices", "target_parameters", "layer_replication")),
    ({"target_parameters": set()}, ""),  # as PEFT fills it in for a mixture of experts
]


@pytest.mark.parametrize(("settings", "message"), EMPTY, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("kind", ["get_peft_model", "peft_config"])
@pytest.mark.every(2)
def test_an_empty_setting_does_what_it_does_in_peft_or_is_refused(
    settings: dict[str, Any], message: str, kind: str
) -> None:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]} | settings

    def adapt() -> Any:
        if kind == "peft_config":
            return brought(base(), LoraConfig(**settings))
        bare, _ = FastLanguageModel.from_pretrained(str(shallow()), load_in_4bit=False)
        return FastLanguageModel.get_peft_model(bare, **settings)

    if message:
        with pytest.raises(ValueError, match=message):
            adapt()
    else:
        given = {name: value for name, value in settings.items() if value is not None}
        assert adapted(adapt()) == adapted(peft_model(base(), LoraConfig(**given)))


def test_an_orthogonal_start_on_4_bits_is_refused_as_in_peft() -> None:
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128)
    with pytest.raises(ValueError, match="needs a base in 16 or 32 bits, in PEFT too"):
        FastLanguageModel.get_peft_model(bare, init_lora_weights="orthogonal")


def test_a_pattern_that_changes_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        brought(base(), LoraConfig(target_modules=["q_proj"], rank_pattern={"q_proj": 2, "up_proj": 4}))
    assert "rank_pattern: 'up_proj' matches no layer with LoRA" in caplog.text and "'q_proj'" not in caplog.text


def test_the_same_peft_model_may_go_to_a_second_trainer() -> None:
    theirs = scatter(peft_model(base(torch.float64), settings_of("ranks")))
    first = brought(theirs)
    scatter(first, seed=7)
    wanted = logits(theirs)
    second = brought(theirs)
    for model in (theirs, first, second):
        assert_close(logits(model), wanted)
    assert [id(one) for one in first.parameters()] == [id(one) for one in second.parameters()]


@pytest.mark.parametrize(("change", "message"), [
    (lambda model: model.add_adapter("second", LoraConfig(target_modules=["q_proj"])), r"\['default', 'second'\]; one"),
    (lambda model: model.merge_adapter(), "the adapter is merged"),
    (lambda model: model.get_base_model().model.norm.weight.requires_grad_(True), "trains .*norm.weight beside"),
    (lambda model: [module.set_scale("default", 3) for module in model.modules() if hasattr(module, "set_scale")],
     "has rank and scale .*where its settings say"),
])
def test_a_peft_model_that_is_more_than_its_settings_say_is_refused_and_stays_as_it_is(
    change: Any, message: str
) -> None:
    model = scatter(peft_model(base(), settings_of("usual")))
    change(model)
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        brought(model)
    assert torch.equal(logits(model), before)


def test_other_kinds_of_adapters_are_refused_by_name() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    for model, given in ((base(), config), (get_peft_model(base(), config), None)):
        with pytest.raises(ValueError, match=r"a PromptTuningConfig: Prompt-learning .* allowed is peft\.LoraConfig"):
            brought(model, given)


def test_get_peft_model_takes_the_same_settings() -> None:
    options: dict[str, Any] = EQUAL["ranks and alphas"] | {
        "exclude_modules": ["k_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers",
        "init_lora_weights": "gaussian", "target_modules": SPLIT, "r": 4}
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128, load_in_4bit=False)
    ours = FastLanguageModel.get_peft_model(bare, **options, random_state=SEED)
    theirs = peft_model(base(), LoraConfig(**options, lora_alpha=16, task_type="CAUSAL_LM"))
    assert adapted(ours) == adapted(theirs)
    assert all(torch.equal(one, values(theirs)[name]) for name, one in values(ours).items())


def test_a_model_in_4_bits_that_peft_adapted_is_taken() -> None:
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantized = AutoModelForCausalLM.from_pretrained(shallow(), quantization_config=four_bit)
    theirs = scatter(peft_model(quantized, settings_of("ranks")))
    wanted, layers = logits(theirs), adapted(theirs)
    ours = brought(theirs)
    assert adapted(ours) == layers and all(isinstance(m, OneNode) for m in ours.modules() if hasattr(m, "lora_A"))
    assert (logits(ours) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("kind", ["name", "model", "ours"])
def test_without_settings_a_lora_of_the_usual_shape_is_trained_and_one_line_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"name": lambda: str(shallow()), "model": base,
             "ours": lambda: FastLanguageModel.from_pretrained(str(shallow()), load_in_4bit=False)[0]}[kind]()
    with caplog.at_level(logging.WARNING):
        ours = brought(model)
    config = LoraConfig(r=16, lora_alpha=16, target_modules=SPLIT)
    assert adapted(ours) == adapted(peft_model(base(), config))
    said = [record.getMessage() for record in caplog.records if "no peft_config" in record.getMessage()]
    assert len(said) == 1
    assert "training a LoRA of rank 16 on all linear layers; merged weights by export" in said[0]


def test_full_training_by_name_is_refused() -> None:
    with pytest.raises(ValueError, match="model_init_kwargs: full_finetuning=True is not supported"):
        brought(str(shallow()), model_init_kwargs={"full_finetuning": True})


# Patterns


UNSLOTHS = (  # what its FastModel makes, shortened
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
)


@pytest.mark.parametrize("pattern", [UNSLOTHS, r".*self_attn\.(q|v)_proj", r"model\.layers\.[24]\..*_proj", r".*_proj"])
def test_a_pattern_puts_lora_on_the_layers_that_peft_puts_it_on(pattern: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(TINY)
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    ours = FastLanguageModel.get_peft_model(bare, target_modules=pattern)
    assert adapted(ours).keys() == adapted(get_peft_model(plain, LoraConfig(target_modules=pattern))).keys()
    assert ours.peft_config["default"].target_modules == pattern


def test_a_pattern_and_the_part_of_the_model_that_is_trained_both_count() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    paths = lora_targets(model, r".*(q|up)_proj", Scope(finetune_mlp_modules=False, layers_to_transform=[1, 2]))
    assert paths == ["model.layers.1.self_attn.q_proj", "model.layers.2.self_attn.q_proj"]


@pytest.mark.parametrize(("pattern", "message"), [
    ("q_proj", "matches no module's whole path"), ("(q", r"no regular expression \(missing \)"),
    (r".*norm", r"matches 'model\.layers\.0\.input_layernorm', which is no linear layer"),
    (r"lm_head|.*q_proj", "names lm_head; embedding and head get no LoRA"), (".*", "'the model', which is no"),
])
def test_a_pattern_that_cannot_be_trained_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora_targets(AutoModelForCausalLM.from_pretrained(TINY), pattern, Scope())
