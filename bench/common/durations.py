"""Print the time that the tests take: a table by folder, and the longest tests.

    make test && python -m bench.common.durations runs/tests/engines.xml runs/tests/others.xml

The files are those that pytest writes with --junitxml. Seconds are those of the workers, setup and teardown included.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import click

Case = tuple[str, str, float]  # folder, test, seconds


def cases(files: Iterable[Path]) -> Iterator[Case]:
    """Yield every case of the files."""
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            parts = case.get("classname", "").split(".")
            yield "/".join(parts[:2]), f"{'/'.join(parts)}::{case.get('name')}", float(case.get("time", 0))


def table(found: list[Case], longest: int) -> Iterator[str]:
    """Yield the lines of a Markdown table by folder, the most seconds first, then the longest tests."""
    seconds, counts = Counter[str](), Counter(folder for folder, _, _ in found)
    for folder, _, took in found:
        seconds[folder] += took
    yield "| folder | cases | seconds |\n|---|---|---|"
    for folder, took in seconds.most_common():
        yield f"| {folder} | {counts[folder]:,} | {took:,.0f} |"
    yield f"| all | {len(found):,} | {sum(seconds.values()):,.0f} |\n"
    for _, name, took in sorted(found, key=lambda case: -case[2])[:longest]:
        yield f"{took:8.1f} s  {name}"


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--longest", default=30, show_default=True, help="how many of the longest tests to list")
def main(files: tuple[Path, ...], longest: int) -> None:
    for line in table(list(cases(files)), longest):
        click.echo(line)


if __name__ == "__main__":
    main()
