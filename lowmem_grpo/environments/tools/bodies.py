"""Parsers of the text between the marks of a tool call, a function per format; CallError for a malformed call."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from lowmem_grpo.environments.tools.arguments import loads, typed, writable
from lowmem_grpo.types import ToolCall

Schemas = Mapping[str, Any]  # JSON schema of the arguments, by tool name
PYTHON_CHARACTERS = 100_000  # limit of Python calls, as the parser needs a hundred times the text's memory
CONSTANTS = {"true": True, "false": False, "null": None}
PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|\Z)")
NEXT_FUNCTION = re.compile(r"(?<=>)\s*</function>\s*(?=<function=)")  # between calls in one pair of marks
PAIR = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
ARGUMENTS = ("arguments", "parameters")
NO_CALLS = "it is not a list of calls such as [name(key='value')]"


class CallError(ValueError):
    """A tool call that cannot be parsed; the message says why."""


def json_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse {"name": ..., "arguments": {...}}, or a list of these."""
    try:
        value = loads(body)
    except ValueError as error:
        raise CallError(f"it is not valid JSON: {error}") from error
    return [call_of(item) for item in value] if isinstance(value, list) and value else [call_of(value)]


def call_of(value: Any) -> ToolCall:
    """Return the call in a JSON object. Arguments may be a string of JSON, as in OpenAI's format."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError('it has no "name"')
    key = next((key for key in ARGUMENTS if key in value), None)
    if key is None and len(value) > 1:
        raise CallError('it has no "arguments"')
    arguments = {} if key is None else value[key]
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except ValueError as error:
            raise CallError(f'its "{key}" are not valid JSON: {error}') from error
    if not isinstance(arguments, dict):
        raise CallError(f'its "{key}" must be an object')
    return ToolCall(value["name"], arguments)


def xml_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse <function=NAME><parameter=KEY>VALUE</parameter>...</function>, once or more; see `typed` for VALUE."""
    body = body.strip()
    if not body.startswith("<function="):
        raise CallError("it does not begin with <function=NAME>")
    if not body.endswith("</function>"):
        raise CallError("</function> is missing")
    return [xml_call(part, schemas) for part in NEXT_FUNCTION.split(body.removesuffix("</function>"))]


def xml_call(part: str, schemas: Schemas) -> ToolCall:
    name, closed, rest = part.removeprefix("<function=").partition(">")
    if not closed or "\n" in name:
        raise CallError("<function=NAME> is not closed")
    arguments: dict[str, str] = {}
    rest = rest.strip()
    while rest:
        key, closed, rest = rest.removeprefix("<parameter=").partition(">") if rest[:11] == "<parameter=" else ("",) * 3
        end = PARAMETER_END.search(rest)
        if not closed or "\n" in key or end is None:
            raise CallError("in <function=NAME> ... </function> stands what is no <parameter=KEY>VALUE</parameter>")
        value = rest[:end.start()].removeprefix("\n").removesuffix("\n")  # line breaks that the template writes
        if "\n<parameter=" in value:
            raise CallError(f"</parameter> is missing behind {key.strip()[:60]}")
        add(arguments, key.strip(), value)
        rest = rest[end.end():]
    return typed_call(name.strip(), arguments, schemas)


def glm_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse NAME, then pairs of <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>."""
    name, mark, rest = body.strip().partition("<arg_key>")
    rest, at, arguments = mark + rest, 0, dict[str, str]()
    if not name.strip() or "\n" in name.strip():
        raise CallError("it does not begin with the name of a tool")
    while at < len(rest):
        if (pair := PAIR.match(rest, at)) is None:
            raise CallError("behind the name stands what is no <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
        add(arguments, pair[1].strip(), pair[2])
        at = pair.end()
    return [typed_call(name.strip(), arguments, schemas)]


def add(arguments: dict[str, str], key: str, value: str) -> None:
    """Add an argument; CallError if it is given twice."""
    if key in arguments:
        raise CallError(f"{key[:60]} is given twice")
    arguments[key] = value


def typed_call(name: str, arguments: dict[str, str], schemas: Schemas) -> ToolCall:
    properties = schemas.get(name, {}).get("properties", {})
    return ToolCall(name, {key: typed(properties.get(key), value) for key, value in arguments.items()})


def python_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse [NAME(key=value, ...), ...] with literal values."""
    if len(body) > PYTHON_CHARACTERS:
        raise CallError(f"it has {len(body)} characters; at most {PYTHON_CHARACTERS} are read")
    try:
        root = ast.parse(body.strip(), mode="eval").body
        calls = root.elts if isinstance(root, ast.List | ast.Tuple) else [root]
        return [call_of_node(node) for node in calls]
    except CallError:
        raise
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:  # the last for a NUL character
        why = {SyntaxError: getattr(error, "msg", ""), ValueError: str(error)}.get(type(error), "nested too deeply")
        raise CallError(f"it is not a list of calls as in Python: {why}") from error


def call_of_node(node: ast.expr) -> ToolCall:
    """Return the call in a Python expression, without evaluating it."""
    head = ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):  # a name with hyphens parses as a difference
        head, node = f"{name_of(node.left)}-", node.right
    if not isinstance(node, ast.Call):
        raise CallError(NO_CALLS)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise CallError("each argument is written with its name, as in name(key='value')")
    arguments = {str(keyword.arg): literal(keyword.value) for keyword in node.keywords}
    return ToolCall(head + name_of(node.func), writable(arguments))


def name_of(node: ast.expr) -> str:
    """Return a tool's name, whose dots and hyphens Python parses as attributes and differences."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return f"{name_of(node.left)}-{name_of(node.right)}"
    raise CallError(NO_CALLS)


def literal(node: ast.expr) -> Any:
    """Return the value of a Python or JSON literal. CallError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [literal(key) for key in node.keys if key is not None]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = literal(node.operand)
        if isinstance(value, int | float):
            return -value if isinstance(node.op, ast.USub) else value
    raise CallError("an argument is not a plain value")


def mistral_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse NAME[ARGS]{...}, with or without [CALL_ID] and an id after NAME, or the JSON list of older models."""
    name, mark, arguments = body.partition("[ARGS]")
    if not mark:
        return json_calls(body, schemas)
    try:
        value = loads(arguments)
    except ValueError as error:
        raise CallError(f"its arguments are not valid JSON: {error}") from error
    return [call_of({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": value})]
