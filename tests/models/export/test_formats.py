"""Which adapter an export takes, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export_tools import adapted, edit, export_command, names_beside, spoil
from safetensors.torch import load_file, save_file
from small_models import TINY
from transformers import AutoTokenizer

from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.export.folder import ExportError
from lowmem_grpo.models.export.formats import ExportSettings, export
from lowmem_grpo.models.export.merge import MergeError
from lowmem_grpo.runs.checkpoint import save_checkpoint
from lowmem_grpo.runs.saved_adapter import AdapterError, CheckpointError, RunError, find_adapter


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
    refused = export_command(run, "--format", "adapter", "--out", tmp_path / "out")
    assert refused.exit_code == 1
    assert "never finished (its status is 'interrupted' after step 4)" in refused.output
    assert "checkpoint-4, with --unfinished" in refused.output
    assert find_adapter(run, unfinished=True).folder == run / "checkpoint-4"
    with (run / "checkpoint-4" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
    done = export_command(run, "--format", "adapter", "--out", tmp_path / "out", "--unfinished")
    assert done.exit_code == 0, done.output
    assert "checkpoint-2 of a run that never finished" in done.output
    assert "truncated" in done.output
    with pytest.raises(CheckpointError, match="truncated"):
        find_adapter(run / "checkpoint-4")
    assert find_adapter(run / "checkpoint-2").folder == run / "checkpoint-2"


def test_a_finished_run_gives_its_final_adapter(tmp_path: Path, adapter: Path) -> None:
    run = run_of(tmp_path / "run", adapted(False), "finished", (4,))
    assert find_adapter(run).folder == run / "checkpoint-4"  # its adapter is gone
    shutil.copytree(adapter, run / "adapter")
    assert find_adapter(run).folder == run / "adapter"


def test_a_run_without_a_whole_checkpoint_says_so(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", adapted(False), "failed", ())
    with pytest.raises(RunError, match="has no checkpoint that is whole"):
        find_adapter(run, unfinished=True)


@pytest.mark.parametrize(("words", "code", "message"), [
    (["nowhere", "--out", "out"], 1, "there is no nowhere; give the folder of a run"),
    (["file", "--out", "out"], 1, "file is a file"), (["empty", "--out", "out"], 1, "neither a run nor an adapter"),
    (["empty", "--out", "out", "--format", "onnx"], 2,
     "'onnx' is not one of 'adapter', 'merged', 'merged_4bit', 'merged_mxfp4', 'gguf'"),
    (["empty"], 2, "Missing option '--out'"), (["empty", "--out", "o", "--dtype", "float32"], 2, "is not one of"),
    (["empty", "--out", "o", "--public"], 2, "--public is about the repository of --push"),
    (["empty", "--out", "o", "--push", "name"], 1, "has the form OWNER/NAME"),
    (["empty", "--out", "o", "--format", "gguf", "--llama-cpp", "empty"], 1, "empty is neither a run nor an adapter"),
])
def test_a_mistake_is_answered_in_words(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    done = export_command(*words)
    assert done.exit_code == code, done.output
    assert message in done.output
    assert isinstance(done.exception, SystemExit)
    assert names_beside(tmp_path) == ["empty", "file"]


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
    with pytest.raises(ExportError, match="--load-in-4bit, --fp8 or --16bit"):
        export(copy, "merged", tmp_path / "out", ExportSettings(base="tiny"))
    done = export_command(copy, "--out", tmp_path / "out", "--base", "tiny", "--16bit")
    assert done.exit_code == 0, done.output
    (copy / "base_model.json").write_text("{")
    with pytest.raises(ValueError, match=r"base_model.json cannot be read"):
        export(copy, "merged", tmp_path / "other")


@pytest.mark.parametrize("dtype", ["bf16", "sum", 16])
def test_a_record_with_an_unknown_dtype_is_named(dtype: Any, copy: Path, tmp_path: Path) -> None:
    record = json.loads((copy / "base_model.json").read_text())
    (copy / "base_model.json").write_text(json.dumps(record | {"dtype": dtype}))
    says = rf"base_model.json (says dtype {dtype!r}; allowed are float32, bfloat16, flo|.*dtype is {dtype!r}; it must)"
    with pytest.raises(ValueError, match=says):
        export(copy, "merged", tmp_path / "out")
    assert names_beside(tmp_path) == ["copy"]


def test_a_base_with_only_pickled_weights_is_never_opened(copy: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoTokenizer.from_pretrained(TINY).save_pretrained(base)
    (base / "config.json").write_bytes((TINY / "config.json").read_bytes())
    (base / "pytorch_model.bin").write_bytes(b"no pickle is read")
    with pytest.raises(OSError, match=r"holds no model.safetensors"):
        export(copy, "merged", tmp_path / "out", ExportSettings(base=str(base)))


@pytest.mark.parametrize(("arguments", "says"), [
    ((None, "merged", "out"), "None must be a folder's name"), (("run", "merged", ""), "'' must be a folder's name"),
    (("run", "merged", "out", {"base": "x"}), "settings is {'base': 'x'}; give ExportSettings"),
    (("run", "merged", "out", ExportSettings(load_in_4bit="yes")), "load_in_4bit is 'yes'; allowed are True, False"),
    (("run", "merged", "out", ExportSettings(device="gpu")), "device is 'gpu'; allowed are cpu, cuda"),
    (("run", "pdf", "out"), "format is 'pdf'; allowed are adapter, merged, merged_4bit, merged_mxfp4, gguf"),
])
def test_arguments_of_another_kind_are_refused_by_name(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ExportError, match=says):
        export(*arguments)


def test_folders_may_be_given_as_texts_and_one_of_pefts_names_of_adapters_names_these(
    copy: Path, tmp_path: Path
) -> None:
    assert export(str(copy), "adapter", str(tmp_path / "out")).folder == tmp_path / "out"
    shutil.copytree(copy, tmp_path / "named" / "mine")
    with pytest.raises(RunError, match=r"neither a run nor an adapter.*; take mine, which it holds"):
        export(tmp_path / "named", "adapter", tmp_path / "other")


@pytest.mark.parametrize("pattern", [
    {"target_modules": r".*_proj|(([\w.]+)+)+!"},  # ends on the layers of the adapter, and never on the model's others
    {"alpha_pattern": {r"(([\w.]+)+)+!": 4}},
])
def test_a_merge_does_not_match_a_pattern_for_ever_and_writes_nothing_before(
    pattern: dict[str, Any], copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copy, **pattern)
    monkeypatch.setattr("lowmem_grpo.models.export.formats.write_folder", None)  # an error if it is called
    with pytest.raises(AdapterError, match=r"has the pattern .*takes too long to match"):
        export(copy, "merged", tmp_path / "out", ExportSettings(device="cpu"))
    assert not [*tmp_path.glob(".out*"), *tmp_path.glob("out*")]
