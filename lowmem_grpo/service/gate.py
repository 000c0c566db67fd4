"""What every request passes before a route sees it: the host it asks for, the key, and how large it is."""

from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowmem_grpo.service.errors import ChatError, Limits

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")  # whatever name else a page gives this machine, it is not asked for here
WITHOUT_KEY = "/health"
NO_RETRY = {"x-should-retry": "false"}  # which OpenAI's clients obey
CLOSED = 503
CLOSE_CONNECTION = {"Connection": "close"}  # what is left of a body is not read


class Gate:
    """Starlette's middlewares for host and body answer with a text of their own (400, 413), and a body that is too
    large only once it is asked for; this one answers in OpenAI's form and before a byte of the body is read."""

    def __init__(
        self, app: ASGIApp, holds: Callable[[str], object], limits: Limits, hosts: Sequence[str] | None = HOSTS,
    ) -> None:
        """`holds` says who has a key, which routes read as `request.scope["holder"]`: nobody (false) is refused.
        `hosts` are the names that a request may ask for; None takes any."""
        self.app, self.holds, self.limits, self.hosts = app, holds, limits, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is made without websockets and lifespan"
        try:
            self.check(scope)
        except ChatError as error:
            await as_response(error)(scope, receive, send)
        else:
            await self.app(scope, self.bounded(receive), send)

    def check(self, scope: Scope) -> None:
        """Raise ChatError for a request that goes no further."""
        headers = Headers(scope=scope)
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in headers.raw)
        if size > self.limits.header_bytes:
            raise ChatError(431, f"the request's line and headers have {size} bytes; at most "
                                 f"{self.limits.header_bytes} are taken (header_bytes of Limits)", None,
                            "headers_too_large", CLOSE_CONNECTION)
        name, _, port = (host := headers.get("host", "")).partition(":")  # any port: a tunnel may lead here
        if self.hosts is not None and not (name.lower() in self.hosts and (port or "0").isdigit()):
            raise ChatError(421, f"the request is for the host {host!r}; this endpoint is {' or '.join(self.hosts)}, "
                                 "on this machine only: use its base_url", None, "wrong_host", CLOSE_CONNECTION)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        scope["holder"] = self.holds(key)
        if scope["path"] != WITHOUT_KEY and not scope["holder"]:
            raise ChatError(401, "the key is missing or wrong; send the header 'Authorization: Bearer KEY' with the "
                                 "api_key of this endpoint, which is another in each run", None, "invalid_api_key",
                            CLOSE_CONNECTION | {"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.limits.body_bytes:
            raise self.too_large(f"{int(length)} bytes")

    def bounded(self, receive: Receive) -> Receive:
        """Return `receive`, which raises ChatError as soon as the body is larger than it may be."""
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
                              "or shorter messages, or raise body_bytes of Limits", None, "request_too_large",
                         CLOSE_CONNECTION)


def as_response(error: ChatError) -> JSONResponse:
    headers = NO_RETRY if error.status == CLOSED else {}
    return JSONResponse(error.body(), error.status, error.headers | headers)
