"""Pictures for a notebook: a run's curves, accuracies with their intervals, answers side by side, the memory bar.

Figures are plotly's: `.show()` draws them, in Colab and Kaggle too. What a model wrote reaches a page only as escaped
text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from plotly.graph_objects import Bar, Figure
from plotly.subplots import make_subplots

from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.runs.accuracy import Answers, accuracy_interval
from lowmem_grpo.runs.records import prompt_text
from lowmem_grpo.units import GIB
from lowmem_grpo.views.charts import figures
from lowmem_grpo.views.report import rows_of_run

COLUMNS = 2  # of charts beside each other
CHART_HEIGHT, BAR_HEIGHT, LEGEND_LINE = 220, 46, 20  # pixels
CHART_GAP, FRAME = 100, 110  # pixels between charts, and of a figure's title and axis
COLOURS = {  # the model in blue, LoRA in green, what depends on tokens in warm colours, the driver in grey
    "weights": "#2f5d9b", "embedding": "#6f9bd1", "head": "#a9c6e8", "adapters": "#2e8b57", "gradients": "#6cbf8b",
    "optimizer": "#b5dfc0", "KV cache": "#e0803a", "engine workspace": "#c98bbf", "layer inputs": "#c0504d",
    "layer recompute": "#e0803a", "MLP tile": "#f0b67f", "U and hidden states": "#f6d55c", "logits chunk": "#d9a441",
    "attention workspace": "#8f6bb3", "adapter copy": "#1f6b43", "sampling weights": "#4a3f9b",
    "CUDA context": "#8a8f98", "reserve": "#c4c8ce",
}
PHASES = ("train", "rollout")
RIGHT, WRONG = "#2e8b57", "#c0504d"
CELL = "padding:6px 10px;border:1px solid #8888;vertical-align:top;text-align:left;white-space:pre-wrap"


def curves(run_dir: str | Path, *titles: str) -> Figure:
    """The curves of a run's report over its steps: those with these titles, or all of them.

    It also works while the run goes on. FileNotFoundError if the folder holds no metrics.jsonl; ValueError for an
    unknown title, with the titles that this run has.
    """
    found = {chart["title"]: chart for chart in figures(rows_of_run(Path(run_dir)))}
    if unknown := [title for title in titles if title not in found]:
        raise ValueError(f"the run in {run_dir} has no curve {unknown[0]!r}; it has {', '.join(found) or 'none yet'}")
    return drawn([found[title] for title in titles or found])


def drawn(charts: list[dict[str, Any]]) -> Figure:
    """The charts of `charts.figures`, two in a row, each with what its lines mean in its title."""
    rows, columns = max(1, math.ceil(len(charts) / COLUMNS)), min(COLUMNS, max(1, len(charts)))
    height = CHART_HEIGHT * rows + CHART_GAP * (rows - 1)
    figure = make_subplots(
        rows, columns, subplot_titles=[heading(chart) for chart in charts], vertical_spacing=CHART_GAP / height,
    )
    for place, chart in enumerate(charts):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        several = len([trace for trace in chart["traces"] if trace.get("showlegend", True)]) > 1
        for trace in chart["traces"]:
            grouped = {"legendgroup": chart["title"], "legendgrouptitle_text": chart["title"]} if several else {}
            figure.add_trace({"showlegend": several, **trace, **grouped}, **at)
        figure.update_yaxes(tickformat=chart["format"], rangemode="tozero" if chart["from_zero"] else "normal", **at)
        figure.update_xaxes(title_text="step", title_standoff=4, **at)
    return figure.update_layout(height=FRAME + height, margin={"t": 60, "b": 50, "l": 50, "r": 20})


def heading(chart: dict[str, Any]) -> str:
    """A chart's title, and its note in small letters."""
    note = f"<br><sup>{escape(chart['note'])}</sup>" if chart["note"] else ""
    return f"{escape(chart['title'])}{note}"


def accuracies(found: Mapping[str, Answers]) -> Figure:
    """A bar for each model's share of right answers, with its 95% interval; ValueError without any model."""
    if not found:
        raise ValueError("no answers were given; accuracies({'before': ..., 'after': ...}) takes at least one")
    measured = [accuracy_interval(answers.counts, len(answers.right[0])) for answers in found.values()]
    shares = [share for share, _ in measured]
    errors = {"type": "data", "array": [max(0.0, high - share) for share, (_, high) in measured],
              "arrayminus": [max(0.0, share - low) for share, (low, _) in measured]}
    bar = Bar(x=list(found), y=shares, error_y=errors, text=[f"{share:.0%}" for share in shares],
              textposition="inside", insidetextanchor="start")
    return Figure(bar).update_layout(
        title="right answers, with 95% intervals", height=320, width=420, yaxis={"range": [0, 1], "tickformat": ".0%"},
        margin={"t": 50, "b": 30},
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
                         marker_color=COLOURS.get(part), hovertemplate="%{x:.2f} GiB") for part in parts])
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
        return f"<table style='border-collapse:collapse'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        lines = []
        for prompt, answers in self.rows:
            lines.append(prompt)
            for name, (text, right) in zip(self.names, answers, strict=True):
                lines.append(f"  {name}, {'right' if right else 'wrong'}: {' | '.join(text.split(chr(10)))}")
        return "\n".join(lines)


def samples(rows: list[dict[str, Any]], found: Mapping[str, Answers], shown: int = 4) -> SampleTable:
    """The first answers of each model to the first `shown` prompts; `rows` are those that they answered."""
    table = []
    for index, row in enumerate(rows[:shown]):
        label = "" if row.get("answer") is None else f"\n\nexpected: {row['answer']}"
        answers = [(answers.texts[index][0], answers.right[index][0]) for answers in found.values()]
        table.append((prompt_text(row["prompt"]) + label, answers))
    return SampleTable(tuple(found), table)


def judged(text: str, right: bool) -> str:
    """An answer's cell: the verdict in its colour, and what was written."""
    colour, word = (RIGHT, "right") if right else (WRONG, "wrong")
    return f"<td style='{CELL}'><b style='color:{colour}'>{word}</b>\n{escape(text)}</td>"


def cell(text: str) -> str:
    return f"<td style='{CELL}'>{escape(text)}</td>"
