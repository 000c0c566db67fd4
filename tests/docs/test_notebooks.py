"""Every notebook runs from top to bottom, shows what it promises, and stores no outputs."""

import ast
import json
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from published_model import published_model
from tables import every_row

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONGEST_FUNCTION = 15  # lines; what needs more belongs to the package
HTML = "text/html"
COMMIT = "0" * 40
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Shows:
    """What the outputs of a notebook hold: numbers of pictures and of tables of samples, and patterns of results."""

    pictures: int
    text: list[str]  # regular expressions, in this order
    samples: int = 0  # tables with verdicts
    ratios: int = 0  # of a measured amount of memory to the planned one


PROMISED = {
    "quickstart": Shows(2, [
        r"right: \d+% of 128 problems .95% interval", r"change \+\d+ points .95% interval",
        "the saved adapter answers as the live one on 16 of 16 prompts", "in the new format: 0% before",
        "in the new format: ([5-9][0-9]|100)% after"], samples=1),
    "your_own_rewards": Shows(1, [
        "-> True", "-> False", "-> None", "slow: it did not return within 1 s", "short: it pays 1 for the empty answer",
        "may a run begin with these[?] False", "no problems found", "may a run begin with these[?] True",
        r"base right: \d+ of 64, adapter right: \d+ of 64"], samples=1),
    "where_the_memory_goes": Shows(5, [
        "20,480 tokens x 8 on 16GiB", "right: True", r"llama-3\.1-8b +rtx3060 [\d,]+, t4 [\d,]+",
        "recomputed, 1,024 tokens +planned"], ratios=4),
    "from_adapter_to_use": Shows(1, [
        r"base +right: .*pass@4", r"adapter +right: .*pass@4", r"change +[+-]\d+ points",
        "loaded back: logits differ from the adapter's by", "the same text for 1[2-6] of 16 prompts",
        "no GGUF file: the embedded model 'tiny' cannot be|GGUF read back",
        "not exported: .*never finished .*--unfinished", "from the checkpoint-2 of a run"], samples=1),
    "from_model_to_llama_cpp": Shows(0, [
        "installed now: nothing, all was there", "finished: True", r"smollm2-135m-instruct-f16\.gguf: 271 MB",
        "prompt: .*\nllama.cpp: ", "the same answer as the model in training: [1-4] of 4"]),
    "questions_about_pictures": Shows(0, [
        "tiny-shapes with the processor VisionProcessor", r"[?] Answer .* -> \w+",
        r"right before: \d+% of 128 questions", "finished: True", r"right after: \d+%, before: \d+%", "learned: True",
        "adapter_model.safetensors"]),
    "your_first_agent": Shows(1, [
        "'unreadable', -1.0", r"before: found \d+% of 128 numbers", r"after: found \d+% of 128 numbers",
        "3 steps with a tool", "tool calculate: 252", "calls: 1 right: "]),
    "train_from_your_laptop": Shows(1, [
        "the server answers: True", "reward of 16: 1.0 of a word: -1.0", r"step 8: mean reward -?[\d.]+",
        "it guesses better: True", "it is there: True", "saved: True in a new model: True", "the server ended with "]),
    "bring_your_agent": Shows(1, [
        r"step 3: mean reward -?[\d.]+ of 64", "step 4 was trained on 16 trajectories of a client over HTTP",
        "judge few turns: 4 calls .*, 0 failed", "step 5 was trained on judged", "checkpoint-5", "report.html"]),
}


def cells(path: Path, kind: str = "code") -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_every_notebook_is_checked_and_listed() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(PROMISED)
    listed = (FOLDER / "README.md").read_text()
    assert [path.name for path in NOTEBOOKS if path.name not in listed] == []


@every_row("path", NOTEBOOKS)
def test_a_notebook_is_valid_stores_no_outputs_and_asks_colab_for_a_card(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.metadata.kernelspec.name, notebook.metadata.accelerator) == ("python3", "GPU")
    ran = [(cell.outputs, cell.execution_count) for cell in notebook.cells if cell.cell_type == "code"]
    assert ran == [([], None)] * len(ran)


@every_row("path", NOTEBOOKS)
def test_a_notebook_hides_nothing_writes_only_beside_itself_and_its_links_lead_somewhere(path: Path) -> None:
    for source in cells(path)[1:]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION, node.name
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(("/", "~", "..")), node.value
        assert max(map(len, source.splitlines())) <= 120
    links = [link for text in cells(path, "markdown") for link in re.findall(r"\]\(([^)#]+)\)", text)]
    assert [link for link in links if "://" not in link and not (FOLDER / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_shows_what_it_promises(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    if path.stem == "from_model_to_llama_cpp":
        monkeypatch.setenv("HF_HUB_CACHE", str(hub_cache(tmp_path / "hub", "HuggingFaceTB/SmolLM2-135M-Instruct")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the model is so small that threads only wait for each other
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    promised = PROMISED[path.stem]
    shown = [output.get("data", {}).get(HTML, "") for output in outputs]
    assert sum(map(is_picture, shown)) == promised.pictures
    assert sum("<table" in html for html in shown) == promised.samples
    text = said(outputs)
    check_order(text, promised.text)
    ratios = [float(ratio) for ratio in re.findall(r"measured +[0-9.]+ +([0-9.]+)x", text)]
    assert len(ratios) == promised.ratios and all(0.8 < ratio < 1.4 for ratio in ratios), ratios
    noise = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "Warning" not in noise and "Failed" not in noise, noise


def hub_cache(folder: Path, name: str) -> Path:
    """A cache in which the published model lies as if it had been downloaded under this name."""
    inside = folder / f"models--{name.replace('/', '--')}"
    (inside / "refs").mkdir(parents=True)
    (inside / "refs" / "main").write_text(COMMIT)
    (inside / "snapshots").mkdir()
    (inside / "snapshots" / COMMIT).symlink_to(published_model().folder)
    return folder


def is_picture(html: str) -> bool:
    """Whether it is bars, or charts in a frame. None may be empty: a chart has a line with points, bars have widths."""
    if found := re.search(r' srcdoc="([^"]*)"', html):
        data = re.search(r'id="data">(.*?)</script>', unescape(found[1]))
        assert data and (charts := json.loads(data[1])["charts"])
        assert all(len(line["steps"]) for chart in charts for line in chart["lines"])
        return True
    bars = html.startswith("<p><b>")
    assert not bars or "<span style='width:" in html
    return bars


def said(outputs: list[Any]) -> str:
    """What was printed, and what was shown in its plain form, in order."""
    texts = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return ESCAPES.sub("", "\n".join(texts))


def check_order(text: str, patterns: list[str]) -> None:
    """Each pattern is found after the one before it."""
    at = 0
    for pattern in patterns:
        found = re.compile(pattern).search(text, at)
        assert found, f"{pattern!r} is not behind {text[max(0, at - 80) : at]!r}"
        at = found.end()
