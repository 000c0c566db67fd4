r"""The tokens of an answer in LaTeX or plain text. Notations that certainly mean the same give the same tokens.

A token is a number, a run of letters, a command or a sign. White space is not a token, but separates numbers: 3 4 are
two tokens. `\frac12` is read as `\frac{1}{2}`. The content of \text{...} follows a token \text.
"""

import re

from lowmem_grpo.rewards.reading import signs_in_latex

TEXT = "\\text"
LETTERS = ["alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "pi", "rho", "sigma", "phi", "omega"]
NAMES = ["sin", "cos", "tan", "sec", "csc", "cot", "log", "ln", "exp", "sqrt", "pi"]  # also without a backslash
SIGNS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u2009": "\\,", "\u202f": "\\,", "\xa0": " ", "~": " ", "\xd7": "\\times ",
    "·": "\\cdot ", "*": "\\cdot ", "÷": "/", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∞": "\\infty ",
    "\u222a": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "∈": "\\in ", "\u2019": "'", "\u2044": "/",
    **{letter: f"\\{name} " for letter, name in zip("αβγδθλμπρσφω", LETTERS, strict=True)},
})
WRITTEN = {"{,}": "\\,", "\\!": "", "\\bar{": "\\overline{", "bmatrix": "pmatrix", "a.m.": "am", "p.m.": "pm",
           "\\{\\}": "\\emptyset"}
TEXTS = re.compile(r"\\(?:text|mbox|mathrm|mathbf|mathit|operatorname)[a-z]*\s*\{([^{}]*)\}")
CHOICE = re.compile(r"\A(\s*(?:\\text )?[A-Z])\)\s*\Z")  # A) is A, as (A) is
DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))")
THIN = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\\[,;: ][0-9]{3})+(?![0-9])")
COMMAS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
TOKEN = re.compile(r"\\(?:begin|end)\s*\{[a-z]+\}|\\[A-Za-z]+|\\.|[0-9]*\.[0-9]*\\overline\{[0-9]+\}|0[xX][0-9a-fA-F]+"
                   r"|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+(?![0-9A-Za-z]))?|[A-Za-z]+|[^\s.]", re.DOTALL)
SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\leq": "\\le", "\\geq": "\\ge", "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "\\varnothing": "\\emptyset",
    "\\$": "$", "\\%": "%", "\\degree": "°", "\\lvert": "|", "\\rvert": "|", "percent": "%", "AM": "am", "PM": "pm",
    "infinity": "\\infty", **{name: f"\\{name}" for name in NAMES},
}
NOTHING = {"\\left", "\\right", "\\,", "\\;", "\\:", "\\ ", "\\quad", "\\qquad", "\\displaystyle",
           "\\(", "\\)", "\\[", "\\]", "\\"}
ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "√": 1, "^": 1, "_": 1}


def tokens_of(answer: str) -> tuple[str, ...]:
    text = signs_in_latex(answer.strip()).translate(SIGNS)
    text = text.strip("$") if text.startswith("$") and text.endswith("$") else text
    for written, meant in WRITTEN.items():
        text = text.replace(written, meant)
    text = THIN.sub(digits, DEGREES.sub("°", CHOICE.sub(r"\1", TEXTS.sub(r" \\text \1 ", text))))
    if not any(bracket in text for bracket in ("(", "[", "\\{")):  # (1,234) is a pair
        text = COMMAS.sub(digits, text)
    raw = [SAME.get(token, token) for token in TOKEN.findall(text)]
    queue = [small(token) for token in raw[::-1] if token not in NOTHING]
    tokens = group(queue)
    while queue:  # a brace that nothing opened
        tokens += ["\\}", *group(queue)]
    return tuple(tokens)


def digits(number: re.Match[str]) -> str:
    return re.sub(r"[^0-9]", "", number[0])


def small(token: str) -> str:
    """Return a capitalised word or a 0x number in lower case (Yes becomes yes), any other token unchanged (AB, X)."""
    return token.lower() if len(token) > 1 and (token.istitle() or token[:1] == "0") else token


def group(queue: list[str]) -> list[str]:
    """Pop tokens off the queue's end up to the closing brace; return them with braces around every argument."""
    tokens: list[str] = []
    while queue and (token := queue.pop()) != "}":
        tokens.append("\\sqrt" if token == "√" else token)
        if token == "{":
            tokens += [*group(queue), "}"]
        elif token == "\\sqrt" and queue[-1:] == ["["] and "]" in queue:  # the degree of the root
            while tokens[-1] != "]":
                tokens.append(queue.pop())
        for _ in range(ARGUMENTS.get(token, 0)):
            tokens += ["{", *argument(queue, token), "}"]
    return tokens


def argument(queue: list[str], command: str) -> list[str]:
    """Pop and return a command's next argument: one digit, as in TeX, but after ^ or _ the whole number (2^10)."""
    if not queue:
        return []
    first = queue.pop()
    if first == "{":
        return group(queue)
    if command.startswith("\\") and first[:1].isdigit() and len(first) > 1:
        queue.append(first[1:])
        return [first[0]]
    return [first, queue.pop()] if first == "-" and command in "^_" and queue else [first]
