"""Answer a question by searching mails: tools to search, to read and to answer, and what an answer earns."""

import re
from typing import Any

from lowmem_grpo.environments.tools.results import FinalResult
from lowmem_grpo.recipes.problems.inbox import Mail, check_name
from lowmem_grpo.recipes.problems.inbox_worlds import FIRST_NAMES, LAST_NAMES, WORLDS
from lowmem_grpo.recipes.problems.mail_database import Hit, database_of

NO_ANSWER, WRONG, UNKNOWN, RIGHT = -2.0, -1.0, 0.0, 1.0  # what an episode earns at least
FOUND, READ, CITED, SAVED = 0.2, 0.2, 0.2, 0.3  # what it earns beside that; SAVED for all calls, in a right answer only
MOST_SOURCES = 3  # an answer that names more names none
NOT_KNOWN = re.compile(r"(?i)(unknown|not known|.*\b(don.?t|do not|cannot|can.?t) (know|find|tell)\b.*)")
PEOPLE = frozenset(name.casefold() for name in (*FIRST_NAMES, *LAST_NAMES))


class Inbox:
    """An environment whose public methods are the policy's tools. A row has the answer and the source of a question."""

    def reset(self, mailbox: str, mail_seed: int, answer: str, source: int, calls: int | None = None,
              unknown: float = UNKNOWN, **row: object) -> None:
        """Open a row's mailbox, for so many `calls` of tools; the answer "unknown" earns `unknown` at least."""
        check_name(mailbox)
        self.world = WORLDS[mailbox]
        self._database = database_of(mailbox, mail_seed)
        self.expected, self.source, self.unknown = answer, source, unknown
        self.most = self.left = self.world.calls if calls is None else calls
        self.given: str | None = None  # the answer of the policy
        self.seen: set[int] = set()  # mails that a search found
        self.opened: set[int] = set()  # mails that were read
        self.sources: list[int] = []  # that the answer names

    def search(self, words: str) -> str:
        """Search the mails. Gives the best results, each with the id of the mail.

        Args:
            words: Words that the mail has, all of them, with spaces between them.
        """
        self.left -= 1
        hits = self._database.search(words, self.world.results, self.world.snippet)
        self.seen |= {hit.id for hit in hits}
        return self._last("\n".join(map(line, hits)) or "nothing found")

    def read(self, id: int) -> str:
        """Read a mail.

        Args:
            id: The id of the mail, as a search gives it.
        """
        self.left -= 1
        mail = self._database.read(id)
        if mail is None:
            raise ValueError(f"there is no mail {id}; search gives the ids")
        self.opened.add(id)
        return self._last(letter(mail))

    def answer(self, text: str, sources: list[int]) -> str:
        """Hand in the answer. Nothing can be done after it.

        Args:
            text: The answer in a few words, or "unknown".
            sources: The ids of the mails that hold the answer.
        """
        self.left -= 1
        self.given, self.sources = text, list(dict.fromkeys(sources))
        return FinalResult("received")

    def _last(self, result: str) -> str:
        """A result, which ends the episode where no call is left."""
        return result if self.left > 0 else FinalResult(result)

    @property
    def right(self) -> bool:
        return self.given is not None and says(self.given, self.expected)

    won = right

    @property
    def progress(self) -> float:
        """The reward for the way to the answer: the source was found, read, and named."""
        named = self.source in self.sources and len(self.sources) <= MOST_SOURCES
        return FOUND * (self.source in self.seen) + READ * (self.source in self.opened) + CITED * named

    @property
    def earned(self) -> float:
        """The episode's reward, from -2 to 2."""
        if self.given is None:
            return NO_ANSWER + self.progress
        if self.right:
            return RIGHT + self.progress + SAVED * max(self.left, 0) / self.most
        return (self.unknown if NOT_KNOWN.fullmatch(self.given.strip().rstrip(".")) else WRONG) + self.progress


def line(hit: Hit) -> str:
    shown = (hit.sender, hit.date, hit.subject, hit.snippet) if hit.snippet else (hit.subject,)
    return " | ".join((str(hit.id), *shown))


def letter(mail: Mail) -> str:
    heads = {"From": mail.sender, "To": mail.recipient, "Date": mail.date, "Subject": mail.subject}
    return "\n".join([*(f"{name}: {text}" for name, text in heads.items() if text), "", mail.body])


def words_of(text: str) -> list[str]:
    """Words and numbers, in small letters; a number's thousands may have commas."""
    return re.findall(r"[^\W_]+(?:[.:][^\W_]+)*", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold()))


def says(answer: str, expected: str) -> bool:
    """Return whether an answer has the expected words in their order, and no other number or name of a person."""
    words, wanted = words_of(answer), words_of(expected)
    at = next((at for at in range(len(words)) if words[at : at + len(wanted)] == wanted), None)
    if at is None:
        return False
    rest = words[:at] + words[at + len(wanted) :]
    return not any(word in PEOPLE or any(letter.isdigit() for letter in word) for word in rest)


def earned(environments: list[Any], **kwargs: Any) -> list[float]:
    """A reward function: what each episode earned."""
    return [environment.earned for environment in environments]
