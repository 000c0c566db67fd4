"""A broken environment ends a run at once and shows its own lines; one that is out for a while ends it in time."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from scripted import FREE, TEMPLATE, ScriptedEngine, played
from template_tokenizers import tokenizer_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.environments.env_spec import EnvSpecs, Factories
from lowmem_grpo.environments.episode import EpisodeBounds
from lowmem_grpo.environments.protocol import EnvironmentFailedError
from lowmem_grpo.rollout.episodes import Episodes

ROW = {"prompt": [{"role": "user", "content": "Play."}]}


class Broken:
    """Fails as long as it is told to."""

    left = 0

    def reset(self) -> None:
        """The prompt is all there is."""

    def step(self, reply: str) -> tuple[str, float, bool]:
        Broken.left -= 1
        return ("", 1.0, True) if Broken.left < 0 else {}["missing"]


def batches(stopping: Callable[[], bool] = lambda: False) -> Callable[[], list[str]]:
    """A function that plays two episodes more, and returns how they ended."""
    specs = EnvSpecs(tokenizer_of(TEMPLATE), [], Factories(Broken), 1024, {})
    episodes = Episodes(specs, EpisodeBounds(**FREE), stopping)
    engine: Any = ScriptedEngine(lambda prompt: "a")

    def play() -> list[str]:
        (group,) = episodes.play(engine, [Prompt(dict(ROW), [], "")], SamplingParams(n=2, max_tokens=64))
        return sorted(one.ending for one in group)

    return play


@pytest.mark.parametrize(("way", "told"), [
    ("reset", "raised KeyError: 'missing'"), ("step", "raised KeyError: 'missing'"), ("exit", r"sys.exit\(3\)"),
    ("nothing", "reset returned nothing and the row has no prompt"),
])
def test_a_broken_environment_ends_the_run_at_once_and_shows_its_own_lines(
    way: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Mistaken:
        def reset(self) -> Any:
            return {}["missing"] if way == "reset" else None

        def step(self, reply: str) -> Any:
            return {}["missing"] if way == "step" else sys.exit(3)

    row = {"prompt": [{"role": "user", "content": ""}]} if way == "nothing" else ROW
    with pytest.raises(EnvironmentFailedError, match=f"all 2 episodes failed, so there is nothing.*{told}"):
        played(lambda prompt: "a", [row], Mistaken)
    if way in ("reset", "step"):
        assert caplog.text.count("in " + way) == 1 and "lowmem_grpo/environments" not in caplog.text


def test_an_outage_ends_the_run_after_three_batches() -> None:
    play = batches()
    Broken.left = 0
    assert play() == ["done", "done"]
    Broken.left = 1000
    assert play() == play() == ["environment_error"] * 2
    with pytest.raises(EnvironmentFailedError, match="all 2 episodes failed in 3 batches in a row"):
        play()


def test_no_failed_episode_is_played_again_once_the_run_is_to_end() -> None:
    Broken.left = 1
    assert batches(lambda: True)() == ["done", "environment_error"]


def test_a_first_prompt_that_does_not_fit_is_told_with_its_length(caplog: pytest.LogCaptureFixture) -> None:
    class Long:
        def reset(self) -> str:
            return "word " * 500

        def step(self, reply: str) -> tuple[str, float, bool]:
            raise AssertionError

    ((one, _),) = played(lambda prompt: "a", [ROW], Long, context=100)
    assert one.ending == "context" and "what reset returned did not fit in 2 episodes" in caplog.text
