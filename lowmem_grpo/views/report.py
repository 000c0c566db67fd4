"""The report of a run: one HTML file that opens offline, with its curves, samples and settings.

The page contains everything it needs, plotly.js included, and its content policy forbids it to load anything else.
What a model wrote reaches the page only as escaped text: through `html.escape`, or as JSON that the page's script
puts into `textContent`.
"""

import json
import os
from collections import defaultdict
from html import escape
from importlib.resources import files
from pathlib import Path

from lowmem_grpo.runs.records import METRICS, SUMMARY, read_lines
from lowmem_grpo.units import time_text
from lowmem_grpo.views.charts import Record, figures

NOTHING = "\u2013"  # a dash where a value is missing
MAX_SAMPLES = 1500  # more would make the page slow to open
WHOLE_GROUP = 8  # completions of a step worth keeping together, before steps are left out
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the folder of a run, which may still be going on, and return its path.

    Raises FileNotFoundError without a `metrics.jsonl`, and ValueError for a line in it that is not JSON.
    """
    rows = rows_of_run(run_dir)
    summary_path, completions_path = run_dir / "summary.json", run_dir / "completions.jsonl"
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {}
    completions = read_lines(completions_path) if completions_path.is_file() else []
    page = render(run_dir.resolve().name, rows, completions, summary)
    report, partial = run_dir / "report.html", run_dir / "report.html.partial"
    partial.write_text(page, encoding="utf-8", errors="replace")
    os.replace(partial, report)
    return report


def rows_of_run(run_dir: Path) -> list[Record]:
    """One row per step, in order; errors as in `write_report`.

    Evaluation lines join their step; a step repeated after a resume keeps the later."""
    path = run_dir / METRICS
    if not path.exists() and (run_dir / SUMMARY).is_file():
        return []  # it failed in its first step
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; expected the folder of a run, which holds {METRICS}")
    rows: dict[int, Record] = defaultdict(dict)
    for line in read_lines(path):
        rows[line["step"]].update(line)
    return [rows[step] for step in sorted(rows)]


def spread(samples: list[Record], limit: int = MAX_SAMPLES) -> list[Record]:
    """At most `limit` samples: the first ones of evenly spaced steps, with the first and the last step."""
    if len(samples) <= limit:
        return samples
    by_step: dict[int, list[Record]] = defaultdict(list)
    for sample in samples:
        by_step[sample["step"]].append(sample)
    steps = sorted(by_step)
    per_step = min(limit, max(WHOLE_GROUP, limit // len(steps)))
    count = min(len(steps), limit // per_step)
    kept = [steps[-1]] if count == 1 else [steps[i * (len(steps) - 1) // (count - 1)] for i in range(count)]
    return [sample for step in kept for sample in by_step[step][:per_step]]


def render(name: str, rows: list[Record], completions: list[Record], summary: Record) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    assets = files("lowmem_grpo") / "assets" / "report"
    samples, charts = spread(completions), figures(rows)
    data = json.dumps({"charts": charts, "samples": samples}, allow_nan=False).replace("<", "\\u003c")
    title = escape(str(summary.get("recipe") or name))
    body = "\n".join([
        headline(title, name, rows, summary), curves_section(charts),
        before_after_section(summary.get("samples") or []),
        samples_section(len(samples), len(completions)), settings_section(summary.get("config") or {}),
    ])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>{(assets / "report.css").read_text()}</style></head>
<body><main>{body}</main>
<script type="application/json" id="data">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{(assets / "report.js").read_text()}</script></body></html>
"""


def headline(title: str, name: str, rows: list[Record], summary: Record) -> str:
    """What was trained, its status, and the main numbers."""
    status = escape(str(summary.get("status") or "running"))
    last = rows[-1] if rows else {}
    seconds = summary.get("train_seconds", last.get("elapsed"))
    tiles = [accuracy_tile(summary)]
    if last.get("reward") is not None:
        tiles.append(tile("Reward, last step", f"{last['reward']:.3f}"))
    tiles.append(tile("Training time", NOTHING if seconds is None else time_text(seconds)))
    tiles.append(tile("Steps", str(summary.get("steps", last.get("step", 0)))))
    if summary.get("seed") is not None:
        tiles.append(tile("Seed", str(summary["seed"])))
    parts = [summary.get("model"), name if summary.get("recipe") else None]
    about = " · ".join(escape(str(part)) for part in parts if part)
    return (f'<header><h1>{title} <span class="status {status}">{status}</span></h1><p class="quiet">{about}</p>'
            f'<div class="tiles">{"".join(tiles)}</div></header>')


def accuracy_tile(summary: Record) -> str:
    """Accuracy before and after training, if it was measured."""
    before, after = (summary.get(key) for key in ("accuracy_before", "accuracy_after"))
    if before is None and after is None:
        return ""
    shown = " → ".join("…" if value is None else f"{value:.1%}" for value in (before, after))
    problems = summary.get("eval_problems")
    return tile("Accuracy before → after" + (f", {problems} problems" if problems else ""), shown, "tile wide")


def tile(label: str, value: str, css: str = "tile") -> str:
    """One number and what it counts."""
    return f'<div class="{css}"><div class="number">{escape(value)}</div><div class="quiet">{escape(label)}</div></div>'


def curves_section(charts: list[Record]) -> str:
    """A place for each chart; the script draws into it."""
    if not charts:
        return '<section><h2>Curves</h2><p class="card">No steps logged yet.</p></section>'
    places = "".join(
        f'<figure class="card"><figcaption><b>{escape(chart["title"])}</b> <span class="quiet">{escape(chart["note"])}'
        f'</span></figcaption><div class="plot" id="chart-{number}"></div></figure>'
        for number, chart in enumerate(charts)
    )
    return f'<section><h2>Curves by step</h2><div class="charts">{places}</div></section>'


def before_after_section(samples: list[Record]) -> str:
    """What the model answered before and after training, side by side."""
    if not samples:
        return ""
    cards = "".join(
        f'<article class="card"><pre>{text(sample, "prompt")}</pre>'
        f'<p class="quiet">expected: <b>{text(sample, "answer")}</b></p>'
        f'<div class="pair"><div><h3>Before</h3><pre>{text(sample, "before")}</pre></div>'
        f'<div><h3>After</h3><pre>{text(sample, "after")}</pre></div></div></article>'
        for sample in samples
    )
    return f'<section><h2>Before and after</h2><div class="articles">{cards}</div></section>'


def text(sample: Record, key: str) -> str:
    """A field as escaped text, a dash if it is missing."""
    value = sample.get(key)
    return NOTHING if value is None else escape(str(value))


def samples_section(shown: int, logged: int) -> str:
    """The controls of the sample browser and its empty table; the script fills it."""
    if not shown:
        return '<section><h2>Samples over time</h2><p class="card">No completions logged yet.</p></section>'
    capped = f"{logged} completions were logged; this page holds {shown} of them, spread evenly over the steps."
    note = f'<p class="quiet">{capped}</p>' if shown < logged else ""
    return f"""<section><h2>Samples over time</h2>{note}
<div class="controls"><label>Step <input type="range" id="step" min="0" step="1"> <output id="at"></output></label>
<label><input type="checkbox" id="all"> all steps</label>
<input type="search" id="filter" size="32" placeholder="Text in prompt or completion" aria-label="Text filter">
<select id="order" aria-label="Order"><option value="0">As logged</option>
<option value="-1">Highest reward first</option><option value="1">Lowest reward first</option></select>
<span class="quiet" id="count"></span></div>
<div class="scroll card"><table><thead><tr id="head"></tr></thead><tbody id="rows"></tbody></table></div>
<button id="more" type="button">Show more</button></section>"""


def settings_section(config: Record) -> str:
    """The run's settings, folded away."""
    if not config:
        return ""
    rows = "".join(f"<tr><td>{escape(str(key))}</td><td><code>{escape(json.dumps(value))}</code></td></tr>"
                   for key, value in config.items())
    return f"<details><summary>Settings</summary><div class='scroll card'><table>{rows}</table></div></details>"
