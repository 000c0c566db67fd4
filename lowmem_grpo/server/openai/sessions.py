"""Sessions: addresses of their own, at which the calls of one rollout are recorded as its conversations."""

import secrets
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

from lowmem_grpo.server.errors import NO_RETRY, ChatError, Limits


@dataclass
class RecordedConversation:
    """All messages from the first one to a reply that nobody continued."""

    messages_and_choices: list[dict[str, Any]]  # a reply of the policy as the choice of OpenAI's form, with its `turn`
    tools: list[dict[str, Any]] | None = None


@dataclass(eq=False)
class RecordedReply:
    """A choice that a client got, at the end of its conversation."""

    conversation: RecordedConversation
    first: int  # the number of the conversation's first reply in its session
    continued: bool = False


class Session:
    """The calls of one rollout, by whoever has `base_url` and `api_key`: any client, in any process. Safe between
    threads. Once it is left, its address answers no more, and its records can still be read. What its client did not
    get, because it left or the endpoint closed, is not among them."""

    def __init__(self, base_url: str, api_key: str, limits: Limits, forget: Callable[[str], None]) -> None:
        self.name = secrets.token_urlsafe(16)
        self.base_url, self.api_key = f"{base_url}/s/{self.name}/v1", api_key
        self.limits, self.forget, self.closed = limits, forget, False
        self.replies: dict[str, RecordedReply] = {}  # by the name of the turn, in the order in which they were given
        self.lock = threading.Lock()

    def check(self) -> None:
        """Raise ChatError where no more calls are recorded."""
        if len(self.replies) >= self.limits.session_replies:
            raise ChatError(429, f"this session has had its {self.limits.session_replies} replies; end the rollout "
                                 "earlier, or raise session_replies of Limits", None, "session_full", NO_RETRY)

    def record(
        self, body: Mapping[str, Any], choices: list[dict[str, Any]], continues: Callable[[str], str | None]
    ) -> None:
        """The client gets these choices. `continues` names the turn that a turn continues."""
        with self.lock:
            if not self.closed:
                for choice in choices:
                    self.add(body["messages"], body.get("tools"), choice, continues(choice["turn"]))

    def add(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, choice: dict[str, Any],
        before: str | None,
    ) -> None:
        parent = self.replies.get(before or "")
        if parent is None:
            conversation, first = RecordedConversation([*messages, choice], tools or None), len(self.replies)
        else:  # what the client sends again of it stands there already, replies as choices
            earlier, first, parent.continued = parent.conversation, parent.first, True
            said = messages[len(earlier.messages_and_choices):]
            conversation = RecordedConversation([*earlier.messages_and_choices, *said, choice], earlier.tools)
        self.replies[choice["turn"]] = RecordedReply(conversation, first)

    def conversations(self) -> list[RecordedConversation]:
        """All that was said, a conversation for each reply that nobody continued; that of the first call is first."""
        with self.lock:
            last = [reply for reply in self.replies.values() if not reply.continued]
            return [reply.conversation for reply in sorted(last, key=lambda reply: reply.first)]

    def close(self) -> None:
        """From now on the session's address answers no more, and nothing is recorded."""
        with self.lock:
            self.closed = True
        self.forget(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.close()


# What the task of a rollout carries with it, so that calls in this process are known to be its own
SESSION: ContextVar[str] = ContextVar("lowmem_grpo_session", default="")  # its name; its turns belong together
RECORDER: ContextVar[Session | None] = ContextVar("lowmem_grpo_recorder", default=None)


class OpenSessions:
    """The sessions that are open. Safe between threads."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.open: dict[str, Session] = {}
        self.lock = threading.Lock()

    def add(self, session: Session) -> None:
        with self.lock:
            if len(self.open) >= self.limits.sessions:
                raise RuntimeError(f"{len(self.open)} sessions are open, and no more may be: end each with its rollout "
                                   "(`with endpoint.session() as session:`), or raise sessions of Limits")
            self.open[session.name] = session

    def forget(self, name: str) -> None:
        self.open.pop(name, None)

    def find(self, name: str | None) -> Session | None:
        """The session of a request; None of one that names none. Raises ChatError where there is no such."""
        if name is None:
            return None
        session = self.open.get(name)
        if session is None:
            raise ChatError(404, "there is no such session, or it has ended: use the base_url of one that is open",
                            None, "session_not_found")
        session.check()
        return session
