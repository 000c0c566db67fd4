"""What a message about a judge never shows: its key, a password in its URL, and characters that a terminal obeys."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

SHORTEST = 8  # characters; a shorter key ("local", "EMPTY") is no secret, and stands in ordinary words
SHOWN = 300  # characters of what a server or its connection says
PLACE = "[hidden]"


def secrets_of(client: Any, options: dict[str, Any]) -> list[str]:
    """What the client and the extra headers of a request hold that only the server may know."""
    headers = options.get("extra_headers")
    found = [client.api_key, client.base_url.password, *(headers.values() if isinstance(headers, dict) else ())]
    return [text for text in found if isinstance(text, str) and len(text) >= SHORTEST]


def hidden(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets."""
    for secret in secrets:
        text = text.replace(secret, PLACE)
    return text


def plain(said: object, secrets: Iterable[str]) -> str:
    """One line of at most SHOWN characters that can be printed, without the secrets."""
    text = " ".join(hidden(str(said), secrets).split())[:SHOWN]
    return "".join(char if char.isprintable() else "?" for char in text)


def address(url: Any) -> str:
    """The client's URL without user, password and query."""
    return str(url.copy_with(username="", password="", query=None)).rstrip("/")


def is_address(url: str) -> bool:
    """Whether it is the URL of a server: http or https, a host, and a port that there can be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
