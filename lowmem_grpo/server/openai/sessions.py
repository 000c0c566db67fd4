"""Sessions: one address per rollout, which records the rollout's calls as conversations."""

import secrets
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

from lowmem_grpo.server.requests import NO_RETRY, ChatError, Limits


@dataclass
class RecordedConversation:
    """The messages of a conversation, up to one of the policy's replies."""

    messages_and_choices: list[dict[str, Any]]  # policy replies are OpenAI choices with their `turn`
    tools: list[dict[str, Any]] | None = None


@dataclass(eq=False)
class RecordedReply:
    """A choice that a client received, with the conversation that it ends."""

    conversation: RecordedConversation
    first: int  # index, within the session, of the conversation's first reply
    continued: bool = False


class Session:
    """Records one rollout's calls to `base_url`. Thread-safe. After `close`, or the end of `with`, the address answers
    no more, and the records stay readable. Replies that did not reach the client are not recorded."""

    def __init__(self, base_url: str, api_key: str, limits: Limits, forget: Callable[[str], None]) -> None:
        self.name = secrets.token_urlsafe(16)
        self.base_url, self.api_key = f"{base_url}/s/{self.name}/v1", api_key
        self.limits, self.forget, self.closed = limits, forget, False
        self.replies: dict[str, RecordedReply] = {}  # by turn name, in the order of the replies
        self.lock = threading.Lock()

    def check(self) -> None:
        """Raise ChatError if the session has reached its limit of replies."""
        if len(self.replies) >= self.limits.session_replies:
            raise ChatError(429, f"this session has had its {self.limits.session_replies} replies; end the rollout "
                                 "earlier, or raise session_replies of Limits", None, "session_full", NO_RETRY)

    def record(
        self, body: Mapping[str, Any], choices: list[dict[str, Any]], continues: Callable[[str], str | None]
    ) -> None:
        """Record the choices of a reply. `continues` maps a turn's name to the name of the turn that it continues."""
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
        else:  # keep the recorded beginning, which has replies as choices
            earlier, first, parent.continued = parent.conversation, parent.first, True
            said = messages[len(earlier.messages_and_choices):]
            conversation = RecordedConversation([*earlier.messages_and_choices, *said, choice], earlier.tools)
        self.replies[choice["turn"]] = RecordedReply(conversation, first)

    def conversations(self) -> list[RecordedConversation]:
        """Return one conversation per reply that no call continued, in the order of their first replies."""
        with self.lock:
            last = [reply for reply in self.replies.values() if not reply.continued]
            return [reply.conversation for reply in sorted(last, key=lambda reply: reply.first)]

    def close(self) -> None:
        """Stop answering at the session's address, and stop recording."""
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


# Context variables of a rollout's task, by which in-process calls are assigned to the rollout
SESSION: ContextVar[str] = ContextVar("lowmem_grpo_session", default="")  # the session's name
RECORDER: ContextVar[Session | None] = ContextVar("lowmem_grpo_recorder", default=None)


class OpenSessions:
    """The open sessions by name. Thread-safe."""

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
        """Return the session of this name; None if `name` is None. ChatError if it is unknown, closed or full."""
        if name is None:
            return None
        session = self.open.get(name)
        if session is None:
            raise ChatError(404, "there is no such session, or it has ended: use the base_url of one that is open",
                            None, "session_not_found")
        session.check()
        return session
