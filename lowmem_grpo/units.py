"""Bytes, seconds and counts, as numbers and in words."""

MIB = 2**20
GIB = 2**30


def size_text(count: float) -> str:
    """Bytes as people read them: 1.50 GiB, or 300.0 MiB where it is less than one GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def count_text(count: int, noun: str) -> str:
    """A count with its noun: 1 step, 2,000 steps."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def time_text(seconds: float) -> str:
    """Seconds as people read them: 0.031 s, 4.3 s, 42 s, 12 min 34 s, 1 h 2 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
