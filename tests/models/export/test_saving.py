"""The calls of a loaded model that save and upload, as notebooks write them for Unsloth."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_tools import CONVERTER, StubHub, adapted, llama_cpp, names_beside
from safetensors.torch import load_file

from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.export.gguf import GGUFError, read_gguf
from lowmem_grpo.models.export.merge import read_pairs
from lowmem_grpo.models.hub import HubError
from lowmem_grpo.utils import UnsupportedError

UNSLOTH = json.loads((Path(__file__).parents[2] / "support" / "unsloth_defaults.json").read_text())["saving"]
QUANTIZER = "#!/bin/sh\ncp \"$1\" \"$2\"\necho \"$3\" > \"$2.kind\"\n"


@pytest.fixture(scope="module")
def model() -> FastPeftModel:
    return adapted(False)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A stand-in for llama.cpp, built."""
    folder = llama_cpp(tmp_path / "llama.cpp", CONVERTER.format(cut=""))
    (folder / "build" / "bin").mkdir(parents=True)
    (folder / "build" / "bin" / "llama-quantize").write_text(QUANTIZER)
    (folder / "build" / "bin" / "llama-quantize").chmod(0o755)
    return folder


@pytest.mark.parametrize(("method", "files"), [
    ("fast_quantized", ["q8_0"]), ("not_quantized", ["bf16"]), ("Q8_0", ["q8_0"]), ("q4_k_m", ["q4_k_m"]),
    (None, ["q8_0"]),
    (["q4_k_m", "q8_0", "q5_k_m"], ["q4_k_m", "q5_k_m", "q8_0"]),
])
@pytest.mark.every(3)
def test_gguf_files_of_a_loaded_model_are_those_of_the_command(
    method: Any, files: list[str], model: FastPeftModel, tools: Path, tmp_path: Path, unequal: None
) -> None:
    out = model.save_pretrained_gguf(str(tmp_path / "out"), model.loaded.tokenizer, quantization_method=method,
                                     llama_cpp=tools)
    names = names_beside(out)
    assert [name for name in names if name.endswith(".gguf")] == [f"tiny-{kind}.gguf" for kind in files]
    assert not [name for name in names if name.endswith(".bf16")]
    assert "merged" not in names
    for kind in files:
        assert len(read_gguf(out / f"tiny-{kind}.gguf").shapes) == 74
        if kind.startswith(("q4", "q5")):
            assert (out / f"tiny-{kind}.gguf.kind").read_text().strip() == kind.upper()


def test_gguf_without_the_program_that_quantizes_says_how_to_build_it(
    model: FastPeftModel, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "build" / "bin" / "llama-quantize").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("lowmem_grpo.models.export.gguf.module_file", lambda name: None)
    with pytest.raises(GGUFError, match=r"q4_k_m is made by llama-quantize, which is not in .*llama-cpp-python, "):
        model.save_pretrained_gguf(tmp_path / "out", quantization_method="q4_k_m", llama_cpp=tools)
    with pytest.raises(ExportError, match=r"gguf_type is 'iq2_xxs'; allowed are bf16, f16"):
        model.save_pretrained_gguf(tmp_path / "out", quantization_method="iq2_xxs", llama_cpp=tools)
    with pytest.raises(UnsupportedError, match=r"convert_lora_to_gguf\.py"):
        model.save_pretrained_gguf(tmp_path / "out", save_method="lora", llama_cpp=tools)
    assert not (tmp_path / "out").exists()


def test_push_to_hub_merged_uploads_what_save_pretrained_merged_writes(
    model: FastPeftModel, tmp_path: Path, unequal: None
) -> None:
    hub, seen = StubHub(), {}
    upload = hub.upload_folder
    hub.upload_folder = lambda **given: (seen.update(load_file(f"{given['folder_path']}/model.safetensors")),  # type: ignore[method-assign]
                                         upload(**given))[1]
    address = model.push_to_hub_merged("owner/name", model.loaded.tokenizer, save_method="merged_16bit", token="",
                                       private=False, commit_message="Mine", api=hub)
    assert address == "https://hub/owner/name/commit/1"
    (_, created), (_, given) = hub.calls
    assert (created["private"], given["commit_message"]) == (False, "Mine")
    assert not Path(given["folder_path"]).exists()  # uploaded, so it is gone
    folder = model.save_pretrained_merged(tmp_path / "same")
    assert all(torch.equal(seen[name], tensor) for name, tensor in load_file(folder / "model.safetensors").items())


def test_push_to_hub_gguf_uploads_the_files_and_is_private(model: FastPeftModel, tools: Path, unequal: None) -> None:
    hub = StubHub()
    model.push_to_hub_gguf("owner/name", model.loaded.tokenizer, quantization_method=["f16"], llama_cpp=tools, api=hub)
    (_, created), (_, given) = hub.calls
    assert created["private"] is True
    assert "tiny-f16.gguf" in given["files"]


def test_a_hub_that_refuses_leaves_the_files_and_says_where(model: FastPeftModel) -> None:
    with pytest.raises(HubError, match=r"The files in .* are complete") as caught:
        model.push_to_hub_merged("owner/name", save_method="lora", api=StubHub(OSError("no token")))
    folder = Path(str(caught.value).partition("The files in ")[2].partition(" are complete")[0])
    assert (folder / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("call", ["save_pretrained_merged", "save_pretrained_gguf", "push_to_hub_merged",
                                  "push_to_hub_gguf"])
def test_every_option_is_accepted_at_unsloths_default_and_a_wrong_repository_or_folder_is_named_first(
    call: str, model: FastPeftModel, tools: Path, tmp_path: Path
) -> None:
    to_hub = call.startswith("push")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    ours = {"llama_cpp": tools} if "gguf" in call else {}
    with pytest.raises((ValueError, ExportError), match="has the form OWNER/NAME" if to_hub else "is not empty"):
        getattr(model, call)("a/b/c" if to_hub else tmp_path / "taken", **UNSLOTH[call] | ours)


@pytest.mark.parametrize(("options", "message"), [
    ({"push_to_hub": True}, "Call push_to_hub_merged"), ({"safe_serialization": False}, "Only safetensors"),
    ({"state_dict": {"a": 1}}, "the weights are those of the model"), ({"imatrix_file": True}, "llama-quantize"),
])
def test_an_option_that_is_not_honoured_is_refused(options: dict[str, Any], message: str, model: FastPeftModel) -> None:
    for call in (model.save_pretrained_merged, model.save_pretrained_gguf):
        with pytest.raises(ValueError, match=message):
            call("never", **options)
    with pytest.raises(UnsupportedError, match="TorchAoConfig"):
        model.save_pretrained_torchao("never")


def test_saving_an_adapter_never_seems_to_upload_it(model: FastPeftModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="call push_to_hub, which uploads the adapter"):
        model.save_pretrained(str(tmp_path / "adapter"), push_to_hub=True)
    assert not (tmp_path / "adapter").exists()


def test_a_push_makes_the_repository_and_uploads_the_whole_folder(adapter: Path, tmp_path: Path) -> None:
    hub = StubHub()
    done = export(adapter, "adapter", tmp_path / "out", repo="owner/name", api=hub)
    assert done.address == "https://hub/owner/name/commit/1"
    (_, created), (_, uploaded) = hub.calls
    assert created == {"repo_id": "owner/name", "private": True, "exist_ok": True}
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("owner/name", str(tmp_path / "out"))
    assert {"adapter_model.safetensors", "adapter_config.json", "base_model.json"} <= set(uploaded["files"])
    assert str(tmp_path) not in (tmp_path / "out" / "export.json").read_text()  # nobody else's business


def test_a_hub_that_refuses_leaves_the_export_whole(adapter: Path, tmp_path: Path) -> None:
    refusing = StubHub(OSError("no token"))
    with pytest.raises(HubError, match=r"did not take owner/name: no token\. The files in .* are complete: run `hf"):
        export(adapter, "adapter", tmp_path / "out", repo="owner/name", api=refusing)
    assert read_pairs(tmp_path / "out")
