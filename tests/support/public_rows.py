"""Rows in the layouts of public datasets, as their cards show them, with what a recipe must ask, expect and pay by.

Each has rows (the first one is looked at), the messages that must be asked without a system prompt of our own, the
answer, and the kind of answers; or the words of the question that must be asked instead.
"""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    rows: list[dict[str, Any]]
    asked: list[tuple[str, str]] | str = ""
    """(role, content) of each message, or the text of one of the user."""
    answer: Any = None
    kind: str = ""
    refused: str = ""
    """Words of the refusal; empty where the rows can be read."""

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [("user", self.asked)] if isinstance(self.asked, str) else self.asked


def several(row: dict[str, Any], count: int = 8) -> list[dict[str, Any]]:
    """The row, and others like it, which differ where their texts hold a #."""
    def changed(value: Any, number: int) -> Any:
        if isinstance(value, str):
            return value.replace("#1#", str(number + 1))
        if isinstance(value, list):
            return [changed(part, number) for part in value]
        return {key: changed(part, number) for key, part in value.items()} if isinstance(value, dict) else value

    return [changed(row, number) for number in range(count)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


LONG = "It is so because of many things that are told here in more than a few words, one after the other."
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
LETTERS = [{"question": f"Which is {i}?", "subject": "law", "choices": ["no", "yes", "both", "none"], "answer": i % 4}
           for i in range(8)]
SKYWORK = {"data_source": "train-math", "prompt": [user("Find #1# + 1.")], "ability": "math",
           "reward_model": {"ground_truth": '["#1#4"]', "style": "rule"}, "extra_info": {"index": 1}}
MATH = ["\\frac{1}{2}", "34", "\\left( 3, \\frac{\\pi}{2} \\right)", "p - q", "\\text{Evelyn}", "2\\sqrt{3}", "(3,5]",
        "east", "6 - 5i", "x^2 + 1", "\\frac{\\sqrt{2}}{2}", "12\\pi", "-50", "\\$18", "90^\\circ"]
CHECK = "def check(candidate):\n    assert candidate(1) == 1"
STDIN = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
ROWS: dict[str, Any] = {  # (a row or several, what is asked, the answer, its kind), or (a row, words of the refusal)
    "alpaca": ({"instruction": "Translate #1#.", "input": "Hund", "output": "dog", "text": "Below ..."},
        "Translate 1.\n\nHund", "dog", "text"),
    "alpaca without inputs": ({"instruction": "Name #1#.", "input": "", "output": "dog"}, "Name 1.", "dog", "text"),
    "dolly": ({"instruction": "Who is #1#?", "context": "Ada was first.", "response": LONG, "category": "closed_qa"},
        "Who is 1?\n\nAda was first.", LONG, "long"),
    "sharegpt": ({"id": "a#1#", "conversations": [{"from": "human", "value": "Hi #1#"},
        {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Well?"}, {"from": "gpt", "value": LONG}]},
        [("user", "Hi 1"), ("assistant", "Hello"), ("user", "Well?")], LONG, "long"),
    "openhermes with a system message": ({"conversations": [{"from": "system", "value": "Be brief."},
        {"from": "human", "value": "#1# + 1?"}, {"from": "gpt", "value": "2"}], "source": "x"},
        [("system", "Be brief."), ("user", "1 + 1?")], "2", "number"),
    "openthoughts": ({"system": "Think.", "conversations": [{"from": "user", "value": "Prove #1#."},
        {"from": "assistant", "value": LONG}]}, [("system", "Think."), ("user", "Prove 1.")], LONG, "long"),
    "openorca": ({"id": "niv.#1#", "system_prompt": "Be kind.", "question": "Why #1#?", "response": LONG},
        [("system", "Be kind."), ("user", "Why 1?")], LONG, "long"),
    "messages with the answer": ({"messages": [user("#1# + 1?"), said("2")]}, "1 + 1?", "2", "number"),
    "ultrachat": ({"prompt": "Hi #1#", "prompt_id": "ab",
        "messages": [user("Hi #1#"), said("Hello"), user("Well?"), said(LONG)]},
        [("user", "Hi 1"), ("assistant", "Hello"), ("user", "Well?")], LONG, "long"),
    "tulu rlvr": ({"messages": [user("#1# + 1?")], "ground_truth": "2", "dataset": "gsm8k"}, "1 + 1?", "2", "number"),
    "messages in parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "#1# + 1?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "2"}]}]}, "1 + 1?", "2", "number"),
    "messages as json": ({"messages": json.dumps([user("#1# + 1?"), said("2")])}, "1 + 1?", "2", "number"),
    "prompt and completion": ({"prompt": "The sky of #1# is", "completion": " blue"}, "The sky of 1 is", "blue",
        "text"),
    "prompt and completion as chats": ({"prompt": [user("#1# + 1?")], "completion": [said("2")]}, "1 + 1?", "2",
        "number"),
    "prompt as a chat": ({"prompt": [{"role": "system", "content": "Sum."}, user("#1# + 1?")], "answer": "2"},
        [("system", "Sum."), ("user", "1 + 1?")], "2", "number"),
    "verl gsm8k": ({"data_source": "openai/gsm8k", "prompt": [user("Natalia sold #1#? Output after \"####\".")],
        "ability": "math", "reward_model": {"ground_truth": "72", "style": "rule"},
        "extra_info": {"answer": "So it is.\n#### 72", "index": 0, "question": "Natalia sold #1#?", "split": "train"}},
        'Natalia sold 1? Output after "####".', "72", "number"),
    "dapo 17k": ({"data_source": "math_dapo",
        "prompt": [user("Solve #1#. Remember to put your answer after \"Answer:\".")], "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b"}},
        'Solve 1. Remember to put your answer after "Answer:".', "34", "number"),
    "skywork": (SKYWORK, "Find 1 + 1.", "14", "number"),
    "verl code": ({"data_source": "apps", "prompt": [user("Add #1#.")], "ability": "code",
        "reward_model": {"ground_truth": STDIN, "style": "rule"}}, "Add 1.", STDIN, "code"),
    "countdown": ({"target": 98, "nums": [44, 19, 35]}, "target, nums; these are puzzles, whose target is no answer"),
    "verl countdown": ({"target": 98, "nums": [44, 19, 35], "prompt": [user("Make #1#.")],
        "reward_model": {"ground_truth": {"numbers": [44, 19, 35], "target": 98}, "style": "rule"}},
        "the answer is an object with reward_model.ground_truth.numbers, reward_model"),
    "countdown with a question": ({"question": "Make 98 of #1#.", "nums": [44, 19], "target": 98}, "these are puzzles"),
    "kto": ({"prompt": "Why #1#?", "completion": "So.", "label": True}, "these are preferences"),
    "triviaqa": ({"question": "Who #1#?", "answer": {"aliases": ["Ada", "A. L."], "normalized_value": "ada",
        "value": "Ada"}}, "Who 1?", "ada", "text"),
    "drop": ({"passage": "Rome won.", "question": "How many #1#?",
        "answers_spans": {"spans": ["3"], "types": ["number"]}}, "How many 1?\n\nRome won.", "3", "number"),
    "mgsm": ({"question": "Q #1#", "answer": "So the answer is 11.", "answer_number": 11,
        "equation_solution": "5+6=11."}, "Q 1", "11", "number"),
    "leetcode": ({"task_id": "two-sum", "problem_description": "Given #1#", "prompt": "import random",
        "completion": "class Solution", "entry_point": "f", "test": CHECK, "query": "Write #1#."}, "Write 1.",
        {"test": CHECK, "entry_point": "f"}, "code"),
    "medqa": ({"question": "Which #1#?", "answer": "Nitro", "options": {"A": "Amp", "B": "Nitro"}, "answer_idx": "B"},
        "Which 1?\n\nA. Amp\nB. Nitro", "Nitro", "text"),
    "nemotron": ({"input": [user("Q #1#")], "output": LONG, "category": "math", "system_prompt": "Think."},
        [("system", "Think."), ("user", "Q 1")], LONG, "long"),
    "gsm8k": ({"question": "How many #1#?", "answer": "Half.\n#### 1,072"}, "How many 1?", "1,072", "marked"),
    "math": ({"problem": "What is $#1#$?", "level": "Level 5", "type": "Algebra",
        "solution": f"{LONG} So $\\boxed{{7}}$."}, "What is $1$?", f"{LONG} So $\\boxed{{7}}$.", "math"),
    "math 500": ([{"problem": f"What is ${i}$?", "solution": f"So $\\boxed{{{answer}}}$.", "answer": answer,
        "subject": "Algebra", "level": 2, "unique_id": f"test/{i}.json"}for i, answer in enumerate(MATH)],
        "What is $0$?", MATH[0], "math"),
    "numinamath": ({"source": "aops", "problem": "What is $#1#$?", "solution": "So $\\boxed{7}$.",
        "messages": [user("What is $#1#$?"), said("So $\\boxed{7}$.")]}, "What is $1$?", "So $\\boxed{7}$.", "math"),
    "openmathreasoning": ({"expected_answer": "7", "problem_type": "has_answer_extracted", "problem_source": "aops",
        "problem": "Find #1#.", "generated_solution": LONG, "generation_model": "r1"}, "Find 1.", "7", "number"),
    "asdiv": ({"body": "There are #1# apples.", "question": "How many now?", "answer": "9 (apples)",
        "solution_type": "Addition", "formula": "7+2=9"}, "There are 1 apples.\n\nHow many now?", "9", "number"),
    "svamp": ({"ID": "chal-#1#", "Body": "Each pack costs #1# dollars.", "Question": "How much is it?",
        "Equation": "( 76.0 - 25.0 )", "Answer": "51.0", "Type": "Subtraction"},
        "Each pack costs 1 dollars.\n\nHow much is it?", "51.0", "number"),
    "aime": ({"ID": "1983-#1#", "Year": 1983, "Problem Number": 1, "Question": "Find #1#.", "Answer": "60",
        "Part": None}, "Find 1.", "60", "number"),
    "mbpp": ({"task_id": 11, "text": "Write a function #1#.", "code": "def f(x):\n    return x",
        "test_list": ["assert f(1) == 1", "assert f(2) == 2"], "test_setup_code": "", "challenge_test_list": []},
        "Write a function 1.\n\n- assert f(1) == 1\n- assert f(2) == 2", ["assert f(1) == 1", "assert f(2) == 2"],
        "code"),
    "humaneval": ({"task_id": "HumanEval/#1#", "prompt": "def f#1#(x):\n    ...", "canonical_solution": "    return x",
        "test": CHECK, "entry_point": "f#1#"}, "def f1(x):\n    ...", {"test": CHECK, "entry_point": "f1"}, "code"),
    "apps": ({"problem_id": 1, "question": "Add numbers #1#.", "solutions": '["print(3)"]', "input_output": STDIN,
        "difficulty": "interview", "url": "https://x", "starter_code": ""}, "Add numbers 1.", STDIN, "code"),
    "livecodebench": ({"question_title": "Add", "question_content": "Add #1#.", "question_id": "1",
        "starter_code": "class S: ...", "public_test_cases": json.dumps([{"input": "1\n2", "output": "3",
        "testtype": "functional"}]), "metadata": '{"func_name": "add"}'}, "Add 1.\n\nclass S: ...",
        {"public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        "metadata": '{"func_name": "add"}'}, "code"),
    "xlam": ({"id": 1, "query": "Weather in #1#?", "tools": '[{"name": "weather"}]',
        "answers": '[{"name": "weather", "arguments": {"city": "Rome"}}]'}, 'Weather in 1?\n\n[{"name": "weather"}]',
        '[{"name": "weather", "arguments": {"city": "Rome"}}]', "json"),
    "messages with tools": ({"messages": [user("Weather #1#?"), said("Sun.")], "tools": [SCHEMA]},
        "the chats in messages use tools"),
    "messages with calls": ({"messages": [user("Weather #1#?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "Sun", "tool_call_id": "call_1"}, said("Sun.")]},
        "the chats in messages use tools"),
    "dpo": ({"prompt": "Why #1#?", "chosen": "So.", "rejected": "No."}, "these are preferences"),
    "ultrafeedback": ({"prompt": "Why #1#?", "chosen": [user("Why #1#?"), said("So.")],
        "rejected": [user("Why #1#?"), said("No.")], "score_chosen": 8.5}, "these are preferences"),
    "mmlu": (LETTERS, "Which is 0?\n\n0. no\n1. yes\n2. both\n3. none", "0", "number"),
    "arc": ({"id": "Mercury_#1#", "question": "Which #1#?", "answerKey": "B",
        "choices": {"text": ["no", "yes"], "label": ["A", "B"]}}, "Which 1?\n\nA. no\nB. yes", "B", "choice"),
    "mmlu pro": ({"question_id": 70, "question": "Which #1#?", "options": ["no", "yes"], "answer": "B",
        "answer_index": 1, "cot_content": "", "category": "law"}, "Which 1?\n\nA. no\nB. yes", "B", "choice"),
    "hellaswag": ([{"ind": 4, "ctx_a": "A man", "ctx_b": "runs", "ctx": f"A man runs {i}", "endings": ["home", "away"],
        "label": str(i % 2)} for i in range(8)], "A man runs 0\n\n0. home\n1. away", "0", "number"),
    "medmcqa": ({"id": "e#1#", "question": "Which #1#?", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "cop": 1},
        "choices have columns of their own, opa, opb, opc, opd"),
    "ceval": ({"id": 1, "question": "Which #1#?", "A": "a", "B": "b", "C": "c", "D": "d", "answer": "B"},
        "choices have columns of their own, A, B, C, D: make a list of them"),
    "squad": ({"id": "5", "title": "Rome", "context": "Rome is old.", "question": "What is #1#?",
        "answers": {"text": ["Rome", "the city"], "answer_start": [0, 3]}}, "What is 1?\n\nRome is old.",
        ["Rome", "the city"], "text"),
    "natural questions": ({"question": "who is #1#", "answer": ["Ada", "Ada Lovelace"]}, "who is 1",
        ["Ada", "Ada Lovelace"], "text"),
    "race": ({"example_id": "high1.txt", "article": "A text.", "question": "What #1#?", "answer": "B",
        "options": ["no", "yes"]}, "What 1?\n\nA text.\n\nA. no\nB. yes", "B", "choice"),
    "lima": ({"conversations": ["Hi #1#", "Hello"], "source": "x"},
        "conversations holds lists that are no chat messages"),
}


def layout_of(rows: Any, *told: Any) -> Layout:
    rows = rows if isinstance(rows, list) else several(rows)
    return Layout(rows, refused=told[0]) if len(told) == 1 else Layout(rows, *told)


LAYOUTS = {name: layout_of(*row) for name, row in ROWS.items()}
