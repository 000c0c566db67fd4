"""An environment that lets the conversation begin anew: what the policy sees then, and what is trained."""

from typing import Any

import pytest
from scripted import TEMPLATE, played
from template_tokenizers import tokenizer_of

from lowmem_grpo.environments import Anew
from lowmem_grpo.models.packing import sequences_of
from lowmem_grpo.types import RolloutGroup

ROW = {"prompt": [{"role": "system", "content": "Play."}, {"role": "user", "content": ""}]}


class Board:
    """Shows the last board only; over after three moves."""

    def reset(self, **row: Any) -> Any:
        self.moves = 0
        return "board 0"

    def step(self, reply: str) -> Any:
        self.moves += 1
        return Anew(f"board {self.moves}"), 1.0, self.moves == 3


@pytest.mark.parametrize("append", [True, False])
def test_each_turn_sees_the_rows_prompt_and_the_last_observation_and_is_a_sequence_of_its_own(append: bool) -> None:
    [[one]] = played(lambda prompt: "up", [ROW], Board, n=1, append=append)
    tokenizer = tokenizer_of(TEMPLATE)
    expected = [tokenizer.apply_chat_template(
        [ROW["prompt"][0], {"role": "user", "content": f"board {number}"}], tokenize=False, add_generation_prompt=True,
    ) for number in range(3)]
    assert [tokenizer.decode(turn.prompt_ids) for turn in one.turns] == expected
    assert one.ending == "done" and [turn.reward for turn in one.turns] == [1.0] * 3
    assert [split.prompt_ids for split in one.splits] == [turn.prompt_ids for turn in one.turns[1:]]
    assert one.trained == [True] * len(one.completion_ids), "nothing comes between two boards"
    group = RolloutGroup(ROW, one.turns[0].prompt_ids, [one])
    [sequences] = sequences_of(group, [one])
    assert [([*each.prompt, *each.ids], each.mask.tolist()) for each in sequences] == [
        ([*turn.prompt_ids, *turn.completion_ids], [True] * len(turn.completion_ids)) for turn in one.turns]


def test_the_budget_of_tokens_is_that_of_one_sequence_and_max_turns_bounds_the_episode() -> None:
    [[one]] = played(lambda prompt: "up", [ROW], Board, n=1, completion=8)
    assert (one.ending, len(one.turns)) == ("done", 3)
    [[one]] = played(lambda prompt: "up", [ROW], Board, n=1, turns=2)
    assert (one.ending, len(one.turns)) == ("max_turns", 2)


class OnlyOnce(Board):
    """Begins anew after the first move, and goes on as usual after the second."""

    def step(self, reply: str) -> Any:
        observation, reward, done = super().step(reply)
        return (observation if self.moves == 1 else "and on"), reward, done


def test_after_a_new_beginning_the_history_grows_again() -> None:
    [[one]] = played(lambda prompt: "up", [ROW], OnlyOnce, n=1)
    assert len(one.splits) == 1 and one.splits[0].prompt_ids == one.turns[1].prompt_ids
    before = [*one.turns[1].prompt_ids, *one.turns[1].completion_ids]
    assert one.turns[2].prompt_ids[: len(before)] == before


class Same(Board):
    """Shows the same board again."""

    def step(self, reply: str) -> Any:
        return Anew("board 0"), *super().step(reply)[1:]


def test_a_board_that_is_shown_again_has_the_prompt_of_the_group() -> None:
    [[one]] = played(lambda prompt: "up", [ROW], Same, n=1)
    drawn = len(one.turns[0].completion_ids)
    assert [(split.start, split.prompt_ids) for split in one.splits] == [(drawn, None), (2 * drawn, None)]
    assert len({tuple(turn.prompt_ids) for turn in one.turns}) == 1


def test_anew_may_be_the_first_observation_too() -> None:
    class Begins(Board):
        def reset(self, **row: Any) -> Any:
            return Anew(super().reset())

    [[one]] = played(lambda prompt: "up", [ROW], Begins, n=1)
    assert one.opening[-1]["content"] == "board 0" and len(one.splits) == 2
