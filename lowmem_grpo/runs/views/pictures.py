"""Pictures for a notebook: a run's curves, accuracies with intervals, answers side by side, memory bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.runs.accuracy import Answers, accuracy_interval, changed_first
from lowmem_grpo.runs.records import prompt_text
from lowmem_grpo.runs.views import report
from lowmem_grpo.runs.views.chart import LINES, MEMORY, RIGHT, WRONG, Chart, Line, how_smoothed, verdict_text
from lowmem_grpo.runs.views.charts import figures
from lowmem_grpo.utils import GIB

COLUMNS, ROW, NOTE = 2, 322, 40  # charts per row; pixels of a row, and of the note above
PHASES = ("train", "rollout")
TABLE = "border-collapse:collapse;display:block;overflow-x:auto"
CELL = "padding:6px 10px;border:1px solid #8888;vertical-align:top;text-align:left;white-space:pre-wrap"
GRID = "display:grid;grid-template-columns:max-content max-content minmax(0,1fr);gap:4px 12px;max-width:900px"
BAR = "position:relative;display:flex;height:20px;align-self:center"


@dataclass(frozen=True)
class Picture:
    """HTML that a notebook shows, as the last value of a cell or by `show()`; `print` shows its text."""

    title: str
    html: str
    text: str = ""

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text or f"a picture for a notebook: {self.title}"

    def show(self) -> None:
        """Show the picture in the current cell."""
        from IPython.display import display

        display(self)


def curves(run_dir: str | Path, *titles: str) -> Picture:
    """Draw the curves of a finished or running run: those with these titles, or all. FileNotFoundError without a
    metrics.jsonl; ValueError, which lists the known titles, for an unknown one."""
    folder = Path(run_dir)
    rows, samples = report.rows_of_run(folder), report.samples_of_run(folder)
    drawn = report.from_summary(lambda summary: figures(rows, samples, summary), report.summary_of_run(folder))
    charts = {chart.title: chart for chart in drawn}
    if unknown := [title for title in titles if title not in charts]:
        raise ValueError(f"the run in {run_dir} has no curve {unknown[0]!r}; it has {', '.join(charts) or 'none yet'}")
    return framed(folder.resolve().name, [charts[title] for title in titles or charts])


def line(values: Sequence[float], title: str, axis: str = "") -> Picture:
    """Draw values, such as one per step, as a curve over 1, 2, 3 ..."""
    points = [(place, float(value)) for place, value in enumerate(values, start=1)]
    return framed(title, [Chart(title, "", axis, {title: title}, lines=[Line(title, points)])])


def framed(title: str, charts: list[Chart]) -> Picture:
    """Return charts in a sandboxed iframe that runs only its own scripts and loads nothing."""
    drawn = [chart.to_dict(report.MOST_POINTS) for chart in charts]
    page = report.one_file({"title": title, "framed": True, "charts": drawn, "note": how_smoothed(charts)})
    height = NOTE + ROW * max(1, -(-len(charts) // COLUMNS))
    return Picture(title, f'<iframe sandbox="allow-scripts" srcdoc="{escape(page)}" title="{escape(title)}" '
                          f'style="width:100%;height:{height}px;border:0"></iframe>')


def accuracies(models: Mapping[str, Answers]) -> Picture:
    """Draw a bar for each model's accuracy, with its 95% interval; ValueError if `models` is empty."""
    if not models:
        raise ValueError("no answers were given; accuracies({'before': ..., 'after': ...}) takes at least one")
    rows = []
    for name, answers in models.items():
        share, (low, high) = accuracy_interval(answers.counts, len(answers.right[0]))
        interval = f"<i style='position:absolute;left:{low:.2%};width:{high - low:.2%};top:9px;height:2px;" \
                   "background:currentColor'></i>"
        words = f"{share:.0%} of {len(answers.right)} problems ({low:.0%} to {high:.0%})"
        rows.append(bar_row(name, words, part(share, LINES[0]) + interval))
    return grid("right answers, with 95% intervals", rows)


def memory_bars(plans: Mapping[str, MemoryPlan], phase: str = "train", title: str | None = None) -> Picture:
    """Draw a bar for each plan: the GiB of its components in the `phase` "train" or "rollout". ValueError for another
    phase, or if `plans` is empty."""
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}; allowed are {', '.join(PHASES)}")
    if not plans:
        raise ValueError("no plans were given; memory_bars({'name': plan}) takes at least one")
    sizes = {name: {row.name: size / GIB for row in plan.rows if (size := getattr(row, phase))}
             for name, plan in plans.items()}
    longest = max(sum(parts.values()) for parts in sizes.values())
    rows = [bar_row(name, f"{sum(parts.values()):.1f}", "".join(
        part(size / longest, MEMORY[component], f"{component}: {size:.2f} GiB") for component, size in parts.items()
    )) for name, parts in sizes.items()]
    legend = {component: MEMORY[component] for parts in sizes.values() for component in parts}
    return grid(title or "memory", rows, f"GiB on the card, {'training' if phase == 'train' else 'sampling'}", legend)


def bars(groups: Mapping[str, Mapping[str, float]], title: str, form: str = "{:,.4g}") -> Picture:
    """Draw a bar for each value of each group, labelled as in `form`. Values of the same name share a colour."""
    longest = max((value for values in groups.values() for value in values.values()), default=0.0)
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    colours = {name: LINES[place % len(LINES)] for place, name in enumerate(names)}
    rows = [bar_row(f"{group}, {name}", form.format(value), part(value / (longest or 1.0), colours[name]))
            for group, values in groups.items() for name, value in values.items()]
    return grid(title, rows, legend=colours)


def grid(title: str, rows: list[str], words: str = "", legend: Mapping[str, str] | None = None) -> Picture:
    keys = " &nbsp; ".join(f"<nobr><b style='color:{colour}'>\u25a0</b> {escape(name)}</nobr>"
                           for name, colour in (legend or {}).items())
    return Picture(title, f"<p><b>{escape(title)}</b> {escape(words)}</p><p>{keys}</p>"
                          f"<div style='{GRID}'>{''.join(rows)}</div>")


def bar_row(label: str, words: str, parts: str) -> str:
    return f"<span>{escape(label)}</span><span>{escape(words)}</span><div style='{BAR}'>{parts}</div>"


def part(share: float, colour: str, words: str = "") -> str:
    return f"<span style='width:{share:.2%};background:{colour}' title='{escape(words)}'></span>"


def samples(rows: list[dict[str, Any]], models: Mapping[str, Answers], shown: int = 4) -> Picture:
    """Return a table of each model's first answer to `shown` of the prompts in `rows`, chosen by `changed_first`."""
    body, lines = "", []
    first, *_, last = [*models.values()] * 2
    pairs = [(old[0], new[0]) for old, new in zip(first.right, last.right, strict=True)][: len(rows)]
    for index in changed_first(pairs, shown) if len(models) > 1 else range(min(shown, len(rows))):
        row = rows[index]
        prompt = prompt_text(row["prompt"]) + ("" if row.get("answer") is None else f"\n\nexpected: {row['answer']}")
        answers = {name: (each.texts[index][0], each.right[index][0]) for name, each in models.items()}
        body += f"<tr>{cell(prompt)}{''.join(judged(*answer) for answer in answers.values())}</tr>"
        lines += [prompt, *(f"  {name}, {verdict_text(right)}: {' | '.join(text.split(chr(10)))}"
                            for name, (text, right) in answers.items())]
    head = "".join(f"<th style='{CELL}'>{escape(name)}</th>" for name in ("prompt", *models))
    return Picture("answers", f"<table style='{TABLE}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
                   "\n".join(lines))


def judged(text: str, right: bool) -> str:
    colour = RIGHT if right else WRONG
    return f"<td style='{CELL}'><b style='color:{colour}'>{verdict_text(right)}</b>\n{escape(text)}</td>"


def cell(text: str) -> str:
    return f"<td style='{CELL}'>{escape(text)}</td>"
