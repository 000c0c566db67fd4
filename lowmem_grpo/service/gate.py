"""What every request passes before a route sees it: the host it asks for, the key, and how large it is."""

import hmac
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.limits import Limits

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")  # whatever name else a page gives this machine, it is not asked for here
WITHOUT_KEY = ("/health",)
NO_RETRY = {"x-should-retry": "false"}  # which OpenAI's clients obey
CLOSED = 503
CLOSE = {"Connection": "close"}  # what is left of a body is not read


class Gate:
    """Wraps an application. `holds` says whose key one is, or whether it is one that opens it: what is false does not.
    Routes find it as `request.scope["holder"]`."""

    def __init__(
        self, app: ASGIApp, holds: Callable[[str], object], limits: Limits, hosts: Sequence[str] | None = HOSTS,
        without_key: Sequence[str] = WITHOUT_KEY,
    ) -> None:
        """`hosts` are the names that a request may ask for; None takes any. The paths `without_key` are open to all."""
        self.app, self.holds, self.limits, self.hosts, self.without_key = app, holds, limits, hosts, without_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.check(scope)
        except ChatError as error:
            await as_response(error)(scope, receive, send)
        else:
            await self.app(scope, self.bounded(receive), send)

    def check(self, scope: Scope) -> None:
        """Raises ChatError for a request that goes no further."""
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
        if size > self.limits.header_bytes:
            raise ChatError(431, f"the request's line and headers have {size} bytes; at most "
                                 f"{self.limits.header_bytes} are taken (header_bytes of Limits)", None,
                            "headers_too_large", CLOSE)
        headers = dict(scope["headers"])
        name = name_of(host := headers.get(b"host", b"").decode("latin-1"))
        if self.hosts is not None and name not in self.hosts:
            raise ChatError(421, f"the request is for the host {host!r}; this endpoint is {' or '.join(self.hosts)}, "
                                 "on this machine only: use its base_url", None, "wrong_host", CLOSE)
        key = headers.get(b"x-api-key", b"").decode("latin-1") or key_of(headers.get(b"authorization", b""))
        scope["holder"] = self.holds(key)
        if scope["path"] not in self.without_key and not scope["holder"]:
            raise ChatError(401, "the key is missing or wrong; send the header 'Authorization: Bearer KEY' with the "
                                 "api_key of this endpoint, which is another in each run", None, "invalid_api_key",
                            CLOSE | {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.limits.body_bytes:
            raise self.too_large(f"{int(length)} bytes")

    def bounded(self, receive: Receive) -> Receive:
        """`receive`, which raises ChatError as soon as the body is larger than it may be."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.body_bytes:
                raise self.too_large(f"more than {self.limits.body_bytes} bytes")
            return message

        return counted

    def too_large(self, size: str) -> ChatError:
        return ChatError(413, f"the request's body has {size}; at most {self.limits.body_bytes} are taken: send fewer "
                              "or shorter messages, or raise body_bytes of Limits", None, "request_too_large", CLOSE)


class OneKey:
    """A key that opens an endpoint, compared in constant time."""

    def __init__(self, key: str) -> None:
        self.key = key.encode()

    def __call__(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.key)


def name_of(host: str) -> str:
    """The host's name, without its port: another port may lead here, through a tunnel."""
    name, _, port = host.partition(":")
    return name.lower() if not port or port.isdigit() else ""


def key_of(authorization: bytes) -> str:
    """The key of an `Authorization: Bearer KEY` header; empty where there is none."""
    scheme, _, key = authorization.decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def as_response(error: ChatError) -> JSONResponse:
    """The reply to a request that is not answered."""
    headers = NO_RETRY if error.status == CLOSED else {}
    return JSONResponse(error.body(), error.status, error.headers | headers)


def unexpected(error: Exception) -> dict[str, Any]:
    """What a client is told of an error of ours: nothing of its inside."""
    return ChatError(500, f"the request failed here ({type(error).__name__}); the program's log says more", None,
                     "internal_error").body()
