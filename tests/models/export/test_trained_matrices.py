"""Embedding and head that were trained beside LoRA are in each export: as plain PEFT merges them, tied or not, whole or
chosen rows, with the base's vocabulary or more tokens."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from export_tools import edit, export_command, names_beside
from safetensors.torch import load_file, save_file
from small_models import TINY, random_model, save_wide, scatter
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel, add_new_tokens
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.formats import ExportSettings, export
from lowmem_grpo.models.export.merged import save_merged
from lowmem_grpo.runs.saved_adapter import AdapterError

IDS = torch.tensor([[5, 6, 3, 8, 2, 324, 11]])
BOTH = ["embed_tokens", "lm_head"]
NEW = [322, 323, 324]  # tokens that the base has not
SETTINGS = {  # of a LoraConfig
    "whole": {"modules_to_save": BOTH, "ensure_weight_tying": True}, "embedding": {"modules_to_save": BOTH[:1]},
    "rows": {"trainable_token_indices": [324, 3, 323, 322]},
    "rows of both": {"trainable_token_indices": {"embed_tokens": [5, *NEW], "lm_head": [*NEW, 2, 3]}},
}


def in_16_bits(model: Any) -> Any:
    """The model, its weights rounded to bfloat16; in place."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def trained(folder: Path, tied: bool, new: int = 3, **settings: Any) -> tuple[Any, Any]:
    """A random model and its tokenizer in `folder`/base, with this many new tokens, and an adapter of plain PEFT on it
    in `folder`/adapter. LoRA's factors are coarse, so that sums are exact in any order."""
    base = in_16_bits(random_model("Llama", vocab_size=322, tie_word_embeddings=tied))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tokenizer.add_tokens([f"<new {number}>" for number in range(new)])
    base.resize_token_embeddings(322 + new, mean_resizing=False)
    if isinstance(ids := settings.get("trainable_token_indices"), list):
        settings = {"trainable_token_indices": [each for each in ids if each < 322 + new]}
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **copy.deepcopy(settings))
    model = peft.get_peft_model(base, config)
    for seed, (part, spread) in enumerate({"lora_B": 0.05, "modules_to_save": 0.5, "tokens_delta": 0.5}.items()):
        scatter(model, spread, seed, part)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(64).round_().div_(64)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    tokenizer.save_pretrained(folder / "adapter")
    return model, tokenizer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS.clamp(max=model.config.vocab_size - 1)).logits
    return found


def settings_of(folder: Path) -> ExportSettings:
    return ExportSettings(base=str(folder / "base"), load_in_4bit=False, dtype="bfloat16", device="cpu")


@pytest.mark.every(2)
@pytest.mark.parametrize(("tied", "kind", "new"), [
    (True, "whole", 3), (True, "rows", 3), (True, "embedding", 0), (False, "whole", 0), (False, "rows", 0),
    (False, "rows of both", 3),
])
def test_a_merged_model_is_what_plain_peft_merges_from_its_folder_and_while_it_is_loaded(
    tied: bool, kind: str, new: int, tmp_path: Path
) -> None:
    model, tokenizer = trained(tmp_path, tied, new, **SETTINGS[kind])
    done = export(tmp_path / "adapter", "merged", tmp_path / "stored", settings_of(tmp_path))
    save_merged(model, tmp_path / "live", tokenizer, "bfloat16", False)
    plain = model.merge_and_unload()
    in_16_bits(plain)
    for folder in ("stored", "live"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        torch.testing.assert_close(logits(found), logits(plain), rtol=1e-5, atol=1e-5)
        assert found.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / folder)) == 322 + new
        assert found.config.tie_word_embeddings == plain.config.tie_word_embeddings == (tied and kind != "embedding")
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == plain.config.tie_word_embeddings
    assert done.checks["trained"] == (1 if tied or kind in ("embedding", "rows") else 2)


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the adapter in a folder, named by their last part; None leaves one out."""
    path = folder / "adapter_model.safetensors"
    held = {name: next((value for part, value in tensors.items() if name.endswith(part)), tensor)
            for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path)


@pytest.mark.parametrize(("kind", "new", "change", "says"), [
    ("whole", 0, {"lm_head.weight": torch.zeros(323, 32)}, r"has row 322 of model.embed_tokens.weight, in a voc.* 323"),
    ("whole", 0, {"lm_head.weight": torch.zeros(322, 16)}, r"lm_head.weight, \(322, 16\), is \(322, 32\) in the base"),
    ("whole", 0, {"lm_head.weight": torch.zeros(320, 32)}, r"lm_head.weight, \(320, 32\), is \(322, 32\) in the base"),
    ("rows", 3, {}, "has row 322 of lm_head.weight, in a vocabulary of 325: train the rows of all new tokens, in"),
    ("rows", 0, {"tokens_delta": torch.zeros(2, 32)}, r"2 rows of model.embed_tokens, and its .* name \[3\]; one"),
    ("rows of both", 3, {"lm_head.token_adapter.trainable_tokens_delta": torch.zeros(5, 8)}, r"lm_head.weight, \(5, 8"),
])
def test_an_adapter_that_does_not_fit_its_base_is_refused_by_name_before_anything_is_written(
    kind: str, new: int, change: dict[str, torch.Tensor], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, False, new, **SETTINGS[kind])
    changed(tmp_path / "adapter", **change)
    monkeypatch.setattr("lowmem_grpo.models.export.formats.write_folder", None)  # an error if it is called
    with pytest.raises((ExportError, AdapterError), match=says):
        export(tmp_path / "adapter", "merged", tmp_path / "out", settings_of(tmp_path))
    assert names_beside(tmp_path) == ["adapter", "base"]


@pytest.mark.parametrize("held", [{"load_in_4bit": True}, {"load_in_fp8": True},
                                  {"dtype": "float16", "load_in_4bit": False}], ids=str)
@pytest.mark.parametrize("kind", ["modules_to_save", "trainable_token_indices"])
@pytest.mark.every(3)
def test_a_quantized_base_gives_the_same_files_loaded_or_stored_and_16_bits_beside_its_four(
    kind: str, held: dict[str, Any], tmp_path: Path
) -> None:
    base = save_wide(tmp_path / "base", vocab_size=322, num_hidden_layers=1, tie_word_embeddings=False)
    bare, tokenizer = FastLanguageModel.from_pretrained(str(base), max_seq_length=64, **held)
    add_new_tokens(bare, tokenizer, ["<new>"])
    beside: dict[str, Any] = {"modules_to_save": BOTH, "trainable_token_indices": {name: [322, 7] for name in BOTH}}
    model = FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False, **{kind: beside[kind]})
    scatter(scatter(scatter(model), 0.5, 2, "modules_to_save"), 0.5, 3, "tokens_delta")
    model.save_lora(tmp_path / "adapter")
    live = load_file(model.save_pretrained_merged(tmp_path / "live") / "model.safetensors")
    done = export_command(tmp_path / "adapter", "--out", tmp_path / "stored")
    assert done.exit_code == 0 and "with the adapter's own embedding or head, in 2 tensors" in done.output
    stored = load_file(tmp_path / "stored" / "model.safetensors")
    assert live.keys() == stored.keys() and all(torch.equal(live[name], stored[name]) for name in live)
    folder = model.save_pretrained_merged(tmp_path / "4", save_method="merged_4bit_forced")
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    for module in (plain.model.embed_tokens, plain.lm_head):
        name = "model.embed_tokens" if module is plain.model.embed_tokens else "lm_head"
        assert torch.equal(module.weight, live[f"{name}.weight"]) and len(module.weight) == 323
        trained = model.get_base_model().get_submodule(name).weight
        assert torch.equal(trained.to(module.weight.dtype), module.weight)
    said = "all of embed_tokens (323 x 256), all of lm_head (323 x 256)" if kind == "modules_to_save" else (
        "rows of embed_tokens (2 x 256), rows of lm_head (2 x 256)")
    assert all(f"- trained beside it: {said}\n" in (tmp_path / each / "README.md").read_text()
               for each in ("adapter", "live", "stored", "4"))


def test_new_tokens_without_a_tokenizer_are_refused_and_repeated_ones_too(tmp_path: Path) -> None:
    trained(tmp_path, True, 3, **SETTINGS["rows"])
    (tmp_path / "adapter" / "tokenizer_config.json").unlink()
    (tmp_path / "adapter" / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"has 325 tokens and its base 322, and .* holds no tokenizer with the new"):
        export(tmp_path / "adapter", "merged", tmp_path / "out", settings_of(tmp_path))
    edit(tmp_path / "adapter", trainable_token_indices=[3, 3, 323, 324])
    with pytest.raises(AdapterError, match=r"4 rows of .*embed_tokens.* \[3, 3, 323, 324\]"):
        export(tmp_path / "adapter", "merged", tmp_path / "out", settings_of(tmp_path))
    assert names_beside(tmp_path) == ["adapter", "base"]


def test_new_tokens_that_were_not_trained_are_exported_from_a_loaded_model_only(tmp_path: Path, unequal: None) -> None:
    base = save_wide(tmp_path / "base", vocab_size=330, num_hidden_layers=1)
    bare, tokenizer = FastLanguageModel.from_pretrained(str(base), max_seq_length=64, load_in_4bit=False)
    add_new_tokens(bare, tokenizer, ["<new>"])  # in a row that the base has for no token
    model = FastLanguageModel.get_peft_model(bare, r=4, modules_to_save=["embed_tokens"],
                                             use_gradient_checkpointing=False)
    model.save_lora(tmp_path / "adapter")
    with pytest.raises(ExportError, match=r"has row 322 of lm_head.*vocabulary of 330: .*save_pretrained_merged"):
        export(tmp_path / "adapter", "merged", tmp_path / "out")
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64)
    merged, stored = (load_file(folder / "model.safetensors") for folder in (
        again.save_pretrained_merged(tmp_path / "live"), base))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(merged[name][322].float(), stored[name].mean(0), rtol=2**-8, atol=1e-5)
    (tmp_path / "adapter" / "new_rows.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ExportError, match=r"new_rows.safetensors does not say the base's new tokens"):
        export(tmp_path / "adapter", "merged", tmp_path / "out")
