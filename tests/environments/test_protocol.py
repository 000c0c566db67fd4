"""What a class given as an environment is, what its calls may give, and how the first joins the prompt of a row."""

import math
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tables import every_row

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.environments.env_spec import Factories
from lowmem_grpo.environments.episode import joined
from lowmem_grpo.environments.protocol import Answer, EnvHandle, EnvironmentFailedError, tools_of
from lowmem_grpo.types import Message


def here(function: Any, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return function(*values, **named)


class Game:
    """Our kind."""

    def __init__(self, *steps: Any, first: Any = "Begin.") -> None:
        self.steps, self.first, self.asked, self.closed = list(steps), first, {}, 0

    def reset(self, size: int = 3, **row: Any) -> Any:
        self.asked = {"size": size} | row
        return self.first

    def step(self, reply: str) -> Any:
        found = self.steps.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def state_key(self) -> Any:
        return len(self.steps)

    def close(self) -> None:
        self.closed += 1


class Desk:
    """TRL's kind."""

    def reset(self, question: str) -> str:
        return f" {question}"

    def look(self, drawer: int) -> str:
        """Look into a drawer."""
        return f"drawer {drawer}"

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        return 0.5


def test_a_game_gets_its_row_and_answers_in_order() -> None:
    game = Game(("warmer", 0.25, False), ("right", 1, True))
    handle = EnvHandle(game, here)
    assert handle.reset({"size": 4, "colour": "red"}) == Answer([{"role": "user", "content": "Begin."}], state="2")
    assert game.asked == {"size": 4, "colour": "red"}
    assert handle.step("3") == Answer([{"role": "user", "content": "warmer"}], 0.25, False, "1")
    assert handle.step("4") == Answer([{"role": "user", "content": "right"}], 1.0, True, "0")
    assert handle.pay() is None and handle.steps
    handle.close()
    handle.close()
    assert game.closed == 1


@pytest.mark.parametrize(("first", "given"), [
    (("Begin.", {}), ("go", 1.0, False, True, {})), (None, (None, None, True)),
    ("Begin.", ("go", 1.0, False, torch.tensor(True))), ("Begin.", ("go", 1.0, True, {"TimeLimit.truncated": False})),
    (("Begin.", MappingProxyType({})), ("go", 1.0, True, 3)),  # turns that are left
    ([{"role": "user", "content": "Begin."}], ({"role": "user", "content": "x"}, 0, 1)),
])
def test_gyms_forms_and_silence_are_understood(first: Any, given: Any) -> None:
    handle = EnvHandle(Game(given, first=first), here)
    assert handle.reset({}).messages == ([] if first is None else [{"role": "user", "content": "Begin."}])
    assert handle.step("x").done


@every_row(("observation", "content"), [
    ({"type": "text", "text": "x"}, "x"), ("half \ud83d pair", "half ? pair"),
    ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}], "?"),
    ({"content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}, "xy"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}, "xy"),
])
def test_text_parts_and_trls_content_blocks_become_one_text(observation: Any, content: str) -> None:
    answer = EnvHandle(Game((observation, 1, False)), here).step("x")
    assert answer.messages == [{"role": "user", "content": content}]


@every_row(("given", "said"), [
    (("x", math.nan, False), "Game.step gave nan as its reward; expected is a finite number"),
    (("x", "much", False), "gave 'much' as its reward"), (("x", math.inf, False), "gave inf"),
    (("x", 1, "False"), "Game.step gave 'False' as its done; expected is True or False"),
    ("x", "Game.step returned 'x'; expected is"), ((b"x", 1, False), "gave b'x' as its observation"),
    (([{"role": "user", "content": b"x"}], 1, False), "as its observation"),
    (({"role": "user", "text": "x"}, 1, False), "as its observation"),
    (({"role": "developer", "type": "text", "text": "x"}, 1, False), "as its observation"),
    (({"role": "user", "content": [{"type": "text"}]}, 1, False), "as its observation"),
    (ZeroDivisionError("by 0"), "Game.step raised ZeroDivisionError: by 0"),
    (TimeoutError("no answer"), "Game.step raised TimeoutError: no answer"),
])
def test_what_an_environment_must_not_give_is_a_fault_that_names_the_call(given: Any, said: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=said):
        EnvHandle(Game(given), here).step("x")


@every_row("given", [
    [{"type": "image", "image": b"x"}], {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
])
def test_an_image_is_refused_by_name_and_ends_the_run(given: Any) -> None:
    with pytest.raises(DataError, match="step gave an image, and images are not supported"):
        EnvHandle(Game((given, 1, False)), here).step("x")


def test_the_public_methods_of_trls_kind_are_its_tools() -> None:
    desk = Desk()
    assert [tool.__name__ for tool in tools_of(desk)] == ["look"]
    handle = EnvHandle(desk, here)
    assert handle.reset({"question": "Where?", "other": 1}).messages == [{"role": "user", "content": " Where?"}]
    assert handle.pay() == 0.5 and not handle.steps


def test_a_column_of_the_row_picks_among_several_and_is_not_passed_on() -> None:
    found = Factories({"desk": Desk, "game": Game})
    row = {"environment": "desk", "question": "x"}
    assert isinstance(found.make(row), Desk) and found.columns_for(row) == {"question": "x"}
    assert found.paying == [Desk, Game]
    with pytest.raises(ValueError, match="'door', which is not among the environments; environment_factory has desk"):
        found.make({"environment": "door"})
    assert isinstance(Factories({1: Desk}).make({"environment": 1}), Desk)


@every_row(("given", "said"), [
    ("Game", "environment_factory is 'Game'; pass a class"), ({}, "pass a class"),
    (lambda price: Desk(), "made without arguments"), (object, "without a method reset"),
    (type("Meter", (Game,), {"state_key": 3}), "made a Meter whose state_key is no method.*def state_key"),
    (type("Shop", (Desk,), {"get_reward": property(lambda self: 0.5)}), "made a Shop whose get_reward is no method"),
])
def test_what_makes_no_environments_is_refused_at_once(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Factories(given)


@every_row("tools", [5, lambda drawer: "x"])
def test_tools_that_are_no_list_are_refused_by_name(tools: Any) -> None:
    with pytest.raises(TypeError, match=r"Cupboard.tools is .*; it must be a list of functions"):
        tools_of(type("Cupboard", (Game,), {"tools": staticmethod(tools) if callable(tools) else tools})())


def test_an_environment_that_is_returned_again_is_a_fault_as_episodes_would_share_its_state() -> None:
    desk = Desk()
    with pytest.raises(EnvironmentFailedError, match="returned the same Desk twice; episodes run side by side"):
        Factories(lambda: desk).make({})


USER: Message = {"role": "user", "content": "Go."}
BEGUN: Message = {"role": "assistant", "content": "I go"}
CALL: Message = {"role": "assistant", "content": None, "tool_calls": [
    {"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT: Message = {"role": "tool", "content": "3"}
SHOWN: Message = {"role": "user", "content": " A door."}


@every_row(("prompt", "observation", "wanted"), [
    ([USER], [SHOWN], [USER | {"content": "Go. A door."}]),  # as in TRL
    ([USER, BEGUN], [SHOWN], [USER, BEGUN, SHOWN]), ([USER, CALL, RESULT], [], [USER, CALL, RESULT]),
    ([USER, CALL, RESULT], [SHOWN, SHOWN], [USER, CALL, RESULT, SHOWN, SHOWN]),
])
def test_an_observation_goes_on_with_a_text_of_the_user_and_never_with_words_or_calls_of_the_policy(
    prompt: list[Message], observation: list[Message], wanted: list[Message]
) -> None:
    assert joined(prompt, observation) == wanted
