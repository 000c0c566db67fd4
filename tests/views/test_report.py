"""The report page: what it needs, what it shows, and that model text cannot break out of it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.views.report import MAX_SAMPLES, spread, write_report

ATTACK = "</script><img src=x onerror=alert(1)><!--"


class Page(HTMLParser):
    """The elements of a page and the text of its scripts, parsed as a browser does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.prose = ""
        self.inside = ""
        self.feed(self.source)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.prose += data

    def titles(self) -> list[str]:
        return [chart["title"] for chart in self.data["charts"]]

    def chart(self, title: str) -> dict[str, Any]:
        return next(chart for chart in self.data["charts"] if chart["title"] == title)


def metric(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "elapsed": 10.0 * step, "loss": 0.01, "reward": 0.1 * step, "reward_std": 0.2,
        "rewards/correct/mean": 0.1 * step, "rewards/format/mean": 0.5, "entropy": 0.4, "time/generate": 0.7,
        "time/train": 0.3, "memory/peak_bytes": 3 * 2**30, "groups/total": 8, "groups/with_signal": 5, **more,
    }


def completion(step: int, text: str = "4") -> dict[str, Any]:
    return {
        "step": step, "prompt": "2 + 2?", "completion": text, "rewards": {"correct": 1.0, "format": None},
        "reward": 1.0, "advantage": 0.5, "tokens": 3, "finish_reason": "stop",
    }


def log(run_dir: Path, name: str, records: list[dict[str, Any]], tail: str = "") -> None:
    (run_dir / name).write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")


def page_of(run_dir: Path, lines: list[dict[str, Any]], completions: list[dict[str, Any]] | None = None) -> Page:
    """The report of a run with these metrics and completions."""
    log(run_dir, "metrics.jsonl", lines)
    if completions is not None:
        log(run_dir, "completions.jsonl", completions)
    return Page(write_report(run_dir))


def finished(run_dir: Path, **more: Any) -> None:
    summary = {
        "status": "finished", "recipe": "arithmetic", "model": "tiny", "seed": 7, "steps": 3, "train_seconds": 95.0,
        "accuracy_before": 0.215, "accuracy_after": 0.78, "eval_problems": 200, **more,
    }
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    finished(tmp_path)
    page = page_of(tmp_path, [metric(1), metric(2)], [completion(1)])
    assert not [attrs for _, attrs in page.elements if {"src", "href"} & set(attrs)]
    assert "link" not in dict(page.elements) and "@import" not in page.source.split("</style>")[0]
    assert "plotly.js v" in page.scripts[1]
    policy = next(attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs)
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy


def test_model_text_cannot_close_the_script_or_add_elements(tmp_path: Path) -> None:
    finished(tmp_path, recipe=ATTACK, model=ATTACK, config={ATTACK: ATTACK},
             samples=[dict.fromkeys(("prompt", "answer", "before", "after"), ATTACK)])
    page = page_of(tmp_path, [metric(1)], [completion(1, ATTACK)])
    assert ATTACK not in page.source
    assert "img" not in dict(page.elements) and len(page.scripts) == 3
    assert page.data["samples"][0]["completion"] == ATTACK
    assert page.prose.count(ATTACK) == 9
    assert "textContent" in page.scripts[2]  # the only way of model text into the page
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
                if word in page.scripts[2]]


def test_the_headline_shows_what_the_summary_says_and_without_one_that_it_is_running(tmp_path: Path) -> None:
    finished(tmp_path, config={"beta": 0.04}, samples=[{"prompt": "p", "answer": "4", "before": "5", "after": "4!"}])
    prose = page_of(tmp_path, [metric(1), metric(2), metric(3)]).prose
    for expected in ("arithmetic", "tiny", "finished", "21.5% → 78.0%", "200 problems", "1 min 35 s", "beta", "4!"):
        assert expected in prose
    assert "running" not in prose
    (tmp_path / "summary.json").unlink()
    prose = page_of(tmp_path, [metric(1), metric(2)]).prose
    assert "running" in prose and "20 s" in prose and tmp_path.name in prose and "Accuracy" not in prose


def test_a_half_written_last_line_is_left_out_and_a_broken_one_before_is_an_error_that_names_it(tmp_path: Path) -> None:
    log(tmp_path, "metrics.jsonl", [metric(1), metric(2)], tail='{"step": 3, "rew')
    log(tmp_path, "completions.jsonl", [completion(1)], tail='{"step": 2, "prompt": "2 +')
    with (tmp_path / "completions.jsonl").open("ab") as file:
        file.write("é".encode()[:1])
    page = Page(write_report(tmp_path))
    assert page.chart("Loss")["traces"][0]["x"] == [1, 2] and len(page.data["samples"]) == 1
    log(tmp_path, "metrics.jsonl", [metric(1)], tail='{"step": 2, "rew\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
        write_report(tmp_path)


def test_no_steps_yet_is_said(tmp_path: Path) -> None:
    page = page_of(tmp_path, [])
    assert "No steps logged yet" in page.prose and "No completions logged yet" in page.prose


def test_a_folder_without_metrics_is_an_error_that_says_what_was_expected(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=r"expected the folder of a run, which holds metrics\.jsonl"):
            write_report(folder)
    assert not list(tmp_path.iterdir())


def test_curves_follow_the_log_and_absent_metrics_have_none(tmp_path: Path) -> None:
    page = page_of(tmp_path, [metric(1), metric(2, kl=float("nan")), {"step": 2, "eval_reward": 0.9}])
    assert "KL divergence" not in page.titles() and "Peak memory" in page.titles()
    lower, upper, train, evaluation = page.chart("Reward")["traces"]
    assert (train["x"], train["y"]) == ([1, 2], [0.1, 0.2]) and (evaluation["x"], evaluation["y"]) == ([2], [0.9])
    assert lower["y"] == pytest.approx([-0.1, 0.0]) and upper["y"] == pytest.approx([0.3, 0.4])
    assert [trace["name"] for trace in page.chart("Reward functions")["traces"]] == ["correct", "format"]
    assert page.chart("Peak memory")["traces"][0]["y"] == [3.0, 3.0]


def test_a_step_repeated_after_a_resume_is_drawn_once(tmp_path: Path) -> None:
    page = page_of(tmp_path, [metric(1), metric(2, loss=5.0), metric(2, loss=0.5), metric(3)])
    assert page.chart("Loss")["traces"][0]["y"] == [0.01, 0.5, 0.01]


def test_many_samples_are_capped_over_all_of_the_run_and_the_page_says_so(tmp_path: Path) -> None:
    page = page_of(tmp_path, [metric(1)], [completion(step) for step in range(1, 101) for _ in range(20)])
    steps = [sample["step"] for sample in page.data["samples"]]
    assert set(steps) == set(range(1, 101)) and len(steps) == MAX_SAMPLES
    assert f"2000 completions were logged; this page holds {MAX_SAMPLES}" in page.prose


@pytest.mark.parametrize(("steps", "each", "limit"), [(1000, 16, 1500), (1, 5000, 1500), (5000, 1, 1500), (7, 3, 1)])
def test_spread_keeps_the_limit_and_the_ends(steps: int, each: int, limit: int) -> None:
    kept = spread([completion(step) for step in range(steps) for _ in range(each)], limit)
    assert 0 < len(kept) <= limit and kept[-1]["step"] == steps - 1
    assert limit == 1 or kept[0]["step"] == 0


def test_samples_under_the_cap_are_all_kept_without_a_note(tmp_path: Path) -> None:
    page = page_of(tmp_path, [metric(1)], [completion(1), completion(2)])
    assert len(page.data["samples"]) == 2 and "were logged" not in page.prose


def test_a_new_report_replaces_the_old_one_whole(tmp_path: Path) -> None:
    log(tmp_path, "metrics.jsonl", [metric(1)])
    (tmp_path / "report.html").write_text("old", encoding="utf-8")
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]
    assert Page(tmp_path / "report.html").titles()
