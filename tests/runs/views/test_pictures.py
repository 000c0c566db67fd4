"""Pictures for notebooks: they show what a run wrote, name what they lack, and no model text gets out of its cell."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.model_shape import named_config
from lowmem_grpo.memory.plan import MemoryPlan, RunSettings
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.runs.accuracy import Answers, wilson_interval
from lowmem_grpo.runs.views.chart import MEMORY, RIGHT, WRONG
from lowmem_grpo.runs.views.pictures import Picture, accuracies, bars, curves, line, memory_bars, samples
from lowmem_grpo.utils import GIB

ATTACK = "<img src=x onerror=alert(1)>"


def run_folder(path: Path, steps: int = 3) -> Path:
    """A run of so many steps, its last evaluated."""
    lines: list[dict[str, Any]] = [
        {"step": step, "reward": 0.1 * step, "reward_std": 0.2, "rewards/right/mean": 0.1 * step,
         "rewards/short/mean": 0.5, "entropy": 0.4, "groups/total": 8, "groups/with_signal": 5}
        for step in range(1, steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(right: list[list[bool]], text: str = "4") -> Answers:
    return Answers([[text] * len(row) for row in right], right, 0, 10, 0, {})


def planned(card: str = "24GiB", **settings: Any) -> MemoryPlan:
    return plan(named_config("llama-3.1-8b"), RunSettings(context=4096, **settings), device(card))


def page_of(picture: Picture) -> dict[str, Any]:
    """What the page in a picture's frame shows."""
    frame = re.fullmatch(r'<iframe sandbox="allow-scripts" srcdoc="([^"]*)".*', picture.html)
    assert frame
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', unescape(frame[1]))
    assert data
    return dict(json.loads(data[1]))


def widths(picture: Picture) -> list[list[float]]:
    """The parts of each bar, in percent of the whole width."""
    return [[float(width) for width in re.findall(r"<span style='width:([\d.]+)%", row)]
            for row in picture.html.split("position:relative")[1:]]


def test_the_chosen_curves_or_all_hold_what_the_run_logged_and_a_legend_names_lines_of_the_same_chart(
    tmp_path: Path
) -> None:
    charts = page_of(curves(run_folder(tmp_path), "Entropy", "Reward functions"))["charts"]
    lines = {line["name"]: line["values"] for chart in charts for line in chart["lines"]}
    assert lines == {"entropy": [0.4] * 3, "right": pytest.approx([0.1, 0.2, 0.3]), "short": [0.5] * 3}
    assert [chart["title"] for chart in charts] == ["Entropy", "Reward functions"]
    charts = page_of(curves(tmp_path))["charts"]
    assert {chart["title"]: chart["keys"] for chart in charts} == {
        "Reward": True, "Reward functions": True, "Groups with signal": True, "Entropy": False}
    assert charts[2]["zero"] and charts[2]["axis"] == "groups"


def test_what_is_not_there_is_named_and_nothing_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no curve 'Entropie'; it has Reward, Reward functions, Groups.*, Entropy"):
        curves(run_folder(tmp_path), "Entropie")
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl; expected the folder of a run"):
        curves(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no answers were given"):
        accuracies({})
    with pytest.raises(ValueError, match="no plans were given"):
        memory_bars({})
    with pytest.raises(ValueError, match="phase is 'sampling'; allowed are train, rollout"):
        memory_bars({"a plan": planned()}, "sampling")


def test_values_are_a_curve_that_is_counted_from_one() -> None:
    [chart] = page_of(line([0.5, 0.25], "a <b> title"))["charts"]
    assert (chart["lines"][0]["steps"], chart["lines"][0]["values"]) == ([1, 2], [0.5, 0.25])
    assert chart["title"] == "a <b> title" and "<b>" not in line([1.0], "a <b> title").html


def test_the_bars_of_accuracies_reach_to_their_intervals() -> None:
    picture = accuracies({"before": answers([[True], [False], [False], [False]]), "after": answers([[True]] * 4)})
    assert widths(picture) == [[25.0], [100.0]]
    assert "25% of 4 problems" in picture.html and "100% of 4 problems" in picture.html
    low, high = wilson_interval(0.25, 4)
    assert f"left:{low:.2%};width:{high - low:.2%}" in picture.html


@pytest.mark.parametrize("phase", ["train", "rollout"])
def test_a_memory_bar_is_as_long_as_its_plan(phase: str) -> None:
    plans = {"tiles": planned(mlp_tile=512), "none": planned(mlp_tile=0)}
    picture = memory_bars(plans, phase)
    totals = [getattr(found, phase) / GIB for found in plans.values()]
    for parts, total in zip(widths(picture), totals, strict=True):
        assert sum(parts) == pytest.approx(100 * total / max(totals), abs=0.1)
        assert f"<span>{total:.1f}</span>" in picture.html
    assert ("KV cache" in picture.html) == (phase == "rollout")


def test_every_component_of_a_bar_has_a_colour_that_no_other_of_the_phase_has() -> None:
    found = planned(engine="vllm", sampling_weights="16bit", modules_to_save=("embed_tokens", "lm_head"))
    of_images = {"vision tower", "image features"}
    assert {row.name for row in found.rows} - {"host buffers"} == set(MEMORY) - of_images
    assert all(list(MEMORY.values()).count(MEMORY[name]) == 1 for name in of_images)
    for phase in ("train", "rollout"):
        picture = memory_bars({"a plan": found, "all kept": planned("h200", checkpointing=False, mlp_tile=0)}, phase)
        used = re.findall(r"color:(#\w+)'>\u25a0", picture.html)
        assert used and len(used) == len(set(used))


def test_bars_of_the_same_name_have_the_same_colour_and_the_longest_is_whole() -> None:
    picture = bars({"t4": {"small": 100.0, "large": 50.0}, "<h200>": {"small": 400.0}}, "tokens", "{:,.0f} tokens")
    assert widths(picture) == [[25.0], [12.5], [100.0]] and "400 tokens" in picture.html
    assert "<h200>" not in picture.html and len(set(re.findall(r"background:(#\w+)", picture.html))) == 2
    assert widths(bars({"nothing": {"a": 0.0}}, "zero")) == [[0.0]]


def test_a_picture_is_shown_in_the_middle_of_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    bars({"a": {"b": 1.0}}, "one bar").show()  # outside of a notebook it is text
    assert capsys.readouterr().out == "a picture for a notebook: one bar\n"


def test_samples_stand_side_by_side_with_their_verdicts_and_what_a_model_wrote_stays_text() -> None:
    rows = [{"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}, {"prompt": "3 + 3?"}]
    found = {"base": answers([[False], [True]], "5\n6"), "adapter": answers([[True], [True]])}
    table = samples(rows, found, shown=1)
    assert repr(table) == "2 + 2?\n\nexpected: 4\n  base, ✗ wrong: 5 | 6\n  adapter, ✓ right: 4"
    page = table._repr_html_()
    assert page.count("<tr>") == 2
    assert page.index("<th") < page.index("base") < page.index("adapter") < page.index("2 + 2?")
    assert f"color:{WRONG}'>✗ wrong</b>\n5\n6</td>" in page and f"color:{RIGHT}'>✓ right</b>\n4</td>" in page
    assert "expected" not in repr(samples(rows, found)).rpartition("3 + 3?")[2]
    page = samples([{"prompt": ATTACK, "answer": ATTACK}], {ATTACK: answers([[True]], ATTACK)})._repr_html_()
    assert "<img" not in page and page.count("&lt;img src=x") == 4
