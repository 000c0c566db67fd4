"""What is changed in a notebook before it runs: install and import lines, model, dataset and number of steps.

Three more changes are counted apart. `tokens`: `apply_chat_template` gives token ids again, as it did before transformers 5
(`return_dict = False`). `device`: on a machine without a card, what asks for a card asks for the CPU. `login`: nobody logs
in to the hub, and nothing is shown there. Everything else stays as its author wrote it.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OURS = {"GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer", "SamplingParams"}  # of TRL and of vLLM
MADE_ROWS = "bench.notebooks.made_rows"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SHELL = re.compile(r"^(\s*)[!%].*?(?:(?<!\\)\n|\Z)", re.MULTILINE | re.DOTALL)  # to the end of a continued line
KEPT_MAGIC = ("%%capture", "%%time")  # a cell with another %% is not Python
SETTINGS = ("GRPOConfig", "SFTConfig", "TrainingArguments", "UnslothTrainingArguments")
STEPS = "max_steps = 2"
CPU = "__import__('types').SimpleNamespace(name='CPU', total_memory=1 << 30)"  # in place of a card's properties


@dataclass(frozen=True)
class Edit:
    """One change: the bytes from `start` to `end` of a cell become `text`."""

    kind: str
    start: int
    end: int
    text: str


def rewritten(cells: list[str], model: str, has_card: bool) -> tuple[list[str], Counter[str]]:
    """The cells as they will run, and how many changes of each kind were made. `model` is the name of a small model."""
    counts: Counter[str] = Counter()
    texts = []
    for cell in cells:
        text, dropped = without_shell(cell)
        counts.update(["imports"] * dropped)
        edits = edits_of(text, model, has_card)
        counts.update(edit.kind for edit in edits)
        texts.append(applied(text, edits))
    return texts, counts


def without_shell(cell: str) -> tuple[str, int]:
    """A cell without its shell lines and magics, and how many it had."""
    first = cell.lstrip().partition("\n")[0]
    if first.startswith("%%") and not first.startswith(KEPT_MAGIC):
        return "", 1
    return SHELL.subn(lambda line: f"{line[1]}pass\n", cell)


def applied(text: str, edits: list[Edit]) -> str:
    """The text with all changes, from its end to its start. Of two that overlap, the outer one wins."""
    data, reached = text.encode(), len(text.encode())
    for edit in sorted(edits, key=lambda edit: (edit.end, -edit.start), reverse=True):
        if edit.end <= reached:
            data = data[: edit.start] + edit.text.encode() + data[edit.end :]
            reached = edit.start
    return data.decode()


def edits_of(text: str, model: str, has_card: bool) -> list[Edit]:
    """All changes of a cell; none where it is no Python, which the run will say."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]

    def edit(kind: str, node: ast.expr | ast.stmt | ast.keyword, new: str, length: int | None = None) -> Edit:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        return Edit(kind, begin, end if length is None else begin + length, new)

    found = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str()) | ast.Import():
                if (new := new_import(node)) is not None:
                    kind = "dataset" if MADE_ROWS in new else "imports"
                    found.append(edit(kind, node, new.replace("\n", "\n" + " " * node.col_offset)))
            case ast.Assign(targets=[target]):
                found += [edit("model", value, repr(model)) for value in assigned_models(target, node.value)]
            case ast.Call():
                found += [edit("model", name, repr(model)) for name in model_names(node)]
                if called(node) in SETTINGS:
                    found += steps_edits(node, edit)
                    spaces = (keyword.value for keyword in node.keywords if keyword.arg == "trackio_space_id")
                    found += [edit("login", space, "None") for space in spaces]
                if called(node) == "notebook_login":
                    found.append(edit("login", node, "None"))
                if wants_tokens(node):
                    last = [*node.args, *(keyword.value for keyword in node.keywords)][-1]
                    found.append(Edit("tokens", *[edit("tokens", last, "").end] * 2, ", return_dict = False"))
                if not has_card:
                    found += [edit("device", place, new) for place, new in device_changes(node)]
    return found


def assigned_models(target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    """The names of models of the hub that are assigned to a name with "model" in it."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            for pair in zip(targets, values, strict=False):
                yield from assigned_models(*pair)
        case ast.Name(id=name), ast.Constant(value=str(text)) if "model" in name.lower() and HUB_NAME.fullmatch(text):
            yield value


def new_import(node: ast.ImportFrom | ast.Import) -> str | None:
    """The import line in its place; None where it stays."""
    if isinstance(node, ast.Import):
        return "import lowmem_grpo" if [name.name for name in node.names] == ["unsloth"] else None
    module = node.module or ""
    root, _, rest = module.partition(".")
    groups: dict[str, list[str]] = {}
    for name in node.names:
        home = module
        if root == "unsloth":
            home = ".".join(filter(None, ("lowmem_grpo", rest)))
        elif root in ("trl", "vllm") and name.name in OURS:
            home = "lowmem_grpo"
        elif module == "datasets" and name.name == "load_dataset":
            home = MADE_ROWS
        groups.setdefault(home, []).append(name.name + (f" as {name.asname}" if name.asname else ""))
    if [*groups] == [module]:
        return None
    return "\n".join(f"from {home} import {', '.join(names)}" for home, names in groups.items())


def called(node: ast.Call) -> str:
    """The last part of the name of what is called; empty where it has none."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def model_names(node: ast.Call) -> Iterator[ast.Constant]:
    """The names of models of the hub in a call that loads one."""
    loads = called(node) in ("from_pretrained", "pipeline")
    given = [keyword.value for keyword in node.keywords if keyword.arg in ("model", "model_name", "tokenizer")]
    for value in [*given, *(node.args if loads else [])]:
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and HUB_NAME.fullmatch(value.value):
            yield value


def wants_tokens(node: ast.Call) -> bool:
    """Whether this is `apply_chat_template` that gave token ids before transformers 5, and gives a dictionary now."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    as_text = isinstance(tokenize := given.get("tokenize"), ast.Constant) and tokenize.value is False
    named = isinstance(node.func, ast.Attribute) and called(node) == "apply_chat_template"
    return named and not as_text and "return_dict" not in given


def steps_edits(node: ast.Call, edit: Callable[..., Edit]) -> list[Edit]:
    """The changes that make a trainer's settings stop after two steps."""
    named = {keyword.arg: keyword for keyword in node.keywords}
    if chosen := named.get("max_steps") or named.get("num_train_epochs"):
        return [edit("steps", chosen, STEPS)]
    if not node.keywords:
        end = edit("steps", node, "").end - 1  # before the bracket that closes the call
        return [Edit("steps", end, end, STEPS)]
    return [edit("steps", node.keywords[0], f"{STEPS}, ", 0)]


def device_changes(node: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    """What asks for a card, and what asks for the CPU in its place."""
    match node:
        case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Constant(value="cuda" | "cuda:0") as place]):
            yield place, "'cpu'"
        case ast.Call(func=ast.Attribute(value=inner, attr="cuda"), args=[], keywords=[]):
            yield node, ast.unparse(inner)
        case ast.Call(func=ast.Attribute(attr="get_device_properties")):
            yield node, CPU
