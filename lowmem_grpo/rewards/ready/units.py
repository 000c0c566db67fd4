"""Units: what stands before or after the number of an answer, such as a currency, a percent sign or a word."""

from lowmem_grpo.rewards.ready.latex import TEXT
from lowmem_grpo.rewards.ready.reading import SCALES

ALIASES = """$ dollar dollars usd | € euro euros | £ | ¥ | % percent | ° degree degrees deg | mph | unit units
| cent cents | cm centimeter centimeters centimetres | m meter meters metre metres | km kilometer kilometers
| mm millimeter millimeters | in inch inches | ft foot feet | yd yard yards | mi mile miles | kg kilogram kilograms
| g gram grams | lb lbs pound pounds | s sec second seconds | min minute minutes | h hr hrs hour hours
| l liter liters litre litres | ml milliliter milliliters"""
UNITS = {word: group.split()[0] for group in ALIASES.split("|") for word in group.split()}
CURRENCIES = ("$", "€", "£", "¥")
OF_VALUES = {"\\frac", "\\sqrt", "\\pi", "\\cdot", "\\times", *SCALES, *"+-/^{}()[].0123456789"}
POWERS = {"square", "cubic", "sq", "cu"}  # like exponents of units, they do not count: the question gives them
CHANGE_MEANING = """am pm noon midnight or and more less fewer to of out base mod times factorial squared cubed not no
only below above before after at least most both none all bc ad st nd rd th half quarter dozen plus minus choose
remainder north south east west if when for where is"""
NO_UNITS = {*SCALES, *CHANGE_MEANING.split()}


def unit_and_rest(tokens: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the tokens of a value without its unit, and the unit; it is empty where there is none for certain."""
    sign, bare = (tokens[:1], tokens[1:]) if tokens[:1] == ("-",) else ((), tokens)
    if len(bare) > 1 and bare[0] in CURRENCIES:
        value, unit = unit_and_rest((*sign, *bare[1:]))
        return (value, bare[0]) if unit in ("", bare[0]) else (tokens, "")
    start = next((place for place, token in enumerate(tokens) if starts_unit(token)), len(tokens))
    words = [token for token in tokens[start:] if token != TEXT]
    value = (*tokens[:start], *(word for word in words[:1] if word in SCALES))
    unit = name(words[len(value) - start :])
    if not words or not value or not all(map(is_of_value, value)):
        return tokens, ""
    return (value, unit) if unit or len(words) == len(value) - start else (tokens, "")


def starts_unit(token: str) -> bool:
    """Return whether a unit or a word begins here; a bare letter may be a variable."""
    return token in (TEXT, "%", "°", *CURRENCIES) or (len(token) > 1 and (token in UNITS or token in SCALES))


def is_of_value(token: str) -> bool:
    """Return whether a token can stand in the value before a unit: no function, whose argument would end there."""
    return token in OF_VALUES or token[0] in OF_VALUES or (len(token) == 1 and token.isalpha())


def name(words: list[str]) -> str:
    """Return the name of a unit, in one form for singular, plural and abbreviation; empty if it is none."""
    plain = [word for word in words if word not in POWERS]
    if plain[1:2] == ["^"] and len(plain) == 5:  # the word, ^, and a number in braces
        plain = plain[:1]
    if any(word.lower() in NO_UNITS or not (word.isalnum() or word in UNITS or word in "/^{}-") for word in plain):
        return ""
    return " ".join(UNITS.get(word.lower(), word.removesuffix("s") if len(word) > 3 else word) for word in plain)
