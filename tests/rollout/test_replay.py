"""The replay buffer: which groups are kept, which are taken, and what they carry along."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.routes import Routes
from lowmem_grpo.rollout.replay import ReplayBuffer, as_sampled
from lowmem_grpo.types import TOKEN_FIELDS, ImageToken, Rollout, RolloutGroup, Split, TokenField, Turn

ROWS = [{"prompt": f"row {index}"} for index in range(20)]


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in (TokenField("seen", kept=True), TokenField("made")):
        monkeypatch.setitem(TOKEN_FIELDS, row.name, row)


def group(row: int, *rewards: float | None, version: int = 0, logprob: float = -0.1) -> RolloutGroup:
    """A scored group, with everything that an update fills in."""
    rollouts = [
        Rollout(
            [3, 151_000 + index], [logprob, -(1 / 3) ** (index + 1)], "stop", f"text {index}", version,
            rewards={"a": reward, "b": None}, reward=reward, advantage=1.0, extras={"seen": 1},
            token_advantages=torch.ones(2), old_logprobs=torch.ones(2), ref_logprobs=torch.ones(2),
            entropy=torch.ones(2), policy_mask=torch.ones(2, dtype=torch.bool), unit=3,
            fields={"seen": 0.5, "made": 0.25},
        )
        for index, reward in enumerate(rewards)
    ]
    return RolloutGroup(ROWS[row], [1, 2, row], rollouts, baseline=0.25, row_index=row)


def held(buffer: ReplayBuffer) -> list[int]:
    return [kept.prompt_ids[-1] for kept in buffer.entries]


def test_the_groups_of_the_largest_spread_stay_and_of_equal_ones_the_newest() -> None:
    buffer = ReplayBuffer(2)
    for row in range(4):
        buffer.offer([group(row, 0, 1)])
    assert held(buffer) == [2, 3]
    buffer.offer([group(4, 0, 1), group(5, 0, 3), group(6, 0, 2)])
    assert held(buffer) == [5, 6]
    buffer.offer([group(7, 0, 0.5)])
    assert held(buffer) == [5, 6]


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_group_that_is_not_finite_is_not_kept(broken: float) -> None:
    buffer, invalid = ReplayBuffer(4), group(1, 0, 1)
    invalid.rollouts[0].invalid_rewards = {"a": float("nan")}
    buffer.offer([group(0, 0, 1, logprob=broken), invalid])
    assert not buffer.entries


def test_a_replayed_group_has_what_was_sampled_and_nothing_that_an_update_filled_in_however_often() -> None:
    fresh, buffer = group(4, 0, 1, version=7), ReplayBuffer(1)
    buffer.offer([fresh])
    fresh.rollouts[0].rewards["a"], fresh.rollouts[0].old_logprobs = 99.0, torch.zeros(2)
    marked = buffer.entries
    (replayed,) = buffer.take_groups(1, 9)
    assert (replayed.replayed, replayed.row, replayed.baseline, replayed.row_index) == (True, ROWS[4], 0.25, 4)
    expected = Rollout([3, 151_000], [-0.1, -1 / 3], "stop", "text 0", 7, rewards={"a": 0, "b": None}, reward=0,
                       fields={"seen": 0.5}, unit=3)
    assert replayed.rollouts[0] == expected  # every other field has its default
    replayed.rollouts[0].old_logprobs, replayed.rollouts[0].advantage = torch.ones(2), 5.0
    buffer.entries = marked  # as where an update is given up
    assert buffer.take_groups(1, 9)[0].rollouts[0] == expected


def restored(buffer: ReplayBuffer, size: int, names: Any = ("a", "b"), generations: int = 2) -> ReplayBuffer:
    fresh = ReplayBuffer(size)
    fresh.restore(json.loads(json.dumps(buffer.state())), ROWS, names, generations)
    return fresh


def test_a_restored_buffer_is_the_saved_one() -> None:
    buffer = ReplayBuffer(3)
    buffer.offer([group(2, 0, 1), group(0, 0.1, None, version=3), group(5, 0.1 + 0.2, 1)])
    assert restored(buffer, 3).entries == buffer.entries
    assert restored(buffer, 3).entries[0].row is ROWS[2]
    assert restored(buffer, 1).entries == ReplayBuffer(1).entries + tuple(buffer.entries[:1])
    assert not restored(buffer, 0).entries
    older = buffer.state()
    for saved in older[0]["rollouts"]:
        del saved["fields"], saved["unit"]
    buffer.restore(older, ROWS, ("a", "b"), 2)
    assert [(one.fields, one.unit) for one in buffer.entries[0].rollouts] == [({}, None)] * 2


def test_kept_groups_that_no_longer_fit_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    buffer = ReplayBuffer(3)
    buffer.offer([group(0, 0, 1), group(1, 0, 1, 2)])
    with caplog.at_level(logging.WARNING):
        assert held(restored(buffer, 3)) == [0]
        assert held(restored(buffer, 3, generations=3)) == [1]
        assert not restored(buffer, 3, names=["a"]).entries
    assert "1 of 2 groups kept for replay are left out" in caplog.text
    assert "2 of 2 groups kept for replay are left out" in caplog.text


def episode(group_prompt: list[int]) -> Rollout:
    """Three turns: context between the first two, and another sequence for the third. The ids of its second turn are
    not those that the engine was asked with."""
    ids, trained = [3, 4, 9, 5, 8, 6, 7], [True, True, False, True, False, True, True]
    logprobs = [-0.1, -1 / 3, 0.0, -0.5, 0.0, -0.7, -0.9]
    turns = [
        Turn(group_prompt, [3, 4], [-0.1, -1 / 3], "stop", "one", 3, 1, {"role": "assistant", "content": "one"},
             [{"role": "tool", "content": "nine"}], 0.5, "start", 2, 1, 0.25),
        Turn([77], [5], [-0.5], "length", state=None), Turn([50, 51, 8], [6, 7], [-0.7, -0.9], "stop", reward=1.0),
    ]
    return Rollout(ids, logprobs, "length", "three", 3, trained=trained, splits=[Split(4, [50, 51])], turns=turns,
                   ending="max_turns", opening=[{"role": "user", "content": "Begin."}], reward=1.0,
                   rewards={"a": 1.0, "b": None})


def test_an_episode_is_kept_and_restored_with_its_turns_its_sequences_and_its_end() -> None:
    kept, buffer = group(1, 0, 1), ReplayBuffer(1)
    kept.rollouts[1] = episode(kept.prompt_ids)
    expected = replace(kept.rollouts[1])
    kept.rollouts[1].old_logprobs, kept.rollouts[1].environment = torch.ones(7), object()
    buffer.offer([kept])
    assert buffer.entries[0].rollouts[1] == expected
    assert restored(buffer, 1).entries == buffer.entries
    saved = buffer.state()[0]["rollouts"]
    assert not {"turns", "routes"} & saved[0].keys()
    assert [turn["numbers"] is None for turn in saved[1]["turns"]] == [True, False, True]


def test_a_restored_group_has_the_routes_of_its_completions_and_of_its_episodes() -> None:
    def routes(tokens: int, seed: int) -> Routes:
        generator = torch.Generator().manual_seed(seed)
        return Routes((torch.randint(0, 300, (tokens, 2, 3), generator=generator).to(torch.int16),))

    fresh = as_sampled(group(1, 0, 1))
    fresh.rollouts[0].routes = routes(4, 0)
    talk = Rollout([3, 9, 4], [0.0] * 3, "stop", trained=[True, False, True], rewards={"a": 1, "b": None}, reward=1,
                   fields={"seen": 0.5})
    talk.turns = [Turn([1, 2, 1], [3], [0.0], "stop", routes=routes(3, 1)),
                  Turn([1, 2, 1, 3, 9], [4], [0.0], "stop", routes=routes(5, 2))]
    fresh.rollouts[1] = talk
    buffer = ReplayBuffer(1)
    buffer.offer([fresh])
    (again,) = restored(buffer, 1).entries
    for kept in (buffer.entries[0], again):
        (before,), (after,) = pack([fresh]), pack([kept])
        assert before.routes is not None and after.routes is not None and before.routes.dtype == torch.int16
        assert torch.equal(before.routes, after.routes)


def test_a_restored_group_has_the_images_of_its_prompt_and_of_its_turns() -> None:
    cat, dog = ([1, ImageToken(2, name)] for name in ("cat", "dog"))
    buffer = ReplayBuffer(1)
    buffer.offer([replace(group(1, 0, 1), prompt_ids=cat)])
    buffer.entries[0].rollouts[0].turns = [Turn(prompt, [3], [-0.1], "stop") for prompt in (cat, dog)]
    assert restored(buffer, 1).entries == buffer.entries != (replace(buffer.entries[0], prompt_ids=dog),)
