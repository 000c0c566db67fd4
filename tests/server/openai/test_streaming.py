"""Replies that are sent while they are sampled. The engine takes a step only where a test lets it, so what has arrived
while it waits was sent before the end, on a machine of any speed."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from random_talks import SCHEMAS
from scripted_chat import begun, client_of, until
from served import TypingEngine, chat_over, scripted_worker

from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.local_run import client_of as client_in_process
from lowmem_grpo.server.openai.chat_handler import ChatHandler

ASKED: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = "Guten Tag: 東京 is é 😀, and on it goes."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
MANY = 1000


@pytest.fixture
def engine() -> TypingEngine:
    return TypingEngine(lambda prompt: TEXT)


@pytest.fixture
def chat(engine: TypingEngine) -> Iterator[ChatHandler]:
    worker = scripted_worker(context=1000)
    worker.engine = engine  # type: ignore[assignment]
    yield chat_over(worker)
    engine.steps.release(MANY)
    worker.close()


@pytest.fixture
def endpoint(chat: ChatHandler) -> Iterator[AgentEndpoint]:
    with AgentEndpoint(chat) as endpoint:
        yield endpoint


def ask(served: Any, **fields: Any) -> Any:
    return client_of(served).chat.completions.create(**ASKED | fields)


def opened(engine: TypingEngine, served: Any, **fields: Any) -> Any:
    """A stream whose first token is there: before, nothing is sent, as the call may yet be refused."""
    turns = len(engine.turns) + 1
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, served, stream=True, **fields)
        until(lambda: len(engine.turns) == turns)
        engine.steps.release()
        return asking.result(60)


def read(chunks: Any, wanted: str) -> None:
    """Read until this text has come, and nothing else."""
    got = ""
    while got != wanted:
        got += next(chunks).choices[0].delta.content or ""
        assert wanted.startswith(got)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_text_reaches_the_client_while_the_engine_waits_between_two_tokens(
    engine: TypingEngine, endpoint: AgentEndpoint
) -> None:
    with opened(engine, endpoint) as chunks:
        ids, whole = engine.tokenizer(TEXT, add_special_tokens=False).input_ids, 0
        for number in range(1, len(ids)):
            said = engine.tokenizer.decode(ids[:number]).rstrip("�")
            read(chunks, said[whole:])
            whole = len(said)
            engine.steps.release()
        engine.steps.release(MANY)
        rest = list(chunks)
    assert TEXT.endswith(text_of(rest)) and [chunk.choices[0].finish_reason for chunk in rest][-1] == "stop"


def test_a_stream_is_the_reply_in_pieces_by_index_with_its_logprobs_and_usage(
    engine: TypingEngine, chat: ChatHandler, endpoint: AgentEndpoint
) -> None:
    engine.steps.release(MANY)
    asked = {"n": 3, "logprobs": True, "seed": 3}
    whole = ask(endpoint, **asked)
    chunks = list(ask(endpoint, stream=True, stream_options={"include_usage": True}, **asked))
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage == whole.usage
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and "role" not in mine[1].delta.model_fields_set
        assert "".join(one.delta.content or "" for one in mine) == whole.choices[index].message.content == TEXT
        told = [entry for one in mine if one.logprobs for entry in one.logprobs.content]
        assert told == whole.choices[index].logprobs.content
        assert chat.turn(mine[-1].turn).text == TEXT


def test_choices_come_side_by_side(engine: TypingEngine, endpoint: AgentEndpoint) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, endpoint, stream=True, n=3)
        until(lambda: len(engine.turns) == 3)
        engine.steps.release(2)
        with asking.result(60) as chunks:
            begun_ones = {next(chunks).choices[0].index for _ in range(6)}
            engine.steps.release(MANY)
            assert begun_ones == {0, 1, 2} and all(chunk.choices[0].index < 3 for chunk in chunks)


def test_a_plain_prompt_is_streamed_with_its_logprobs_and_their_places(
    engine: TypingEngine, endpoint: AgentEndpoint
) -> None:
    engine.steps.release(MANY)
    asked: Any = {"model": "agent", "prompt": ["a b", "c d"], "max_tokens": 50, "logprobs": 0}
    create = client_of(endpoint).completions.create
    whole, chunks = create(**asked), list(create(stream=True, **asked))
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(one.text for one in mine) == TEXT
        for name in ("tokens", "token_logprobs", "text_offset"):
            told = [value for one in mine for value in getattr(one.logprobs, name)]
            assert told == getattr(whole.choices[index].logprobs, name), name


def test_text_before_a_tool_call_is_streamed_and_the_call_comes_whole(
    engine: TypingEngine, endpoint: AgentEndpoint
) -> None:
    engine.says = lambda prompt: f"<think>A sum.</think>\n\nLet me add. \n{CALL}"
    with opened(engine, endpoint, tools=SCHEMAS) as chunks:
        said = "<think>A sum.</think>\n\nLet me"
        engine.steps.release(len(engine.tokenizer(said, add_special_tokens=False).input_ids) - 1)
        read(chunks, said)
        engine.steps.release(MANY)
        rest = list(chunks)
    whole = ask(endpoint, tools=SCHEMAS).choices[0].message
    assert said + text_of(rest) == whole.content == "<think>A sum.</think>\n\nLet me add."
    (call,) = [call for chunk in rest for call in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "add", {"a": 1, "b": 2})
    assert rest[-1].choices[0].finish_reason == "tool_calls"


def test_a_mark_of_a_call_that_does_not_come_is_text(engine: TypingEngine, endpoint: AgentEndpoint) -> None:
    engine.steps.release(MANY)
    for said in ("a <tool", f"{CALL} and more", "<tool_call>\n{not json", "a <b> c  "):
        engine.says = lambda prompt, said=said: said  # type: ignore[misc]
        whole = ask(endpoint, tools=SCHEMAS).choices[0].message
        assert text_of(ask(endpoint, tools=SCHEMAS, stream=True)) == (whole.content or "")


def test_nothing_of_a_stop_string_is_sent_though_its_tokens_are(engine: TypingEngine, endpoint: AgentEndpoint) -> None:
    engine.says = lambda prompt: "one two th"
    with opened(engine, endpoint, stop=[" three", "zero"]) as chunks:
        engine.steps.release(len(engine.tokenizer("one two th", add_special_tokens=False).input_ids) - 1)
        read(chunks, "one two")
        engine.steps.release(MANY)
        assert text_of(chunks) == " th", "what might have become it comes with the end"


def test_two_clients_read_side_by_side_and_one_that_reads_nothing_holds_nobody(
    engine: TypingEngine, endpoint: AgentEndpoint
) -> None:
    texts = [engine.tokenizer.decode(engine.tokenizer(TEXT).input_ids[:number]) for number in range(4)]
    with opened(engine, endpoint) as one, opened(engine, endpoint) as other:
        read(one, texts[2])
        read(other, texts[1])
        deaf = begun(endpoint.base_url, endpoint.api_key, stream=True, **ASKED)
        until(lambda: len(engine.turns) == 3)
        engine.steps.release()
        read(one, texts[3][len(texts[2]):])
        read(other, texts[2][len(texts[1]):])
        engine.steps.release(MANY)
        assert texts[3] + text_of(one) == texts[2] + text_of(other) == TEXT
    deaf.close()


def test_a_client_that_goes_away_ends_its_sampling_and_no_other(engine: TypingEngine, endpoint: AgentEndpoint) -> None:
    def places() -> int:
        (slots,) = endpoint.completions.slots.values()  # of the one key
        return int(slots.borrowed_tokens)

    with ThreadPoolExecutor(1) as pool:
        try:
            with opened(engine, endpoint) as chunks:
                assert next(iter(chunks)).choices[0].delta.role == "assistant"
                stays = pool.submit(lambda: text_of(ask(endpoint, stream=True)))
                until(lambda: places() == 2)
            until(lambda: places() == 1)
        finally:  # or the pool would wait for ever
            engine.steps.release(MANY)
        assert stays.result(60) == TEXT
    assert len(engine.ended) == 1


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error(
    engine: TypingEngine, endpoint: AgentEndpoint
) -> None:
    with opened(engine, endpoint) as chunks:
        assert next(chunk for chunk in chunks if chunk.choices[0].delta.content)
        engine.breaks.append(OSError("the card is gone"))
        engine.steps.release()
        with pytest.raises(openai.APIError, match="OSError: the card is gone"):
            list(chunks)


def test_a_turn_that_had_to_be_sampled_anew_and_differs_ends_the_stream_with_an_error(
    engine: TypingEngine, endpoint: AgentEndpoint
) -> None:
    with opened(engine, endpoint) as chunks:
        assert next(chunk for chunk in chunks if chunk.choices[0].delta.content)
        engine.anew = "Something else"
        engine.steps.release(MANY)
        with pytest.raises(openai.APIError, match="does not begin as was sent"):
            list(chunks)


def test_the_client_in_this_process_reads_while_tokens_are_sampled(engine: TypingEngine, chat: ChatHandler) -> None:
    client = client_in_process(chat)

    async def read() -> list[str]:
        async with await started() as chunks:
            got = [chunk.choices[0].delta.content async for chunk in first_of(chunks)]
            engine.steps.release(MANY)
            return [*got, *[chunk.choices[0].delta.content or "" async for chunk in chunks]]

    async def started() -> Any:
        engine.steps.release(2)
        return await client.chat.completions.create(**ASKED, stream=True)

    async def first_of(chunks: Any) -> Any:
        async for chunk in chunks:
            yield chunk
            if chunk.choices[0].delta.content:
                return

    assert "".join(asyncio.run(read())) == TEXT


def test_a_stream_of_this_process_that_is_left_ends_its_sampling(engine: TypingEngine, chat: ChatHandler) -> None:
    async def leave() -> None:
        engine.steps.release()
        async with await client_in_process(chat).chat.completions.create(**ASKED, stream=True):
            pass

    asyncio.run(leave())
    engine.steps.release(2)
    until(lambda: bool(engine.ended))
    assert not chat.histories.held
