"""Pydantic models for request bodies, and readable messages for their validation errors."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Natural = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


class Body(BaseModel):
    """The base of request bodies. Unknown fields are ignored, so that newer clients are accepted."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


def json_of(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. ValueError if it is not one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"the request's body is no JSON ({said}); send a JSON object") from None
    if not isinstance(value, dict):
        raise ValueError(f"the request's body is a JSON {type(value).__name__}; it must be an object")
    return value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def words_of(errors: ValidationError, kind: type[Body]) -> str:
    """Describe the first validation error: the field, its value, and the allowed values."""
    error: Any = errors.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    match error["type"]:
        case "json_invalid":
            return f"the body is no JSON ({error['ctx']['error']}); send a JSON object"
        case "extra_forbidden":
            return f"{place} is not a field that is known here; leave it out. Known are {', '.join(kind.model_fields)}"
        case "missing":
            return f"{place} is missing"
        case "value_error":
            return f"{place} {error['ctx']['error']}"
    return f"{place or 'the body'} is {shown(error['input'])}; {error['msg'].replace('Input should', 'it must')}"
