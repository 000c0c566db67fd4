"""Write docs/rewards.md: every ready-made verifier and reward, with examples that a test runs.

    python docs/make_rewards.py

The words come from reward_words.txt; the tables are put in place of its lines {verifiers} and {rewards}.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE, WORDS = HERE / "rewards.md", HERE / "reward_words.txt"


@dataclass(frozen=True)
class Entry:
    """A ready-made verifier or reward, with examples of its results."""

    kind: str  # "verifier" or "reward"
    code: str  # an expression over the names of lowmem_grpo.rewards
    does: str
    examples: list[tuple[str, float | bool | None]]  # completion, result
    columns: dict[str, Any] = field(default_factory=dict)  # of the row
    needs: str = ""  # a package that is not installed with this one


STEPS = "<start_working_out>9 + 1<end_working_out><SOLUTION>10</SOLUTION>"
XML = "<reasoning>\n9 + 1\n</reasoning>\n<answer>\n10\n</answer>\n"
ENTRIES = [
    Entry("verifier", "answer_match()",
          "the text equals the label, except for the amount of white space",
          [(" Paris\n", True)], {"answer": "Paris"}),
    Entry("verifier", "number_match()", "the last number equals the label; a time such as `10:30` is compared whole",
          [("so $1,000.00", True), ("1,000 or 999", False)], {"answer": "1000"}),
    Entry("verifier", "number_match(tolerance=0.01)", "the last number is within 1% of the label",
          [("3.14", True)], {"answer": "3.14159"}),
    Entry("verifier", "boxed_match()",
          r"the content of the last `\boxed{...}` equals the label by [these rules](#which-answers-are-equal)",
          [(r"\boxed{0.5}", True)], {"answer": r"\frac{1}{2}"}),
    Entry("verifier", "math_match()", "as `boxed_match()`, but expressions are compared as mathematics",
          [(r"\boxed{1+x}", True)], {"answer": "x+1"}, "math_verify"),
    Entry("verifier", 'regex_match(r"[A-D]", where=last_line)',
          "the pattern matches the whole answer, here the last line", [("I think\nC", True), ("I think\nC.", False)]),
    Entry("verifier", 'json_match({"required": ["city"]})',
          "the text, or its last fenced block, is valid JSON for the schema (`json_match()`: a JSON object or list)",
          [('{"city": "Rome"}', True), ('{"town": "Rome"}', False)], {}, "jsonschema"),
    Entry("verifier", "format_match()",
          "the four tags of the example (or your `tags=`) occur once each, in order, with text in each pair and "
          "nothing after the last tag; `<think>` tags as in TRL's `think_format_reward`",
          [(STEPS, True)]),
    Entry("verifier", "follows_instructions()",
          "the text follows all [instructions](#instructions-that-can-be-checked) of the row",
          [("The sea is wide", True), ("The sea, wide", False)],
          {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}),
    Entry("reward", "number_present()", "1 if the text has a number, else -1", [("it is 9", 1.0)]),
    Entry("reward", "number_equal()", "3 if the last number equals the label, else -3",
          [("it is 10", 3.0)], {"answer": "10"}),
    Entry("reward", "proximity()",
          "max(-1.5, 3 (1 - abs(last number - label) / abs(label))); -1.5 if the text has no number",
          [("9", 2.7)], {"answer": "10"}),
    Entry("reward", "format_kept()", "3 if `format_match()` says right, else 0", [(STEPS, 3.0)]),
    Entry("reward", "tags_counted()",
          "for each of the four tags of `format_match()` (or your `tags=`): 0.5 if the tag occurs once, else -1",
          [("<SOLUTION>10</SOLUTION>", -1.0)]),
    Entry("reward", 'length_near(4, spread=4, unit="words")',
          "1 at the target length, falling linearly to 0 at `spread` words from the target",
          [("one two", 0.5)]),
    Entry("reward", 'too_long(3, "words")', "-1 if the text has more than 3 words, else 0",
          [("one two three four", -1.0)]),
    Entry("reward", "soft_overlong_penalty(8, cache_length=4)",
          "0 up to 4 tokens, falling linearly to -1 at 8 (DAPO); pass the run's `max_completion_length` in place of 8",
          [("...", -0.5)], {"completion_ids": [[5, 6, 7, 5, 6, 8]]}),
    Entry("reward", "repetition_penalty(ngram=2)", "minus the share of token n-grams that repeat an earlier n-gram",
          [("1 2 1 2 1", -0.5)], {"completion_ids": [[1, 2, 1, 2, 1]]}),
    Entry("reward", "keyword_present()",
          "1 if the text has the keyword, or every keyword of a list, as whole words in upper or lower case; else 0",
          [("your Refund", 1.0)], {"keyword": "refund"}),
    Entry("reward", "ideal_answer()", "1 if `answer_match(column=\"ideal\")` says right, else 0",
          [("Yes,\nof course.", 1.0)], {"ideal": "Yes, of course."}),
    Entry("reward", "recipient_named()", "1 if one of the first two non-blank lines has the recipient's name, else 0",
          [("Dear Bo,\nyes", 1.0)], {"recipient": "Bo"}),
    Entry("reward", 'signed("Best regards,\\nAda Moss")', "1 if the text ends with these lines, else 0",
          [("Yes.\n\nBest regards,\nAda Moss", 1.0)]),
    Entry("reward", "correctness_reward_func", "2 if the text in `<answer>` equals the label, else 0",
          [("<answer>10</answer>", 2.0)], {"answer": "10"}),
    Entry("reward", "int_reward_func", "0.5 if the text in `<answer>` is an integer, else 0",
          [("<answer>10</answer>", 0.5)]),
    Entry("reward", "strict_format_reward_func",
          "0.5 if the text has exactly the format of the example, line breaks included; else 0",
          [(XML, 0.5)]),
    Entry("reward", "soft_format_reward_func",
          "0.5 if the text begins with `<reasoning>...</reasoning>`, then `<answer>...</answer>`; else 0",
          [("<reasoning>9 + 1</reasoning> <answer>10</answer>", 0.5)]),
    Entry("reward", "xmlcount_reward_func",
          "0.125 for each of `<reasoning>`, `</reasoning>`, `<answer>` and `</answer>` that occurs exactly once, minus "
          "0.001 for each character after the first `</answer>`",
          [("<answer>10</answer>!!!", 0.247)]),
]


def page() -> str:
    """Return the whole page."""
    text = WORDS.read_text(encoding="utf-8")
    for kind in ("verifier", "reward"):
        table = [row for entry in ENTRIES if entry.kind == kind for row in rows(entry)]
        text = text.replace(f"{{{kind}s}}", "\n".join(table))
    return text


def rows(entry: Entry) -> list[str]:
    """Return a table row for each example of an entry; the first row also describes the entry."""
    shown = ", ".join(f"{name}={value!r}" for name, value in entry.columns.items() if name != "completion_ids")
    ids = entry.columns.get("completion_ids")
    lines = []
    for place, (completion, result) in enumerate(entry.examples):
        text = cell(f"{len(ids[place])} tokens: {ids[place]}" if ids else completion)
        first = [f"`{cell(entry.code)}`", entry.does, code(shown) if shown else ""]
        lines.append(f"| {' | '.join(first if not place else [''] * 3)} | {code(text)} | {result} |")
    return lines


def cell(text: str) -> str:
    """Return the text on one line, without anything that would end a table cell."""
    return text.replace("|", "\\|").replace("\n", "\\n")


def code(text: str) -> str:
    return f"`{text}`" if text.strip() else "(empty)"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
