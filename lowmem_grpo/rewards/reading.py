"""Functions that find the answer in a completion, and read numbers. All take time linear in the text's length.

A Finder is a function that returns the answer in a completion's text, or None if there is none: `whole`, `last_line`,
`boxed`, `last_number`, `in_tag(...)`, `after(...)`, or a user's own.
"""

import functools
import operator
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

Finder = Callable[[str], str | None]

MAX_DIGITS = 64  # in a number that is read; a longer one is not an answer, and slow to compute with
MAX_EXPONENT = 308  # that of the largest float: 1e400 is not read
MINUSES = "-\u2212\u2013"  # hyphen, minus sign, and the en dash that is often used for it
PLAIN = {r"\text": "", r"\mbox": "", r"\$": "$", r"\%": "%", r"\!": "", "{,}": ",", "\u2044": "/",
         **dict.fromkeys([r"\,", r"\;", r"\:", "\\ ", "~", "\u2009", "\u202f", "\xa0"], " "),
         r"\times": "*", r"\cdot": "*", "\xd7": "*", r"\bar": r"\overline"}
SIGNS = re.compile(r"((?<=\S)[⁰¹²³⁴-⁹⁺⁻ⁿ]+)|([₀-₉]+)|[¼-¾⅐-⅞]")  # exponents, indices, fractions
FRACTION = re.compile(r"([0-9]?)\s?\\[dtc]?frac\s?(?:\{(-?[0-9]+)\}|([0-9]))\s?(?:\{(-?[0-9]+)\}|([0-9]))")
SCRIPT = re.compile(r"(?<=[^0-9^\s])\^(?:\{[^{}]*\}|[0-9]+)|_(?:\{[^{}]*\}|[0-9]+)")  # after letters: cm^2, x_1
SPACED_MINUS = re.compile(rf"([=({{]\s?[{MINUSES}])\s(?=[$0-9.])")  # x = - 3
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
DIGITS = r"(?:[1-9][0-9]{0,2}(?:\ [0-9]{3})+(?![0-9])|[0-9]+(?:,[0-9]+)*)"
EXPONENT = rf"[{MINUSES}]?[0-9]+"
# A sign belongs to the number if no word or number precedes it: 5-3 ends in 3. A time is one match: 10:30 is not 30.
NUMBER = re.compile(rf"""
    (?:(?<![\w)\]}}])[{MINUSES}+])? [$€£¥]?
    (?:[0-9]{{1,2}}(?::[0-9]{{2}})+(?![0-9]) | [0-9]+\ [0-9]+/[0-9]+
       | (?:{DIGITS}(?:\.[0-9]*\\overline\{{[0-9]+\}}|\.[0-9]+)? | \.[0-9]+)
         (?:[eE][-+]?[0-9]+)? (?:\^(?:{EXPONENT}|\{{{EXPONENT}\}}))?
         (?:\s?[*x]\s?10\^(?:{EXPONENT}|\{{{EXPONENT}\}}))? (?:/-?[0-9]+)?)
    (?:\s{{1,3}}\{{?\s?(?:{"|".join(SCALES)})\b)?""", re.VERBOSE)
CLOCK = re.compile(r"[0-9]{1,2}(?::[0-9]{2})+")
THOUSANDS = re.compile(r"(?<![0-9,. ])[0-9]{1,3}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9/]|,[0-9])")
NEAR = 400  # characters before the last digit that are searched for the number's start; longer numbers are not read
FENCE = "```"
LANGUAGE = re.compile(r"\A[ \t]*+(?:[^\W_]++[ \t]*+\n|json(?!\w))?+", re.IGNORECASE)  # tag of a fenced block
STATED = re.compile(r"\banswer(?: is)?[ :=]{1,3}(.+)", re.IGNORECASE)
ENCLOSED = re.compile(r"\A(?:(\*\*|\$\$?|`)(.+)\1|\\\((.+)\\\)|\\\[(.+)\\\])\Z")
BRACES = re.compile(r"\\boxed\s{0,9}\{|\\[{}]|[{}]")


def whole(text: str) -> str | None:
    """Return the whole text, stripped; None if it is blank."""
    return text.strip() or None


def last_line(text: str) -> str | None:
    """Return the last line that is not blank, stripped; None if all lines are blank."""
    return text.strip().rpartition("\n")[2].strip() or None


def in_tag(opening: str, closing: str | None = None) -> Finder:
    """Return a function that finds the content of the last complete pair of tags: `in_tag("answer")` for
    <answer>...</answer>, or `in_tag("<SOLUTION>", "</SOLUTION>")`. ValueError for an empty tag, or "<answer>" alone."""
    tags = (opening,) if closing is None else (opening, closing)
    if not all(isinstance(tag, str) and tag for tag in tags) or (closing is None and "<" in opening):
        raise ValueError(f"in_tag got {opening!r} and {closing!r}; a tag has at least one character: in_tag('answer'), "
                         "or both tags with their brackets")
    pair = (f"<{opening}>", f"</{opening}>") if closing is None else (opening, closing)
    return functools.partial(between, opening=pair[0], closing=pair[1])


def between(text: str, opening: str, closing: str) -> str | None:
    """Return the stripped text of the last `opening ... closing`; None if there is no such pair, or it is empty."""
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)].strip() or None


def after(mark: str) -> Finder:
    """Return a function that finds, in a text, the rest of the line after the last `mark`, such as GSM8K's "####".
    ValueError for an empty mark."""
    if not isinstance(mark, str) or not mark:
        raise ValueError(f"after got the mark {mark!r}; give the characters that stand before the answer")
    return functools.partial(behind, mark=mark)


def behind(text: str, mark: str) -> str | None:
    """Return the rest of the line after the last `mark`, stripped; None without a mark, or if the rest is empty."""
    _, separator, rest = text.rpartition(mark)
    return (rest.partition("\n")[0].strip() or None) if separator else None


def stated(label: str) -> str:
    r"""Return the answer that a label states: the content of its last \boxed{...}, the text after its last ####, or the
    answer in a sentence such as "The answer is 43." A label without any of these is the answer itself."""
    if (marked := boxed(label) or behind(label, "####")) is not None:
        return marked
    sentences = STATED.findall(label)
    answer = (re.split(r"\.(?:\s|$)", sentences[-1])[0] if sentences else label).strip()
    return unwrapped(answer) or label


def unwrapped(answer: str) -> str:
    r"""Return an answer without the marks around it, as in **5**, $5$ or \(5\); or the content of its box."""
    return boxed(answer) or ENCLOSED.sub(r"\2\3\4", answer.strip()).strip()


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, with balanced braces; for nested boxes, the innermost."""
    first = text.find("\\boxed")
    if first < 0:
        return None
    stack: list[int] = []  # for each open brace: the start of its box's content, or -1 if it opens no box
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
    """Return the stripped text of the last complete block in ``` fences, without its language; the whole text if there
    is no block. Without `anywhere`, a block counts only if it is the whole text."""
    text = text.strip()
    if not anywhere:
        whole = text.startswith(FENCE) and len(FENCE) <= text.rfind(FENCE) == len(text) - len(FENCE)
        return LANGUAGE.sub("", text[len(FENCE) : -len(FENCE)]).strip() if whole else text
    lines = "\n" + text
    fence = "\n" + FENCE if lines.count("\n" + FENCE) > 1 else FENCE
    _, opening, block = lines.rpartition(fence)[0].rpartition(fence)
    return LANGUAGE.sub("", block).strip() if opening else text


def last_number(text: str) -> str | None:
    r"""Return the last number, with sign, currency and power of ten; None if there is none. Fractions in LaTeX become
    1/2, and exponents of letters and units are ignored: 12 cm^2 gives 12."""
    text = signs_in_latex(text)
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    near = plain_number(text[max(0, end - NEAR) : end + 24]) if end else ""
    number: str = [None, *NUMBER.findall(SCRIPT.sub("", near))][-1]
    if number is None:
        return None
    number = number.strip()
    if "," in number and len(number) <= 2 * MAX_DIGITS and read_number(number) is None:
        return number.rpartition(",")[2]  # a list, not thousands: 3,4,5
    return number


def signs_in_latex(text: str) -> str:
    r"""Return a text with Unicode's small digits and fractions in LaTeX: 10⁶ as 10^{6}, 1½ as 1\frac{1}{2}."""
    return SIGNS.sub(written_out, text)


def written_out(sign: re.Match[str]) -> str:
    top, slash, bottom = unicodedata.normalize("NFKC", sign[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}" if slash else f"{'^' if sign[1] else '_'}{{{top}}}"


def plain_number(text: str) -> str:
    text = signs_in_latex(text)
    for latex, plain in PLAIN.items():
        text = text.replace(latex, plain)
    text = FRACTION.sub(lambda of: f"{of[1]}{' ' * bool(of[1])}{of[2] or of[3]}/{of[4] or of[5]}", text)
    return SPACED_MINUS.sub(r"\1", text)


def read_number(text: object) -> Fraction | None:
    r"""Return the exact value of a text that is one number, in ASCII digits: "1,234.5", "70 000", "$5", "-0", "2e3",
    "6 \times 10^3", "3/4", "1\frac{1}{2}", "0.\overline{3}", "5 million", "50%" (read as 50). None for any other text,
    and for a number beyond 1e308 or 64 digits."""
    if isinstance(text, bool) or text is None or len(str(text)) > 4 * MAX_DIGITS:
        return None
    return exact_value(plain_number(unwrapped(str(text))).removesuffix("%").rstrip().rstrip("."))


@functools.lru_cache(maxsize=10_000)  # a group has one label and few answers
def exact_value(plain: str) -> Fraction | None:
    """Return the value of a short text without LaTeX; None if it is not a number."""
    sign = plain[:1] if plain[:1] in ("+", *MINUSES) else ""
    bare = plain.removeprefix(sign).lstrip()
    bare = bare[1:].lstrip() if bare[:1] in ("$", "€", "£", "¥") else bare
    if not NUMBER.fullmatch(bare) or CLOCK.fullmatch(bare) or bare[:1] in ("+", *MINUSES):
        return None
    number, _, scale = bare.replace("{", " ").rpartition(" ") if bare[-1].isalpha() else (bare, "", "")
    for minus in MINUSES[1:]:
        number = number.replace(minus, "-")
    number = re.sub(r"[{}]|\s*([*x])\s*", r"\1", number).strip()
    try:
        value = value_of(THOUSANDS.sub(lambda of: re.sub("[, ]", "", of[0]), number))
    except (ValueError, ZeroDivisionError):
        return None
    return value * 10 ** SCALES.get(scale, 0) * (-1 if sign in tuple(MINUSES) else 1)


def value_of(text: str) -> Fraction:
    """Return a number's value. ValueError for misplaced commas or too large a number, ZeroDivisionError for 1/0."""
    for mark, operation in OPERATIONS.items():
        left, separator, right = text.partition(mark)
        if separator:
            return operation(value_of(left), value_of(right))
    start, _, again = text.partition("\\overline")  # `again`: the repeating decimals
    mantissa, _, exponent = start.lower().partition("e")
    if len(mantissa + again) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise ValueError("beyond reason")
    decimals = len(mantissa.partition(".")[2])
    return Fraction(start) + (Fraction(int(again), 10**decimals * (10 ** len(again) - 1)) if again else 0)


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return `base` to the power `exponent`, for whole numbers. ValueError if either is not whole, or too large."""
    if not 0 < base < 10**6 or abs(exponent) > MAX_EXPONENT or base.denominator != 1 or exponent.denominator != 1:
        raise ValueError("beyond reason")
    return base ** int(exponent)


# In the order in which a number is split; the blank separates the parts of 1 1/2.
OPERATIONS = {"*": operator.mul, "x": operator.mul, " ": operator.add, "/": operator.truediv, "^": power}
