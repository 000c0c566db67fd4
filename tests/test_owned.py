"""What a user's code changes must not reach the rows, which are read again."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo import SFTConfig
from lowmem_grpo.data.shapes import Shapes
from lowmem_grpo.environments.env_spec import Factories
from lowmem_grpo.types import Turn, owned


@dataclass
class Note:
    words: list[str] = field(default_factory=lambda: ["a"])


@dataclass(frozen=True)
class Sealed:
    words: list[str] = field(default_factory=lambda: ["a"])


@dataclass(eq=False)
class Node:
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)


class Chat(list[Any]):
    """A list of another class."""


def spoil(value: Any) -> None:
    """Change all that can be changed in it."""
    if isinstance(value, dict):
        for part in value.values():
            spoil(part)
        value["spoilt"] = True
    elif isinstance(value, list):
        for part in value:
            spoil(part)
        value.append("spoilt")
    elif isinstance(value, tuple):
        for part in value:
            spoil(part)
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        value[...] = 7
    elif hasattr(value, "words"):
        value.words.append("spoilt")


@pytest.mark.parametrize("make", [
    lambda: [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], lambda: {"a": {"b": [[1], [2]]}},
    lambda: ([1], {"x": [2]}), lambda: Chat([{"a": 1}]), lambda: [np.zeros(3), torch.zeros(3)],
    lambda: {"note": Note(), "sealed": [Sealed()]}, lambda: [], lambda: {}, lambda: None, lambda: "text",
])
def test_a_copy_is_equal_of_the_same_kind_and_shares_nothing_that_can_be_changed(make: Any) -> None:
    value, copied = make(), owned(make())
    given = owned(value)
    assert type(given) is type(value) and repr(given) == repr(value)
    spoil(given)
    assert repr(value) == repr(make()) == repr(copied)


def test_live_objects_stay_the_same() -> None:
    client, function = object(), len
    assert owned([client, {"f": function}]) == [client, {"f": function}]


def test_routes_are_not_copied_and_a_tree_whose_nodes_know_their_parent_has_an_end() -> None:
    routes = torch.zeros(5, 3, 2)
    one = Turn([1], [2], [-0.5], "stop", routes=routes)
    copied = owned([one])[0]
    assert copied.routes is routes and copied is not one and copied.completion_ids is not one.completion_ids
    tree = Node()
    tree.children.append(Node(tree))
    assert owned(tree).children[0].parent is tree


def test_what_an_environment_does_to_its_row_is_seen_by_no_other_episode() -> None:
    class Game:
        def reset(self, history: list[str], **row: Any) -> str:
            history.append("again")
            return str(len(history))

        def step(self, text: str) -> tuple[str, float, bool]:
            return "", 0.0, True

    row = {"prompt": "", "history": ["once"]}
    factories = Factories(Game)
    assert [Game().reset(**factories.columns_for(row)) for _ in range(3)] == ["2"] * 3
    assert row == {"prompt": "", "history": ["once"]}


def test_what_a_formatting_function_does_to_a_row_is_not_there_when_it_is_read_again(
    tokenizer: PreTrainedTokenizerBase
) -> None:
    def formatted(row: dict[str, Any]) -> str:
        row["messages"].append({"role": "assistant", "content": row.pop("answer")})
        return " ".join(message["content"] for message in row["messages"])

    rows = [{"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}]
    make = Shapes(SFTConfig(output_dir="unused"), tokenizer, 64, [], formatted).formatted(rows)
    assert [make(rows[0]) for _ in range(2)] == [{"text": "2+2? 4"}] * 2
    assert rows == [{"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}]
