"""Requests and replies in OpenAI's shape."""

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from random_talks import SCHEMAS
from served import chat_over, scripted_worker
from tables import every_row

from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.requests import ChatError

HELLO: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture
def chat() -> Iterator[ChatHandler]:
    worker = scripted_worker(lambda prompt: "Good day.", context=1000)
    yield chat_over(worker)
    worker.engine.gate.set()  # type: ignore[union-attr]
    worker.close()


def engine(chat: ChatHandler) -> Any:
    return chat.worker.engine


def asked(chat: ChatHandler, **fields: Any) -> dict[str, Any]:
    return asyncio.run(chat.create(HELLO | fields))


def chunks_of(chat: ChatHandler, **fields: Any) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        return [chunk async for chunk in chat.stream(HELLO | fields)]

    return asyncio.run(read())


def test_a_reply_has_openais_shape_and_names_its_turn(chat: ChatHandler) -> None:
    reply = asked(chat, return_token_ids=True, logprobs=True)
    (choice,) = reply["choices"]
    turn = chat.turn(choice["turn"])
    assert choice["message"] == {"role": "assistant", "content": "Good day.", "refusal": None}
    assert (reply["object"], reply["model"], choice["finish_reason"]) == ("chat.completion", "agent", "stop")
    assert (reply["prompt_token_ids"], choice["token_ids"]) == (turn.prompt_ids, turn.completion_ids)
    told = choice["logprobs"]["content"]
    assert [one["logprob"] for one in told] == turn.logprobs
    assert b"".join(bytes(one["bytes"]) for one in told).decode() == "Good day.<|im_end|>"
    assert reply["usage"] == {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(turn.completion_ids),
                              "total_tokens": len(turn.prompt_ids) + len(turn.completion_ids),
                              "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_letter_of_several_tokens_comes_as_its_bytes(chat: ChatHandler) -> None:
    engine(chat).says = lambda prompt: "\u6771 \U0001f600"
    told = asked(chat, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in told[:-1]).decode() == "\u6771 \U0001f600"
    assert any(one["token"] == "\ufffd" for one in told)


def test_what_a_request_leaves_out_is_drawn_as_in_training_with_all_the_room(chat: ChatHandler) -> None:
    prompt = asked(chat)["usage"]["prompt_tokens"]
    for most, expected in ((None, 1000 - prompt), (5, 5), (5000, 1000 - prompt)):
        reply = asked(chat, max_completion_tokens=most)
        assert engine(chat).requests[-1].max_tokens == expected
        assert reply["choices"][0]["finish_reason"] == ("length" if most == 5 else "stop")
    assert {temperature for temperature, _ in engine(chat).rounds} == {1.0}


def test_a_prompt_that_fills_the_context_is_refused_with_the_figures(chat: ChatHandler) -> None:
    with pytest.raises(ChatError, match=r"maximum context length is 1000 tokens\. .*resulted in 2\d\d\d") as caught:
        asked(chat, messages=[{"role": "user", "content": "word " * 1000}])
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert not engine(chat).rounds and not chat.histories.held


def test_choices_have_seeds_of_their_own_and_the_same_ones_again(chat: ChatHandler) -> None:
    for _ in range(2):
        reply = asked(chat, n=3, seed=11)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert len({choice["turn"] for choice in reply["choices"]}) == 3
    seeds = [request.seed for request in engine(chat).requests]
    assert seeds == [11, 12, 13] * 2, "as vLLM's server derives them"


@every_row("fields, words", [
    ({"model": "gpt-4"}, "'gpt-4' is not served here; there are agent"),
    ({"model": None}, "model is missing"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is 'robot'; allowed are system"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\].role is \['user'\]; allowed are system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     r"content\[0\] is a part of the type 'image_url'; only text"),
    ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content is None"),
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, r"messages\[0\] has audio"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
     "only the assistant"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": ["f"]}]}, r"tool_calls\[0\] is 'f'"),
    ({"temperature": -1}, "temperature is -1; it must be greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be"),
    ({"temperature": True}, "temperature is True; it must be"),
    ({"top_p": 0}, "top_p is 0; it must be greater than 0"),
    ({"n": 0}, "n is 0; it must be greater than or equal to 1"),
    ({"n": 129}, "n is 129; it must be less than or equal to 128"),
    ({"max_tokens": 0}, "max_tokens is 0; it must be greater than or equal to 1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "which mean the same"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"stop": [""]}, "stop is .*; it must be a text that is not empty"),
    ({"top_logprobs": 3}, "set logprobs to true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it must be less than or equal to 20"),
    ({"stream_options": {"include_usage": True}}, "set stream to true"),
    ({"stream": True}, "a stream comes from stream"),
    ({"tool_choice": "required"}, "tool_choice is 'required', which is not supported. .*reward the call"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\] is"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, r"tools\[0\] is"),
    ({"tools": [SCHEMAS[0], SCHEMAS[0]]}, "two tools are called 'look'"),
    ({"response_format": {"type": "json_object"}}, "reward it instead"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5, which is not supported"),
    ({"logit_bias": {"5": 10}}, "logit_bias .* not supported"),
    ({"functions": [{"name": "f"}]}, "Use tools and tool_choice"),
    ({"reasoning_effort": "high"}, "chat_template_kwargs"),
    ({"prompt_logprobs": 2}, "prompt_logprobs is 2, which is not supported. .*ask /v1/completions with .* token ids"),
    ({"best_of": 4}, "best_of is not a field that is known here"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has tokenize"),
])
def test_a_field_that_cannot_be_served_is_refused_by_name(
    chat: ChatHandler, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ChatError, match=words) as caught:
        asked(chat, **fields)
    error = caught.value.body()["error"]
    assert caught.value.status == (404 if fields.get("model") else 400)
    assert error["type"] == "invalid_request_error" and error["param"] is not None
    assert not engine(chat).rounds and not chat.worker.waiting.lines


def test_a_field_that_asks_for_what_happens_anyway_is_accepted(chat: ChatHandler) -> None:
    fine = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "store": True, "user": "me",
            "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "response_format": {"type": "text"},
            "tool_choice": "auto", "parallel_tool_calls": True, "top_p": 1, "top_k": -1, "min_p": 0, "stop": None}
    assert asked(chat, **fine)["choices"][0]["message"]["content"] == "Good day."


def test_tool_calls_are_told_and_their_results_continue_the_turn(chat: ChatHandler) -> None:
    engine(chat).says = lambda prompt: "3" if "<tool_response>" in prompt else f"Let me add.\n{CALL}"
    first = asked(chat, tools=SCHEMAS)
    (choice,) = first["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Let me add.")
    assert call["id"].startswith("call_") and call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    second = asked(chat, tools=SCHEMAS, messages=[*HELLO["messages"], message, result])
    turns = [chat.turn(reply["choices"][0]["turn"]) for reply in (first, second)]
    before = turns[0].prompt_ids + turns[0].completion_ids
    assert turns[1].prompt_ids[:len(before)] == before and turns[0].calls == 1
    assert asked(chat, tools=SCHEMAS, tool_choice="none")["choices"][0]["message"]["content"].endswith("</tool_call>")


HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@every_row("tools", [None, SCHEMAS])
@every_row("tool_choice", ["auto", "none"])
def test_the_thoughts_of_gpt_oss_are_told_apart_from_its_answer(tools: Any, tool_choice: str) -> None:
    worker = scripted_worker(lambda prompt: f"{HARMONY}<|channel|>final<|message|>Good day.", template="gptoss")
    chat = chat_over(worker)
    fields = {"tools": tools, "tool_choice": tool_choice}
    first = asked(chat, **fields)["choices"][0]
    assert first["message"] == {"role": "assistant", "content": "Good day.", "refusal": None, "reasoning_content": "hm"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(chat, **fields)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Good day."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    for answer in (first["message"], {"role": "assistant", "content": "Good day."}):  # clients may keep no thoughts
        second = asked(chat, messages=[*HELLO["messages"], answer, {"role": "user", "content": "And?"}], **fields)
        turns = [chat.turn(name) for name in (first["turn"], second["choices"][0]["turn"])]
        before = turns[0].prompt_ids + turns[0].completion_ids
        assert turns[1].prompt_ids[:len(before)] == before
    worker.close()


def test_a_tool_without_parameters_has_none_as_openai_allows(chat: ChatHandler) -> None:
    functions: Any = ({"name": "now"}, {"name": "now", "parameters": {"type": "object", "properties": {}}})
    first, second = (asked(chat, tools=[{"type": "function", "function": function}], return_token_ids=True)
                     for function in functions)
    assert first["prompt_token_ids"] == second["prompt_token_ids"]


def test_calls_beyond_the_first_and_calls_that_cannot_be_read(chat: ChatHandler) -> None:
    engine(chat).says = lambda prompt: f"{CALL}\n{CALL}"
    assert len(asked(chat, tools=SCHEMAS)["choices"][0]["message"]["tool_calls"]) == 2
    assert len(asked(chat, tools=SCHEMAS, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1
    engine(chat).says = lambda prompt: '<tool_call>\n{"name": "add", "argum\n</tool_call>'
    (choice,) = asked(chat, tools=SCHEMAS)["choices"]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"].startswith("<tool_call>")
    assert chat.turn(choice["turn"]).failures == 1  # type: ignore[union-attr]
    deep = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[" * 100_000}}
    history = [{"role": "assistant", "tool_calls": [deep]}, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    with pytest.raises(ChatError, match="maximum context length"):  # a text as any other, too long here
        asked(chat, messages=[*HELLO["messages"], *history])


def test_a_stream_says_the_same_as_a_reply_in_chunks(chat: ChatHandler) -> None:
    engine(chat).says = lambda prompt: f"Let me add.\n{CALL}"
    chunks = chunks_of(chat, tools=SCHEMAS, n=2, logprobs=True, stream_options={"include_usage": True})
    *pieces, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("chat.completion.chunk", last["id"])}
    for index in range(2):
        mine = [one["choices"][0] for one in pieces if one["choices"][0]["index"] == index]
        deltas = [one["delta"] for one in mine]
        assert deltas[0]["role"] == "assistant"
        assert "".join(one.get("content") or "" for one in deltas) == "Let me add."
        assert deltas[2]["tool_calls"][0]["function"]["name"] == "add" and deltas[2]["tool_calls"][0]["index"] == 0
        assert [one["finish_reason"] for one in mine] == [None, None, None, "tool_calls"]
        turn = chat.turn(mine[-1]["turn"])
        assert turn is not None and len(mine[1]["logprobs"]["content"]) == len(turn.completion_ids)


def test_a_request_whose_caller_went_away_keeps_nothing(chat: ChatHandler) -> None:
    async def leave() -> None:
        engine(chat).gate.clear()
        task = asyncio.create_task(chat.create(HELLO | {"n": 2}))
        assert await asyncio.to_thread(engine(chat).began.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine(chat).gate.set()

    async def break_off() -> None:
        stream = chat.stream(HELLO)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    asyncio.run(chat.create(HELLO))
    assert len(chat.histories.held) == 1
    asyncio.run(break_off())
    assert len(chat.histories.held) == 2  # its turn was told


def test_what_goes_wrong_in_the_engine_or_after_the_end_is_an_error_of_the_server(chat: ChatHandler) -> None:
    for raised, status, words in ((ValueError("too cold"), 400, "^too cold"), (OSError("gone"), 500, "OSError: gone")):
        engine(chat).says = Mock(side_effect=raised)
        with pytest.raises(ChatError, match=words) as caught:
            asked(chat)
        assert caught.value.status == status
    chat.user = "ann"  # a server's: what its files are called is not for its users
    with pytest.raises(ChatError, match=r"could not answer \(OSError\)$"):
        asked(chat)
    chat.user = ""
    chat.worker.close()
    with pytest.raises(ChatError, match="the engine is closed") as caught:
        asked(chat)
    assert caught.value.status == 503 and caught.value.kind == "server_error"


def test_64_clients_at_once_each_get_their_own_conversation_token_by_token() -> None:
    worker = scripted_worker(lambda text: f"I heard {text.rpartition('user')[2].partition('<|im_end|>')[0].strip()}")
    chat = chat_over(worker)

    async def client(number: int) -> None:
        messages, ids = [{"role": "user", "content": f"{number % 4}"}], list[int]()
        for turn in range(5):
            reply = await chat.create({"model": "agent", "messages": messages}, session=str(number))
            (choice,) = reply["choices"]
            held = chat.turn(choice["turn"])
            assert held is not None and held.prompt_ids[:len(ids)] == ids and len(held.prompt_ids) > len(ids)
            assert choice["message"]["content"] == f"I heard {messages[-1]['content']}"
            ids = held.prompt_ids + held.completion_ids
            messages += [choice["message"], {"role": "user", "content": f"{number} {turn}"}]

    async def all_of_them() -> None:
        await asyncio.gather(*(client(number) for number in range(64)))

    asyncio.run(all_of_them())
    worker.close()


def test_others_are_answered_while_a_request_is_encoded_and_what_takes_too_long_is_given_up(
    chat: ChatHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of events: the encoding of one user's text ends after another user was answered."""
    other, entered, gate = chat_over(chat.worker), threading.Event(), threading.Event()

    def encode(text: str) -> list[int]:
        entered.set()
        assert gate.wait(60)
        return [5, 6]

    monkeypatch.setattr(chat.texts, "encode", encode)

    async def both() -> None:
        slow = asyncio.create_task(chat.create({"model": "agent", "prompt": "long"}, texts=True))
        await asyncio.to_thread(entered.wait, 60)
        assert (await other.create(HELLO))["choices"] and not slow.done()
        monkeypatch.setattr("lowmem_grpo.server.openai.chat_handler.SECONDS", 0.01)
        with pytest.raises(ChatError, match="could not be read within") as late:
            await chat.create(HELLO)  # waits for its own user's thread
        assert late.value.status == 503
        gate.set()
        assert (await slow)["choices"]

    asyncio.run(both())


def test_a_request_that_is_given_up_while_it_is_encoded_is_not_sampled(
    chat: ChatHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate, ended = (threading.Event() for _ in range(3))
    calls, submit = list[Any](), chat.worker.submit
    chat.worker.run(ended.wait)
    monkeypatch.setattr(chat.texts, "encode", lambda text: [entered.set(), gate.wait(60), [5, 6]][-1])
    monkeypatch.setattr(chat.worker, "submit", lambda call: (calls.append(call), submit(call))[1])

    async def leave() -> None:
        asked = asyncio.create_task(chat.create({"model": "agent", "prompt": "long"}, texts=True))
        await asyncio.to_thread(entered.wait, 60)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(leave())
    gate.set()
    chat.thread.submit(int).result(60)  # behind the request
    cancelled = [call.future.cancelled() for call in calls]
    ended.set()
    assert cancelled == [True]


def test_log_probabilities_of_a_reply_are_written_in_the_thread_of_its_user(
    chat: ChatHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, plain = list[str](), chat.texts.logprobs
    monkeypatch.setattr(chat.texts, "logprobs", lambda *given: (seen.append(threading.current_thread().name),
                                                                plain(*given))[1])
    assert asked(chat, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [name.rpartition("_")[0] for name in seen] == ["lowmem_grpo requests"]


@every_row(("fields", "field", "words"), [
    ({"messages": [{"role": "user", "content": "x" * 8_000_000}]}, "messages", "a text of 80000"),
    ({"messages": [{"role": "user", "content": "x" * 9000}] * 1000}, "messages", "context length is 1000 tokens"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(15_000)]}, "tools", "a text of"),
    *(({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [value] * 10**5}}}]}, "tools",
       "a text of 1000") for value in (1, None, [], {})),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {
        "name": "f", "arguments": {"a": [0.5] * 10**5}}}]}]}, "messages", "a text of 1000"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages[0].content", "surrogate"),
    ({"model": "agent\udfff"}, "model", "surrogate"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": "f", "arguments": '{"a":' * 900 + "1" + "}" * 900}}]}]},
     "messages[0].tool_calls[0].function.arguments", "nested more than 64"),
    ({"metadata": json.loads('{"a":' * 900 + "1" + "}" * 900)}, "metadata.a.a.a", "nested"),
    ({"temperature": 1e-40}, "temperature", "1e-6 or above"), ({"top_p": 5e-324}, "top_p", "1e-6 or above"),
    ({"stop": ["x"] * 65}, "stop", "at most 64"), ({"stop": "x" * 1025}, "stop", "at most 1024"),
])
def test_what_would_harm_others_is_refused_with_its_field_before_it_is_encoded(
    chat: ChatHandler, fields: dict[str, Any], field: str, words: str
) -> None:
    chat.histories.rendered = Mock(side_effect=AssertionError("rendered"))  # type: ignore[method-assign]
    if "temperature" in fields or "top_p" in fields:
        del chat.histories.rendered
    with pytest.raises(ChatError, match=words) as refused:
        asked(chat, **fields)
    assert 400 <= refused.value.status < 500 and (refused.value.param or "").startswith(field)


@every_row(("kwargs", "words"), [
    *(({name: value}, f"has {name}, which is not a client's to choose") for name, value in {
        "chat_template": "x", "tools": [], "documents": [{}], "tokenize": True, "continue_final_message": True,
        "add_generation_prompt": False, "return_dict": True, "tokenizer_kwargs": {}, "messages": [],
        "conversation": [], "raise_exception": "x"}.items()),
    ({"range": 3}, "has range, which the model's chat template does not read"),
    ({"bos_token": "x"}, "has bos_token"), ({"namespace": 1}, "has namespace"), ({"mood": 1}, "It reads tone, wordy"),
    ({"tone": [1] * 5000}, "has 5006 characters"), ({"tone": "x" * 5000}, "has 5005 characters; it may have 4096"),
])
def test_of_a_chat_template_a_request_sets_only_the_variables_that_it_reads(
    chat: ChatHandler, kwargs: dict[str, Any], words: str
) -> None:
    plain = chat.worker.tokenizer.chat_template
    chat.texts.tokenizer.chat_template = (
        "{% generation %}{% if wordy is defined %}{{ tone | upper }}{% endif %}{% endgeneration %}"
        f"{{% for n in range(3) %}}{{% break %}}{{% endfor %}}{{{{ bos_token }}}}{plain}")
    chat.texts.__dict__.pop("variables", None)
    with pytest.raises(ChatError, match=words) as refused:
        asked(chat, chat_template_kwargs=kwargs)
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
    assert asked(chat, chat_template_kwargs={"tone": "x", "wordy": False})["choices"]
    chat.texts.tokenizer.chat_template = {"default": "{{ tone }}", "tool_use": "{{ mood }}{{ tools }}"}
    del chat.texts.variables
    assert chat.texts.variables == {"tone", "mood"}


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_calls() -> None:
    worker = scripted_worker(lambda prompt: "Good day.")
    chat = chat_over(worker, histories=ConversationCache(worker.tokenizer, max_turns=50, max_tokens=5000))

    async def calls(numbers: range) -> int:
        for start in numbers[::50]:
            bodies = [HELLO | {"messages": [{"role": "user", "content": f"{number}"}], "temperature": number / 1500}
                      for number in range(start, start + 50)]
            await asyncio.gather(*(chat.create(body, session=str(body["temperature"])) for body in bodies))
        gc.collect()
        return len(gc.get_objects())

    before, after = asyncio.run(calls(range(300))), asyncio.run(calls(range(300, 1500)))
    assert after - before < 500, after - before
    held = chat.histories
    assert len(held.held) == 50 and held.tokens <= 5000 and len(held.ends) == 50 and not worker.waiting.lines
    worker.close()
