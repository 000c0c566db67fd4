"""One environment class, played in TRL 1.16 and here with the same scripted policy: the same ids, masks and rewards."""

import math
from pathlib import Path
from typing import Any

import pytest
from trl_episodes import TEMPLATE, Played, call, sampled, scripted_trainer, trl_episodes


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


class Notes:
    """Another environment, which is asynchronous, says nothing at first and pays nothing."""

    def reset(self, **row: Any) -> None:
        assert "environment" not in row
        self.noted: list[str] = []

    async def note(self, text: str) -> str:
        """Note a text.

        Args:
            text: What to note.
        """
        self.noted.append(text)
        return f"noted {len(self.noted)}"


def twice(text: str) -> str:
    """Say a text twice.

    Args:
        text: What to say.
    """
    return text + text


def noted(environments: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
    """How much was noted, in the environments that note."""
    return [float(len(one.noted)) if isinstance(one, Notes) else None for one in environments]


def asked(prompts: list[Any], **_: Any) -> list[float]:
    """The letters of the prompt's last message, with what the environment added."""
    return [float(len(prompt[-1]["content"])) for prompt in prompts]


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


def compare(
    folder: Path, theirs: list[Played], rows: list[dict[str, Any]] | None, scripts: list[list[str]], **given: Any
) -> None:
    """Play the same here, and hold every episode against TRL's."""
    seen: list[Any] = []

    def keep(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(list(one) for one in completions)
        return [0.0] * len(completions)

    functions = [keep, *given.pop("reward_funcs", ())]
    groups = scripted_trainer(folder, TEMPLATE, rows, scripts, reward_funcs=functions, **given).rollout()
    rollouts = [(group.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
    for (prompt_ids, rollout), messages, one in zip(rollouts, seen, theirs, strict=True):
        assert prompt_ids == one.prompt_ids and rollout.completion_ids == one.completion_ids
        assert [int(drawn) for drawn in rollout.trained or [True] * len(one.mask)] == one.mask
        paid = {name: value for name, value in rollout.rewards.items() if name != "keep" and value is not None}
        assert paid == {name: value for name, value in one.rewards.items() if not math.isnan(value)}
        assert messages == one.messages


def test_the_same_class_gives_the_same_ids_masks_rewards_and_messages_here(
    theirs: list[Played], tmp_path: Path
) -> None:
    compare(tmp_path, theirs, ROWS, SCRIPTS, settings=SETTINGS, environment_factory=Counter)


def test_several_environments_with_common_tools_are_played_alike(tmp_path: Path) -> None:
    rows = [row | {"environment": name} for row, name in zip(ROWS, ("counter", "notes"), strict=False)]
    scripts = [[call("twice", text="ab") + call("add", amount=2), "2"], ["no"],
               [call("note", text="x"), call("note", text="y") + call("note", text="z"), "3"],
               [call("twice", text="c"), "cc"]]
    given = {"environment_factory": {"counter": Counter, "notes": Notes}, "tools": [twice],
             "reward_funcs": [noted, asked]}
    theirs = trl_episodes(rows, scripts, max_completion_length=300, **given)
    assert [one.rewards["Counter"] for one in theirs[:2]] == [2.0, 0.0] and theirs[2].rewards["noted"] == 3.0
    compare(tmp_path, theirs, rows, scripts, settings={"max_completion_length": 300}, **given)


def test_an_environment_without_a_dataset_is_asked_with_its_observation_alone(tmp_path: Path) -> None:
    class Asking(Counter):
        def reset(self, **row: Any) -> str:
            self.total = 0
            return "Count to 3."

    scripts = [[call("add", amount=3), "3"], ["3"]]
    settings = {"max_completion_length": 300, "max_steps": 1}
    theirs = trl_episodes([{"prompt": [{"role": "user", "content": ""}]}], scripts, environment_factory=Asking,
                          **settings)
    compare(tmp_path, theirs, None, scripts, settings=settings, environment_factory=Asking)


def test_a_rollout_func_is_called_and_read_as_there(tmp_path: Path) -> None:
    said: list[Any] = []

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        said.append([prompt[-1]["content"] for prompt in prompts])
        drawn = [sampled(f"row {place}") for place in range(len(prompts))]
        ids = [[*one, *sampled("context"), *one] for one in drawn]
        return {
            "prompt_ids": [sampled(text) for text in said[-1]], "completion_ids": ids,
            "env_mask": [[int(not len(one) <= at < len(all_) - len(one)) for at in range(len(all_))]
                         for one, all_ in zip(drawn, ids, strict=True)],
            "logprobs": [[-1.0] * len(one) for one in ids], "won": [*range(len(prompts))], "level": 2, "start": [7] * 4,
        }

    def pays(completions: list[Any], won: list[int], level: list[int], start: list[int], **_: Any) -> list[float]:
        return [100.0 * level[place] + 10 * start[place] + each for place, each in enumerate(won)]

    theirs = trl_episodes(ROWS[:2], [], rollout_func=play, reward_funcs=[pays])
    assert [one.rewards["pays"] for one in theirs] == [270.0, 271.0, 272.0, 273.0]
    compare(tmp_path, theirs, ROWS[:2], [[]] * 4, rollout_func=play, reward_funcs=[pays])
    assert said[0] == said[1]
