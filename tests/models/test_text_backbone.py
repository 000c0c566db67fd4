"""The text model of a checkpoint with images or sounds is trained, with the numbers that the whole model has."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import COMPOSITES, GROUPS, SAMPLED, assert_alike, loaded, sampled_apart, saved_composite
from fp8_weights import store_in_fp8
from packed_problem import batch_of, learned, learned_alone
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lowmem_grpo import FastLanguageModel, FastVisionModel
from lowmem_grpo.memory.families import TEXT_NAMES, WHOLE_KINDS, check_images
from lowmem_grpo.models.export.formats import ExportSettings, export
from lowmem_grpo.models.policy import Policy

LLAVA = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "hidden_size": 64,
         "vision_config": {"depth": 2, "hidden_size": 32}}
each_kind = pytest.mark.parametrize("kind", COMPOSITES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save each kind of checkpoint, and return its folder by kind."""
    return {kind: saved_composite(kind, tmp_path_factory.mktemp(kind)) for kind in COMPOSITES}


def whole_twin(ours: Any, folder: Path) -> peft.PeftModel:
    """transformers' whole model, images and all, with the same adapter on its text layers."""
    base = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    config = copy.deepcopy(ours.peft_config["default"])
    names = "|".join(sorted(config.target_modules))
    twin = peft.get_peft_model(base, peft.LoraConfig(
        r=config.r, lora_alpha=config.lora_alpha, target_modules=rf".*language_model.*\.({names})"))
    adapter = {name.replace("model.layers.", "model.language_model.layers."): value
               for name, value in ours.state_dict().items() if "lora_" in name}
    assert adapter and not twin.load_state_dict(adapter, strict=False).unexpected_keys
    return twin


@each_kind
def test_logprobs_and_every_gradient_are_those_of_the_whole_model(kind: str, folders: dict[str, Path]) -> None:
    model, _ = loaded(folders[kind])
    batch = batch_of(GROUPS)
    theirs, grads = learned_alone(whole_twin(model, folders[kind]), batch)
    grads = {name.replace("language_model.", ""): grad for name, grad in grads.items()}
    assert_alike(learned(Policy(model), batch), (theirs, grads))


@each_kind
def test_no_other_part_takes_memory_and_our_engine_samples_with_the_trainers_logprobs(
    kind: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lowmem_grpo")
    model, tokenizer = loaded(folders[kind])
    assert any("the text model is loaded" in said for said in caplog.messages)
    assert not [name for name, _ in model.named_modules() if "vision" in name or "audio" in name or "visual" in name]
    assert model.config.model_type == COMPOSITES[kind][2]
    assert sampled_apart(model, tokenizer) <= SAMPLED


@each_kind
@pytest.mark.parametrize("stored", [False, True], ids=["loaded", "stored"])
@pytest.mark.every(3)
def test_a_merged_model_is_one_of_text_with_what_was_trained(
    kind: str, stored: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    model, tokenizer = loaded(folders[kind])
    batch = batch_of(GROUPS)
    expected, _ = learned(Policy(model), batch)
    if stored:
        model.save_pretrained(str(tmp_path / "adapter"))
        export(tmp_path / "adapter", "merged", tmp_path / "merged", ExportSettings(dtype="float16"))
    else:
        model.save_pretrained_merged(str(tmp_path / "merged"), tokenizer)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["model_type"] == COMPOSITES[kind][2] and "vision_config" not in config
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        again, _ = Policy(merged).logprobs(batch, 1.0)
    assert (again - expected).abs().max() <= 0.1  # rounded to 16 bits


def test_an_fp8_checkpoint_with_images_is_read_as_it_is(folders: dict[str, Path], tmp_path: Path) -> None:
    """As Ministral 3 is published: one scale for each weight of the text model, images in 16 bits."""
    folder = store_in_fp8(folders["mistral3"], tmp_path, "fine-grained, one scale", of="language_model")
    model, _ = loaded(folder)
    assert {str(one.weight.dtype) for name, one in model.named_modules() if name.endswith("q_proj.base_layer")} == {
        "torch.uint8"}
    batch = batch_of(GROUPS)
    in_fp8, _ = learned(Policy(model), batch)
    plain, _ = learned(Policy(loaded(folders["mistral3"])[0]), batch)
    assert 0 < (in_fp8 - plain).abs().mean() < 0.3


def test_a_hybrid_with_images_is_refused_in_float16(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="overflows in float16"):
        FastLanguageModel.from_pretrained(str(folders["qwen3_5"]), dtype="float16")


def test_every_kind_of_checkpoint_in_the_table_is_tried() -> None:
    assert COMPOSITES.keys() == TEXT_NAMES.keys()


def test_a_text_tensor_that_is_missing_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["gemma4"].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folders["gemma4"] / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors of its text model, such as model\.layers\.1\.mlp\.up_proj"):
        FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=64, load_in_4bit=False)


@pytest.mark.parametrize("loader", [FastLanguageModel, FastVisionModel])
def test_a_model_of_images_without_a_text_part_is_refused_by_that_word_before_its_weights_are_looked_for(
    loader: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA), encoding="utf-8")
    with pytest.raises(ValueError, match=r"model of images \(LlavaForConditionalGeneration\), and images are"):
        loader.from_pretrained(str(tmp_path))


def test_a_model_of_images_that_is_loaded_for_text_names_the_loader_that_trains_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA | {"model_type": "qwen2_5_vl"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"with images, load it with FastVisionModel\.from_pretrained; for text"):
        FastLanguageModel.from_pretrained(str(tmp_path))


def test_the_kinds_with_images_that_load_whole_are_those_of_which_transformers_has_a_language_model() -> None:
    kinds = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
             if "vision_config" in getattr(CONFIG_MAPPING[kind], "sub_configs", {})}
    assert kinds - set(TEXT_NAMES) == set(WHOLE_KINDS)
    for kind in TEXT_NAMES.keys() | set(WHOLE_KINDS):
        check_images({"model_type": kind, "vision_config": {"depth": 2}}, kind)
