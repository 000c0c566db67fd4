"""`Watching`: the runs that somebody looks at, read as they grow."""

from pathlib import Path
from threading import Lock
from typing import Any

from lowmem_grpo.service.page.source import Source
from lowmem_grpo.service.users import User
from lowmem_grpo.views.chart import Chart
from lowmem_grpo.views.dashboard.comparison import comparison
from lowmem_grpo.views.dashboard.followed import Followed
from lowmem_grpo.views.svg import hover_data

MOST_FOLLOWED = 16  # runs of which the records are held in memory
MOST_COMPARED = 6  # runs on one chart: as many as there are colours
LIVE_POINTS = 600  # of a line: more than a chart has pixels; its stretches show the lowest and the highest


class Watching:
    """Follows runs for all browsers together; the one that was not asked for longest makes room."""

    def __init__(self, source: Source) -> None:
        self.source, self.lock = source, Lock()
        self.followed: dict[tuple[Path, Path | None], Followed] = {}

    def follow(self, user: User, name: str) -> Followed | None:
        """The run with this name, if this user may see it, and if it has begun."""
        place = self.source.folder(user, name)
        if place is None:
            return None
        with self.lock:
            found = self.followed.pop(place, None) or Followed(*place)
            self.followed[place] = found
            while len(self.followed) > MOST_FOLLOWED:
                del self.followed[next(iter(self.followed))]
        return found

    def several(self, user: User, names: list[str]) -> dict[str, Followed]:
        """Those of some runs that there are, at most `MOST_COMPARED`."""
        found = {name: self.follow(user, name) for name in dict.fromkeys(names[:MOST_COMPARED])}
        return {name: run for name, run in found.items() if run is not None}

    def look(self, user: User, names: list[str]) -> tuple[tuple[Any, ...], bool]:
        """Reads what is new of some runs. Returns what differs whenever a page of them would, and whether there is
        more to be read."""
        runs = self.several(user, names)
        for run in runs.values():
            run.look()
        listed = [(each.name, each.state, each.why, each.actions) for each in self.source.all(user)]
        found = [run.version() for run in runs.values()]
        return (*found, *listed), any(run.reading for run in runs.values())

    def charts(self, user: User, names: list[str]) -> list[Chart]:
        """The charts of one run, or of several that are compared, with what is new."""
        runs = self.several(user, names)
        for run in runs.values():
            run.look()
        if len(names) > 1:
            return comparison({name: run.charts() for name, run in runs.items()})
        return next(iter(runs.values())).charts() if runs else []

    def curves(self, user: User, names: list[str]) -> dict[str, Any]:
        """The data of these charts."""
        return {"charts": [hover_data(chart, LIVE_POINTS) for chart in self.charts(user, names)]}
