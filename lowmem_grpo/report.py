"""The report of a run: one HTML file that opens offline, with its curves, samples and settings.

Everything the page needs lies inside it, plotly.js included, and its content policy forbids it to load anything else.
What a model wrote reaches the page only as escaped text: through `html.escape`, or as JSON that the page's script
puts into `textContent`.
"""

import json
import os
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

Record = dict[str, Any]

MAX_SAMPLES = 1500  # more would make the page slow to open
WHOLE_GROUP = 8  # completions of a step worth keeping together, before steps are left out
MARKERS_BELOW = 30  # a line of fewer points shows each of them
BAND = "rgba(59, 130, 196, 0.16)"
GIB = 2**30


@dataclass(frozen=True)
class Chart:
    """Metrics drawn over the steps of the run, each under its name in the legend."""

    title: str
    note: str
    lines: dict[str, str]
    scale: float = 1.0
    format: str = ""
    stacked: bool = False
    from_zero: bool = False


CHARTS = (
    Chart("Groups with signal", "completions differ in reward",
          {"groups/total": "all", "groups/with_signal": "with signal"}, from_zero=True),
    Chart("Completion length", "tokens",
          {"completions/mean_length": "mean", "completions/min_length": "min", "completions/max_length": "max"},
          from_zero=True),
    Chart("Completions cut off", "share that reached the length limit", {"completions/clipped_ratio": "cut off"},
          format=".0%", from_zero=True),
    Chart("Entropy", "nats per token", {"entropy": "entropy"}),
    Chart("KL divergence", "policy from reference model, nats per token", {"kl": "KL"}),
    Chart("Clip ratio", "share of tokens whose gradient the clipping took",
          {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "clip_ratio/region_mean": "either"},
          from_zero=True),
    Chart("Where the time goes", "share of each step",
          {"time/generate": "generate", "time/reward": "reward", "time/train": "train", "time/idle": "idle"},
          format=".0%", stacked=True),
    Chart("Tokens per second", "over the whole step", {"tokens_per_second": "tokens/s"},
          from_zero=True),
    Chart("Peak memory", "GiB", {"memory/peak_bytes": "peak"}, scale=1 / GIB),
    Chart("Loss", "not a measure of progress; watch the reward", {"loss": "loss"}),
    Chart("Gradient norm", "", {"grad_norm": "norm"}),
    Chart("Learning rate", "", {"learning_rate": "rate"}, format="~e"),
)


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the folder of a run, finished or still going on, and return its path.

    Raises FileNotFoundError where there is no `metrics.jsonl`, and ValueError for a line in it that is not JSON.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise FileNotFoundError(f"no {metrics}; expected the folder of a run, which holds metrics.jsonl")
    summary_path, completions_path = run_dir / "summary.json", run_dir / "completions.jsonl"
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {}
    completions = read_records(completions_path) if completions_path.is_file() else []
    page = render(run_dir.resolve().name, merge_steps(read_records(metrics)), completions, summary)
    report, partial = run_dir / "report.html", run_dir / "report.html.partial"
    partial.write_text(page, encoding="utf-8", errors="replace")
    os.replace(partial, report)
    return report


def read_records(path: Path) -> list[Record]:
    """The records of a JSON lines file. A last line without its end is still being written, and left out."""
    records = []
    *complete, last = path.read_bytes().split(b"\n")
    for number, line in enumerate([*complete, last], start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line, parse_constant=lambda _: None))  # NaN and infinity become gaps
        except ValueError as error:
            if number <= len(complete):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return records


def merge_steps(lines: list[Record]) -> list[Record]:
    """One row a step, in order. Evaluation lines join their step; a step repeated after a resume keeps the later."""
    rows: dict[int, Record] = defaultdict(dict)
    for line in lines:
        rows[line["step"]].update(line)
    return [rows[step] for step in sorted(rows)]


def spread(samples: list[Record], limit: int = MAX_SAMPLES) -> list[Record]:
    """At most `limit` samples, the first ones of evenly spaced steps; the first and the last step are among them."""
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


def figures(rows: list[Record]) -> list[Record]:
    """The charts that have data: their words, and their plotly traces."""
    names = sorted({match[1] for row in rows for key in row if (match := re.fullmatch(r"rewards/(.+)/mean", key))})
    functions = Chart("Reward functions", "mean of each", {f"rewards/{name}/mean": name for name in names})
    drawn = [(Chart("Reward", "mean ± one standard deviation", {}), reward_traces(rows))]
    drawn += [(chart, [line(rows, key, name, chart) for key, name in chart.lines.items() if points(rows, key)])
              for chart in (functions, *CHARTS)]
    return [{**asdict(chart), "traces": traces} for chart, traces in drawn if traces]


def points(rows: list[Record], key: str) -> list[tuple[int, float]]:
    """(step, value) of each step that logged the metric."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def line(rows: list[Record], key: str, name: str, chart: Chart) -> Record:
    """The plotly trace of one metric."""
    pairs = points(rows, key)
    mode = "lines+markers" if len(pairs) < MARKERS_BELOW and not chart.stacked else "lines"
    style = {"stackgroup": "shares", "line": {"width": 0.5}} if chart.stacked else {"line": {"width": 1.8}}
    values = {"x": [step for step, _ in pairs], "y": [value * chart.scale for _, value in pairs]}
    return {"type": "scatter", "name": name, "mode": mode, **style, **values}


def reward_traces(rows: list[Record]) -> list[Record]:
    """The mean reward over its band, and the evaluations where there are any."""
    words = Chart("Reward", "", {})
    banded = [row for row in rows if row.get("reward") is not None and row.get("reward_std") is not None]
    steps = [row["step"] for row in banded]
    edge = {"type": "scatter", "x": steps, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip",
            "showlegend": False}
    lower = {**edge, "y": [row["reward"] - row["reward_std"] for row in banded]}
    upper = {**edge, "y": [row["reward"] + row["reward_std"] for row in banded], "fill": "tonexty", "fillcolor": BAND}
    curves = [("reward", "train", "#3b82c4"), ("eval_reward", "evaluation", "#e0803a")]
    return ([lower, upper] if banded else []) + [
        {**line(rows, key, name, words), "line": {"width": 2, "color": color}}
        for key, name, color in curves if points(rows, key)
    ]


def render(name: str, rows: list[Record], completions: list[Record], summary: Record) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    samples, charts = spread(completions), figures(rows)
    data = json.dumps({"charts": charts, "samples": samples}, allow_nan=False).replace("<", "\\u003c")
    title = escape(str(summary.get("recipe") or name))
    body = "\n".join([
        headline(title, name, rows, summary), curves_section(charts),
        before_after_section(summary.get("samples") or []),
        samples_section(len(samples), len(completions)), settings_section(summary.get("config") or {}),
    ])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{STYLE}</style></head>
<body><main>{body}</main>
<script type="application/json" id="data">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script></body></html>
"""


def headline(title: str, name: str, rows: list[Record], summary: Record) -> str:
    """What was trained, how it stands, and the numbers to remember."""
    status = escape(str(summary.get("status") or "running"))
    last = rows[-1] if rows else {}
    seconds = summary.get("train_seconds", last.get("elapsed"))
    tiles = [accuracy_tile(summary)]
    if last.get("reward") is not None:
        tiles.append(tile("Reward, last step", f"{last['reward']:.3f}"))
    tiles.append(tile("Training time", "–" if seconds is None else duration(seconds)))
    tiles.append(tile("Steps", str(summary.get("steps", last.get("step", 0)))))
    if summary.get("seed") is not None:
        tiles.append(tile("Seed", str(summary["seed"])))
    parts = [summary.get("model"), name if summary.get("recipe") else None]
    about = " · ".join(escape(str(part)) for part in parts if part)
    return (f'<header><h1>{title} <span class="status {status}">{status}</span></h1><p class="quiet">{about}</p>'
            f'<div class="tiles">{"".join(tiles)}</div></header>')


def accuracy_tile(summary: Record) -> str:
    """Accuracy before and after training, as far as it has been measured."""
    before, after = (summary.get(key) for key in ("accuracy_before", "accuracy_after"))
    if before is None and after is None:
        return ""
    shown = " → ".join("…" if value is None else f"{value:.1%}" for value in (before, after))
    problems = summary.get("eval_problems")
    return tile("Accuracy before → after" + (f", {problems} problems" if problems else ""), shown, "tile wide")


def tile(label: str, value: str, css: str = "tile") -> str:
    """One number and what it counts."""
    return f'<div class="{css}"><div class="number">{escape(value)}</div><div class="quiet">{escape(label)}</div></div>'


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, the two largest that matter."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


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
    """A field as escaped text, a dash where it is missing."""
    value = sample.get(key)
    return "–" if value is None else escape(str(value))


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


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1f2733; --quiet: #667180; --edge: #e3e7ec;
  --accent: #2f74b5; --good: #2c8a68 }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1a2029; --ink: #dde3ea; --quiet: #94a0ae;
  --edge: #2b333e; --accent: #74aee6; --good: #5cc29c } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1440px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 18px; margin: 36px 0 12px } h3 { font-size: 13px; margin: 0 0 4px }
.quiet { color: var(--quiet); font-size: 13px; margin: 4px 0 }
.status { font-size: 12px; font-weight: 600; vertical-align: middle; padding: 2px 10px; border-radius: 99px;
  border: 1px solid; color: var(--accent) } .status.finished { color: var(--good) }
.card, .tile { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px; margin: 0 }
.tiles, .charts, .articles, .pair { display: grid; gap: 14px }
.tiles { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); margin-top: 18px } .wide { grid-column: span 2 }
.number { font-size: 24px; font-weight: 650; white-space: nowrap; font-variant-numeric: tabular-nums }
.wide .number { font-size: 38px; line-height: 1.1; color: var(--accent) }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)) } .plot { height: 230px }
.pair { grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)) }
pre { font: 12.5px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  max-height: 300px; overflow: auto }
.controls { display: flex; flex-wrap: wrap; gap: 10px 18px; align-items: center; margin-bottom: 10px }
.controls input[type=range] { width: min(320px, 50vw); vertical-align: middle } output { font-weight: 600 }
.scroll { overflow-x: auto; padding: 0 } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: 8px 12px; border-bottom: 1px solid var(--edge);
  font-size: 13px }
th { color: var(--quiet); font-weight: 600; white-space: nowrap } .n { text-align: right;
  font-variant-numeric: tabular-nums } .prompt { min-width: 200px; width: 28% } .completion { min-width: 300px }
button, select, input[type=search] { font: inherit; font-size: 13px; padding: 5px 10px; border-radius: 7px;
  color: inherit; border: 1px solid var(--edge); background: var(--card) }
#more { margin-top: 10px } details { margin-top: 36px }
summary { font-size: 18px; font-weight: 700; cursor: pointer; margin-bottom: 12px }
"""

SCRIPT = """
const { charts, samples } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)"), element = id => document.getElementById(id);
function layout(chart) {
  const grid = dark.matches ? "#2b333e" : "#e6e9ee", ink = dark.matches ? "#aab4c0" : "#566170";
  const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true, fixedrange: false };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11 },
    margin: { l: 36, r: 8, t: 8, b: 24 }, xaxis: { ...axis, showgrid: false }, hovermode: "x unified",
    yaxis: { ...axis, tickformat: chart.format, hoverformat: chart.format || ".4~g",
      rangemode: chart.from_zero ? "tozero" : "normal", ...(chart.stacked ? { range: [0, 1] } : {}) },
    hoverlabel: { bgcolor: dark.matches ? "#1a2029" : "#fff" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
    colorway: ["#3b82c4", "#e0803a", "#3a9e78", "#9a6fc9", "#d0576b", "#8a94a3"],
    showlegend: chart.traces.filter(trace => trace.showlegend !== false).length > 1 };
}
function draw() {
  charts.forEach((chart, i) => Plotly.react("chart-" + i, chart.traces, layout(chart),
    { responsive: true, displayModeBar: false }));
}
dark.addEventListener("change", draw);
draw();

const steps = [...new Set(samples.map(sample => sample.step))].sort((a, b) => a - b);
const rewards = [...new Set(samples.flatMap(sample => Object.keys(sample.rewards || {})))];
const number = value => value == null ? "–" : String(+value.toFixed(3));
const columns = [
  ["step", "n", s => s.step], ["prompt", "prompt", s => s.prompt], ["completion", "completion", s => s.completion],
  ...rewards.map(name => [name, "n", s => number((s.rewards || {})[name])]), ["total", "n", s => number(s.reward)],
  ["advantage", "n", s => number(s.advantage)], ["tokens", "n", s => s.tokens], ["ended by", "", s => s.finish_reason]];
let limit = 50;
function add(parent, tag, css, content) {
  const child = parent.appendChild(document.createElement(tag));
  child.className = css;
  child.textContent = content ?? "";
  return child;
}
function chosen() {
  const step = steps[element("step").value], every = element("all").checked, order = +element("order").value;
  const wanted = element("filter").value.toLowerCase();
  const matches = s => [s.prompt, s.completion].some(text => (text ?? "").toLowerCase().includes(wanted));
  const found = samples.filter(s => (every || s.step === step) && matches(s));
  const rank = s => s.reward ?? (order > 0 ? Infinity : -Infinity);
  return order ? found.sort((a, b) => order * (rank(a) > rank(b) ? 1 : rank(a) < rank(b) ? -1 : 0)) : found;
}
function fill() {
  const found = chosen(), rows = element("rows");
  rows.replaceChildren();
  for (const sample of found.slice(0, limit)) {
    const row = rows.appendChild(document.createElement("tr"));
    for (const [name, css, value] of columns)
      name === "prompt" || name === "completion" ? add(add(row, "td", css), "pre", "", value(sample))
        : add(row, "td", css, value(sample));
  }
  element("at").textContent = element("all").checked ? "all" : steps[element("step").value];
  element("step").disabled = element("all").checked;
  element("count").textContent = found.length + (found.length === 1 ? " sample" : " samples");
  element("more").hidden = found.length <= limit;
}
if (samples.length) {
  for (const [name, css] of columns) add(element("head"), "th", css, name);
  element("step").max = steps.length - 1;
  element("step").value = element("step").max;
  const refresh = () => { limit = 50; fill(); };
  for (const id of ["step", "all", "filter", "order"]) element(id).addEventListener("input", refresh);
  element("more").addEventListener("click", () => { limit += 100; fill(); });
  fill();
}
"""
