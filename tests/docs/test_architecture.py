"""ARCHITECTURE.md and the examples of CONTRIBUTING.md name only files and functions that exist."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo.losses import loss_types

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lowmem_grpo"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
EXAMPLES = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Examples")[2]
TEXT = re.sub(r"```.*?```", "", PAGE + EXAMPLES, flags=re.DOTALL)
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w/.]+\.(?:py|md|toml)|[\w/]+/")
PLACEHOLDER = "NAME"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION, ENTRY, SHORT, POLITE = re.findall(r"```python\n(.*?)```", EXAMPLES, flags=re.DOTALL)


def find(path: str) -> Path | None:
    """The file or folder, in the package or in the repository."""
    return next((root / path for root in (PACKAGE, ROOT) if (root / path).exists()), None)


@cache
def names_in(file: Path) -> set[str]:
    """What a Python file defines: functions, classes, `Class.method`, and names assigned at the top or imported."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | FUNCTIONS):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, FUNCTIONS)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_name(quoted: str) -> bool:
    """Whether it is a name of code: called, a class, or a table in capitals."""
    return bool(re.fullmatch(r"[\w.]+\(\)|[A-Z]\w+(\.\w+)?|__all__", quoted)) and quoted != PLACEHOLDER


def test_every_file_on_the_page_is_there() -> None:
    files = [quoted for quoted in QUOTED.findall(TEXT) if FILE.fullmatch(quoted) and PLACEHOLDER not in quoted]
    assert len(files) > 50
    assert [file for file in files if find(file) is None] == [], "the page names files that are gone"


def test_every_file_at_the_top_of_the_package_is_on_the_page() -> None:
    tops = {file.name for file in PACKAGE.glob("*.py") if not file.name.startswith("__")}
    assert sorted(tops - {*QUOTED.findall(TEXT)}) == [], "say in ARCHITECTURE.md, below the picture, what it is for"


def test_every_name_behind_a_file_is_defined_in_it() -> None:
    listed = re.findall(r"`([\w/]+\.py)`: ((?:`[^`]+`(?: and )?)+)", TEXT.replace("\n", " "))
    pairs = [(name.removesuffix("()"), file) for file, rest in listed for name in QUOTED.findall(rest)
             if "/" not in name]
    assert len(pairs) > 25
    assert [pair for pair in pairs if pair[0] not in names_in(find(pair[1]) or ROOT)] == []


def test_every_name_on_the_page_is_defined_in_a_file_on_the_page() -> None:
    files = {find(quoted) for quoted in QUOTED.findall(TEXT) if quoted.endswith(".py")} - {None}
    known = set().union(*(names_in(file) for file in files if file))
    names = {quoted.removesuffix("()") for quoted in QUOTED.findall(TEXT) if is_name(quoted)}
    assert sorted(names - known) == [], "name the file that defines it too, or mend the name"


def run(source: str, folder: Path, **names: Any) -> dict[str, Any]:
    """What a block of the page leaves, with these names before it."""
    (folder / "block.py").write_text(source, encoding="utf-8")
    return runpy.run_path(str(folder / "block.py"), init_globals=names)


def test_the_loss_type_of_the_example_works(tmp_path: Path) -> None:
    text = f"from __future__ import annotations\n{FUNCTION}\nENTRY = {{{ENTRY.strip()}}}"  # as loss_types.py begins
    found = run(text, tmp_path, **vars(loss_types))
    (kind,) = found["ENTRY"].values()
    logprobs, advantages = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0.5, -0.5])
    log_ratio, lengths = logprobs - logprobs.detach(), torch.tensor([1, 1])
    tokens = loss_types.LossTokens(logprobs, log_ratio, log_ratio, advantages, torch.tensor([0, 1]), lengths)
    loss = (kind.token_loss(tokens, {}) * kind.weights(lengths.float(), loss_types.StepCounts(2, 2, None))).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], -advantages / 2)


def test_the_rewards_of_the_examples_work(tmp_path: Path) -> None:
    chats = [[{"role": "assistant", "content": text}] for text in ("yes, please", "no")]
    assert run(SHORT, tmp_path)["short"](completions=chats) == [-0.11, -0.02]
    assert run(POLITE, tmp_path)["polite"]()(completions=chats) == [1.0, 0.0]
