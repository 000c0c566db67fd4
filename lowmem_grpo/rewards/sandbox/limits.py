"""The resource limits of one completion's code."""

import math
from dataclasses import dataclass, fields

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The limits of each sandboxed process. ValueError for a limit that is not a finite number, or too low."""

    seconds: float = 5.0  # wall time of one test
    total_seconds: float = 10.0  # wall and CPU time of all tests of a completion together
    memory_bytes: int = 512 * MIB  # address space of the process; Python alone takes about 30 MiB
    scratch_bytes: int = 16 * MIB  # for a single file, and for the whole scratch directory
    files: int = 64  # open files, and files in the scratch directory (counted every 50 ms)
    output_bytes: int = 256 * 1024  # for standard output and error together, and for one answer
    code_bytes: int = 100_000  # the code itself, as UTF-8

    def __post_init__(self) -> None:
        least = {"seconds": 0.05, "total_seconds": 0.05, "memory_bytes": 64 * MIB, "scratch_bytes": 64 * 1024,
                 "files": 16, "output_bytes": 1024, "code_bytes": 1}
        for entry in fields(self):
            value, minimum = getattr(self, entry.name), least[entry.name]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not minimum <= value < math.inf:
                raise ValueError(f"{entry.name} is {value!r}; it must be a finite number, at least {minimum}")
