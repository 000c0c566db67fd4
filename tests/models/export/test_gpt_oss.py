"""gpt-oss with LoRA on its experts, saved and merged: PEFT reads our adapters, we read PEFT's, and transformers reads
merged models, which have the update of all experts."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export_tools import export_command
from gpt_oss import gpt_oss_folder, plain_gpt_oss
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import scatter
from torch import Tensor

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.fast_model import FastPeftModel, adapter_for
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.formats import warn_of_yarn
from lowmem_grpo.models.export.merge import MergeError, check_merged, read_pairs, write_merged
from lowmem_grpo.models.export.stored_weights import stored_weights, tensor_files
from lowmem_grpo.runs.saved_adapter import AdapterError

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_folder(tmp_path_factory.mktemp("gpt_oss"), experts=4)


def load(folder: Path, **options: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=512, dtype=torch.float32, **({"load_in_4bit": False} | options))
    return model


def adapted(folder: Path, **options: Any) -> FastPeftModel:
    return scatter(FastLanguageModel.get_peft_model(load(folder, **options), r=3, use_gradient_checkpointing=False,
                                                    target_modules=["q_proj", "o_proj", "gate_up_proj", "down_proj"]),
                   0.1, of="lora_")


@pytest.fixture(scope="module")
def model(base: Path) -> FastPeftModel:
    """Loaded, with LoRA that matters. Never changed."""
    return adapted(base)


@pytest.fixture(scope="module")
def saved(model: FastPeftModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model.save_lora(folder := tmp_path_factory.mktemp("saved") / "adapter")
    return folder


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model.eval()(input_ids=torch.arange(3, 200)[None]).logits.float()


def by_peft(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(plain_gpt_oss(base), str(adapter))


def adapted_by_peft(base: Path, folder: Path) -> Any:
    """PEFT's own model with random LoRA on attention and experts, saved in `folder`."""
    torch.manual_seed(1)
    model = get_peft_model(plain_gpt_oss(base), LoraConfig(
        r=2, lora_alpha=3, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], target_parameters=BOTH))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(str(folder))
    return model


def test_peft_computes_on_transformers_model_with_our_adapter_what_we_compute(
    base: Path, model: FastPeftModel, saved: Path
) -> None:
    settings = json.loads((saved / "adapter_config.json").read_text())
    assert sorted(settings["target_modules"]) == ["o_proj", "q_proj"] and settings["target_parameters"] == BOTH
    wanted, bare = logits_of(by_peft(base, saved)), logits_of(plain_gpt_oss(base))
    assert (wanted - bare).abs().max() > 0.5
    assert (logits_of(model) - wanted).abs().max() < 1e-4


def test_we_compute_with_pefts_adapter_what_peft_computes_and_save_it_with_the_same_names(
    base: Path, model: FastPeftModel, tmp_path: Path
) -> None:
    wanted = logits_of(adapted_by_peft(base, tmp_path / "theirs"))
    loaded = load(tmp_path / "theirs")
    assert (logits_of(loaded) - wanted).abs().max() < 1e-4
    with adapter_for(model, model.load_lora(tmp_path / "theirs")):
        assert (logits_of(model) - wanted).abs().max() < 1e-4
    loaded.save_lora(tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / FILE) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {parameter.requires_grad for name, parameter in loaded.named_parameters() if "lora_" in name} == {True}


def test_an_adapter_that_lacks_the_experts_of_a_layer_is_refused(
    model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "torn")
    tensors = {name: tensor for name, tensor in load_file(saved / FILE).items() if "1.mlp.experts.lora" not in name}
    save_file(tensors, tmp_path / "torn" / FILE)
    with pytest.raises(AdapterError, match=r"holds .*layers\.1\.mlp\.experts\.base_layer|lacks 1 of the layers"):
        model.load_lora(tmp_path / "torn")


def test_stored_experts_are_read_as_transformers_decodes_them(base: Path) -> None:
    wanted = plain_gpt_oss(base).state_dict()
    weights = stored_weights(base, None, "16bit", torch.bfloat16)
    assert {weight.name for weight in weights} == wanted.keys()
    for weight in weights:
        assert weight.shape == wanted[weight.name].shape
        assert torch.equal(weight.open()(1, 3).float(), wanted[weight.name][1:3]), weight.name


def test_a_merge_has_the_lora_of_all_experts_that_peft_merges(base: Path, tmp_path: Path) -> None:
    peft, pairs = adapted_by_peft(base, tmp_path / "adapter"), read_pairs(tmp_path / "adapter")
    weights, out = stored_weights(base, None, "16bit", torch.bfloat16), tmp_path / "out"
    out.mkdir()
    write_merged(out, weights, pairs, torch.bfloat16)
    assert check_merged(out, tensor_files(out), weights, pairs).merged == 8  # 2 layers of attention, 2 of experts
    merged = load_file(out / "model.safetensors")
    for name, wanted in peft.merge_and_unload().state_dict().items():
        assert (merged[name] != wanted.bfloat16()).float().mean() < 1e-3, name  # float32 rounds some sums otherwise
    for missing in ("layers.1.mlp.experts.down_proj", "layers.0.mlp.experts.gate_up_proj"):
        with pytest.raises(MergeError, match=f"layer model.{missing}.* is not in the base model"):
            write_merged(out, [weight for weight in weights if missing not in weight.name], pairs, torch.bfloat16)


@pytest.mark.every(2)
@pytest.mark.parametrize("form", ["mxfp4", "16bit", "nf4", "mxfp4 beside nf4"])
def test_plain_transformers_computes_with_a_merged_model_what_was_trained(
    form: str, base: Path, tmp_path: Path
) -> None:
    folder = base if "mxfp4" in form else gpt_oss_folder(tmp_path / "base", "16bit", experts=4)
    model = adapted(folder, load_in_4bit="nf4" in form)
    model.save_lora(tmp_path / "adapter")
    model.save_pretrained_merged(tmp_path / "live")
    done = export_command(tmp_path / "adapter", "--out", tmp_path / "files")
    assert done.exit_code == 0 and "8 of them merged" in done.output, done.output
    live, files = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "files"))
    assert live.keys() == files.keys() and all(torch.equal(files[name], tensor) for name, tensor in live.items())
    apart = logits_of(plain_gpt_oss(tmp_path / "live")) - logits_of(model)
    assert apart.square().mean().sqrt() < 0.03  # weights were rounded to 16 bits


def test_experts_without_an_update_keep_their_bytes_in_mxfp4_and_others_are_rounded_again(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(base)
    stacks = [module for name, module in model.named_modules() if name.endswith("experts.down_proj")]
    for stack in stacks:
        stack.lora_B["default"].weight.data.unflatten(1, (-1, 4))[..., 1:] = 0  # only the first expert is trained
    with caplog.at_level(logging.WARNING):
        out = model.save_pretrained_merged(tmp_path / "out", save_method="mxfp4")
    assert "10 of 16 matrices of experts were rounded to MXFP4 again" in caplog.text
    stored, written = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert stored.keys() == written.keys()
    for name, tensor in stored.items():
        same = (tensor == written[name]).flatten(1).all(1) if "experts" in name and "bias" not in name else None
        assert same is None or same.tolist() == [False, *["down" in name] * 3], name
    plain, merged = plain_gpt_oss(out), model.save_pretrained_merged(tmp_path / "16")
    for name, rounded in plain.state_dict().items():
        wanted = load_file(merged / "model.safetensors")[name].float()
        step = 0.25 if "experts" in name and "bias" not in name else 0  # E2M1 has steps of 1 from 2 to 4
        blocks = wanted.mT.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) if step else wanted
        apart = (rounded - wanted).mT.unflatten(-1, (-1, 32)).abs() if step else (rounded - wanted).abs()
        assert (apart <= step * blocks).all() if step else torch.equal(rounded, wanted), name
    assert (logits_of(load(out)) - logits_of(plain)).abs().max() < 1e-4


def test_the_command_writes_mxfp4_as_the_loaded_model_does_and_says_its_error(
    model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    model.save_pretrained_merged(tmp_path / "live", save_method="mxfp4")
    done = export_command(saved, "--format", "merged_mxfp4", "--out", tmp_path / "files")
    assert done.exit_code == 0 and "16 matrices, 16 of them quantized again, with an error of 0." in done.output
    live, files = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "files"))
    assert live.keys() == files.keys() and all(torch.equal(files[name], tensor) for name, tensor in live.items())


def test_what_gpt_oss_and_other_families_are_not_written_as_is_refused_by_name(
    model: FastPeftModel, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="a mixture of experts is not written in 4 bits"):
        model.save_pretrained_merged(tmp_path / "out", save_method="merged_4bit_forced")
    tiny, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    with pytest.raises(ExportError, match="only gpt-oss is stored so"):
        tiny.save_pretrained_merged(tmp_path / "out", save_method="mxfp4")


def test_other_frequencies_of_llama_cpp_are_told(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_yarn(base)
    assert caplog.text.count("llama.cpp rounds the two bounds of YaRN's ramp") == 1


def test_a_scale_that_is_nan_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    folder = gpt_oss_folder(tmp_path / "base", experts=4)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    read = {weight.name: weight for weight in stored_weights(folder, None, "16bit", torch.bfloat16)}
    with pytest.raises(ValueError, match=r"safetensors: model\.layers\.1\.mlp\.experts\.down_proj: 1 of .* scales are"):
        read["model.layers.1.mlp.experts.down_proj"].open()(2, 3)
