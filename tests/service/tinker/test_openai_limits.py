"""Requests over OpenAI's routes count among those of their key, for as long as somebody waits for them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import openai
import pytest
from served import OTHER, Serving, serving

from lowmem_grpo.service.allowance import Allowance, Allowances

SAYS: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Its owner may have two requests at a time, and others as many as usual."""
    allowances = Allowances(Allowance(), {"owner": Allowance(requests=2)})
    with serving(tmp_path_factory.mktemp("server"), context=512, allowances=allowances) as made:
        yield made


@pytest.fixture
def client(served: Serving) -> Iterator[openai.OpenAI]:
    with closing(served.openai()) as made:
        yield made


@contextmanager
def held_up(served: Serving) -> Iterator[None]:
    """Inside, the desk does something else."""
    gate = threading.Event()
    served.model.desk.run(gate.wait)
    try:
        yield
    finally:
        gate.set()


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=SAYS, max_tokens=2, **more)


def text(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=2, **more)


def counts(served: Serving, wanted: int) -> bool:
    """Whether the owner soon has so many requests that are not answered."""
    until = time.monotonic() + 20
    while (found := served.model.training.usage.samples["owner"]) != wanted and time.monotonic() < until:
        time.sleep(0.01)
    return found == wanted


@pytest.mark.parametrize("ask", [chat, text])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_above_the_limit_is_told_to_come_again_and_later_is_taken(
    served: Serving, client: openai.OpenAI, ask: Callable[..., Any], stream: bool
) -> None:
    with closing(served.openai(OTHER)) as other, held_up(served):
        waiting = [threading.Thread(target=ask, args=(client,)) for _ in range(2)]
        for one in waiting:
            one.start()
        assert counts(served, 2)
        with pytest.raises(openai.RateLimitError, match="requests: 2 of this key are not answered") as told:
            ask(client, stream=stream)
        assert told.value.type == "rate_limit_error" and told.value.code == "rate_limit_exceeded"
        assert told.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APITimeoutError):  # it was taken, and waits
            ask(other, stream=stream, timeout=0.2)
    for one in waiting:
        one.join(20)
    assert counts(served, 0)
    found = ask(client, stream=stream)
    assert list(found) if stream else found.choices
    assert counts(served, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_is_counted_no_more(
    served: Serving, client: openai.OpenAI, stream: bool
) -> None:
    def leave() -> None:
        with pytest.raises(openai.APITimeoutError):
            chat(client, stream=stream, timeout=0.5)

    with held_up(served):
        leaves = threading.Thread(target=leave)
        leaves.start()
        assert counts(served, 1)
        leaves.join()
        assert counts(served, 0)


def test_a_client_that_leaves_in_the_middle_of_a_stream_is_counted_no_more(
    served: Serving, client: openai.OpenAI
) -> None:
    chunks = text(client, n=128, logprobs=2, stream=True)  # each choice takes a pass of its own, one after another
    next(iter(chunks))
    assert counts(served, 1)
    chunks.close()
    assert counts(served, 0)


def test_a_request_that_is_refused_is_counted_no_more(served: Serving, client: openai.OpenAI) -> None:
    for _ in range(3):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt="a")
    assert counts(served, 0)
