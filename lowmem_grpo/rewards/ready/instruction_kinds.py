"""The checks of the 25 kinds of instructions of IFEval (arXiv 2311.07911, table 1), under its names and arguments."""

import json
import re
from collections.abc import Callable
from typing import Any

RELATIONS: dict[str, Callable[[int, float], bool]] = {
    "at least": lambda count, wanted: count >= wanted, "less than": lambda count, wanted: count < wanted,
    "at most": lambda count, wanted: count <= wanted, "more than": lambda count, wanted: count > wanted,
    "exactly": lambda count, wanted: count == wanted,
    "around": lambda count, wanted: abs(count - wanted) <= max(round(wanted / 10), 1),  # as in RLVR-IFeval
}
SHORTENED = frozenset(("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "inc", "ltd", "e.g", "i.e"))
MARK = re.compile(r"""(?<![.!?])[.!?]++(?=["')\]\u2019\u201d]*+\s++(\S))""")  # the end of a sentence, and what follows
LAST_WORD = re.compile(r"[\w.]*\Z")
OPINIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def sentences(text: str) -> int:
    """Count sentences, which end in . ! or ? before white space. No sentence ends after an initial or one of SHORTENED,
    or at dots before a lower-case letter."""
    marks = MARK.finditer(text := text.rstrip(" \n\"'"))
    return 1 + sum(ends_sentence(text, mark) for mark in marks)


def ends_sentence(text: str, mark: re.Match[str]) -> bool:
    if mark[0] != ".":
        return set(mark[0]) != {"."} or not mark[1].islower()
    before = LAST_WORD.search(text[max(0, mark.start() - 10) : mark.start()])
    word = before[0].lower() if before else ""
    return word not in SHORTENED and not (len(word) == 1 and word.isalpha())


def has_sentence(text: str) -> bool:
    """Return whether a text has at least four different words, and not many more words than different ones. A word that
    is repeated to the limit has neither."""
    words = re.findall(r"\w+", text.casefold())
    return len(set(words)) >= max(4, min(len(words), 60) // 2)


def paragraphs(text: str) -> int:
    """Count the paragraphs with *** (or * * *) between them; -1 if one that is not first or last is empty."""
    parts = [part.strip() for part in re.split(r"\*\*\*|\* \* \*", text)]
    return sum(map(bool, parts)) if all(parts[1:-1]) else -1


def begins_paragraph(text: str, num_paragraphs: float, nth_paragraph: float, first_word: str) -> bool:
    """Return whether there are `num_paragraphs`, with blank lines between them, and one begins with `first_word`."""
    parts, nth, wanted = text.split("\n\n"), int(nth_paragraph), str(first_word).lower()
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or not 1 <= nth <= len(parts):
        return False
    first = (parts[nth - 1].split() or [""])[0].lstrip("\"'")
    return re.split(r"[.,?!'\"]", first)[0].lower() == wanted


def postscript(text: str, postscript_marker: str) -> bool:
    spaced = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(postscript_marker)
    return re.search(spaced or re.escape(postscript_marker.lower()), text.lower()) is not None


def highlights(text: str) -> int:
    """Count the parts in *asterisks*, and once more those in **double asterisks**, as IFEval does."""
    parts = [*re.findall(r"\*[^\n*]*\*", text), *re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(bool(part.strip("*").strip()) for part in parts)


def is_json(text: str) -> bool:
    """Return whether the text is JSON, perhaps in a fenced block."""
    try:
        json.loads(re.sub(r"\A```(?:json)?|```\Z", "", text.strip(), flags=re.IGNORECASE))
    except (ValueError, RecursionError):
        return False
    return True


def two_responses(text: str) -> bool:
    """Return whether a text is two different responses with ****** between them."""
    parts = [part.strip() for part in text.split("******")]
    full = [part for part in parts if part]
    return all(parts[1:-1]) and len(full) == 2 and full[0] != full[1]


def in_language(text: str, language: str) -> bool:
    """Return whether a text is in the language of this ISO 639-1 code. Text without letters is in any language."""
    import py3langid

    return not any(map(str.isalpha, text)) or py3langid.classify(text)[0] == language


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def quoted(text: str) -> bool:
    return len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"'


def number(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def placeholders(text: str) -> int:
    """Count the parts in [brackets] within a line."""
    return sum(part.endswith("]") for part in re.findall(r"\[[^\]\n]*+\]?", text))


def bullets(text: str) -> int:
    """Count the lines that begin with - or with one asterisk."""
    lines = [line.lstrip() for line in text.split("\n")]
    return sum(line.startswith("-") or (len(line) > 1 and line[0] == "*" != line[1]) for line in lines)


def has_title(text: str) -> bool:
    """Return whether a line has <<a title>>."""
    return any(line[line.find("<<") : line.rfind(">>")].strip("<> ") for line in text.split("\n") if "<<" in line)


def texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(each) for each in value]


KINDS: dict[str, Callable[..., bool]] = {  # (text, arguments) -> whether the text follows the instruction
    "keywords:existence": lambda t, keywords: all(word.lower() in t.lower() for word in texts(keywords)),
    "keywords:frequency": lambda t, keyword, frequency, relation="at least":
        RELATIONS[relation](t.lower().count(keyword.lower()), frequency),
    "keywords:forbidden_words": lambda t, forbidden_words: not any(has_word(t, w) for w in texts(forbidden_words)),
    "keywords:letter_frequency": lambda t, letter, let_frequency, let_relation="at least":
        RELATIONS[let_relation](t.lower().count(letter.lower()), let_frequency),
    "language:response_language": in_language,
    "length_constraints:number_sentences": lambda t, num_sentences, relation="at least":
        RELATIONS[relation](sentences(t), num_sentences),
    "length_constraints:number_paragraphs": lambda t, num_paragraphs: paragraphs(t) == num_paragraphs,
    "length_constraints:number_words": lambda t, num_words, relation="at least":
        RELATIONS[relation](number(r"\w+", t), num_words),
    "length_constraints:nth_paragraph_first_word": begins_paragraph,
    "detectable_content:number_placeholders": lambda t, num_placeholders: placeholders(t) >= num_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": lambda t, num_bullets: bullets(t) == num_bullets,
    "detectable_format:constrained_response": lambda t, options=OPINIONS: any(each in t for each in texts(options)),
    "detectable_format:number_highlighted_sections": lambda t, num_highlights: highlights(t) >= num_highlights,
    "detectable_format:multiple_sections": lambda t, section_spliter, num_sections:
        number(rf"{re.escape(section_spliter)}\s?\d+", t) >= num_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda t, prompt_to_repeat:
        t.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    "startend:end_checker": lambda t, end_phrase: t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": quoted,
    "change_case:capital_word_frequency": lambda t, capital_frequency, capital_relation="at least":
        RELATIONS[capital_relation](sum(word.isupper() for word in re.findall(r"[\w'.-]+", t)), capital_frequency),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda t: "," not in t,
}
