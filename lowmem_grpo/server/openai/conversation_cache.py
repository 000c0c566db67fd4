"""`ConversationCache`: the sampled turns by name. If a request's messages continue a cached turn, the prompt is that
turn's tokens and then the tokens of the new messages: sampled text is never tokenized again."""

import copy
import hashlib
import itertools
import json
import logging
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.renderer import Renderer
from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.forms import Reads, parser_of
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.types import ImageToken, Message, Turn

logger = logging.getLogger(__name__)

DIALECTS = 64  # most dialects in memory


@dataclass(frozen=True)
class Dialect:
    """The renderer and the tool-call parser for one set of tools and chat template options."""

    key: bytes
    renderer: Renderer
    parser: Reads | None

    def reader(self, calls: bool) -> Reads | Renderer | None:
        """Return what reads completions, with or without tool calls; None if a completion is its text."""
        return (self.parser if calls else None) or (self.renderer if self.renderer.channels else None)


@dataclass(eq=False)
class CachedTurn:
    """A sampled turn, stored without the tokens of its parent."""

    name: str
    number: int
    key: int  # the engine's number for the conversation
    session: str
    digest: bytes  # hash of all messages up to and including this turn
    parent: "CachedTurn | None"
    context: array | list[int]  # (B,) prompt tokens after the parent's tokens; a list if they have images
    completion: array  # (C,)
    logprobs: array  # (C,) float64
    rest: Turn  # the turn without tokens and logprobs
    continued: int = 0  # requests that continue this turn, including those still being sampled

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.completion)

    def line(self) -> "Iterator[CachedTurn]":
        """Yield this turn, its parent, and so on to the first turn."""
        held: CachedTurn | None = self
        while held is not None:
            yield held
            held = held.parent

    def ids(self) -> list[int]:
        """Return all tokens from the conversation's start to the end of this turn."""
        pieces = [piece for held in self.line() for piece in (held.completion, held.context)]
        return [token for piece in reversed(pieces) for token in piece]

    def turn(self) -> Turn:
        prompt = (self.parent.ids() if self.parent else []) + [*self.context]
        return replace(self.rest, prompt_ids=prompt, completion_ids=self.completion.tolist(),
                       logprobs=self.logprobs.tolist())


@dataclass(eq=False)
class PromptState:
    """A request's prompt as tokens, and the state that is needed to cache its completions."""

    ids: list[int]  # (P,)
    key: int
    session: str
    digest: bytes
    dialect: Dialect
    parent: CachedTurn | None  # the turn whose tokens are the prefix of `ids`
    open: bool = field(default=True, repr=False)  # false after `ConversationCache.close_prompt`


class ConversationCache:
    """A thread-safe LRU cache of sampled turns, bounded by `max_turns` turns and `max_tokens` tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 8_000_000, max_turns: int = 50_000,
        template_kwargs: Mapping[str, Any] | None = None, keys: Iterator[int] | None = None,
    ) -> None:
        """`template_kwargs` are defaults for requests. `keys` yields conversation numbers for a worker's caches."""
        self.max_tokens, self.max_turns = max_tokens, max_turns
        self.tokenizer = copy.deepcopy(tokenizer)  # it keeps the options of its last call
        self.template_kwargs = dict(template_kwargs or {})
        self.dialects: OrderedDict[bytes, Dialect] = OrderedDict()
        self.lock, self.numbers = threading.RLock(), itertools.count()
        self.rendering = threading.RLock()  # taken before `lock`, for longer: the tokenizer does one thing at a time
        self.keys = itertools.count() if keys is None else keys
        self.mark = secrets.token_hex(3)  # in each name, so that names of another process are unknown here
        self.held: OrderedDict[str, CachedTurn] = OrderedDict()  # least recently used first; a turn before its parent
        self.ends: dict[bytes, list[CachedTurn]] = {}  # by digest
        self.tokens = 0
        self.said: set[str] = set()  # warnings that were logged once already

    def open_prompt(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, session: str = "",
        model: str = "", template_kwargs: Mapping[str, Any] | None = None, turn: str = "",
    ) -> PromptState:
        """Return the prompt of messages in plain form (see request.py); call `close_prompt` afterwards. If the last
        assistant message matches cached turns of this `model`, the prompt extends one. Preferred are, in this order,
        the turn named `turn`, turns of the same session, turns not yet continued, newer ones. RendererError if the
        template refuses."""
        with self.rendering:
            dialect = self.dialect_for(tools, template_kwargs)
            said = digests([model, dialect.key.decode()], messages)
            parent, ids = self.prompt(dialect, messages, said, session, turn)
        with self.lock:
            fresh = parent is None or parent.continued > 0
            key = next(self.keys) if fresh or parent is None else parent.key
            if parent is not None:
                parent.continued += 1
            return PromptState(ids, key, session, said[-1], dialect, parent)

    def close_prompt(self, opening: PromptState, kept: bool) -> None:
        """Close an opened prompt. Unless its turns were `kept`, it no longer counts as a continuation of its parent."""
        with self.lock:
            if opening.open and not kept and opening.parent is not None:
                opening.parent.continued -= 1
            opening.open = False

    def keep(self, opening: PromptState, turn: Turn, message: Message, key: int | None = None) -> str:
        """Cache a turn sampled for an opened prompt; `message` is the answer in plain form. Returns the turn's name."""
        with self.lock:
            number = next(self.numbers)
            before = 0 if opening.parent is None else len(opening.parent.ids())
            context = turn.prompt_ids[before:]
            held = CachedTurn(
                f"turn-{self.mark}-{number}", number, opening.key if key is None else key, opening.session,
                longer(opening.digest, message), opening.parent,
                context if ImageToken in map(type, context) else array("i", context), array("i", turn.completion_ids),
                array("d", turn.logprobs), replace(turn, prompt_ids=[], completion_ids=[], logprobs=[]),
            )
            self.use(held)
            self.shrink(held)
            return held.name

    def read(self, reader: Reads | Renderer | None, turn: Turn) -> Reading:
        with self.rendering:
            return reader.read(turn.completion_ids, turn.text) if reader else Reading(turn.text)

    def turn(self, name: str) -> Turn | None:
        with self.lock:
            held = self.held.get(name)
            if held is None:
                return None
            self.use(held)
            return held.turn()

    def parent(self, name: str) -> str | None:
        with self.lock:
            held = self.held.get(name)
            return held.parent.name if held is not None and held.parent is not None else None

    def find(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, models: Collection[str] = (),
        taken: Collection[str] = (),
    ) -> list[str | None]:
        """Return the name of the cached turn that each message in plain form matches, or None. Only turns of `models`
        are searched. If several match, turns that are not `taken` are preferred, then the newest."""
        with self.rendering, self.lock:
            key = self.dialect_for(tools).key.decode()
            chains = [digests([model, key], messages) for model in models]
            candidates = [[turn for chain in chains for turn in self.ends.get(chain[at + 1], [])]
                          if message["role"] == "assistant" else [] for at, message in enumerate(messages)]
            best = [max(turns, key=lambda turn: (turn.name not in taken, turn.number), default=None)
                    for turns in candidates]
            last = next((turn for turn in reversed(best) if turn is not None), None)
            line = {turn.digest: turn for turn in last.line()} if last is not None else {}
            return [None if turn is None else line.get(turn.digest, turn).name for turn in best]

    # Prompts

    def dialect_for(
        self, tools: list[dict[str, Any]] | None, template_kwargs: Mapping[str, Any] | None = None
    ) -> Dialect:
        """Return the dialect of `tools`. RendererError without a chat template, ToolFormError if the template does not
        render tool calls."""
        kwargs = self.template_kwargs | dict(template_kwargs or {})
        key = canonical([tools or None, kwargs])
        if key not in self.dialects:
            parser = parser_of(self.tokenizer, tools, None, kwargs) if tools else None
            self.dialects[key] = Dialect(key, Renderer(self.tokenizer, tools, kwargs), parser)
        self.dialects.move_to_end(key)
        while len(self.dialects) > DIALECTS:
            self.dialects.popitem(last=False)
        return self.dialects[key]

    def prompt(
        self, dialect: Dialect, messages: Sequence[Message], said: list[bytes], session: str, turn: str
    ) -> tuple[CachedTurn | None, list[int]]:
        """Return the cached turn that the messages continue (or None), and the prompt's token ids."""
        last = next((at for at in reversed(range(len(messages))) if messages[at]["role"] == "assistant"), -1)
        with self.lock:
            candidates = self.ends.get(said[last + 1], []) if 0 <= last < len(messages) - 1 else []
            parent = max(candidates, default=None, key=lambda held: (
                held.name == turn, bool(session) and held.session == session, not held.continued, held.number))
            if parent is not None:
                self.use(parent)
        if parent is None:
            return None, self.rendered(dialect, messages)
        before = parent.ids()
        rest = list(messages[last + 1:])
        try:
            ended = dialect.renderer.closed(parent.completion.tolist(), rest)
            return parent, before + dialect.renderer.bridge(rest, ended)
        except RendererError as error:
            log = logger.debug if "anew" in self.said else logger.warning
            log("a conversation is rendered anew, and a sequence of its own begins: %s", error)
            self.said.add("anew")
            return None, self.rendered(dialect, messages)

    def rendered(self, dialect: Dialect, messages: Sequence[Message]) -> list[int]:
        """Return all messages as tokens. Only the leading system messages may contain the template's special tokens."""
        trusted = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
        return dialect.renderer.first(messages, trusted)

    # The cache

    def use(self, held: CachedTurn) -> None:
        """Mark a turn and then its ancestors as used, so that a parent is never evicted before a turn that needs it."""
        for turn in held.line():
            if turn.name not in self.held:
                self.held[turn.name] = turn
                self.ends.setdefault(turn.digest, []).append(turn)
                self.tokens += turn.tokens
            self.held.move_to_end(turn.name)

    def shrink(self, newest: CachedTurn) -> None:
        """Evict the least recently used turns until the limits hold, and warn if that evicts the `newest` itself."""
        while self.held and (len(self.held) > self.max_turns or self.tokens > self.max_tokens):
            name, gone = self.held.popitem(last=False)
            self.tokens -= gone.tokens
            same = self.ends[gone.digest]
            same.remove(gone)
            if not same:
                del self.ends[gone.digest]
            if gone is newest and "long" not in self.said:
                self.said.add("long")
                logger.warning("a conversation alone is longer than the %s tokens or %s turns that are held, so %s "
                               "cannot be trained; hold more: max_tokens, max_turns of the ConversationCache",
                               self.max_tokens, self.max_turns, name)


def digests(root: Any, messages: Sequence[Message]) -> list[bytes]:
    """Return the digests of all prefixes of a conversation, from the empty one to all N messages: N + 1 digests."""
    chain = [hashlib.blake2b(canonical(root), digest_size=16).digest()]
    for message in messages:
        chain.append(longer(chain[-1], message))
    return chain


def longer(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation extended by one message, whose content names its images."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    name = message.get("name") if message["role"] == "tool" else None
    said = canonical([message["role"], name, message["content"], calls])
    return hashlib.blake2b(said, key=before, digest_size=16).digest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
