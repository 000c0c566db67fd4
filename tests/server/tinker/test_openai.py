"""OpenAI's own client at a server that trains: the base model and saved adapters, while training goes on."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import openai
import pytest
from served import OTHER, Serving, tinker_client
from tables import every_row
from transformers.utils import get_json_schema

from lowmem_grpo.recipes.calculator import calculate
from lowmem_grpo.server.users import User

tinker: Any = pytest.importorskip("tinker", reason="the client `tinker` is not installed: pip install tinker==0.38.0")
BASE = "tiny-games"
SERVED = {"name": BASE, "context": 512}
SAYS: list[Any] = [{"role": "user", "content": "What is 21 * 12?"}]
CALCULATE: Any = get_json_schema(calculate)


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[openai.OpenAI]:
    with closing(served.openai()) as made:
        yield made


@pytest.fixture(scope="module")
def trained(served: Serving) -> Iterator[Any]:
    """A model of the owner's, trained and saved as `first`."""
    with tinker_client(served) as service:
        training = service.create_lora_training_client(base_model=BASE, rank=8, seed=1, train_unembed=False).result()
        for _ in range(3):
            training.forward_backward(data(), "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        training.save_weights_for_sampler("first").result()
        yield training


def data() -> list[Any]:
    return [tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7, 8]), loss_fn_inputs={
        "target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})]


@contextmanager
def training_on(training: Any) -> Iterator[list[float]]:
    """Inside, calls of forward_backward are under way one after another; the losses of those that are done."""
    losses, ended = list[float](), threading.Event()

    def work() -> None:
        while not ended.is_set():
            losses.append(training.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"])
            training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield losses
    finally:
        ended.set()
        thread.join(60)


def test_a_saved_adapter_is_a_model_beside_the_base_one_under_both_of_its_names(trained: Any, client: Any) -> None:
    name = f"{trained.model_id}@first"
    assert {BASE, name} <= {model.id for model in client.models.list()}
    asked = {"messages": SAYS, "max_tokens": 8, "seed": 3, "logprobs": True}
    of_base, of_it, by_path = (client.chat.completions.create(model=one, **asked).choices[0] for one in (
        BASE, name, f"tinker://{trained.model_id}/sampler_weights/first"))
    assert of_it.message.content == by_path.message.content
    said = [[one.logprob for one in choice.logprobs.content] for choice in (of_base, of_it, by_path)]
    assert said[1] == pytest.approx(said[2], abs=1e-4) and said[0] != pytest.approx(said[1], abs=1e-2)
    assert client.models.retrieve(name).id == name


def test_replies_and_streams_come_while_calls_of_forward_backward_are_under_way(trained: Any, client: Any) -> None:
    name, count = f"{trained.model_id}@first", 0
    with training_on(trained) as losses:
        while len(losses) < 2:
            reply = client.chat.completions.create(model=name, messages=SAYS, max_tokens=8, temperature=0)
            chunks = list(client.chat.completions.create(model=name, messages=SAYS, max_tokens=8, temperature=0,
                                                         stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == reply.choices[0].message.content
            count += 1
    assert count and losses == sorted(losses, reverse=True)


def test_a_model_calls_a_tool_and_reads_its_result(client: Any) -> None:
    asked = {"model": BASE, "tools": [CALCULATE], "max_tokens": 64}
    choices = client.chat.completions.create(messages=SAYS, n=16, seed=1, **asked).choices
    called = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert called and all(one.message.tool_calls[0].function.name == "calculate" for one in called)
    call = called[0].message.tool_calls[0]
    again = [*SAYS, called[0].message, {"role": "tool", "tool_call_id": call.id, "content": "252"}]
    reply = client.chat.completions.create(messages=again, extra_body={"return_token_ids": True}, **asked)
    assert reply.usage.completion_tokens == len(reply.choices[0].token_ids) > 0
    first = client.chat.completions.create(messages=SAYS, extra_body={"return_token_ids": True}, **asked)
    assert reply.prompt_token_ids[:len(first.prompt_token_ids)] == first.prompt_token_ids


def test_a_plain_prompt_is_continued_as_text_and_as_tokens(client: Any) -> None:
    asked = {"model": BASE, "max_tokens": 6, "seed": 5, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    text = client.completions.create(prompt="guess: ", **asked)
    ids = text.choices[0].prompt_token_ids
    both = client.completions.create(prompt=[ids, ids], n=2, **asked)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.token_ids for choice in both.choices[:2]] == [choice.token_ids for choice in both.choices[2:]]
    assert both.choices[0].token_ids == text.choices[0].token_ids and both.choices[0].text == text.choices[0].text
    told = text.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == text.usage.completion_tokens
    assert all(len(one) in (1, 2) for one in told.top_logprobs) and max(told.token_logprobs) <= 0
    assert (text.object, both.usage.prompt_tokens) == ("text_completion", 2 * len(ids))


def test_the_log_probabilities_of_a_prompt_are_those_of_the_model_that_is_named(trained: Any, client: Any) -> None:
    prompt, more = [5, 6, 7, 8, 9], {"return_token_ids": True}
    said = dict[str, list[Any]]()
    for name in (BASE, f"{trained.model_id}@first"):
        drawn = client.completions.create(model=name, prompt=prompt, max_tokens=6, seed=5, logprobs=0, extra_body=more)
        ids = [*prompt, *drawn.choices[0].token_ids]
        scored = client.completions.create(model=name, prompt=[ids, [5]], max_tokens=1,
                                           extra_body={"prompt_logprobs": 2})
        whole, single = (choice.prompt_logprobs for choice in scored.choices)
        own = [place[str(token)] for token, place in zip(ids[5:], whole[5:], strict=True)]
        assert single == [None] and whole[0] is None and len(whole) == len(ids)
        assert [one["logprob"] for one in own] == pytest.approx(drawn.choices[0].logprobs.token_logprobs, abs=1e-3)
        for place in whole[1:]:
            ranks = sorted(one["rank"] for one in place.values())
            assert ranks[:2] == [1, 2] and len(place) == (2 if ranks[-1] <= 2 else 3)
            assert max(place.values(), key=lambda one: one["logprob"])["rank"] == 1
        said[name] = whole[1:5]
    assert said[BASE][0]["6"]["logprob"] < said[name][0]["6"]["logprob"] - 0.01, "it was trained to say 5 6 7 8 9"


def test_the_stream_of_a_plain_prompt_says_what_the_reply_says(client: Any) -> None:
    asked = {"model": BASE, "prompt": "guess: ", "max_tokens": 6, "temperature": 0}
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == client.completions.create(**asked).choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


@every_row(("fields", "told"), [
    ({"model": "gpt-4"}, "'gpt-4' is not served here; there are tiny-games"), ({"prompt": []}, "prompt is"),
    ({"prompt": [[5], "a", 3]}, r"prompt\[2\] is 3"), ({"prompt": [5, 100_000]}, "the token 100000"),
    ({"prompt": ""}, "no tokens"), ({"prompt": [5] * 600}, "context length is 512"), ({"logprobs": 99}, "equal to 20"),
    ({"prompt_logprobs": 129}, "prompt_logprobs is 129"), ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ({"prompt_logprobs": 1, "stream": True}, "comes with a whole reply only; leave stream out"),
    ({"echo": True}, "echo is True"), ({"best_of": 3}, "best_of is 3"), ({"suffix": "x"}, "suffix"),
    ({"messages": []}, "messages is not a field"), ({"prompt": ["a"] * 2049, "n": 2}, "at most 4096"),
])
def test_a_plain_request_that_cannot_be_served_is_refused_by_name(client: Any, fields: Any, told: str) -> None:
    body = {"model": BASE, "prompt": "guess: "} | fields
    with pytest.raises(openai.APIStatusError, match=told) as refused:
        client.post("/completions", body=body, cast_to=object)
    assert refused.value.status_code == (404 if fields.get("model") else 400)


def test_a_route_that_is_not_here_is_refused_with_those_that_are(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match=(
            r"no POST /v1/responses; there are GET /health, the routes below /\S+, POST /v1/chat/completions, ")):
        client.responses.create(model=BASE, input="Hi")


def test_nothing_of_another_users_is_served_or_told(served: Serving, trained: Any, client: Any) -> None:
    name = f"{trained.model_id}@first"
    with closing(served.openai(OTHER)) as other:
        assert [model.id for model in other.models.list()] == [BASE]
        for asked in (name, f"tinker://{trained.model_id}/sampler_weights/first"):
            with pytest.raises(openai.NotFoundError, match="is not served here; there are tiny-games") as refused:
                other.chat.completions.create(model=asked, messages=SAYS)
            assert "first" not in str(refused.value).replace(asked, "")
            with pytest.raises(openai.NotFoundError):
                other.models.retrieve(asked)
        mine, theirs = (one.chat.completions.create(model=BASE, messages=SAYS, max_tokens=4).choices[0].turn
                        for one in (client, other))
    chats = [served.model.completions.chats(User(name)) for name in ("owner", "other")]
    assert [[chat.turn(turn) is None for turn in (mine, theirs)] for chat in chats] == [[False, True], [True, False]]


def test_weights_that_were_saved_to_train_on_are_refused_with_what_to_save(trained: Any, client: Any) -> None:
    path = trained.save_state("state").result().path
    for name in (path, f"{trained.model_id}@state"):
        with pytest.raises(openai.BadRequestError, match="save_weights_for_sampler saves what to sample with"):
            client.chat.completions.create(model=name, messages=SAYS)
    assert not [model.id for model in client.models.list() if "state" in model.id]


def test_weights_that_are_deleted_are_a_model_no_more(served: Serving, trained: Any, client: Any) -> None:
    trained.save_weights_for_sampler("gone").result()
    name = f"{trained.model_id}@gone"
    assert client.completions.create(model=name, prompt="a", max_tokens=2).choices
    served.model.training.checkpoints.delete(f"tinker://{trained.model_id}/sampler_weights/gone", "owner")
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model=name, prompt="a")
