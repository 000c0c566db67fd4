"""The rewards of the e-mail example: criteria of a good reply, each paid and logged by itself."""

import re
from typing import Any

from lowmem_grpo.rewards.ready.answers import answer_match
from lowmem_grpo.rewards.ready.formats import too_long
from lowmem_grpo.rewards.reward import Reward, TextReward, VerifiedReward
from lowmem_grpo.rewards.texts import label_text, values_of
from lowmem_grpo.utils import TEXT, require

GREETING_LINES = 2  # lines at the top of a mail that may hold the recipient's name


def email_rewards(signature: str, longest_words: int = 150) -> list[Reward]:
    """Return the five rewards of the e-mail example. Each pays at most 1; `too_long` pays -1 above `longest_words`
    words. The dataset needs the columns `keyword`, `ideal` (a perfect reply) and `recipient` (a name)."""
    return [keyword_present(), ideal_answer(), too_long(longest_words, "words"), recipient_named(), signed(signature)]


def keyword_present(present: float = 1.0, absent: float = 0.0, column: str = "keyword") -> TextReward:
    """Return a reward that pays `present` if the completion contains the row's keyword as a whole word, in any case,
    else `absent`. All keywords of a list are required. None if there is no keyword."""
    return TextReward("keyword_present", pay_keywords, column, present=present, absent=absent)


def pay_keywords(text: str, label: Any, present: float, absent: float) -> float | None:
    wanted = [label_text(word).strip() for word in values_of(label)]
    if not any(wanted):
        return None
    return present if all(has_word(text, word) for word in wanted if word) else absent


def has_word(text: str, word: str) -> bool:
    """Return whether a text contains a word or phrase at word boundaries, in any case and with any white space."""
    inside, wanted = text.casefold(), " ".join(word.casefold().split())
    if " " in wanted:
        inside = " ".join(inside.split())
    return wanted in inside and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", inside) is not None


def ideal_answer(exact: float = 1.0, other: float = 0.0, column: str = "ideal") -> VerifiedReward:
    """Return a reward: `exact` if the completion equals the ideal answer, as by `answer_match`, else `other`."""
    return answer_match(column).reward(exact, other, "ideal_answer")


def recipient_named(named: float = 1.0, unnamed: float = 0.0, column: str = "recipient") -> TextReward:
    """Return a reward: `named` if one of the first two non-blank lines names the row's recipient, or
    one of a list of recipients, else `unnamed`. None if there is no recipient."""
    return TextReward("recipient_named", pay_recipient, column, named=named, unnamed=unnamed)


def pay_recipient(text: str, label: Any, named: float, unnamed: float) -> float | None:
    names = [name for each in values_of(label) if (name := label_text(each).strip())]
    if not names:
        return None
    greeting = [line for line in text.splitlines() if line.strip()][:GREETING_LINES]
    return named if any(has_word(line, name) for line in greeting for name in names) else unnamed


def signed(signature: str, present: float = 1.0, absent: float = 0.0) -> TextReward:
    """Return a reward that pays `present` if the completion ends with the lines of the signature, else `absent`. White
    space at the ends of lines and blank lines are ignored. ValueError for an empty signature."""
    require("signature", signature, TEXT, ": give the lines with which a mail should end")
    return TextReward("signed", pay_signature, lines=stripped_lines(signature), present=present, absent=absent)


def pay_signature(text: str, lines: list[str], present: float, absent: float) -> float:
    return present if stripped_lines(text)[-len(lines) :] == lines else absent


def stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
