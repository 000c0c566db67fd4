"""A page about a run as one file that opens offline: its styles and scripts are in it."""

import json
from html import escape
from importlib.resources import files
from typing import Any

from lowmem_grpo.views.palette import LINES, css

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page(title: str, body: str, data: dict[str, Any]) -> str:
    """The HTML file with this body; its script reads `data`."""
    assets = files("lowmem_grpo") / "assets"
    held = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>
<style>{style()}{(assets / "uplot" / "uPlot.min.css").read_text("utf-8")}</style></head>
<body><main>{body}</main>
<script type="application/json" id="data">{held}</script>
<script>{drawing_script()}{(assets / "page" / "run.js").read_text("utf-8")}</script></body></html>
"""


def drawing_script() -> str:
    """uPlot with its licence in place of its first line, which names an address."""
    folder = files("lowmem_grpo") / "assets" / "uplot"
    script = (folder / "uPlot.min.js").read_text(encoding="utf-8").partition("\n")[2]
    return f"/*! uPlot\n{(folder / 'LICENSE').read_text(encoding='utf-8')}*/\n{script}\n"


def style() -> str:
    """The style sheet of the pages about runs."""
    return css() + line_rules() + (files("lowmem_grpo") / "assets" / "page" / "run.css").read_text("utf-8")


def line_rules() -> str:
    """The style of the lines of a chart, each in its colour."""
    return "".join(f".l{place}{{--own:var(--line{place})}}" for place in range(len(LINES))) + "\n"
