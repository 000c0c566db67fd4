"""Clients without a key, which programs do not report to."""

from typing import Any


class OpenPipe:
    """Has no key."""

    api_key: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


class AsyncOpenPipe(OpenPipe):
    """The same."""
