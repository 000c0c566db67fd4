"""FP8 models: quantized while loading, or read as they are stored; their steps, their memory, and what is refused."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_weights import CHECKPOINTS, compressed, dequantized, save_16_bit, save_in_fp8
from memory import LiveStorage
from safetensors.torch import load_file, save_file
from small_models import SPLIT, scatter
from tables import not_refused
from torch import nn

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.kernels import frozen_weight
from lowmem_grpo.kernels.fp8 import fp8_dequantize, fp8_quantize
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.models.fp8_layers import FP8Linear, fp8_linears
from lowmem_grpo.models.pretrained import Pretrained

BLOCKS = {"fp8": None, "fp8-block": (128, 128)}
IDS = torch.arange(5, 45).view(2, 20)


def load(folder: Path, form: str = "nf4", dtype: torch.dtype = torch.float32) -> Any:
    return Pretrained(str(folder), str(folder), {}).load(dtype, "cpu", form)[0]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The loss of two sequences, and the gradient of every trained tensor."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad.clone() for name, parameter in model.named_parameters()
                                      if parameter.grad is not None}


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Phi3"])
@pytest.mark.parametrize("form", BLOCKS)
def test_every_layer_but_the_head_holds_the_stored_weight_in_fp8(form: str, family: str, tmp_path: Path) -> None:
    stored = load_file(save_16_bit(tmp_path, family) / "model.safetensors")
    model = load(tmp_path, form, torch.bfloat16)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears - {"lm_head"} == {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    for name, parameter in model.named_parameters():
        module, wanted = model.get_submodule(name.rpartition(".")[0]), stored[name].bfloat16()
        if isinstance(module, FP8Linear):
            weight = fp8_quantize(wanted, BLOCKS[form])
            assert torch.equal(parameter, weight.codes), name
            assert torch.equal(module.weight_scale, weight.scales), name
        else:
            assert torch.equal(parameter, wanted), name
        assert not parameter.requires_grad


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_in_fp8_is_read_as_it_is(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = save_in_fp8(tmp_path, kind)
    with caplog.at_level("INFO", logger="lowmem_grpo"):
        model = load(tmp_path)
    assert "is stored in FP8: its weights are used as they are" in caplog.text
    assert len(list(fp8_linears(model))) == 13  # one of 14 was stored in 16 bits
    for name, value in values.items():
        module = model.get_submodule(name.rpartition(".")[0])
        found = fp8_dequantize(module.frozen) if isinstance(module, FP8Linear) else module.weight
        assert torch.equal(found, value), name
    plain = dequantized(copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["fine-grained, one scale", "fine-grained"])
def test_scales_of_activations_are_left_out_in_one_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_fp8(tmp_path, kind)
    cache = {f"model.layers.0.self_attn.{name}_scale": torch.ones(()) for name in "kv"}
    changed(tmp_path, lambda tensors: tensors | cache)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("INFO"):
        load(tmp_path)
    count = 15 if "one" in kind else 2
    assert f"{count} scales of activations are left out, such as model.layers." in caplog.text
    assert "LOAD REPORT" not in caplog.text, "transformers' table of what it did not expect"


@pytest.mark.parametrize(("asked", "warned"), [
    ({}, True), ({"load_in_4bit": True}, True), ({"load_in_4bit": False}, False), ({"load_in_fp8": True}, False),
    ({"load_in_fp8": "block"}, False), ({"load_in_16bit": True}, False),
])
def test_an_fp8_checkpoint_stays_in_fp8_whatever_was_asked_and_it_is_said(
    asked: dict[str, Any], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_in_fp8(tmp_path, "fine-grained")
    with caplog.at_level("INFO", logger="lowmem_grpo"):
        model, _ = FastLanguageModel.from_pretrained(str(tmp_path), **asked)
    assert any(fp8_linears(model.inner))
    said = [record for record in caplog.records if "stored in FP8" in record.message]
    assert [record.levelname for record in said] == ["WARNING" if warned else "INFO"]
    assert ("not in 4 bits" in said[0].message) == warned


@pytest.mark.parametrize(("form", "options", "dtype"), [
    ("fp8", {}, torch.float32), ("fp8-block", {}, torch.float32), ("fp8", {"lora_dropout": 0.3}, torch.float32),
    ("fp8", {}, torch.bfloat16),
])
@pytest.mark.every(2)
def test_a_training_step_is_that_of_the_dequantized_model(
    form: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """With dropout our kernels stand aside, and PEFT's own forward pass calls the layer."""
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_fp8="block" if form == "fp8-block" else True,
                                                 dtype=dtype, max_seq_length=64)
    model = scatter(FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=True, **options))
    torch.manual_seed(0)
    found = gradients(model.train())
    plain: Any = dequantized(copy.deepcopy(model))
    torch.manual_seed(0)
    wanted = gradients(plain.train())
    assert len(found) == 1 + 2 * 42
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        limit = (1e-4 if dtype == torch.float32 else 0.1) * value.abs().max() + 1e-7
        assert (found[name] - value).abs().max() <= limit, name


def test_a_step_keeps_no_dequantized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers' weights take 2.4 MB in 16 bits; no storage that a step makes is as large as one band."""
    monkeypatch.setattr(frozen_weight, "BAND_BYTES", 2**13)
    monkeypatch.setattr("lowmem_grpo.kernels.fp8.REFERENCE_ELEMENTS", 2**11)
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_fp8=True, dtype=torch.bfloat16, max_seq_length=64)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    weights = sum(layer.weight.nbytes for layer in fp8_linears(model))
    with LiveStorage() as storage:
        hidden = model.get_base_model().model(input_ids=IDS[:1, :4]).last_hidden_state
        kept = storage.live
        hidden.sum().backward()
    assert kept < weights / 2
    assert storage.largest < 2**15
    assert weights > 1_000_000


def test_quantizing_while_loading_holds_the_fp8_model_and_one_tensor(tmp_path: Path) -> None:
    """What operations make while a model is loaded. (That the process holds no more: tests/test_loader.py.)"""
    large = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12}
    save_16_bit(tmp_path, "Llama", **large)
    with LiveStorage() as storage:
        model = load(tmp_path, "fp8", torch.bfloat16)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    in_16_bits = sum(2 * parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    assert held < 0.55 * in_16_bits
    assert storage.peak < held + 14 * largest < 0.7 * in_16_bits  # one in 16 bits, and three times in float32


@pytest.mark.parametrize("form", BLOCKS)
def test_the_planner_knows_the_weights_to_the_byte(form: str, tmp_path: Path) -> None:
    save_16_bit(tmp_path, "Llama", hidden_size=96, intermediate_size=200)
    model = load(tmp_path, form, torch.bfloat16)
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in tables)
    assert ModelShape.from_config(model.config).weight_bytes(form) == held


def test_an_adapter_is_not_merged_into_codes() -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_fp8=True, max_seq_length=64)
    model = FastLanguageModel.get_peft_model(model, r=4)
    with pytest.raises(ValueError, match=r"not merged into weights in FP8.*save_pretrained_merged"):
        model.merge_adapter()


CONFIGS: dict[str, dict[str, Any]] = {
    "MXFP4": {"quant_method": "mxfp4"}, "GPTQ": {"quant_method": "gptq", "bits": 4}, "AWQ": {"quant_method": "awq"},
    "NVFP4": {"quant_method": "nvfp4"}, "ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "NVFP4 ": compressed("tensor_group") | {"format": "nvfp4-pack-quantized"},
    "packed integers": compressed("group", type="int", num_bits=4) | {"format": "pack-quantized"},
    "compressed-tensors, float-quantized": compressed("channel", num_bits=4),
    "bitsandbytes, 8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
    "FP8 of the kind e5m2": {"quant_method": "fp8", "fmt": "e5m2"}, "quip": {"quant_method": "quip"},
    "compressed-tensors, float-quantized ": compressed("channel", symmetric=False),
    "compressed-tensors without quantized weights": {**compressed("channel"), "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}}},
    "compressed-tensors without quantized weights ": compressed("channel") | {
        "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "compressed-tensors with several kinds": compressed("channel") | {"config_groups": {
        name: compressed("block", block_structure=size)["config_groups"]["group_0"]
        for name, size in (("a", [8, 8]), ("b", [16, 16]))}},
}


def test_another_form_is_refused_by_name_with_what_to_use(tmp_path: Path) -> None:
    own = json.loads((save_16_bit(tmp_path, "Llama") / "config.json").read_text())

    def load_as(name: str) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(own | {"quantization_config": CONFIGS[name]}))
        return FastLanguageModel.from_pretrained(str(tmp_path))

    rows = [(name, (f"is stored in {name.strip()}", ", which is not trained here", "16 bits", "load"))
            for name in CONFIGS]
    assert not_refused(load_as, rows) == []


def changed(folder: Path, change: Any) -> None:
    """Rewrite the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


BROKEN: dict[str, tuple[Any, str]] = {
    "no scales": (lambda t: {n: v for n, v in t.items() if "scale" not in n}, r"scales \(.*weight_scale or _inv\) are "
                  "missing"),
    "one scale missing": (lambda t: {n: v for n, v in t.items() if n != "model.layers.1.mlp.up_proj.weight_scale_inv"},
                          r"model.layers.1.mlp.up_proj.weight is stored in FP8, and its scales .* are missing"),
    "scales of another shape": (lambda t: {n: v[:1] if "down_proj.weight_scale" in n else v for n, v in t.items()},
                                r"down_proj.weight \(32, 48\) is stored in FP8 with scales \(1, 3\), which"),
    "a weight missing": (lambda t: {n: v for n, v in t.items() if n != "model.layers.0.mlp.up_proj.weight"},
                         r"_inv is there, and the weights that it scales \(.*0.mlp.up_proj.weight\) are missing"),
    "another shape": (lambda t: {n: v[:, :30].contiguous() if n == "model.layers.1.mlp.up_proj.weight" else v
                                 for n, v in t.items()},
                      r"1.mlp.up_proj.weight is stored in FP8 as \(48, 30\), and the model's layer is \(48, 32\)"),
    "scales that are not finite": (lambda t: {n: v * float("nan") if "scale" in n else v for n, v in t.items()},
                                   "is stored in FP8, and its scales are not finite"),
    "e5m2": (lambda t: {n: v.float().to(torch.float8_e5m2) if v.dtype == torch.float8_e4m3fn else v
                        for n, v in t.items()}, "is stored in F8_E5M2; of 8-bit floats only e4m3 is read"),
    "a head in FP8": (lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)},
                      "lm_head.weight is stored in FP8, and only linear layers of the decoder may be"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_fp8_checkpoint_that_cannot_be_right_is_refused_with_the_tensor(name: str, tmp_path: Path) -> None:
    save_in_fp8(tmp_path, "fine-grained")
    change, message = BROKEN[name]
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=f"{message}(?s:.*)Take the model's checkpoint in 16 bits"):
        load(tmp_path)


def test_lora_names_are_found_and_q_k_v_lie_side_by_side() -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_fp8=True, max_seq_length=64)
    layer = model.inner.model.layers[0]
    parts = [getattr(layer.self_attn, name) for name in SPLIT[:3]]
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    assert len({part.weight_scale.untyped_storage().data_ptr() for part in parts}) == 1
