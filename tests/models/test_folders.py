"""Folders that hold more, or less, than one model: two sets of weights, a model that lacks a tensor, an adapter beside
a model, and a generation config that transformers reads but does not save. Right is what plain transformers does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from small_models import TINY, scatter, shallow
from transformers import AutoModelForCausalLM, GenerationConfig

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.__main__ import main
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.export.stored_weights import stored_weights, tensor_files
from lowmem_grpo.models.stored_model import INDEX, SINGLE, config_of, find, weight_files
from lowmem_grpo.runs.saved_adapter import find_adapter
from lowmem_grpo.utils import UnsupportedError

IDS = torch.arange(5, 20)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(shallow(), tmp_path / "model")


def load(folder: Path, **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, load_in_4bit=False, **options)[0]


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def other_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight * 0.5 for name, weight in load_file(folder / SINGLE).items()}


def add_shards(folder: Path, count: int = 2, stem: str = "model") -> list[str]:
    """Write other weights as shards with an index, and return the shards' names."""
    weights = other_weights(folder)
    names = [f"{stem}-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    places = {name: names[place % count] for place, name in enumerate(sorted(weights))}
    for file in names:
        save_file({name: weights[name] for name in places if places[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return names


def with_lora(model: Any) -> FastPeftModel:
    return scatter(FastLanguageModel.get_peft_model(model, r=2, use_gradient_checkpointing=False), 0.2)


def both(folder: Path, single: bool) -> None:
    names = add_shards(folder)
    if not single:
        (folder / SINGLE).unlink()
        shutil.copy(folder / names[0], folder / "model-00001-of-00009.safetensors")  # of an older save


def consolidated(folder: Path) -> None:
    save_file(other_weights(folder), folder / "consolidated.safetensors", {"format": "pt"})
    save_file(other_weights(folder), folder / "model.fp16.safetensors", {"format": "pt"})
    torch.save(other_weights(folder), folder / "pytorch_model.bin")


def named(folder: Path) -> None:
    save_file(other_weights(folder), folder / "mine.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"transformers_weights": "mine.safetensors"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.every(2)
@pytest.mark.parametrize(("second", "told"), [
    (lambda folder: both(folder, True), INDEX),
    (lambda folder: both(folder, False), "model-00001-of-00009.safetensors"),
    (consolidated, "consolidated.safetensors, model.fp16.safetensors, pytorch_model.bin"), (named, SINGLE),
])
def test_of_two_sets_of_weights_the_one_of_transformers_is_loaded_and_merged(
    second: Any, told: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second(folder)
    right = plain(folder)
    model = load(folder)
    assert "more than one set of weights" in caplog.text and told in caplog.text
    assert torch.allclose(model(input_ids=IDS).logits, right(input_ids=IDS).logits, atol=1e-4)
    held = dict(right.named_parameters())
    for weight in stored_weights(folder, right.config, "16bit", torch.float32):
        if weight.name in held:
            assert torch.equal(weight.open()(0, weight.shape[0]), held[weight.name].detach())
    with_lora(model).save_lora(tmp_path / "adapter")
    done = export(tmp_path / "adapter", "merged", tmp_path / "merged")  # compares logits with base and adapter
    assert "logits_difference" in done.checks


def test_one_set_of_weights_is_not_warned_about_and_a_missing_shard_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert weight_files(folder) == ([folder / SINGLE], [])
    names = add_shards(folder, 3)
    (folder / SINGLE).unlink()
    assert weight_files(folder) == ([folder / name for name in names], [])
    load(folder)
    assert "set of weights" not in caplog.text
    (folder / names[1]).unlink()
    for read in (weight_files, tensor_files):
        with pytest.raises(OSError, match=names[1]):
            read(folder)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_model_that_lacks_a_tensor_is_refused_by_its_name(name: str, folder: Path) -> None:
    weights = load_file(folder / SINGLE)
    del weights[name]
    save_file(weights, folder / SINGLE, {"format": "pt"})
    for options in ({}, {"load_in_fp8": True}):
        with pytest.raises(ValueError, match=rf"lacks \d tensors of its model, such as {name}, which would be random"):
            load(folder, **options)


def test_a_tied_head_may_lack_and_what_no_layer_takes_is_left(folder: Path) -> None:
    weights = load_file(folder / SINGLE) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    config = json.loads((folder / "config.json").read_text())
    tied = config["tie_word_embeddings"]
    assert tied and "lm_head.weight" not in weights
    save_file(weights, folder / SINGLE, {"format": "pt"})
    assert torch.allclose(load(folder)(input_ids=IDS).logits, plain(shallow())(input_ids=IDS).logits, atol=1e-4)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"such as lm_head\.weight"):  # transformers would draw it
        load(folder)


@pytest.mark.every(3)
@pytest.mark.parametrize("fields", [
    {"temperature": 0.6}, {"top_p": 0.9, "do_sample": False}, {"length_penalty": 2.0}, {"early_stopping": True},
    {"top_k": 20, "min_p": 0.1}, {"output_scores": True}, {"pad_token_id": -1},
])
def test_a_generation_config_that_transformers_does_not_save_is_merged_as_it_stands(
    fields: dict[str, Any], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | fields))
    with pytest.raises(ValueError, match="Fix these issues"):
        GenerationConfig.from_pretrained(folder).save_pretrained(tmp_path / "plain")
    model = with_lora(load(folder))
    model.save_lora(tmp_path / "adapter")
    model.save_pretrained_merged(tmp_path / "live")
    export(tmp_path / "adapter", "merged", tmp_path / "stored")
    for out in (tmp_path / "live", tmp_path / "stored"):
        written = json.loads((out / "generation_config.json").read_text())
        assert fields.items() <= written.items()
        plain(out)
    assert caplog.text.count("generation_config.json is written as it stood") == 2


def adapter_in(folder: Path, target: Path) -> None:
    """Put an adapter on the model of `folder` into `target`."""
    with_lora(load(folder)).save_lora(target)


def test_a_models_weights_beside_an_adapter_are_refused_everywhere(folder: Path, tmp_path: Path) -> None:
    adapter_in(folder, tmp_path / "adapter")
    shutil.copytree(tmp_path / "adapter", folder, dirs_exist_ok=True)
    for read in (load, lambda place: find(str(place)), lambda place: config_of(str(place)), find_adapter,
                 lambda place: export(place, "merged", tmp_path / "out")):
        with pytest.raises(UnsupportedError, match=r"holds a model's weights and an adapter.* Move the adapter_"):
            read(folder)
    for words in (["eval", str(folder), "--recipe", "arithmetic"], ["generate", "Hi", "--adapter", str(folder)],
                  ["generate", "Hi", "--model", str(folder)], ["export", str(folder), "--out", str(tmp_path / "out")],
                  ["plan", "--model", str(folder), "--gpu", "t4"], ["serve", "--model", str(folder)]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code and "Move the adapter_* files" in " ".join(done.output.split()), words
    for path in folder.glob("adapter_*"):
        path.unlink()
    assert not hasattr(load(folder).inner, "peft_config")


def test_an_adapter_beside_a_config_alone_loads_as_base_and_adapter(folder: Path, tmp_path: Path) -> None:
    adapter_in(folder, tmp_path / "adapter")
    shutil.copy(TINY / "config.json", tmp_path / "adapter")  # as other trainers leave it
    model = load(tmp_path / "adapter")
    assert isinstance(model, FastPeftModel)
    assert model.fast_generate("Start", lora_request=model.current_lora())
    with pytest.raises(OSError, match="holds an adapter, and no weights of a model"):
        find(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "config.json").unlink()
    for given in (tmp_path, tmp_path / "adapter"):  # a run, and its adapter as PEFT leaves it
        with pytest.raises(OSError, match=r"/adapter holds an adapter, .*; a reward model scores as rewards.from_adap"):
            find(str(given))
