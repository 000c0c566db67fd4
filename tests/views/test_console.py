"""Views print any text in any encoding of the terminal."""

import io
import sys
from types import SimpleNamespace

import pytest

from lowmem_grpo.views.console import any_console
from lowmem_grpo.views.live import LiveView

ENCODINGS = ["ascii", "cp1252", "cp932", "latin-1"]
TEXT = "é あ 你 ✓ ▁█"


class Terminal(io.TextIOWrapper):
    """Standard output of an encoding, as a terminal or a pipe."""

    def __init__(self, encoding: str, tty: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    @property
    def shown(self) -> str:
        content = self.buffer.getvalue()  # type: ignore[attr-defined]
        return str(content.decode(self.encoding))


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_view_shows_what_an_encoding_has_of_a_text_and_ends_no_run(
    encoding: str, tty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(encoding, tty)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    view, state = LiveView(title=TEXT), SimpleNamespace(global_step=1, max_steps=2)
    view.on_train_begin(None, state, None)
    view.say(TEXT)
    view.on_log(None, state, None, {"reward": 0.5, f"rewards/{TEXT}/mean": 1.0})
    print("of the user")  # rich's own stream stands in for standard output meanwhile
    view.on_train_end(None, state, None)
    assert terminal.shown.count(TEXT.encode(encoding, "replace").decode(encoding)) >= 2
    assert "of the user" in terminal.shown and view.draws is tty
    with pytest.raises(UnicodeEncodeError):
        terminal.write(TEXT)  # what others print is theirs


def test_a_terminal_that_has_all_characters_gets_them_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal("utf-8", False)
    monkeypatch.setattr(sys, "stdout", terminal)
    any_console().print(TEXT)
    assert terminal.shown == f"{TEXT}\n"
