"""A verifier of JSON answers: they must parse and satisfy a schema."""

import functools
import json
import math
from importlib.util import find_spec
from typing import Any

from lowmem_grpo.rewards.ready.reading import unfenced
from lowmem_grpo.rewards.verifier import TextVerifier


def json_match(schema: dict[str, Any] | None = None) -> TextVerifier:
    """The completion, or the last fenced block in it, is JSON and satisfies `schema` (None: any JSON object or list).

    NaN, infinity and numbers beyond a float's range are not JSON here. Raises ValueError for an invalid schema, and
    ImportError if a schema is given and the package jsonschema is not installed.
    """
    if schema is None:
        return TextVerifier("json_match", holds)
    if find_spec("jsonschema") is None:
        raise ImportError("json_match with a schema needs the package jsonschema: pip install jsonschema")
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    validator = validator_for(schema)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"json_match got an invalid schema: {error.message}") from error
    return TextVerifier("json_match", functools.partial(holds, validator=validator(schema)))


def holds(text: str, validator: Any = None) -> bool:
    """Return whether a text, or its last fenced block, is JSON that the validator accepts; without one, an object or a
    list. What is nested too deeply, or has a number of more digits than Python reads, is not JSON here."""
    try:
        found = json.loads(unfenced(text, anywhere=True), parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError):
        return False
    try:
        return isinstance(found, (dict, list)) if validator is None else bool(validator.is_valid(found))
    except RecursionError:
        return False


def finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value
