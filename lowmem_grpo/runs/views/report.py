"""The report of a run: one HTML file of at most `MOST_BYTES` that opens offline, with its curves, samples and settings.
Model text reaches the page only as JSON, which the page's script inserts as text."""

import base64
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from lowmem_grpo.runs.accuracy import KINDS
from lowmem_grpo.runs.files import move, write_new
from lowmem_grpo.runs.records import COMPLETIONS, METRICS, PICTURES, REPORT, SUMMARY, json_object, read_lines
from lowmem_grpo.runs.trajectory import ENDINGS
from lowmem_grpo.runs.views.chart import LINES, css, even_places, how_smoothed
from lowmem_grpo.runs.views.charts import deciding, figures, split_flat, taught
from lowmem_grpo.runs.views.headline import Warned, alarms_in_words, count_alarms, headline
from lowmem_grpo.runs.views.samples import (
    NUMBER,
    Record,
    clipped,
    commonest,
    fits,
    fitting,
    json_text,
    shown_sample,
)
from lowmem_grpo.utils import bytes_of, count_text

MOST_BYTES = 500_000
MOST_POINTS, ALL_POINTS = 600, 6000  # points per line, and of all lines together
MAX_SAMPLES = 1500  # more would make the page slow to open
LARGEST_PICTURE = 16_000  # bytes of a file
MOST_PAIRS, LONGEST_OF_PAIR = 8, 1000  # number of before-and-after pairs, and characters of a text
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
HEAD = """<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">"""
LINKS = """<link rel="stylesheet" href="/page/files/page.css"><script src="/page/files/uplot.js" defer></script>
<script src="/page/files/page.js" defer></script>"""
NO_SCRIPTS = "<noscript>This page is drawn by its own scripts, which load nothing. Allow them to see it.</noscript>"


UNFIT = (TypeError, KeyError, AttributeError, IndexError, ValueError, OverflowError)  # raised for a malformed summary
Shown = TypeVar("Shown")


@dataclass(frozen=True)
class RunSnapshot:
    """The data of a run besides its summary: all of it, or the part that a live page keeps."""

    name: str
    rows: list[Record]  # one per step, or two per interval of steps
    samples: list[Record]  # as `shown_sample` makes them
    judged: list[Record]  # samples whose rewards are used for the accuracy curve
    logged: int  # number of completions that the run has logged
    alarms: dict[str, Warned]
    note: str = ""  # text above the curves
    state: str = ""  # overrides the summary's status: running, killed or silent
    folder: Path | None = None  # of its pictures


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the folder of a finished or running run, and return its path. FileNotFoundError without
    a `metrics.jsonl`, ValueError for a line in it that is not JSON."""
    rows = rows_of_run(run_dir)
    samples, summary = samples_of_run(run_dir), summary_of_run(run_dir)
    snapshot = RunSnapshot(run_dir.resolve().name, rows, samples, samples, len(samples), count_alarms(rows),
                           folder=run_dir / PICTURES)
    report, partial = run_dir / REPORT, run_dir / f"{REPORT}.partial"
    shown = from_summary(lambda summary: content(snapshot, summary), summary)
    write_new(partial, one_file(shown), errors="replace")
    move(partial, report)
    return report


def from_summary(make: Callable[[Record], Shown], summary: Record) -> Shown:
    try:
        return make(summary)
    except UNFIT:
        return make({})


def rows_of_run(run_dir: Path) -> list[Record]:
    """Return one row per step, in order, merged from the step's lines; later values win. What cannot be drawn is left
    out. Raises as `write_report`."""
    path = run_dir / METRICS
    if not path.exists() and (run_dir / SUMMARY).is_file():
        return []  # the run failed in its first step
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; expected the folder of a run, which holds {METRICS}")
    rows: dict[int, Record] = defaultdict(dict)
    for line in read_lines(path):
        rows[line["step"]].update((name, value) for name, value in line.items() if value is None or fits(value, NUMBER))
    return [rows[step] for step in sorted(rows)]


def samples_of_run(run_dir: Path) -> list[Record]:
    path = run_dir / COMPLETIONS
    return [shown_sample(line) for line in read_lines(path)] if path.is_file() else []


def summary_of_run(run_dir: Path) -> Record:
    try:
        return json_object(bytes_of(run_dir / SUMMARY))
    except (OSError, ValueError):
        return {}


def content(run: RunSnapshot, summary: Record, most_bytes: int = MOST_BYTES, all_points: int = ALL_POINTS) -> Record:
    """Return the content of the report or live page, with about `all_points` points and at most `most_bytes` bytes."""
    (charts, flat), right = split_flat(figures(run.rows, run.judged, summary)), deciding(run.judged, summary)
    points = max(2, min(MOST_POINTS, all_points // max(1, sum(len(chart.lines) for chart in charts))))
    shown: Record = {
        "title": str(summary.get("recipe") or run.name),
        "top": headline(run.name, run.rows, summary, missing(run, summary), run.state),
        "alarms": alarms_in_words(run.alarms), "charts": [chart.to_dict(points) for chart in charts],
        "note": " ".join(filter(None, (run.note, how_smoothed(charts), flat))),
        "pairs": before_and_after_training(summary), "common": commonest(run.samples),
        "settings": [(str(name), clipped(json.dumps(value), LONGEST_OF_PAIR))
                     for name, value in (summary.get("config") or {}).items()],
    }
    sampled = {"logged": run.logged, "right": right if len(right) == 1 else [], "endings": ENDINGS}
    room = most_bytes - len(one_file(shown | {"samples": sampled}).encode(errors="replace")) - 1000  # for the note
    kept = fitting(run.samples, MAX_SAMPLES, room // 2 if any("images" in sample for sample in run.samples) else room)
    if found := pictures(kept, run.folder, room // 2):
        sampled["pictures"] = found
    if kept or not taught(summary):
        shown["samples"] = sampled | {"note": left_out(len(kept), run.logged), "rows": kept}
    return shown


def pictures(samples: list[Record], folder: Path | None, room: int) -> dict[str, str]:
    """Return the data URI of each image of the samples, or of as many as `room` bytes hold, evenly spaced."""
    names = list(dict.fromkeys(name for sample in samples for name in sample.get("images", ())))
    files = [] if folder is None else [(name, folder / f"{name}.jpg") for name in names]
    found = {name: f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"
             for name, path in files if path.is_file() and path.stat().st_size <= LARGEST_PICTURE}
    largest = max((len(name) + len(uri) + 6 for name, uri in found.items()), default=1)
    shown, most = list(found), room // largest
    return {shown[place]: found[shown[place]] for place in (even_places(len(shown), most) if most > 1 else ())}


def missing(run: RunSnapshot, summary: Record) -> list[str]:
    """Return a text for each part that the page lacks, since the run did not record it."""
    lacks = [("curves, since no step was logged", not run.rows),
             ("samples, since no completion was logged", not run.samples and not taught(summary)),
             ("model, settings and status, since there is no summary.json that can be read", not summary)]
    return [words for words, absent in lacks if absent]


def left_out(kept: int, logged: int) -> str:
    if not kept:
        return f"None of {logged:,} completions fits into this page." if logged else "No completions logged yet."
    capped = f"{logged:,} completions were logged; this page holds {kept:,} of them, spread evenly over the steps."
    return capped if kept < logged else ""


def before_and_after_training(summary: Record) -> Record | None:
    """Return the answers before and after training, changed ones first. None if the run did not record them."""
    samples = sorted(summary.get("samples") or [], key=lambda sample: KINDS.index(verdicts(sample)))
    if not samples:
        return None
    texts = ("prompt", "answer", "before", "after")
    return {"counts": counts(summary), "samples": [
        {name: clipped(str(sample[name]), LONGEST_OF_PAIR) for name in texts if sample.get(name) is not None}
        | {name: bool(sample[name]) for name in ("right_before", "right_after") if sample.get(name) is not None}
        for sample in samples[:MOST_PAIRS]]}


def verdicts(sample: Record) -> tuple[bool | None, bool | None]:
    before, after = sample.get("right_before"), sample.get("right_after")
    return (None, None) if before is None or after is None else (bool(before), bool(after))


def counts(summary: Record) -> str:
    if not (change := summary.get("difference")):
        return ""
    better = count_text(change["better"], "problem")
    return (f"Wrong before and right after: {better}; the other way round: {change['worse']:,}; as before: "
            f"{change['same']:,}. Those that changed come first.")


def one_file(data: Mapping[str, Any]) -> str:
    """Return a self-contained page with inline styles and scripts, whose CSP forbids loading anything."""
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{style()}</style>'
    scripts = f"<script>{drawing_script()}{asset('page/page.js')}</script>"
    return html_page(str(data["title"]), head, f"{body(data)}\n{scripts}")


def served_page(data: Mapping[str, Any]) -> str:
    return html_page(str(data["title"]), LINKS, body(data))


def plain_page(title: str, content: str, head: str = "") -> str:
    return html_page(title, LINKS.partition("<script")[0] + head,
                     f'<main class="alone"><h1>{escape(title)}</h1>{content}</main>')


def html_page(title: str, head: str, content: str) -> str:
    return (f'<!doctype html>\n<html lang="en"><head>{HEAD}<title>{escape(title)}</title>{head}</head>\n'
            f"<body>{content}</body></html>\n")


def body(data: Mapping[str, Any]) -> str:
    return f'{NO_SCRIPTS}<main></main>\n<script type="application/json" id="data">{json_text(data)}</script>'


def style() -> str:
    keys = "".join(f".l{place}{{--own:var(--line{place})}}" for place in range(len(LINES)))
    return f"{css()}{keys}\n{asset('page/page.css')}{asset('uplot/uPlot.min.css')}"


def drawing_script() -> str:
    """Return uPlot's script, with its first line, which contains a URL, replaced by the licence."""
    return f"/*! uPlot\n{asset('uplot/LICENSE')}*/\n{asset('uplot/uPlot.min.js').partition(chr(10))[2]}\n"


def asset(name: str) -> str:
    return (files("lowmem_grpo") / "assets" / name).read_text(encoding="utf-8")
