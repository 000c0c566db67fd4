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
    """A ready-made verifier or reward, and what it says of examples."""

    kind: str  # "verifier" or "reward"
    code: str  # an expression over the names of lowmem_grpo.rewards
    does: str
    examples: list[tuple[str, float | bool | None]]  # completion, result
    columns: dict[str, Any] = field(default_factory=dict)  # of the row
    needs: str = ""  # a package that is not installed with this one


STEPS = "<start_working_out>9 + 1<end_working_out><SOLUTION>10</SOLUTION>"
XML = "<reasoning>\n9 + 1\n</reasoning>\n<answer>\n10\n</answer>\n"
MAIL = "Dear Bo,\n\nyour refund is on its way.\n\nBest regards,\nAda Moss"
ENTRIES = [
    Entry("verifier", "answer_match()", "the text is the label; differences in white space are ignored",
          [(" Paris\n", True), ("It is Paris", False)], {"answer": "Paris"}),
    Entry("verifier", "number_match()", "the last number, or the last time of day, equals the label",
          [("so $1,000.00", True), ("1,000 or 999", False)], {"answer": "1000"}),
    Entry("verifier", "number_match(tolerance=0.01)", "the last number is within 1% of the label",
          [("3.14", True), ("3", False)], {"answer": "3.14159"}),
    Entry("verifier", "boxed_match()", r"the last `\boxed{...}` holds the label: the same numbers and texts",
          [(r"\boxed{\frac{1}{2}}", True), (r"\boxed{\frac{1}{3}}", False)], {"answer": r"\frac{1}{2}"}),
    Entry("verifier", "math_match()", r"the last `\boxed{...}` equals the label as mathematics",
          [(r"\boxed{1/2}", True), (r"\boxed{\frac{2}{3}}", False)], {"answer": r"\frac{1}{2}"}, "math_verify"),
    Entry("verifier", 'regex_match(r"[A-D]", where=last_line)', "the whole answer matches the pattern",
          [("I think\nC", True), ("I think\nC.", False)]),
    Entry("verifier", 'json_match({"required": ["city"]})',
          "the text, or its last fenced block, is JSON that fits the schema",
          [('{"city": "Rome"}', True), ('{"town": "Rome"}', False), ("{city", False)], {}, "jsonschema"),
    Entry("verifier", "json_match()", "the text is a JSON object or list", [("[1, 2]", True), ("[1, 2", False)]),
    Entry("verifier", "format_match()",
          "each tag occurs once, in order, with text in each pair and nothing after the last",
          [(STEPS, True), (STEPS + " so 10", False)]),
    Entry("reward", "number_match().reward(right=2.0, wrong=-1.0)", "2 if the verifier says right, -1 if wrong",
          [("10", 2.0), ("9", -1.0)],
          {"answer": 10}),
    Entry("reward", "number_present()", "1 if there is a number, else -1", [("it is 9", 1.0), ("no idea", -1.0)]),
    Entry("reward", "number_equal()", "3 if the last number equals the label, else -3",
          [("it is 10", 3.0), ("9", -3.0)], {"answer": "10"}),
    Entry("reward", "proximity()",
          "max(-1.5, 3 (1 - distance / abs(label))): the closer the last number, the higher",
          [("10", 3.0), ("9", 2.7), ("3", 0.9), ("99", -1.5), ("many", -1.5)], {"answer": "10"}),
    Entry("reward", "format_kept()", "3 if the whole format is kept, else 0", [(STEPS, 3.0), ("10", 0.0)]),
    Entry("reward", "tags_counted()", "for each of the four tags: 0.5 if it occurs once, else -1",
          [(STEPS, 2.0), ("<SOLUTION>10</SOLUTION>", -1.0)]),
    Entry("reward", 'length_near(4, spread=4, unit="words")',
          "1 at the target length, down to 0 at a distance of `spread`",
          [("one two three four", 1.0), ("one two", 0.5), ("", 0.0)]),
    Entry("reward", 'too_long(3, "words")', "-1 if the text is longer, else 0",
          [("one two", 0.0), ("one two three four", -1.0)]),
    Entry("reward", "soft_overlong_penalty(8, cache_length=4)",
          "from 0 down to -1 over the last tokens before `max_completion_length` (DAPO)", [("", 0.0), ("...", -0.5)],
          {"completion_ids": [[], [5, 6, 7, 5, 6, 8]]}),
    Entry("reward", "repetition_penalty(ngram=2)", "minus the share of token n-grams that have occurred before",
          [("1 2 3 4 5", 0.0), ("1 2 1 2 1", -0.5)], {"completion_ids": [[1, 2, 3, 4, 5], [1, 2, 1, 2, 1]]}),
    Entry("reward", "keyword_present()",
          "1 if the row's keyword (or every keyword of a list) is in the text as a whole word, in any case",
          [(MAIL, 1.0), ("Refunding you", 0.0)], {"keyword": "refund"}),
    Entry("reward", "ideal_answer()", "1 if the text is the row's ideal answer",
          [("Yes,\nof course.", 1.0), ("Yes", 0.0)], {"ideal": "Yes, of course."}),
    Entry("reward", "recipient_named()", "1 if one of the first two lines that are not blank names the recipient",
          [(MAIL, 1.0), ("Dear Bob,", 0.0)], {"recipient": "Bo"}),
    Entry("reward", 'signed("Best regards,\\nAda Moss")', "1 if the text ends with these lines",
          [(MAIL, 1.0), ("Ada Moss", 0.0)]),
    Entry("reward", "correctness_reward_func", "2 if the text in `<answer>` is the label", [(XML, 2.0), ("10", 0.0)],
          {"answer": "10"}),
    Entry("reward", "int_reward_func", "0.5 if the text in `<answer>` is an integer", [(XML, 0.5), ("10", 0.0)]),
    Entry("reward", "strict_format_reward_func", "0.5 if the text has exactly this format, line breaks included",
          [(XML, 0.5), (XML.strip(), 0.0)]),
    Entry("reward", "soft_format_reward_func", "0.5 if the text begins with both blocks in order",
          [(XML.strip(), 0.5), ("10", 0.0)]),
    Entry("reward", "xmlcount_reward_func",
          "0.125 for each tag found once, -0.001 for each character after `</answer>`",
          [(XML.strip(), 0.5), (XML.strip() + "!" * 9, 0.491)]),
]


def page() -> str:
    """Return the whole page."""
    text = WORDS.read_text(encoding="utf-8")
    for kind in ("verifier", "reward"):
        table = [row for entry in ENTRIES if entry.kind == kind for row in rows(entry)]
        text = text.replace(f"{{{kind}s}}", "\n".join(table))
    return text


def rows(entry: Entry) -> list[str]:
    """A table row for each example; the first says what it is."""
    needs = {"math_verify": " (math-verify)", "jsonschema": " (jsonschema)"}.get(entry.needs, "")
    shown = ", ".join(f"{name}={value!r}" for name, value in entry.columns.items() if name != "completion_ids")
    ids = entry.columns.get("completion_ids")
    found = []
    for place, (completion, result) in enumerate(entry.examples):
        given = cell(f"{len(ids[place])} tokens: {ids[place]}" if ids else completion)
        first = [f"`{cell(entry.code)}`{needs}", entry.does + (f"; here {code(shown)}" if shown else "")]
        found.append(f"| {' | '.join(first if not place else ['', ''])} | {code(given)} | {result} |")
    return found


def cell(text: str) -> str:
    """The text on one line, without anything that would end a table cell."""
    return text.replace("|", "\\|").replace("\n", "\\n")


def code(text: str) -> str:
    return f"`{text}`" if text.strip() else "(empty)"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
