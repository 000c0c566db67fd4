"""A merged model is the base plus the adapter, whoever loads it."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from export_tools import adapted, edit_record, export_command, names_beside
from fp8_weights import CHECKPOINTS, save_16_bit, save_in_fp8
from safetensors.torch import load_file
from small_models import TINY, save_wide, scatter
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.kernels.fp8 import fp8_dequantize
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.export.merge import MergeError, live_pairs, read_pairs
from lowmem_grpo.models.fp8_layers import FP8Linear
from lowmem_grpo.models.fused_weights import fuse_weights
from lowmem_grpo.runs.saved_adapter import AdapterError
from lowmem_grpo.utils import UnsupportedError

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])

def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found.float()


@pytest.mark.every(2)
def test_a_merged_model_is_base_plus_adapter_for_plain_transformers(
    saved: tuple[FastPeftModel, Path], merged: tuple[Path, str]
) -> None:
    (model, _), (out, said) = saved, merged
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    wanted, found = logits(model), logits(loaded)
    with model.disable_adapter():
        base = logits(model)
    error = (found - wanted).square().mean().sqrt()
    assert error < 0.02 * (wanted - base).square().mean().sqrt()  # the adapter matters, and is there
    assert error < 2**-8 * 4 * wanted.square().mean().sqrt()
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.config.dtype == torch.float32
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "Start"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == model.loaded.tokenizer.apply_chat_template(
        chat, tokenize=False)
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id
    tensors = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied: stored once
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "logits differ" in said


def test_each_merged_weight_is_what_peft_and_bitsandbytes_say_rounded_once(
    saved: tuple[FastPeftModel, Path], merged: tuple[Path, str]
) -> None:
    model, tensors = saved[0], load_file(merged[0] / "model.safetensors")
    layers = {name.removeprefix("base_model.model."): layer for name, layer in model.named_modules()
              if hasattr(layer, "lora_A")}
    assert len(layers) == 42
    for name, layer in layers.items():
        weight = layer.base_layer.weight
        state = getattr(weight, "quant_state", None)
        base = weight.float() if state is None else dequantize_4bit(weight, state).float()
        wanted = base.double() + layer.get_delta_weight("default").double()
        error = (tensors[f"{name}.weight"].double() - wanted).abs()
        assert (error <= 2**-8 * wanted.abs() + 1e-7).all(), name
        assert torch.equal(tensors[f"{name}.weight"], wanted.to(torch.bfloat16)) or error.max() < 1e-3


def test_the_loaded_model_and_the_files_give_the_same_bits(
    saved: tuple[FastPeftModel, Path], merged: tuple[Path, str], tmp_path: Path, unequal: None
) -> None:
    model, _ = saved
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.save_pretrained_merged(tmp_path / "live", model.loaded.tokenizer, save_method="merged_16bit")
    live, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "live", merged[0]))
    assert live.keys() == stored.keys()
    assert all(torch.equal(live[name], stored[name]) for name in live)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_base_that_is_stored_in_4_bit_is_read_as_it_is(tmp_path: Path, unequal: None) -> None:
    bare, tokenizer = FastLanguageModel.from_pretrained("tiny", load_in_4bit=True)
    bare.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = adapted(False, str(tmp_path / "base"))
    model.save_lora(tmp_path / "adapter")
    export(tmp_path / "adapter", "merged", tmp_path / "merged")
    model.save_pretrained_merged(tmp_path / "live")
    live, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "merged"))
    assert all(torch.equal(live[name], stored[name]) for name in live)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@pytest.mark.parametrize("held", [True, "block", *CHECKPOINTS])
@pytest.mark.every(4)
def test_what_was_trained_on_fp8_weights_is_merged_with_them(held: bool | str, tmp_path: Path, unequal: None) -> None:
    """Quantized while loading, or stored in FP8: the loaded model and the files give the same, base plus adapter."""
    base, asked = tmp_path / "base", {} if held in CHECKPOINTS else {"load_in_fp8": held}
    save_in_fp8(base, str(held)) if held in CHECKPOINTS else save_16_bit(base)
    bare, _ = FastLanguageModel.from_pretrained(str(base), max_seq_length=64, **asked)
    model = scatter(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False))
    model.save_lora(tmp_path / "adapter")
    model.save_pretrained_merged(tmp_path / "live")
    export(tmp_path / "adapter", "merged", tmp_path / "stored")
    live, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "stored"))
    assert live.keys() == stored.keys()
    assert not [name for name in live if "scale" in name]
    assert all(torch.equal(live[name], stored[name]) for name in live)
    for name, layer in model.get_base_model().named_modules():
        if isinstance(getattr(layer, "base_layer", None), FP8Linear):
            wanted = fp8_dequantize(layer.base_layer.frozen).double() + layer.get_delta_weight("default").double()
            torch.testing.assert_close(live[f"{name}.weight"].double(), wanted, rtol=2**-8, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "stored" / "config.json").read_text())
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64)
    found, wanted = (dict(one.named_parameters()) for one in (again, model))
    assert all(torch.equal(found[name], parameter) for name, parameter in wanted.items())


@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bit", "NF4"])
def test_weights_laid_out_for_vllm_are_exported_as_they_were(four_bit: bool, tmp_path: Path, unequal: None) -> None:
    save_wide(tmp_path / "base", num_hidden_layers=1, tie_word_embeddings=False)
    bare, _ = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=64, load_in_4bit=four_bit)
    assert fuse_weights(bare.inner) == []
    model = scatter(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False))
    query, key = (model.get_base_model().model.layers[0].self_attn.get_submodule(f"{name}_proj").base_layer.weight
                  for name in "qk")
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    model.save_pretrained_merged(tmp_path / "live")
    model.save_lora(tmp_path / "adapter")
    export(tmp_path / "adapter", "merged", tmp_path / "stored")
    live, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "stored"))
    assert all(torch.equal(live[name], stored[name]) for name in stored)
    assert "lm_head.weight" in live  # of its own: not tied


def test_a_model_without_an_adapter_is_saved_in_16_bit(tmp_path: Path, unequal: None) -> None:
    bare, tokenizer = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    bare.save_pretrained_merged(str(tmp_path / "out"), tokenizer, dtype="float16")
    tensors, own = load_file(tmp_path / "out" / "model.safetensors"), bare.inner.state_dict()
    assert all(torch.equal(tensor, own[name].half()) for name, tensor in tensors.items())


def test_a_save_method_or_dtype_that_there_is_not_is_refused(saved: tuple[FastPeftModel, Path], tmp_path: Path) -> None:
    model, _ = saved
    for method, advice in (("merged_4bit", "merged_4bit_forced"), ("4bit", "load_in_4bit=True"),
                           ("gguf", "call save_pretrained_gguf")):
        allowed = "'merged_16bit', 'merged_4bit_forced', 'mxfp4' and 'lora'"
        with pytest.raises(UnsupportedError, match=f"{method}'; allowed are {allowed}: .*{advice}"):
            model.save_pretrained_merged(tmp_path / "other", save_method=method)
    with pytest.raises(ExportError, match="dtype is 'float32'; allowed are bfloat16, float16"):
        model.save_pretrained_merged(tmp_path / "other", dtype="float32")
    assert names_beside(tmp_path) == []


def test_saving_only_the_adapter_replaces_no_other_folder_and_takes_no_dtype(
    saved: tuple[FastPeftModel, Path], tmp_path: Path
) -> None:
    model, _ = saved
    with pytest.raises(UnsupportedError, match="dtype is 'float16'; save_method=\"lora\" keeps the adapter's own"):
        model.save_pretrained_merged(tmp_path / "new", save_method="lora", dtype="float16")
    assert model.save_pretrained_merged(tmp_path / "new", save_method="lora") == tmp_path / "new"
    with pytest.raises(ExportError, match="--overwrite"):
        model.save_pretrained_merged(tmp_path / "new", save_method="lora")
    model.save_pretrained_merged(tmp_path / "new", save_method="lora", overwrite=True)
    assert read_pairs(tmp_path / "new").keys() == live_pairs(model).keys()
    assert names_beside(tmp_path) == ["new"]


def test_a_warning_says_how_much_of_a_small_update_rounding_leaves(
    tmp_path: Path, unequal: None, caplog: pytest.LogCaptureFixture
) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, dtype="bfloat16")
    model = FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        scatter(model, 1e-5).save_pretrained_merged(tmp_path / "out")
    assert "% is left after rounding to torch.bfloat16" in caplog.text


def test_logits_that_differ_stop_the_export(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = lambda ids: torch.zeros(*ids.shape, 384)  # noqa: E731
    monkeypatch.setattr("lowmem_grpo.models.export.formats.adapter_logits", lambda *_: other)
    with pytest.raises(MergeError, match=r"its logits differ from the adapter's by .* nothing was exported"):
        export(adapter, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == []


@pytest.mark.slow
def test_a_base_quantized_out_of_bfloat16_is_compared_with_the_same_weights(copy: Path, tmp_path: Path) -> None:
    edit_record(copy, load_in_4bit=True, dtype="bfloat16")  # stored in float32: other weights come out of that
    done = export(copy, "merged", tmp_path / "merged")
    assert done.checks["logits_difference"] <= done.checks["logits_rounding"]


def test_a_merged_layer_is_not_merged_again(tmp_path: Path) -> None:
    model = adapted(False)
    model.merge_adapter()
    with pytest.raises(AdapterError, match=r"unmerge it \(model.unmerge_adapter\(\)\)"):
        model.save_pretrained_merged(tmp_path / "out")
    assert names_beside(tmp_path) == []


def test_peft_loads_an_exported_adapter(saved: tuple[FastPeftModel, Path], tmp_path: Path) -> None:
    model, folder = saved
    done = export_command(folder, "--format", "adapter", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "all 84 tensors equal" in done.output
    if not any(hasattr(parameter, "quant_state") for parameter in model.parameters()):
        plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), str(tmp_path / "out"))
        torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)
