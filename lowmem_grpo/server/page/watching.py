"""`Watching`: follows the runs that browsers show; `CardUse`: the utilization of the GPUs."""

import hashlib
import shutil
import subprocess
import time
from functools import lru_cache
from threading import Lock
from typing import Any
from urllib.parse import urlencode

from lowmem_grpo.runs.views.charts import comparison
from lowmem_grpo.runs.views.report import MOST_POINTS
from lowmem_grpo.server.page.run_follower import RunFollower
from lowmem_grpo.server.page.sources import Listed, RunSource
from lowmem_grpo.server.users import User
from lowmem_grpo.utils import MIB, size_text

QUERY = "name,utilization.gpu,memory.used,memory.total"
KEEP = 3.0  # seconds for which an answer is cached
WAITS = 5.0  # seconds that nvidia-smi may take
READS = 0.5  # seconds in which unread records are read before a page is told of them
MOST_FOLLOWED = 16  # most runs with records in memory
MOST_COMPARED = 6  # most runs on one chart: the number of colours


class CardUse:
    """The GPUs' utilization from `nvidia-smi`, cached for `KEEP` seconds; empty if the program is missing."""

    def __init__(self, command: str | None = None) -> None:
        self.command = shutil.which("nvidia-smi") if command is None else command
        self.lock, self.asked, self.said = Lock(), float("-inf"), list[str]()

    def words(self) -> list[str]:
        with self.lock:
            if self.command is not None and time.monotonic() - self.asked > KEEP:
                self.said = [card_text(line) for line in self.lines(self.command) if line.count(",") >= 3]
                self.asked = time.monotonic()
            return self.said

    def lines(self, command: str) -> list[str]:
        """Return the lines that nvidia-smi prints; none if it fails."""
        try:
            process = subprocess.run([command, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
                                     timeout=WAITS, capture_output=True, text=True, check=True)
        except (OSError, subprocess.SubprocessError):
            self.command = None  # do not try again
            return []
        return process.stdout.splitlines()


def card_text(line: str) -> str:
    """Return a GPU's line as a readable text; values that the driver does not report are left out."""
    name, busy, used, total = (part.strip() for part in line.rsplit(",", 3))
    said = [f"{busy}% busy"] if busy.isdigit() else []
    if used.isdigit() and total.isdigit():
        said.append(f"{size_text(int(used) * MIB)} of {size_text(int(total) * MIB)} in use")
    return f"{name}: {', '.join(said) or 'its driver says nothing'}"


class Watching:
    """An LRU cache of `MOST_FOLLOWED` run followers, shared by all browsers."""

    def __init__(self, source: RunSource, card: CardUse) -> None:
        self.source, self.card, self.lock = source, card, Lock()
        self.followers = lru_cache(MOST_FOLLOWED)(RunFollower)

    def follow(self, run: Listed) -> RunFollower:
        """Return the follower of a run, after it has read its new records."""
        with self.lock:
            follower = self.followers(*run.place)
        follower.read_news()
        return follower

    def follow_all(self, user: User, names: list[str]) -> dict[str, RunFollower]:
        """Return the followers of the named runs that exist."""
        return {name: self.follow(run) for name in names if (run := self.source.one(user, name)) is not None}

    def version(self, user: User, names: list[str]) -> str:
        """Read what the runs wrote, and return a text that changes whenever their page does. A run of which more is
        unread than a piece of each file is read on for a moment."""
        until, runs = time.monotonic() + READS, self.follow_all(user, names).values()
        while any(run.reading for run in runs) and time.monotonic() < until:
            for run in runs:
                run.read_news()
        state = [*(run.version() for run in runs),
                 *((run.name, run.state, run.why, run.actions) for run in self.source.all(user))]
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def page_data(self, user: User, names: list[str]) -> dict[str, Any]:
        """Return the page's data: the list, and the named run (default: the first) or charts that compare several."""
        runs = self.source.all(user)
        names = names or [run.name for run in sorted(runs, key=lambda run: not run.can_show)][:1]
        data = {"title": self.source.title, "query": query_of(*names) if names else "",
                "version": self.version(user, names), "list": {
                    "title": self.source.title, "user": user.name, "card": self.card.words(), "names": names,
                    "runs": [list_row(run) for run in runs]}}
        return data | (self.one_run(user, *names) if len(names) < 2 else self.several_runs(user, names))

    def several_runs(self, user: User, names: list[str]) -> dict[str, Any]:
        charts = comparison({name: run.charts() for name, run in self.follow_all(user, names).items()})
        title = f"{len(names)} runs"
        return {"title": title, "top": {"title": title, "about": ", ".join(names)},
                "charts": [chart.to_dict(MOST_POINTS) for chart in charts]}

    def one_run(self, user: User, name: str | None = None) -> dict[str, Any]:
        """Return a run's report, buttons and log; if there is nothing to show, a text that says why."""
        run = self.source.one(user, name) if name is not None else None
        if run is None:
            words = "There is no such run." if name else "No runs yet. What begins appears here by itself."
            return {"top": {"title": self.source.title, "ending": {"said": words}}}
        follower = self.follow(run)
        shown = {"title": run.title, "actions": [(run.name, action) for action in run.actions], "log": follower.log()}
        if not run.can_show:
            return shown | {"top": {"title": run.title, "status": run.state,
                                    "ending": {"said": run.why or "It has written nothing yet."}}}
        return follower.content(run.run_state) | shown


def list_row(run: Listed) -> dict[str, Any]:
    told = " \u00b7 ".join(filter(None, (run.why, ago(run.written) if run.written else "")))
    return {"name": run.name, "title": run.title, "state": run.state, "told": told, "can_show": run.can_show}


def ago(when: float) -> str:
    """Return how long ago a time was, such as "2 hours ago"."""
    seconds = max(0.0, time.time() - when)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"


def query_of(*names: str) -> str:
    """Return the URL query that shows one run, or compares several."""
    return "?" + urlencode([("run" if len(names) == 1 else "with", name) for name in names])
