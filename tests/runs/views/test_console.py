"""Views print any text in any encoding of the terminal."""

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from terminal import Terminal

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.runs.adapter_file import read_adapter
from lowmem_grpo.runs.files import flush
from lowmem_grpo.runs.saved_adapter import fingerprint
from lowmem_grpo.runs.views.console import any_console, print_line
from lowmem_grpo.runs.views.live import LiveView
from lowmem_grpo.runs.views.samples import shown_sample
from lowmem_grpo.runs.views.terminal import BetweenWords, CurrentStderr, echo, plain_errors
from lowmem_grpo.utils import UNSAFE, check_value

ENCODINGS = ["ascii", "cp1252", "cp932", "latin-1", "utf-8"]
TEXT = "é あ 你 ✓ ▁█"
PARAGRAPH = "other programs keep the cores busy, and " * 4 + "/a/path/that/is/longer/than/the/width/of/a/terminal/" * 2


def is_broken_between_words(shown: str) -> bool:
    """Return whether each line fits 80 columns or is one word, and the words are those of the paragraph."""
    lines = [line.rstrip() for line in shown.splitlines()]
    return shown.split() == PARAGRAPH.split() and all(len(line) <= 80 or " " not in line for line in lines)


def test_a_terminal_of_80_columns_breaks_no_word_and_a_pipe_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for tty in (False, True):
        printed, logged = (Terminal("utf-8", tty) for _ in range(2))
        print_line(Console(file=printed, width=80, force_terminal=tty, color_system=None), PARAGRAPH)
        monkeypatch.setattr(sys, "stderr", logged)
        logger, handler = logging.Logger("one"), CurrentStderr()
        handler.setFormatter(BetweenWords("%(message)s"))
        logger.addHandler(handler)
        logger.warning(PARAGRAPH)
        for shown in (printed.shown, logged.shown):
            assert is_broken_between_words(shown) if tty else shown.rstrip("\n") == PARAGRAPH, shown


def test_a_refusal_on_a_terminal_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", Terminal("utf-8", tty=True))
    with pytest.raises(click.ClickException) as refused, plain_errors():
        check_value(GRPOConfig, "lr_scheduler_type", "cos")
    lines = f"Error: {refused.value.message}".splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_view_shows_what_an_encoding_has_of_a_text_and_ends_no_run(
    encoding: str, tty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(encoding, tty)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    view, state = LiveView(), SimpleNamespace(global_step=1, max_steps=2)
    view.title = TEXT
    view.on_train_begin(None, state, None)
    view.say(TEXT)
    view.on_log(None, state, None, {"reward": 0.5, f"rewards/{TEXT}/mean": 1.0})
    print("of the user")  # rich's own stream stands in for standard output meanwhile
    view.on_train_end(None, state, None)
    assert terminal.shown.count(TEXT.encode(encoding, "replace").decode(encoding)) >= 2
    assert "of the user" in terminal.shown and view.draws is tty
    with nullcontext() if encoding == "utf-8" else pytest.raises(UnicodeEncodeError):
        terminal.write(TEXT)  # what others print is theirs


def test_a_view_of_a_program_whose_output_is_closed_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    print_line(any_console(), "nobody reads this")


def test_a_file_that_the_system_refuses_is_one_line_also_where_pythons_library_asked_for_it(tmp_path: Path) -> None:
    for call in (flush, fingerprint):
        with pytest.raises(click.ClickException, match="missing: No such file or directory; correct"), plain_errors():
            call(tmp_path / "missing")


HOSTILE = {
    "colours": "\x1b[31mred", "a title": "\x1b]0;owned\x07", "a link": "\x1b]8;;http://evil\x1b\\click",
    "C1": "\x9b31m", "an older line": "good\rbad", "backspace": "rm\x08\x08", "bidi": "\u202egnp.exe",
    "isolate": "\u2066x", "DEL": "a\x7f", "a line separator": "a\u2028b", "a surrogate": "a\ud800b",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_view_passes_on_what_steers_a_terminal(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The one escape sequence that a terminal gets is the console's own."""
    table = Table(text)
    table.add_row(text, Text(text))
    console = any_console(force_terminal=True, width=60, color_system=None)
    for each in (text, Text(text), table, Panel(text, title=text)):
        console.print(each)
    print_line(console, text)
    echo(text)
    logged = BetweenWords("%(message)s").format(logging.LogRecord("x", 30, "", 0, "%s", (text,), None))
    shown = capsys.readouterr().out + logged + shown_sample({"prompt": text})["prompt"]
    assert not UNSAFE.search(shown) and "\ufffd" in shown


def test_markup_in_a_text_means_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = any_console(force_terminal=True, width=80, color_system=None)
    console.print("[bold red]x[/] [link=http://evil]here[/link] :smile:")
    found = capsys.readouterr().out
    assert "[bold red]x[/]" in found and "]8;" not in found and ":smile:" in found
    console.print("[/nothing]")  # markup that does not close would raise


def test_an_error_that_quotes_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07\u202e"
    with pytest.raises(click.ClickException) as shown, plain_errors():
        read_adapter(tmp_path / name)
    assert not UNSAFE.search(shown.value.message) and "\ufffd]0;owned" in shown.value.message
