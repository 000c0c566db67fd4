"""Print how large the package is and how its folders depend on each other.

    python -m bench.common.house               # this checkout, with the files that single calls enter
    python -m bench.common.house --root PATH   # another checkout, without them

tests/test_house.py limits the figures of how the package is built, and prints the others.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import median

import click
from rich.console import Console

from bench.common import child, tables

ROOT = Path(__file__).resolve().parents[2]
OUTER = ("server", "agents", "integrations", "recipes", "cli")  # not the core
SHORT = 60  # lines; a shorter file should have at least two importers
VAGUE = ("found", "one", "given")  # names of variables that do not say what they hold
NO_OBJECT = {"begin", "end", "take", "give", "of", "whole", "look", "told", "said"}  # methods whose name has no object
NO_VERB = re.compile(r"\W*(What|Whether|Of|How|Where)\b")  # begins a docstring without a verb
Figures = dict[str, int]


class Checkout:
    """The Python files of a checkout, and what its package's modules import from each other."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.package = root, root / "lowmem_grpo"
        self.sources = {self.module(path): path.read_text(encoding="utf-8")
                        for path in sorted(self.package.rglob("*.py"))}
        self.trees = {name: ast.parse(source) for name, source in self.sources.items()}
        self.nodes = {name: list(ast.walk(tree)) for name, tree in self.trees.items()}  # walked once, not per figure

    def module(self, path: Path) -> str:
        """Return `engines.base` for lowmem_grpo/engines/base.py, `engines` for the __init__ there."""
        parts = path.relative_to(self.package).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def doors(self) -> dict[tuple[str, str], str]:
        """The module of each (package, name), for names that a package imports lazily."""
        return {(name, alias.name): node.module.removeprefix("lowmem_grpo.") for name, tree in self.trees.items()
                for block in tree.body if isinstance(block, ast.If) for node in block.body
                if isinstance(node, ast.ImportFrom) and node.module for alias in node.names}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules of the package that each module imports, also inside of functions."""
        return {name: set(self.imported(name)) & self.trees.keys() - {name} for name in self.trees}

    def imported(self, name: str) -> Iterator[str]:
        """Yield the modules behind every `from lowmem_grpo... import` of a module; names of `doors` are left out."""
        hidden = {id(node) for block in self.trees[name].body if isinstance(block, ast.If) for node in ast.walk(block)}
        for node in self.nodes[name]:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowmem_grpo"):
                if id(node) in hidden and any((name, alias.name) in self.doors for alias in node.names):
                    continue
                base = (node.module or "").removeprefix("lowmem_grpo").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".removeprefix(".")
                    yield inner if inner in self.trees else self.doors.get((base, alias.name), base)

    def lines(self, folder: str) -> int:
        """Return the lines of all Python files of a folder of the checkout."""
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (self.root / folder).rglob("*.py"))

    # The figures

    def figures(self) -> Figures:
        """Return every figure that needs no run, by the name that the table shows."""
        lengths = {name: len(source.splitlines()) for name, source in self.sources.items()}
        importers = Counter(module for modules in self.imports.values() for module in modules)
        return {
            "package lines": sum(lengths.values()),
            "core lines": sum(lines for name, lines in lengths.items() if room(name) not in OUTER),
            "package files": len(lengths),
            "median lines of a file": int(median(lengths.values())),
            f"files below {SHORT} lines with one importer": sum(
                lines < SHORT and importers[name] == 1 for name, lines in lengths.items()),
            "folders at the top": sum((path / "__init__.py").exists() for path in self.package.iterdir()),
            "files at the top": len(list(self.package.glob("*.py"))),
            "arrows between folders": len({(room(name), room(module)) for name, modules in self.imports.items()
                                           for module in modules if room(name) != room(module)}),
            "arrows between subfolders": len({(self.subfolder(name), self.subfolder(module))
                                              for name, modules in self.imports.items() for module in modules
                                              if self.subfolder(name) != self.subfolder(module)}),
            "class names that stand twice": sum(number > 1 for number in self.class_names().values()),
            **{f"uses of `{word}`": number for word, number in self.vague_names().items()},
            "methods without an object": sum(map(self.methods_without_object, self.trees)),
            "docstrings without a verb": sum(map(self.docstrings_without_verb, self.trees)),
            "comments that begin with of": sum(map(self.comments_with_of, self.sources.values())),
            "bench lines": self.lines("bench"),
            "tests lines": self.lines("tests"),
        }

    def subfolder(self, name: str) -> str:
        """Return the folder in which a module lies, such as `engines.vllm`; a folder lies in itself."""
        return name if (self.package / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]

    def class_names(self) -> Counter[str]:
        """Return how often each class name stands in the package."""
        return Counter(node.name for nodes in self.nodes.values() for node in nodes if isinstance(node, ast.ClassDef))

    def vague_names(self) -> dict[str, int]:
        """Return how often each of VAGUE is a variable or parameter."""
        names = (getattr(node, "id", getattr(node, "arg", None)) for nodes in self.nodes.values()
                 for node in nodes if isinstance(node, ast.Name | ast.arg))
        counts = Counter(name for name in names if name in VAGUE)
        return {word: counts[word] for word in VAGUE}

    def methods_without_object(self, name: str) -> int:
        """Return the number of methods that are named by a word of NO_OBJECT."""
        return sum(isinstance(method, ast.FunctionDef) and method.name in NO_OBJECT for node in self.nodes[name]
                   if isinstance(node, ast.ClassDef) for method in node.body)

    def docstrings_without_verb(self, name: str) -> int:
        """Return the number of functions whose docstring begins with What, Whether, Of, How or Where. Properties may
        begin with Whether."""
        begins = ((node, NO_VERB.match(ast.get_docstring(node) or "")) for node in self.nodes[name]
                  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        return sum(match is not None and not (match[1] == "Whether" and is_property(node)) for node, match in begins)

    def comments_with_of(self, source: str) -> int:
        """Return the number of comments that begin with "of". Tokens are slow to read, and few files have the words."""
        tokens = tokenize.generate_tokens(io.StringIO(source).readline) if "# of " in source.lower() else ()
        return sum(token.type == tokenize.COMMENT and token.string.lower().startswith("# of ") for token in tokens)


def room(module: str) -> str:
    """Return the top-level folder or file of the package in which a module lies."""
    return module.partition(".")[0]


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(getattr(decorator, "id", getattr(decorator, "attr", "")).endswith("property")
               for decorator in function.decorator_list)


@click.command(help=__doc__)
@click.option("--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=ROOT)
def main(root: Path) -> None:
    figures = Checkout(root).figures()
    if root == ROOT:
        entered = child.run("bench.common.entered")
        figures |= {f"files that {call} enters": number for call, number in entered.items()}
    rows = [(name, f"{number:,}") for name, number in figures.items()]
    Console().print(tables.terminal(None, ("figure", "now"), rows))


if __name__ == "__main__":
    main()
