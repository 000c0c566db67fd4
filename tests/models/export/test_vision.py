"""An adapter of a model of images is exported whole: plain transformers and PEFT read tower, adapter and processor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from small_models import scatter
from transformers import AutoModelForImageTextToText
from vision_models import FAMILIES, saved_vision_model

from lowmem_grpo import FastVisionModel
from lowmem_grpo.data.images import ImageEncoder, ImageReader
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.vision import store_of
from lowmem_grpo.types import Rollout, RolloutGroup

ASK: list[Any] = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (200, 150), "red")},
                                               {"type": "text", "text": "Describe it"}]}]
SMALL = 28 * 28 * 6  # pixels; the stored processor's bound is higher


def adapted(folder: Path, four_bit: bool, older: bool = False, family: str = FAMILIES[0]) -> Any:
    """A model with a random adapter, and its processor."""
    saved_vision_model(family, folder)
    if older:  # as transformers wrote them before 4.52
        held = {name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value
                for name, value in load_file(folder / "model.safetensors").items()}
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    model, processor = FastVisionModel.from_pretrained(str(folder), max_seq_length=256, load_in_4bit=four_bit,
                                                       max_pixels=SMALL)
    return scatter(FastVisionModel.get_peft_model(model, r=4)), processor


def logprobs_of(model: Any, processor: Any) -> torch.Tensor:
    """Our log-probabilities of two tokens after the prompt with the image."""
    policy = Policy(model)
    prompt: Any = ImageEncoder(ImageReader(processor, store_of(policy.base)), 64).encode({"prompt": ASK})
    (batch,) = pack([RolloutGroup({}, prompt.ids, [Rollout([token], [0.0], "stop") for token in (9, 300)])])
    with torch.no_grad():
        return policy.logprobs(batch, 1.0)[0]


def theirs(folder: Path, processor: Any) -> torch.Tensor:
    """The same of plain transformers' model in a folder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    inputs = processor.apply_chat_template(ASK, tokenize=True, return_dict=True, add_generation_prompt=True)
    with torch.no_grad():
        return model(**inputs).logits[0, -1].log_softmax(-1)[torch.tensor([9, 300])]


@pytest.mark.parametrize("family, four_bit, older", [("Qwen3VL", False, False), ("Qwen2_5_VL", True, True)])
def test_plain_transformers_computes_the_log_probabilities_of_adapter_and_base_from_a_merged_folder(
    family: str, four_bit: bool, older: bool, tmp_path: Path
) -> None:
    model, processor = adapted(tmp_path / "model", four_bit, older, family)
    wanted = logprobs_of(model, processor)
    model.save_pretrained_merged(tmp_path / "live", processor)
    model.save_lora(tmp_path / "lora")
    done = export(tmp_path / "lora", "merged", tmp_path / "stored")
    assert done.checks["merged"] == 21 and "logits_difference" in done.checks
    for folder in (tmp_path / "live", tmp_path / "stored"):
        torch.testing.assert_close(theirs(folder, processor), wanted, rtol=0.02, atol=0.05)  # rounded to bfloat16
        again, own = FastVisionModel.from_pretrained(str(folder), max_seq_length=256, load_in_4bit=False)
        assert own.image_processor.size["longest_edge"] == SMALL
        del again
    assert {name.partition(".layers")[0] for name in load_file(tmp_path / "stored" / "model.safetensors")
            if ".layers." in name} == {"model.language_model"}


def test_an_adapters_folder_loads_the_model_of_images_its_processor_and_the_adapter(tmp_path: Path) -> None:
    model, processor = adapted(tmp_path / "model", False)
    wanted = logprobs_of(model, processor)
    model.save_lora(tmp_path / "lora")
    again, own = FastVisionModel.from_pretrained(str(tmp_path / "lora"), max_seq_length=256)
    assert own.image_processor.size["longest_edge"] == SMALL and own.apply_chat_template(ASK)
    assert torch.equal(logprobs_of(again, own), wanted)
    _, wider = FastVisionModel.from_pretrained(str(tmp_path / "lora"), max_seq_length=256, max_pixels=2 * SMALL)
    assert wider.image_processor.size["longest_edge"] == 2 * SMALL


def test_in_4_bits_the_tower_stays_and_gguf_is_refused(tmp_path: Path) -> None:
    model, processor = adapted(tmp_path / "model", True)
    model.save_pretrained_merged(tmp_path / "live", processor, save_method="merged_4bit_forced")
    kept = json.loads((tmp_path / "live" / "config.json").read_text())["quantization_config"]
    assert kept["llm_int8_skip_modules"] == ["model.visual", "lm_head"]
    held = load_file(tmp_path / "live" / "model.safetensors")
    assert not any("visual" in name and "quant_state" in name for name in held)
    assert sum("language_model" in name and "quant_state" in name for name in held) == 21
    with pytest.raises(ExportError, match=r"a model of images is not written as GGUF.*--mmproj"):
        model.save_pretrained_gguf(tmp_path / "gguf", quantization_method="bf16")
