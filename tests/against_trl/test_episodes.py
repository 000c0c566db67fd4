"""One environment class, played in TRL 1.16 and here with the same scripted policy: the same ids, masks and rewards."""

from typing import Any

import pytest
from scripted_policy import scripted_trainer
from trl_episodes import TEMPLATE, Played, call, sampled, trl_episodes

from lowmem_grpo.types import RolloutGroup


class Counter:
    """An environment as TRL takes it: public methods are tools, and it owns its reward."""

    def reset(self, start: int = 0, **row: Any) -> str:
        self.total, self.row = start, row
        return f" It begins at {start}."

    def add(self, amount: int) -> str:
        """Add to the total.

        Args:
            amount: How much.

        Returns:
            The new total.
        """
        self.total += amount
        return f"total {self.total}"

    def show(self, times: int = 1) -> str:
        """Show the total.

        Args:
            times: How often.

        Returns:
            The total.
        """
        return f"{self.total} " * times

    def get_reward(self) -> float:
        return float(self.total)


ROWS = [{"prompt": [{"role": "user", "content": f"Count, {n}."}], "start": 10 * n} for n in range(4)]
SCRIPTS = [
    ["nothing to do"], [call("add", amount=3), "13"],
    [call("add", amount=1) + "\n" + call("show"), "11"], ["I add." + call("add", amount=1), call("add", amount=2), "3"],
    [call("show", times=400), "never"], [call("add", amount=1), call("show", times=400), "never"],
    [call("add", amount=1), call("add", amount=2), call("add", amount=4), "never"], ["6"],
]
SETTINGS: dict[str, Any] = {"max_completion_length": 300, "max_tool_calling_iterations": 2}


@pytest.fixture(scope="module")
def theirs() -> list[Played]:
    return trl_episodes(ROWS, SCRIPTS, environment_factory=Counter, **SETTINGS)


def test_trl_plays_what_the_script_says(theirs: list[Played]) -> None:
    turns = [sum(message["role"] == "assistant" for message in one.messages) for one in theirs]
    assert turns == [1, 2, 2, 3, 1, 2, 3, 1]
    assert [one.rewards["Counter"] for one in theirs] == [0.0, 3.0, 11.0, 13.0, 20.0, 21.0, 33.0, 30.0]
    for one, script in zip(theirs, SCRIPTS, strict=True):
        own = [id for id, mine in zip(one.completion_ids, one.mask, strict=True) if mine]
        assert own == [id for text in script[: len([m for m in one.messages if m["role"] == "assistant"])]
                       for id in sampled(text)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RolloutGroup], list[Any]]:
    """The groups, and the messages that reward functions got."""
    seen: list[Any] = []

    def keep(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(list(one) for one in completions)
        return [0.0] * len(completions)

    trainer = scripted_trainer(tmp_path_factory.mktemp("ours"), TEMPLATE, ROWS, SCRIPTS, reward_funcs=[keep],
                               settings=SETTINGS, environment_factory=Counter)
    return trainer.rollout(), seen


def test_the_same_class_gives_the_same_ids_masks_rewards_and_messages_here(
    theirs: list[Played], ours: tuple[list[RolloutGroup], list[Any]]
) -> None:
    groups, seen = ours
    rollouts = [(group.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
    for (prompt_ids, rollout), messages, one in zip(rollouts, seen, theirs, strict=True):
        assert prompt_ids == one.prompt_ids and rollout.completion_ids == one.completion_ids
        assert [int(drawn) for drawn in rollout.trained or []] == one.mask
        assert rollout.rewards["Counter"] == one.rewards["Counter"]
        assert messages == one.messages
