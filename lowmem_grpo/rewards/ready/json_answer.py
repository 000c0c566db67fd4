"""A verifier of JSON answers: they must parse and satisfy a schema."""

import functools
import json
import math
from importlib.util import find_spec
from typing import Any

from lowmem_grpo.rewards.ready.reading import unfenced
from lowmem_grpo.rewards.verifier import TextVerifier


class JsonError(ValueError):
    """A text is not JSON."""


def json_match(schema: dict[str, Any] | None = None) -> TextVerifier:
    """The completion, or the last fenced block in it, is JSON and satisfies `schema` (None: any JSON object or list).

    NaN, infinity and numbers beyond a float's range are not JSON here. Raises ValueError for an invalid schema, and
    ImportError if a schema is given and the package jsonschema is not installed.
    """
    if schema is None:
        return TextVerifier("json_match", is_json)
    if find_spec("jsonschema") is None:
        raise ImportError("json_match with a schema needs the package jsonschema: pip install jsonschema")
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    validator = validator_for(schema)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"json_match got an invalid schema: {error.message}") from error
    return TextVerifier("json_match", functools.partial(satisfies, validator=validator(schema)))


def satisfies(text: str, validator: Any) -> bool:
    try:
        return bool(validator.is_valid(read_json(text)))
    except (JsonError, RecursionError):
        return False


def is_json(text: str) -> bool:
    try:
        return isinstance(read_json(text), (dict, list))
    except JsonError:
        return False


def read_json(text: str) -> Any:
    """The value of a text or of its last fenced block. Raises JsonError for what is not JSON, nested too deeply, or a
    number of more digits than Python reads."""
    try:
        return json.loads(unfenced(text, anywhere=True), parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error)) from error


def finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value
