"""Turns completions into questions for a judge: one by one, or the completions of a group side by side.

Whole trajectories are read a message a line, as JSON, so that no message can look like two. What all trajectories of a
group began with is shown once.
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

EQUAL = 0.5  # the reward of completions that have none to be compared with
RESULT_CHARS = 4000  # for what was said to the agent in one message; a longer text loses its middle
NOTHING = "(nothing more)"

Transcript = tuple[str, ...]  # lines


@dataclass(frozen=True)
class JudgedRow:
    """A completion, and what it is judged by."""

    prompt: str
    rubric: str
    reference: str | None
    said: str | Transcript
    seed: object = None  # an episode's, from its environment


@dataclass(frozen=True)
class JudgeRequest:
    """A question, and the numbers of the completions behind each of its answers. Without a question all get `equal`."""

    places: list[list[int]]
    question: Question | None = None
    equal: float = EQUAL


@dataclass(frozen=True)
class JudgeForm(ABC):
    """The way in which completions are put to a judge, and what its scores are worth."""

    rubric: str
    rubric_column: str | None  # the dataset column with a row's own rubric
    reference: str | None  # the dataset column with a row's reference answer

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in (self.rubric_column, self.reference) if name is not None))

    def read(self, completion: Any) -> Any:
        """Return what the judge sees of a completion: of a chat the assistant's last message."""
        return completion_text(completion)

    def questions(
        self, said: list[Any], columns: dict[str, list[Any]], prompts: list[Any], seeds: list[Any] | None = None
    ) -> list[JudgeRequest]:
        """Return questions about N completions. Each completion has one place in one of them."""
        nothing = [None] * len(said)
        rubrics = nothing if self.rubric_column is None else columns[self.rubric_column]
        references = nothing if self.reference is None else columns[self.reference]
        together = zip(said, prompts, rubrics, references, seeds or nothing, strict=True)
        return self.ask([JudgedRow(prompt_text(prompt), self.rubric if rubric in (None, "") else str(rubric),
                             None if known is None else str(known), shown, seed)
                         for shown, prompt, rubric, known, seed in together])

    @abstractmethod
    def ask(self, rows: list[JudgedRow]) -> list[JudgeRequest]:
        """Return the questions about completions with their prompts, rubrics and references."""

    @abstractmethod
    def worth(self, score: float) -> float:
        """Return the reward for a score."""


@dataclass(frozen=True)
class SingleForm(JudgeForm):
    """Each completion by itself, on a scale from `low` to `high`; rewards go from 0 to 1."""

    low: float
    high: float

    def ask(self, rows: list[JudgedRow]) -> list[JudgeRequest]:
        places: dict[JudgedRow, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(replace(row, seed=None), []).append(place)
        return [JudgeRequest([members], Question(
            row.prompt, (str(row.said),), row.rubric, row.reference, False, self.low, self.high,
        )) for row, members in places.items()]

    def worth(self, score: float) -> float:
        return (score - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class GroupForm(JudgeForm):
    """The completions of each group in one question, identical ones once. A group is completions in a row with the same
    prompt. If there is nothing to compare, nothing is asked. Episodes of several messages are compared as a whole."""

    def read(self, completion: Any) -> str | Transcript:
        """Return a text, or the lines of a chat with more than one message."""
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

    def worth(self, score: float) -> float:
        return score


def question_of(answers: list[str | Transcript], prompt: str, rubric: str, reference: str | None) -> Question:
    """Different answers side by side; if one of them is an episode, all are shown as such."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    if len(texts) == len(answers):
        return Question(prompt, tuple(texts), rubric, reference, grouped=True)
    episodes = [transcript_of([{"role": "assistant", "content": answer}]) if isinstance(answer, str) else answer
                for answer in answers]
    return compared(prompt, episodes, rubric, reference)


def common(row: JudgedRow) -> tuple[str, str, str | None]:
    return row.prompt, row.rubric, row.reference


def transcript_of(messages: Sequence[Mapping[str, Any]]) -> Transcript:
    """Return a line for each message: its role, what it says, and its calls."""
    return tuple(map(line_of, messages))


def line_of(message: Mapping[str, Any]) -> str:
    role, content = str(message.get("role", "")), message.get("content")
    said: dict[str, Any] = {"role": role, "content": content if role == "assistant" else shortened(content)}
    if calls := message.get("tool_calls"):
        said["calls"] = [call_of(call) for call in calls]
    return as_line(said)


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's name, and its arguments as they were meant."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what is no JSON is shown as it was written
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def shortened(content: Any) -> Any:
    """Return a text without its middle if it is too long."""
    if not isinstance(content, str) or len(content) <= RESULT_CHARS:
        return content
    half = RESULT_CHARS // 2
    return f"{content[:half]} [... {len(content) - 2 * half} characters are left out here ...] {content[-half:]}"


def as_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def compared(prompt: str, transcripts: Sequence[Transcript], rubric: str, reference: str | None = None) -> Question:
    """Return the question about these trajectories side by side, below `prompt` and what all of them began with."""
    least = min(map(len, transcripts))
    shared = next((number for number in range(least) if len({lines[number] for lines in transcripts}) > 1), least)
    task = "\n".join(filter(None, [prompt, *transcripts[0][:shared]]))
    rest = tuple("\n".join(lines[shared:]) or NOTHING for lines in transcripts)
    return Question(task, rest, rubric, reference, grouped=True, transcripts=True)
