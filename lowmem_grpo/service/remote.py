"""`Remote`: requests to a server, with its own words for what it refuses."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from lowmem_grpo.service.home import Address

SECONDS = 60.0


class RemoteError(RuntimeError):
    """The server refused a request, or was not reached; the message says why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Remote:
    """A server at an address."""

    def __init__(self, address: Address) -> None:
        self.address = address
        # a proxy of the environment is for other hosts: the server is named by its address
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Any:
        return json.loads(self.ask(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self.ask(path, json.dumps(body).encode()))

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """The reply to a GET, or to a POST where there is a body. Raises RemoteError."""
        headers = {"X-API-Key": self.address.key, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address.url}{path}", data=body, headers=headers)
        try:
            with self.opener.open(request, timeout=SECONDS) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            raise RemoteError(words_of(error), error.code) from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", None) or error
            raise RemoteError(f"the server at {self.address.url} is not reached ({cause}): start it with `lowmem-grpo "
                              "serve`, or its tunnel if it is on another machine") from None


def words_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answered {error.code} {error.reason}"
