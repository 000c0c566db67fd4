"""What a browser asks for: which runs, and whether one of our own pages sent it."""

from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from fastapi import Request

from lowmem_grpo.service.page.watching import MOST_COMPARED

MOST_FIELDS = 20  # of a form


@dataclass(frozen=True)
class Asked:
    """The runs that an address names: `?run=A` shows one, `?with=A&with=B` compares several."""

    names: list[str]
    several: bool = False

    @classmethod
    def of(cls, request: Request) -> "Asked":
        query = request.query_params
        if len(several := list(dict.fromkeys(query.getlist("with")))[:MOST_COMPARED]) > 1:
            return cls(several, True)
        return cls([*query.getlist("run"), *several][:1])


def origin_is_ours(request: Request) -> bool:
    """Whether a page of this address sent the request. Browsers say so of each POST; what says nothing is refused."""
    origin = urlsplit(request.headers.get("origin", ""))
    return origin.scheme in ("http", "https") and origin.netloc == request.headers.get("host", "")


def text_fields(body: bytes) -> dict[str, str]:
    """The fields of a form, the first of each name; none where the body is no form."""
    try:
        found = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        return {}
    return {name: values[0] for name, values in found.items()}
