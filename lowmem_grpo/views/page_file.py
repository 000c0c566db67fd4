"""The HTML around what a page shows: its script draws all of it from one JSON value, and text stays text."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from lowmem_grpo.views.palette import LINES, css
from lowmem_grpo.views.samples import json_text

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
HEAD = """<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">"""
LINKS = """<link rel="stylesheet" href="/page/files/page.css"><script src="/page/files/uplot.js" defer></script>
<script src="/page/files/page.js" defer></script>"""
NO_SCRIPTS = "<noscript>This page is drawn by its own scripts, which load nothing. Allow them to see it.</noscript>"


def one_file(data: Mapping[str, Any]) -> str:
    """Return a page that opens offline: its styles and scripts are in it, and its policy lets it load nothing."""
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{style()}</style>'
    scripts = f"<script>{drawing_script()}{asset('page/page.js')}</script>"
    return html_page(str(data["title"]), head, f"{body(data)}\n{scripts}")


def served_page(data: Mapping[str, Any]) -> str:
    return html_page(str(data["title"]), LINKS, body(data))


def plain_page(title: str, content: str, head: str = "") -> str:
    """Return a page without a run. `content` is HTML."""
    return html_page(title, LINKS.partition("<script")[0] + head,
                     f'<main class="alone"><h1>{escape(title)}</h1>{content}</main>')


def html_page(title: str, head: str, content: str) -> str:
    return (f'<!doctype html>\n<html lang="en"><head>{HEAD}<title>{escape(title)}</title>{head}</head>\n'
            f"<body>{content}</body></html>\n")


def body(data: Mapping[str, Any]) -> str:
    return f'{NO_SCRIPTS}<main></main>\n<script type="application/json" id="data">{json_text(data)}</script>'


def style() -> str:
    """Return the style sheet: colours, the legend's too, and those of uPlot."""
    keys = "".join(f".l{place}{{--own:var(--line{place})}}" for place in range(len(LINES)))
    return f"{css()}{keys}\n{asset('page/page.css')}{asset('uplot/uPlot.min.css')}"


def drawing_script() -> str:
    """Return uPlot with its licence in place of its first line, which names an address."""
    return f"/*! uPlot\n{asset('uplot/LICENSE')}*/\n{asset('uplot/uPlot.min.js').partition(chr(10))[2]}\n"


def asset(name: str) -> str:
    return (files("lowmem_grpo") / "assets" / name).read_text(encoding="utf-8")
