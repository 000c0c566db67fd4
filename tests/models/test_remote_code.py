"""Code that lies in a model's repository never runs, whatever a user answers to transformers' question."""

import ast
import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import TINY
from transformers import AutoModelForCausalLM

import lowmem_grpo
from lowmem_grpo import FastLanguageModel
from lowmem_grpo.models.export.merge import MergeError
from lowmem_grpo.models.export.merged import answers, check_loads
from lowmem_grpo.models.export.stored_weights import linears_to_quantize

ROOT = Path(lowmem_grpo.__file__).parent
LOADERS = ("from_pretrained", "from_config")
CODE = """open({mark!r}, "w").write("ran")
from transformers import {base}


class Own({base}):
    model_type = "own"
"""


def loading_calls(path: Path) -> list[str]:
    """The calls of transformers' Auto classes in a file that could run a repository's code."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    auto = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in LOADERS
            and isinstance(call.func.value, ast.Name) and call.func.value.id.startswith("Auto")
            and call.func.value.id != "AutoHfQuantizer"]
    return [f"{path.name}, line {call.lineno}" for call in auto if not any(
        keyword.arg == "trust_remote_code" and getattr(keyword.value, "value", None) is False
        for keyword in call.keywords)]


def test_every_call_that_loads_by_name_says_that_no_code_is_trusted() -> None:
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "bench").rglob("*.py")]
    assert [call for path in files for call in loading_calls(path)] == []


def planted(folder: Path, part: str) -> tuple[Path, Path]:
    """(a model whose config names code of its own for `part`, the file that this code writes when it runs)."""
    shutil.copytree(TINY, folder)
    mark = folder.parent / "it_ran"
    base = {"AutoConfig": "PretrainedConfig", "AutoTokenizer": "PreTrainedTokenizerFast",
            "AutoModelForCausalLM": "PreTrainedModel"}[part]
    (folder / "own.py").write_text(CODE.format(mark=str(mark), base=base))
    name = "tokenizer_config.json" if part == "AutoTokenizer" else "config.json"
    config = json.loads((folder / name).read_text())
    config["auto_map"] = {part: [None, "own.Own"] if part == "AutoTokenizer" else "own.Own"}
    if part == "AutoTokenizer":
        config["tokenizer_class"] = "Own"
    else:
        config["model_type"] = "own"
    (folder / name).write_text(json.dumps(config))
    return folder, mark


@pytest.mark.parametrize("part", ["AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"])
@pytest.mark.parametrize("call", [
    lambda folder: FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False),
    lambda folder: answers(folder, None, [], "cpu"),  # type: ignore[arg-type]
    lambda folder: check_loads(folder, set()),
], ids=["load", "compare an export", "check an export"])
def test_code_in_the_models_folder_does_not_run_although_the_user_would_say_yes(
    part: str, call: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = planted(tmp_path / "planted", part)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(ValueError, OSError, AttributeError, MergeError):  # or it loads
        call(folder)
    assert not mark.exists()


def test_a_model_that_needs_its_own_code_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder, _ = planted(tmp_path / "planted", "AutoConfig")
    with pytest.raises(ValueError, match=r"such code is never run here\. Take a model"):
        FastLanguageModel.from_pretrained(str(folder))


def test_a_model_without_a_class_for_text_is_refused_in_one_line(tmp_path: Path) -> None:
    folder, _ = planted(tmp_path / "planted", "AutoTokenizer")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    shutil.copy(TINY / "tokenizer_config.json", folder)
    with pytest.raises(ValueError, match=r"is a model of images.*take a text model"):
        FastLanguageModel.from_pretrained(str(folder), load_in_4bit=False)


def test_an_empty_model_of_foreign_code_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoModelForCausalLM.from_pretrained(TINY).config
    config.auto_map = {"AutoModelForCausalLM": f"{tmp_path}--own.Own"}
    (tmp_path / "own.py").write_text(CODE.format(mark=str(tmp_path / "it_ran"), base="PreTrainedModel"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert linears_to_quantize(config, config.dtype)  # transformers' own class
    assert not (tmp_path / "it_ran").exists()
