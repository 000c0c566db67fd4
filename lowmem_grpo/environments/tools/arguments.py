"""Validation of a policy's tool arguments against the tool's JSON schema.

Schema keywords that are not checked here (`pattern`, `$ref`, `allOf` ...) are left to the tool itself. The jsonschema
package is not used: it fetches a `$ref` from the network, hangs on a `pattern` such as `(a+)+$`, and accepts 3.0 as an
integer.
"""

import json
import math
from typing import Any

from lowmem_grpo.data.prompt_inputs import HALF

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}
WORDS = {"True": True, "False": False, "None": None}  # Python literals, which some templates write
BOUNDS = {
    "minimum": (lambda value, bound: value >= bound, "at least"),
    "maximum": (lambda value, bound: value <= bound, "at most"),
    "exclusiveMinimum": (lambda value, bound: value > bound, "above"),
    "exclusiveMaximum": (lambda value, bound: value < bound, "below"),
}
SHOWN = 60  # characters of a wrong value in a message
DEPTH = 50  # the deepest nesting allowed, safe for all code that handles the call later
INTEGER_BITS = 4096  # Python refuses to print much longer integers


def loads(text: str) -> Any:
    """Return the value of a JSON text. ValueError for other text, and for values that `writable` refuses."""
    try:
        return writable(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error


def writable(value: Any, depth: int = 0) -> Any:
    """Return the value; ValueError if it is not valid JSON, nested too deeply, or has too long an integer."""
    if depth > DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
        raise ValueError("a number has too many digits")
    if isinstance(value, str) and HALF.search(value):
        raise ValueError("half of a surrogate pair is no character")
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    for item in inner:
        writable(item, depth + 1)
    return value


def fault(schema: Any, value: Any, where: str = "") -> str | None:
    """Return why a value does not fit the schema, in words for the policy; None if it fits."""
    if not isinstance(schema, dict) or (value is None and schema.get("nullable")):
        return None
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list) and choices:
        faults = [fault(choice, value, where) for choice in choices]
        return None if None in faults else faults[0]
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(has_type(value, name) for name in names):
        return f"{where or 'it'} must be {' or '.join(names)}, got {shown(value)}"
    if "enum" in schema and not any(same(value, choice) for choice in schema["enum"]):
        return f"{where or 'it'} must be one of {shown(schema['enum'], 300)}, got {shown(value)}"
    if isinstance(value, dict):
        return fault_of_object(schema, value, where)
    if isinstance(value, list):
        return fault_of_array(schema, value, where)
    if isinstance(value, int | float):
        for name, (holds, words) in BOUNDS.items():
            bound = schema.get(name)
            if isinstance(bound, int | float) and not isinstance(bound, bool) and not holds(value, bound):
                return f"{where or 'it'} must be {words} {bound}, got {shown(value)}"
    return None


def fault_of_object(schema: dict[str, Any], value: dict[str, Any], where: str) -> str | None:
    """Return the first fault of an object, with missing keys before unknown keys and wrong values; None if it fits."""
    properties = schema.get("properties") or {}
    if missing := [name for name in schema.get("required") or [] if name not in value]:
        return f"{inside(where, str(missing[0]))} is missing"
    rest = schema.get("additionalProperties", not properties)  # by default a schema that lists keys allows no others
    for name, item in value.items():
        if name not in properties and rest is False:
            known = f"; known are {', '.join(properties)}" if properties else ""
            return f"{inside(where, name[:SHOWN])} is unknown{known}"
        if problem := fault(properties.get(name, rest), item, inside(where, name[:SHOWN])):
            return problem
    return None


def fault_of_array(schema: dict[str, Any], value: list[Any], where: str) -> str | None:
    places = schema.get("prefixItems")
    if isinstance(places, list) and len(value) != len(places) and "items" not in schema:
        return f"{where or 'it'} must have {len(places)} items, got {len(value)}"
    for at, item in enumerate(value):
        rule = places[at] if isinstance(places, list) and at < len(places) else schema.get("items")
        if problem := fault(rule, item, f"{where}[{at}]"):
            return problem
    return None


def has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean" or name not in TYPES
    return name not in TYPES or isinstance(value, TYPES[name])


def same(value: Any, choice: Any) -> bool:
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def shown(value: Any, most: int = SHOWN) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # such as an integer with too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def typed(schema: Any, text: str) -> Any:
    """Return the value of an argument written as text: None for "null" if the schema allows null; the text itself if
    the schema allows text, or if it is not JSON; else the parsed JSON."""
    word = text.strip()
    if word in ("null", "None") and isinstance(schema, dict) and fault(schema, None) is None:
        return None
    if allows_text(schema):
        return text
    try:
        return WORDS[word] if word in WORDS else loads(word)
    except ValueError:
        return text


def allows_text(schema: Any) -> bool:
    """Return True if the schema of an argument allows text. An unknown argument, without a schema, may be text too."""
    if not isinstance(schema, dict):
        return True
    names = schema.get("type")
    choices = schema.get("anyOf") or schema.get("oneOf") or []
    return names == "string" or (isinstance(names, list) and "string" in names) or any(map(allows_text, choices))
