"""The games keep their rules, pay what they promise, and do not fall over bad replies; known players of all games do as
is known; short runs of recipes that play."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import invoke_well, lines, run
from tables import not_refused

from lowmem_grpo.environments.env_spec import HELD_OUT
from lowmem_grpo.recipes import calculator, game2048, guess, tictactoe, twenty_questions
from lowmem_grpo.recipes.calculator import calculate, draw_sum
from lowmem_grpo.recipes.eval_task import baselines, held_out_games, play
from lowmem_grpo.recipes.game2048 import Game2048, Size
from lowmem_grpo.recipes.guess import Guess, number_in
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.recipes.tictactoe import EMPTY, TicTacToe, best_moves, free, square_in, value, winner

NO_NUMBER = ["", "no idea", "4 or 5", "9" * 5000, "٣", "\x00", "1e999999999999", "1-2"]


def rows(count: int, **columns: float) -> list[dict[str, Any]]:
    return [{"seed": seed, **columns} for seed in range(count)]


# guess


def test_every_hidden_number_is_found_by_listening() -> None:
    game = Guess()
    for seed in range(300):
        said = game.reset(seed=seed)
        assert "1 to 32" in said and "5 tries" in said
        hidden, low, high, done, reward = game.hidden, 1, 32, False, 0.0
        for tries in range(1, 6):
            middle = (low + high) // 2
            said, reward, done = game.step(f"My guess is {middle}.")
            if middle == hidden:
                assert (said, reward, done) == ("found", 1.0, True)
                break
            low, high = (middle + 1, high) if middle < hidden else (low, middle - 1)
            told = f"{'higher' if middle < hidden else 'lower'}: {low} to {high}"
            assert (said, reward, done) == (told, 0.0, tries == 5)
            assert done or game.state_key() == f"{low}-{high} {5 - tries}"
        assert (reward == 1) == (hidden != 32)  # 31 numbers can be found in five tries


def test_only_one_whole_number_is_a_guess_and_any_other_reply_loses() -> None:
    for reply, number in (
        ("7", 7), (" 07\n", 7), ("-3", -3), ("**12**.", 12), ("Is it 30?", 30), ("7.5", None), ("3\n4", None),
        *((none, None) for none in NO_NUMBER),
    ):
        assert number_in(reply) == number
    game = Guess()
    game.reset(seed=2)
    assert game.step("99") == ("lower: 1 to 32", 0.0, False) and game.step("-5") == ("higher: 1 to 32", 0.0, False)
    assert game.state_key() == "1-32 3", "a guess out of range costs a try and tells nothing"
    assert game.step("no idea") == ("unreadable", -1.0, True)


# tictactoe


def test_a_reply_that_is_no_free_square_is_illegal_and_told_what_is_allowed() -> None:
    for reply, place in (("5", 4), ("I take 9.", 8), ("0", None), ("12", None), ("1 2", None)):
        assert square_in(reply) == place
    for reply in (*NO_NUMBER, "0", "10", "X"):
        game = TicTacToe()
        game.reset(seed=1)
        assert game.step(reply) == ("illegal\n1|2|3\n4|5|6\n7|8|9\nFree: 1 2 3 4 5 6 7 8 9", -1.0, True), reply
    game.step("5")
    assert game.step("5")[1:] == (-1.0, True)


def test_every_game_alternates_and_pays_by_its_board() -> None:
    paid = set()
    for seed in range(500):
        game, rng = TicTacToe(), random.Random(seed)
        assert game.reset(seed=seed).endswith("\n1|2|3\n4|5|6\n7|8|9\nFree: 1 2 3 4 5 6 7 8 9")
        done, reward = False, 0.0
        while not done:
            before = game.board
            assert winner(before) is None and before.count("X") == before.count("O")
            said, reward, done = game.step(tictactoe.random_move(game, rng))
            board, _, unused = said.rpartition("\nFree: ")
            assert board.replace("|", "").replace("\n", "") == game.board == game.state_key()
            assert unused.split() == [EMPTY[place] for place in free(game.board)]
            assert game.board.count("X") == before.count("X") + 1
            assert all(old == new for old, new in zip(before, game.board, strict=True) if old in "XO")
        paid.add((winner(game.board), reward))
        assert winner(game.board) or not free(game.board)
    assert paid == {("X", 1.0), ("O", 0.0), (None, 0.5)}


def test_a_row_plays_the_same_game_again_against_the_strength_that_it_names() -> None:
    game = TicTacToe()
    for row in rows(20, strength=1.0):
        assert play(game, tictactoe.random_move, row) == play(TicTacToe((0.0,)), tictactoe.random_move, row)
        assert game.strength == 1.0 and not game.won
    assert {game.reset(seed) and game.strength for seed in range(99)} == set(tictactoe.STRENGTHS)


def test_a_perfect_opponent_never_loses_and_varies_its_moves() -> None:
    firsts = set()
    for seed in range(300):
        game, rng = TicTacToe((1.0,)), random.Random(seed)
        game.reset(seed=seed)
        game.step("5")
        firsts.add(game.board)
        while winner(game.board) is None and free(game.board):
            game.step(tictactoe.random_move(game, rng))
        assert winner(game.board) != "X"
    assert len(firsts) == 4  # all four corners, which are the best answers to the centre


def test_best_moves_agree_with_a_search_that_shares_no_code() -> None:
    lines = [{3 * row + column for column in range(3)} for row in range(3)]
    lines += [{3 * row + column for row in range(3)} for column in range(3)] + [{0, 4, 8}, {2, 4, 6}]

    def outcome(x: frozenset[int], o: frozenset[int], turn: str) -> int:
        """1 where X wins with the best play, 0 for a draw, -1 where O wins."""
        if any(line <= x for line in lines):
            return 1
        if any(line <= o for line in lines):
            return -1
        places = set(range(9)) - x - o
        if not places:
            return 0
        if turn == "X":
            return max(outcome(x | {place}, o, "O") for place in places)
        return min(outcome(x, o | {place}, "X") for place in places)

    seen = 0
    for marks in product("XO ", repeat=9):
        x, o = (frozenset(place for place, mark in enumerate(marks) if mark == one) for one in "XO")
        board = "".join(mark if mark != " " else EMPTY[place] for place, mark in enumerate(marks))
        if len(x) != len(o) or len(x) < 2 or winner(board) or not free(board):
            continue
        seen += 1
        worth = outcome(x, o, "X")
        assert value(board, "X") == worth
        assert best_moves(board, "X") == [place for place in free(board) if outcome(x | {place}, o, "O") == worth]
    assert seen > 1000


# calculator


def test_sums_are_right_and_the_calculator_is_exact_and_refuses_what_is_no_expression() -> None:
    for problem in take(distinct("train", 3, draw_sum, str), 900):
        assert calculate(problem) == str(eval(problem)) and eval(problem) >= 0
    for expression, result in (("12 * (3 + 4)", "84"), ("7/3", "7/3"), ("2-5", "-3"), ("8/2", "4")):
        assert calculate(expression) == result
    none = ("", "1 +", "2 ** 9", "__import__('os')", "1/0", "9" * 200, "x", "(" * 100)
    assert not_refused(calculate, [(one, "is no expression of whole numbers") for one in none]) == []


# players


@pytest.mark.parametrize(("game", "players", "expected"), [  # shares in percent, worked out or measured elsewhere
    (Guess(), guess.PLAYERS, {"blind": 15, "in range": 54, "bisection": 97}),
    (Guess(64, 6), guess.PLAYERS, {"blind": 9, "in range": 49, "bisection": 98}),
    (TicTacToe((0.0,)), tictactoe.PLAYERS, {"random": 58.5, "perfect": 96.8}),
    (TicTacToe((1.0,)), tictactoe.PLAYERS, {"random": 0, "perfect": 0}),
    (twenty_questions.answered_truly(), twenty_questions.PLAYERS, {"blind": 6.2, "listening": 79.7, "halving": 100}),
    *(pytest.param(Game2048(size), game2048.PLAYERS, shares, marks=pytest.mark.slow) for size, shares in (
        (Size(3, 32, 25), {"random": 47, "corner": 65, "greedy": 69}),
        (Size(3, 64, 60), {"random": 9.5, "corner": 42, "greedy": 22.5}))),
])
def test_known_players_do_as_well_as_is_known(game: Any, players: Any, expected: dict[str, float]) -> None:
    count, most = (700, 6) if isinstance(game, Game2048) else (1500, 4)
    found = baselines(game, players, rows(count))
    assert {name: share * 100 for name, share in found.items()} == pytest.approx(expected, abs=most)


# short runs, and data


def test_the_games_own_pay_decides_and_not_the_count_of_wins(tmp_path: Path) -> None:
    assert run("tictactoe", tmp_path).exit_code == 0
    written = lines(tmp_path / "completions.jsonl")
    assert [row["reward"] for row in written] == [row["rewards"]["TicTacToe"] for row in written]
    assert all(row["turns"] and row["ending"] == "done" for row in written)


@pytest.mark.parametrize(("name", "model"), [
    ("guess", "tiny-games"), ("calculator", "tiny-games"), ("tictactoe", "tiny-games"), ("game2048", "tiny-talks"),
    ("twenty_questions", "tiny-talks"), ("inbox", "tiny-inbox"),
])
@pytest.mark.every(3)
def test_eval_plays_the_same_games(name: str, model: str, tmp_path: Path) -> None:
    invoke_well("eval", model, "--recipe", name, "--limit", "6", "--out", str(tmp_path), "--engine",
                         "transformers")
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["prompts"] == 6 and 0 <= found["base"]["accuracy"] <= 1
    assert all(row["base"][0]["text"].startswith("> ") for row in found["rows"])


def test_held_out_games_are_repeated_by_their_seed_and_never_trained_on() -> None:
    games = held_out_games(50, 1).to_list()
    assert held_out_games(20, 1).to_list() == games[:20] and held_out_games(50, 2).to_list() != games
    assert min(row["seed"] for row in games) >= HELD_OUT  # training has lower ones
    assert games[0].keys() == held_out_games(1, 1, side=None)[0].keys() == {"prompt", "seed"}
    for exam, columns in ((tictactoe.EXAM, {"strength": 0.0}), (guess.EXAM, {}), (game2048.EXAM, {"side": 4}),
                          (twenty_questions.EXAM, {"world": "things"})):
        assert exam.problems(20, 1, None).to_list() == [row | columns for row in games[:20]]


def test_only_what_the_policy_says_itself_is_its_answer() -> None:
    for completion, right in (
        ("2340", 1.0), ("It is 2340.", 1.0), ("2341", 0.0), ("", 0.0),
        ([{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "2340"}], 0.0),
        ([{"role": "tool", "content": "1"}, {"role": "assistant", "content": "2340"}], 1.0),
    ):
        assert calculator.correct_answer([completion], ["2340"]) == [right]
