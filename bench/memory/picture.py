"""Stacked bars of a case's stages, as SVG."""

from typing import Any
from xml.sax.saxutils import escape

GIB = 2**30
PARTS = {  # of a row: its words and its colour
    "engine_bytes": ("the engine's own weights", "#8a8f98"), "weights_bytes": ("weights", "#3b82c4"),
    "adapters_bytes": ("adapters", "#6fb1e0"), "gradients_bytes": ("gradients", "#5fb49c"),
    "optimizer_bytes": ("optimizer", "#e0b03a"), "activations_bytes": ("activations", "#e0803a"),
}
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 860, 150, 150, 22, 10, 58
INK, PAPER, FONT = "#24292f", "#ffffff", "font-family='system-ui, sans-serif'"
LINEAR_UP_TO = 24 * GIB  # what a bar's full length means; longer ones are cut, and say so


def svg(cases: dict[Any, list[dict[str, Any]]]) -> str:
    """A picture of the first case whose rows are all there."""
    rows = next(found for found in cases.values() if all("device_bytes" in row for row in found))
    height = TOP + len(rows) * (BAR + GAP) + 46
    first = rows[0]
    title = f"{first['shape']}, {first['context']:,} tokens x {first['generations']}: peak of a training step, GiB"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'>",
        f"<rect width='{WIDTH}' height='{height}' fill='{PAPER}'/>",
        text(16, 24, title, size=15, weight="bold"), *legend(),
    ]
    for number, row in enumerate(rows):
        lines += bar(row, TOP + number * (BAR + GAP))
    note = "weighed on fake tensors: the real step without memory or arithmetic" if first["device"] == "fake" \
        else f"measured on {first.get('gpu')}"
    return "\n".join([*lines, text(16, height - 16, note, size=11), "</svg>"]) + "\n"


def bar(row: dict[str, Any], top: int) -> list[str]:
    """One stage: its parts side by side up to the full length, and its peaks in words."""
    scale = (WIDTH - LEFT - RIGHT) / LINEAR_UP_TO
    lines, left, end = [text(LEFT - 10, top + 15, row["stage"], anchor="end")], float(LEFT), WIDTH - RIGHT
    for name, (words, colour) in PARTS.items():
        width = min(row[name] * scale, end - left)
        if width > 0:
            lines.append(f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='{BAR}' fill='{colour}'>"
                         f"<title>{escape(words)}: {row[name] / GIB:.2f} GiB</title></rect>")
            left += width
    if row["device_bytes"] > LINEAR_UP_TO:
        lines.append(f"<path d='M{end - 26} {top - 2} l8 {BAR + 4} h5 l-8 -{BAR + 4} z' fill='{PAPER}'/>")
    host = f" + {row['host_bytes'] / GIB:.1f} host" if row["host_bytes"] else ""
    return [*lines, text(min(left, end) + 8, top + 15, f"{row['device_bytes'] / GIB:.1f}{host}")]


def legend() -> list[str]:
    """The colours and their words."""
    lines, left = [], 16
    for words, colour in PARTS.values():
        lines += [f"<rect x='{left}' y='35' width='11' height='11' fill='{colour}'/>", text(left + 16, 45, words, 12)]
        left += 34 + 7 * len(words)
    return lines


def text(left: float, top: float, words: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    return (f"<text x='{left:.0f}' y='{top:.0f}' {FONT} font-size='{size}' font-weight='{weight}' fill='{INK}' "
            f"text-anchor='{anchor}'>{escape(words)}</text>")
