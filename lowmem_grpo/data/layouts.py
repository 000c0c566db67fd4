"""Find the columns of a dataset that hold prompts and answers, from the layouts of public datasets, or by a guess.

    question or problem, answer or solution           GSM8K, MATH, NuminaMath; with choices (MMLU, ARC) or a context
    instruction, input, output; body, question        Alpaca; ASDiv, SVAMP
    prompt, completion                                TRL: texts, or chat messages
    messages, conversations                           OpenAI, ShareGPT: the last assistant message is the answer
    prompt, reward_model: {ground_truth: ...}         verl, DAPO, Skywork
    text, test_list; prompt, test, entry_point        MBPP, HumanEval; APPS, LiveCodeBench: the tests are the answer

Preference pairs, Countdown, one column per choice and chats with tools do not fit a prompt and an answer column. They
are refused unless both columns are named.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lowmem_grpo.data.chat_template import ALIASES, message_of
from lowmem_grpo.data.code_tests import parsed
from lowmem_grpo.data.files import cell_text, listed
from lowmem_grpo.data.prompt_inputs import in_text

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "task", "puzzle", "question_content",
           "ctx", "text", "user", "messages", "conversations", "conversation", "description")
ANSWERS = ("reward_model.ground_truth", "answer.normalized_value", "answers_spans.spans", "answer_number", "answer",
           "final_answer", "expected_answer", "reference_answer", "answers.text", "answers", "answerkey",
           "correct_option", "solution", "label", "target", "expected", "ground_truth", "correct_answer", "correct",
           "gold", "output", "response", "completion", "result", "ideal", "reference")
TESTED = re.compile(r'\bassert\b|def (check|test)\w*\(|"inputs?":.*"outputs?":|"outputs?":.*"inputs?":', re.DOTALL)
TESTS = ("test_list", "tests", "test", "test_cases", "unit_tests", "input_output", "verification_info",
         "private_test_cases", "private_tests", "public_test_cases", "public_tests")
FUNCTIONS = ("entry_point", "fn_name", "metadata")  # columns that name the function under test
CHOICES = ("choices", "options", "endings")
BELONGING = ("context", "passage", "article", "input", "starter_code", "tools", *CHOICES)  # are added to the prompt
OPTION = re.compile(r"(op|opt|option|choice|sol|ending)[ _]?[a-e0-5]|[A-E]")  # a column that holds a single choice
SYSTEM = ("system", "system_prompt")
ROLES = {"bot": "assistant", "chatgpt": "assistant"} | {
    alias: role for role, aliases in ALIASES.items() for alias in aliases}
TOOLS = ("tool", "function_call", "function", "observation", "tool_response")  # roles in chats with tools
UNIT = re.compile(r"([-+]?[0-9][0-9.,/]*) \([^()0-9]+\)")  # ASDiv's "9 (apples)"
CLEARLY = 2.0  # between two columns, the one with this many times the letters of the other holds the prompts
NUMBERING = ("", "id", "idx", "index", "row", "number", "no", "nr", "unnamed: 0")  # columns that only number rows
MOST = 100  # the largest number of columns to guess from


@dataclass(frozen=True)
class Columns:
    """The prompt and answer columns, the reasons for choosing them, and further columns of the layout."""

    prompt: str = ""  # empty if unknown
    answer: str | None = ""  # empty if unknown; None if no answers are wanted
    why_prompt: str = ""
    why_answer: str = ""
    more: tuple[str, ...] = ()  # further columns that go into the prompt
    tests: tuple[str, ...] = ()  # if answers are code tests: their column, then the one that names the tested function
    system: str = ""  # the column with system prompts; empty if there is none

    @property
    def known(self) -> bool:
        return self.prompt != "" and self.answer != ""


def chat_in(value: Any) -> list[dict[str, Any]] | None:
    """Return the chat in a cell (messages, or their JSON) with OpenAI's key and role names; None if it is not one."""
    said = parsed(value) if isinstance(value, str) and value.lstrip().startswith("[{") else value
    if not isinstance(said, list) or not said or not all(
            isinstance(each, dict) and {"role", "from"} & {*each} and {"content", "value"} & {*each} for each in said):
        return None
    try:
        return [message_of(in_text({**each, "role": each.get("role", each.get("from")), "content": each.get(
            "content", each.get("value")) or ""}), ROLES) for each in said]
    except (ValueError, TypeError, KeyError):  # parts that are no text
        return None


def prompt_of(value: Any, system: str = "") -> list[dict[str, Any]]:
    """Return a cell as a chat that does not end with an answer. `system` comes first if the chat has no system text."""
    said = chat_in(value) or [{"role": "user", "content": cell_text(value) or ""}]
    while said and said[-1]["role"] == "assistant":
        said.pop()
    begun = not said or (said[0]["role"] == "system" and said[0]["content"])
    return said if begun else [{"role": "system", "content": system}, *said]


def answer_of(row: dict[str, Any], column: str, where: Callable[[str], str | None] | None = None) -> Any:
    """Return the answer in a column, or at a key in it ("reward_model.ground_truth"), as text; None if there is none. A
    chat's answer is its last assistant message. A list of several right answers stays a list. `where` extracts the
    answer from each text, for example `rewards.after("####")`."""
    said = whole_answer(row, column)
    if where is None or said is None:
        return said
    parts = [part for text in (said if isinstance(said, list) else [said]) if (part := where(text))]
    return parts if parts[1:] else next(iter(parts), None)


def whole_answer(row: dict[str, Any], column: str) -> Any:
    """Return `answer_of` without `where`: a text, a list of texts, or None."""
    value = value_at(row, column)
    if chat := chat_in(value):
        value = chat[-1]["content"] if chat[-1]["role"] == "assistant" else None
    alone = parsed(value) if isinstance(value, str) and value.startswith("[") else None
    if isinstance(alone, list) and len(alone) == 1:
        value = alone  # Skywork writes '["34"]'
    if isinstance(value, list) and value and all(isinstance(each, str) and not holds_tests(each) for each in value):
        if value[1:]:
            return value
        value = value[0]
    text = cell_text(value)
    unit = UNIT.fullmatch(text) if text else None
    return unit[1] if unit else text


def value_at(row: dict[str, Any], column: str) -> Any:
    """Return a cell, or the value at a key in it ("a.key"). None if the key is missing, KeyError if the column is."""
    if column in row:
        return row[column]
    name, dot, key = column.partition(".")
    held = row[name if dot else column]
    held = parsed(held) if isinstance(held, str) else held
    return value_at(held, key) if isinstance(held, dict) and key.partition(".")[0] in held else None


def holds_tests(value: Any) -> bool:
    """Return whether a cell holds tests of code, in a layout that `data.code_tests` reads."""
    text = cell_text(parsed(value)) or ""
    return TESTED.search(text) is not None


def find_columns(rows: list[dict[str, Any]], prompt: str | None, answer: str | None, source: str) -> Columns:
    """Return the prompt and answer columns; guess those that are None. ValueError if one is missing or unfit."""
    names = list(rows[0])
    for name in (prompt, answer):
        if name is not None and name.partition(".")[0] not in names and name not in names:
            raise ValueError(f"{source} has no column {name!r}; it has {listed(names)}")
    if prompt is not None and answer is not None and (prompt != answer or answered(rows, prompt)):
        return with_more(rows, checked(rows, Columns(prompt, answer, "named", "named"), source))
    if prompt is not None and prompt == answer:
        raise ValueError(f"prompts and answers cannot both be the column {prompt!r}; name two of {listed(names)}")
    if len(names) == 1 and prompt is None and not answered(rows, names[0]):
        word = "semicolons" if ";" in names[0] else "tabs" if "\t" in names[0] else ""
        hint = f" (its fields are separated by {word}: save it with commas)" if word else ""
        raise ValueError(f"{source} has one column, {names[0]!r}{hint}; a recipe needs prompts and answers. Add a "
                         f"column, or write --prompt-column {names[0]!r} for rewards without answers")
    if len(names) > MOST:
        raise ValueError(f"{source} has {len(names)} columns, too many to guess from: name two with --prompt-column "
                         f"and --answer-column. The first are {listed(names)}")
    refuse(rows, {name.strip().lower(): name for name in names}, source)
    return with_more(rows, checked(rows, guess(rows, names, prompt, answer), source))


def refuse(rows: list[dict[str, Any]], names: dict[str, str], source: str) -> None:
    """Raise ValueError for layouts in which no column is the prompt or the answer."""
    truth = value_at(rows[0], "reward_model.ground_truth") if "reward_model" in rows[0] else None
    keys = [f"reward_model.ground_truth.{key}" for key in truth] if isinstance(truth, dict) else []
    options = [name for name in names.values() if OPTION.fullmatch(name if len(name) == 1 else name.lower())]
    chats = [name for name in names.values() if any(chat_in(row[name]) for row in rows)]
    prompts = [names[name] for name in PROMPTS if name in names]
    lists = [name for name in prompts if isinstance(rows[0][name], list) and not is_asked(rows, *prompts)]
    said = [each for row in rows for name in chats for each in parsed(row[name]) or ()]
    tools = [*(row.get(names.get("tools", "")) for row in rows), *(each.get("tool_calls") for each in said),
             *(each.get("role", each.get("from")) in TOOLS for each in said)]
    both = "name both with --prompt-column and --answer-column"
    for applies, why in (
        ({"chosen", "rejected"} <= {*names} or {"completion", "label"} <= {*names}, "these are preferences, of which "
         f"none is right: train on them with DPOTrainer (docs/preferences.md), or {both}"),
        (keys, f"the answer is an object with {listed(keys)}: {both}"),
        ({"nums", "numbers"} & {*names} and "target" in names, "these are puzzles, whose target is no answer: train on "
         f"puzzles of the same kind with lowmem-grpo run countdown, or {both}"),
        (lists, f"{listed(lists)} holds lists that are no chat messages, and prompts are texts or chats: {both}"),
        (1 < len(options) < len(names), f"choices have columns of their own, {listed(options)}: make a list of them"),
        (chats and any(tools), f"the chats in {listed(chats)} use tools, and recipes have none: {both} to leave "
         "them out, or see docs/environments.md for GRPOTrainer(tools=...)"),
    ):
        if applies:
            raise ValueError(f"{source} has {listed(list(names.values()))}; {why}")


def is_asked(rows: list[dict[str, Any]], *names: str) -> bool:
    """Return whether any of these columns holds, in any row, a text or a chat."""
    return any(isinstance(cell := value_at(row, name), str) or chat_in(cell) for row in rows for name in names)


def answered(rows: list[dict[str, Any]], name: str) -> bool:
    """Return whether a column holds chats that mostly end in an answer."""
    chats = [chat for row in rows if (chat := chat_in(value_at(row, name)))]
    return bool(chats) and 2 * sum(chat[-1]["role"] == "assistant" for chat in chats) > len(chats)


def with_more(rows: list[dict[str, Any]], columns: Columns) -> Columns:
    """Return `columns` plus the columns of tests, system prompts and, unless the prompt is a chat, of context."""
    names = {name.strip().lower(): name for name in rows[0] if name not in (columns.prompt, columns.answer)}
    column = columns.answer or ""
    tests = [column] * (column.lower() in TESTS and any(holds_tests(row[column]) for row in rows))
    tests += [names[name] for name in FUNCTIONS if tests and name in names][:1]
    system = next((names[name] for name in SYSTEM if name in names and is_asked(rows, names[name])), "")
    columns = replace(columns, tests=tuple(tests), system=system)
    if not columns.prompt or any(chat_in(value_at(row, columns.prompt)) for row in rows):
        return columns
    if columns.prompt.lower() == "question" and "body" in names:
        return replace(columns, prompt=names["body"], more=(columns.prompt,))
    named = [column] * (column.lower() == "test_list")  # MBPP names the function only in its tests
    return replace(columns, more=(*(names[name] for name in BELONGING if name in names), *named))


def guess(rows: list[dict[str, Any]], names: list[str], prompt: str | None, answer: str | None) -> Columns:
    """Return the columns guessed by name. With just two columns, if one is recognized, the other has the other role; if
    neither is recognized, the prompt is the one with clearly longer texts, else the first."""
    why_prompt = why_answer = "named"
    tests = [usual for usual in TESTS for name in names if name.lower() == usual and any(
        holds_tests(row[name]) for row in rows)]
    if prompt is None:
        prompt, why_prompt = by_name(("query", *PROMPTS) if tests else PROMPTS,
                                     [name for name in names if name != answer and is_asked(rows, name)])
    if answer is None and names == [prompt] and not answered(rows, prompt):
        return Columns(prompt, None, why_prompt, "none: there is no other column")
    if answer is None:
        inner = [f"{name}.{key}" for name in names if isinstance(rows[0][name], dict) for key in rows[0][name]]
        answer, why_answer = by_name((*tests, *ANSWERS), [name for name in (*names, *inner) if name != prompt])
        chats = [name for name in (prompt, *names) if name and answered(rows, name)]
        if chats and not answer and (why_prompt != "named" or prompt in chats):
            prompt, answer, why_answer = chats[0], chats[0], "its last message"
    names = [name for name in names if name in (prompt, answer) or name.strip().lower() not in (*NUMBERING, *SYSTEM)]
    if len(names) == 2 and not (prompt and answer):
        if not prompt and not answer:
            prompt, why_prompt = longer_or_first(rows, names)
        other = names[1] if names[0] == (prompt or answer) else names[0]
        why = "guessed: the other one of two columns"
        if not answer:
            answer, why_answer = other, why
        else:
            prompt, why_prompt = other, why
    return Columns(prompt, answer, why_prompt, why_answer)


def longer_or_first(rows: list[dict[str, Any]], names: list[str]) -> tuple[str, str]:
    letters = {name: sum(len(row[name]) for row in rows if isinstance(row[name], str)) for name in names}
    longer, shorter = sorted(names, key=lambda name: letters[name], reverse=True)
    if letters[longer] > CLEARLY * letters[shorter]:
        return longer, "guessed: its texts are longer"
    return names[0], "guessed: the first of two columns"


def by_name(usual: tuple[str, ...], names: list[str]) -> tuple[str, str]:
    """Return (column, reason): the first of `usual` in `names`, else the only name with a word of `usual`, else ""."""
    lower = {name.strip().lower(): name for name in reversed(names)}
    match = next((lower[name] for name in usual if name in lower), "")
    part = [name for name in names if "." not in name and {*re.findall(r"[a-z]+", name.lower())} & {*usual}]
    if not match and len(part) == 1:
        match = part[0]
    return match, "guessed from its name" if match else ""


def checked(rows: list[dict[str, Any]], columns: Columns, source: str) -> Columns:
    """Return `columns`. ValueError if one of them is empty in every row, or if no column has texts for prompts."""
    for name in (columns.prompt, columns.answer):
        if name and all(value_at(row, name) in (None, "", []) for row in rows):
            raise ValueError(f"the column {name!r} of {source} is empty in all of the first {len(rows)} rows; name "
                             "another one with --prompt-column or --answer-column")
    asked = [columns.prompt] if columns.prompt else list(rows[0])
    if not is_asked(rows, *asked):
        raise ValueError(f"{source} has no texts in {listed(asked)}: prompts are texts, or lists of chat messages; "
                         "name their column with --prompt-column")
    return columns
