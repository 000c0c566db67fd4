"""A request that is not answered, in the form in which OpenAI's interface says so."""

from typing import Any

KINDS = {429: "rate_limit_error"}  # by status; others: the caller's below 500, the server's above


class ChatError(Exception):
    """Why a request is not answered: the HTTP status, what is wrong and what to do, the field, a word for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}  # of the HTTP reply, such as Retry-After
        self.kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
