"""`TokenTexts`: the text and bytes of tokens, the log-probabilities of a reply in OpenAI's two forms, and what a
tokenizer says about requests: texts that are too long for it, and options of its chat template."""

import inspect
import re
import threading
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any

from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lowmem_grpo.data.prompt_inputs import text_ids
from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.models.template_trial import language
from lowmem_grpo.server.requests import ChatError

BYTES = {letter: number for number, letter in bytes_to_unicode().items()}  # bytes by letter in byte-level vocabularies
NOT_A_CLIENTS = {"messages", "raise_exception", "strftime_now",
                 *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
MOST_KWARGS = 4096  # characters of a request's template options
ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The texts of a tokenizer's tokens, for replies. `encode` is thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.by_bytes = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.added = set(tokenizer.added_tokens_decoder)
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)  # most characters of a token
        self.lock = threading.Lock()

    def check_size(self, body: Mapping[str, Any], field: str, context: int) -> None:
        """Raise ChatError for a text that cannot fit the context, however well it is encoded."""
        prompt = body.get(field)
        texts = [prompt] if field == "messages" or not isinstance(prompt, list) else prompt
        for value in (*texts, body.get("tools")):
            if (size := letters(value)) > context * self.longest:
                raise ChatError(
                    400, f"This model's maximum context length is {context} tokens. However, your request has a text "
                    f"of {size} characters, and a token has at most {self.longest}. Please reduce the length of the "
                    f"{field}", "tools" if value is body.get("tools") else field, "context_length_exceeded")

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables of the chat template that a request may set."""
        held = self.tokenizer.chat_template or ""
        read = [find_undeclared_variables(language().parse(source))
                for source in (held.values() if isinstance(held, dict) else [held])]
        return frozenset(set().union(*read) - {*NOT_A_CLIENTS, *self.tokenizer.special_tokens_map})

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ChatError for options of the chat template that a request may not set, or that are very long."""
        for name in sorted(kwargs.keys() - self.variables):
            why = ("is not a client's to choose" if name in NOT_A_CLIENTS
                   else "the model's chat template does not read")
            raise ChatError(400, f"chat_template_kwargs has {name[:80]}, which {why}; leave it out. It reads "
                                 f"{', '.join(sorted(self.variables)) or 'none'}", "chat_template_kwargs")
        if letters(kwargs) > MOST_KWARGS:
            raise ChatError(400, f"chat_template_kwargs has {letters(kwargs)} characters; it may have {MOST_KWARGS}",
                            "chat_template_kwargs")

    def encode(self, text: str) -> list[int]:
        with self.lock:
            return text_ids(self.tokenizer, text)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be part of a UTF-8 character."""
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")  # padding entries of the vocabulary have none
        if self.by_bytes and token not in self.added and all(letter in BYTES for letter in piece):
            return bytes(BYTES[letter] for letter in piece)
        match = ONE_BYTE.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else str(self.tokenizer.decode([token])).encode()

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.bytes_of(token)
        return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, -9999.0)}

    def logprobs(self, ids: list[int], logprobs: list[float], likeliest: list[dict[int, Logprob]] | None = None,
                 count: int = 0) -> dict[str, Any]:
        """Return OpenAI's logprobs of sampled tokens, with the `count` likeliest tokens at each position."""
        content = []
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            others = [] if likeliest is None else [
                self.entry(other, likely.logprob) for other, likely in likeliest[place].items() if likely.rank <= count]
            content.append(self.entry(token, logprob) | {
                "top_logprobs": sorted(others, key=lambda entry: -entry["logprob"])[:count]})
        return {"content": content, "refusal": None}


def letters(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value, and 1 for each other value: a template writes at
    least one for it."""
    if isinstance(value, Mapping):
        return 1 + sum(letters(name) + letters(inner) for name, inner in value.items())
    if isinstance(value, str):
        return len(value)
    return 1 + sum(map(letters, value)) if isinstance(value, list | tuple) else 1


def older_logprobs(content: list[dict[str, Any]], with_others: bool, start: int = 0) -> dict[str, Any]:
    """Return logprobs in the form of OpenAI's older API; `with_others` adds the likeliest tokens. The first token is at
    the character `start`."""
    tokens = [entry["token"] for entry in content]
    others = [{other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in content]
    return {"tokens": tokens, "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": others if with_others else None,
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=start))[:len(tokens)]}
