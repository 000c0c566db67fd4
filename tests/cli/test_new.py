"""`lowmem-grpo new`: every recipe that it writes is clean and runs, guesses are said, and bad input writes nothing."""

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from datasets import Dataset
from recipe_runs import invoke, invoke_well
from tables import every_row

from lowmem_grpo.cli import new as command
from lowmem_grpo.models import hub
from lowmem_grpo.recipes.new_recipe import KINDS, kind_of
from lowmem_grpo.recipes.recipe_file import load_recipe
from lowmem_grpo.recipes.tasks.arithmetic import problems

CHOICES = [kind for kind in KINDS if kind not in ("example", "none")]
ROOT = Path(__file__).parents[2]
QUICK = ["max_steps=1", "num_generations=2", "per_device_train_batch_size=2", "gradient_accumulation_steps=1",
         "max_completion_length=4", "eval_problems=1", "gpu=cpu", "engine=transformers", "disable_tqdm=true"]
ANSWERS: dict[str, Callable[[int], Any]] = {
    "number": lambda i: i, "marked": lambda i: f"{i} + {i} = {2 * i}\n#### {2 * i:,}",
    "choice": lambda i: "ABCD"[i % 4], "code": lambda i: f"assert f({i}) == {i}", "text": lambda i: f"in Paris {i}",
    "math": lambda i: rf"\frac{{{i}}}{{7}}" if i % 3 else str(i),
    "json": lambda i: json.dumps({"sum": i}), "long": lambda i: f"Because of {i} " + "it is long " * 20,
}
WRITERS: dict[str, Callable[[Dataset, Path], Any]] = {
    "jsonl": Dataset.to_json, "csv": Dataset.to_csv, "parquet": Dataset.to_parquet,
}


def said(result: Result) -> str:
    """What was printed, in one line."""
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; the places of imports are as before in the end: a recipe's folder becomes one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def rows_file(kind: str, ending: str = "jsonl", names: tuple[str, str] = ("question", "answer")) -> str:
    rows = [{names[0]: f"What is the answer, for the {i}th time?", names[1]: ANSWERS[kind](i)} for i in range(24)]
    WRITERS[ending](Dataset.from_list(rows), Path(f"rows.{ending}"))
    return f"rows.{ending}"


def is_clean(path: Path, lines: int = 100) -> None:
    """Ruff has nothing to say, with the settings of this package."""
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", path],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(path.read_text("utf-8").splitlines()) <= lines


@pytest.mark.parametrize(("kind", "ending"), [
    ("number", "csv"), ("math", "jsonl"), ("json", "csv"), ("long", "parquet"),
    *(pytest.param(*others, marks=pytest.mark.slow) for others in (
        ("marked", "jsonl"), ("choice", "parquet"), ("text", "csv"))),
])
@pytest.mark.every(3)
def test_a_recipe_for_answers_of_each_kind_is_clean_and_runs_and_is_tested(
    kind: str, ending: str, folder: Path
) -> None:
    done = invoke_well("new", "mine", "--data", rows_file(kind, ending))
    assert "column 'question' (guessed from its name); another: --prompt-column NAME" in said(done)
    is_clean(folder / "mine.py")
    ran = invoke_well("run", "./mine.py", *QUICK)
    assert "only knows its own arithmetic" in said(ran)
    summary = json.loads((folder / "runs" / "mine" / "summary.json").read_text())
    assert ("accuracy_after" in summary) == (kind != "long")
    tested = invoke("eval", "runs/mine", "--recipe", "./mine.py", "--limit", 1, "--max-tokens", 2, "--show", 0)
    if kind == "long":
        assert "has no EXAM" in tested.output
    else:
        assert tested.exit_code == 0, tested.output
        assert json.loads((folder / "runs" / "mine" / "eval.json").read_text())["prompts"] == 1


def test_rows_of_the_kind_that_the_tiny_model_knows_are_seen_in_any_file(folder: Path) -> None:
    rows = [{"question": problem.question, "answer": problem.answer} for problem in islice(problems("train", 5), 20)]
    Dataset.from_list(rows).to_csv("rows.csv")
    assert "the embedded tiny model knows: on a CPU the recipe trains it" in said(
        invoke("new", "mine", "--data", "rows.csv"))
    is_clean(folder / "mine.py")


def test_a_recipe_with_an_environment_is_clean_and_trains_is_tested_and_played(folder: Path) -> None:
    done = invoke("new", "mine", "--agent")
    assert done.exit_code == 0 and "generate --recipe ./mine.py" in done.output, done.output
    is_clean(folder / "mine.py", lines=130)
    few = ["max_steps=1", "num_generations=2", "per_device_train_batch_size=4", "eval_problems=4", "gpu=cpu",
           "engine=transformers", "disable_tqdm=true"]
    invoke_well("run", "./mine.py", *few)
    assert "accuracy_after" in json.loads((folder / "runs" / "mine" / "summary.json").read_text())
    tested = invoke_well("eval", "runs/mine", "--recipe", "./mine.py", "--limit", 4, "--samples", 2)
    assert all(word in said(tested) for word in ("success rate", "95% interval", "pass@2", "turns of an episode"))
    found = json.loads((folder / "runs" / "mine" / "eval.json").read_text())
    assert 1 <= found["adapter"]["episodes"]["turns/mean"] <= 5
    played = invoke("generate", "--recipe", "./mine.py", "--adapter", "runs/mine", "--seed", 1)
    assert played.exit_code == 0 and "the model" in played.output, played.output


@every_row("kind", CHOICES)
def test_answers_are_taken_for_what_they_are(kind: str) -> None:
    assert list(command.KINDS) == CHOICES
    assert kind_of([str(ANSWERS[kind](i)) for i in range(24)]) == kind


@every_row(("answers", "kind"), [
    (["1", "2", "many", "no"], "text"), (["3.5", "1,000", "-2", "$5", "1/2", "50%", "7", "8", "9", "?"], "number"),
    (["[1, 2]", "{}"], "json"), (["{broken", "{}"], "text"), (["x" * 61] * 3, "long"), (["yes"] * 3, "text"),
    (["so it is \\boxed{4}, as was to be shown in more than eight words"] * 2, "math"), (["AB", "C"], "text"),
])
def test_mixed_answers_are_taken_for_what_most_of_them_are(answers: list[str], kind: str) -> None:
    assert kind_of(answers) == kind


def test_marked_solutions_in_a_list_are_all_right_and_those_without_a_mark_are_none(folder: Path) -> None:
    answers = [["so #### 4", "#### 4.0"], ["no mark", "#### 5"], ["none"], "#### 6"]
    rows = [{"question": f"What is {i}?", "answer": answer} for i, answer in enumerate(answers[:3])]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert invoke("new", "mine", "--data", "rows.jsonl", "--answers", "marked").exit_code == 0
    make_row = load_recipe("./mine.py").make_row
    made = [make_row({"question": "What?", "answer": answer})["answer"] for answer in answers]
    assert made == [["4", "4.0"], "5", None, "6"]


def test_true_steps_of_the_example_pays_for_true_lines(folder: Path) -> None:
    from lowmem_grpo.recipes.recipe_file import load_file

    invoke("new", "first")
    pay = load_file(folder / "first.py").true_steps(completions=["1 + 2 = 3\n3 * 2 = 7\nAnswer: 7", "no", "5 - 9 = 4"])
    assert pay == [0.1, 0.0, 0.0]


def test_a_file_of_prompts_alone_gets_rewards_that_need_no_answer(folder: Path) -> None:
    Path("one.csv").write_text("idea\n" + "".join(f"Write a line about the number {i}.\n" for i in range(9)))
    invoke_well("new", "lines", "--data", "one.csv", "--prompt-column", "idea")
    is_clean(folder / "lines.py")
    invoke_well("run", "./lines.py", *QUICK)
    assert "rewards/whole_sentences/mean" in (folder / "runs" / "lines" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("columns", "prompt", "answer", "why"), [
    ({"Question": "What?", "Label": "4"}, "Question", "Label", "guessed from its name"),
    ({"country": "Peru", "capital": "Lima is"}, "country", "capital", "guessed: the first of two columns"),
    ({"task": "What?", "b": "4"}, "task", "b", "guessed: the other one of two columns"),
    ({"id": "1", "alpha": "What is it?", "beta": "4"}, "alpha", "beta", "guessed: its texts are longer"),
    ({"id": "1", "the question": "What?", "capital": "4"}, "the question", "capital", "guessed: the other one of two"),
    ({"alpha": "a", "beta": "What?", "gamma": "4"}, "", "", "FILL IN the name of a column"),
])
def test_columns_are_guessed_aloud_or_left_to_be_filled_in(
    columns: dict[str, str], prompt: str, answer: str, why: str, folder: Path
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(columns) + "\n" for _ in range(3)))
    done = invoke_well("new", "mine", "--data", "rows.jsonl")
    text = (folder / "mine.py").read_text()
    assert f'PROMPT_COLUMN = "{prompt}"  # ' in text
    assert f'ANSWER_COLUMN = "{answer}"  # ' in text
    assert why in text
    if not prompt:
        assert "FILL IN the names of columns in mine.py" in said(done)
        refused = invoke("run", "./mine.py", *QUICK)
        assert refused.exit_code == 1
        assert "Traceback" not in refused.output
        assert "is read by a column without a name; its columns are alpha, beta, gamma" in said(refused)


@pytest.mark.parametrize(("row", "asked", "printed"), [
    ({"instruction": "Add.", "input": "1 and {i}", "output": 3, "source": "x"}, "Add.\n\n1 and 4",
     "asked with the prompts: input; change that in make_row not used: source"),
    ({"question": "Which {i}?", "choices": ["w", "x"], "answer": "B"}, "Which 4?\n\nA. w\nB. x",
     "asked with the prompts: choices; "),
    ({"question": "Which {i}?", "choices": ["w", "x"], "answer": 0}, "Which 4?\n\n0. w\n1. x", "answers are numbers"),
    ({"question": "Which {i}?", "choices": {"text": ["w", "x"], "label": ["P", "Q"]}, "answer": "Q"},
     "Which 4?\n\nP. w\nQ. x", "letters of a choice"),
    ({"question": "Which {i}?", "options": ["w", "x"], "passage": "It is {i}.", "answer": "w of all"},
     "Which 4?\n\nIt is 4.\n\n- w\n- x", "passage, options"),
])
def test_a_prompt_has_the_columns_that_it_needs(
    row: dict[str, Any], asked: str, printed: str, folder: Path
) -> None:
    rows = [{name: part.format(i=i) if isinstance(part, str) else part for name, part in row.items()}
            for i in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    done = invoke("new", "mine", "--data", "rows.jsonl")
    assert printed in said(done)
    is_clean(folder / "mine.py")
    assert load_recipe("./mine.py").DATA.rows[4]["prompt"][-1]["content"] == asked


def test_columns_with_any_names_in_any_place_make_a_recipe_that_finds_them_wherever_it_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ('what "is" \\ asked\n$name', "it's {right}")
    (folder / "da ta").mkdir()
    moved = folder / "da ta" / "rows'.jsonl"
    Path(rows_file("number", names=names)).rename(moved)
    words = ("new", "odd", "--data", moved, "--prompt-column", names[0], "--answer-column", names[1], "--out")
    for out in (".", "sub/folder"):
        invoke_well(*words, out)
    is_clean(folder / "odd.py")
    monkeypatch.chdir(tmp_path)
    for name in ("here/odd.py", "here/sub/folder/odd.py"):
        assert len(load_recipe(name).DATA.rows) == 24


def test_a_dataset_of_the_hub_is_looked_at_where_the_hub_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(**wanted: Any) -> Any:
        asked.append(wanted)
        rows = Dataset.from_list([{"question": "What?", "answer": f"#### {i}"} for i in range(5)])
        return rows.to_iterable_dataset() if wanted["streaming"] else rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("lowmem_grpo.models.hub.find_dataset", lambda name: None)
    invoke_well("new", "mine", "--data", "openai/gsm8k:main")
    assert asked == [{"path": "openai/gsm8k", "name": "main", "split": "train", "streaming": True}]
    text = (folder / "mine.py").read_text()
    assert 'OwnData("openai/gsm8k:main", make_row, split="train", held_out=0.125)' in text
    assert 'rewards.after("####")' in text
    is_clean(folder / "mine.py")


def test_a_hub_that_does_not_answer_leaves_columns_to_fill_in_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(name: str) -> None:
        raise OSError("the hub does not answer (no route)")

    monkeypatch.setattr("lowmem_grpo.models.hub.find_dataset", silent)
    done = invoke_well("new", "mine", "--data", "openai/gsm8k:main")
    for words in ("could not be looked at: the hub does not answer (no route)", "FILL IN the names of columns",
                  "answers are taken for short texts"):
        assert words in said(done)
    text = (folder / "mine.py").read_text()
    assert text.count("FILL IN the name of a column") == 2
    assert "The answers could not be looked at" in text
    is_clean(folder / "mine.py")
    named = invoke_well("new", "named", "--data", "openai/gsm8k:main", "--prompt-column", "question", "--answer-column",
                        "answer", "--answers", "marked")
    assert "FILL IN" not in named.output + (folder / "named.py").read_text()
    assert 'rewards.after("####")' in (folder / "named.py").read_text()


def test_a_dataset_that_the_hub_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    class NotThereError(hub.errors.RepositoryNotFoundError):
        def __init__(self) -> None:
            pass  # without a response of a server

    class Hub:
        def dataset_info(self, name: str, timeout: float) -> None:
            raise NotThereError

    with pytest.raises(ValueError, match="the hub has no dataset 'open/gsm8k'"):
        hub.find_dataset("open/gsm8k", Hub())
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", Hub)
    done = invoke("new", "mine", "--data", "open/gsm8k")
    assert done.exit_code == 1
    assert "the hub has no dataset 'open/gsm8k'" in said(done)
    assert list(folder.iterdir()) == []


BAD: dict[str, tuple[bytes, str]] = {
    "header.csv": (b"question,answer\n", "it has no rows"),
    "scalar.jsonl": (b"1\n2\n", "line 1 is not a JSON object: 1"),
    "object.json": (json.dumps({"version": 1, "data": [{"question": "a", "answer": 1}] * 3}).encode(),
                    "the file is one object, and its rows are the list in 'data'; expected is the list itself"),
    "pretty.json": (json.dumps({"data": [{"question": "a", "answer": 1}] * 3}, indent=1).encode(), "list in 'data'"),
    "pandas.json": (json.dumps({"question": {"0": "a", "1": "b"}, "answer": {"0": 1, "1": 2}}).encode(),
                    "the file is one object of question, answer; expected is a list of rows, as pandas writes with"),
    "columns.json": (b'{"question": ["a", "b"], "answer": [1, 2]}', "the file is one object of question, answer"),
    "shell.csv": ("question,answer\na,1\n".encode("utf-16"), "iconv -f utf-16 -t utf-8 shell.csv"),
    "torn.parquet": (b"PAR1 hello", "no rows from 'torn.parquet'"),
    "latin.csv": ("question,answer\ncafé?,1\nthé?,2\n".encode("latin-1"), "it is not UTF-8"),
    "latin.jsonl": ('{"question": "café", "answer": "1"}\n'.encode("latin-1"), "save it as UTF-8"),
    "one.csv": (b"question\nwhat?\nwho?\n", "has one column, 'question'; a recipe needs prompts and answers"),
    "semi.csv": (b"question;answer\na;1\nb;2\n", "separated by semicolons: save it with commas"),
    "numbers.csv": (b"a,b\n1,2\n3,4\n", "has no texts in a"),
    "blank.csv": (b"question,answer\nwhat?,\nwho?,\n", "the column 'answer' of blank.csv is empty"),
    "ragged.csv": (b"question,answer\na,b,c,d\nx,y\n", "more fields than its first line names"),
    "wide.csv": (",".join(f"c{i}" for i in range(101)).encode() + b"\n" + b",".join([b"x"] * 101) + b"\n"
                 + b",".join([b"x"] * 101) + b"\n", "has 101 columns, too many to guess from"),
    "rows.txt": (b"question", "allowed are .jsonl, .json, .csv, .parquet"),
}


@every_row("more", [[], ["--agent"], ["--data", "rows.jsonl"], ["--out", "not/there"]])
def test_a_full_disk_is_told_in_a_line(more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_file("number")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    done, out = invoke("new", "mine", *more), "not/there" if "not/there" in more else "."
    assert done.output == (f"Error: nothing can be written to {out}: No space left on device; choose another folder "
                           "with --out FOLDER\n")


@pytest.mark.parametrize(("words", "message"), [
    (["--prompt-column", "qestion"], "no column 'qestion'; it has question, answer"),
    (["--prompt-column", "answer", "--answer-column", "answer"], "cannot both be"),
])
def test_columns_that_cannot_be_used_are_refused(words: list[str], message: str, folder: Path) -> None:
    done = invoke("new", "mine", "--data", rows_file("number"), *words)
    assert done.exit_code == 1 and message in said(done)
    assert [path.name for path in folder.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("name", BAD)
def test_data_that_cannot_be_used_is_refused_in_a_line_and_nothing_is_written(name: str, folder: Path) -> None:
    content, message = BAD[name]
    Path(name).write_bytes(content)
    done = invoke("new", "mine", "--data", name)
    assert done.exit_code == 1, done.output
    assert message in said(done)
    assert len(done.output.strip().splitlines()) == 1
    assert len(done.output) < 400
    assert [path.name for path in folder.iterdir()] == [name]


def test_nothing_is_replaced_unasked_and_data_never(folder: Path) -> None:
    assert invoke("new", "mine").exit_code == 0
    (folder / "mine.py").write_text("my work")
    refused = invoke("new", "mine")
    assert refused.exit_code == 1
    assert "mine.py is there already; choose another name, or replace it with --overwrite" in said(refused)
    assert (folder / "mine.py").read_text() == "my work"
    assert invoke("new", "mine", "--overwrite").exit_code == 0
    assert "teach(setup, lesson)" in (folder / "mine.py").read_text()
    (folder / "mine.jsonl").write_text('{"question": "my own", "answer": 1}\n')
    kept = invoke("new", "mine", "--overwrite")
    assert kept.exit_code == 1
    assert "mine.jsonl is there already, and is not replaced; a recipe for it: lowmem-grpo new mine" in said(kept)
    assert "my own" in (folder / "mine.jsonl").read_text()
    (folder / "third.py").mkdir()
    assert invoke("new", "third", "--overwrite").exit_code == 1


@pytest.mark.slow
def test_the_page_on_own_recipes_is_right_and_its_example_is_clean_and_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "your_own_recipe.md").read_text("utf-8")
    Path("rows.csv").write_text("question,answer\n" + "".join(f"What is {i} and {i}?,{2 * i}\n" for i in range(20)))
    shown = [line.strip() for line in page.splitlines() if line.startswith("    lowmem-grpo ")]
    commands = [line.partition(" #")[0].split()[1:] for line in shown]
    assert len(commands) == 7
    short = {"run": QUICK, "eval": ["--limit", "1", "--max-tokens", "4"], "new": [], "export": ["--format", "adapter"]}
    for words in commands:
        done = invoke_well(*words, *short[words[0]])
        if "check=true" in words:
            assert "What the reward functions pay" in done.output
            assert not (folder / "runs").exists()
    is_clean(folder / "first.py")
    assert len((folder / "first.jsonl").read_text().splitlines()) == 256
    assert "rewards/true_steps/mean" in (folder / "runs" / "first" / "metrics.jsonl").read_text()
    assert json.loads((folder / "runs" / "first" / "summary.json").read_text())["eval_problems"] == 1
    monkeypatch.setattr(sys, "argv", ["first.py", "gpu=99"])
    with pytest.raises(SystemExit):
        runpy.run_path("first.py", run_name="__main__")
    assert "gpu is '99'; allowed are" in capsys.readouterr().err
    assert all(f"| `{kind}` |" in page for kind in CHOICES)
