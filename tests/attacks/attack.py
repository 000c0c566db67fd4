"""What came of an attack, and the table of all of them."""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch


@dataclass(frozen=True)
class Verdict:
    """What came of one attack. `damage` says what it reached, as seen from outside; it is empty if the package held."""

    kind: str  # a few words: the table has a line for each kind
    name: str
    damage: str = ""

    @property
    def held(self) -> bool:
        return not self.damage


def attempted(kind: str, name: str, look: Callable[[], str]) -> Verdict:
    """The verdict of an attack that nothing may come of but what `look` finds: an error would end a run."""
    try:
        return Verdict(kind, name, look())
    except Exception as error:  # noqa: BLE001
        return Verdict(kind, name, f"it raised {type(error).__name__}: {error}"[:300])


def report(verdicts: Iterable[Verdict]) -> int:
    """Print each success as it comes, then a table by kind and the total. Returns the exit status: 1 if any succeeded.

    No verdict at all also counts as a failure, because then nothing was shown.
    """
    tried, reached = Counter[str](), Counter[str]()
    for verdict in verdicts:
        tried[verdict.kind] += 1
        reached[verdict.kind] += not verdict.held
        if not verdict.held:
            click.echo(f"SUCCEEDED  {verdict.kind}: {verdict.name}: {verdict.damage}")
    width = max(map(len, tried), default=4)
    for kind, count in tried.items():
        click.echo(f"{kind:{width}}  {count:4} attacks  {reached[kind]:4} succeeded")
    click.echo(f"{tried.total()} attacks, {reached.total()} successes")
    return int(reached.total() > 0 or not tried)


def attack_and_exit(attack: Callable[[Path], Iterable[Verdict]], said: str) -> None:
    """Attack in a folder that goes afterwards, print the table and what is `said` of it, and exit with its status."""
    torch.set_num_threads(1)  # a process that has started torch's threads cannot be forked
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lowmem-attack-") as root:
        status = report(attack(Path(root)))
    click.echo(f"{said}, in {time.monotonic() - began:.0f} s")
    sys.exit(status)


def kills_command(help_text: str | None, most: int, attack: Callable[[Path, int, int], Iterable[Verdict]]) -> Any:
    """The command that kills `most` times, or as often as it is told, at seeded moments."""
    @click.command(help=help_text)
    @click.option("--count", default=most, show_default=True, type=click.IntRange(min=1), help="Kills.")
    @click.option("--seed", default=0, show_default=True, help="Of the moments.")
    def main(count: int, seed: int) -> None:
        attack_and_exit(lambda folder: attack(folder, count, seed), f"at least {count} kills, seed {seed}")

    return main
