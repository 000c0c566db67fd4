"""Print the time that the tests take: a table by folder, and the longest tests.

    make test && python -m bench.common.durations runs/tests/engines.xml runs/tests/others.xml

The files are those that pytest writes with --junitxml. Seconds are those of the workers, setup and teardown included.
"""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import click

from bench.common import tables


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--longest", default=30, show_default=True, help="how many of the longest tests to list")
def main(files: tuple[Path, ...], longest: int) -> None:
    found = [(float(case.get("time", 0)), case.get("classname", "").split("."), case.get("name"))
             for file in files for case in ElementTree.parse(file).iter("testcase")]
    seconds, counts = Counter[str](), Counter("/".join(parts[:2]) for _, parts, _ in found)
    for took, parts, _ in found:
        seconds["/".join(parts[:2])] += took
    rows = [(folder, f"{counts[folder]:,}", f"{took:,.0f}") for folder, took in seconds.most_common()]
    whole = ("all", f"{len(found):,}", f"{sum(seconds.values()):,.0f}")
    click.echo("\n".join([*tables.markdown(("folder", "cases", "seconds"), [*rows, whole]), ""]))
    for took, parts, name in sorted(found, reverse=True)[:longest]:
        click.echo(f"{took:8.1f} s  {'/'.join(parts)}::{name}")


if __name__ == "__main__":
    main()
