"""A toolbox runs what a policy calls; whatever goes wrong is a text that the policy reads."""

import asyncio
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from scripted import run_tool
from tables import every_row
from template_tokenizers import tiny_with, weather

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.environments.tools.results import ToolError
from lowmem_grpo.environments.tools.toolbox import Toolbox
from lowmem_grpo.types import ToolCall

TOKENIZER = tiny_with("qwen3", plain=("<tool_call>", "</tool_call>"))


class Found(BaseModel):
    where: Path


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    def buy(self, what: str) -> dict[str, Any]:
        """Buy something.

        Args:
            what: The thing.
        """
        return {"shop": self.name, "bought": what, "ok": True}

    async def wait(self, seconds: float) -> float:
        """Wait a while.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        if seconds > 0:
            raise RuntimeError("too late")
        return seconds


def returns(result: Any, max_tokens: int = 128) -> Toolbox:
    def give() -> Any:
        """Give it."""
        if isinstance(result, BaseException):
            raise result
        return result

    return Toolbox([give], TOKENIZER, max_tokens)


def told(box: Toolbox, name: str = "give", **arguments: Any) -> str:
    """What the policy reads, whether the call fails or not."""
    try:
        return run_tool(box, name, **arguments)
    except ToolError as error:
        return str(error)


def test_functions_methods_and_async_functions_are_tools_alike() -> None:
    box = Toolbox([weather, Shop("A").buy, Shop("A").wait], TOKENIZER, 64)
    assert [schema["function"]["name"] for schema in box.schemas] == ["weather", "buy", "wait"]
    assert told(box, "weather", city="Rome") == "Rome: sun for 1 days, in None"
    assert told(box, "buy", what="tea") == '{"shop": "A", "bought": "tea", "ok": true}'
    assert told(box, "wait", seconds=0) == "0"
    assert told(box, "wait", seconds=0.001) == "error: RuntimeError: too late"
    other = box.with_functions([weather, Shop("B").buy, Shop("B").wait])
    assert told(other, "buy", what="tea") == '{"shop": "B", "bought": "tea", "ok": true}' and other.parser is box.parser
    with pytest.raises(ValueError, match="the tools buy differ"):
        box.with_functions([Shop("B").buy])


@every_row(("result", "text"), [
    ("plain\ntext", "plain\ntext"), ("", ""), (3, "3"), (0.5, "0.5"), (None, "null"), (True, "true"),
    ([1, "ä"], '[1, "ä"]'), ((1, 2), "[1, 2]"), ({"a": {"b": None}}, '{"a": {"b": null}}'),
    ("half \ud800 pair", "half ? pair"), ([], "[]"), (b"raw", "raw"), ({2, 1}, "[1, 2]"), (range(2), "[0, 1]"),
    (np.float32(1.5), "1.5"), (np.bool_(True), "true"), ({np.int64(1): np.array([2])}, '{"1": [2]}'),
    (torch.tensor([1.5]), "[1.5]"), (Decimal("1.10"), "1.10"), ([date(2026, 1, 2)], '["2026-01-02"]'),
    ({(1, 2): Path("a")}, '{"[1, 2]": "a"}'), (ToolCall("f", {"a": 1}), '{"name": "f", "arguments": {"a": 1}}'),
    (Found(where=Path("a")), '{"where": "a"}'),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
])
def test_results_become_text(result: Any, text: str) -> None:
    assert told(returns(result)) == text


@every_row(("result", "text"), [
    (b"\xff", "neither text nor JSON (bytes: "), (object(), "(object: "), ({1: object()}, "(dict: "),
    ((_ for _ in "a"), "(generator: "),
    (ValueError("no such row"), "ValueError: no such row"), (KeyError(), "KeyError"), (SystemExit(3), "SystemExit: 3"),
    (ToolError("closed on Sundays"), "error: closed on Sundays"), (RuntimeError("x " * 10_000), "characters left out"),
])
def test_what_is_no_text_and_what_is_raised_is_an_error_that_the_policy_reads(result: Any, text: str) -> None:
    said = told(returns(result))
    assert said.startswith("error: ") and text in said and said.count("error: ") == 1
    assert len(TOKENIZER.encode(said)) <= 128 + len(TOKENIZER.encode("error: "))


@every_row("result", [
    [{"type": "image", "image": object()}, {"type": "text", "text": "a road"}], {"type": "image", "image": "x"},
    ({"type": "image_url", "image_url": "x"},), {"type": "input_image", "image_url": "x"},
])
def test_an_image_ends_the_run_and_is_no_text_that_the_policy_reads(result: Any) -> None:
    with pytest.raises(DataError, match="a tool gave an image, and images are not supported: only text"):
        told(returns(result))


def test_plain_data_about_an_image_is_text() -> None:
    assert told(returns({"type": "image", "name": "road.png"})) == '{"type": "image", "name": "road.png"}'


@every_row(("name", "arguments", "text"), [
    ("wether", {}, "there is no tool 'wether'; the tools are weather, buy"),
    ("__init__", {}, "there is no tool '__init__'"),
    ("weather", {}, "weather: city is missing"),
    ("weather", {"city": "Rome", "when": 1}, "weather: when is unknown; known are city, days, unit"),
    ("weather", {"city": 3}, "weather: city must be string, got 3"),
    ("weather", {"city": "Rome", "days": "2"}, 'weather: days must be integer, got "2"'),
    ("weather", {"city": "Rome", "days": True}, "weather: days must be integer, got true"),
])
def test_a_wrong_call_is_told_before_the_function_is_called(name: str, arguments: dict[str, Any], text: str) -> None:
    assert told(Toolbox([weather, Shop("A").buy], TOKENIZER, 128), name, **arguments).startswith(f"error: {text}")


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two tools are called 'buy'.*rename"):
        Toolbox([Shop("A").buy, Shop("B").buy], TOKENIZER, 64)


def test_a_result_of_ten_megabytes_keeps_its_head_and_its_tail_and_little_of_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    box = returns("begin " + "word " * 2_000_000 + " end", max_tokens=64)
    encode, encoded = box.limit.tokenizer.encode, list[int]()

    def counted(text: str, **options: Any) -> Any:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(box.limit.tokenizer, "encode", counted)
    said = told(box)
    assert 0 < sum(encoded) < 100_000
    assert said.startswith("begin word") and said.endswith("word  end")
    left_out = int(re.search(r"\[\.\.\. (\d+) characters left out \.\.\.\]", said)[1])
    assert left_out + len(said.replace(f"\n[... {left_out} characters left out ...]\n", "")) == 10_000_010
    assert 56 <= len(TOKENIZER.encode(said)) <= 64


def test_the_answer_is_a_message_of_the_tool() -> None:
    assert returns("x").message(ToolCall("give", {}), "x") == {"role": "tool", "name": "give", "content": "x"}
