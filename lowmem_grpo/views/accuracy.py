"""Accuracy as a report tells it: of held-out problems before and after training, and of what was sampled in between."""

from dataclasses import dataclass
from statistics import fmean

from lowmem_grpo.runs.accuracy import wilson_interval
from lowmem_grpo.views.chart import Chart, Line
from lowmem_grpo.views.samples import Record


@dataclass(frozen=True)
class Measured:
    """A share of right answers to held-out problems, and its 95% interval if the number of problems is known."""

    step: int
    share: float
    interval: tuple[float, float] | None


def measured(summary: Record, key: str, step: int) -> Measured | None:
    """Return the accuracy under `key` of a summary; None where it was not measured."""
    if (share := summary.get(key)) is None:
        return None
    problems = summary.get("eval_problems")
    return Measured(step, share, wilson_interval(share, problems) if problems else None)


def before_and_after(summary: Record) -> tuple[Measured | None, Measured | None]:
    return measured(summary, "accuracy_before", 0), measured(summary, "accuracy_after", summary.get("steps") or 0)


def accuracy_chart(completions: list[Record], summary: Record) -> Chart:
    """Return the share of right answers in training, and of held-out problems before and after it. Right is what the
    function that the summary names pays more than `right_above` for; unnamed, each function of 0 and 1 alone has a
    line."""
    sampled = [line for line in completions if "replayed_from" not in line]
    lines = [Line(f"sampled in training ({name})", shares(sampled, name, threshold(summary)))
             for name in deciding(sampled, summary)]
    tests = [test for test in before_and_after(summary) if test is not None]
    dots = Line("held-out problems, with 95% interval", [(test.step, test.share) for test in tests],
                [test.interval for test in tests if test.interval is not None], dots=True)
    drawn = [line for line in (*lines, dots) if line.points]
    return Chart("Accuracy", "answers that are right", "share of answers", share=True,
                 lines=[*drawn, *levels(summary, drawn)])


def levels(summary: Record, lines: list[Line]) -> list[Line]:
    """Return the baselines at all steps of these lines, such as the shares that random and perfect play get right."""
    steps = sorted({step for line in lines for step, _ in line.points})
    return [Line(f"baseline {name}, {share:.1%}", [(step, share) for step in steps], level=True)
            for name, share in baselines(summary).items() if steps]


def baselines(summary: Record) -> dict[str, float]:
    """Return what others get right, by name: `baselines` of the summary, each a share or a record with a `share`."""
    held = summary.get("baselines")
    shares = {str(name): value.get("share") if isinstance(value, dict) else value
              for name, value in (held.items() if isinstance(held, dict) else ())}
    return {name: float(share) for name, share in shares.items() if isinstance(share, (int, float))}


def deciding(completions: list[Record], summary: Record) -> list[str]:
    paid: dict[str, set[float]] = {}
    for line in completions:
        for name, value in (line.get("rewards") or {}).items():
            paid.setdefault(name, set()).update(() if value is None else (value,))
    if summary.get("right") in paid:
        return [summary["right"]]
    return [name for name, values in paid.items() if values and values <= {0, 1}]


def threshold(summary: Record) -> float:
    """Return what a right answer earns more than: half a point for a draw may be no win."""
    return float(summary.get("right_above") or 0.0)


def shares(completions: list[Record], name: str, above: float) -> list[tuple[int, float]]:
    """Return (step, share) of the judged completions that a function pays more than `above` for."""
    steps: dict[int, list[bool]] = {}
    for line in completions:
        if (value := (line.get("rewards") or {}).get(name)) is not None:
            steps.setdefault(line["step"], []).append(value > above)
    return [(step, fmean(right)) for step, right in sorted(steps.items())]
