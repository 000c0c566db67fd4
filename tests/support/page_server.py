"""A live page of a folder of runs, served to a browser, and Chromium, driven by selenium: it can reach this machine
only."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from starlette.types import ASGIApp

from lowmem_grpo.server.page.page import Page, page_app
from lowmem_grpo.server.page.sources import RunSource, RunsSource
from lowmem_grpo.server.server import made_for, open_socket
from lowmem_grpo.server.users import OWNER, SignIn, User, Users

KEY, GUEST_KEY = "tml-owner-owner-owner-owner", "tml-guest-guest-guest-guest"


def page_of(source: RunSource | Path) -> Page:
    """The page of a folder or of another source, for an owner and a guest."""
    users = Users(KEY, [(User("guest"), GUEST_KEY)])
    return Page(RunsSource(source) if isinstance(source, Path) else source, SignIn(users))


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The address of an application while it answers."""
    server = made_for(app)
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
    with served(page_app(page)) as url:
        yield url, page


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not CHROMIUM or not DRIVER, reason="the page is driven in Debian's chromium, with its chromium-driver")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900",
           "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
LONGEST = 300.0  # seconds until a page that hangs fails its test


class Browser:
    """Chromium, signed in."""

    def __init__(self, driver: webdriver.Chrome, url: str, page: Page) -> None:
        self.driver, self.url, self.page = driver, url, page

    def open(self, path: str = "/") -> None:
        """Ask for a page, and wait until its scripts have run: on a busy machine the driver comes back before."""
        self.driver.get(self.url + path)
        self.until("return document.readyState")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)  # type: ignore[no-untyped-call]

    def until(self, script: str, wanted: Callable[[Any], bool] = bool) -> Any:
        """What a script returns, as soon as it is what is wanted, and not null."""
        end = time.monotonic() + LONGEST
        while (found := self.run_once_ready(script)) is None or not wanted(found):
            assert time.monotonic() < end, f"{script} is still {found!r} after {LONGEST:g} s"
            time.sleep(0.05)
        return found

    def run_once_ready(self, script: str) -> Any:
        """What a script returns; None while a page that loads, or loads again, has not run its own scripts."""
        return self.run(f"if (document.readyState !== 'complete') return null; {script}")

    def look(self, scheme: str = "light", width: int = 1280) -> None:
        """Light or dark, and how wide."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": scheme}]})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})

    def errors(self) -> list[str]:
        """What the console says, since the last look."""
        return [line["message"] for line in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def asked_for(self) -> set[str]:
        """The addresses that were asked for since the last look, without their queries."""
        events = [json.loads(line["message"])["message"]
                  for line in self.driver.get_log("performance")]  # type: ignore[no-untyped-call]
        return {event["params"]["request"]["url"].partition("?")[0] for event in events
                if event["method"] == "Network.requestWillBeSent"}


@contextmanager
def browsing(url: str, page: Page) -> Iterator[Browser]:
    """A browser that the owner's link has signed in."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.get(url + page.sign_in.link(User(OWNER)))
        found = Browser(driver, url, page)
        found.until("return document.body.className", lambda css: css == "live")
        yield found
        assert found.errors() == []
    finally:
        driver.quit()
