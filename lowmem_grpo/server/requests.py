"""Requests to all endpoints: pydantic bodies, their bounds (`Limits`), and `ChatError`, the reply to a refused one."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lowmem_grpo.utils import COUNT, MIB, POSITIVE, JsonError, Rule, at_least, check_ranges, read_json

Natural = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients obey it
CLOSED = 503  # the status of an endpoint that is closing
KINDS = {429: "rate_limit_error"}  # error types by status; others are the client's below 500, else the server's


class Body(BaseModel):
    """The base class of request bodies. Unknown fields are ignored, so that newer clients are accepted."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


def json_of(body: bytes, nul: bool = False) -> dict[str, Any]:
    """Parse a body as a JSON object, as `read_json` does. JsonError if it is not one; the gate has bounded its size."""
    value = read_json(body, math.inf, nul)
    if not isinstance(value, dict):
        raise JsonError(f"is a JSON {type(value).__name__}; it must be an object")
    return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def without_place(error: BaseException, adapter: object) -> str:
    """Return the text of an error without the folder of the adapter, which is no client's to know."""
    return str(error).replace(str(adapter), "the weights") if isinstance(adapter, Path) else str(error)


def words_of(errors: ValidationError, kind: type[Body]) -> str:
    """Describe the first validation error: the field, its value, and the allowed values."""
    error: Any = errors.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    match error["type"]:
        case "extra_forbidden":
            for part in error["loc"][:-1]:
                kind = kind.model_fields[part].annotation  # type: ignore[assignment]
            names = ", ".join(field.alias or name for name, field in kind.model_fields.items())
            return f"{place} is not a field that is known here; leave it out. Known are {names}"
        case "missing":
            return f"{place} is missing"
        case "value_error":
            return f"{place} {error['ctx']['error']}"
    return f"{place or 'the body'} is {shown(error['input'])}; {error['msg'].replace('Input should', 'it must')}"


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
    """The bounds of an endpoint. A request that exceeds one is refused with a message that names it."""

    body_bytes: int = 8 * MIB
    """Bytes of a request's body."""
    messages: int = 2048
    """Messages of a request."""
    concurrent: int = 256
    """Requests of one key that are answered at the same time."""
    queue: int = 1024
    """Further requests of the key that wait for their turn; any more are told to retry later (429)."""
    seconds: float = 1800.0
    """Seconds from a request to the end of its reply, including the time that it waits while the model is trained."""
    header_bytes: int = 16 * 1024
    """Bytes of a request's line and headers."""
    sessions: int = 4096
    """Sessions that are open at the same time."""
    session_replies: int = 4096
    """Replies of one session."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "body_bytes": COUNT, "messages": COUNT, "concurrent": COUNT, "queue": at_least(0), "seconds": POSITIVE,
        "header_bytes": at_least(1024), "sessions": COUNT, "session_replies": COUNT,
    }

    def __post_init__(self) -> None:
        check_ranges(self)
