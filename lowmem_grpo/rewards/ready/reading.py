"""Finds the answer in a completion, and reads numbers. Everything here takes time linear in the text's length.

A place is a function from a completion's text to the answer in it, or None if there is none: `whole`, `last_line`,
`boxed`, `last_number`, `in_tag(...)`, `after(...)`, or one of the user's own.
"""

import functools
import re
from collections.abc import Callable
from fractions import Fraction

Place = Callable[[str], str | None]

MAX_DIGITS = 64  # of a number that is read; a longer one is no answer, and slow to compute with
MAX_EXPONENT = 308  # that of the largest float: 1e400 is not read
MINUS = "\u2212"  # the typographic one
# There is one way to match any text, so nothing is tried twice. A sign counts if no word or number is before it: 5-3
# ends in 3.
NUMBER = re.compile(
    rf"(?:(?<![\w)\]])[-+{MINUS}])?[$€£¥]?(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?"
)
PARTS = re.compile(r"([-+]?)([0-9,]*)(?:\.([0-9]*))?(?:[eE]([-+]?[0-9]+))?(?:/([0-9]+))?")
THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
FENCE = "```"
LANGUAGE = re.compile(r"\A[ \t]*+(?:[^\W_]++[ \t]*+\n|json(?!\w))?+", re.IGNORECASE)  # of a block
BRACES = re.compile(r"\\boxed\s{0,9}\{|\\[{}]|[{}]")


def whole(text: str) -> str | None:
    """All of the text, stripped; None if that is empty."""
    return text.strip() or None


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped."""
    return text.strip().rpartition("\n")[2].strip() or None


def in_tag(opening: str, closing: str | None = None) -> Place:
    """What the last complete pair of tags holds. `in_tag("answer")` means <answer>...</answer>; you can also give both
    tags, as in `in_tag("<SOLUTION>", "</SOLUTION>")`. Raises ValueError for an empty tag."""
    if not opening or closing == "":
        raise ValueError(f"in_tag got {opening!r} and {closing!r}; a tag has at least one character")
    pair = (f"<{opening}>", f"</{opening}>") if closing is None else (opening, closing)
    return functools.partial(between, opening=pair[0], closing=pair[1])


def between(text: str, opening: str, closing: str) -> str | None:
    """The stripped text of the last `opening ... closing`; None if there is none, or it is empty."""
    start = last_opening(text, opening, closing)
    if start < 0:
        return None
    return text[start : text.index(closing, start)].strip() or None


def last_opening(text: str, opening: str, closing: str) -> int:
    """Where the text of the last complete pair begins, or -1 if there is none."""
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return start + len(opening) if start >= 0 else -1


def after(mark: str) -> Place:
    """What follows the last `mark` in its line: `after("####")` reads GSM8K's own solutions."""
    if not mark:
        raise ValueError("after got an empty mark; give the characters that stand before the answer")
    return functools.partial(behind, mark=mark)


def behind(text: str, mark: str) -> str | None:
    """The rest of the line after the last `mark`, stripped; None if there is none, or it is empty."""
    _, found, rest = text.rpartition(mark)
    return (rest.partition("\n")[0].strip() or None) if found else None


def boxed(text: str) -> str | None:
    r"""What the last complete \boxed{...} holds, with balanced braces; of nested boxes, the innermost."""
    first = text.find("\\boxed")
    if first < 0:
        return None
    stack: list[int] = []  # for each open brace: where the text of its box begins, or -1 if it opens no box
    start = end = -1
    for brace in BRACES.finditer(text, first):
        if brace[0] == "}" and stack:
            opened = stack.pop()
            if opened > start:  # else a box inside this one has closed already
                start, end = opened, brace.start()
        elif brace[0] == "{":
            stack.append(-1)
        elif brace[0].startswith("\\boxed"):
            stack.append(brace.end())
    return text[start:end].strip() or None if start >= 0 else None


def unfenced(text: str, anywhere: bool) -> str:
    """The stripped text of the last complete block in ``` fences, without its language; all of the text where there is
    none. Without `anywhere` a block counts only where it is the whole text."""
    text = text.strip()
    end = text.rfind(FENCE)
    if anywhere:
        start = text.rfind(FENCE, 0, end) if end > 0 else -1
    else:
        start = 0 if text.startswith(FENCE) and len(FENCE) <= end == len(text) - len(FENCE) else -1
    return LANGUAGE.sub("", text[start + len(FENCE) : end]).strip() if start >= 0 else text


def last_number(text: str) -> str | None:
    """The last number as it is written, with sign and currency; None if there is none."""
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    if not end:
        return None
    *_, digits = NUMBER.findall(text[:end].rsplit(None, 1)[-1])  # numbers hold no white space, and end in a digit
    if "," in digits and len(digits) <= 2 * MAX_DIGITS and read_number(digits) is None:
        return digits.rpartition(",")[2]  # not thousands but a list: 3,4,5
    return digits


def read_number(text: object) -> Fraction | None:
    """The exact value of a text that is one number; None if it is not, or is beyond 1e308 or 64 digits.

    Only ASCII digits count: "1,234.5", "$5", "-0", "2e3", "3/4", "50%" (without the sign: 50).
    """
    if isinstance(text, bool) or text is None:
        return None
    stripped = str(text).strip().removesuffix("%").rstrip().rstrip(".").replace(MINUS, "-")
    return exact_value(stripped) if 0 < len(stripped) <= 2 * MAX_DIGITS else None


@functools.lru_cache(maxsize=10_000)  # a group has one label and few answers
def exact_value(stripped: str) -> Fraction | None:
    """The value of a text of at most 128 characters; None if it is not a number."""
    bare = re.sub(r"^([-+]?)[$€£¥]\s?", r"\1", stripped)
    parts = PARTS.fullmatch(bare)
    return value_of(*parts.groups()) if parts else None


def value_of(
    sign: str, digits: str, decimals: str | None, exponent: str | None, divisor: str | None
) -> Fraction | None:
    """The value of a number's parts; None without digits, with commas that are not for thousands, or if too large."""
    if "," in digits and not THOUSANDS.fullmatch(digits):
        return None
    mantissa = digits.replace(",", "") + (decimals or "")
    if not mantissa or len(mantissa) > MAX_DIGITS or len(divisor or "") > MAX_DIGITS or int(divisor or 1) == 0:
        return None
    power = int(exponent or 0) if len(exponent or "") <= 5 else MAX_EXPONENT + 1
    if abs(power) > MAX_EXPONENT:
        return None
    value = Fraction(int(mantissa)) * Fraction(10) ** (power - len(decimals or "")) / int(divisor or 1)
    return -value if sign == "-" else value
