"""The live page as HTML: the sections of a run's report, beside the list of runs, with buttons and the log.

Everything is written here, by the functions that write the report, and escaped by `html.escape`. The page's script puts
no text of a run into the page but as `textContent`, and the page's policy lets no other script run.
"""

import json
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import urlencode

from lowmem_grpo.views.chart import Chart
from lowmem_grpo.views.dashboard.listed import Listed, ago
from lowmem_grpo.views.report import Content, curves_section, note_line
from lowmem_grpo.views.svg import hover_data

DRAWN = 240  # points of a line before the script draws it
WORDS = {"stop": "Stop", "resume": "Resume", "export": "Download adapter"}
HELP = {"stop": "It finishes its step and saves, so that it can go on later.",
        "resume": "It waits for the card, and goes on from its last checkpoint.",
        "export": "The adapter in PEFT's files, as a zip."}
HEAD = """<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">"""
STYLES = "".join(f'<link rel="stylesheet" href="/page/files/{name}.css">' for name in ("uplot", "run", "live"))
SCRIPTS = "".join(f'<script src="/page/files/{name}.js" defer></script>' for name in ("uplot", "run", "live"))


@dataclass(frozen=True)
class View:
    """What a page shows: the list, and one run or several on the same charts."""

    title: str
    user: str
    runs: list[Listed]
    names: list[str]
    card: list[str] = field(default_factory=list)
    chosen: Listed | None = None
    content: Content | None = None
    log: str = ""
    compared: list[Chart] | None = None

    @property
    def heading(self) -> str:
        """The title of the browser's window."""
        if self.compared is not None:
            return f"{len(self.names)} runs"
        return self.chosen.title if self.chosen else self.title


def live_page(view: View, curves: bool = True) -> str:
    """The whole page; without `curves`, what changes beside them while a run goes on."""
    body, data = shown(view)
    if not curves:
        body.pop("curves", None)
        data.pop("charts", None)
    sections = "".join(f'<div id="{name}">{html}</div>' for name, html in body.items())
    if not curves and view.content is not None:
        sections += note_line(view.content.note)
    held = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    head = f"{HEAD}<title>{escape(view.heading)}</title>{STYLES}{SCRIPTS}"
    query = escape(address(*view.names).removeprefix("/")) if view.names else ""
    return (f'<!doctype html>\n<html lang="en"><head>{head}</head><body class="live" data-query="{query}">'
            f'{navigation(view)}<main>{sections}</main>'
            f'<script type="application/json" id="data">{held}</script></body></html>\n')


def shown(view: View) -> tuple[dict[str, str], dict[str, Any]]:
    """The sections by their names, and the data of the scripts."""
    nothing: dict[str, Any] = {"charts": [], "samples": [], "right": [], "above": 0, "endings": {}}
    if view.compared is not None:
        top = f'<header><h1>{len(view.names)} runs</h1><p class="quiet">{escape(", ".join(view.names))}</p></header>'
        return ({"top": top, "curves": curves_section(view.compared, DRAWN)},
                nothing | {"charts": [hover_data(chart) for chart in view.compared]})
    if view.content is None:
        return {"actions": actions(view.chosen), "top": empty(view), "log": log_section(view.log)}, nothing
    found = {"actions": actions(view.chosen)} | view.content.sections
    settings = found.pop("settings", "")
    return found | {"log": log_section(view.log), "settings": settings}, view.content.data


def navigation(view: View) -> str:
    """The list of runs, and what else is about all of them."""
    card = "".join(f"<p>{escape(line)}</p>" for line in view.card)
    rows = "".join(list_row(run, run.name in view.names) for run in view.runs)
    compare = '<button id="compare">Compare</button>' if len(view.runs) > 1 else ""
    leave = f'<button class="plain">Sign out {escape(view.user)}</button>'
    return (f'<nav aria-label="Runs"><p class="brand"><b>lowmem-grpo</b> <span class="quiet">{escape(view.title)}'
            f'</span><span id="link" role="status" class="quiet"></span></p><div id="card" class="quiet">{card}</div>'
            f'<form method="get" action="/"><ul id="list">{rows}</ul>{compare}</form>'
            f'<form method="post" action="/page/leave">{leave}</form></nav>')


def list_row(run: Listed, here: bool) -> str:
    """A run in the list: a box to compare it, its name, its state."""
    told = " \u00b7 ".join(filter(None, (run.why, ago(run.written) if run.written else "")))
    box = (f'<input type="checkbox" name="with" value="{escape(run.name)}" aria-label="Compare {escape(run.title)}">'
           if run.can_show else "<span></span>")
    current = ' aria-current="page"' if here else ""
    return (f'<li>{box}<a href="{escape(address(run.name))}"{current}><b>{escape(run.title)}</b> '
            f'<span class="status {escape(run.state)}">{escape(run.words)}</span>'
            f'<span class="quiet">{escape(told)}</span></a></li>')


def actions(run: Listed | None) -> str:
    """The buttons of a run."""
    if run is None or not run.actions:
        return ""
    return "".join(f'<form method="post" action="/page/do/{name}"><input type="hidden" name="run" '
                   f'value="{escape(run.name)}"><button title="{HELP[name]}">{WORDS[name]}</button></form>'
                   for name in run.actions)


def empty(view: View) -> str:
    """What stands in place of a run that has written nothing."""
    if view.chosen is None:
        words = "There is no such run." if view.names else "No runs yet. What begins appears here by itself."
        return f'<header><h1>{escape(view.title)}</h1><p class="card">{words}</p></header>'
    run = view.chosen
    return (f'<header><h1>{escape(run.title)} <span class="status {escape(run.state)}">{escape(run.words)}</span></h1>'
            f'<p class="card">{escape(run.why or "It has written nothing yet.")}</p></header>')


def log_section(log: str) -> str:
    """The end of the log."""
    return f'<section><h2>Log</h2><pre class="card" tabindex="0">{escape(log)}</pre></section>' if log.strip() else ""


def address(*names: str) -> str:
    """Where a run is shown, or several are compared."""
    return "/?" + urlencode([("run" if len(names) == 1 else "with", name) for name in names])


def sign_in_page(why: str = "") -> str:
    """Asks for a key."""
    return alone("Sign in", f"""<p class="said-why">{escape(why)}</p><form method="post" action="/page/enter">
<input name="user" autocomplete="username" value="lowmem-grpo" hidden>
<label>Key <input type="password" name="key" size="40" autocomplete="current-password" required autofocus></label>
<button>Sign in</button></form>
<p class="quiet">The command that serves this page printed its key and a link that works once.</p>""")


def onward_page() -> str:
    """Leads on to the page, as one of its own addresses."""
    return alone("Signed in", '<p><a href="/">Go on</a></p>', '<meta http-equiv="refresh" content="0;url=/">')


def refusal_page(why: str) -> str:
    """Says why a button did nothing."""
    return alone("That was not done", f'<p class="card">{escape(why)}</p><p><a href="/">Back to the runs</a></p>')


def alone(title: str, body: str, head: str = "") -> str:
    """A page without a run."""
    return (f'<!doctype html>\n<html lang="en"><head>{HEAD}{head}<title>{title}</title>{STYLES}</head>'
            f'<body class="alone"><main><h1>{title}</h1>{body}</main></body></html>\n')
