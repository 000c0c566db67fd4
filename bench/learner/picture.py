"""Reward curves of bench/learner/bench.py, as SVG."""

from typing import Any

from bench.memory.picture import PAPER, text

WIDTH, PANEL, LEFT, TOP, HEIGHT, FOOT = 860, 390, 46, 64, 210, 92
LINE, PALE = "#3b82c4", "#d0d7de"
SMOOTH = 2  # steps to either side that a point is the mean of


def svg(rows: list[dict[str, Any]]) -> str:
    """A panel for each row: mean reward step by step, and accuracy before and after in words."""
    height = TOP + HEIGHT + FOOT
    first = rows[0]
    where = first["gpu"] if first["device"] == "cuda" else first["cpu"]
    title = f"{first['parameters'] / 1e6:.1f} M parameters, NF4, {first['engine']}, {where}"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='{PAPER}'/>", text(16, 24, title, size=15, weight="bold"),
    ]
    for number, row in enumerate(rows):
        lines += panel(row, LEFT + number * (PANEL + 20))
    return "\n".join([*lines, "</svg>"]) + "\n"


def panel(row: dict[str, Any], left: int) -> list[str]:
    """One recipe: axes, the rewards as they were, and smoothed."""
    top, rewards, width = TOP, row["rewards"], PANEL - 40
    highest = max(1.0, *rewards)
    lines = [text(left, top - 12, f"{row['recipe']}: mean reward of {len(rewards)} steps", size=13)]
    for share in (0.0, 0.5, 1.0):
        level = top + HEIGHT * (1 - share)
        lines += [f"<line x1='{left}' x2='{left + width}' y1='{level:.1f}' y2='{level:.1f}' stroke='{PALE}'/>",
                  text(left - 6, level + 4, f"{share * highest:.1f}", size=11, anchor="end")]
    lines += [path(rewards, left, width, highest, PALE, 1.5), path(smooth(rewards), left, width, highest, LINE, 2.2)]
    said = f"held out: {row['accuracy_before']:.1%} before, {row['accuracy_after']:.1%} after"
    return [*lines, text(left, top + HEIGHT + 22, said, size=12),
            text(left, top + HEIGHT + 40, f"{row['train_seconds']:.0f} s of training", size=12)]


def path(values: list[float], left: int, width: int, highest: float, colour: str, stroke: float) -> str:
    """A line through the values, the first at the left edge and the last at the right one."""
    step = width / max(1, len(values) - 1)
    points = " ".join(f"{left + place * step:.1f},{TOP + HEIGHT * (1 - max(0.0, value) / highest):.1f}"
                      for place, value in enumerate(values))
    return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='{stroke}'/>"


def smooth(values: list[float]) -> list[float]:
    """Each value's mean with its neighbours."""
    windows = [values[max(0, place - SMOOTH) : place + SMOOTH + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]
