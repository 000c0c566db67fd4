"""The command line: what it says, what it loads, and that its errors are for people."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowmem_grpo import FastLanguageModel, __version__
from lowmem_grpo.cli.main import main
from lowmem_grpo.recipes import RECIPES

HEAVY = ("torch", "transformers", "peft", "datasets", "rich", "pydantic", "bitsandbytes", "numpy")
QUESTION = "Start with 17. Add 8. Subtract 13. What is the result?"


def invoke(*words: Any) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def loaded_after(code: str) -> list[str]:
    """Which heavy libraries a fresh interpreter has loaded after running `code`."""
    script = f"import sys\n{code}\nprint('loaded:', *[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    return result.stdout.rpartition("loaded:")[2].split()


def test_looking_at_the_package_loads_no_heavy_library() -> None:
    looks = ["--help"], ["run"], ["run", "--help"], ["run", "gsm8k", "--help"], ["new", "--help"]
    code = ["import lowmem_grpo, lowmem_grpo.config.sampling", "from lowmem_grpo.cli.main import main",
            *(f"main({words}, standalone_mode=False)" for words in looks)]
    assert loaded_after("\n".join(code)) == []


def test_kernels_and_losses_load_torch_and_no_other_heavy_library() -> None:
    code = "import lowmem_grpo.kernels, lowmem_grpo.losses.policy_loss, " \
           "lowmem_grpo.memory.offload.activations, lowmem_grpo.models.packing"
    assert set(loaded_after(code)) <= {"torch", "numpy"}  # torch loads numpy by itself


def test_every_public_name_can_be_imported_and_others_are_named() -> None:
    import lowmem_grpo

    for name in lowmem_grpo.__all__:
        assert getattr(lowmem_grpo, name).__module__.startswith("lowmem_grpo.")
    with pytest.raises(AttributeError, match=r"no attribute 'GRPOTrainr'; it has .*GRPOTrainer"):
        _ = lowmem_grpo.GRPOTrainr


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("lowmem-grpo")
    if not command.exists():
        pytest.skip("the package is not installed in this environment")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=400)
    assert __version__ in result.stdout


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_lists_every_command(word: str) -> None:
    result = invoke(word)
    assert result.exit_code == 0
    for command in main.commands:
        assert f"\n  {command}" in result.output


@pytest.mark.parametrize("words", [["run"], ["run", "--help"]])
def test_run_lists_every_recipe_with_what_it_does(words: list[str]) -> None:
    result = invoke(*words)
    assert result.exit_code == 0
    told = " ".join(result.output.split())  # long lines are broken between words
    for name, about in RECIPES.items():
        assert name in told and about in told


@pytest.mark.parametrize(("recipe", "closest"), [("arithmetik", "arithmetic"), ("gsm-8k", "gsm8k"), ("zzz", None)])
def test_a_misspelt_recipe_is_named_with_the_closest_one_and_the_list(recipe: str, closest: str | None) -> None:
    result = invoke("run", recipe, "max_steps=1")
    assert result.exit_code == 2
    assert f"no recipe {recipe!r}" in result.output
    assert (f"did you mean {closest}?" in result.output) == (closest is not None)
    assert all(name in result.output for name in RECIPES)


def test_a_sampled_answer_is_printed_alone() -> None:
    result = invoke("generate", QUESTION, "--temperature", 0, "--max-tokens", 60)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().splitlines()[0].startswith("17 + 8 = ")
    assert result.stdout.strip().splitlines()[-1].startswith("Answer: ")


def test_json_output_is_one_object_a_sample_and_nothing_else() -> None:
    result = invoke("generate", QUESTION, "--json", "-n", 3, "--max-tokens", 4, "--seed", 1)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(records) == 3
    assert all(set(record) == {"text", "tokens", "finish"} for record in records)
    assert all((record["tokens"], record["finish"]) == (4, "length") for record in records)
    assert result.stdout == invoke("generate", QUESTION, "--json", "-n", 3, "--max-tokens", 4, "--seed", 1).stdout


def test_an_adapter_of_any_rank_changes_the_answer(tmp_path: Path) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)
    model.save_lora(tmp_path / "adapter")
    common = ("generate", QUESTION, "--temperature", 0, "--max-tokens", 8)
    base, adapted = invoke(*common), invoke(*common, "--adapter", tmp_path / "adapter")
    assert (base.exit_code, adapted.exit_code) == (0, 0), adapted.output
    assert base.stdout != adapted.stdout


def test_a_report_is_remade_from_the_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "elapsed": 1.0, "reward": 0.5}) + "\n")
    result = invoke("report", tmp_path)
    assert result.exit_code == 0, result.output
    assert Path(result.output.strip()) == tmp_path / "report.html"
    assert "</html>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp932"])  # click itself writes UTF-8 where it is ASCII
def test_a_command_prints_in_any_encoding_of_the_terminal(encoding: str, tmp_path: Path) -> None:
    run = tmp_path / "é あ ✓"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "elapsed": 1.0, "reward": 0.5}) + "\n")
    result = CliRunner(charset=encoding).invoke(main, ["report", str(run)])
    assert result.exit_code == 0, result.output
    shown = run.name.encode(encoding, "backslashreplace").decode(encoding)
    assert result.stdout == f"{tmp_path}/{shown}/report.html\n"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp932"])
def test_a_run_comes_to_its_end_in_any_encoding_of_the_terminal(encoding: str, tmp_path: Path) -> None:
    words = ["run", "arithmetic", "max_steps=1", "eval_problems=4", f"output_dir={tmp_path / 'run'}"]
    result = CliRunner(charset=encoding).invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "? wrong" in result.stdout and "report.html" in result.stdout  # the mark before it is not in these


@pytest.mark.parametrize(("words", "code", "message"), [
    (["generate", "hi", "--model", "./nowhere"], 1, "no model './nowhere': there is no such folder"),
    (["generate", "hi", "--model", "no-such-owner/no-such-model"], 1, "no model 'no-such-owner/no-such-model'"),
    (["generate", "hi", "--adapter", "nowhere"], 1, "there is no nowhere; give the folder of a run"),
    (["generate", "hi", "--max-tokens", "0"], 1, "max_tokens is 0; it must be a whole number, at least 1"),
    (["generate", "hi", "--temperature", "warm"], 2, "'warm' is not a valid float"),
    (["generate", "x" * 4000], 1, "leaves no room in a context of 2048"),
    (["generate"], 2, "give a PROMPT to answer"),
    (["report", "nowhere"], 2, "'nowhere' does not exist"), (["report", "."], 1, "expected the folder of a run"),
    (["run", "arithmetic", "max_stepz=1"], 2, "did you mean max_steps"),
    (["run", "arithmetic", "num_generations=1"], 1, "num_generations is 1"),
    (["run", "arithmetic", "use_vllm=true", "engine=transformers"], 1, "contradict each other"),
    (["run", "arithmetic", "engine=sglang"], 1, "allowed: auto, transformers, vllm"),
    (["run", "arithmetic", "train_size=0"], 1, "size is 0"),
    (["run", "arithmetic", "model=nowhere/at/all"], 1, "no model 'nowhere/at/all'"),
    (["trian"], 2, "No such command 'trian'"),
])
def test_a_mistake_is_answered_in_words_and_never_with_a_traceback(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_an_error_inside_a_library_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        json.loads("{")

    monkeypatch.setattr(FastLanguageModel, "from_pretrained", broken)
    assert isinstance(invoke("generate", "hi").exception, json.JSONDecodeError)
