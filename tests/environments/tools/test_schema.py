"""What a template is told of a function, and which functions cannot be tools."""

import functools
from collections.abc import Callable
from datetime import date
from typing import Any, Literal

import pytest
from tables import every_row
from template_tokenizers import weather

from lowmem_grpo.environments.tools.arguments import fault, typed
from lowmem_grpo.environments.tools.toolbox import Tool, ToolSchemaError, tool_of


def written(arguments: str, told: str = "a: One.", name: str = "add", docs: str = "Add.") -> Any:
    """A function with these arguments, and a docstring that tells of some."""
    scope: dict[str, Any] = {"date": date}
    exec(f"def {name}({arguments}): ...", scope)  # noqa: S102, a row of this file
    scope[name].__doc__ = docs and f"{docs}\n\nArgs:\n    {told}\n"
    return scope[name]


def yielding(define: str) -> Any:
    """A function that yields its result."""
    scope: dict[str, Any] = {}
    exec(f'{define} add(a: int):\n    """Add.\n\n    Args:\n        a: One.\n    """\n    yield a', scope)  # noqa: S102
    return scope["add"]


class Thing:
    """A thing."""

    def part(self, a: int) -> int:
        """Return a part."""
        return a


def rich(
    kind: Literal["a", "b"], sizes: list[int], table: dict[str, list[float]], anything: Any,
    either: int | str | None = None,
) -> dict[str, int]:
    """Much at once.

    It takes two lines.

    Args:
        kind: Which kind.
        sizes: Some sizes
            over two lines.
        table: A table.
        anything: Anything.
        either: A number or a word.

    Returns:
        Something.
    """
    return {kind: len(sizes)}


def test_the_schema_says_all_that_hints_and_docstring_say() -> None:
    tool = tool_of(weather)
    assert tool == Tool("weather", tool.schema, weather)
    assert tool.schema == {"type": "function", "function": {
        "name": "weather", "description": "Look up the weather.", "parameters": {
            "type": "object", "required": ["city"], "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "For how many days."},
                "unit": {"type": "string", "nullable": True, "description": "Celsius or Fahrenheit."}}},
        "return": {"type": "string"}}}
    assert tool_of(tool) is tool


def test_rich_hints_are_understood() -> None:
    found = tool_of(rich).parameters["properties"]
    assert found["kind"]["enum"] == ["a", "b"] and found["sizes"]["items"] == {"type": "integer"}
    assert found["sizes"]["description"] == "Some sizes over two lines."
    assert found["either"]["nullable"] and set(found["either"]["type"]) == {"integer", "string"}


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def test_a_decorated_function_is_a_tool() -> None:
    assert tool_of(decorated(weather)).parameters == tool_of(weather).parameters


@every_row(("function", "why"), [
    (written("a: int", docs=""), r"the tool add has no docstring.*def add\(a: int"),
    (written("a, b: int = 3"), r"argument 'a' of the tool add has no type"),
    (written("a: int, b: int"), r"argument 'b' of the tool add has no description: write `b: \.\.\.`"),
    (written("day: date | None"), "argument 'day' of the tool add has the type date, which JSON cannot hold"),
    (written("*numbers: int"), r"argument 'numbers' of the tool add takes \*numbers"),
    (written("**options: int"), r"argument 'options' of the tool add takes \*\*options"),
    (written("a: 'NoSuchType'"), "NoSuchType"), (written("", name="_hidden"), "cannot be called '_hidden'.*rename"),
    (written("a: int", "a (int): One."), "argument 'a' of the tool add has no description.*without its type"),
    (lambda: 3, "no docstring"), (Thing, "must be a function"),
    (Thing.part, "'self' of the tool part has no type: pass an object's method"),
    (Thing(), "must be a function"), ("add", "must be a function"), (print, "takes|no type"),
    (functools.partial(weather, "Rome"), "must be a function"),
    (functools.update_wrapper(functools.partial(weather, "Rome"), weather), "must be a function"),
    (yielding("def"), "the tool add yields, and a call has one result: return it"),
    (yielding("async def"), "the tool add yields"), (Tool("a b", {}, weather), "cannot be called 'a b'"),
])
def test_a_function_that_cannot_be_a_tool_says_what_to_write(function: Any, why: str) -> None:
    with pytest.raises(ToolSchemaError, match=f"(?s){why}"):
        tool_of(function)


ITEM = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"c": {"enum": [1, "x"]}}}]}
OBJECT = {"type": "object", "required": ["a"],
          "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": ITEM}}}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {}]}


@every_row(("schema", "value", "why"), [
    (OBJECT, {"a": 1}, None), (OBJECT, {"a": 1, "b": ["x", {"c": 1}]}, None), (OBJECT, {}, "a is missing"),
    (OBJECT, {"a": 1, "z": 2}, "z is unknown; known are a, b"), (OBJECT, [], "it must be object, got []"),
    (OBJECT, {"a": 1.5}, "a must be integer, got 1.5"), (OBJECT, {"a": 1, "b": "x"}, 'b must be array, got "x"'),
    (OBJECT, {"a": 1, "b": ["x", 3]}, "b[1] must be string, got 3"), (OBJECT, {"a": None}, "must be integer, got null"),
    ({"type": "integer", "nullable": True}, None, None), ({"type": ["integer", "string"]}, "x", None),
    ({"type": ["integer", "string"]}, [], "it must be integer or string, got []"), ({}, object, None), (True, 3, None),
    ({"type": "object"}, {"anything": 1}, None), ({"type": "number"}, 3, None), ({"type": "number"}, True, "be number"),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, {"x": "y"}, 'x must be integer, got "y"'),
    ({"enum": ["a", 1]}, 1, None), ({"enum": ["a", 1]}, True, 'it must be one of ["a", 1], got true'),
    ({"enum": ["a"]}, "b" * 999, "..."), (PAIR, [1], "2 items, got 1"), (PAIR, ["x", 1], "[0] must be integer"),
    ({"type": "integer", "minimum": 1}, 0, "it must be at least 1, got 0"), ({"type": "tensor"}, 3, None),
    ({"type": "number", "exclusiveMaximum": 1}, 1, "it must be below 1, got 1"), ({"minimum": 1}, "x", None),
])
def test_arguments_are_held_against_the_schema(schema: Any, value: Any, why: str | None) -> None:
    found = fault(schema, value)
    assert found is None if why is None else found is not None and why in found and len(found) < 200


@every_row(("schema", "text", "value"), [
    ({"type": "string"}, "7", "7"), ({"type": "integer"}, " 7\n", 7), ({"type": "boolean"}, "False", False),
    ({"type": "number"}, "NaN", "NaN"), ({"type": "array"}, "[1,", "[1,"), ({"type": "object"}, '{"a": []}', {"a": []}),
    ({"type": ["integer", "string"]}, "7", "7"), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"type": "string", "nullable": True}, "None", None), ({"type": ["string", "null"]}, "nullify", "nullify"),
    ({"type": "string"}, "null", "null"),
    ({"type": "integer", "nullable": True}, "None", None), ({"type": "integer", "nullable": True}, "null", None),
    ({}, "[1]", [1]), (None, "[1]", "[1]"),
])
def test_an_argument_that_is_written_as_text_gets_the_type_of_the_schema(schema: Any, text: str, value: Any) -> None:
    assert typed(schema, text) == value
