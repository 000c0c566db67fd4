"""A report or a live page as a browser reads it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """The elements of a page, the text of its scripts, and what these show, parsed as a browser does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(self.source)
        self.data = json.loads(self.scripts[0])
        self.prose = "\n".join(texts_of(self.data))
        self.samples = self.data.get("samples", {}).get("rows", [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data

    def titles(self) -> list[str]:
        return [chart["title"] for chart in self.data["charts"]]

    def chart(self, title: str) -> dict[str, Any]:
        return next(chart for chart in self.data["charts"] if chart["title"] == title)

    def lines(self, title: str) -> dict[str, dict[int, float]]:
        """The lines of a chart by their names, each as values by step."""
        return {line["name"]: dict(zip(line["steps"], line["values"], strict=True))
                for line in self.chart(title)["lines"]}


def texts_of(value: Any, keys: bool = True) -> list[str]:
    """Every text that a page shows, with or without the names of values."""
    if isinstance(value, dict):
        return [text for name, inner in value.items() for text in ([name] * keys + texts_of(inner, keys))]
    return [text for inner in value for text in texts_of(inner, keys)] if isinstance(value, list) else [str(value)]
