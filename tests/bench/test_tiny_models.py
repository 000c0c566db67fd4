"""The embedded models of games, mails and talks: their tokens, and their demonstrations."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.tiny_models import games_model, inbox_model
from bench.tiny_models.games_model import calculator_talk, guess_talk, tictactoe_talk
from bench.tiny_models.inbox_model import clerk_talk
from bench.tiny_models.talks import TOOL_MARKS, Talk, encode_talk
from bench.tiny_models.talks_model import (
    PHRASES,
    answering_talk,
    asking_talk,
    board_talk,
    boards,
)
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.environments.template import SpecialTokens
from lowmem_grpo.models.stored_model import resolve
from lowmem_grpo.recipes.calculator import Sum
from lowmem_grpo.recipes.game2048 import MOVES, Game2048, move_in
from lowmem_grpo.recipes.tasks.mailbox import mailbox
from lowmem_grpo.recipes.twenty_questions import NUMBERS, about, question_of, truth, yes_or_no

PRODUCT = Sum(60, "*", 39)
QUESTIONS = mailbox("small", 5).questions


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve(f"tiny-{name}"), trust_remote_code=False)


@pytest.mark.parametrize(("name", "tools", "make"), [
    *(("games", games_model.TOOLS, make) for make in (
        guess_talk, tictactoe_talk, lambda rng: calculator_talk(rng, PRODUCT))),
    ("inbox", inbox_model.TOOLS, lambda rng: clerk_talk(rng.choice(QUESTIONS), 5, rng)),
    *(("talks", None, make) for make in (
        lambda rng: board_talk(next(boards(rng)), rng), asking_talk, answering_talk)),
])
def test_a_demonstration_trains_what_the_assistant_says_and_nothing_else(
    name: str, tools: Any, make: Callable[[random.Random], Talk]
) -> None:
    tokenizer = tokenizer_of(name)
    for seed in range(20):
        talk = make(random.Random(seed))
        ids, own = encode_talk(tokenizer, talk, tools)
        said = tokenizer.decode([token for token, mine in zip(ids, own, strict=True) if mine]).split("<|im_end|>")
        turns = [message for message in talk if message["role"] == "assistant"]
        assert len(said) == len(turns) + 1 and said[-1] == ""
        for text, turn in zip(said, turns, strict=False):
            assert turn["content"] in text and text.count("<tool_call>") == len(turn.get("tool_calls", []))
            assert turn.get("tool_calls") or text == turn["content"]
        assert len(ids) < 250


# games and mails


def test_a_prompt_of_the_games_tells_the_tools_and_a_call_is_rendered_as_hermes_does() -> None:
    tokenizer, rng = tokenizer_of("games"), random.Random(0)
    rng.random = lambda: 0.0  # type: ignore[method-assign]
    talk = calculator_talk(rng, PRODUCT)
    text = tokenizer.apply_chat_template(talk, tools=games_model.TOOLS, tokenize=False)
    assert "Tools: calculate(expression)" in text
    assert '<tool_call>\n{"name": "calculate", "arguments": {"expression": "60 * 39"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n2340<|im_end|>\n<|im_start|>assistant\n2340<|im_end|>\n")
    assert "Tools" not in tokenizer.apply_chat_template(talk[:1], tokenize=False)


def test_a_name_and_a_number_are_one_token_wherever_they_stand() -> None:
    tokenizer = tokenizer_of("inbox")
    for text in ("What is the budget of Falcon?", '{"words": "budget Falcon"}', "412 | budget Falcon", "of Falcon 41."):
        assert "Falcon" in tokenizer.tokenize(text) and tokenizer.decode(tokenizer.encode(text)) == text
    for word in ("1", "41", "412", "500", *inbox_model.PHRASES):
        assert len(tokenizer.encode(word)) == 1, word


def test_demonstrations_are_of_the_training_split_and_of_other_seeds() -> None:
    held_out = {question.text for question in mailbox("small", 0).of_split("test")}
    drawn = inbox_model.demonstrations(0)
    assert not any(next(drawn)()[0][0]["content"] in held_out for _ in range(200))
    assert inbox_model.FIRST_SEED > 100_000


# talks


def test_what_a_turn_is_about_is_one_token() -> None:
    tokenizer = tokenizer_of("talks")
    for word in (*MOVES, *NUMBERS, "yes", "no", *PHRASES):
        assert len(tokenizer.encode(word)) == 1 and tokenizer.decode(tokenizer.encode(word)) == word
    assert tokenizer.tokenize(question_of(12)) == ["Is it above ", "12", "?"]
    marks = SpecialTokens(tokenizer, str(tokenizer.chat_template)).every.values()
    assert set(marks) == {"<|im_start|>", "<|im_end|>", "<|endoftext|>", *TOOL_MARKS}  # words may come from a game


def test_a_board_has_as_many_tokens_whatever_lies_on_it() -> None:
    game, lengths = Game2048(), set()
    for board in (((0, 0, 0),) * 3, ((2, 4, 8), (16, 2, 4), (8, 16, 0)), ((0, 2, 0), (16, 0, 0), (0, 0, 0))):
        game.board = board
        lengths.add(len(tokenizer_of("talks").encode(game.shown().partition("Possible")[0])))
    assert len(lengths) == 1


def test_the_model_knows_every_answer_about_the_numbers_and_replies_with_moves() -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny-talks", max_seq_length=96, load_in_4bit=False)
    asked = [(number, question_of(limit)) for number in NUMBERS for limit in range(1, 16)]
    sure = SamplingParams(temperature=0, max_tokens=8)
    found = model.fast_generate([[{"role": "user", "content": about(*one)}] for one in asked], sure)
    right = [yes_or_no(one.outputs[0].text) == truth(*fact) for one, fact in zip(found, asked, strict=True)]
    assert sum(right) >= 0.97 * len(right)
    shown = [game.shown() for game, _ in zip(boards(random.Random(0)), range(40), strict=False)]
    prompts = [[{"role": "user", "content": board}] for board in shown]
    replies = model.fast_generate(prompts, SamplingParams(max_tokens=4, seed=0))
    assert sum(bool(move_in(one.outputs[0].text)) for one in replies) >= 39

