"""All colours of the report, of the pictures in notebooks, and of the pictures in docs/.

Lines and verdicts are distinguishable with each kind of colour blindness, on light and dark pages; verdicts also have
a sign. Memory components are too many for that: they appear in the order of their legend.
"""

LINES = ("#0065d2", "#e8500c", "#0c9c65", "#7c2150", "#8d9a3c", "#49506c")  # on a light page, in this order
DARK_LINES = ("#4d94ff", "#f07a28", "#2fe0b0", "#f79be8", "#e0ee80", "#858779")
RIGHT, WRONG = "#00856f", "#cc4a0c"  # readable on white and on black, since a terminal may be either
DARK_RIGHT, DARK_WRONG = "#3ecfae", "#ff8a5c"
RIGHT_SIGN, WRONG_SIGN = "\u2713", "\u2717"
INK, PALE = "#1f2733", "#d0d7de"  # text, and grid lines behind the data, on a light page

PAGE = {  # (light, dark)
    "page": ("#f6f7f9", "#12161c"), "card": ("#ffffff", "#1a2029"), "ink": (INK, "#dde3ea"),
    "quiet": ("#5c6675", "#9aa5b3"), "edge": ("#e0e4ea", "#2b333e"), "right": (RIGHT, DARK_RIGHT),
    "wrong": (WRONG, DARK_WRONG),
    **{f"line{place}": pair for place, pair in enumerate(zip(LINES, DARK_LINES, strict=True))},
}

# The model in blue, LoRA in green, token-dependent memory in warm colours, the driver in grey.
MEMORY = {
    "weights": "#2f5d9b", "embedding": "#6f9bd1", "head": "#a9c6e8", "adapters": "#2e8b57", "gradients": "#6cbf8b",
    "optimizer": "#b5dfc0", "KV cache": "#e0803a", "engine workspace": "#c98bbf", "layer inputs": "#c0504d",
    "layer recompute": "#e0803a", "MLP tile": "#f0b67f", "U and hidden states": "#f6d55c", "logits chunk": "#d9a441",
    "attention workspace": "#8f6bb3", "adapter copy": "#1f6b43", "sampling weights": "#4a3f9b",
    "CUDA context": "#8a8f98", "reserve": "#c4c8ce",
}


def css() -> str:
    """Return the colours as CSS variables. A page of the class `paper` is always light."""
    light, dark = (";".join(f"--{name}:{pair[place]}" for name, pair in PAGE.items()) for place in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root:not(.paper){{{dark}}}}}\n"


def sign(right: bool) -> str:
    return RIGHT_SIGN if right else WRONG_SIGN
