"""What our views write to: a terminal or a notebook's cell. Text that an encoding lacks is shown as `?`."""

import io
import sys
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from lowmem_grpo.views.terminal import between_words

IN_A_CELL = "<pre style='line-height:1.3;overflow-x:auto'>{code}</pre>"


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
    file: Any = AnyText()
    return Console(file=file, **options)


def print_line(console: Console, text: str | Text) -> None:
    """Print a paragraph: piped as one line, and on a terminal broken between words only, so that a path stays whole."""
    line = Text(text) if isinstance(text, str) else text
    if console.is_terminal:
        line = Text(between_words(line.plain, console.width), spans=line.spans)  # a break stands where a space was
    console.print(line, soft_wrap=True, highlight=False)


class Cell:
    """One output that is drawn again, as a terminal's panel is."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.handle: Any = None

    def start(self) -> None:
        """Nothing is shown before the first panel."""

    def update(self, panel: RenderableType, refresh: bool = True) -> None:
        from IPython.display import HTML, display

        recorded = Console(record=True, width=self.width, file=io.StringIO(), force_jupyter=False)
        recorded.print(panel)
        page = HTML(recorded.export_html(inline_styles=True, code_format=IN_A_CELL))
        if self.handle is None:
            self.handle = display(page, display_id=True)
        else:
            self.handle.update(page)

    def stop(self) -> None:
        """The last panel stays."""
