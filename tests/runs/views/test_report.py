"""The report page: what it needs, what it shows, and that model text cannot break out of it."""

import base64
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from run_pages import Page

from lowmem_grpo.runs.accuracy import KINDS, changed_first, wilson_interval
from lowmem_grpo.runs.views.chart import DARK_WRONG, RIGHT
from lowmem_grpo.runs.views.report import MAX_SAMPLES, MOST_BYTES, write_report

ENDS = {"done": 0.75, "max_turns": 0.25, "parse_error": 0.0}
ATTACK = "</script><img src=x onerror=alert(1)><!--"


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
    assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]", page.source)
    policy = next(attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs)
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy


def test_model_text_cannot_close_the_script_or_add_elements(tmp_path: Path) -> None:
    finished(tmp_path, recipe=ATTACK, model=ATTACK, config={ATTACK: ATTACK},
             samples=[dict.fromkeys(("prompt", "answer", "before", "after"), ATTACK)])
    page = page_of(tmp_path, [metric(1)], [completion(1, ATTACK), played(1, text=ATTACK) | {"ending": ATTACK}])
    assert ATTACK not in page.source
    assert "img" not in dict(page.elements) and len(page.scripts) == 2
    assert page.samples[0]["completion"] == page.samples[1]["turns"][0]["replies"][0]["content"] == ATTACK
    assert page.prose.count(ATTACK) == 21
    assert "made.append(" in page.scripts[1]  # which makes text of text: the only way of model text into the page
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
                if word in page.scripts[1]]


def test_the_headline_shows_what_the_summary_says_and_without_one_that_it_is_running(tmp_path: Path) -> None:
    finished(tmp_path, config={"beta": 0.04}, samples=[{"prompt": "p", "answer": "4", "before": "5", "after": "4!"}])
    prose = page_of(tmp_path, [metric(1), metric(2), metric(3)]).prose
    for expected in ("arithmetic", "tiny", "finished", "21.5% → 78.0%", "n = 200", "1 min 35 s", "beta", "4!"):
        assert expected in prose
    assert "running" not in prose
    (tmp_path / "summary.json").unlink()
    prose = page_of(tmp_path, [metric(1), metric(2)]).prose
    assert "running" in prose and "20 s" in prose and tmp_path.name in prose and "before →" not in prose
    (tmp_path / "summary.json").write_text(json.dumps({"status": "running", "train_seconds": 0.0}))
    assert "2 min 5 s" in page_of(tmp_path, [metric(1, elapsed=61.0), metric(2, elapsed=125.0)]).prose
    page = page_of(tmp_path, [])
    assert page.data["charts"] == [] and "No steps logged yet" in page.scripts[1]
    assert "No completions logged yet" in page.prose


def test_accuracies_have_wilson_intervals_and_their_difference_the_paired_one(tmp_path: Path) -> None:
    change = {"accuracy": 0.565, "interval": [0.482, 0.641], "better": 120, "worse": 7, "same": 73}
    finished(tmp_path, difference=change)
    prose = page_of(tmp_path, [metric(1)]).prose
    ends = *wilson_interval(0.215, 200), *wilson_interval(0.78, 200)
    assert "95% intervals: {:.1%} to {:.1%} before, {:.1%} to {:.1%} after".format(*ends) in prose
    assert "change +56.5 points, 95% interval +48.2 to +64.1 (paired on the same problems): more than chance" in prose


def test_tiles_tell_memory_speed_card_size_and_version_and_no_seed(tmp_path: Path) -> None:
    machine = {"parameters": 8_030_261_248, "trainable_parameters": 41_943_040, "weights": "4-bit", "card": "H200",
               "card_bytes": 140 * 2**30, "processor": "EPYC", "version": "0.1.0", "torch": "2.13.0"}
    finished(tmp_path, machine=machine, config={"max_steps": 30})
    rows = [metric(step, tokens_per_second=1200.0 + step, step_time=2.0) for step in (1, 2, 3)]
    prose = page_of(tmp_path, rows).prose
    for expected in ("3.00 GiB", "of 140.00 GiB on the card", "1,202", "8.03 B", "41.9 M more in the adapter", "H200",
                     "0.1.0", "torch 2.13.0", "3 of 30"):
        assert expected in prose
    assert "Seed" not in prose and "EPYC" not in prose


@pytest.mark.parametrize(("summary", "said"), [
    ({"status": "failed", "error": "ValueError: <b>no room</b>\nmake room"}, ["This run failed after step 2 of 60",
                                                                             "ValueError: <b>no room</b>"]),
    ({"status": "failed"}, ["This run failed after step 2 of 60", "The reason was not recorded"]),
    ({"status": "interrupted"}, ["This run was stopped after step 2 of 60", "resume=true"]),
    ({"status": "running"}, ["was in progress", "resume=true"]),
])
def test_a_run_that_did_not_finish_says_so_and_why_and_what_the_page_lacks(
    tmp_path: Path, summary: dict[str, Any], said: list[str]
) -> None:
    found = {"accuracy_before": 0.2, "eval_problems": 200, "steps": 2, "config": {"max_steps": 60}, **summary}
    (tmp_path / "summary.json").write_text(json.dumps(found))
    prose = page_of(tmp_path, [metric(1), metric(2)]).prose
    after = "20.0% → not yet measured" if summary["status"] == "running" else "20.0% → not measured"
    for expected in (*said, after, "Not on this page: samples, since no completion was logged"):
        assert expected in prose


def test_verdicts_have_signs_what_changed_comes_first_and_one_of_something_is_no_plural(tmp_path: Path) -> None:
    sample = {"prompt": "p", "answer": "4", "before": "old", "after": "new"}
    kinds = [(True, True), (True, False), (False, False), (False, True)]
    change = {"accuracy": 1.0, "interval": [0.1, 1.0], "better": 1, "worse": 0, "same": 0}
    finished(tmp_path, steps=1, eval_problems=1, difference=change, config={"max_steps": 1},
             samples=[sample | {"right_before": old, "right_after": new} for old, new in kinds])
    page = page_of(tmp_path, [metric(1)])
    assert page.data["top"]["tiles"][0] == ["step", "1"] and "n = 1 held-out problem\n" in page.prose
    assert "right after: 1 problem;" in page.prose
    shown = [(pair["right_before"], pair["right_after"]) for pair in page.data["pairs"]["samples"]]
    assert shown == [(False, True), (True, False), (False, False), (True, True)]
    assert "\\u2713 right" in page.scripts[1] and "\\u2717 wrong" in page.scripts[1]
    assert f"--right:{RIGHT}" in page.source and f"--wrong:{DARK_WRONG}" in page.source
    assert ".right" in page.source and "var(--wrong)" in page.source


@pytest.mark.parametrize("shown", [1, 4, 6, 100])
def test_examples_of_every_kind_are_shown_and_otherwise_those_that_changed(shown: int) -> None:
    pairs = [(True, True)] * 20 + [(False, True)] * 20 + [(False, False)] * 20 + [(True, False)] * 2
    kinds = [KINDS.index(pairs[place]) for place in changed_first(pairs, shown)]
    assert len(kinds) == min(shown, len(pairs)) and kinds == sorted(kinds)
    assert len(set(kinds)) == min(shown, 4)
    assert shown != 6 or kinds == [0, 0, 0, 1, 2, 3]


def test_accuracy_is_drawn_over_the_steps_with_the_held_out_problems(tmp_path: Path) -> None:
    finished(tmp_path, right="correct")
    lines = [completion(step) | {"rewards": {"correct": 2.0 * (place < step), "format": 1.0}}
             for step in (1, 2, 3) for place in range(4)]
    found = page_of(tmp_path, [metric(1)], lines).lines("Accuracy")
    assert found == {"sampled in training (correct)": {1: 0.25, 2: 0.5, 3: 0.75},
                     "held-out problems, with 95% interval": {0: 0.215, 3: 0.78}}


def test_long_runs_are_smoothed_and_the_page_says_how(tmp_path: Path) -> None:
    assert "Bold lines" not in page_of(tmp_path, [metric(step) for step in range(1, 10)]).prose
    page = page_of(tmp_path, [metric(step, loss=(-1.0) ** step) for step in range(1, 61)])
    assert "Bold lines are means of the 5 steps around each, faint ones are single steps." in page.prose
    [line] = page.chart("Loss")["lines"]
    bold, faint = line["bold"], line["values"]
    assert max(bold[5:-5]) - min(bold[5:-5]) < (max(faint) - min(faint)) / 4


@pytest.mark.parametrize("text", ["word ", "<&\"", "漢字", "\ud800"])
@pytest.mark.every(2)
def test_a_page_of_any_run_has_at_most_500_kb_and_still_shows_samples(tmp_path: Path, text: str) -> None:
    long = text * 20_000
    rows = [metric(step, **{f"rewards/f{number}/mean": 0.01 * number for number in range(30)})
            for step in range(1, 2001)]
    finished(tmp_path, samples=[dict.fromkeys(("prompt", "answer", "before", "after"), long)] * 6, error=long,
             config={"kwargs": long})
    page = page_of(tmp_path, rows, [completion(step, long) for step in range(1, 200)])
    assert (tmp_path / "report.html").stat().st_size <= MOST_BYTES == 500_000
    assert page.samples and page.samples[-1]["step"] == 199


def test_a_half_written_last_line_is_left_out_and_a_broken_one_before_is_an_error_that_names_it(tmp_path: Path) -> None:
    log(tmp_path, "metrics.jsonl", [metric(1), metric(2)], tail='{"step": 3, "rew')
    log(tmp_path, "completions.jsonl", [completion(1)], tail='{"step": 2, "prompt": "2 +')
    with (tmp_path / "completions.jsonl").open("ab") as file:
        file.write("é".encode()[:1])
    page = Page(write_report(tmp_path))
    assert page.lines("Loss") == {"loss": {1: 0.01, 2: 0.01}} and len(page.samples) == 1
    assert "were logged" not in page.prose, "nothing is left out"
    log(tmp_path, "metrics.jsonl", [metric(1)], tail='{"step": 2, "rew\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
        write_report(tmp_path)


def test_a_folder_without_metrics_is_an_error_that_says_what_was_expected(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=r"expected the folder of a run, which holds metrics\.jsonl"):
            write_report(folder)
    assert not list(tmp_path.iterdir())


def test_curves_follow_the_log_and_absent_metrics_have_none(tmp_path: Path) -> None:
    again = [metric(2, loss=5.0), metric(2, loss=0.5, kl=float("nan")), {"step": 2, "eval_reward": 0.9}]
    page = page_of(tmp_path, [metric(1), *again])
    assert page.lines("Loss") == {"loss": {1: 0.01, 2: 0.5}}, "a step that was repeated after a resume is drawn once"
    assert "KL divergence" not in page.titles() and "Peak memory" in page.titles()
    assert page.lines("Reward") == {"train": {1: 0.1, 2: 0.2}, "evaluation": {2: 0.9}}
    assert list(page.lines("Reward functions")) == ["correct", "format"]
    assert page.lines("Peak memory") == {"peak": {1: 3.0, 2: 3.0}}


def test_many_samples_are_capped_over_all_of_the_run_and_the_page_says_so(tmp_path: Path) -> None:
    page = page_of(tmp_path, [metric(1)], [completion(step) for step in range(1, 101) for _ in range(20)])
    steps = [sample["step"] for sample in page.samples]
    assert set(steps) == set(range(1, 101)) and len(steps) == MAX_SAMPLES
    assert f"2,000 completions were logged; this page holds {MAX_SAMPLES:,}" in page.prose


def test_a_new_report_replaces_the_old_one_whole(tmp_path: Path) -> None:
    log(tmp_path, "metrics.jsonl", [metric(1)])
    (tmp_path / "report.html").write_text("old", encoding="utf-8")
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]
    assert Page(tmp_path / "report.html").titles()


def played(step: int, turns: int = 2, text: str = "4") -> dict[str, Any]:
    """The line of an episode: each turn calls a tool, which answers."""
    turn = {"text": text, "tokens": 5, "calls": [{"name": text, "arguments": {"a": text}}], "reward": 1.0,
            "failures": 1, "replies": [{"role": "tool", "name": text, "content": text}]}
    own = {"ending": "answer", "num_turns": turns, "sampled_tokens": 2, "turns": [turn] * turns}
    return completion(step, text) | own


def test_episodes_are_shown_turn_by_turn_with_their_end_in_words(tmp_path: Path) -> None:
    page = page_of(tmp_path, [metric(1)], [played(1)])
    sample, = page.samples
    assert (sample["ending"], sample["sampled_tokens"], len(sample["turns"])) == ("answer", 2, 2)
    assert sample["turns"][1] == {"number": 2, "text": "4", "tokens": 5, "calls": ['4(a="4")'], "reward": 1.0,
                                  "failures": 1, "replies": [{"role": "tool", "name": "4", "content": "4"}]}
    assert page.data["samples"]["endings"]["answer"] == "a turn without a call of a tool"
    for sign in ("\\u25cf sampled", "\\u25cb context"):
        assert sign in page.scripts[1], "what is sampled and what is not differ by more than a colour"


@pytest.mark.parametrize(("turns", "text"), [(2, "word " * 20_000), (500, "\u6f22<&" * 200)])
@pytest.mark.every(2)
def test_long_episodes_fit_into_500_kb_and_say_which_turns_they_show(tmp_path: Path, turns: int, text: str) -> None:
    page = page_of(tmp_path, [metric(1)], [played(step, turns, text) for step in range(1, 60)])
    assert (tmp_path / "report.html").stat().st_size <= MOST_BYTES
    numbers = [turn["number"] for turn in page.samples[-1]["turns"]]
    assert page.samples[-1]["step"] == 59 and numbers[0] == 1 and numbers[-1] == turns
    assert len(numbers) == min(turns, 40)


def test_curves_of_episodes_are_their_ends_turns_tools_and_waiting_and_shares_begin_at_zero(tmp_path: Path) -> None:
    ends = {f"episodes/{name}": share for name, share in ENDS.items()}
    rows = [metric(1, **ends), metric(2, **{"episodes/done": 1.0}),
            metric(3, **{"turns/mean": 2.5, "tools/call_frequency": 1.5, "tools/failure_frequency": 0.25,
                         "tokens/cached_share": 0.5, "tools/waiting_share": 0.125})]
    page = page_of(tmp_path, rows)
    assert page.lines("Ends of episodes") == {"done": {1: 0.75, 2: 1.0}, "max_turns": {1: 0.25, 2: 0.0}}
    for title, value in (("Turns", 2.5), ("Tool calls", 1.5), ("Tool failures", 0.25), ("Cached tokens", 0.5),
                         ("Waiting for tools and environments", 0.125)):
        assert [list(values.values()) for values in page.lines(title).values()] == [[value]], title
    assert all(chart["axis"] and (chart["zero"] or not chart["share"]) for chart in page.data["charts"])
    assert page.chart("Tool failures")["share"] and not page.chart("Loss")["zero"]


def test_baselines_are_dashed_lines_beside_the_accuracy(tmp_path: Path) -> None:
    finished(tmp_path, right="correct",
             baselines={"random": 0.15, "perfect": {"share": 0.97, "games": 1000}, "odd": None})
    page = page_of(tmp_path, [metric(1)], [completion(1), completion(2) | {"rewards": {"correct": 0.0}}])
    found = page.lines("Accuracy")
    assert found["sampled in training (correct)"] == {1: 1.0, 2: 0.0}
    assert found["baseline random, 15.0%"] == dict.fromkeys(range(4), 0.15)
    assert found["baseline perfect, 97.0%"] == dict.fromkeys(range(4), 0.97) and len(found) == 4
    assert "baselines: random 15.0%, perfect 97.0%" in page.prose
    assert [line["kind"] for line in page.chart("Accuracy")["lines"]] == ["curve", "dots", "level", "level"]


def test_parts_stand_on_top_of_each_other_and_only_shares_are_cut_at_one(tmp_path: Path) -> None:
    measured = {"time/sampling/prefill_s": 0.5, "time/sampling/full_s": 4.0, "time/sampling/tail_s": 2.0,
                "tokens_per_second/tail": 150.0, "time/generate": 0.75, "time/train": 0.5}
    page = page_of(tmp_path, [metric(1, **measured), metric(2, **measured)])
    for title, edges in (("Where the time of sampling goes", [(0.0, 0.5), (0.5, 4.5), (4.5, 6.5)]),
                         ("Where the time goes", [(0.0, 0.75), (0.75, 1.0)])):
        assert [(line["low"][0], line["high"][0]) for line in page.chart(title)["lines"]] == edges
    assert page.lines("Tokens per second") == {"in the tail": {1: 150.0, 2: 150.0}}
    assert "Where the time of sampling goes" not in page_of(tmp_path, [metric(1)]).titles()


def test_what_is_at_zero_in_every_step_is_a_sentence_and_no_chart(tmp_path: Path) -> None:
    flat = {"completions/clipped_ratio": 0.0, "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.0, "kl": 0.0}
    page = page_of(tmp_path, [metric(step, **flat) | {"reward": 0.0, "reward_std": 0.0} for step in (1, 2)])
    assert not {"Completions cut off", "Clip ratio", "KL divergence"} & {*page.titles()}
    assert "At 0 in every step: completions cut off, kl divergence, clip ratio." in page.data["note"]
    assert "Reward" in page.titles(), "a reward of 0 is what a run is about"
    page = page_of(tmp_path, [metric(1, **flat), metric(2, **flat | {"kl": 0.1})])
    assert "KL divergence" in page.titles()


def test_pictures_stand_beside_completions_are_fewer_where_the_page_is_full_and_no_other_file_is_read(
    tmp_path: Path
) -> None:
    names = [f"{number:032x}" for number in range(300)]
    (tmp_path / "pictures").mkdir()
    for name in names:
        (tmp_path / "pictures" / f"{name}.jpg").write_bytes(bytes(3000) + name.encode())
    (tmp_path / "pictures" / f"{names[0]}.jpg").write_bytes(bytes(20_000))  # too large for a small picture
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    lines = [completion(step, ATTACK) | {"images": [name, "../secret", ATTACK, 7, "f" * 32]}
             for step, name in enumerate(names, start=1)]
    page = page_of(tmp_path, [metric(step) for step in range(1, 301)], lines)
    assert len(page.source.encode()) <= MOST_BYTES and ATTACK not in page.source
    shown = page.data["samples"]["pictures"]
    assert 20 < len(shown) < 299 and {names[1], names[-1]} <= shown.keys() <= set(names[1:])
    for name, uri in shown.items():
        head, _, data = uri.partition(",")
        assert head == "data:image/jpeg;base64" and base64.b64decode(data) == bytes(3000) + name.encode()
    assert all(row["images"] == [names[row["step"] - 1], "f" * 32] for row in page.data["samples"]["rows"])


WRONG_VALUES = [10**400, -(10**400), 1e308, "x", [1], {"a": 1}, True, "\u202e", float("nan"), None]


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: f"{value!r:.12}")
def test_a_metric_that_is_no_number_to_draw_is_missing_and_the_others_are_drawn(value: Any, tmp_path: Path) -> None:
    names = {name for name in metric(1) if name != "step"}
    page = page_of(tmp_path, [metric(1), metric(2, **dict.fromkeys(names, value)), *map(metric, range(3, 30))])
    for title, line in (("Loss", "loss"), ("Reward", "train"), ("Reward functions", "correct"), ("Entropy", "entropy"),
                        ("Where the time goes", "train"), ("Peak memory", "peak"), ("Groups with signal", "all")):
        assert {1, 3, 29} <= page.lines(title)[line].keys(), title
        assert value is True or 2 not in page.lines(title)[line], title


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: f"{value!r:.12}")
@pytest.mark.parametrize("name", ["rewards", "reward", "turns", "images", "tokens", "replayed_from"])
def test_a_completion_with_a_field_of_another_kind_is_shown_without_it(name: str, value: Any, tmp_path: Path) -> None:
    page = page_of(tmp_path, [metric(1)], [completion(1) | {name: value}, completion(2)])
    assert [sample["step"] for sample in page.samples] == [1, 2]
    assert page.samples[1]["rewards"] == {"correct": 1.0, "format": None}


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_a_pipe_in_place_of_a_file_is_never_waited_for(name: str, tmp_path: Path) -> None:
    finished(tmp_path)
    log(tmp_path, "metrics.jsonl", [metric(1)])
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with patch.object(Path, "read_bytes", side_effect=AssertionError("it is read")):
        if name == "metrics.jsonl":
            with pytest.raises(FileNotFoundError, match=r"expected the folder of a run"):
                write_report(tmp_path)
        else:
            assert not Page(write_report(tmp_path)).samples


def test_a_summary_of_gigabytes_is_as_good_as_none(tmp_path: Path) -> None:
    finished(tmp_path)
    os.truncate(tmp_path / "summary.json", 3 << 30)
    with patch.object(Path, "read_bytes", side_effect=AssertionError("it is read")):
        assert "there is no summary.json that can be read" in page_of(tmp_path, [metric(1)]).prose
