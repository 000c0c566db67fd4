"""The environment of the recipe `inbox`: tools to search, read and answer, the reward, and two scripted players."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lowmem_grpo.environments.tools.results import FinalResult
from lowmem_grpo.recipes.tasks.mail_database import Hit, database_of
from lowmem_grpo.recipes.tasks.mailbox import FIRST_NAMES, LAST_NAMES, WORLDS, Kind, Mail, MailWorld, check_name

NO_ANSWER, WRONG, UNKNOWN, RIGHT = -2.0, -1.0, 0.0, 1.0  # base reward of an episode, by its answer
FOUND, READ, CITED, SAVED = 0.2, 0.2, 0.2, 0.3  # added; SAVED only to right answers, times the share of unused calls
MOST_SOURCES = 3  # an answer that cites more counts as citing none
NOT_KNOWN = re.compile(r"(?i)(unknown|not known|.*\b(don.?t|do not|cannot|can.?t) (know|find|tell)\b.*)")
PEOPLE = frozenset(name.casefold() for name in (*FIRST_NAMES, *LAST_NAMES))


class Inbox:
    """An environment whose public methods are the policy's tools. A row has an answer, and the id of its source
    mail."""

    def reset(self, mailbox: str, mail_seed: int, answer: str, source: int, calls: int | None = None,
              unknown: float = UNKNOWN, **row: object) -> None:
        """Open a row's mailbox, with a limit of `calls` tool calls; the answer "unknown" earns at least `unknown`."""
        check_name(mailbox)
        self.world = WORLDS[mailbox]
        self._database = database_of(mailbox, mail_seed)
        self.expected, self.source, self.unknown = answer, source, unknown
        self.most = self.left = self.world.calls if calls is None else calls
        self.given: str | None = None  # the answer of the policy
        self.seen: set[int] = set()  # mails that a search found
        self.opened: set[int] = set()  # mails that were read
        self.sources: list[int] = []  # cited by the answer

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
        """Return a result. If no call is left, the result ends the episode."""
        return result if self.left > 0 else FinalResult(result)

    @property
    def right(self) -> bool:
        return self.given is not None and says(self.given, self.expected)

    won = right

    @property
    def progress(self) -> float:
        """The reward for progress: the source was found, read, and cited."""
        named = self.source in self.sources and len(self.sources) <= MOST_SOURCES
        return FOUND * (self.source in self.seen) + READ * (self.source in self.opened) + CITED * named

    @property
    def earned(self) -> float:
        """The episode's reward, from -2 to less than 1.9."""
        if self.given is None:
            return NO_ANSWER + self.progress
        if self.right:
            return RIGHT + self.progress + SAVED * max(self.left, 0) / self.most
        return (self.unknown if NOT_KNOWN.fullmatch(self.given.strip().rstrip(".")) else WRONG) + self.progress


def line(hit: Hit) -> str:
    shown = (hit.sender, hit.date, hit.subject, hit.snippet) if hit.snippet else (hit.subject,)
    return " | ".join((str(hit.id), *shown))


def letter(mail: Mail) -> str:
    """Return a mail as the policy reads it, without empty headers."""
    heads = {"From": mail.sender, "To": mail.recipient, "Date": mail.date, "Subject": mail.subject}
    return "\n".join([*(f"{name}: {text}" for name, text in heads.items() if text), "", mail.body])


def words_of(text: str) -> list[str]:
    """Return words and numbers in lower case; commas between a number's thousands are removed."""
    return re.findall(r"[^\W_]+(?:[.:][^\W_]+)*", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold()))


def says(answer: str, expected: str) -> bool:
    """Return whether an answer has the expected words in their order, and no other number or person's name."""
    words, wanted = words_of(answer), words_of(expected)
    at = next((at for at in range(len(words)) if words[at : at + len(wanted)] == wanted), None)
    if at is None:
        return False
    rest = words[:at] + words[at + len(wanted) :]
    return not any(word in PEOPLE or any(letter.isdigit() for letter in word) for word in rest)


def earned(environments: list[Any], **kwargs: Any) -> list[float]:
    return [environment.earned for environment in environments]


Asker = Callable[[Inbox, str, random.Random], tuple[str, list[int]]]  # (inbox, question) -> answer and sources
VALUE = r"(\d(?:[\d.,:]*\d)?(?: euros| [A-Z]\w+)?|[A-Z]\w+(?: [A-Z]\w+)?)"  # a number, an amount, a day, or a name


def random_player(inbox: Inbox, question: str, rng: random.Random) -> tuple[str, list[int]]:
    """Search for a random word of the question, read any result, and answer with any value in it."""
    ids = ids_in(inbox.search(rng.choice(re.findall(r"\w+", question))))
    if not ids:
        return "unknown", []
    chosen = rng.choice(ids)
    values = re.findall(VALUE, inbox.read(chosen).partition("\n\n")[2])
    return rng.choice(values or ["unknown"]), [chosen]


def keyword_player(inbox: Inbox, question: str, rng: random.Random) -> tuple[str, list[int]]:
    """Play perfectly: search for the phrases in which mails state the fact, and believe the newest mail."""
    kind, topic = understood(question, inbox.world)
    told: list[tuple[str, int, str]] = []  # date, id, value
    for words, form in ways(kind, topic):
        for line in sorted(inbox.search(words).splitlines(), key=day_of, reverse=True):
            values = [re.findall(form, inbox.read(number)) for number in ids_in(line) if inbox.left > 2]
            if any(values):  # older mails are out of date
                told.append((day_of(line), ids_in(line)[0], values[0][0]))
                break
    _, number, value = max(told, default=("", 0, "unknown"))
    return value, [number]


def understood(question: str, world: MailWorld) -> tuple[Kind, str]:
    """Return the kind of fact that a question asks for, and the topic. Raises ValueError if no question form fits."""
    for kind in world.kinds:
        for form in kind.questions:
            if match := re.fullmatch(re.escape(form).replace(r"\{topic\}", "(.+)"), question):
                return kind, match[1]
    raise ValueError(f"{question[:100]!r} is no question about this mailbox")


def ways(kind: Kind, topic: str) -> Iterator[tuple[str, str]]:
    """Yield, for each way to state a fact, the phrases to search for and the regular expression of its value."""
    for sentence in kind.sentences:
        phrased = sentence if "{topic}" in sentence else kind.subjects[0]
        parts = phrased.format(topic=topic, value="|").split("|")
        form = re.escape(sentence.format(topic=topic, value="|")).replace(r"\|", VALUE)
        yield " ".join(f'"{part.strip(" ,.")}"' for part in parts if re.search(r"\w", part)), form


def day_of(line: str) -> str:
    match = re.search(r"\d{4}-\d\d-\d\d", line)
    return match[0] if match else ""


def ids_in(results: str) -> list[int]:
    return [int(line.partition(" ")[0]) for line in results.splitlines() if line[0].isdigit()]


def played(player: Asker, row: Mapping[str, Any]) -> Inbox:
    inbox, question = Inbox(), row["prompt"][-1]["content"]
    inbox.reset(**row)
    answer, sources = player(inbox, question, random.Random(f"player-{question}"))
    inbox.answer(answer, sources)
    return inbox


def baselines(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of questions that each player answers rightly, by the player's name."""
    rows = list(rows)
    return {name: sum(played(player, row).right for row in rows) / len(rows) for name, player in PLAYERS.items()}


PLAYERS: dict[str, Asker] = {"random": random_player, "keywords": keyword_player}
