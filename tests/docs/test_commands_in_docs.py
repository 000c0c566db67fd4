"""Every `lowmem-grpo` line in README and docs is a command that exists, with options that exist."""

import re
import shlex
from importlib import import_module
from pathlib import Path

from tables import every_row

from lowmem_grpo.__main__ import main
from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.recipes.options import fill

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / name for name in ("docs", "lowmem_grpo", "bench", "notebooks")]
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted(folder.rglob("*.md")))]
LINE = re.compile(r"^(?:\s*|.*`)(?:\$ )?(lowmem-grpo [^`\n]*)", re.MULTILINE)
COMMANDS = sorted({(page.relative_to(ROOT).as_posix(), line.strip()) for page in PAGES
                   for line in LINE.findall(page.read_text(encoding="utf-8"))})
PLACEHOLDERS = {"RECIPE", "RUN", "...", "[key=value", "...]"}


def words_of(line: str) -> list[str]:
    """The arguments, without the comment at the end of the line."""
    return shlex.split(line, comments=True)[1:]


assert len(COMMANDS) > 30


@every_row(("page", "line"), COMMANDS)
def test_every_command_on_a_page_exists_and_takes_its_options(page: str, line: str) -> None:
    words = words_of(line)
    if not words or words[0].isupper() or words[0].startswith("-"):
        return
    command = main.commands.get(words[0])
    assert command is not None, f"{page}: there is no command {words[0]}"
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    if words[0] != "run":
        given = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
        assert [option for option in given if option not in {*known, "--help"}] == [], page
    elif len(words) > 1 and words[1] in RECIPES and not PLACEHOLDERS & {*words}:
        fill(import_module(f"lowmem_grpo.recipes.{words[1]}").OPTIONS, [word for word in words[2:] if word != "--help"])
    elif len(words) > 1:
        assert words[1].endswith(".py") or words[1] in {*PLACEHOLDERS, "--help"}, f"{page}: no recipe {words[1]}"
