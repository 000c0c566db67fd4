"""Wrong values: each command answers at once, in one line that names the value, and never with a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = "".join(json.dumps({"prompt": f"{number}?", "answer": str(number)}) + "\n" for number in range(4))
FILES = {  # by their paths below the folder in which the commands run
    "plain": "", "keys": f"ann tml-{'a' * 32}\n", "latin": "Ren\xe9 key\n",
    "rows.jsonl": ROWS, "broken.jsonl": "{", "bad.py": "def (", "bare.py": "x = 1\n", "empty/.keep": "",
    "stepless/metrics.jsonl": '{"loss": 1.0}\n',
    "list/config.json": "[1]", "adapter/adapter_config.json": '{"peft_type": "IA3"}',
    "lora/adapter_config.json": '{"peft_type": "LORA"}', "lora/adapter_model.safetensors": "",
    "adapter/adapter_model.safetensors": "", "torn/adapter_config.json": "{", "torn/adapter_model.safetensors": "",
}
LLAMA = "plan --model llama-3.1-8b --gpu 4090"
TINY = "eval tiny --recipe arithmetic"
REFUSED = {  # the command, and what its one line says
    "serve --folder plain/inside --port 0": "--folder is 'plain/inside', and", "serve --port 70000": "70000 is not in",
    "serve --folder plain --port 0": "'plain' is a file",
    "serve --model empty --port 0": "holds no config.json",
    "watch empty --port 0 --host 9.9.9.9 --key-file keys": "name an address of this machine",
    "watch empty --key-file latin": "latin is no key file", "watch missing": "'missing' does not exist",
    "watch empty --key-file empty": "is a directory",
    "report empty": "no empty/metrics.jsonl", "report stepless": "line 1 has no step", "report plain": "is a file",
    f"{LLAMA} --context -5": "context is -5", f"{LLAMA} --fp8 --16bit": "--fp8 and --16bit contradict each other",
    "plan --model list --gpu 4090": "holds no object of fields",
    "plan --model tiny --gpu nocard": "no card 'nocard'",
    "export adapter --out new": "is of type IA3; only LoRA can be loaded", "export torn --out new": "cannot be read",
    "export lora --out plain": "plain is a file",
    "export lora --out empty": "empty is not empty; choose another folder",
    "export lora --out new --device tpu": "--device is 'tpu'", "export lora --out new --base empty": "no config.json",
    "export lora --out new --format gguf --llama-cpp empty": "empty",
    "eval tiny --recipe nope": "no recipe 'nope'", "eval tiny --recipe ./nope.py": "(no such file)",
    "eval tiny --recipe ./bad.py": "SyntaxError: invalid syntax", "eval tiny --recipe ./bare.py": "has no EXAM",
    f"{TINY} --adapter adapter": "only LoRA", f"{TINY} --out plain": "--out is 'plain', and",
    f"{TINY} --dataset rows.jsonl": "makes its own problems", f"{TINY} --temperature -1": "temperature is -1.0",
    "eval tiny --dataset broken.jsonl --reward math_match": "line 1 is not JSON",
    "eval tiny --dataset rows.jsonl --reward math_match --prompt-column q": "has no column 'q'; it has prompt, answer",
    "generate hi --adapter torn": "cannot be read", "generate --recipe arithmetic": "has no episodes",
    "generate --recipe ./bad.py": "SyntaxError: invalid syntax", "generate hi --max-tokens -1": "max_tokens is -1",
    "run ./bad.py": "SyntaxError: invalid syntax", "run arithmetic max_steps=-3": "max_steps is -3",
    "new mine --data rows.jsonl --prompt-column q": "has no column 'q'; it has prompt, answer",
    "jobs --server broken.jsonl": "does not say where a server is", "submit arithmetic --share 7": "share is 7.0",
}
SCRIPT = """
import json, sys
from click.testing import CliRunner
from lowmem_grpo.cli.main import main

def tell(words):
    done = CliRunner().invoke(main, words.split())
    heavy = "torch" in sys.modules
    return done.exit_code, done.output, isinstance(done.exception, SystemExit), heavy

print("told:" + json.dumps({words: tell(words) for words in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool, bool]]:
    """Exit code, output, whether the command ended by itself, and whether torch was loaded by then."""
    folder = tmp_path_factory.mktemp("here")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "latin-1")
        (folder / name).chmod(0o600)
    done = subprocess.run([sys.executable, "-c", SCRIPT, *REFUSED], cwd=folder, capture_output=True, text=True,
                          timeout=400)
    assert done.returncode == 0, done.stderr
    answers: dict[str, tuple[int, str, bool, bool]] = json.loads(done.stdout.rpartition("told:")[2])
    return answers


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_value_is_named_in_one_line_before_torch_is_loaded(
    words: str, told: dict[str, tuple[int, str, bool, bool]]
) -> None:
    code, output, ended, loaded_torch = told[words]
    assert code != 0 and ended and "Traceback" not in output
    assert REFUSED[words] in output.splitlines()[-1]
    assert not loaded_torch


def test_a_summary_of_another_form_is_left_out_of_the_report(tmp_path: Path) -> None:
    from lowmem_grpo.runs.views.report import write_report

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "summary.json").write_text('{"config": 3, "samples": 5, "steps": "x"}')
    assert "there is no summary.json that can be read" in write_report(tmp_path).read_text()
