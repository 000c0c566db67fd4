"""The worker over the engines themselves and the embedded model: what is told of a turn is what the model computes."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import scatter
from vllm_models import NEEDS_VLLM

from lowmem_grpo.agents.local_run import client_of
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.server.openai import request_queue
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request_queue import LIVE, EngineCall, WorkerTask
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

GUESS: Any = {"role": "user", "content": "Guess a number from 1 to 32."}
HIGHER: Any = {"role": "user", "content": "higher"}


class Room:
    """A model with its worker and chat; "saved" is the adapter as it was at the beginning."""

    def __init__(self, engine: str, folder: Path, moved: str = "lora_B", **lora: Any) -> None:
        options: dict[str, Any] = {"kv_cache_bytes": 64 << 20} if engine == "vllm" else {}
        model, tokenizer = FastLanguageModel.from_pretrained(
            "tiny-games", max_seq_length=256, fast_inference=engine, **options)
        self.model = FastLanguageModel.get_peft_model(model, r=4, **lora)
        scatter(self.model, 0.05, of=moved)
        self.model.save_lora(folder)
        self.worker = EngineWorker(self.model, tokenizer)
        self.chat = ChatHandler(self.worker, lambda: {"live": LIVE, "base": None, "saved@3": folder},
                                ConversationCache(tokenizer))
        self.client = client_of(self.chat)

    def ask(self, *messages: Any, model: str = "live", **fields: Any) -> Any:
        return asyncio.run(self.client.chat.completions.create(model=model, messages=messages, max_tokens=9, **fields))

    def turn(self, reply: Any) -> Turn:
        return self.chat.turn(reply.choices[0].turn)

    def recomputed(self, turn: Turn, base: bool = False) -> list[float]:
        """The trainer's log-probabilities of a turn."""
        rollout = Rollout(turn.completion_ids, turn.logprobs, turn.finish_reason)
        policy = Policy(self.model)
        batch = collate([(RolloutGroup({}, turn.prompt_ids, [rollout]), rollout)])

        def work() -> list[float]:
            self.model.eval()
            with torch.no_grad(), policy.base_model() if base else torch.no_grad():
                found: list[float] = policy.logprobs(batch, 1.0)[0].tolist()
            return found

        return self.worker.run(work).result(60)


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
def room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    made = Room(request.param, tmp_path_factory.mktemp("adapter"))
    yield made
    made.worker.close()
    made.model.close_engine()


def close_to(turn: Turn, computed: list[float]) -> bool:
    return bool(torch.allclose(torch.tensor(turn.logprobs), torch.tensor(computed), atol=1e-3))


def test_the_turns_of_a_conversation_are_what_the_trainer_computes(room: Room) -> None:
    first = room.ask(GUESS)
    second = room.ask(GUESS, first.choices[0].message, HIGHER)
    turns = [room.turn(first), room.turn(second)]
    before = turns[0].prompt_ids + turns[0].completion_ids
    assert turns[1].prompt_ids[:len(before)] == before
    if room.worker.engine.name == "transformers":
        assert second.usage.prompt_tokens_details.cached_tokens == turns[1].cached_tokens >= len(before) - 1
    assert all(close_to(turn, room.recomputed(turn)) for turn in turns)


@pytest.mark.every(2)
def test_a_seed_gives_the_same_tokens_again_in_other_company(room: Room) -> None:
    async def many(count: int) -> list[list[int]]:
        replies = await asyncio.gather(*(room.client.chat.completions.create(
            model="live", messages=[GUESS], seed=number, max_tokens=9) for number in range(count)))
        return [room.turn(reply).completion_ids for reply in replies]

    few = asyncio.run(many(6))
    assert asyncio.run(many(12))[3:6] == few[3:]
    params = SamplingParams(n=3, seed=3, max_tokens=9)
    (output,) = room.model.fast_generate([[GUESS]], params, room.model.current_lora())
    assert [list(completion.token_ids) for completion in output.outputs] == few[3:]
    assert len({room.turn(room.ask(GUESS)).completion_ids[0] for _ in range(12)}) > 1


@pytest.mark.every(2)
def test_the_live_adapter_a_saved_one_and_the_base_model_take_turns(room: Room) -> None:
    turns = {name: room.turn(room.ask(GUESS, model=name, seed=5)) for name in ("live", "base", "saved@3", "live")}
    assert turns["saved@3"].completion_ids == turns["live"].completion_ids
    assert {name: turn.policy_version for name, turn in turns.items()} == {"live": 0, "base": -1, "saved@3": 3}
    assert close_to(turns["base"], room.recomputed(turns["base"], base=True))
    assert not close_to(turns["base"], room.recomputed(turns["base"]))
    assert close_to(turns["live"], room.recomputed(turns["saved@3"]))


def test_rows_that_were_trained_are_served_live_and_from_a_file_and_the_base_is_served_without_them(
    tmp_path: Path
) -> None:
    room = Room("transformers", tmp_path, "trainable_tokens_delta", trainable_token_indices=[*range(3, 60)])
    try:
        turns = {name: room.turn(room.ask(GUESS, model=name, seed=5)) for name in ("live", "base", "saved@3")}
        assert turns["saved@3"].completion_ids == turns["live"].completion_ids
        for name, turn in turns.items():
            assert close_to(turn, room.recomputed(turn, base=name == "base"))
            assert not close_to(turn, room.recomputed(turn, base=name != "base"))
    finally:
        room.worker.close()
        room.model.close_engine()


@pytest.mark.every(2)
def test_conversations_with_two_models_by_turns_go_on_from_what_was_computed_with_each(room: Room) -> None:
    said: dict[str, list[Any]] = {"live": [GUESS], "base": [GUESS]}
    turns: list[tuple[str, Turn]] = []
    for name in ["live", "base"] * 3:
        reply = room.ask(*said[name], model=name)
        said[name] += [reply.choices[0].message, HIGHER]
        turns.append((name, room.turn(reply)))
    assert all(close_to(turn, room.recomputed(turn, base=name == "base")) for name, turn in turns)
    if room.worker.engine.name == "transformers":
        assert all(turn.cached_tokens > 0 for _, turn in turns[2:])


def test_likely_tokens_are_the_models_own(room: Room) -> None:
    for name in ("live", "base"):
        reply = room.ask(GUESS, model=name, logprobs=True, top_logprobs=4)
        told = reply.choices[0].logprobs.content
        exact = room.recomputed(room.turn(reply), base=name == "base")
        for one, logprob in zip(told, exact, strict=True):
            assert len(one.top_logprobs) == 4
            top = {other.token: other.logprob for other in one.top_logprobs}
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert one.token not in top or abs(top[one.token] - logprob) < 1e-3


def test_turns_carry_the_policy_that_drew_them(room: Room) -> None:
    first = room.ask(GUESS)

    def train() -> None:
        scatter(room.model, 0.3, seed=2)
        room.worker.on_policy_update(1)

    room.worker.run(train).result(60)
    second = room.ask(GUESS, first.choices[0].message, HIGHER)
    turns = [room.turn(first), room.turn(second)]
    assert [turn.policy_version for turn in turns] == [0, 1]
    assert close_to(turns[1], room.recomputed(turns[1])) and not close_to(turns[0], room.recomputed(turns[0]))
    assert turns[1].cached_tokens == 0


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """A room with our engine, where users have turns of 8 tokens."""
    monkeypatch.setattr(request_queue, "SLICE", 8)
    made = Room("transformers", tmp_path)
    made.worker.waiting.turn = 32
    yield made
    made.worker.close()
    made.model.close_engine()


def begun(room: Room, adapter: Any, order: list[str], then: Callable[[], "Future[Any]"], **params: Any) -> Turn:
    """Ann's 64 tokens; once the first is there, `then` submits something of another user. Both ends go to `order`."""
    first, asked, told = threading.Event(), threading.Event(), list[int]()

    def listen(tokens: list[int], logprobs: list[float]) -> bool:
        told.extend(tokens)
        first.set()
        return asked.wait(60)

    call = EngineCall([5, 6, 7, 8], SamplingParams(max_tokens=64, seed=3, ignore_eos=True, **params), adapter,
                      user="ann", on_tokens=listen)
    call.future.add_done_callback(lambda _: order.append("ann"))
    room.worker.submit(call)
    assert first.wait(60)
    other = then()
    other.add_done_callback(lambda _: order.append("bob"))
    asked.set()
    turn = call.future.result(60)
    other.result(60)
    assert told == turn.completion_ids[:63], "each token is told once, but for the last"
    return turn


def nothing() -> "Future[Any]":
    (done := Future[Any]()).set_result(None)
    return done


@pytest.mark.parametrize("adapter", ["base", "saved@3", "live"])
def test_a_long_call_makes_room_for_another_user_and_goes_on_as_if_it_had_not(own: Room, adapter: str) -> None:
    where, alone = own.chat.names()[adapter], list[str]()
    expected = begun(own, where, alone, nothing)
    calls = {
        "other settings": lambda: own.worker.submit(EngineCall([9], SamplingParams(max_tokens=4, temperature=0.5), None,
                                                               user="bob")),
        "same settings": lambda: own.worker.submit(EngineCall([9], SamplingParams(max_tokens=4, ignore_eos=True), where,
                                                              user="bob")),
        "training": lambda: own.worker.run(lambda: None, user="bob"),
    }
    for what, then in calls.items():
        order = list[str]()
        turn = begun(own, where, order, then)
        assert order == (["ann", "bob"] if adapter == "live" else ["bob", "ann"]), what
        assert turn.completion_ids == expected.completion_ids and turn.finish_reason == "length", what
        assert turn.logprobs == pytest.approx(expected.logprobs, abs=1e-4) and turn.text == expected.text, what


def test_calls_of_one_user_alone_or_without_turns_are_not_interrupted(own: Room) -> None:
    order = list[str]()
    begun(own, None, order, lambda: own.worker.run(lambda: None, user="ann"))
    own.worker.waiting.turn = None
    begun(own, None, order, lambda: own.worker.run(lambda: None, user="bob"))
    assert order == ["ann", "bob"] * 2


@pytest.mark.parametrize("adapter", ["base", "saved@3"])
def test_two_long_calls_of_two_users_take_turns_and_both_end(own: Room, adapter: str) -> None:
    seen, order, other = list[str](), list[str](), SamplingParams(max_tokens=64, temperature=0.5, ignore_eos=True)

    def bobs() -> "Future[Any]":
        return own.worker.submit(EngineCall([9], other, None, user="bob",
                                            on_tokens=lambda tokens, _: seen.append("bob") is None))

    watched = own.worker.waiting.take_calls
    own.worker.waiting.take_calls = lambda *given: [  # type: ignore[method-assign]
        seen.append(call.user) or call for call in watched(*given)]
    own.worker.awake().pace.pop_measured()
    begun(own, own.chat.names()[adapter], order, bobs)
    turns = [user for place, user in enumerate(seen) if place == 0 or seen[place - 1] != user]
    assert turns == ["ann", "bob"] * 8
    read = own.worker.engine.pace.tokens["prefill"]
    assert read == 4 + 1 + 2 * 7, "what was sampled is not read again, but for the last token"


@pytest.mark.parametrize("adapter", ["base", "saved@3"])
def test_long_calls_of_four_users_keep_what_was_read_while_they_take_turns(own: Room, adapter: str) -> None:
    for other in range(3):  # of finished turns, whose keys and values go first
        own.worker.submit(EngineCall([9] * 90, SamplingParams(max_tokens=2), None, key=other)).result(60)
    own.worker.awake().pace.pop_measured()
    calls = [EngineCall([user] * 40, SamplingParams(max_tokens=64, temperature=1 + user / 9, ignore_eos=True),
                        own.chat.names()[adapter], user=f"user{user}") for user in range(4)]
    own.worker.run(lambda: [own.worker.waiting.add(call) for call in calls]).result(60)
    assert [len(call.future.result(60).completion_ids) for call in calls] == [64] * 4
    assert own.worker.engine.pace.tokens["prefill"] <= 4 * (40 + 7), "each prompt once, and a token for each slice"


def test_samples_of_a_prompt_read_it_once_for_each_turn_between_which_another_user_trains(own: Room) -> None:
    def train() -> None:
        if not all(call.future.done() for call in calls):
            own.worker.waiting.add(WorkerTask(train, sleep=True, user="bob"))

    calls = [EngineCall([7] * 150, SamplingParams(max_tokens=32, ignore_eos=True), None, seed=seed, user="ann")
             for seed in range(8)]
    own.worker.awake().pace.pop_measured()
    own.worker.run(lambda: [*map(own.worker.waiting.add, calls), train()]).result(60)
    assert [len(call.future.result(60).completion_ids) for call in calls] == [32] * 8
    assert own.worker.engine.pace.tokens["prefill"] <= 4 * 150 + 8 * (8 + 16 + 24)


def test_a_users_next_call_comes_behind_the_other_user_for_whom_the_first_made_room(own: Room) -> None:
    order, short = list[str](), SamplingParams(max_tokens=4, temperature=0.5)

    def two() -> "Future[Any]":
        own.worker.submit(EngineCall([9], short, None, user="ann")).add_done_callback(lambda _: order.append("next"))
        return own.worker.submit(EngineCall([9], replace(short, temperature=0.7), None, user="bob"))

    begun(own, None, order, two)
    assert order == ["bob", "next", "ann"]


def test_a_cancelled_call_leaves_the_engine(own: Room) -> None:
    count, first = list[int](), threading.Event()

    def listen(tokens: list[int], logprobs: list[float]) -> bool:
        count.append(len(tokens))
        first.set()
        return gone.wait(60)

    gone = threading.Event()
    call = EngineCall([5, 6], SamplingParams(max_tokens=200, ignore_eos=True), None, on_tokens=listen)
    own.worker.submit(call)
    assert first.wait(60) and call.future.cancel()
    gone.set()
    own.worker.run(lambda: None).result(60)
    assert sum(count) <= 2
