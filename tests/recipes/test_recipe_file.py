"""`lowmem-grpo run ./FILE.py`: a user's recipe runs as the package's do, and its own errors are shown as its own."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from recipe_runs import invoke
from tables import every_row

HEAD = """
from dataclasses import dataclass
from lowmem_grpo.recipes.options import RecipeOptions

@dataclass
class Mine(RecipeOptions):
    word: str = "none"

OPTIONS = Mine
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; a recipe's folder becomes a place of imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(body: str, name: str = "mine.py") -> str:
    Path(name).write_text(HEAD + body)
    return f"./{name}"


def run(*words: Any) -> Result:
    return invoke("run", *words)


def test_a_file_gets_its_options_and_may_import_its_neighbours() -> None:
    Path("neighbour_of_mine.py").write_text("GREETING = 'hello'\n")
    path = recipe("def run(options):\n    import neighbour_of_mine\n"
                  "    print(neighbour_of_mine.GREETING, options.word, options.config)\n")
    done = run(path, "word=world", "max_steps=3")
    assert done.exit_code == 0, done.output
    assert done.stdout == "hello world {'max_steps': 3}\n"


def test_a_file_with_postponed_annotations_has_typed_options() -> None:
    Path("late.py").write_text("from __future__ import annotations\n" + HEAD.replace("str", "int | None").replace(
        '"none"', "None") + "\ndef run(options):\n    print(options.word + 1)\n")
    done = run("./late.py", "word=41")
    assert done.exit_code == 0, done.output
    assert done.stdout == "42\n"


def test_a_file_hides_no_installed_module() -> None:
    import json

    path = recipe("def run(options):\n    import json\n    print(json.dumps([1]))\n", "json.py")
    done = run(path)
    assert done.stdout == "[1]\n", done.output
    assert sys.modules["json"] is json


def test_text_of_a_row_in_an_error_of_the_recipe_does_not_reach_the_terminal_raw() -> None:
    done = run(recipe("def run(options):\n    raise ValueError(chr(27) + ']0;owned')\n"))
    assert done.exit_code == 1 and "owned" in done.output and "\x1b" not in done.output


def test_by_itself_it_does_the_same_as_under_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe("from lowmem_grpo.recipes.recipe_file import start\n\ndef run(options):\n    print(options.word)\n"
           "    if options.word == 'none':\n        raise KeyError('lost')\n    if options.word == 'bad':\n"
           "        from lowmem_grpo.config.grpo import GRPOConfig\n        GRPOConfig(num_generations=1)\n\n"
           "if __name__ == '__main__':\n    start(run, OPTIONS)\n")

    def alone(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["mine.py", *words])
        try:
            runpy.run_path("mine.py", run_name="__main__")
        except SystemExit as end:
            return end.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    assert alone("word=hi") == (0, "hi\n", "")
    code, _, errors = alone()
    assert code == 1
    assert errors.splitlines()[0] == "Traceback (most recent call last):"
    assert errors.splitlines()[-1] == "KeyError: 'lost'"
    assert "recipe_file.py" not in errors
    assert alone("wrod=hi") == (2, "", "Error: no option 'wrod'; did you mean word?\n")
    code, _, errors = alone("word=bad")
    assert code == 1
    assert errors.startswith("Error: num_generations is 1")


@every_row(("body", "last"), [
    ("def run(options):\n    {}['lost']\n", "KeyError: 'lost'"), ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ("import no_such_module_here\n", "ModuleNotFoundError: No module named 'no_such_module_here'"),
    ("def run(options:\n", "SyntaxError: '(' was never closed"),
    ("import json\n\ndef run(options):\n    json.loads('{')\n", "JSONDecodeError"),
    ("raise ValueError('my own')\n", "ValueError: my own"),
])
def test_an_error_in_the_file_is_shown_from_that_file_on(body: str, last: str) -> None:
    done = run(recipe(body))
    assert done.exit_code == 1
    assert last in done.output.splitlines()[-1]
    assert "mine.py" in done.output
    assert "recipe_file.py" not in done.output
    assert "click" not in done.output


def test_a_reward_function_that_fails_shows_its_own_line_and_what_it_means() -> None:
    done = run(recipe("""
def broken(completions, **kwargs):
    return [kwargs["grade"] for _ in completions]

def run(options):
    from lowmem_grpo.rewards import RewardScorer
    RewardScorer([broken]).score(prompts=["?"], completions=["a"], completion_ids=[[1]], columns={},
                                 trainer_state=None)
"""))
    assert done.exit_code == 1
    assert 'return [kwargs["grade"] for _ in completions]' in done.output
    assert done.output.strip().splitlines()[-1].startswith("Error: ")
    assert "broken" in done.output.strip().splitlines()[-1]


@every_row(("name", "content", "message"), [
    ("./empty.py", "", "./empty.py is not a recipe: it has no run(options). A recipe has OPTIONS"),
    ("./half.py", "def run(options):\n    pass\n", "./half.py is not a recipe: it has no OPTIONS"),
    ("./odd.py", "OPTIONS = dict\n\ndef run(options):\n    pass\n", "./odd.py is not a recipe: it has no OPTIONS"),
    ("./data.txt", "", "give a Python file"),
    ("./", None, "./ is not a recipe: give a Python file"),
])
def test_what_is_no_recipe_is_told_what_it_lacks(name: str, content: str | None, message: str) -> None:
    if content is not None:
        Path(name).write_text(content)
    done = run(name)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize("words", [["run", "mine"], ["eval", "tiny", "--recipe", "mine"]])
def test_a_name_without_its_ending_is_told_how_to_write_the_file(words: list[str]) -> None:
    recipe("def run(options):\n    pass\n")
    done = invoke(*words)
    assert done.exit_code in (1, 2)
    assert "no recipe 'mine'; there is a file mine.py here: write ./mine.py" in " ".join(done.output.split())
