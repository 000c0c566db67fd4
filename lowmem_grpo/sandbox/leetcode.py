"""What LeetCode gives code and its tests without an import: modules and their names, linked lists and trees.

The scorers of APPS, LiveCodeBench and verl write these imports above the code too.
"""

import builtins
import importlib
from collections.abc import Iterable
from typing import Any

STARRED = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
           "itertools", "functools", "operator", "typing", "json")  # from ... import *
MODULES = (*STARRED, "sys", "os", "io", "time")


class ListNode:
    """A node of a linked list."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """A node of a binary tree."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


# LeetCodeDataset's tests use what follows; its rows hold it in the prompt. The code must not define what judges it.


def list_node(values: list[Any]) -> Any:
    """Return the linked list of these values."""
    first = None
    for value in reversed(values):
        first = ListNode(value, first)
    return first


def is_same_list(one: Any, other: Any) -> bool:
    """Return whether two linked lists hold the same values."""
    while one and other and one.val == other.val:
        one, other = one.next, other.next
    return one is None and other is None


def tree_node(values: Iterable[Any]) -> Any:
    """Return the tree of these values, level by level; None is no node."""
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


def is_same_tree(one: Any, other: Any) -> bool:
    """Return whether two trees hold the same values."""
    if not one or not other:
        return one is None and other is None
    return one.val == other.val and is_same_tree(one.left, other.left) and is_same_tree(one.right, other.right)


NODES = {"ListNode": ListNode, "TreeNode": TreeNode}
HELPERS = {"list_node": list_node, "is_same_list": is_same_list, "tree_node": tree_node, "is_same_tree": is_same_tree}


def names() -> dict[str, Any]:
    """Return the names that code may use."""
    modules = {name: importlib.import_module(name) for name in MODULES if name not in ("os", "time")}
    found: dict[str, Any] = {}
    for name in STARRED:
        given = vars(modules[name])
        found |= {one: given[one] for one in given.get("__all__", [one for one in given if one[:1] != "_"])}
    return found | modules | {name: value for name, value in vars(builtins).items() if name[:1] != "_"} | NODES


def for_tests(wanted: set[str], source: str) -> dict[str, Any]:
    """Return those of a test's names that never come from the code: modules of Python (but not a function that is named
    like one), and the helpers."""
    found = {name: importlib.import_module(name) for name in wanted & set(MODULES) if f"{name}(" not in source}
    helpers = HELPERS | NODES if wanted & HELPERS.keys() else {}
    return found | {name: value for name, value in helpers.items() if name in wanted}
