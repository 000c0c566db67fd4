"""Exports: what is written is the adapter on its base, whole or not there at all, and refusals lose nothing."""

import json
import struct
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from click.testing import CliRunner, Result
from live_storage import LiveStorage
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import TINY
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.cli import main
from lowmem_grpo.export import merge
from lowmem_grpo.export.base_weights import Weight, live_weights, stored_weights, tensor_files
from lowmem_grpo.export.folder import ExportError, new_folder
from lowmem_grpo.export.formats import ExportSettings, export
from lowmem_grpo.export.gguf import GGUFError, command, find_converter, read_gguf
from lowmem_grpo.export.lora_pairs import AdapterError, LoraPair, live_pairs, read_pairs
from lowmem_grpo.export.merge import MergeCheck, MergeError, check_merged, plan_shards, size_of, tiles, write_merged
from lowmem_grpo.fast_model import FastPeftModel, UnsupportedError
from lowmem_grpo.hub import HubError
from lowmem_grpo.memory.model_shape import named_config
from lowmem_grpo.models.fused_weights import fuse_weights
from lowmem_grpo.runs.checkpoint import CheckpointError, save_checkpoint
from lowmem_grpo.runs.saved_adapter import RunError, find_adapter
from lowmem_grpo.units import GIB

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def adapted(four_bit: bool, name: str = "tiny", spread: float = 0.05) -> FastPeftModel:
    """A model under an adapter whose factors are both random."""
    bare, _ = FastLanguageModel.from_pretrained(name, max_seq_length=128, load_in_4bit=four_bit)
    return randomized(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False), spread)


def randomized(model: FastPeftModel, spread: float = 0.05) -> FastPeftModel:
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(0, spread, generator=generator)
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["16 bit", "NF4"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FastPeftModel, Path]:
    """A model that is held in 16 or in 4 bits, and the folder of its adapter."""
    model, folder = adapted(request.param), tmp_path_factory.mktemp("saved") / "adapter"
    model.save_lora(folder)
    return model, folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter on 16-bit weights."""
    folder = tmp_path_factory.mktemp("plain") / "adapter"
    adapted(False).save_lora(folder)
    return folder


@pytest.fixture
def copy(adapter: Path, tmp_path: Path) -> Path:
    """The same in a folder that may be changed."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in adapter.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of logits, which loads three models: what is tested is something else."""
    monkeypatch.setattr("lowmem_grpo.export.formats.LARGEST", 0)
    monkeypatch.setattr("lowmem_grpo.export.merged.LARGEST", 0)


def invoke(*words: Any) -> Result:
    return CliRunner().invoke(main, ["export", *(str(word) for word in words)])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found.float()


def names_beside(folder: Path) -> list[str]:
    """What an export has left behind, hidden files and all."""
    return sorted(path.name for path in folder.iterdir())


# merged


def test_a_merged_model_is_base_plus_adapter_for_plain_transformers(
    saved: tuple[FastPeftModel, Path], tmp_path: Path
) -> None:
    model, folder = saved
    done = invoke(folder, "--out", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    wanted, found, base = logits(model), logits(loaded), logits(model.get_base_model())
    with model.disable_adapter():
        base = logits(model)
    error = (found - wanted).square().mean().sqrt()
    assert error < 0.02 * (wanted - base).square().mean().sqrt()  # the adapter matters, and is there
    assert error < 2**-8 * 4 * wanted.square().mean().sqrt()
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.config.dtype == torch.float32
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    chat = [{"role": "user", "content": "Start"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == model.loaded.tokenizer.apply_chat_template(
        chat, tokenize=False)
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied: stored once
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "logits differ" in done.output


def test_each_merged_weight_is_what_peft_and_bitsandbytes_say_rounded_once(
    saved: tuple[FastPeftModel, Path], tmp_path: Path, unequal: None
) -> None:
    model, folder = saved
    export(folder, "merged", tmp_path / "merged")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
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
    saved: tuple[FastPeftModel, Path], tmp_path: Path, unequal: None
) -> None:
    model, folder = saved
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.save_pretrained_merged(tmp_path / "live", model.loaded.tokenizer, save_method="merged_16bit")
    export(folder, "merged", tmp_path / "stored")
    live, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "stored"))
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


@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bit", "NF4"])
def test_weights_laid_out_for_vllm_are_exported_as_they_were(four_bit: bool, tmp_path: Path, unequal: None) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
        "eos_token_id": 2, "bos_token_id": None, "tie_word_embeddings": False,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "base")
    bare, _ = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=64, load_in_4bit=four_bit)
    assert fuse_weights(bare.inner) == []
    model = randomized(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False))
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


def test_the_adapter_alone_is_a_save_method_and_others_are_named(
    saved: tuple[FastPeftModel, Path], tmp_path: Path
) -> None:
    model, _ = saved
    model.save_pretrained_merged(tmp_path / "lora", save_method="lora")
    assert read_pairs(tmp_path / "lora").keys() == live_pairs(model).keys()
    with pytest.raises(UnsupportedError, match="save_method is 'merged_4bit'; allowed are 'merged_16bit' and 'lora'"):
        model.save_pretrained_merged(tmp_path / "other", save_method="merged_4bit")
    with pytest.raises(ExportError, match="dtype is 'float32'; allowed are bfloat16, float16"):
        model.save_pretrained_merged(tmp_path / "other", dtype="float32")
    assert names_beside(tmp_path) == ["lora"]


def test_saving_the_adapter_alone_loses_no_folder_and_takes_no_dtype(
    saved: tuple[FastPeftModel, Path], tmp_path: Path
) -> None:
    model, _ = saved
    out = tmp_path / "out"
    out.mkdir()
    (out / "adapter_model.safetensors").write_bytes(b"an older adapter")
    for overwrite, message in ((False, "is not empty"), (True, "is no export of this command")):
        with pytest.raises(ExportError, match=message):
            model.save_pretrained_merged(out, save_method="lora", overwrite=overwrite)
    assert (out / "adapter_model.safetensors").read_bytes() == b"an older adapter"
    with pytest.raises(UnsupportedError, match="dtype is 'float16'; save_method=\"lora\" keeps the adapter's own"):
        model.save_pretrained_merged(tmp_path / "new", save_method="lora", dtype="float16")
    assert model.save_pretrained_merged(tmp_path / "new", save_method="lora") == tmp_path / "new"
    with pytest.raises(ExportError, match="--overwrite"):
        model.save_pretrained_merged(tmp_path / "new", save_method="lora")
    model.save_pretrained_merged(tmp_path / "new", save_method="lora", overwrite=True)
    assert read_pairs(tmp_path / "new").keys() == live_pairs(model).keys()
    assert names_beside(tmp_path) == ["new", "out"]


def test_shards_together_are_the_model(adapter: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(TINY)
    weights, pairs = stored_weights(TINY, config, False, torch.float32), read_pairs(adapter)
    told: list[int] = []
    for folder, size in (("one", GIB), ("many", 300_000)):
        (tmp_path / folder).mkdir()
        write_merged(tmp_path / folder, weights, pairs, torch.bfloat16, lambda done, total: told.append(done), size)
    assert told == [*range(1, 75), *range(1, 75)]
    files = tensor_files(tmp_path / "many")
    assert len(set(files.values())) > 5
    assert all(path.stat().st_size < 330_000 for path in files.values())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    for name, tensor in whole.items():
        with safe_open(files[name], "pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)
    assert check_merged(tmp_path / "many", files, weights, pairs).merged == 42


# what reading back finds


@pytest.mark.parametrize(("damage", "message"), [
    (lambda tensors: tensors["model.norm.weight"].mul_(1.02), "model.norm.weight was read back and is not what"),
    (lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][3].zero_(), "up_proj.weight was read back and is"),
    (lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), "model.norm.weight was read back and is not what"),
    (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing or too many"),
])
def test_a_damaged_file_is_found_and_nothing_is_left(
    damage: Any, message: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        damage(tensors)
        save_file(tensors, *rest)

    monkeypatch.setattr(merge, "save_file", damaged)
    with pytest.raises(MergeError, match=message):
        export(adapter, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == []


def merged_alone(folder: Path, base: torch.Tensor, written: LoraPair, meant: LoraPair) -> MergeCheck:
    """One weight merged with a pair, and checked against the one that was meant."""
    weight = Weight("q.weight", tuple(base.shape), base.dtype, lambda: lambda start, stop: base[start:stop])
    write_merged(folder, [weight], {"q": written}, torch.bfloat16)
    return check_merged(folder, tensor_files(folder), [weight], {"q": meant})


@pytest.mark.parametrize("size", [1e-5, 1e-3])
def test_an_update_far_below_the_rounding_is_kept_on_average_and_missed_when_left_out(
    size: float, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    base = 0.6 + 0.3 * torch.rand(512, 512, generator=generator)
    pair = LoraPair(torch.randn(4, 512, generator=generator), size * torch.randn(512, 4, generator=generator), 1.0)
    check = merged_alone(tmp_path, base, pair, pair)
    assert check.kept == pytest.approx(1, abs=0.2 if size < 1e-4 else 0.01)
    assert check.worst_rounding <= 1
    with pytest.raises(MergeError, match="not base plus adapter"):
        merged_alone(tmp_path, base, LoraPair(pair.a, 0 * pair.b, 1.0), pair)


def test_what_rounding_takes_from_a_small_update_is_measured_and_said(
    tmp_path: Path, unequal: None, caplog: pytest.LogCaptureFixture
) -> None:
    base = (0.6 + 0.3 * torch.rand(64, 64)).bfloat16()  # each of them a 16-bit number already
    pair = LoraPair(torch.randn(4, 64), 1e-4 * torch.randn(64, 4), 1.0)
    assert merged_alone(tmp_path, base, pair, pair).kept == 0
    bare, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, dtype="bfloat16")
    model = FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        randomized(model, 1e-5).save_pretrained_merged(tmp_path / "out")
    assert "% is left after rounding to torch.bfloat16" in caplog.text


def test_logits_that_differ_stop_the_export(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = lambda ids: torch.zeros(*ids.shape, 384)  # noqa: E731
    monkeypatch.setattr("lowmem_grpo.export.formats.adapter_logits", lambda *_: other)
    with pytest.raises(MergeError, match=r"its logits differ from the adapter's by .* nothing was exported"):
        export(adapter, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == []


# memory


def test_a_base_quantized_out_of_bfloat16_is_compared_with_the_same_weights(copy: Path, tmp_path: Path) -> None:
    edit_record(copy, load_in_4bit=True, dtype="bfloat16")  # stored in float32: other weights come out of that
    done = export(copy, "merged", tmp_path / "merged")
    assert done.checks["logits_difference"] <= done.checks["logits_rounding"]


def test_one_tensor_of_an_8b_model_and_one_tile_are_held(tmp_path: Path) -> None:
    rows, width = 14336, 4096
    stored = torch.zeros(rows, width, dtype=torch.bfloat16)
    weight = Weight("up.weight", (rows, width), torch.bfloat16, lambda: lambda start, stop: stored[start:stop])
    pair = LoraPair(torch.zeros(16, width), torch.zeros(rows, 16), 1.0)
    with LiveStorage() as held:
        out = merge.merged_tensor(weight, pair, torch.bfloat16)
    assert out.shape == (rows, width)
    tile = 4 * merge.TILE_ELEMENTS
    assert held.peak < out.nbytes + 4 * tile
    assert all((stop - start) * width <= merge.TILE_ELEMENTS for start, stop in tiles(weight))


def test_the_largest_shard_of_an_8b_model_leaves_most_of_6_gib(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**named_config("llama-3.1-8b"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = live_weights(model)
    shards = plan_shards(weights, torch.bfloat16, merge.SHARD_BYTES)
    largest = max(sum(size_of(weight, torch.bfloat16) for weight in shard) for shard in shards)
    assert sum(size_of(weight, torch.bfloat16) for weight in weights) > 14 * GIB
    assert 2 * largest + 12 * 4 * merge.TILE_ELEMENTS < 3 * GIB  # twice: safetensors may copy what it writes


# adapters and runs


def test_peft_loads_an_exported_adapter(saved: tuple[FastPeftModel, Path], tmp_path: Path) -> None:
    model, folder = saved
    done = invoke(folder, "--format", "adapter", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "all 84 tensors equal" in done.output
    if not any(hasattr(parameter, "quant_state") for parameter in model.parameters()):
        plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), str(tmp_path / "out"))
        torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


def run_of(folder: Path, model: FastPeftModel, status: str, steps: tuple[int, ...] = (2, 4)) -> Path:
    """A run's directory as training leaves it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for step in steps:
        save_checkpoint(folder, step, model, optimizer, scheduler, {})
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"status": status, "steps": max(steps, default=0)}))
    return folder


def test_a_run_that_never_finished_gives_its_last_good_checkpoint_and_only_when_asked(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", adapted(False), "interrupted")
    refused = invoke(run, "--format", "adapter", "--out", tmp_path / "out")
    assert refused.exit_code == 1
    assert "never finished (its status is 'interrupted' after step 4)" in refused.output
    assert "checkpoint-4, with --unfinished" in refused.output
    assert find_adapter(run, unfinished=True).folder == run / "checkpoint-4"
    with (run / "checkpoint-4" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
    done = invoke(run, "--format", "adapter", "--out", tmp_path / "out", "--unfinished")
    assert done.exit_code == 0, done.output
    assert "checkpoint-2 of a run that never finished" in done.output
    assert "truncated" in done.output
    with pytest.raises(CheckpointError, match="truncated"):
        find_adapter(run / "checkpoint-4")
    assert find_adapter(run / "checkpoint-2").folder == run / "checkpoint-2"


def test_a_finished_run_gives_its_final_adapter(tmp_path: Path, adapter: Path) -> None:
    run = run_of(tmp_path / "run", adapted(False), "finished", (4,))
    assert find_adapter(run).folder == run / "checkpoint-4"  # its adapter is gone
    (run / "adapter").mkdir()
    for path in adapter.iterdir():
        (run / "adapter" / path.name).write_bytes(path.read_bytes())
    assert find_adapter(run).folder == run / "adapter"


def test_a_run_without_a_whole_checkpoint_says_so(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", adapted(False), "failed", ())
    with pytest.raises(RunError, match="has no checkpoint that is whole"):
        find_adapter(run, unfinished=True)


@pytest.mark.parametrize(("words", "code", "message"), [
    (["nowhere", "--out", "out"], 1, "there is no nowhere; give the folder of a run"),
    (["file", "--out", "out"], 1, "file is a file"), (["empty", "--out", "out"], 1, "neither a run nor an adapter"),
    (["empty", "--out", "out", "--format", "onnx"], 2, "'onnx' is not one of 'adapter', 'merged', 'gguf'"),
    (["empty"], 2, "Missing option '--out'"), (["empty", "--out", "o", "--dtype", "float32"], 2, "is not one of"),
    (["empty", "--out", "o", "--public"], 2, "--public is about the repository of --push"),
    (["empty", "--out", "o", "--push", "name"], 1, "is named OWNER/NAME"),
    (["empty", "--out", "o", "--format", "gguf", "--llama-cpp", "empty"], 1, "there is no convert_hf_to_gguf.py in"),
])
def test_a_mistake_is_answered_in_words(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    done = invoke(*words)
    assert done.exit_code == code, done.output
    assert message in done.output
    assert isinstance(done.exception, SystemExit)
    assert names_beside(tmp_path) == ["empty", "file"]


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_record(folder: Path, **changes: Any) -> None:
    record = folder / "base_model.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


def spoil(folder: Path, value: float) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(tensor for name, tensor in tensors.items() if "layers.3.mlp.up_proj.lora_B" in name)[0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_an_adapter_that_is_not_finite_is_refused_by_layer(kind: str, value: float, copy: Path, tmp_path: Path) -> None:
    spoil(copy, value)
    with pytest.raises(AdapterError, match=r"layers\.3\.mlp\.up_proj holds NaN or infinity.*older checkpoint"):
        export(copy, kind, tmp_path / "out")
    assert names_beside(tmp_path) == ["copy"]


@pytest.mark.parametrize(("change", "message"), [
    ({"use_dora": True}, "use_dora=True, which is not merged here"), ({"bias": "all"}, "bias='all'"),
    ({"peft_type": "IA3"}, "type IA3; only LoRA"), ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
])
def test_what_is_not_plain_lora_is_refused_by_name(change: dict[str, Any], message: str, copy: Path) -> None:
    edit(copy, **change)
    with pytest.raises(AdapterError, match=message):
        read_pairs(copy)


def test_scaling_is_pefts(copy: Path) -> None:
    edit(copy, lora_alpha=32, use_rslora=True)
    assert {pair.scaling for pair in read_pairs(copy).values()} == {16.0}
    edit(copy, use_rslora=False)
    assert {pair.scaling for pair in read_pairs(copy).values()} == {8.0}


def test_a_weight_too_large_for_float16_is_refused_and_fits_bfloat16(copy: Path, tmp_path: Path, unequal: None) -> None:
    spoil(copy, 1e7)
    with pytest.raises(MergeError, match=r"up_proj.weight reaches .*too large for torch.float16; export in bfloat16"):
        export(copy, "merged", tmp_path / "out", ExportSettings(dtype="float16"))
    export(copy, "merged", tmp_path / "out", ExportSettings(dtype="bfloat16"))


def test_an_adapter_of_another_model_is_refused(copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "adapter_model.safetensors")
    save_file({name.replace("layers.5.", "layers.9."): tensor for name, tensor in tensors.items()},
              copy / "adapter_model.safetensors")
    with pytest.raises(MergeError, match=r"layers\.9\..* is not in the base model: the adapter was trained on another"):
        export(copy, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == ["copy"]


def test_an_adapter_from_elsewhere_needs_to_be_told_how_its_base_was_held(
    copy: Path, tmp_path: Path, unequal: None
) -> None:
    (copy / "base_model.json").unlink()
    edit(copy, base_model_name_or_path=None)
    with pytest.raises(ExportError, match="name it with --base"):
        export(copy, "merged", tmp_path / "out")
    with pytest.raises(ExportError, match="--load-in-4bit or --16bit"):
        export(copy, "merged", tmp_path / "out", ExportSettings(base="tiny"))
    done = invoke(copy, "--out", tmp_path / "out", "--base", "tiny", "--16bit")
    assert done.exit_code == 0, done.output
    (copy / "base_model.json").write_text("{")
    with pytest.raises(ValueError, match=r"base_model.json cannot be read"):
        export(copy, "merged", tmp_path / "other")


@pytest.mark.parametrize("dtype", ["bf16", "sum", 16])
def test_a_record_with_an_unknown_dtype_is_named(dtype: Any, copy: Path, tmp_path: Path) -> None:
    record = json.loads((copy / "base_model.json").read_text())
    (copy / "base_model.json").write_text(json.dumps(record | {"dtype": dtype}))
    with pytest.raises(ExportError, match=f"base_model.json says dtype {dtype!r}; allowed are float32, bfloat16, flo"):
        export(copy, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == ["copy"]


def test_a_base_with_pickled_weights_alone_is_never_opened(copy: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoTokenizer.from_pretrained(TINY).save_pretrained(base)
    (base / "config.json").write_bytes((TINY / "config.json").read_bytes())
    (base / "pytorch_model.bin").write_bytes(b"no pickle is read")
    with pytest.raises(OSError, match=r"holds no model.safetensors"):
        export(copy, "merged", tmp_path / "out", ExportSettings(base=str(base)))


def test_a_merged_layer_is_not_merged_again(tmp_path: Path) -> None:
    model = adapted(False)
    model.merge_adapter()
    with pytest.raises(AdapterError, match=r"unmerge it \(model.unmerge_adapter\(\)\)"):
        model.save_pretrained_merged(tmp_path / "out")
    assert names_beside(tmp_path) == []


# the folder


def test_a_folder_with_something_in_it_is_not_touched(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for overwrite, message in ((False, "is not empty"), (True, "is no export of this command")):
        with pytest.raises(ExportError, match=message):
            export(adapter, "adapter", out, overwrite=overwrite)
    assert names_beside(tmp_path) == ["out"]
    assert names_beside(out) == ["thesis.txt"]
    with pytest.raises(ExportError, match="holds the adapter that is to be exported"):
        export(adapter, "adapter", adapter.parent, overwrite=True)


def test_an_earlier_export_is_replaced_when_asked_and_stays_when_the_new_one_fails(
    adapter: Path, copy: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(adapter, "adapter", out)
    (out / "left over").touch()
    spoil(copy, torch.nan)
    with pytest.raises(AdapterError):
        export(copy, "adapter", out, overwrite=True)
    assert (out / "left over").exists()
    export(adapter, "adapter", out, overwrite=True)
    assert not (out / "left over").exists()
    assert names_beside(tmp_path) == ["copy", "out"]


def test_a_link_is_followed_and_stays(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    for overwrite in (False, True):  # to nothing yet, then to an earlier export
        export(adapter, "adapter", tmp_path / "link", overwrite=overwrite)
        assert (tmp_path / "link").is_symlink()
        assert names_beside(tmp_path) == ["disk", "link"]
        assert names_beside(tmp_path / "disk") == ["real"]
        assert read_pairs(tmp_path / "link")


def test_a_place_that_cannot_be_written_is_named(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, message in ((tmp_path / "file", "file is a file"), (tmp_path / "file" / "out", "cannot be written")):
        with pytest.raises(ExportError, match=message):
            export(adapter, "adapter", out)
    assert names_beside(tmp_path) == ["file"]


def test_a_full_disk_is_named_before_anything_is_written(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.export.folder.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ExportError, match=r"needs \d+\.\d MiB and 0\.0 MiB are free"):
        export(adapter, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == []


def test_a_process_that_dies_inside_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out", False) as temp:
        (temp / "half").touch()
        assert not (tmp_path / "out").exists()
        raise KeyboardInterrupt
    assert names_beside(tmp_path) == []


# GGUF and the hub


CONVERTER = '''
import json, struct, sys
from pathlib import Path
from safetensors import safe_open

merged, _, out, _, kind = sys.argv[1:]
Path(out).with_suffix(".arguments").write_text(json.dumps(sys.argv[1:]))
text = lambda s: struct.pack("<Q", len(s)) + s.encode()
with safe_open(merged + "/model.safetensors", "np") as file:
    shapes = {{name: file.get_slice(name).get_shape() for name in file.keys()}}
shapes = dict(list(shapes.items()){cut})
head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), 3)
head += text("general.architecture") + struct.pack("<I", 8) + text("qwen2")
head += text("layers") + struct.pack("<II", 4, 6)
head += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
for name, shape in shapes.items():
    sizes = shape[::-1]
    head += text(name) + struct.pack(f"<I{{len(sizes)}}Q", len(sizes), *sizes) + struct.pack("<IQ", 1, 0)
Path(out).write_bytes(head)
'''


def llama_cpp(folder: Path, script: str) -> Path:
    """A stand-in for llama.cpp's folder."""
    folder.mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(script)
    return folder


def test_gguf_goes_through_the_converter_and_is_read_back(adapter: Path, tmp_path: Path, unequal: None) -> None:
    tools = llama_cpp(tmp_path / "llama.cpp", CONVERTER.format(cut=""))
    done = invoke(adapter, "--format", "gguf", "--out", tmp_path / "out", "--llama-cpp", tools, "--gguf-type", "q8_0")
    assert done.exit_code == 0, done.output
    assert "GGUF read back: qwen2, 74 tensors" in done.output
    assert names_beside(tmp_path / "out") == ["export.json", "tiny-q8_0.arguments", "tiny-q8_0.gguf"]
    merged, flag, out, kind, chosen = json.loads((tmp_path / "out" / "tiny-q8_0.arguments").read_text())
    assert (flag, kind, chosen) == ("--outfile", "--outtype", "q8_0")
    assert Path(out).name == "tiny-q8_0.gguf"
    assert Path(merged).parent == Path(out).parent
    assert read_gguf(tmp_path / "out" / "tiny-q8_0.gguf").shapes["model.norm.weight"] == (128,)


def test_the_converters_command_line_is_plain_data(tmp_path: Path) -> None:
    words = command(tmp_path / "convert_hf_to_gguf.py", Path("m; rm -rf"), Path("o"), "f16")[1:]
    assert words == [str(tmp_path / "convert_hf_to_gguf.py"), "m; rm -rf", "--outfile", "o", "--outtype", "f16"]


@pytest.mark.parametrize(("script", "message"), [
    (CONVERTER.format(cut="[:-12]"), "the GGUF file holds .* weights in matrices, the merged model"),
    ("import sys; sys.exit('BPE pre-tokenizer was not recognized')", "ended with 1 .*\nBPE pre-tokenizer was not"),
    ("import sys; open(sys.argv[3], 'wb').write(b'GG')", "is not a GGUF file"),
    ("import sys; open(sys.argv[3], 'wb').write(b'GGUF' + bytes(4))", "is cut off or altered"),
])
def test_a_converter_that_fails_leaves_nothing(
    script: str, message: str, adapter: Path, tmp_path: Path, unequal: None
) -> None:
    tools = llama_cpp(tmp_path / "tools", script)
    with pytest.raises((GGUFError, ExportError), match=message):
        export(adapter, "gguf", tmp_path / "out", ExportSettings(llama_cpp=tools))
    assert names_beside(tmp_path) == ["tools"]


def test_without_llama_cpp_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GGUFError, match=r"not on the PATH.*git clone https://github.com/ggml-org/llama.cpp"):
        find_converter(None)
    script = llama_cpp(tmp_path / "bin", "") / "convert_hf_to_gguf.py"
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert find_converter(None) == script


SETTING = struct.pack("<Q", 1) + b"a"  # its name


@pytest.mark.parametrize("content", [
    *(struct.pack("<Q", size) + b"gen" for size in (2**20, 2**40, 2**63, 2**64 - 1)),
    SETTING + struct.pack("<IIQ", 9, 4, 2**62), SETTING + struct.pack("<IIQ", 9, 4, 2**64 - 1),  # endless numbers
    SETTING + struct.pack("<I", 12) + b"half",
    SETTING + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,  # arrays in arrays
])
def test_a_length_that_promises_more_than_the_file_holds_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + content)
    with pytest.raises(GGUFError, match="is cut off or altered"):
        read_gguf(path)


class StubHub:
    """Stands in for huggingface_hub.HfApi."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def create_repo(self, **given: Any) -> None:
        self.calls.append(("create_repo", given))

    def upload_folder(self, **given: Any) -> Any:
        if self.error is not None:
            raise self.error
        given["files"] = names_beside(Path(given["folder_path"]))
        self.calls.append(("upload_folder", given))
        return type("Commit", (), {"commit_url": "https://hub/owner/name/commit/1"})()


def test_a_push_makes_the_repository_and_uploads_the_whole_folder(adapter: Path, tmp_path: Path) -> None:
    hub = StubHub()
    done = export(adapter, "adapter", tmp_path / "out", repo="owner/name", api=hub)
    assert done.address == "https://hub/owner/name/commit/1"
    (_, created), (_, uploaded) = hub.calls
    assert created == {"repo_id": "owner/name", "private": True, "exist_ok": True}
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("owner/name", str(tmp_path / "out"))
    assert {"adapter_model.safetensors", "adapter_config.json", "base_model.json"} <= set(uploaded["files"])
    assert str(tmp_path) not in (tmp_path / "out" / "export.json").read_text()  # nobody else's business


def test_a_hub_that_refuses_leaves_the_export_whole_and_says_how_to_go_on(adapter: Path, tmp_path: Path) -> None:
    refusing = StubHub(OSError("no token"))
    with pytest.raises(HubError, match=r"did not take owner/name: no token\. The export in .* is whole: `hf auth"):
        export(adapter, "adapter", tmp_path / "out", repo="owner/name", api=refusing)
    assert read_pairs(tmp_path / "out")


def test_a_module_that_no_adapter_knows_is_copied(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("steps", torch.tensor(3))
            self.register_buffer("cache", torch.zeros(2), persistent=False)

    weights = live_weights(Bare())
    assert [weight.name for weight in weights] == ["inner.weight", "inner.bias", ".steps"]
    write_merged(tmp_path, weights, {}, torch.bfloat16)
    found = load_file(tmp_path / "model.safetensors")
    assert found[".steps"].dtype == torch.int64
    assert check_merged(tmp_path, tensor_files(tmp_path), weights, {}).tensors == 3
    save_file(found | {".steps": torch.tensor(4)}, tmp_path / "model.safetensors")
    with pytest.raises(MergeError, match=r"\.steps was read back and is not what the base model has"):
        check_merged(tmp_path, tensor_files(tmp_path), weights, {})
