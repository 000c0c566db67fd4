"""README.md stays short, its cell works, its plans are what the planner says, and its links lead somewhere."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from tables import every_row

from bench.common.public_code import latest, ran
from bench.common.rows import read_rows
from lowmem_grpo import SamplingParams
from lowmem_grpo.memory.cards import MOST_SEQUENCES, device, engine_of
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import PROMPTS, RunSettings, Workload
from lowmem_grpo.memory.planner import max_context, plan
from lowmem_grpo.memory.time_plan import sampled_together
from lowmem_grpo.recipes.arithmetic import make_dataset

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLAN = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
HISTORY = ROOT / "CHANGELOG.md"  # links to pages as they were called at the time
PAGES = [*sorted({*ROOT.glob("*.md")} - {HISTORY}), *sorted((ROOT / "docs").glob("*.md")),
         ROOT / "notebooks" / "README.md", ROOT / "bench" / "README.md"]
ANSWERS = 8  # completions of a prompt
ENGINES = {"vllm": "vLLM", "transformers": "our own"}
COLUMNS = ("rtx4060", "rtx3060", "t4", "rtx4090", "a100-80")
SMALL = ("gtx1660", "rtx3050-6", "rtx4060", "rtx3080-10")
SMALL_MODELS = ("Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-4B", "Qwen2.5-7B", "Llama-3.1-8B")
SHAPES = {"Qwen2.5-7B": "qwen2.5-7b", "Llama-3.1-8B": "llama-3.1-8b", "Phi-4 (14B)": "phi-4-14b",
          "Llama-3.3-70B": "llama-3.3-70b", "gpt-oss-20b": "gpt-oss-20b"}
TINY = {  # what makes the cell small enough for a test
    '"Qwen/Qwen2.5-1.5B-Instruct"': '"tiny"', "load_in_4bit=True": "load_in_4bit=False", "max_steps=250": "max_steps=1",
    "num_generations=8": "num_generations=2", "max_completion_length=512": "max_completion_length=8, preflight=False",
    "max_tokens=64": "max_tokens=4",
}


def test_the_readme_has_less_than_900_words() -> None:
    assert len(README.split()) < 900


def test_the_readme_says_of_public_notebooks_what_the_bench_found() -> None:
    rows = latest(read_rows(ROOT / "bench" / "results" / "notebooks.jsonl"), "notebook")
    found = f"{sum(map(ran, rows))} of {len(rows)} ran to their end"
    assert found in " ".join(README.split()) and found in (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_notebook_cell_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cell,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for old, new in TINY.items():
        assert cell.count(old) == 1, old
        cell = cell.replace(old, new)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cell.py"
    file.write_text(cell, encoding="utf-8")
    left = runpy.run_path(str(file), init_globals={"dataset": make_dataset("train", 8)})
    assert left["trainer"].state.global_step == 1 and left["SamplingParams"] is SamplingParams
    assert (tmp_path / "my_lora" / "adapter_model.safetensors").is_file()
    assert left["out"][0].outputs[0].text in capsys.readouterr().out


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.every(3)
def test_the_table_of_cards_says_what_the_planner_says(model: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {model} |")]
    step = PROMPTS * ANSWERS
    asked = RunSettings(context=1, num_generations=ANSWERS, completions_per_step=step,
                        sequences=min(step, MOST_SEQUENCES))
    vllm = ModelShape.from_config(named_config(SHAPES[model])).family.vllm
    found = [max_context(named_config(SHAPES[model]), replace(
        asked, engine=engine_of(card) if vllm else "transformers"), card) for card in map(device, COLUMNS)]
    assert row.split(" | ")[1:] == [f"{tokens:,}" if tokens else "-" for tokens in found[:-1]] + [f"{found[-1]:,} |"]


@pytest.mark.parametrize("model", SMALL_MODELS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.every(3)
def test_the_table_of_small_cards_says_how_many_completions_the_plan_samples_together(
    model: str, engine: str
) -> None:
    (row,) = [line for line in PLAN.splitlines() if line.startswith(f"| {model} | {ENGINES[engine]} |")]
    found = [cell(model.lower(), engine, card) if engine in ("transformers", engine_of(device(card))) else ""
             for card in SMALL]
    assert row.strip("| ").split(" | ")[2:] == found


def cell(shape: str, engine: str, card: str) -> str:
    """Return the completions that are sampled together with sequences of 640 and of 2,048 tokens."""
    config, found = named_config(shape), []
    for context in (640, 2048):
        asked = RunSettings(context, ANSWERS, engine=engine, completions_per_step=64, sequences=64)
        chosen = plan(config, asked, device(card))
        together = sampled_together(chosen, ModelShape.from_config(config), Workload.within(context, PROMPTS, ANSWERS))
        found.append(str(min(together, 64)) if chosen.fits else "-")
    return f"{found[0]}, {found[1]}" if found[0] != found[1] else found[0]


@every_row("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (page.parent / link.partition("#")[0]).exists()] == []
    for link in inside:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"
            and f"]({page.name})" not in index] == []
