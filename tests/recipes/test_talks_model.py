"""The embedded model of game2048 and twenty_questions: its tokens, its demonstrations, what it says before training."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.tiny_models.talks import TOOL_MARKS, Talk, encode_talk
from bench.tiny_models.talks_model import (
    HARD,
    LOOKS,
    PHRASES,
    answering_talk,
    asking_talk,
    board_talk,
    boards,
    demonstrations,
)
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.environments.template import SpecialTokens
from lowmem_grpo.models.model_names import resolve
from lowmem_grpo.recipes.game2048 import MOVES, Game2048, move_in
from lowmem_grpo.recipes.twenty_questions import NUMBERS, about, question_of, truth, truthful, yes_or_no


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve("tiny-talks"), trust_remote_code=False)


def test_what_a_turn_is_about_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in (*MOVES, *NUMBERS, "yes", "no", *PHRASES):
        assert len(tokenizer.encode(word)) == 1 and tokenizer.decode(tokenizer.encode(word)) == word
    assert tokenizer.tokenize(question_of(12)) == ["Is it above ", "12", "?"]
    marks = SpecialTokens(tokenizer, str(tokenizer.chat_template)).every.values()
    assert set(marks) == {"<|im_start|>", "<|im_end|>", "<|endoftext|>", *TOOL_MARKS}  # words may come from a game


def test_a_board_has_as_many_tokens_whatever_lies_on_it(tokenizer: PreTrainedTokenizerFast) -> None:
    game, lengths = Game2048(), set()
    for board in (((0, 0, 0),) * 3, ((2, 4, 8), (16, 2, 4), (8, 16, 0)), ((0, 2, 0), (16, 0, 0), (0, 0, 0))):
        game.board = board
        lengths.add(len(tokenizer.encode(game.shown().partition("Possible")[0])))
    assert len(lengths) == 1


def demonstrated(rng: random.Random, looks: float = LOOKS) -> Talk:
    """A move on some board."""
    return board_talk(next(boards(rng)), rng, looks)


@pytest.mark.parametrize("make", [demonstrated, asking_talk, answering_talk])
def test_a_demonstration_trains_what_the_assistant_says_and_nothing_else(
    make: Callable[[random.Random], Talk], tokenizer: PreTrainedTokenizerFast
) -> None:
    for seed in range(20):
        talk = make(random.Random(seed))
        ids, own = encode_talk(tokenizer, talk, None)
        said = tokenizer.decode([token for token, mine in zip(ids, own, strict=True) if mine])
        turns = [one["content"] for one in talk if one["role"] == "assistant"]
        assert said == "".join(f"{turn}<|im_end|>" for turn in turns)


def shares(make: Callable[..., Talk], heeds: Callable[[Talk], list[bool]], *words: Any) -> float:
    """The share of turns that heed what is possible."""
    rng = random.Random(0)
    found = [heeded for _ in range(600) for heeded in heeds(make(rng, *words))]
    return sum(found) / len(found)


def a_possible_move(talk: Talk) -> list[bool]:
    return [talk[1]["content"] in talk[0]["content"].partition("Possible: ")[2].split()]


def guesses_what_is_left(talk: Talk) -> list[bool]:
    said, heard = talk[-1]["content"], talk[-2]["content"]
    if not said.startswith("Guess") or " to " not in heard or len(talk) == 2:
        return []
    low, high = heard.partition(": ")[2].partition(",")[0].split(" to ")
    return [int(low) <= int(said.split()[1]) <= int(high)]


def test_demonstrations_heed_what_is_possible_at_first_and_are_mostly_blind_later() -> None:
    assert shares(demonstrated, a_possible_move, 1.0) == shares(asking_talk, guesses_what_is_left, 1.0) == 1.0
    assert 0.7 < shares(demonstrated, a_possible_move) < 0.95
    assert 0.4 < shares(asking_talk, guesses_what_is_left) < 0.65
    first = demonstrations(0, heeding=True)
    talks = [next(first)()[0] for _ in range(100)]
    moves = [talk for place, talk in enumerate(talks) if place % 5 in (0, 2)]
    assert all(a_possible_move(talk)[0] for talk in moves)
    assert max(len(talk[0]["content"].partition("Possible: ")[2].split()) for talk in moves) == HARD
    assert all(truthful(talk[0]["content"]) == talk[1]["content"] for talk in talks[4::5])


def test_the_model_knows_every_answer_about_the_numbers_and_replies_with_moves() -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny-talks", max_seq_length=96, load_in_4bit=False)
    asked = [(number, question_of(limit)) for number in NUMBERS for limit in range(1, 16)]
    sure = SamplingParams(temperature=0, max_tokens=8)
    found = model.fast_generate([[user(about(*one))] for one in asked], sure)
    right = [yes_or_no(one.outputs[0].text) == truth(*fact) for one, fact in zip(found, asked, strict=True)]
    assert sum(right) >= 0.97 * len(right)
    shown = [game.shown() for game, _ in zip(boards(random.Random(0)), range(40), strict=False)]
    replies = model.fast_generate([[user(board)] for board in shown], SamplingParams(max_tokens=4, seed=0))
    assert sum(bool(move_in(one.outputs[0].text)) for one in replies) >= 39


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
