"""Twenty questions: guesses, questions, what the other side is asked, what the policy hears."""

from typing import Any

from lowmem_grpo.environments import AskBase
from lowmem_grpo.recipes.twenty_questions import (
    NUMBERS,
    THINGS,
    WORLDS,
    TwentyQuestions,
    TwentyQuestionsOptions,
    narrowed,
    truthful,
)


def game_of(thing: str) -> TwentyQuestions:
    """A game in which this is thought of."""
    game = TwentyQuestions(WORLDS["numbers" if thing in NUMBERS else "things"])
    game.reset(seed=0)
    game.thing = thing
    return game


def test_a_question_goes_to_the_base_model_which_alone_is_told_the_thing() -> None:
    game = game_of("cat")
    asked = game.step("Is it wet?")
    assert isinstance(asked, AskBase) and asked.messages == "You think of: cat. Answer with yes or no.\nIs it wet?"
    assert asked.readable is not None and asked.readable("No.") and not asked.readable("cat")
    assert asked.then("No.") == ("no, 19 left", 0.0, False)


def test_the_policy_hears_nothing_but_yes_or_no() -> None:
    for said, heard in (
        ("yes", "yes"), ("No, it is not.", "no"),
        *((text, "I do not know") for text in ("It is a cat!", "yes and no", "", "not", "I know nothing")),
    ):
        asked = game_of("cat").step("What is it?")
        assert isinstance(asked, AskBase) and asked.then(said) == (f"{heard}, 19 left", 0.0, False)


def test_the_policy_hears_which_numbers_fit_the_answers_whether_these_are_true_or_not() -> None:
    game = game_of("5")
    for question, said, heard in [
        ("Is it above 8?", "no", "no: 1 to 8, 5 left"), ("is it above 3 ?", "Yes.", "yes: 4 to 8, 4 left"),
        ("Is it above 6?", "yes", "yes: 7 to 8, 3 left"), ("Is it above 2?", "no", "no: 7 to 8, 2 left"),
        ("Is it above 7?", "maybe", "I do not know: 7 to 8, 1 left"),
    ]:
        asked = game.step(question)
        assert isinstance(asked, AskBase) and asked.then(said) == (heard, 0.0, False)


def test_what_says_nothing_or_contradicts_leaves_all_numbers_that_were_left() -> None:
    for question, answer, left in (
        ("Is it above 8?", "yes", (9, 16)), ("Is it above 8?", "no", (1, 8)), ("Is it above 0?", "no", (1, 16)),
        ("Is it above 16?", "yes", (1, 16)), ("Is it even?", "yes", (1, 16)), ("is it above 12 ?", "yes", (13, 16)),
        ("Is it above eight?", "yes", (1, 16)), ("Is it above 8 or 9?", "yes", (1, 16)), ("", "yes", (1, 16)),
        ("Is it above " + "9" * 5000 + "?", "yes", (1, 16)),
        ("Is it above 8?", "I do not know", (1, 16)),
    ):
        assert narrowed(1, 16, question, answer) == left


def test_what_ends_a_game_and_what_it_pays() -> None:
    for thing, reply, reward, won in (
        ("cat", "Guess: cat", 1.0, True), ("cat", "I know. guess: A Cat!", 1.0, True),
        ("moon", "GUESS:  the Moon.", 1.0, True), ("cat", "I guess cat", -1.0, False), ("cat", "guess:", -1.0, False),
        ("cat", "Guess: dog", 0.0, False), ("cat", "Guess: cat or dog", 0.0, False), ("cat", "cat", -1.0, False),
        ("cat", "", -1.0, False), ("cat", "Is it wet", -1.0, False), ("5", "Guess: 5", 1.0, True),
        ("5", "Guess: 15", 0.0, False), ("5", "Guess: 5 6", 0.0, False), ("5", "5", -1.0, False),
    ):
        game = game_of(thing)
        found: Any = game.step(reply)
        assert (found[1:], game.won) == ((reward, True), won)


def test_the_last_turn_has_to_be_a_guess() -> None:
    game = game_of("5")
    game.opponent = truthful
    said = [game.step("Is it above 8?") for _ in range(6)]
    assert said[:5] == [(f"no: 1 to 8, {left} left", 0.0, False) for left in (5, 4, 3, 2, 1)]
    assert said[5] == ("It is 5.", 0.0, True)


def test_every_number_is_thought_of_and_a_row_may_name_the_world() -> None:
    game = TwentyQuestions()
    assert {game.reset(seed=seed) and game.thing for seed in range(300)} == set(NUMBERS)
    game.reset(seed=7, world="things")
    assert game.world == WORLDS["things"] and game.thing in THINGS and game.left == 20
    assert len(set(THINGS)) == len(THINGS) == 100


def test_the_embedded_model_plays_in_a_smaller_world_than_others() -> None:
    assert (TwentyQuestionsOptions().chosen(tiny=True), TwentyQuestionsOptions().chosen(tiny=False)) == \
        (WORLDS["numbers"], WORLDS["things"])
    short = TwentyQuestionsOptions(turns=4).chosen(tiny=True)
    assert short.turns == 4 and short.things == NUMBERS and TwentyQuestions(short).reset().count("4 turns") == 1
