"""2048 keeps its rules, pays what it promises, shows the last board only."""

import random

import pytest

from lowmem_grpo.environments import Anew
from lowmem_grpo.recipes.eval_task import play
from lowmem_grpo.recipes.game2048 import (
    IN_VAIN,
    SIZES,
    Board,
    Game2048,
    Game2048Options,
    Size,
    largest,
    move_in,
    possible,
    random_move,
    slid,
    worth,
)


def test_a_move_slides_every_row_or_column_and_equal_neighbours_become_one_only_once() -> None:
    for row, after in (
        ((0, 2, 2), (4, 0, 0)), ((2, 2, 2), (4, 2, 0)), ((2, 2, 4), (4, 4, 0)), ((4, 2, 2), (4, 4, 0)),
        ((2, 0, 2, 4), (4, 4, 0, 0)), ((2, 2, 2, 2), (4, 4, 0, 0)), ((0, 0, 0), (0, 0, 0)), ((8, 4, 2), (8, 4, 2)),
    ):
        assert slid((row,), "left") == (after,)
    board: Board = ((2, 0, 2), (0, 4, 0), (2, 0, 0))
    assert slid(board, "right") == ((0, 0, 4), (0, 0, 4), (0, 0, 2))
    assert slid(board, "up") == ((4, 4, 2), (0, 0, 0), (0, 0, 0))
    assert slid(board, "down") == ((0, 0, 0), (0, 0, 0), (4, 4, 2))
    assert possible(((2, 4, 2), (4, 2, 4), (2, 4, 2))) == []
    assert possible(((2, 2, 4), (8, 4, 2), (2, 8, 4))) == ["left", "right"]


def test_every_game_follows_its_rules_and_pays_by_its_last_board() -> None:
    outcomes = set()
    for seed in range(60):
        game, rng, total, turns, done = Game2048(Size(3, 32, 25)), random.Random(seed), 0.0, 0, False
        assert game.reset(seed=seed).startswith("2048: reach 32. Reply with a move.\n")
        while not done:
            before, move = game.board, random_move(game, rng)
            said, reward, done = game.step(move)
            assert isinstance(said, Anew) and said.observation == game.shown()
            new = [(old, tile) for row, after in zip(slid(before, move), game.board, strict=True)
                   for old, tile in zip(row, after, strict=True) if old != tile]
            assert new == [] if game.won else len(new) == 1 and new[0][0] == 0 and new[0][1] in (2, 4)
            total, turns = total + reward, turns + 1
        assert total == pytest.approx(2.0 if game.won else worth(game.board, 32))
        assert game.won == (largest(game.board) == 32) and (game.won or turns == 25 or not possible(game.board))
        outcomes.add(game.won)
    assert outcomes == {True, False}


def test_a_reply_that_is_not_one_move_loses_all_that_was_earned() -> None:
    for reply, move in (("left", "left"), ("I move Up.", "up"), ("down, down", "down")):
        assert move_in(reply) == move
    for reply in ("", "upwards", "left right", "left or right", "9" * 5000, "\x00"):
        game = Game2048()
        game.reset(seed=1)
        _, first, _ = game.step(possible(game.board)[0])
        said, reward, done = game.step(reply)
        assert done and first + reward == pytest.approx(-1.0)
        assert said.observation == f"That is no move.\n{game.shown()}"


def test_a_move_in_vain_costs_a_little_and_a_move_and_the_game_goes_on_until_its_last() -> None:
    game = Game2048(Size(3, 32, 3))
    game.reset(seed=1)
    game.board = ((2, 0, 0), (4, 0, 0), (2, 0, 0))
    _, first, _ = game.step("up")
    said, reward, done = game.step("left")
    assert (said.observation, done, game.left) == (game.shown(), False, 1)
    assert reward == pytest.approx(-IN_VAIN) and first == pytest.approx(worth(game.board, 32) - IN_VAIN)
    assert game.step("left")[2] and not game.won


def test_what_is_shown_is_all_of_the_state_that_a_player_needs() -> None:
    game = Game2048()
    game.reset(seed=3)
    game.board = ((2, 0, 16), (0, 4, 0), (0, 0, 0))
    assert game.shown() == \
        "2048: reach 32. Reply with a move.\n2 0 16\n0 4 0\n0 0 0\nPossible: left down right up"


def test_a_seed_repeats_its_game_and_a_row_may_name_the_board() -> None:
    assert [play(Game2048(), random_move, {"seed": 5})] * 2 == [play(Game2048(), random_move, {"seed": 5})] * 2
    game = Game2048()
    game.reset(seed=1, side=4)
    assert game.size == SIZES[4] and len(game.board) == 4


def test_the_embedded_model_plays_on_a_smaller_board_than_others() -> None:
    assert (Game2048Options().size(tiny=True), Game2048Options().size(tiny=False)) == (SIZES[3], SIZES[4])
    assert Game2048Options(side=4, goal=512).size(tiny=True) == Size(4, 512, 250)
