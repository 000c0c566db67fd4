"""Carries the project's address from pyproject.toml to every page and notebook: python docs/make_links.py ADDRESS."""

import re
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+)"$', re.MULTILINE)
ADDRESS = re.compile(r"https://github\.com/([A-Za-z0-9-]+/[\w.-]+?)/?")


def places(root: Path) -> list[Path]:
    """The files that name the address."""
    return [root / "pyproject.toml", root / "README.md", root / "docs" / "install.md",
            *sorted((root / "notebooks").glob("*.ipynb"))]


def named(root: Path) -> str:
    """OWNER/NAME in pyproject.toml."""
    return LINE.findall((root / "pyproject.toml").read_text(encoding="utf-8"))[0]


def rename(root: Path, owner_and_name: str) -> None:
    """Write another OWNER/NAME in all of these files."""
    old = named(root)
    for path in places(root):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(old, owner_and_name), encoding="utf-8")


@click.command()
@click.argument("address")
def main(address: str) -> None:
    """Write ADDRESS, https://github.com/OWNER/NAME, wherever the project names its own."""
    found = ADDRESS.fullmatch(address)
    if found is None:
        raise click.UsageError(f"{address!r} is not of the form https://github.com/OWNER/NAME")
    rename(ROOT, found[1])


if __name__ == "__main__":
    main()
