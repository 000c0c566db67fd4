"""Pictures for a notebook: a run's curves, accuracies with their intervals, answers side by side, the memory bar.

Figures are plotly's: `.show()` draws them, in Colab and Kaggle too. What a model wrote reaches a page only as escaped
text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from plotly.graph_objects import Bar, Figure
from plotly.subplots import make_subplots

from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.runs.accuracy import Answers, accuracy_interval, changed_first
from lowmem_grpo.runs.records import prompt_text
from lowmem_grpo.units import GIB
from lowmem_grpo.views.chart import Chart, Line, smoothed, widest_window
from lowmem_grpo.views.charts import figures
from lowmem_grpo.views.palette import LINES, MEMORY, RIGHT, WRONG, sign
from lowmem_grpo.views.report import completions_of_run, rows_of_run, summary_of_run
from lowmem_grpo.views.svg import MARKED

COLUMNS = 2  # of charts beside each other
CHART_HEIGHT, BAR_HEIGHT, LEGEND_LINE = 220, 46, 20  # pixels
CHART_GAP, FRAME = 100, 110  # pixels between charts, and of a figure's title and axis
PHASES = ("train", "rollout")
TABLE = "border-collapse:collapse;display:block;overflow-x:auto"
CELL = "padding:6px 10px;border:1px solid #8888;vertical-align:top;text-align:left;white-space:pre-wrap"


def curves(run_dir: str | Path, *titles: str) -> Figure:
    """The curves of a run's report over its steps: those with these titles, or all of them.

    It also works while the run goes on. FileNotFoundError if the folder holds no metrics.jsonl; ValueError for an
    unknown title, with the titles that this run has.
    """
    folder = Path(run_dir)
    charts = figures(rows_of_run(folder), completions_of_run(folder), summary_of_run(folder))
    found = {chart.title: chart for chart in charts}
    if unknown := [title for title in titles if title not in found]:
        raise ValueError(f"the run in {run_dir} has no curve {unknown[0]!r}; it has {', '.join(found) or 'none yet'}")
    return drawn([found[title] for title in titles or found])


def drawn(charts: list[Chart]) -> Figure:
    """The charts, two in a row, each with what its lines mean in its title."""
    rows, columns = max(1, math.ceil(len(charts) / COLUMNS)), min(COLUMNS, max(1, len(charts)))
    height = CHART_HEIGHT * rows + CHART_GAP * (rows - 1)
    figure = make_subplots(
        rows, columns, subplot_titles=[heading(chart) for chart in charts], vertical_spacing=CHART_GAP / height,
        horizontal_spacing=0.14,
    )
    for place, chart in enumerate(charts):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        for trace in traces(chart):
            figure.add_trace(trace, **at)
        _, values = chart.axes()
        ticks = {"tickvals": [value for value, _ in values.ticks], "ticktext": [label for _, label in values.ticks]}
        figure.update_yaxes(title_text=chart.axis, range=[values.low, values.high], **ticks, **at)
        wide = widest_window([chart])
        bold = f" (bold: mean of {wide} steps)" if wide > 1 else ""
        figure.update_xaxes(title_text=f"step{bold}", title_standoff=4, **at)
    return figure.update_layout(height=FRAME + height, margin={"t": 60, "b": 50, "l": 60, "r": 20})


def traces(chart: Chart) -> list[dict[str, Any]]:
    """A chart's lines for plotly, each in its colour: its band, then faint what was logged, then bold."""
    found: list[dict[str, Any]] = []
    for place, line in enumerate(chart.lines):
        colour, bold = LINES[place % len(LINES)], smoothed(chart, line)
        words = {"legendgroup": chart.title, "legendgrouptitle_text": chart.title} if len(chart.lines) > 1 else {}
        found += band(bold, colour)
        if bold is not line:
            found.append({**trace(line, colour, 1), "opacity": 0.35, "showlegend": False, "hoverinfo": "skip"})
        shown = trace(bold, colour, 0 if chart.stacked else 2) | {"showlegend": len(chart.lines) > 1} | words
        found.append(shown | ({"stackgroup": "shares"} if chart.stacked else {}))
    return found


def trace(line: Line, colour: str, width: float) -> dict[str, Any]:
    """One line in this colour, with a mark at each point where they are few."""
    mode = "markers" if line.dots else "lines+markers" if len(line.points) < MARKED and not line.level else "lines"
    around = {"error_y": errors([value for _, value in line.points], line.edges)} if line.dots and line.edges else {}
    return {"type": "scatter", "name": line.name, "mode": mode,
            "line": {"width": width, "color": colour, **({"dash": "dash"} if line.level else {})},
            "marker": {"color": colour}, "x": [step for step, _ in line.points],
            "y": [value for _, value in line.points], **around}


def band(line: Line, colour: str) -> list[dict[str, Any]]:
    """What lies between the edges of a curve."""
    if line.dots or not line.edges:
        return []
    edge = {"type": "scatter", "x": [step for step, _ in line.points], "mode": "lines", "line": {"width": 0},
            "hoverinfo": "skip", "showlegend": False}
    lower, upper = ({**edge, "y": [pair[side] for pair in line.edges]} for side in (0, 1))
    return [lower, {**upper, "fill": "tonexty", "fillcolor": f"{colour}29"}]  # 16% of the colour


def errors(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Intervals around values, as plotly wants them."""
    return {"type": "data",
            "array": [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)],
            "arrayminus": [max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)]}


def heading(chart: Chart) -> str:
    """A chart's title, and its note in small letters."""
    note = f"<br><sup>{escape(chart.note)}</sup>" if chart.note else ""
    return f"{escape(chart.title)}{note}"


def accuracies(found: Mapping[str, Answers]) -> Figure:
    """A bar for each model's share of right answers, with its 95% interval; ValueError without any model."""
    if not found:
        raise ValueError("no answers were given; accuracies({'before': ..., 'after': ...}) takes at least one")
    measured = [accuracy_interval(answers.counts, len(answers.right[0])) for answers in found.values()]
    shares = [share for share, _ in measured]
    counts = [len(answers.right) for answers in found.values()]
    bar = Bar(x=list(found), y=shares, error_y=errors(shares, [interval for _, interval in measured]),
              text=[f"{share:.0%}" for share in shares], textposition="inside", insidetextanchor="start",
              marker_color=list(LINES[: len(found)]))
    return Figure(bar).update_layout(
        title="right answers, with 95% intervals", height=340, width=420, margin={"t": 50, "b": 50},
        xaxis_title=f"n = {' and '.join(map(str, dict.fromkeys(counts)))} problems",
        yaxis={"range": [0, 1], "tickformat": ".0%", "title": "share of answers"},
    )


def memory_bars(plans: Mapping[str, MemoryPlan], phase: str = "train", title: str | None = None) -> Figure:
    """A bar for each plan, its components stacked, in GiB; `phase` is "train" or "rollout".

    ValueError for another phase, or without a plan.
    """
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}; allowed are {', '.join(PHASES)}")
    if not plans:
        raise ValueError("no plans were given; memory_bars({'name': plan}) takes at least one")
    sizes = {name: {row.name: getattr(row, phase) / GIB for row in plan.rows} for name, plan in plans.items()}
    parts = [part for part in dict.fromkeys(part for held in sizes.values() for part in held)
             if any(held.get(part) for held in sizes.values())]
    figure = Figure([Bar(name=part, orientation="h", y=list(sizes), x=[held.get(part, 0.0) for held in sizes.values()],
                         marker_color=MEMORY.get(part), hovertemplate="%{x:.2f} GiB") for part in parts])
    for name, held in sizes.items():
        figure.add_annotation(x=sum(held.values()), y=name, text=f"{sum(held.values()):.1f}", showarrow=False,
                              xanchor="left", xshift=4)
    return figure.update_layout(
        barmode="stack", height=FRAME + max(BAR_HEIGHT * len(plans), LEGEND_LINE * len(parts)), title=title,
        xaxis_title=f"GiB on the card, {'training' if phase == 'train' else 'sampling'}", yaxis_autorange="reversed",
        yaxis_automargin=True, legend_traceorder="normal", margin={"t": 60, "b": 50},
    )


@dataclass(frozen=True)
class SampleTable:
    """Answers to the same prompts side by side; a notebook shows it as a table, `print` as text."""

    names: tuple[str, ...]
    rows: list[tuple[str, list[tuple[str, bool]]]]  # prompt, and (text, right) by each model

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='{CELL}'>{escape(name)}</th>" for name in ("prompt", *self.names))
        body = "".join(f"<tr>{cell(prompt)}{''.join(judged(*answer) for answer in answers)}</tr>"
                       for prompt, answers in self.rows)
        return f"<table style='{TABLE}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        lines = []
        for prompt, answers in self.rows:
            lines.append(prompt)
            for name, (text, right) in zip(self.names, answers, strict=True):
                word = "right" if right else "wrong"
                lines.append(f"  {name}, {sign(right)} {word}: {' | '.join(text.split(chr(10)))}")
        return "\n".join(lines)


def samples(rows: list[dict[str, Any]], found: Mapping[str, Answers], shown: int = 4) -> SampleTable:
    """The first answers of each model to `shown` prompts, those first whose answer changed between wrong and right from
    the first model to the last; `rows` are those that they answered."""
    table = []
    first, *_, last = [*found.values()] * 2
    pairs = [(old[0], new[0]) for old, new in zip(first.right, last.right, strict=True)][: len(rows)]
    for index in changed_first(pairs, shown) if len(found) > 1 else range(min(shown, len(rows))):
        row = rows[index]
        label = "" if row.get("answer") is None else f"\n\nexpected: {row['answer']}"
        answers = [(answers.texts[index][0], answers.right[index][0]) for answers in found.values()]
        table.append((prompt_text(row["prompt"]) + label, answers))
    return SampleTable(tuple(found), table)


def judged(text: str, right: bool) -> str:
    """An answer's cell: the verdict in its colour, and what was written."""
    colour, word = (RIGHT, "right") if right else (WRONG, "wrong")
    return f"<td style='{CELL}'><b style='color:{colour}'>{sign(right)} {word}</b>\n{escape(text)}</td>"


def cell(text: str) -> str:
    return f"<td style='{CELL}'>{escape(text)}</td>"
