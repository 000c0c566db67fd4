"""The cards of saved adapters and exports are read as the hub reads them, by its own library."""

from pathlib import Path
from typing import Any

import pytest
from export_tools import CONVERTER, StubHub, adapted, llama_cpp
from huggingface_hub import ModelCard
from trainer_runs import load, make

from lowmem_grpo.models.export.formats import export
from lowmem_grpo.runs.files import CARD

SECTION = "## GRPO, 2 steps"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on rows that `datasets` read from the hub."""
    from datasets import Dataset, DatasetInfo
    from trainer_runs import ROWS

    source = {"hf://datasets/owner/rows@0123abcd/data/train.parquet": {"num_bytes": 9, "checksum": None}}
    rows = Dataset.from_list(ROWS, info=DatasetInfo(download_checksums=source))
    trainer = make(tmp_path_factory.mktemp("card") / "run", rows=rows, model=load(name="tiny"), save_strategy="steps",
                   save_steps=1)
    trainer.train()
    return trainer.run_dir


def card_in(folder: Path) -> Any:
    return ModelCard((folder / CARD).read_text("utf-8"))


@pytest.mark.parametrize("folder", ["adapter", "checkpoint-2"])
def test_the_card_of_a_run_says_what_was_trained_on_what_and_what_came_of_it(folder: str, run: Path) -> None:
    card = card_in(run / folder)
    assert card.data.to_dict() == {"library_name": "peft", "pipeline_tag": "text-generation",
                                   "tags": ["lowmem-grpo", "lora", "grpo"], "datasets": ["owner/rows"]}
    for said in ("# LoRA adapter of tiny", "- base model: tiny\n", "not quantized, computing in float32", "rank 4,",
                 SECTION, "- data: owner/rows\n", "learning_rate 0.01", "num_generations 4", "- reward: "):
        assert said in card.text
    assert "loss:" not in card.text and "empty" not in card.text and "[More Information Needed]" not in card.text
    validated = card.data.to_yaml()  # a hub takes no base_model that is not on it
    assert "base_model" not in validated and "license" not in validated


@pytest.mark.parametrize(("kind", "library"), [("adapter", "peft"), ("merged", "transformers"), ("gguf", None)])
def test_an_export_keeps_what_the_adapters_card_says_of_its_run(
    kind: str, library: str | None, run: Path, tmp_path: Path, unequal: None
) -> None:
    from lowmem_grpo.models.export.formats import ExportSettings

    export(run, kind, tmp_path / "out", ExportSettings(llama_cpp=llama_cpp(tmp_path / "cpp", CONVERTER.format(cut=""))))
    card = card_in(tmp_path / "out")
    assert card.data.library_name == library and card.data.datasets == ["owner/rows"] and SECTION in card.text
    assert ("gguf" in card.data.tags) == (kind == "gguf") and "grpo" in card.data.tags
    assert card.text.count("\n## ") == 1


def test_a_loaded_model_writes_cards_wherever_it_saves(tmp_path: Path, unequal: None) -> None:
    model = adapted(False)
    model.save_lora(tmp_path / "lora")
    model.save_pretrained_merged(tmp_path / "merged")
    model.save_pretrained_gguf(tmp_path / "gguf", quantization_method="f16",
                               llama_cpp=llama_cpp(tmp_path / "cpp", CONVERTER.format(cut="")))
    libraries = [card_in(tmp_path / each).data.library_name for each in ("lora", "merged", "gguf")]
    assert libraries == ["peft", "transformers", None]
    assert "## " not in card_in(tmp_path / "lora").text  # no run is known


@pytest.mark.parametrize(("name", "base", "shown"), [
    ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), ("gpt2", "gpt2", "gpt2"),
    ("/home/somebody/models/mine", None, "mine"), ("owner/repo/m-q4.gguf", "owner/repo", "owner/repo/m-q4.gguf"),
    ("/home/somebody/m-q4.gguf", None, "m-q4.gguf"),
    ("/cache/hub/models--owner--name/snapshots/0123", "owner/name", "owner/name"),
])
def test_the_base_is_named_as_the_hub_knows_it_and_never_by_a_path(
    name: str, base: str | None, shown: str, tmp_path: Path
) -> None:
    model = load()
    model.loaded.name, model.loaded.sha256 = name, "ab" * 32 if name.endswith("gguf") else None
    model.save_lora(tmp_path)
    card = card_in(tmp_path)
    assert card.data.base_model == base
    assert f"- base model: {shown}{', sha256 ' + 'ab' * 32 if name.endswith('gguf') else ''}\n" in card.text
    assert "somebody" not in card.content


def test_a_readme_of_somebody_stays_and_our_own_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load()
    model.save_lora(tmp_path)
    model.loaded.name = "owner/other"
    model.save_lora(tmp_path)
    assert card_in(tmp_path).data.base_model == "owner/other" and caplog.text == ""
    edited = (tmp_path / CARD).read_text().replace("# LoRA", "# My LoRA")
    (tmp_path / CARD).write_text(edited)
    model.save_lora(tmp_path)
    assert (tmp_path / CARD).read_text() == edited and "README.md was written or changed by somebody" in caplog.text


@pytest.mark.parametrize(("there", "left"), [(None, None), ("own", None), ("# Mine\n", ["README.md"])])
def test_a_model_is_pushed_with_its_card_unless_the_hub_has_one_of_somebody(
    there: str | None, left: Any, tmp_path: Path
) -> None:
    model, held = load(), tmp_path / CARD
    if there == "own":
        model.save_lora(tmp_path)
    elif there:
        held.write_text(there)
    hub = StubHub(card=held if there else None)
    model.push_to_hub("owner/name", api=hub)
    (_, created), (_, sent) = hub.calls
    assert (created["private"], sent["ignore_patterns"]) == (True, left)
    assert {CARD, "adapter_model.safetensors", "tokenizer.json"} <= {*sent["files"]}
