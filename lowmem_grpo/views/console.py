"""The console that our views write to. Text that the terminal's encoding lacks is shown as `?`, and ends no run."""

import sys
from typing import Any

from rich.console import Console


class AnyText:
    """Stands for standard output, whatever that is at the moment, and takes any text."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.find_stream(), name)

    def find_stream(self) -> Any:
        """Return standard output, or what rich's proxy of it hides: the proxy would come back here."""
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def write(self, text: str) -> Any:
        """Write what the encoding has of a text."""
        stream = self.find_stream()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        return stream.write(text.encode(encoding, "replace").decode(encoding))


def any_console(**options: Any) -> Console:
    """Return a console of rich over standard output."""
    file: Any = AnyText()
    return Console(file=file, **options)
