"""The models in the package that play games, search mails and talk: their tokens, and what they know."""

import random
from functools import cache

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.environments.template import SpecialTokens
from lowmem_grpo.models.stored_model import resolve
from lowmem_grpo.recipes.calculator import calculate
from lowmem_grpo.recipes.game2048 import MOVES, SIZES, Game2048, move_in, random_move
from lowmem_grpo.recipes.twenty_questions import NUMBERS, about, question_of, truth, yes_or_no


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve(f"tiny-{name}"), trust_remote_code=False)


def test_a_prompt_of_the_games_tells_the_tools_and_a_call_is_rendered_as_hermes_does() -> None:
    tokenizer, call = tokenizer_of("games"), {"name": "calculate", "arguments": {"expression": "60 * 39"}}
    talk = [{"role": "user", "content": "What is 60 * 39?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "2340"}, {"role": "assistant", "content": "2340"}]
    text = tokenizer.apply_chat_template(talk, tools=[get_json_schema(calculate)], tokenize=False)
    assert "Tools: calculate(expression)" in text
    assert '<tool_call>\n{"name": "calculate", "arguments": {"expression": "60 * 39"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n2340<|im_end|>\n<|im_start|>assistant\n2340<|im_end|>\n")
    assert "Tools" not in tokenizer.apply_chat_template(talk[:1], tokenize=False)


def test_a_name_and_a_number_are_one_token_wherever_they_stand() -> None:
    tokenizer = tokenizer_of("inbox")
    for text in ("What is the budget of Falcon?", '{"words": "budget Falcon"}', "412 | budget Falcon", "of Falcon 41."):
        assert "Falcon" in tokenizer.tokenize(text) and tokenizer.decode(tokenizer.encode(text)) == text
    for word in ("1", "41", "412", "500", "What is the ", " of ", "\nSubject: "):
        assert len(tokenizer.encode(word)) == 1, word


def test_what_a_turn_is_about_is_one_token() -> None:
    tokenizer = tokenizer_of("talks")
    for word in (*MOVES, *NUMBERS, "yes", "no", "Guess: ", "Is it above ", "\nPossible: "):
        assert len(tokenizer.encode(word)) == 1 and tokenizer.decode(tokenizer.encode(word)) == word
    assert tokenizer.tokenize(question_of(12)) == ["Is it above ", "12", "?"]
    marks = SpecialTokens(tokenizer, str(tokenizer.chat_template)).every.values()
    assert set(marks) == {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"}


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
    game, shown, rng = Game2048(SIZES[3]), [], random.Random(0)
    while len(shown) < 40:
        if game.over or not shown:
            game.reset(seed=len(shown))
        shown.append(game.shown())
        game.step(random_move(game, rng))
    replies = model.fast_generate([[{"role": "user", "content": board}] for board in shown],
                                  SamplingParams(max_tokens=4, seed=0))
    assert sum(bool(move_in(one.outputs[0].text)) for one in replies) >= 39
