r"""The tokens of an answer in LaTeX or plain text: answers that are written differently, but surely mean the same, have
the same tokens.

A token is a number, a run of letters, a command or a sign. White space is none, but it parts numbers: 3 4 are two
tokens. `\frac12` gets its braces. What stood in \text{...} comes after the token \text.
"""

import re
from collections.abc import Iterator

TEXT = "\\text"
GREEK = dict(zip("αβγδθλμπρσφω", "alpha beta gamma delta theta lambda mu pi rho sigma phi omega".split(), strict=True))
SIGNS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u2009": "\\,", "\u202f": "\\,", "\xa0": " ", "~": " ", "\xd7": "\\times ", "·": "\\cdot ",
    "*": "\\cdot ", "÷": "/", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∞": "\\infty ", "∪": "\\cup ",
    "∩": "\\cap ", "∅": "\\emptyset ", "∈": "\\in ", "²": "^2", "³": "^3", "\u2019": "'",
    **{letter: f"\\{name} " for letter, name in GREEK.items()},
})
WRITTEN = {  # in this order
    "{,}": "\\,", "\\!": "", "\\left": "", "\\right": "", "bmatrix": "pmatrix", "a.m.": "am", "p.m.": "pm", "\\{\\}": "\\emptyset",
}
TEXTS = re.compile(r"\\(?:text|mbox|mathrm|mathbf|mathit|operatorname)[a-z]*\s*\{([^{}]*)\}")
DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))")
THIN = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\\[,;:][0-9]{3})+(?![0-9])")
COMMAS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
TOKEN = re.compile(
    r"\\(?:begin|end)\s*\{[a-z]+\}|\\[A-Za-z]+|\\.|[0-9]*\.[0-9]*\\overline\{[0-9]+\}|0[xX][0-9a-fA-F]+"
    r"|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+(?![0-9A-Za-z]))?|[A-Za-z]+|[^\s.]", re.DOTALL
)
SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "\\varnothing": "\\emptyset", "\\$": "$",
    "\\%": "%", "\\degree": "°", "\\lvert": "|", "\\rvert": "|", "percent": "%", "AM": "am", "PM": "pm",
    "infinity": "\\infty",
    **{name: f"\\{name}" for name in "sin cos tan sec csc cot log ln exp sqrt pi".split()},
}
NOTHING = {"\\,", "\\;", "\\:", "\\ ", "\\quad", "\\qquad", "\\displaystyle", "\\(", "\\)", "\\[", "\\]"}
ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "√": 1, "^": 1, "_": 1}


def tokens_of(answer: str) -> tuple[str, ...]:
    """Return the tokens of an answer, without a sign of plus in front."""
    text = answer.strip().translate(SIGNS)
    text = text.strip("$") if text.startswith("$") and text.endswith("$") else text
    for written, meant in WRITTEN.items():
        text = text.replace(written, meant)
    text = THIN.sub(digits, DEGREES.sub("°", TEXTS.sub(r" \\text \1 ", text)))
    if not any(bracket in text for bracket in ("(", "[", "\\{")):  # (1,234) is a pair
        text = COMMAS.sub(digits, text)
    found = [SAME.get(token, token) for token in TOKEN.findall(text)]
    tokens = list(braced([small(token) for token in found if token not in NOTHING]))
    return tuple(tokens[1:] if tokens[:1] == ["+"] else tokens)


def digits(number: re.Match[str]) -> str:
    """Return a number without what parts its thousands."""
    return re.sub(r"[^0-9]", "", number[0])


def small(token: str) -> str:
    """Return a word that begins with a capital in small letters: Yes is yes, but AB and X are what they are."""
    return token.lower() if len(token) > 1 and (token.istitle() or token[:1] == "0") else token


def braced(tokens: list[str]) -> Iterator[str]:
    """Yield the tokens with braces around each argument of a command, and around nothing that is one token else."""
    queue = tokens[::-1]
    while queue:
        token = queue.pop()
        yield "\\sqrt" if token == "√" else token
        for _ in range(ARGUMENTS.get(token, 0)):
            if token == "\\sqrt" and queue[-1:] == ["["]:  # the degree of the root
                while queue and (part := queue.pop()) != "]":
                    yield part
                yield "]"
            if token.startswith("\\") and queue and queue[-1].isdigit() and len(queue[-1]) > 1:  # TeX takes one digit
                queue[-1:] = [queue[-1][1:], queue[-1][0]]
            yield from argument(queue, token)


def argument(queue: list[str], command: str) -> Iterator[str]:
    """Yield the next argument, in braces."""
    yield "{"
    if queue and queue[-1] == "{":
        queue.pop()
        inner, depth = [], 1
        while queue:
            token = queue.pop()
            depth += (token == "{") - (token == "}")
            if not depth:
                break
            inner.append(token)
        yield from braced(inner)
    elif queue:
        token = queue.pop()
        yield token
        if command in "^_" and token == "-" and queue:
            yield queue.pop()
    yield "}"
