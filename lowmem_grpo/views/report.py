"""The report of a run: one HTML file that opens offline, with its curves, samples and settings.

The page contains everything that it needs in at most `MOST_BYTES`, and its content policy forbids it to load anything
else. What a model wrote reaches the page only as escaped text: through `html.escape`, or as JSON that the page's script
puts into `textContent`.
"""

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.accuracy import KINDS
from lowmem_grpo.runs.records import COMPLETIONS, METRICS, REPORT, SUMMARY, json_object, read_lines
from lowmem_grpo.runs.trajectory import ENDINGS
from lowmem_grpo.units import count_text
from lowmem_grpo.views.accuracy import deciding, threshold
from lowmem_grpo.views.alarm_list import Warned, alarmed, alarms_section
from lowmem_grpo.views.chart import Chart, how_smoothed
from lowmem_grpo.views.charts import Record, figures, taught
from lowmem_grpo.views.headline import NOTHING, clipped, headline
from lowmem_grpo.views.page_file import page
from lowmem_grpo.views.palette import LINES, sign
from lowmem_grpo.views.svg import MOST_POINTS, drawing, hover_data
from lowmem_grpo.views.trajectories import CONTEXT_SIGN, SAMPLED_SIGN, shown_turns

MOST_BYTES = 500_000
ROOM_FOR_SAMPLES = 100_000  # bytes that the rest of the page leaves, if cutting its texts can do that
ALL_POINTS = 6000  # of all lines together
MAX_SAMPLES = 1500  # more would make the page slow to open
WHOLE_GROUP = 8  # completions of a step worth keeping together, before steps are left out
LONGEST = (4000, 1000, 200)  # characters of a text, the first that leaves room
COLUMNS = ("step", "prompt", "completion", "rewards", "reward", "advantage", "tokens", "finish_reason",
           "ending", "num_turns", "sampled_tokens", "sequences", "turns")
ANSWERS = """<div class="scroll card"><table><thead><tr id="head"></tr></thead><tbody id="rows"></tbody></table>
</div>"""
EPISODES = f"""<p class="quiet"><b class="sampled">{SAMPLED_SIGN} sampled</b> by the policy, which learns from it;
<b class="context">{CONTEXT_SIGN} context</b> from the prompt, tools and the environment, which it only reads</p>
<div id="rows" class="episodes"></div>"""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the folder of a run, which may still be going on, and return its path.

    Raises FileNotFoundError without a `metrics.jsonl`, and ValueError for a line in it that is not JSON.
    """
    rows = rows_of_run(run_dir)
    completions, summary = completions_of_run(run_dir), summary_of_run(run_dir)
    page = render(run_dir.resolve().name, rows, completions, summary)
    report, partial = run_dir / REPORT, run_dir / f"{REPORT}.partial"
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


def completions_of_run(run_dir: Path) -> list[Record]:
    """Every logged completion; none where the run logged none."""
    path = run_dir / COMPLETIONS
    return read_lines(path) if path.is_file() else []


def summary_of_run(run_dir: Path) -> Record:
    """summary.json; empty where there is none that can be read."""
    try:
        return json_object((run_dir / SUMMARY).read_bytes())
    except (OSError, ValueError):
        return {}


def render(name: str, rows: list[Record], completions: list[Record], summary: Record) -> str:
    """The whole page, as many samples in it as there is room for."""
    shown = content(name, rows, completions, summary)
    return page(shown.title, shown.body(), shown.data)


@dataclass(frozen=True)
class Content:
    """What a page shows of a run: its sections as HTML by their names, and the data that its script reads."""

    title: str
    sections: dict[str, str]
    data: Record
    note: str = ""
    """What is said above its curves."""

    def body(self) -> str:
        """Each section in an element of its name, which a page that follows a run replaces."""
        return "".join(f'<div id="{name}">{html}</div>' for name, html in self.sections.items())


@dataclass(frozen=True)
class LeftOut:
    """What is known of a run beside the rows and the samples that a page keeps of it."""

    judged: list[Record]
    """Samples whose rewards are drawn as the curve of the accuracy."""
    logged: int
    """How many completions the run has logged."""
    alarms: dict[str, Warned]
    note: str = ""
    state: str = ""
    """What is known now in place of the summary's status: running, killed or silent."""


def content(
    name: str, rows: list[Record], completions: list[Record], summary: Record, left_out: LeftOut | None = None
) -> Content:
    """What the report and the live page show. `left_out` says what of the run `rows` and `completions` lack."""
    lacks = left_out or LeftOut(completions, len(completions), alarmed(rows))
    charts, right = figures(rows, lacks.judged, summary), deciding(lacks.judged, summary)
    most = max(2, min(MOST_POINTS, ALL_POINTS // max(1, sum(len(chart.lines) for chart in charts))))
    sections = {"top": headline(name, rows, summary, missing(rows, completions, summary), lacks.state),
                "alarms": alarms_section(lacks.alarms), "curves": curves_section(charts, most, lacks.note)}
    played = any(sample.get("turns") for sample in completions)
    data = {"charts": [hover_data(chart, most) for chart in charts], "right": right if len(right) == 1 else [],
            "above": threshold(summary), "endings": ENDINGS if played else {}}
    for longest in LONGEST:
        sections["pairs"] = before_after_section(summary, longest)
        sections["samples"] = samples_section(len(completions), lacks.logged + 1, played)
        sections["settings"] = settings_section(summary.get("config") or {}, longest)
        found = Content(str(summary.get("recipe") or name), sections, data | {"samples": []})
        room = MOST_BYTES - size(page(found.title, found.body(), found.data))
        if room >= ROOM_FOR_SAMPLES:
            break
    samples = fitting(completions, room, longest)
    sections["samples"] = "" if taught(summary) and not completions else \
        samples_section(len(samples), lacks.logged, played)
    return Content(found.title, sections, data | {"samples": samples}, f"{lacks.note} {how_smoothed(charts)}")


def size(text: str) -> int:
    """Bytes of a text in a file."""
    return len(text.encode("utf-8", errors="replace"))


def missing(rows: list[Record], completions: list[Record], summary: Record) -> list[str]:
    """What the run left no trace of, in words."""
    lacks = [("curves, since no step was logged", not rows),
             ("samples, since no completion was logged", not completions and not taught(summary)),
             ("model, settings and status, since there is no summary.json that can be read", not summary)]
    return [words for words, absent in lacks if absent]


def fitting(completions: list[Record], room: int, longest: int) -> list[Record]:
    """Samples over all of the run that take at most `room` bytes."""
    limit = MAX_SAMPLES
    while limit > 0:
        kept = [shown(sample, longest) for sample in spread(completions, limit)]
        taken = size(json.dumps(kept, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))
        if taken <= room:
            return kept
        limit = min(len(kept) - 1, int(0.95 * len(kept) * room / taken))
    return []


def shown(sample: Record, longest: int) -> Record:
    """What the page shows of a completion."""
    found = {name: sample[name] for name in COLUMNS if name in sample}
    if found.get("turns"):
        found["turns"] = shown_turns(found["turns"], longest)
        found.pop("completion", None)  # the text of the last turn
    return found | {name: clipped(str(found[name]), longest) for name in ("prompt", "completion") if name in found}


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


def curves_section(charts: list[Chart], most: int, note: str = "") -> str:
    """The charts, each with its legend, below a note."""
    if not charts:
        return '<section><h2>Curves</h2><p class="card">No steps logged yet.</p></section>'
    drawn = "".join(figure(chart, most) for chart in charts)
    words = note_line(f"{note} {how_smoothed(charts)}")
    return f'<section><h2>Curves by step</h2>{words}<div class="charts">{drawn}</div></section>'


def note_line(words: str) -> str:
    """What is said above the curves."""
    return f'<p class="quiet" id="note">{escape(words.strip())}</p>'


def figure(chart: Chart, most: int) -> str:
    """One chart with its words."""
    named = len(chart.lines) > 1 or not chart.metrics  # where the title is not the name
    keys = "".join(f'<span class="key l{place % len(LINES)}{" level" * line.level}">{escape(line.name)}</span>'
                   for place, line in enumerate(chart.lines)) if named else ""
    words = f'<b>{escape(chart.title)}</b> <span class="quiet">{escape(chart.note)}</span>'
    return (f'<figure class="card"><figcaption>{words}<div class="keys">{keys}</div></figcaption>'
            f'{drawing(chart, most)}<output class="quiet"></output></figure>')


def before_after_section(summary: Record, longest: int) -> str:
    """What the model answered before and after training, side by side; what changed comes first."""
    samples = sorted(summary.get("samples") or [], key=lambda sample: KINDS.index(verdicts(sample)))
    if not samples:
        return ""
    cards = "".join(
        f'<article class="card"><pre>{text(sample, "prompt", longest)}</pre>'
        f'<p class="quiet">expected: <b>{text(sample, "answer", longest)}</b></p><div class="pair">'
        f'<div><h3>Before {verdict(sample.get("right_before"))}</h3><pre>{text(sample, "before", longest)}</pre></div>'
        f'<div><h3>After {verdict(sample.get("right_after"))}</h3><pre>{text(sample, "after", longest)}</pre></div>'
        '</div></article>' for sample in samples
    )
    return f'<section><h2>Before and after</h2>{counts(summary)}<div class="articles">{cards}</div></section>'


def verdicts(sample: Record) -> tuple[bool | None, bool | None]:
    """Whether the answers before and after are right; None where the run did not say."""
    before, after = sample.get("right_before"), sample.get("right_after")
    return (None, None) if before is None or after is None else (bool(before), bool(after))


def verdict(right: Any) -> str:
    """A verdict with its sign, in its colour."""
    if right is None:
        return ""
    name = "right" if right else "wrong"
    return f'<span class="{name}">{sign(right)} {name}</span>'


def counts(summary: Record) -> str:
    """How many problems changed, if the run counted them."""
    if not (change := summary.get("difference")):
        return ""
    better = count_text(change["better"], "problem")
    return (f'<p class="quiet">Wrong before and right after: {better}; the other way round: {change["worse"]:,}; as '
            f'before: {change["same"]:,}. Those that changed come first.</p>')


def text(sample: Record, key: str, longest: int) -> str:
    """A field as escaped text, a dash if it is missing."""
    value = sample.get(key)
    return NOTHING if value is None else escape(clipped(str(value), longest))


def samples_section(kept: int, logged: int, played: bool) -> str:
    """The controls of the sample browser and its empty table, or where episodes were `played` the empty list of them;
    the script fills it."""
    if not kept:
        why = "No completions logged yet." if not logged else f"None of {logged:,} completions fits into this page."
        return f'<section><h2>Samples over time</h2><p class="card">{why}</p></section>'
    capped = f"{logged:,} completions were logged; this page holds {kept:,} of them, spread evenly over the steps."
    note = f'<p class="quiet" id="capped">{capped if kept < logged else ""}</p>'
    return f"""<section><h2>Samples over time</h2>{note}
<div class="controls"><label>Step <input type="range" id="step" min="0" step="1"> <b id="at"></b></label>
<label><input type="checkbox" id="all"> all steps</label>
<input type="search" id="filter" size="32" placeholder="Text in prompt or completion" aria-label="Text filter">
<select id="order" aria-label="Order"><option value="0">As logged</option>
<option value="-1">Highest reward first</option><option value="1">Lowest reward first</option></select>
<span class="quiet" id="count"></span></div>
{EPISODES if played else ANSWERS}
<button id="more" type="button">Show more</button></section>"""


def settings_section(config: Record, longest: int) -> str:
    """The run's settings, folded away."""
    if not config:
        return ""
    rows = "".join(f"<tr><td>{escape(str(key))}</td><td><code>{escape(clipped(json.dumps(value), longest))}</code></td>"
                   "</tr>" for key, value in config.items())
    return f"<details><summary>Settings</summary><div class='scroll card'><table>{rows}</table></div></details>"
