"""What rollouts of plain Python become: every sampled token trained once, given what the engine saw before it."""

from itertools import permutations
from typing import Any

import pytest
import torch
from tables import every_row
from trainer_runs import close, exact, gradient

from lowmem_grpo.models.packing import sequences_of
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.rollout_func import group_of, rollout_of
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

PROMPT = [5, 6, 7]


def turn(prompt: list[int], *drawn: int, **more: Any) -> Turn:
    return Turn(prompt, list(drawn), [-0.25 * token for token in drawn], more.pop("finish_reason", "stop"), **more)


def after(before: Turn, *between: int) -> list[int]:
    """A prompt that continues a turn."""
    return [*before.prompt_ids, *before.completion_ids, *between]


FIRST = turn(PROMPT, 10, 11)
SECOND = turn(after(FIRST, 20, 21), 12, 13, 14)
OTHERWISE = turn(after(FIRST, 22), 15)  # the caller went on from the first turn in another way
AGAIN = turn([5, 8], 16, 17)  # a conversation of its own
REWRITTEN = turn([*PROMPT, 10, 23], 18, 19)  # the template dropped a token of the first turn


def trained_once(made: Rollout, prompt: list[int]) -> dict[tuple[int, ...], int]:
    """Every drawn token as a training pass computes it: all that it sees, and itself."""
    [sequences] = sequences_of(RolloutGroup({}, prompt, [made]), [made])
    found = {}
    for one in sequences:
        ids = [*one.prompt, *one.ids]
        for at in (one.mask.nonzero()[:, 0] + len(one.prompt)).tolist():
            assert tuple(ids[:at]) not in found, "a token is trained twice"
            found[tuple(ids[:at])] = ids[at]
    return found


def as_sampled(*turns: Turn) -> dict[tuple[int, ...], int]:
    """The same, by the engine."""
    return {(*one.prompt_ids, *one.completion_ids[:at]): token
            for one in turns for at, token in enumerate(one.completion_ids)}


@every_row(("histories", "sequences"), [
    ([[FIRST]], 1), ([[FIRST, SECOND]], 1), ([[FIRST, REWRITTEN]], 2), ([[FIRST, SECOND], [AGAIN]], 2),
    ([[FIRST, SECOND], [FIRST, OTHERWISE]], 2), ([[FIRST], [AGAIN], [FIRST, SECOND]], 2),
    ([[FIRST, AGAIN, SECOND]], 2),  # two conversations by turns
])
def test_every_sampled_token_is_trained_once_behind_what_the_engine_saw(
    histories: list[list[Turn]], sequences: int
) -> None:
    made, all_turns = rollout_of(histories), {id(one): one for history in histories for one in history}.values()
    assert trained_once(made, PROMPT) == as_sampled(*all_turns)
    assert len(made.splits) + 1 == sequences
    assert made.trained is not None and made.num_trained == sum(len(one.completion_ids) for one in all_turns)
    drawn = [value for value, ours in zip(made.rollout_logprobs, made.trained, strict=True) if ours]
    assert drawn == [value for one in made.turns for value in one.logprobs], "credit and parity count on this order"
    assert all(ours or value == 0.0 for value, ours in zip(made.rollout_logprobs, made.trained, strict=True))


def test_two_turns_that_drew_the_same_are_two_turns() -> None:
    twin = turn(PROMPT, 10, 11)
    made = rollout_of([[FIRST], [twin]])
    assert made.num_trained == 4 and len(made.splits) == 1
    assert rollout_of([[FIRST], [FIRST]]).num_trained == 2, "and one that stands in two histories is one"


def test_ends_and_versions_are_those_of_the_turns() -> None:
    made = rollout_of([[turn(PROMPT, 10, policy_version=4), turn([5], 11, policy_version=3, cached_tokens=1)]])
    assert (made.finish_reason, made.ending, made.policy_version, made.cached_tokens) == ("stop", "done", 3, 1)
    cut = rollout_of([[FIRST], [turn([9], 11, finish_reason="length", text="cut")]])
    assert (cut.finish_reason, cut.ending, cut.text) == ("length", "max_tokens", "cut")
    with pytest.raises(ValueError, match="nothing to train"):
        rollout_of([[]])


def test_members_share_the_prompt_that_most_began_with() -> None:
    group = group_of([[[AGAIN]], [[FIRST, SECOND]], [[turn(PROMPT, 30)]]])
    assert group.prompt_ids == PROMPT
    assert [[split.start for split in one.splits] for one in group.rollouts] == [[0], [], []]
    for made, turns in zip(group.rollouts, ([AGAIN], [FIRST, SECOND]), strict=False):
        assert trained_once(made, group.prompt_ids) == as_sampled(*turns)


def test_the_order_of_histories_does_not_change_the_gradient() -> None:
    policy = Policy(exact())
    histories = [[FIRST, SECOND], [FIRST, OTHERWISE], [AGAIN], [FIRST, REWRITTEN]]
    found = []
    for order in permutations(histories):
        group = group_of([list(order), [[turn(PROMPT, 40, 41, 42)]]])
        group.rollouts[0].advantage, group.rollouts[1].advantage = 0.75, -0.5
        for one in group.rollouts:
            one.old_logprobs = torch.tensor(one.rollout_logprobs)
        found.append(gradient(policy, [group]))
    assert len(found) == 24
    for one in found[1:]:
        close(one, found[0])
