"""A live page of a folder of runs, served to a browser."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from lowmem_grpo.service.page.card import CardUse
from lowmem_grpo.service.page.page import Page
from lowmem_grpo.service.page.routes import page_app
from lowmem_grpo.service.page.runs_source import RunsSource
from lowmem_grpo.service.page.sign_in import SignIn
from lowmem_grpo.service.page.source import Source
from lowmem_grpo.service.server import made_for, open_socket
from lowmem_grpo.service.users import User, Users

KEY, GUEST_KEY = "tml-owner-owner-owner-owner", "tml-guest-guest-guest-guest"


def page_of(source: Source | Path) -> Page:
    """The page of a folder or of another source, for an owner and a guest."""
    users = Users(KEY, [(User("guest"), GUEST_KEY)])
    return Page(RunsSource(source) if isinstance(source, Path) else source, SignIn(users), CardUse(command="/none"))


@contextmanager
def served(app: ASGIApp, page: Page) -> Iterator[str]:
    """The address of an application while it answers."""
    server = made_for(app)
    page.closing = lambda: server.should_exit
    with open_socket("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server ends although pages are open"


@contextmanager
def watched(runs_dir: Path) -> Iterator[tuple[str, Page]]:
    """The address of a page of a folder, and the page."""
    page = page_of(runs_dir)
    with served(page_app(page), page) as url:
        yield url, page
