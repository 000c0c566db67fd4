"""Requests over OpenAI's routes count among those of their key, for as long as somebody waits for them."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from scripted_chat import begun, until
from served import MODEL, OTHER, OWNER, Serving

from lowmem_grpo.server.users import Allowance

SAYS: list[Any] = [{"role": "user", "content": "Hello"}]
# the owner may have two requests at a time, and others as many as usual
SERVED = {"context": 512, "allowances": defaultdict(Allowance, owner=Allowance(requests=2))}


@pytest.fixture
def client(served: Serving) -> Iterator[openai.OpenAI]:
    with closing(served.openai()) as made:
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=SAYS, max_tokens=2, **more)


def text(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, **more)


def counts(served: Serving, wanted: int) -> None:
    """Wait until the owner has so many requests that are not answered."""
    until(lambda: served.model.training.usage.sampling_requests["owner"] == wanted)


@pytest.mark.parametrize("ask", [chat, text])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_above_the_limit_is_told_to_come_again_and_later_is_taken(
    served: Serving, client: openai.OpenAI, ask: Callable[..., Any], stream: bool
) -> None:
    with closing(served.openai(OTHER)) as other, served.held_up():
        waiting = [threading.Thread(target=ask, args=(client,)) for _ in range(2)]
        for one in waiting:
            one.start()
        counts(served, 2)
        with pytest.raises(openai.RateLimitError, match="requests: 2 of this key are not answered") as told:
            ask(client, stream=stream)
        assert told.value.type == "rate_limit_error" and told.value.code == "rate_limit_exceeded"
        assert told.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APITimeoutError):  # it was taken, and waits
            ask(other, stream=stream, timeout=httpx.Timeout(60, read=0.1))
    for one in waiting:
        one.join(60)
    counts(served, 0)
    found = ask(client, stream=stream)
    assert list(found) if stream else found.choices
    counts(served, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_is_counted_no_more(served: Serving, stream: bool) -> None:
    with served.held_up():
        leaves = begun(f"{served.url}/v1", OWNER, model=MODEL, messages=SAYS, max_tokens=2, stream=stream)
        counts(served, 1)
        leaves.close()
        counts(served, 0)


def test_a_request_that_is_refused_is_counted_no_more(served: Serving, client: openai.OpenAI) -> None:
    for _ in range(3):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt="a")
    counts(served, 0)
