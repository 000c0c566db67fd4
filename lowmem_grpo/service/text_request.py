"""`TextRequest`: the body of a request for completions of plain prompts, read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.fields import MOST_TEXTS, OF_TEXT, REFUSED_OF_TEXT, check
from lowmem_grpo.service.messages import shown
from lowmem_grpo.service.request import sampling_of, stream_usage

USUAL_TOKENS = 16  # of a completion, as OpenAI's interface has it


@dataclass(frozen=True)
class TextRequest:
    """What is asked for. Every prompt gets `n` completions."""

    model: str
    prompts: list[str | list[int]]
    n: int
    max_tokens: int | None
    seed: int | None
    sampling: dict[str, Any]  # temperature, top_p, top_k, min_p, stop
    top_logprobs: int | None  # None: no log-probabilities
    stream: bool
    stream_usage: bool
    token_ids: bool

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "TextRequest":
        """Read a body. ChatError for a field that is unknown, not supported or not within its range."""
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            check(name, value, OF_TEXT, REFUSED_OF_TEXT)
        for name in ("model", "prompt"):
            if name not in given:
                raise ChatError(400, f"{name} is missing; a request has model and prompt", name)
        prompts, n = prompts_of(given["prompt"]), given.get("n", 1)
        if len(prompts) * n > MOST_TEXTS:
            raise ChatError(400, f"{len(prompts)} prompts with n={n} ask for {len(prompts) * n} completions; at most "
                                 f"{MOST_TEXTS} are made for a request", "prompt", "invalid_value")
        return cls(
            model=given["model"], prompts=prompts, n=n, max_tokens=given.get("max_tokens", USUAL_TOKENS),
            seed=given.get("seed"), sampling=sampling_of(given), top_logprobs=given.get("logprobs"),
            stream=given.get("stream", False), stream_usage=stream_usage(given),
            token_ids=given.get("return_token_ids", False),
        )


def prompts_of(given: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and is_ids(given):
        return [given]
    if not isinstance(given, list) or not given:
        raise wrong("prompt", given)
    for place, one in enumerate(given):
        if not isinstance(one, str) and not is_ids(one):
            raise wrong(f"prompt[{place}]", one)
    return given


def is_ids(given: Any) -> bool:
    """Whether it is a list of token ids."""
    return isinstance(given, list) and all(type(one) is int for one in given)


def wrong(place: str, given: Any) -> ChatError:
    return ChatError(400, f"{place} is {shown(given)}; a prompt is a text or a list of token ids, and several are a "
                          "list of these", "prompt", "invalid_value")
