"""Shared by all commands: readable errors, wrapped text, and quiet libraries."""

import logging
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.config.launcher import this_process
from lowmem_grpo.runs.files import beside
from lowmem_grpo.utils import visible

MOST_COLUMNS = 160  # longer lines are hard to read
PACKAGE = Path(__file__).parents[2]
PYTHONS = Path(logging.__file__).parents[1]  # the folder of Python's standard library


class UserPath(click.Path):
    """A click type: a path, or with `path_type=str` a text. "~" is the home folder, and an empty value is refused."""

    def __init__(self, path_type: type = Path, **checks: Any) -> None:
        super().__init__(path_type=path_type, **checks)
        self.name = "text" if path_type is str else self.name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not str(value).strip():
            self.fail("it is empty; name a file or a folder, such as . for this one", param, ctx)
        path = os.path.expanduser(value)
        try:
            return super().convert(path, param, ctx)
        except click.BadParameter as error:
            held = "" if os.path.exists(path) else f" Choose another; {beside(Path(path))}."
            raise click.BadParameter(error.message + held, ctx, param) from None


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show two kinds of errors without a traceback: those of this package, whose messages are written for users, and
    those of refused files or folders. Ctrl-C exits with status 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        click.echo("\nstopped by Ctrl-C", err=True)
        raise SystemExit(130) from error
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        refused = getattr(error, "filename", None) if isinstance(error, OSError) else None
        if not is_ours(error.__traceback__, through_python=refused is not None):
            raise
        words = str(getattr(error, "strerror", None) or error)  # without the errno
        words = words if refused is None else f"{refused}: {words}; correct that, or choose another path"
        notes = "\n".join(getattr(error, "__notes__", []))
        said = fitting(visible(f"Error: {words}\n{notes}".rstrip()), sys.stderr).removeprefix("Error: ")
        raise click.ClickException(said) from error


def echo(text: object, err: bool = False) -> None:
    """Print a line that may hold text of others."""
    click.echo(visible(str(text)), err=err)


def was_given(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


def is_ours(trace: Any, through_python: bool = False) -> bool:
    """Return whether this package raised an error, itself or (`through_python`) in a call of the standard library."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    while through_python and (files[-1].startswith("<frozen") or Path(files[-1]).is_relative_to(PYTHONS)):
        files.pop()
    return Path(files[-1]).is_relative_to(PACKAGE)


def columns(most: int) -> int:
    return min(most, shutil.get_terminal_size((most, 24)).columns)


def fitting(text: str, stream: Any) -> str:
    """Return a text for this stream: wrapped between words if the stream is a terminal."""
    return between_words(text, columns(MOST_COLUMNS)) if stream.isatty() else text


def between_words(text: str, width: int) -> str:
    return "\n".join(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
                     for line in text.splitlines())


class BetweenWords(logging.Formatter):
    """A log formatter that wraps lines for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return fitting(visible(super().format(record)), sys.stderr)


class CurrentStderr(logging.StreamHandler):
    """A log handler that writes to the current sys.stderr, even if a live view has replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def quiet() -> None:
    """Log this package's messages to the terminal, and only errors of libraries. With several ranks, the first shows
    messages from INFO on, and the others, with their rank, from WARNING on."""
    process = this_process()
    form = "%(message)s" if process.leads else f"rank {process.rank}: %(message)s"
    handler = CurrentStderr()
    handler.setFormatter(BetweenWords(form))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    logging.getLogger("lowmem_grpo").setLevel(logging.INFO if process.leads else logging.WARNING)
    if not process.leads:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
