"""In place of openpipe: nothing is reported."""

from openpipe.client import AsyncOpenPipe, OpenPipe

__all__ = ["AsyncOpenPipe", "OpenPipe"]
