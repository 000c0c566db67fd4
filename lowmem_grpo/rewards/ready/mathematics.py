r"""The structure of a mathematical answer, and the comparison of two answers.

An answer is split at unambiguous structure: lists, equations and inequalities, unions, brackets, matrices, the two
values of \pm. Parts that cannot be split are equal if their tokens or their numbers are equal. If both are certainly
expressions, `ask` may also find them equal. A unit is a currency, a percent sign or a word beside a number.
"""

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

from lowmem_grpo.rewards.reading import SCALES, read_number, unwrapped
from lowmem_grpo.rewards.ready.latex import LETTERS, NAMES, TEXT, tokens_of

Ask = Callable[[str, str], bool]
Tokens = tuple[str, ...]

MAX_DEPTH = 12  # nested brackets
REVERSED = {">": "<", "\\ge": "\\le"}
RELATIONS = {"=", "<", "\\le", "\\ne", "\\in", *REVERSED}
OPENING = {"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"}
CLOSING = {")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"}
OF_LISTS = {",", ";", "or", "and"}
LEVELS: tuple[set[str], ...] = ({"\\\\"}, {"&"}, OF_LISTS, RELATIONS, {"\\cup"}, {"\\cap"})  # loosest binding first
UNORDERED = {",", "\\cup", "\\cap"}
OF_EXPRESSIONS = {
    "\\frac", "\\binom", "\\cdot", "\\times", "\\infty", "\\lfloor", "\\rfloor", "\\lceil", "\\rceil", "\\arcsin",
    "\\arccos", "\\arctan", "\\sinh", "\\cosh", "\\tanh", *"+-/^_{}()[]|!",
    *(f"\\{name}" for name in (*NAMES, *LETTERS)),
}
# Texts that might be no expression: a date, digits in a base, hexadecimal digits, a function's argument, adjacent
# numbers, a number after a letter, three letters.
NO_EXPRESSION = re.compile(
    r"[0-9] / [0-9.]+ /|[0-9]{4} - [0-9]+ - |[0-9] - [0-9]+ - [0-9]{4}|[0-9A-Z] _|\b[fghFGHP] \(|[0-9] \.?[0-9]"
    r"|\b0[0-9x]|\b0 [A-Za-z]|[0-9][eE]|[A-Za-z] [0-9]|[A-Za-z]{3}"
)
ALIASES = """$ dollar dollars usd | € euro euros | £ | ¥ | % percent | ° degree degrees deg | mph | unit units
| cent cents | cm centimeter centimeters centimetres | m meter meters metre metres | km kilometer kilometers
| mm millimeter millimeters | in inch inches | ft foot feet | yd yard yards | mi mile miles | kg kilogram kilograms
| g gram grams | lb lbs pound pounds | s sec second seconds | min minute minutes | h hr hrs hour hours
| l liter liters litre litres | ml milliliter milliliters"""
UNITS = {word: group.split()[0] for group in ALIASES.split("|") for word in group.split()}
CURRENCIES = ("$", "€", "£", "¥")
OF_VALUES = {"\\frac", "\\sqrt", "\\pi", "\\cdot", "\\times", *SCALES, *"+-/^{}()[].0123456789"}
POWERS = {"square", "cubic", "sq", "cu"}  # ignored, as exponents of units are: the question implies them
CHANGE_MEANING = """am pm noon midnight or and more less fewer to of out base mod times factorial squared cubed not no
only below above before after at least most both none all bc ad st nd rd th half quarter dozen plus minus choose
remainder north south east west if when for where is"""
NO_UNITS = {*SCALES, *CHANGE_MEANING.split()}


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer: its tokens, its own parts, and the marks that join them (`kind`, empty without parts)."""

    kind: str
    parts: tuple["AnswerPart", ...]
    tokens: Tokens

    @property
    def text(self) -> str:
        return " ".join(token for token in self.tokens if token != TEXT)

    @property
    def name(self) -> str:
        """The variable or function that x = 5, f(x) = 2x or x \\in [1,2] defines; empty if there is none."""
        if self.kind not in ("=", "\\in"):
            return ""
        name = self.parts[0].text
        return name if re.fullmatch(r"\\?[A-Za-z]+( _ \{ \w+ \}| \( [a-z] \))?", name) else ""


@functools.lru_cache(maxsize=10_000)
def read_answer(text: str) -> AnswerPart:
    """Return the structure of an answer; an answer nested deeper than MAX_DEPTH is a single part."""
    tokens = tokens_of(unwrapped(text))
    deepest = max(itertools.accumulate(map(depth, tokens)), default=0)
    return part_of(tokens) if deepest <= MAX_DEPTH else AnswerPart("", (), tokens)


def part_of(tokens: Tokens) -> AnswerPart:
    tokens = tokens[1:] if tokens[:1] == ("+",) else tokens
    for marks in LEVELS:
        pieces, separators = split(tokens, marks)
        if separators:
            return joined(pieces, separators, tokens)
    return bracketed(tokens) or two_values(tokens) or AnswerPart("", (), tokens)


def joined(pieces: list[Tokens], marks: list[str], tokens: Tokens) -> AnswerPart:
    """Return the AnswerPart of `tokens`, which the marks split into pieces. An inequality gets the lesser side first,
    and a list loses its empty pieces."""
    if all(mark in REVERSED for mark in marks):
        pieces, marks = pieces[::-1], [REVERSED[mark] for mark in marks[::-1]]
    if marks[0] not in OF_LISTS:
        return AnswerPart(" ".join(marks), tuple(part_of(piece) for piece in pieces), tokens)
    parts = [part_of(piece) for piece in pieces if any(token != TEXT for token in piece)]
    flat = [inner for part in parts for inner in (part.parts if part.kind == "," and "\\pm" in part.tokens else [part])]
    return flat[0] if len(flat) == 1 else AnswerPart(",", tuple(flat), tokens)


def split(tokens: Tokens, marks: set[str]) -> tuple[list[Tokens], list[str]]:
    """Split the tokens at those `marks` that are outside of brackets. Return the pieces, and the marks between them."""
    pieces: list[list[str]] = [[]]
    separators, deep = [], 0
    for token in tokens:
        deep += depth(token)
        if token in marks and deep == 0:
            separators.append(token)
            pieces.append([])
        else:
            pieces[-1].append(token)
    return [tuple(piece) for piece in pieces], separators


def bracketed(tokens: Tokens) -> AnswerPart | None:
    """If brackets enclose all tokens, return the part in them, else None. Parentheses around a single value are
    dropped, and the set of several values becomes a list."""
    tokens = tokens[1:] if tokens[:1] == (TEXT,) else tokens
    depths = list(itertools.accumulate(map(depth, tokens)))
    if len(tokens) < 3 or 0 in depths[:-1] or depths[-1] or tokens[0] in ("\\lfloor", "\\lceil"):
        return None
    inner = part_of(tokens[1:-1])
    kind = tokens[0] + tokens[-1]
    if inner.kind != ",":
        return inner if kind in ("()", "{}") else AnswerPart(kind, (inner,), tokens)
    return inner if kind in ("\\{\\}", "{}") else AnswerPart(kind, inner.parts, tokens)


def depth(token: str) -> int:
    """Return 1 for a token that opens a bracket, -1 for one that closes a bracket, else 0."""
    return (token in OPENING or token.startswith("\\begin")) - (token in CLOSING or token.startswith("\\end"))


def two_values(tokens: Tokens) -> AnswerPart | None:
    r"""Return the two values of an expression with exactly one \pm; None for any other expression."""
    if tokens.count("\\pm") != 1:
        return None
    place = tokens.index("\\pm")
    signs = (("+",) if place else ()), ("-",)
    parts = (AnswerPart("", (), (*tokens[:place], *sign, *tokens[place + 1 :])) for sign in signs)
    return AnswerPart(",", tuple(parts), tokens)


def equal(label: AnswerPart, answer: AnswerPart, ask: Ask) -> bool:
    """Return whether an answer equals the label, or a part of the answer the corresponding part of the label."""
    if label.text == answer.text:
        return True
    if bool(label.name) != bool(answer.name) and label.kind != answer.kind:
        label, answer = (side.parts[1] if side.name else side for side in (label, answer))
    if label.kind != answer.kind or len(label.parts) != len(answer.parts):
        return False
    if not label.kind:
        return equal_values(label.tokens, answer.tokens, ask)
    if label.kind[:4] in UNORDERED:
        return equal_lists(label, answer, ask)
    if all(equal(*pair, ask) for pair in zip(label.parts, answer.parts, strict=True)):
        return True
    return equal_relations(label, answer, ask)


def equal_lists(label: AnswerPart, answer: AnswerPart, ask: Ask) -> bool:
    """Return whether the values of label and answer match in any order. If the values of one side have different names,
    as in a=1, b=2, those of the other side must have the same names."""
    names = [{part.name for part in value.parts if part.name} for value in (label, answer)]
    if max(map(len, names)) > 1 and names[0] != names[1]:
        return False
    left = list(answer.parts)
    for wanted in label.parts:
        match = next((value for value in left if equal(wanted, value, ask)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def equal_relations(label: AnswerPart, answer: AnswerPart, ask: Ask) -> bool:
    """Return whether left minus right side is the same in both relations. In equations its sign may be opposite."""
    if label.kind not in ("=", "<", "\\le", "\\ne") or any(inner.kind for inner in (*label.parts, *answer.parts)):
        return False
    sides = (answer.parts, answer.parts[::-1]) if label.kind in ("=", "\\ne") else (answer.parts,)
    return any(equal_values(difference(*label.parts), difference(*two), ask) for two in sides)


def difference(left: AnswerPart, right: AnswerPart) -> Tokens:
    return (*left.tokens, "-", "(", *right.tokens, ")")


def equal_values(label: Tokens, answer: Tokens, ask: Ask) -> bool:
    """Return whether two values have no contradicting units, and equal tokens, numbers or expressions."""
    (wanted, unit), (value, other) = unit_and_rest(label), unit_and_rest(answer)
    if unit and other and unit != other:
        return False
    written = [" ".join(token for token in tokens if token != TEXT) for tokens in (wanted, value)]
    numbers = [read_value(text) for text in written]
    if written[0] == written[1] or None not in numbers:
        return written[0] == written[1] or numbers[0] == numbers[1]
    if not all(is_expression(tokens) for tokens in (wanted, value)) or letters_differ(wanted, value):
        return False
    return ask(*map(expression, written))


def read_value(text: str) -> object:
    """Return the number that a text of joined tokens means. None if it is not a number, or has a leading zero (007)."""
    if re.search(r"(?<![0-9.])0[0-9]", text):
        return None
    return read_number(re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", text))


def is_expression(tokens: Tokens) -> bool:
    """Return whether the tokens are certainly an expression, so that math-verify reads them as a person does."""
    words = [token for token in tokens if token.isalpha()]
    if TEXT in tokens and any(len(word) > 1 for word in words):
        return False
    known = all(token in OF_EXPRESSIONS or token.isalpha() or token[0] in ".0123456789" for token in tokens)
    return known and not NO_EXPRESSION.search(without_commands(tokens))


def without_commands(tokens: Tokens) -> str:
    return " ".join("\\" if token.startswith("\\") else token for token in tokens if token != TEXT)


def letters_differ(label: Tokens, answer: Tokens) -> bool:
    """Return whether both sides are words, or a letter is a capital in only one of them: math-verify treats R as r."""
    texts = without_commands(label), without_commands(answer)
    letters, others = (set(re.findall("[A-Za-z]", text)) for text in texts)
    both_words = all(re.fullmatch(r"[A-Za-z ]+", text) for text in texts)
    return both_words or any(letter.swapcase() in others - letters for letter in letters - others)


def expression(text: str) -> str:
    """Return LaTeX for math-verify, with decimals as fractions, so that the comparison is exact."""
    return re.sub(r"([0-9]*)\.([0-9]+)", lambda of: rf"\frac {{ {of[1]}{of[2]} }} {{ 1{'0' * len(of[2])} }}", text)


def unit_and_rest(tokens: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return (tokens without the unit, unit) of a value; the unit is empty unless it is certain."""
    sign, bare = (tokens[:1], tokens[1:]) if tokens[:1] == ("-",) else ((), tokens)
    if len(bare) > 1 and bare[0] in CURRENCIES:
        value, unit = unit_and_rest((*sign, *bare[1:]))
        return (value, bare[0]) if unit in ("", bare[0]) else (tokens, "")
    start = next((place for place, token in enumerate(tokens) if starts_unit(token)), len(tokens))
    words = [token for token in tokens[start:] if token != TEXT]
    value = (*tokens[:start], *(word for word in words[:1] if word in SCALES))
    unit = unit_name(words[len(value) - start :])
    if not words or not value or not all(map(is_of_value, value)):
        return tokens, ""
    return (value, unit) if unit or len(words) == len(value) - start else (tokens, "")


def starts_unit(token: str) -> bool:
    """Return whether a unit or scale word begins with this token. A single letter never does: it may be a variable."""
    return token in (TEXT, "%", "°", *CURRENCIES) or (len(token) > 1 and (token in UNITS or token in SCALES))


def is_of_value(token: str) -> bool:
    """Return whether a token may precede a unit. A function's name may not: the m in cos m is no unit."""
    return token in OF_VALUES or token[0] in OF_VALUES or (len(token) == 1 and token.isalpha())


def unit_name(words: list[str]) -> str:
    """Return a unit's name, the same for singular, plural and abbreviation; empty if the words are not a unit."""
    plain = [word for word in words if word not in POWERS]
    if plain[1:2] == ["^"] and len(plain) == 5:  # the word, ^, and a number in braces
        plain = plain[:1]
    if any(word.lower() in NO_UNITS or not (word.isalnum() or word in UNITS or word in "/^{}-") for word in plain):
        return ""
    return " ".join(UNITS.get(word.lower(), word.removesuffix("s") if len(word) > 3 else word) for word in plain)
