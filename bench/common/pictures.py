"""Draw the pictures in docs/: SVG by matplotlib, in which text stays text, and the same file from the same rows.

matplotlib is one of the dev extras: it is imported when a picture is drawn, so a machine that only measures needs none.
"""

from pathlib import Path
from typing import Any

from lowmem_grpo.runs.views.chart import INK, LINES, PALE

STYLE = {
    "svg.hashsalt": "bench", "svg.fonttype": "none", "font.family": ["system-ui", "DejaVu Sans", "sans-serif"],
    "font.size": 10, "text.color": INK, "axes.edgecolor": PALE, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.prop_cycle": f"cycler(linestyle=['-', '--']) * cycler(color={LINES!r})",
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11,
}


def panels(columns: int, width: float, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """Return (figure, its axes side by side); `width` and `height` are in inches."""
    import logging

    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # system-ui is a browser's font, not a file
    matplotlib.rcParams.update(STYLE)
    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)
    return figure, list(axes[0])


def save(figure: Any, path: Path) -> None:
    """Write the figure without the date, so that the same rows give the same file, and close it."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
