"""The names that LeetCode provides to code and tests without an import. The scorers of APPS, LiveCodeBench and verl
also prepend these imports to the code."""

import builtins
import importlib
from collections.abc import Iterable
from typing import Any

STARRED = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
           "itertools", "functools", "operator", "typing", "json")  # from ... import *
MODULES = (*STARRED, "sys", "os", "io", "time")


class ListNode:
    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


# Helpers of LeetCodeDataset's tests. Its prompts define them too, but the tested code must not define its own judge.


def list_node(values: list[Any]) -> Any:
    first = None
    for value in reversed(values):
        first = ListNode(value, first)
    return first


def is_same_list(first: Any, other: Any) -> bool:
    while first and other and first.val == other.val:
        first, other = first.next, other.next
    return first is None and other is None


def tree_node(values: Iterable[Any]) -> Any:
    """Return the tree of these values, level by level; None stands for a missing node."""
    values = list(values)
    root = TreeNode(values.pop(0)) if values and values[0] is not None else None
    waiting = [root] if root else []
    while values and waiting:
        node = waiting.pop(0)
        for side in ("left", "right"):
            if values and (value := values.pop(0)) is not None:
                setattr(node, side, TreeNode(value))
                waiting.append(getattr(node, side))
    return root


def is_same_tree(first: Any, other: Any) -> bool:
    if not first or not other:
        return first is None and other is None
    return first.val == other.val and is_same_tree(first.left, other.left) and is_same_tree(first.right, other.right)


NODES = {"ListNode": ListNode, "TreeNode": TreeNode}
HELPERS = {"list_node": list_node, "is_same_list": is_same_list, "tree_node": tree_node, "is_same_tree": is_same_tree}


def names() -> dict[str, Any]:
    """Return all names that LeetCode provides to code, with their values."""
    modules = {name: importlib.import_module(name) for name in MODULES if name not in ("os", "time")}
    known: dict[str, Any] = {}
    for name in STARRED:
        members = vars(modules[name])
        public = members.get("__all__", [member for member in members if member[:1] != "_"])
        known |= {member: members[member] for member in public}
    return known | modules | {name: value for name, value in vars(builtins).items() if name[:1] != "_"} | NODES


def for_tests(wanted: set[str], source: str) -> dict[str, Any]:
    """Return the names in `wanted` that stand for LeetCode's helpers or Python's modules, with their values."""
    # a name that is called is a function of the code, even if a module has that name
    modules = {name: importlib.import_module(name) for name in wanted & set(MODULES) if f"{name}(" not in source}
    helpers = HELPERS | NODES if wanted & HELPERS.keys() else {}
    return modules | {name: value for name, value in helpers.items() if name in wanted}
