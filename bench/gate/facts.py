"""Why a piece cannot run on this machine, by what bench/gate/environment.py found there."""

from typing import Any

WORKS = "works"
UNITS = {"card_gib": "the card has {have:.1f} GiB, {want} are needed",
         "host_gib": "{have:.1f} GiB of host memory are free, {want} are needed",
         "disk_gib": "{have:.1f} GiB of disk are free, {want} are needed"}
SLACK = 0.92  # a card sold as 16 GiB shows a little less


def why_not(needs: tuple[str, ...], facts: dict[str, Any]) -> str | None:
    """The first need that is not met, in words; None where all are, or where nothing is known yet."""
    if not facts:
        return None
    return next((reason for need in needs if (reason := lacking(need, facts))), None)


def lacking(need: str, facts: dict[str, Any]) -> str | None:
    """Why one need is not met: "bf16", "card_gib:24", or the name of a probe."""
    name, _, amount = need.partition(":")
    if amount:
        have, want = facts.get(name) or 0.0, float(amount)
        return None if have >= SLACK * want else UNITS[name].format(have=have, want=amount)
    if name == "bf16":
        return None if facts["bf16"] else f"the card computes no bfloat16 (sm_{''.join(map(str, facts['capability']))})"
    said = facts["works"].get(name, "not installed")
    return None if said == WORKS else f"{name}: {said}"
