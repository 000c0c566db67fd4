"""`lowmem-grpo doctor`: reports this machine's libraries, card, memory and disk, and what is missing."""

import json
import logging
import textwrap
from typing import Any

import click

from lowmem_grpo.runs.views.terminal import columns
from lowmem_grpo.utils import size_text

WIDTH = 100
LABEL = 22  # width of the labels in characters
UNITS = {"total_bytes": "memory", "free_bytes": "free memory", "available_bytes": "memory available",
         "disk_free_bytes": "disk free here", "model_cache_free_bytes": "disk free there", "count": "cards",
         "model_cache": "models are kept in", "capability": "compute capability", "bf16": "bfloat16"}


@click.command(short_help="Check libraries, card, memory and disk.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def doctor(as_json: bool) -> None:
    """Check libraries, card, memory and disk. Say what a run will use, what is missing, and how to get it.

    The exit status is 1 if training is not possible at all, else 0."""
    from lowmem_grpo.trainer.preflight.doctor import examine

    logging.disable(logging.WARNING)  # hides warnings of imported libraries: the report says what is wrong
    try:
        checkup = examine()
    finally:
        logging.disable(logging.NOTSET)
    click.echo(json.dumps(checkup.to_dict(), indent=2) if as_json else "\n".join(report(checkup)))
    if not checkup.can_train:
        raise SystemExit(1)


def report(checkup: Any) -> list[str]:
    """Return the checkup as lines of plain text, since the library that draws tables may be broken."""
    card = checkup.card if checkup.card.get("name") else {"name": "none", "driver": checkup.card.get("driver") or None}
    lines = section("Versions", checkup.versions) + section("Card", known(card))
    lines += section("Host", known(checkup.host)) + section("A run will use", checkup.used)
    lines.append("Missing, or worth a change")
    for line in checkup.advice or ["nothing"]:
        lines += textwrap.wrap(line, columns(WIDTH), initial_indent="  - ", subsequent_indent="    ")
    return [*lines, "", "Training is possible here." if checkup.can_train else "Training is NOT possible here."]


def known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def section(title: str, facts: dict[str, Any]) -> list[str]:
    """Return a title and one wrapped line per fact, with an empty line after them."""
    lines = [title]
    for name, value in facts.items():
        start = f"  {UNITS.get(name, name):<{LABEL}}"
        words = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        text = size_text(value) if name.endswith("_bytes") else words
        lines += textwrap.wrap(text, columns(WIDTH) - len(start), initial_indent=start,
                               subsequent_indent=" " * len(start), break_on_hyphens=False) or [start.rstrip()]
    return [*lines, ""]
