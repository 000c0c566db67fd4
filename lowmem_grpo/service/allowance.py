"""`Allowance`: how much of a server the programs of one key may use at a time."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from lowmem_grpo.rules import COUNT, Rule, check_ranges
from lowmem_grpo.units import GIB, MIB

UNITS = {"": 1, "MiB": MIB, "GiB": GIB}
VALUE = re.compile(r"([0-9]{1,12})(MiB|GiB|)")
BYTES = ("bodies", "storage")
FORM = "write requests=4096, bodies=512MiB, storage=50GiB or models=8"


@dataclass(frozen=True)
class Allowance:
    """What goes beyond one of these is refused, or told to come again, with the limit's name."""

    requests: int = 4096
    """Requests that are not answered yet."""
    bodies: int = GIB
    """Bytes of requests that are kept: until they are answered, and those that added gradients until the next step."""
    storage: int = 100 * GIB
    """Bytes on the disk: states of models, and saved weights."""
    models: int = 64
    """Models that were created and not unloaded."""

    RANGES: ClassVar[dict[str, Rule]] = {"requests": COUNT, "bodies": COUNT, "storage": COUNT, "models": COUNT}

    def __post_init__(self) -> None:
        check_ranges(self)

    def but(self, words: Iterable[str]) -> "Allowance":
        """This allowance with what words such as `storage=50GiB` say. ValueError names the word that is wrong."""
        changes: dict[str, int] = {}
        for word in words:
            name, _, value = word.partition("=")
            found = VALUE.fullmatch(value)
            if name not in {field.name for field in fields(self)} or found is None or (found[2] and name not in BYTES):
                raise ValueError(f"{word!r} is no limit; {FORM}")
            changes[name] = int(found[1]) * UNITS[found[2]]
        return replace(self, **changes)


class Allowances:
    """The allowance of each user."""

    def __init__(self, usual: Allowance | None = None, own: Mapping[str, Allowance] | None = None) -> None:
        """`own` are those of users by name; all others have the `usual` one."""
        self.usual, self.own = usual or Allowance(), own or {}

    def of(self, owner: str) -> Allowance:
        return self.own.get(owner, self.usual)
