"""What a report draws: metrics over the steps of a run, as plotly traces."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from lowmem_grpo.units import GIB

Record = dict[str, Any]

MARKERS_BELOW = 30  # a line with fewer points marks each of them
BAND = "rgba(59, 130, 196, 0.16)"


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
          format=".1~%", from_zero=True),
    Chart("Entropy", "nats per token", {"entropy": "entropy"}),
    Chart("KL divergence", "policy from reference model, nats per token", {"kl": "KL"}),
    Chart("Clip ratio", "share of tokens whose gradient was clipped away",
          {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "clip_ratio/region_mean": "either"},
          from_zero=True),
    Chart("Where the time goes", "share of each step",
          {"time/generate": "generate", "time/reward": "reward", "time/train": "train", "time/idle": "idle"},
          format=".0%", stacked=True),
    Chart("Seconds of a step", "and the estimate from the card's data sheet, if there is one",
          {"step_time": "measured", "time/planned_step_s": "estimated"}, from_zero=True),
    Chart("Tokens per second", "completion tokens, while generating", {"tokens_per_second": "tokens/s"},
          from_zero=True),
    Chart("Peak memory", "GiB", {"memory/peak_bytes": "peak"}, scale=1 / GIB),
    Chart("Loss", "not a measure of progress; watch the reward", {"loss": "loss"}),
    Chart("Gradient norm", "", {"grad_norm": "norm"}),
    Chart("Learning rate", "", {"learning_rate": "rate"}, format="~e"),
)


def figures(rows: list[Record]) -> list[Record]:
    """The charts that have data: their words, and their plotly traces."""
    names = sorted({match[1] for row in rows for key in row if (match := re.fullmatch(r"rewards/(.+)/mean", key))})
    functions = Chart("Reward functions", "mean of each", {f"rewards/{name}/mean": name for name in names})
    verifiers = sorted({key.removeprefix("verdicts/") for row in rows for key in row if key.startswith("verdicts/")})
    verdicts = Chart("Verified right", "share of completions, whatever that pays",
                     {f"verdicts/{name}": name for name in verifiers}, format=".0%", from_zero=True)
    drawn = [(Chart("Reward", "mean ± one standard deviation", {}), reward_traces(rows))]
    drawn += [(chart, [line(rows, key, name, chart) for key, name in chart.lines.items() if points(rows, key)])
              for chart in (functions, verdicts, *CHARTS)]
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
