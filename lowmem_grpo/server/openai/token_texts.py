"""`TokenTexts`: the text and bytes of tokens, and the log-probabilities of a reply in OpenAI's two forms."""

import re
import threading
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lowmem_grpo.data.prompt_inputs import text_ids
from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.types import Turn

BYTES = {letter: number for number, letter in bytes_to_unicode().items()}  # bytes by letter in byte-level vocabularies
ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The texts of a tokenizer's tokens, for replies. `encode` is thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.by_bytes = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.added = set(tokenizer.added_tokens_decoder)
        self.lock = threading.Lock()

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

    def logprobs(self, turn: Turn, likeliest: list[dict[int, Logprob]] | None, count: int) -> dict[str, Any]:
        """Return OpenAI's logprobs of the sampled tokens, with the `count` likeliest tokens at each position."""
        content = []
        for place, (token, logprob) in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True)):
            others = [] if likeliest is None else [
                self.entry(other, likely.logprob) for other, likely in likeliest[place].items() if likely.rank <= count]
            content.append(self.entry(token, logprob) | {
                "top_logprobs": sorted(others, key=lambda entry: -entry["logprob"])[:count]})
        return {"content": content, "refusal": None}


def older_logprobs(content: list[dict[str, Any]], with_others: bool) -> dict[str, Any]:
    """Return logprobs in the form of OpenAI's older API; `with_others` adds the likeliest tokens."""
    tokens = [entry["token"] for entry in content]
    others = [{other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in content]
    return {"tokens": tokens, "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": others if with_others else None,
            "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))]}
