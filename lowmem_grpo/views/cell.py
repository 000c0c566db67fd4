"""The live panel in a notebook."""

import io
from typing import Any

from rich.console import Console, RenderableType

IN_A_CELL = "<pre style='line-height:1.3;overflow-x:auto'>{code}</pre>"


class Cell:
    """One output that is drawn again, as a terminal's panel is."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.handle: Any = None

    def start(self) -> None:
        """Nothing is shown before the first panel."""

    def update(self, panel: RenderableType, refresh: bool = True) -> None:
        """Show the panel in place of the last one."""
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
