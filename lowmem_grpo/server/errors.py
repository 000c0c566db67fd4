"""`Limits`: the bounds of an endpoint; `ChatError`: the error reply of a request that is not answered."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.utils import COUNT, MIB, POSITIVE, Rule, at_least, check_ranges

NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients obey it
CLOSED = 503  # the status of an endpoint that is closing
KINDS = {429: "rate_limit_error"}  # by status; below 500, others are the caller's errors, and from 500 the server's


class ChatError(Exception):
    """An error reply: the HTTP status, a message with advice, the wrong field, and a machine-readable code."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}  # for the HTTP reply, such as Retry-After
        self.kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """The bounds of an endpoint. A request beyond one is refused with a message that names the limit."""

    body_bytes: int = 8 * MIB
    """Bytes of a request's body."""
    messages: int = 2048
    """Messages of a request."""
    concurrent: int = 256
    """Requests that are answered at a time."""
    queue: int = 1024
    """Further requests that wait for their turn; those above it are told to come again (429)."""
    seconds: float = 1800.0
    """Seconds from a request to the end of its reply. Requests wait while the model is trained, which counts too."""
    header_bytes: int = 16 * 1024
    """Bytes of a request's line and headers."""
    sessions: int = 4096
    """Sessions that are open at a time."""
    session_replies: int = 4096
    """Replies that are recorded of a session."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "body_bytes": COUNT, "messages": COUNT, "concurrent": COUNT, "queue": at_least(0), "seconds": POSITIVE,
        "header_bytes": at_least(1024), "sessions": COUNT, "session_replies": COUNT,
    }

    def __post_init__(self) -> None:
        check_ranges(self)
