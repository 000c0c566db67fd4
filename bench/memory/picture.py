"""Draw the peaks of a training step: a bar for each stage, stacked by what the memory is used for."""

from pathlib import Path
from typing import Any

from bench.common.pictures import panels, save
from lowmem_grpo.runs.views.chart import MEMORY
from lowmem_grpo.utils import GIB

PARTS = {  # field of a row: its label and its colour
    "engine_bytes": ("the engine's own weights", MEMORY["sampling weights"]),
    "weights_bytes": ("weights", MEMORY["weights"]), "adapters_bytes": ("adapters", MEMORY["adapters"]),
    "gradients_bytes": ("gradients", MEMORY["gradients"]), "optimizer_bytes": ("optimizer", MEMORY["optimizer"]),
    "activations_bytes": ("activations", MEMORY["layer inputs"]),
}
LONGEST = 24  # GiB of the longest bar; a longer one is cut and marked


def draw(cases: dict[Any, list[dict[str, Any]]], path: Path) -> None:
    """Draw the first case whose rows all have bytes."""
    rows = next(found for found in cases.values() if all("device_bytes" in row for row in found))
    figure, (axis,) = panels(1, 9, 0.9 + 0.34 * len(rows))
    for place, row in enumerate(rows):
        bar(axis, place, row)
    axis.set_yticks(range(len(rows)), [row["stage"] for row in rows])
    axis.set_xlim(0, LONGEST + 4)
    axis.invert_yaxis()
    axis.tick_params(length=0)
    axis.set_xticks([])
    axis.spines[["bottom", "left"]].set_visible(False)
    first = rows[0]
    title = f"{first['shape']}, {first['context']:,} tokens x {first['generations']}: peak of a training step, GiB"
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    axis.legend(handles=[patch(*part) for part in PARTS.values()], ncols=len(PARTS), loc="lower left",
                bbox_to_anchor=(-0.14, 1.0), frameon=False, fontsize=9, handlelength=1, columnspacing=1.2)
    note = "weighed on fake tensors: the real step without memory or arithmetic" if first["device"] == "fake" \
        else f"measured on {first.get('gpu')}"
    figure.supxlabel(note, fontsize=9, x=0.01, ha="left")
    save(figure, path)


def bar(axis: Any, place: int, row: dict[str, Any]) -> None:
    """Draw one stage: its parts side by side up to the full length, and its peaks as text."""
    left = 0.0
    for name, (_, colour) in PARTS.items():
        width = min(row[name] / GIB, LONGEST - left)
        axis.barh(place, width, 0.7, left, color=colour, linewidth=0)
        left += width
    if row["device_bytes"] > LONGEST * GIB:  # a gap in the bar
        x = LONGEST - 1
        axis.fill([x, x + 0.25, x + 0.45, x + 0.2], [place + 0.4, place - 0.4, place - 0.4, place + 0.4], "white")
    host = f" + {row['host_bytes'] / GIB:.1f} host" if row["host_bytes"] else ""
    axis.text(left + 0.25, place, f"{row['device_bytes'] / GIB:.1f}{host}", va="center")


def patch(words: str, colour: str) -> Any:
    """Return a part's entry in the legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=words)
