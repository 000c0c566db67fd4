"""A model's files may come from others: a wrong value is refused by its file and field, and no file outside is read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.data.files import has_one_row, read_rows
from lowmem_grpo.memory.model_shape import named_config, named_shapes, read_config
from lowmem_grpo.models.export.stored_weights import TensorFiles, tensor_files
from lowmem_grpo.models.stored_model import EMBEDDED, indexed_files, resolve, stored_form
from lowmem_grpo.runs.saved_adapter import (
    AdapterError,
    CheckpointError,
    adapter_settings,
    base_of_adapter,
    find_adapter,
)

NAN, CONFIG, GENERATION, TOKENIZER = float("nan"), "config.json", "generation_config.json", "tokenizer_config.json"
WRONG: list[tuple[str, str, Any, str]] = [  # file, field, value, words
    (CONFIG, "num_attention_heads", 0, "num_attention_heads is 0"),
    (CONFIG, "hidden_size", "128", "hidden_size is '128'"),
    (CONFIG, "num_key_value_heads", 3, "num_key_value_heads is 3, of which num_attention_heads"),
    (CONFIG, "vocab_size", -1, "vocab_size is -1"),
    (CONFIG, "rms_norm_eps", NAN, "rms_norm_eps is nan"),
    (CONFIG, "num_hidden_layers", [6], "num_hidden_layers is"),
    (CONFIG, "intermediate_size", 0, "intermediate_size is 0"),
    (CONFIG, "rope_parameters", {"rope_theta": 0.0, "rope_type": "default"}, "rope_parameters.rope_theta is 0.0"),
    (CONFIG, "rope_parameters", 3, "rope_parameters is 3"),
    (CONFIG, "rope_theta", 0, "rope_theta is 0"),
    (CONFIG, "rope_scaling", {"rope_type": ["x"], "factor": 2.0}, "rope_scaling.rope_type is"),
    (CONFIG, "eos_token_id", 10**6, "eos_token_id has 1000000; token ids are 0 to 383"),
    (CONFIG, "eos_token_id", [2, "</s>"], "eos_token_id has '</s>'"),
    (CONFIG, "model_type", 7, "model_type is 7"),
    (CONFIG, "text_config", "x", "text_config is 'x'"),
    (CONFIG, "tie_word_embeddings", "no", "tie_word_embeddings is"),
    (CONFIG, "transformers_weights", ["a"], "transformers_weights is"),
    (CONFIG, "num_key_value_heads", None, "do not have the sizes of its config.json"),
    (CONFIG, "hidden_size", 2**31, "do not have the sizes of its config.json"),
    (CONFIG, "hidden_size", 10**12, "hidden_size is 10+; it must be a whole number, from 1 to 2,147,483,648"),
    (CONFIG, "num_hidden_layers", 1025, "num_hidden_layers is 1025; it must be a whole number, from 1 to 1,024"),
    (CONFIG, "id2label", {"a": {}}, r"id2label is \{'a'"),
    (CONFIG, "id2label", [], "id2label is"),
    (CONFIG, "num_labels", 2**14 + 1, "num_labels is 16385; it must be a whole number, from 0 to 16,384"),
    (CONFIG, "num_experts", [8], r"num_experts is \[8\]"),
    (CONFIG, "hidden_act", "none such", r"cannot be loaded \(KeyError"),
    (CONFIG, "use_cache", [1], r"cannot be loaded \("),
    (GENERATION, "eos_token_id", -1, "eos_token_id has -1"),
    (GENERATION, "eos_token_id", {}, r"eos_token_id has \{\}"),
    (GENERATION, "eos_token_id", [2, 384], "eos_token_id has 384"),
    (TOKENIZER, "chat_template", 5, "chat_template is 5"),
    (TOKENIZER, "model_max_length", "long", "model_max_length is 'long'"),
    (TOKENIZER, "eos_token", 2, "eos_token is 2"),
    (TOKENIZER, "padding_side", "top", "padding_side is 'top'"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve("tiny"), tmp_path / "model")


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(("file", "field", "value", "words"), WRONG)
def test_a_value_that_no_model_has_is_refused_by_file_and_field(
    file: str, field: str, value: Any, words: str, model: Path
) -> None:
    edit(model / file, **{field: value})
    with pytest.raises(ValueError, match=words) as refused:
        FastLanguageModel.from_pretrained(str(model), load_in_4bit=False)
    assert "config.json" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("file", [CONFIG, GENERATION, TOKENIZER])
@pytest.mark.parametrize("text", ["[" * 10**5, "[]", "{", "\0", '{"a": 1, "a": 2}', '{"a": "\\ud800"}',
                                  f'{{"a": {"[" * 100}{"]" * 100}}}'])
def test_what_is_no_object_is_refused_by_its_file(file: str, text: str, model: Path) -> None:
    (model / file).write_text(text)
    with pytest.raises(ValueError, match=file):
        FastLanguageModel.from_pretrained(str(model), load_in_4bit=False)


def test_the_settings_of_published_models_are_taken(model: Path) -> None:
    edit(model / TOKENIZER, model_max_length=10**30)  # as in many published ones
    edit(model / CONFIG, time_step_limit=[0.0, float("inf")])
    FastLanguageModel.from_pretrained(str(model), load_in_4bit=False)
    assert [named_config(name)["hidden_size" if "hidden_size" in named_config(name) else "text_config"]
            for name in named_shapes()]
    for name in EMBEDDED:
        assert read_config(Path(resolve(name)) / CONFIG)


def sharded(folder: Path, place: str) -> Path:
    """The folder with its weights at `place`, and an index that names it."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / place).parent.mkdir(exist_ok=True)
    save_file(tensors, folder / place, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, place)}))
    return index


@pytest.mark.parametrize("place", ["../secret.safetensors", "sub/../../secret.safetensors", "/{}/secret.safetensors",
                                   "link.safetensors", "away/secret.safetensors"])
def test_a_weight_index_that_leads_out_of_its_folder_is_refused(place: str, model: Path, tmp_path: Path) -> None:
    index = sharded(model, "../secret.safetensors")
    (model / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (model / "away").symlink_to(tmp_path)
    (model / "sub").mkdir()
    place = place.format(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(json.loads(index.read_text())["weight_map"], place)}))
    with pytest.raises(ValueError, match="lies outside of its folder"):
        FastLanguageModel.from_pretrained(str(model), load_in_4bit=False)
    with pytest.raises(ValueError, match="lies outside of its folder"):
        tensor_files(model)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "other.safetensors"])
def test_a_file_of_weights_that_is_a_link_out_of_its_folder_is_not_read(
    name: str, model: Path, tmp_path: Path
) -> None:
    (model / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (model / name).symlink_to(tmp_path / "secret.safetensors")
    edit(model / CONFIG, **{"transformers_weights": name} if name.startswith("other") else {})
    for read in (tensor_files, lambda folder: FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)):
        with pytest.raises(ValueError, match="lies outside of its folder"):
            read(model)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "chat_template.jinja", "README.md", "tokenizer.json"])
def test_an_adapters_file_that_is_a_link_out_of_its_folder_is_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "secret").touch()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").touch()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    with pytest.raises(CheckpointError, match=f"{name} is a link to a file outside of its folder"):
        find_adapter(folder)


def test_links_of_the_hubs_cache_and_within_the_folder_are_refused(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (blobs / name).write_text("{}")
        (folder / name).symlink_to(f"../../blobs/{name}")
    (folder / "chat_template.jinja").symlink_to("README.md")
    assert find_adapter(folder).folder == folder


@pytest.mark.parametrize("state", ["[" * 10**5, "{", "[]", "{}", '{"shape": [2], "blocksize": "x"}',
                                   '{"shape": 3, "blocksize": 64}', None])
def test_a_weight_in_4_bits_is_described_by_its_file_or_refused(state: str | None, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(4, dtype=torch.uint8), "a.weight.absmax": torch.zeros(1)}
    if state is not None:
        tensors["a.weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*state.encode()], dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: a\.weight.* does not describe a weight in 4 bits"):
        TensorFiles(tensor_files(tmp_path), torch.float32, "cpu").in_4bit("a.weight")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{", "[" * 10**5])
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json.*(weight_map|JSON|64 levels)"):
        indexed_files(tmp_path / "model.safetensors.index.json")


def test_an_index_of_files_inside_loads_also_over_the_links_of_the_hubs_cache(model: Path, tmp_path: Path) -> None:
    plain, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    sharded(model, "parts/one.safetensors")
    cache = tmp_path / "models--a--b"
    (cache / "snapshots/1").mkdir(parents=True)
    shutil.move(model, cache / "blobs")
    for path in (cache / "blobs").iterdir():
        os.symlink(f"../../blobs/{path.name}", cache / "snapshots/1" / path.name)
    for folder in (cache / "blobs", cache / "snapshots/1"):
        loaded, _ = FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)
        assert all(map(torch.equal, loaded.inner.parameters(), plain.inner.parameters()))


@pytest.mark.parametrize("groups", ["x", [1], 5, {"one": "x"}, {"one": {"weights": [1]}}, {"one": {
    "weights": {"type": "float", "num_bits": 8, "block_structure": ["x", 1]}, "format": "float-quantized"}}], ids=str)
def test_groups_of_quantized_weights_that_are_none_are_refused_by_their_field(groups: Any) -> None:
    with pytest.raises(ValueError, match="quantization_config of 'it' is none of compressed-tensors"):
        stored_form({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}, "it")


@pytest.mark.parametrize(("fields", "words"), [
    ({"model": 5}, "model is 5"), ({"model": ["tiny"]}, "model is"), ({"load_in_4bit": "yes"}, "load_in_4bit is 'yes'"),
    ({"dtype": {}}, "dtype is"), ({"revision": 3}, "revision is 3"), ({"load_in_fp8": 7}, "load_in_fp8 is 7"),
    ({"other": 1}, "other"), ({"model": "a\0b"}, "NUL"),
])
def test_a_wrong_record_of_the_base_is_refused_by_its_field(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "base_model.json").write_text(json.dumps({"model": "tiny"} | fields))
    with pytest.raises(ValueError, match=f"base_model.json cannot be read.*{words}"):
        base_of_adapter(tmp_path)


@pytest.mark.parametrize("text", ["[]", "[" * 10**5, '{"peft_type": "LORA", "r": NaN}', '{"r": 1, "r": 2}', "\0",
                                  '{"peft_type": "LORA", "base_model_name_or_path": 5}', '{"a": "\\ud800"}'])
def test_settings_of_an_adapter_that_are_no_settings_are_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        adapter_settings(tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_is_nested_too_deeply_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    row = '{"prompt": "a", "x": ' + "[" * 10**5 + "]" * 10**5 + "}"
    (tmp_path / name).write_text(row if name.endswith("l") else f"[{row}]")
    with pytest.raises(OSError, match=r"no rows from .*(nested too deeply|depth limit)"):
        read_rows(str(tmp_path / name))
    assert has_one_row(tmp_path / name) is name.endswith("l")


def test_an_object_in_place_of_rows_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"data": ' + "[" * 10**5 + "\n" + "]" * 10**5 + "}")
    with pytest.raises(OSError, match="nested too deeply"):
        read_rows(str(tmp_path / "rows.json"))
