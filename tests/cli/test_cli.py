"""The command line: what it says, what it loads, and that its errors are for people."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recipe_runs import invoke, invoke_well
from small_models import scatter

from lowmem_grpo import FastLanguageModel, __version__
from lowmem_grpo.__main__ import main
from lowmem_grpo.recipes import RECIPES

HEAVY = ("torch", "transformers", "peft", "datasets", "rich", "pydantic", "bitsandbytes", "numpy")
QUESTION = "Start with 17. Add 8. Subtract 13. What is the result?"


def loaded_after(code: str) -> list[str]:
    """Which heavy libraries a fresh interpreter has loaded after running `code`."""
    script = f"import sys\n{code}\nprint('loaded:', *[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    return result.stdout.rpartition("loaded:")[2].split()


def test_looking_at_the_package_loads_no_heavy_library() -> None:
    looks = ["--help"], ["run"], ["run", "--help"], ["run", "gsm8k", "--help"], ["new", "--help"], ["pairs", "--help"]
    code = ["import lowmem_grpo, lowmem_grpo.config.sampling", "from lowmem_grpo.__main__ import main",
            *(f"main({words}, standalone_mode=False)" for words in looks)]
    assert loaded_after("\n".join(code)) == []


def test_kernels_and_losses_load_torch_and_no_other_heavy_library() -> None:
    code = "import lowmem_grpo.kernels, lowmem_grpo.losses.policy_loss, " \
           "lowmem_grpo.memory.offload.activations, lowmem_grpo.models.packing"
    assert set(loaded_after(code)) <= {"torch", "numpy"}  # torch loads numpy by itself


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("lowmem-grpo")
    if not command.exists():
        pytest.skip("the package is not installed in this environment")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=400)
    assert __version__ in result.stdout


def test_help_lists_every_command() -> None:
    for result in (invoke("-h"), invoke("--help")):
        assert result.exit_code == 0
        assert [command for command in main.commands if f"\n  {command}" not in result.output] == []


def test_run_lists_every_recipe_with_what_it_does() -> None:
    for result in (invoke("run"), invoke("run", "--help"), invoke("run", "zzz")):
        told = " ".join(result.output.split())  # long lines are broken between words
        assert [name for name, about in RECIPES.items() if f"{name} {about}" not in told] == []


def test_a_sampled_answer_is_printed_alone() -> None:
    result = invoke_well("generate", QUESTION, "--temperature", 0, "--max-tokens", 60)
    assert result.stdout.strip().splitlines()[0].startswith("17 + 8 = ")
    assert result.stdout.strip().splitlines()[-1].startswith("Answer: ")


def test_json_output_is_one_object_a_sample_and_nothing_else() -> None:
    result = invoke_well("generate", QUESTION, "--json", "-n", 3, "--max-tokens", 4, "--seed", 1)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(records) == 3
    assert all(set(record) == {"text", "tokens", "finish"} for record in records)
    assert all((record["tokens"], record["finish"]) == (4, "length") for record in records)
    assert result.stdout == invoke("generate", QUESTION, "--json", "-n", 3, "--max-tokens", 4, "--seed", 1).stdout


def test_an_adapter_of_any_rank_changes_the_answer(tmp_path: Path) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    scatter(FastLanguageModel.get_peft_model(bare, r=3), 0.3).save_lora(tmp_path / "adapter")
    common = ("generate", QUESTION, "--temperature", 0, "--max-tokens", 8)
    base, adapted = invoke(*common), invoke(*common, "--adapter", tmp_path / "adapter")
    assert (base.exit_code, adapted.exit_code) == (0, 0), adapted.output
    assert base.stdout != adapted.stdout


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp932"])  # click itself writes UTF-8 where it is ASCII
def test_a_report_is_remade_and_its_name_printed_in_any_encoding_of_the_terminal(encoding: str, tmp_path: Path) -> None:
    run = tmp_path / "é あ ✓"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "elapsed": 1.0, "reward": 0.5}) + "\n")
    (run / "summary.json").write_text('{"config": 3, "samples": 5, "steps": "x"}')
    result = CliRunner(charset=encoding).invoke(main, ["report", str(run)])
    assert result.exit_code == 0, result.output
    shown = run.name.encode(encoding, "backslashreplace").decode(encoding)
    assert result.stdout == f"{tmp_path}/{shown}/report.html\n"
    assert "there is no summary.json that can be read" in (run / "report.html").read_text()


def test_a_prompt_that_is_too_long_is_refused_in_words() -> None:
    result = invoke("generate", "x" * 4000)
    assert result.exit_code == 1 and "leaves no room in a context of 2048" in result.output


def test_an_error_inside_a_library_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        json.loads("{")

    monkeypatch.setattr(FastLanguageModel, "from_pretrained", broken)
    assert isinstance(invoke("generate", "hi").exception, json.JSONDecodeError)


def test_an_error_of_a_library_that_quotes_a_file_does_not_steer_the_terminal() -> None:
    code = ("from lowmem_grpo.__main__ import main\nmain(['run'], standalone_mode=False)\n"
            "raise KeyError(chr(27)) from ValueError(chr(27) + '[2J in a file')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "[2J in a file" in done.stderr and "KeyError" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(("word", "near"), [("trian", "run"), ("train", "run"), ("evl", "eval"), ("merge", "export"),
                                            ("genrate", "generate"), ("xyz", None)])
def test_an_unknown_command_is_refused_without_the_one_that_was_meant(word: str, near: str | None) -> None:
    result = invoke(word, "arithmetic")
    assert result.exit_code == 2 and f"No such command '{word}'" in result.output
    assert (f"Did you mean '{near}'?" if near else "lowmem-grpo --help lists the commands") in result.output


def test_a_model_without_a_name_or_a_misspelled_folder_is_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    result = invoke("eval", "runs/nope", "--recipe", "gsm8k")
    assert result.exit_code == 1 and "there is no such folder (runs has mine)" in result.output
    result = invoke("run", "arithmetic", "model=")
    assert result.exit_code == 1 and "the name of the model is empty" in result.output
