"""Questions for a judge about completions: about each one alone, or about the completions of a group side by side.

Whole trajectories are written with one message per line, as JSON, so that no message can look like two. The messages
with which all trajectories of a group begin are shown once.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.rewards.texts import completion_text
from lowmem_grpo.runs.records import prompt_text

EQUAL = 0.5  # the reward of completions that have no other to be compared with
RESULT_CHARS = 4000  # in a message to the agent; a longer text is cut in the middle
NOTHING = "(nothing more)"

Transcript = tuple[str, ...]  # one line per message


@dataclass(frozen=True)
class JudgedRow:
    """A completion (`said`), with the prompt, rubric and reference for judging it."""

    prompt: str
    rubric: str
    reference: str | None
    said: str | Transcript
    seed: object = None  # an episode's, from its environment


@dataclass(frozen=True)
class JudgeRequest:
    """A question, and for each of its answers the indices of the completions; without a question all get `equal`."""

    places: list[list[int]]
    question: Question | None = None
    equal: float = EQUAL


@dataclass(frozen=True)
class JudgeForm(ABC):
    """The base of forms, which turn completions into questions and scores into rewards."""

    rubric: str
    rubric_column: str | None  # the dataset column with a row's own rubric
    reference: str | None  # the dataset column with a row's reference answer
    low: float = 0.0  # the score for which the reward is 0
    high: float = 1.0  # and the one for which it is 1

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in (self.rubric_column, self.reference) if name is not None))

    def read(self, completion: Any) -> Any:
        """Return the part of a completion that the judge sees: of a chat, the last assistant message."""
        return completion_text(completion)

    def questions(
        self, said: list[Any], columns: dict[str, list[Any]], prompts: list[Any], seeds: list[Any] | None = None
    ) -> list[JudgeRequest]:
        """Return requests about N completions, each of which belongs to one answer of one request."""
        nothing = [None] * len(said)
        rubrics = nothing if self.rubric_column is None else columns[self.rubric_column]
        references = nothing if self.reference is None else columns[self.reference]
        together = zip(said, prompts, rubrics, references, seeds or nothing, strict=True)
        return self.ask([JudgedRow(prompt_text(prompt), self.rubric if rubric in (None, "") else str(rubric),
                             None if known is None else str(known), shown, seed)
                         for shown, prompt, rubric, known, seed in together])

    @abstractmethod
    def ask(self, rows: list[JudgedRow]) -> list[JudgeRequest]:
        """Return the requests about these rows."""

    def worth(self, score: float) -> float:
        """Return the reward for a score."""
        return (score - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class SingleForm(JudgeForm):
    """One question for each completion."""

    def ask(self, rows: list[JudgedRow]) -> list[JudgeRequest]:
        places: dict[JudgedRow, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(replace(row, seed=None), []).append(place)
        return [JudgeRequest([members], Question(
            row.prompt, (str(row.said),), row.rubric, row.reference, False, self.low, self.high,
        )) for row, members in places.items()]


@dataclass(frozen=True)
class GroupForm(JudgeForm):
    """One question for each group (consecutive completions with the same prompt), with identical completions shown
    once, and multi-message episodes as a whole. If all are identical, nothing is asked."""

    def read(self, completion: Any) -> str | Transcript:
        """Return a completion's text, or the transcript of a chat with more than one message."""
        if isinstance(completion, list) and len(completion) > 1:
            return transcript_of(list(completion))
        return completion_text(completion)

    def ask(self, rows: list[JudgedRow]) -> list[JudgeRequest]:
        groups = groupby(enumerate(rows), lambda item: (common(item[1]), item[1].seed))
        return [self.group(list(members)) for _, members in groups]

    def group(self, rows: list[tuple[int, JudgedRow]]) -> JudgeRequest:
        places: dict[str | Transcript, list[int]] = {}
        for place, row in rows:
            places.setdefault(row.said, []).append(place)
        if len(places) == 1:
            (said,) = places
            empty = isinstance(said, str) and not said.strip()
            return JudgeRequest(list(places.values()), equal=0.0 if empty else EQUAL)
        return JudgeRequest(list(places.values()), question_of(list(places), *common(rows[0][1])))


def question_of(answers: list[str | Transcript], prompt: str, rubric: str, reference: str | None) -> Question:
    """Return the question about distinct answers side by side; if one is a transcript, all are shown as transcripts."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    if len(texts) == len(answers):
        return Question(prompt, tuple(texts), rubric, reference, grouped=True)
    episodes = [transcript_of([{"role": "assistant", "content": answer}]) if isinstance(answer, str) else answer
                for answer in answers]
    return compared(prompt, episodes, rubric, reference)


def common(row: JudgedRow) -> tuple[str, str, str | None]:
    return row.prompt, row.rubric, row.reference


def transcript_of(messages: Sequence[Mapping[str, Any]]) -> Transcript:
    """Return one JSON line for each message: its role, content and tool calls."""
    return tuple(map(line_of, messages))


def line_of(message: Mapping[str, Any]) -> str:
    role, content = str(message.get("role", "")), message.get("content")
    said: dict[str, Any] = {"role": role, "content": content if role == "assistant" else shortened(content)}
    if calls := message.get("tool_calls"):
        said["calls"] = [call_of(call) for call in calls]
    return as_line(said)


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call's name and its arguments, parsed if they are JSON."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # arguments that are not JSON stay text
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def shortened(content: Any) -> Any:
    """Return a text with its middle cut out if it is longer than RESULT_CHARS."""
    if not isinstance(content, str) or len(content) <= RESULT_CHARS:
        return content
    half = RESULT_CHARS // 2
    return f"{content[:half]} [... {len(content) - 2 * half} characters are left out here ...] {content[-half:]}"


def as_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def compared(prompt: str, transcripts: Sequence[Transcript], rubric: str, reference: str | None = None) -> Question:
    """Return the question about transcripts side by side; the lines that all begin with go to the prompt."""
    least = min(map(len, transcripts))
    shared = next((number for number in range(least) if len({lines[number] for lines in transcripts}) > 1), least)
    task = "\n".join(filter(None, [prompt, *transcripts[0][:shared]]))
    rest = tuple("\n".join(lines[shared:]) or NOTHING for lines in transcripts)
    return Question(task, rest, rubric, reference, grouped=True, transcripts=True)
