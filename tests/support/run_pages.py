"""Folders of runs as a run writes them, and as an enemy would; and a report or a live page as a browser reads it."""

import json
import math
import os
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


ATTACK = "</script></pre><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def metric(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    wave = math.sin(step / 20)
    return {"step": step, "reward": 0.5 + 0.3 * wave, "reward_std": 0.2, "loss": 0.01 * wave, "grad_norm": 0.1,
            "kl": 0.001 * step, "entropy": 1 / (1 + step / 50), "completions/mean_length": 40 + 10 * wave,
            "tokens_per_second": 900.0 + 50 * wave, "step_time": 1.5, "time/generate": 0.5, "time/train": 0.4,
            "time/reward": 0.1, "memory/peak_bytes": 2**31, "elapsed": 1.5 * step, "learning_rate": 1e-5,
            "rewards/correct/mean": 0.5} | more


def completion(step: int, text: str = "The answer is 4.", **more: Any) -> dict[str, Any]:
    """A line of completions.jsonl."""
    return {"step": step, "prompt": "2 + 2?", "completion": text, "rewards": {"correct": float(step % 2)},
            "reward": float(step % 2), "advantage": 0.5, "tokens": 7, "finish_reason": "stop"} | more


def append(path: Path, records: list[dict[str, Any]], tail: str = "") -> None:
    """Lines at the end of a file, and `tail` after them."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.write(tail)


def write_run(folder: Path, steps: int, summary: dict[str, Any] | None = None, text: str = "It is 4.") -> Path:
    """A run of so many steps, with two completions of every tenth; its summary where one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    append(folder / "metrics.jsonl", [metric(step) for step in range(1, steps + 1)])
    append(folder / "completions.jsonl",
           [completion(step, text) for step in range(1, steps + 1, max(1, steps // 20)) for _ in range(2)])
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def write_hostile(folder: Path, outside: Path) -> Path:
    """A run that is damaged in every way: cut lines, numbers that are none, markup, links to `outside`, a pipe."""
    write_run(folder, 30, {"recipe": ATTACK, "model": ATTACK, "status": "failed", "error": ATTACK,
                           "config": {ATTACK: ATTACK, "max_steps": ATTACK},
                           "samples": [dict.fromkeys(("prompt", "answer", "before", "after"), ATTACK)]}, ATTACK)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1e999, "reward": 1}\n{"step": -5}\n{"step": NaN}\n{"reward": 1}\n[1]\nno json\n\n')
        file.write('{"step": 31, "reward": 1e999, "kl": -1e999, "loss": NaN, "entropy": "high", "alarms/kl": 1}\n')
        file.write('{"step": 32, "reward": ' + "9" * 400 + ', "' + ATTACK.replace('"', "'") + '": 1}\n')
        file.write('{"step": 33, "rewards/' + ATTACK.replace('"', "'") + '/mean": 0.5, "alarms/<b>": 1}\n')
        file.write("[" * 100_000 + "\n" + '{"step": 34, "rew')
    append(folder / "completions.jsonl", [
        completion(30, ATTACK, rewards=[1], turns=5),
        completion(30, rewards={"correct": "high"}, finish_reason=[ATTACK]),
        {"step": 30, "prompt": {"a": ATTACK}, "turns": [1, {"text": ATTACK, "calls": [3], "replies": ["x"]}]},
        completion(30, ATTACK, reward=[], rewards={ATTACK: 1.0})], tail='{"step": 30, "pro')
    (folder / ".owner.json").write_text(json.dumps({"pid": 10**40, "host": os.uname().nodename}), encoding="utf-8")
    os.symlink(outside, folder / "log.txt")
    return folder
