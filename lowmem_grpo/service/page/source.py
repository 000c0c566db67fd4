"""What a page can show: runs of a folder, or the jobs of a server."""

from pathlib import Path
from typing import Protocol

from lowmem_grpo.service.users import User
from lowmem_grpo.views.dashboard.listed import Listed


class Source(Protocol):
    """Finds runs for a user. What is another user's is not there."""

    title: str

    def all(self, user: User) -> list[Listed]:
        """Every run that this user may see, in the order of the list."""

    def one(self, user: User, name: str) -> Listed | None:
        """The run with this name; None where there is none that this user may see."""

    def act(self, user: User, name: str, action: str) -> str:
        """What a button does; returns in words what comes of it. ValueError where it cannot be done, LookupError for a
        run that is not there."""

    def folder(self, user: User, name: str) -> tuple[Path, Path | None] | None:
        """Where the files of a run are, and its log; None where there is no run, or where it has not begun."""
