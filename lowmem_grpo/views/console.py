"""The console that our views write to. Text that the terminal's encoding lacks is shown as `?`, and ends no run."""

import sys
from typing import Any

from rich.console import Console


class AnyText:
    """Standard output as it is at the moment (a live view redirects it), for any text."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now(), name)

    def now(self) -> Any:
        """The stream itself: rich's own proxy of it would come back here."""
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def write(self, text: str) -> int:
        """Write what the encoding has of a text."""
        encoding = getattr(self.now(), "encoding", None) or "utf-8"
        return int(self.now().write(text.encode(encoding, "replace").decode(encoding)))


def any_console(**options: Any) -> Console:
    """A console of rich over standard output."""
    file: Any = AnyText()
    return Console(file=file, **options)
