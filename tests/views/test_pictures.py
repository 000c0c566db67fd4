"""Pictures for notebooks: they show what a run wrote, name what they lack, and no model text gets out of its cell."""

import json
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.named_configs import named_config
from lowmem_grpo.memory.plan import MemoryPlan, RunSettings
from lowmem_grpo.planning.planner import plan
from lowmem_grpo.runs.accuracy import Answers, wilson_interval
from lowmem_grpo.units import GIB
from lowmem_grpo.views.palette import MEMORY, RIGHT, WRONG
from lowmem_grpo.views.pictures import accuracies, curves, memory_bars, samples

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


def titles(figure: Any) -> list[str]:
    return [note.text.partition("<br>")[0] for note in figure.layout.annotations]


def test_the_chosen_curves_hold_what_the_run_logged(tmp_path: Path) -> None:
    figure = curves(run_folder(tmp_path), "Entropy", "Reward functions")
    lines = {trace.name: list(trace.y) for trace in figure.data}
    assert lines == {"entropy": [0.4] * 3, "right": pytest.approx([0.1, 0.2, 0.3]), "short": [0.5] * 3}
    assert titles(figure) == ["Entropy", "Reward functions"]


def test_without_a_choice_every_curve_is_drawn_and_a_legend_names_lines_of_the_same_chart(tmp_path: Path) -> None:
    figure = curves(run_folder(tmp_path))
    assert titles(figure) == ["Reward", "Reward functions", "Groups with signal", "Entropy"]
    groups = figure.layout.yaxis3
    assert groups.range[0] == 0 and groups.title.text == "groups" and figure.layout.xaxis3.title.text == "step"
    assert len(set(groups.ticktext)) == len(groups.ticktext)
    assert {trace.name for trace in figure.data if trace.showlegend} == {"right", "short", "all", "with signal"}


def test_a_curve_and_a_folder_that_are_not_there_are_named_and_no_answers_are_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no curve 'Entropie'; it has Reward, Reward functions, Groups.*, Entropy"):
        curves(run_folder(tmp_path), "Entropie")
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl; expected the folder of a run"):
        curves(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no answers were given"):
        accuracies({})


def test_the_bars_of_accuracies_reach_to_their_intervals() -> None:
    figure = accuracies({"before": answers([[True], [False], [False], [False]]), "after": answers([[True]] * 4)})
    bar = figure.data[0]
    assert (list(bar.x), list(bar.y), list(bar.text)) == (["before", "after"], [0.25, 1.0], ["25%", "100%"])
    low, high = wilson_interval(0.25, 4)
    assert bar.error_y.array[0] == pytest.approx(high - 0.25)
    assert bar.error_y.arrayminus[0] == pytest.approx(0.25 - low)
    assert bar.error_y.array[1] == 0.0  # nothing is more than all


@pytest.mark.parametrize("phase", ["train", "rollout"])
def test_a_memory_bar_is_as_long_as_its_plan(phase: str) -> None:
    plans = {"tiles": planned(mlp_tile=512), "none": planned(mlp_tile=0)}
    figure = memory_bars(plans, phase)
    for place, found in enumerate(plans.values()):
        length = sum(trace.x[place] for trace in figure.data)
        assert length == pytest.approx(getattr(found, phase) / GIB)
        assert figure.layout.annotations[place].text == f"{length:.1f}"
    assert ("KV cache" in {trace.name for trace in figure.data}) == (phase == "rollout")


def test_every_component_of_a_bar_has_a_colour_that_no_other_of_the_phase_has() -> None:
    found = planned(engine="vllm", sampling_weights="16bit")
    assert {row.name for row in found.rows} - {"host buffers"} == set(MEMORY)
    for phase in ("train", "rollout"):
        figure = memory_bars({"a plan": found, "all kept": planned("h200", checkpointing=False, mlp_tile=0)}, phase)
        used = [trace.marker.color for trace in figure.data]
        assert None not in used
        assert len(used) == len(set(used)), [trace.name for trace in figure.data]


def test_a_phase_that_there_is_not_and_no_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="phase is 'sampling'; allowed are train, rollout"):
        memory_bars({"a plan": planned()}, "sampling")
    with pytest.raises(ValueError, match="no plans were given"):
        memory_bars({})


def test_samples_stand_side_by_side_with_their_verdicts() -> None:
    rows = [{"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}, {"prompt": "3 + 3?"}]
    found = {"base": answers([[False], [True]], "5\n6"), "adapter": answers([[True], [True]])}
    table = samples(rows, found, shown=1)
    assert repr(table) == "2 + 2?\n\nexpected: 4\n  base, ✗ wrong: 5 | 6\n  adapter, ✓ right: 4"
    page = table._repr_html_()
    assert page.count("<tr>") == 2
    assert page.index("<th") < page.index("base") < page.index("adapter") < page.index("2 + 2?")
    assert f"color:{WRONG}'>✗ wrong</b>\n5\n6</td>" in page and f"color:{RIGHT}'>✓ right</b>\n4</td>" in page
    assert "expected" not in repr(samples(rows, found)).rpartition("3 + 3?")[2]


def test_what_a_model_wrote_stays_text_in_a_table() -> None:
    table = samples([{"prompt": ATTACK, "answer": ATTACK}], {ATTACK: answers([[True]], ATTACK)})
    page = table._repr_html_()
    assert "<img" not in page
    assert page.count("&lt;img src=x") == 4
