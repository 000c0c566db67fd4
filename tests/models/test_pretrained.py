"""Files beside a stranger's weights: a value that transformers cannot use is said in one line that names its file."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.models.pretrained import generation_of, tokenizer_beside
from lowmem_grpo.models.stored_model import resolve

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
WRONG = [
    (GENERATION, "compile_config", 5), (GENERATION, "cache_implementation", "x"), (GENERATION, "max_new_tokens", -1),
    (GENERATION, "watermarking_config", 5), (GENERATION, "early_stopping", "x"),
    (GENERATION, "assistant_ensemble_weight", 10**400), (TOKENIZER, "model_input_names", 5),
    (TOKENIZER, "model_input_names", [5]), (TOKENIZER, "added_tokens_decoder", {"a": {"b": [1]}}),
    (TOKENIZER, "padding_side", [[]]),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve("tiny"), tmp_path / "model")


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(("file", "field", "value"), WRONG, ids=str)
def test_a_value_that_transformers_cannot_use_is_refused_by_its_file(
    file: str, field: str, value: Any, model: Path
) -> None:
    edit(model / file, **{field: value})
    with pytest.raises(ValueError, match="json") as refused:
        FastLanguageModel.from_pretrained(str(model), load_in_4bit=False)
    assert str(model) in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 900


@pytest.mark.parametrize(("file", "field", "value"), WRONG, ids=str)
def test_beside_an_adapter_it_is_refused_too(file: str, field: str, value: Any, model: Path) -> None:
    edit(model / file, **{field: value})
    read: Any = generation_of if file == GENERATION else tokenizer_beside
    with pytest.raises(ValueError, match=r"cannot be read") as refused:
        read(model)
    assert str(model) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("made", [lambda path: path.write_text("{"), lambda path: path.write_text("[" * 10**5),
                                  os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")],
                         ids=["no JSON", "deep", "pipe", "folder", "device"])
def test_a_generation_config_that_is_none_is_refused_by_its_name(made: Any, model: Path) -> None:
    (model / GENERATION).unlink()
    made(model / GENERATION)
    with pytest.raises(ValueError, match=GENERATION) as refused:
        generation_of(model)
    assert "\n" not in str(refused.value)
