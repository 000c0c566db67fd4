"""Standard output of an encoding, as a terminal or a pipe."""

import io


class Terminal(io.TextIOWrapper):
    """Standard output of an encoding, as a terminal or a pipe."""

    def __init__(self, encoding: str = "utf-8", tty: bool = True) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    @property
    def shown(self) -> str:
        content = self.buffer.getvalue()  # type: ignore[attr-defined]
        return str(content.decode(self.encoding))
