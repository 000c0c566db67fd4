"""Twenty questions: guesses, questions, what the other side is asked, what the policy hears; known players."""

import random
from typing import Any

import pytest

from lowmem_grpo.environments import AskBase
from lowmem_grpo.recipes.games.playing import baselines
from lowmem_grpo.recipes.games.twenty_questions import (
    PLAYERS,
    PROPERTIES,
    TABLE,
    THINGS,
    WORLDS,
    TwentyQuestions,
    about,
    answered_truly,
    guess_in,
    left_over,
    question_of,
    truth,
    truthful,
    yes_or_no,
)


def game_of(thing: str) -> TwentyQuestions:
    """A game in which this is thought of."""
    game = TwentyQuestions()
    game.reset(seed=0)
    game.thing = thing
    return game


def test_the_small_world_can_be_told_apart_by_its_properties() -> None:
    assert len(TABLE) == len(set(TABLE.values())) == 24 and len(set(THINGS)) == len(THINGS)
    assert all(len(bits) == len(PROPERTIES) and set(bits) <= {"0", "1"} for bits in TABLE.values())
    for column in zip(*TABLE.values(), strict=True):
        assert 8 <= column.count("1") <= 16


def test_a_question_goes_to_the_base_model_which_alone_is_told_the_thing() -> None:
    game = game_of("cat")
    asked = game.step("Is it wet?")
    assert isinstance(asked, AskBase) and asked.messages == "You think of: cat. Answer with yes or no.\nIs it wet?"
    assert asked.readable is not None and asked.readable("No.") and not asked.readable("cat")
    assert asked.then("No.") == ("no, 5 left", 0.0, False)
    assert game.known == [("Is it wet?", "no")]


@pytest.mark.parametrize("said", ["It is a cat!", "yes and no", "", "not"])
def test_the_policy_hears_nothing_but_yes_or_no(said: str) -> None:
    asked = game_of("cat").step("What is it?")
    assert isinstance(asked, AskBase) and asked.then(said) == ("I do not know, 5 left", 0.0, False)


@pytest.mark.parametrize(("reply", "reward", "won"), [
    ("Guess: cat", 1.0, True), ("I know. guess: A Cat!", 1.0, True), ("Guess: dog", 0.0, False),
    ("Guess: cat or dog", 0.0, False), ("cat", -1.0, False), ("", -1.0, False), ("Is it wet", -1.0, False),
])
def test_what_ends_a_game_and_what_it_pays(reply: str, reward: float, won: bool) -> None:
    game = game_of("cat")
    found: Any = game.step(reply)
    assert (found[1:], game.won) == ((reward, True), won)


def test_the_last_turn_has_to_be_a_guess() -> None:
    game = game_of("cat")
    game.opponent = truthful
    said = [game.step("Is it wet?") for _ in range(6)]
    assert said[:5] == [(f"no, {left} left", 0.0, False) for left in (5, 4, 3, 2, 1)]
    assert said[5] == ("It is cat.", 0.0, True)


def test_a_person_may_take_the_other_side() -> None:
    game, asked = game_of("cat"), []

    def person(told: str) -> str:
        asked.append(told)
        return "Yes!"

    game.opponent = person
    assert game.step("Is it soft?") == ("yes, 5 left", 0.0, False)
    assert asked == [about("cat", "Is it soft?")] and TwentyQuestions.opponent is None


@pytest.mark.parametrize(("reply", "name"), [
    ("Guess: cat", "cat"), ("GUESS:  the Moon.", "moon"), ("Is it a cat?", None), ("I guess cat", None),
    ("guess:", None),
])
def test_a_guess_is_what_stands_behind_its_word(reply: str, name: str | None) -> None:
    assert guess_in(reply) == name


@pytest.mark.parametrize(("reply", "answer"), [
    ("yes", "yes"), ("No, it is not.", "no"), ("yes, no", None), ("I know nothing", None), ("", None),
])
def test_an_answer_has_one_of_the_two_words(reply: str, answer: str | None) -> None:
    assert yes_or_no(reply) == answer


def test_true_answers_leave_the_thing_over() -> None:
    for thing in TABLE:
        game = game_of(thing)
        game.known = [(question_of(name), truth(thing, question_of(name))) for name in PROPERTIES]
        assert left_over(game) == [thing]
    with pytest.raises(ValueError, match="'What is it\\?' is not about one of alive, big"):
        truth("cat", "What is it?")


def test_all_things_are_thought_of_equally_often_and_a_seed_always_thinks_of_the_same() -> None:
    game, thoughts = TwentyQuestions(), []
    for seed in range(2400):
        game.reset(seed=seed)
        thoughts.append(game.thing)
    assert set(thoughts) == set(TABLE) and all(60 < thoughts.count(thing) < 145 for thing in TABLE)
    game.reset(seed=7, world="large")
    assert game.world == WORLDS["large"] and game.thing in THINGS and game.left == 20


def test_known_players_do_as_well_as_is_known() -> None:
    found = baselines(answered_truly(), PLAYERS, [{"seed": seed} for seed in range(1500)])
    assert {name: share * 100 for name, share in found.items()} == pytest.approx(
        {"blind": 4.2, "asks anything": 47.5, "halving": 95.8}, abs=4)


def test_a_player_asks_within_the_rules() -> None:
    for player in PLAYERS.values():
        game, rng = answered_truly(), random.Random(1)
        game.reset(seed=3)
        for _ in range(5):
            reply = player(game, rng)
            assert guess_in(reply) in TABLE or reply in map(question_of, PROPERTIES)
            game.step(reply)
