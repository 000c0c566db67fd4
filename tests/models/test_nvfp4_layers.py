"""NVFP4 checkpoints of compressed-tensors: read as they are stored, trained, merged, resumed; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nvfp4_weights import plain_model, quantization_config, save_in_nvfp4
from peft import PeftModel
from safetensors.torch import load_file, save_file
from small_models import scatter
from trainer_runs import by_letters, largest_ratio_error, make
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.fused_weights import fuse_weights, joined_weights
from lowmem_grpo.models.nvfp4_layers import NVFP4Linear
from lowmem_grpo.runs.saved_adapter import base_of_adapter
from tests.attacks.small_run import StopAt, differences

IDS = torch.arange(5, 45).view(2, 20)
SCHEMES = ("W4A16", "W4A4")


def load(folder: Path, **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(folder), **{"max_seq_length": 64, "dtype": torch.float32} | options)[0]


def layers(model: Any) -> dict[str, NVFP4Linear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, NVFP4Linear)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_is_read_as_it_is_and_it_is_said(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = save_in_nvfp4(tmp_path, scheme)
    with caplog.at_level("INFO", logger="lowmem_grpo"):
        model = load(tmp_path, load_in_4bit=True)
    assert "is stored in NVFP4: its weights are used as they are" in caplog.text
    left = "13 scales of activations are left out, such as model.layers.0.mlp.down_proj.input_global_scale"
    assert (left in caplog.text) == (scheme == "W4A4")
    stored, held = load_file(tmp_path / "model.safetensors"), layers(model.inner)
    assert len(held) == 13  # one of 14 was stored in 16 bits
    for path, layer in held.items():
        assert torch.equal(layer.weight, stored[f"{path}.weight_packed"]), path
        assert torch.equal(layer.weight_scale, stored[f"{path}.weight_scale"].view(torch.uint8)), path
        assert torch.equal(layer.frozen.dequantized(), values[f"{path}.weight"]), path
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16,
                                               quantization_config=CompressedTensorsConfig(dequantize=True))
    in_16_bits = load(tmp_path, dtype=torch.bfloat16).inner
    for path, layer in layers(in_16_bits).items():
        assert torch.equal(layer.frozen.dequantized(), own.get_submodule(path).weight), path


@pytest.mark.parametrize(("family", "sizes"), [
    ("Llama", {"attention_bias": True}), ("Qwen3", {}), ("Gemma3", {}), ("Phi3", {})])
@pytest.mark.every(2)
def test_log_probabilities_and_gradients_are_those_of_plain_transformers(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    values, outcomes = save_in_nvfp4(tmp_path / "base", family=family, **sizes), []
    model = load(tmp_path / "base", load_in_4bit=False)
    model = scatter(FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)).train()
    assert len(layers(model)) == sum("_proj.weight" in name for name in values) - 1
    model.save_lora(tmp_path / "adapter")
    plain = plain_model(tmp_path / "base", values, tmp_path / "plain")
    plain = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"), is_trainable=True).train()
    for one in (model, plain):
        one.zero_grad()
        logprobs = one(input_ids=IDS).logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None])
        logprobs.mean().backward()
        outcomes.append((logprobs.detach(), {name: parameter.grad for name, parameter in one.named_parameters()
                                             if parameter.grad is not None}))
    (found, gradients), (wanted, true) = outcomes
    assert (found - wanted).abs().max() < 1e-5
    assert gradients.keys() == true.keys() and len(true) >= 2 * len(layers(model))
    for name, gradient in true.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_layers_that_share_an_input_lie_side_by_side_each_with_its_global_scale(tmp_path: Path) -> None:
    values = save_in_nvfp4(tmp_path)
    model = load(tmp_path).inner
    attention = model.model.layers[0].self_attn
    parts = [getattr(attention, f"{name}_proj") for name in "qkv"]
    whole = joined_weights([part.frozen for part in parts])
    assert whole is not None and len({part.weight_global_scale[0].item() for part in parts}) == 3
    path = "model.layers.0.self_attn.{}_proj.weight"
    assert torch.equal(whole.dequantized(), torch.cat([values[path.format(name)] for name in "qkv"]))
    assert whole.out_features == (32, 16, 16)
    assert joined_weights([parts[0].frozen, parts[2].frozen]) is None
    with pytest.raises(ValueError, match="differ in width"):
        NVFP4Linear.fuse([attention.q_proj, model.model.layers[0].mlp.down_proj])
    assert fuse_weights(model) == []


def test_the_planner_knows_the_weights_to_the_byte(tmp_path: Path) -> None:
    save_in_nvfp4(tmp_path, hidden_size=96, intermediate_size=208)
    tensors = load_file(tmp_path / "model.safetensors")
    model = load(tmp_path, dtype=torch.bfloat16).inner
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in tables)
    plain = tensors["model.layers.0.self_attn.o_proj.weight"]
    more = 2 * plain.numel() - (plain.numel() // 2 + plain.numel() // 16 + 4 * len(plain))  # it is held in 16 bits
    assert ModelShape.from_config(model.config).weight_bytes("nvfp4") == held - more


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_trained_on_nvfp4_is_merged_with_it_saved_and_loaded_again(
    scheme: str, tmp_path: Path
) -> None:
    """The loaded model and the files give the same: the values of compressed-tensors, plus the adapter."""
    values = save_in_nvfp4(tmp_path / "base", scheme)
    model = scatter(FastLanguageModel.get_peft_model(load(tmp_path / "base"), r=4, use_gradient_checkpointing=False))
    model.save_lora(tmp_path / "adapter")
    assert base_of_adapter(tmp_path / "adapter").load_in_4bit is True
    model.save_pretrained_merged(tmp_path / "live")
    export(tmp_path / "adapter", "merged", tmp_path / "stored")
    live, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "stored"))
    assert live.keys() == stored.keys() == values.keys()
    assert all(torch.equal(live[name], stored[name]) for name in live)
    for path, layer in model.get_base_model().named_modules():
        if hasattr(layer, "base_layer"):
            wanted = values[f"{path}.weight"].double() + layer.get_delta_weight("default").double()
            torch.testing.assert_close(live[f"{path}.weight"].double(), wanted, rtol=2**-8, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "stored" / "config.json").read_text())
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64)
    assert len(layers(again)) == 13
    found, wanted = (dict(one.named_parameters()) for one in (again, model))
    assert all(torch.equal(found[name], parameter) for name, parameter in wanted.items())
    with pytest.raises(ValueError, match=r"not merged into weights in NVFP4.*save_pretrained_merged"):
        model.merge_adapter()


def test_a_run_trains_samples_as_it_trains_and_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    save_in_nvfp4(tmp_path / "base")

    def run(folder: str, *callbacks: Any) -> Any:
        model = FastLanguageModel.get_peft_model(load(tmp_path / "base"), r=4, use_gradient_checkpointing=False)
        return make(tmp_path / folder, by_letters, model=model, callbacks=callbacks, max_steps=4, save_strategy="steps",
                    save_steps=2, logging_steps=1)

    whole = run("whole")
    whole.train()
    assert largest_ratio_error(whole, whole.rollout()) <= 1e-4
    assert run("parts", StopAt(2)).train().global_step == 2
    assert run("parts").train(resume_from_checkpoint=True).finished
    assert differences(tmp_path / "parts", tmp_path / "whole") == []


def changed(folder: Path, change: Any) -> None:
    """Rewrite the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def edited(part: str, value: Any) -> Any:
    """A change of one tensor of the last layer's up_proj: `value` of it, or without it."""
    name = f"model.layers.1.mlp.up_proj.{part}"

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        return rest if value is None else rest | {name: value(tensors[name]).contiguous()}

    return change


UP = r"model.layers.1.mlp.up_proj."
BROKEN: dict[str, tuple[Any, str]] = {
    "no codes": (edited("weight_packed", None), UP + "weight_packed is missing; a layer of 48 x 32 weights in NVFP4"),
    "no scales": (edited("weight_scale", None), UP + r"weight_scale is missing; .* F8_E4M3 \(48, 2\)"),
    "no global scale": (edited("weight_global_scale", None), UP + r"weight_global_scale is missing; .* F32 \(1,\)"),
    "short packed columns": (edited("weight_packed", lambda t: t[:, :12]), UP + r"weight_packed is U8 \(48, 12\)"),
    "padded scale columns": (
        edited("weight_scale", lambda t: torch.nn.functional.pad(t.view(torch.uint8), (0, 2), value=127)
               .view(torch.float8_e4m3fn)), UP + r"weight_scale is F8_E4M3 \(48, 4\); .* F8_E4M3 \(48, 2\)"),
    "groups of 32": (edited("weight_scale", lambda t: t[:, :1]), UP + r"weight_scale is F8_E4M3 \(48, 1\)"),
    "scales in another dtype": (edited("weight_scale", lambda t: t.float()), UP + r"weight_scale is F32 \(48, 2\)"),
    "scales of NaN": (edited("weight_scale", lambda t: torch.full((48, 2), float("nan")).to(torch.float8_e4m3fn)),
                      UP[:-1] + " is stored in NVFP4, and its scales are not finite"),
    "a global scale of 0": (edited("weight_global_scale", lambda t: 0 * t), "or its global scale is 0"),
    "a head in NVFP4": (lambda t: t | {"lm_head.weight_packed": t["model.layers.0.mlp.up_proj.weight_packed"].clone()},
                        "lm_head is stored in NVFP4, and only linear layers of the decoder may be"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_that_cannot_be_right_is_refused_with_the_tensor(name: str, tmp_path: Path) -> None:
    save_in_nvfp4(tmp_path)
    change, message = BROKEN[name]
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=f"{message}(?s:.*)Take the model's checkpoint in 16 bits"):
        load(tmp_path)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
MIXED = quantization_config()["config_groups"] | {
    "fp8": {"targets": ["Linear"], "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "group_size": 16}}}
CONFIGS = {
    "NVFP4 in groups of 32, not of 16": quantization_config(group_size=32), "ModelOpt": MODELOPT,
    "NVFP4, which": quantization_config(num_bits=8), "NVFP4, which ": quantization_config(symmetric=False),
    "compressed-tensors with several kinds of blocks": quantization_config() | {"config_groups": MIXED},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_other_layouts_are_refused_by_name_before_a_tensor_is_read(name: str, tmp_path: Path) -> None:
    save_in_nvfp4(tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(own | {"quantization_config": CONFIGS[name]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=f"is stored in {name.strip()}.*NVFP4 of compressed-tensors.*in 16 bits"):
        load(tmp_path)
