"""What LeetCode gives code and its tests without an import: modules and their names, linked lists and trees.

The scorers of APPS, LiveCodeBench and verl write these imports above the code too.
"""

from typing import Any

IMPORTS = """
from string import *; from re import *; from datetime import *; from collections import *; from heapq import *
from bisect import *; from copy import *; from math import *; from random import *; from statistics import *
from itertools import *; from functools import *; from operator import *; from typing import *; from json import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator
import io, sys, json, typing
from builtins import *
"""
NODES = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
"""
# LeetCodeDataset's tests use these; its rows hold them in the prompt. The code must not define what judges it.
HELPERS = NODES + """
def list_node(values):
    first = None
    for value in reversed(values):
        first = ListNode(value, first)
    return first

def is_same_list(one, other):
    while one and other and one.val == other.val:
        one, other = one.next, other.next
    return one is None and other is None

def tree_node(values):
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

def is_same_tree(one, other):
    if not one or not other:
        return one is None and other is None
    return one.val == other.val and is_same_tree(one.left, other.left) and is_same_tree(one.right, other.right)
"""
MODULES = ("math", "re", "collections", "itertools", "functools", "heapq", "bisect", "datetime", "random", "string",
           "operator", "copy", "json", "sys", "os", "io", "time", "typing")


def names() -> dict[str, Any]:
    """Return the names that code may use."""
    return made_by(IMPORTS + NODES, "leetcode")


def for_tests(wanted: set[str], source: str) -> dict[str, Any]:
    """Return those of a test's names that never come from the code: modules of Python (but not a function that is named
    like one), and the helpers."""
    found = {name: __import__(name) for name in wanted & set(MODULES) if f"{name}(" not in source}
    if wanted & {"list_node", "is_same_list", "tree_node", "is_same_tree"}:
        found |= {name: value for name, value in made_by(HELPERS, "tests").items() if name in wanted}
    return found


def made_by(source: str, module: str) -> dict[str, Any]:
    """Return what source code defines, as if in this module."""
    found: dict[str, Any] = {"__name__": module}
    exec(source, found)  # noqa: S102, our own text
    return {name: value for name, value in found.items() if not name.startswith("__")}
