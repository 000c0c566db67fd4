"""What a judge is asked: a text, the form of the reply, and how a reply is read."""

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowmem_grpo.rewards.judge.controls import broken
from lowmem_grpo.rewards.judge.replies import read_group, read_single, writable
from lowmem_grpo.rewards.judge.rubrics import AGAIN, GROUP_REPLY, GROUP_TASK, MATERIAL, SINGLE_REPLY, SINGLE_TASK

Ratings = list[tuple[float, str]]  # (score, reason) of each answer of a question


@dataclass(frozen=True)
class Question:
    """One call of a judge: some answers to one prompt, to be scored from `low` to `high`."""

    prompt: str
    answers: tuple[str, ...]
    rubric: str
    reference: str | None = None  # a good answer, for the judge alone
    grouped: bool = False  # side by side, relative to each other; else there is one answer
    low: float = 0.0
    high: float = 1.0

    @property
    def mark(self) -> str:
        """Stands on every line around the material. It depends on all of it, so that no text can hold its own."""
        return digest([self.prompt, *self.answers, self.rubric, self.reference or ""])[:12]

    @property
    def system(self) -> str:
        """Rubric and rules."""
        count = len(self.answers)
        task = GROUP_TASK.format(count=count) if self.grouped else SINGLE_TASK
        reply = (GROUP_REPLY if self.grouped else SINGLE_REPLY).format(count=count, low=self.low, high=self.high)
        return "\n\n".join([task, self.rubric.strip(), MATERIAL.format(mark=self.mark), reply])

    @property
    def user(self) -> str:
        """The material: the task once, a reference where there is one, each answer; control tokens broken."""
        parts = [("TASK", self.prompt)]
        if self.reference is not None:
            parts.append(("REFERENCE ANSWER (a guide for you; other answers can be right too)", self.reference))
        names = [f"ANSWER {number}" for number in range(1, len(self.answers) + 1)] if self.grouped else ["ANSWER"]
        parts += zip(names, self.answers, strict=True)
        return "\n\n".join(f"=== {name} {self.mark}\n{broken(text)}\n=== END {self.mark}" for name, text in parts)

    def messages(self, fault: str | None = None) -> list[dict[str, str]]:
        """As chat messages; `fault` is what was wrong with the reply before, not in its words."""
        user = self.user if fault is None else f"{self.user}\n\n{AGAIN.format(fault=fault)}"
        return [{"role": "system", "content": writable(self.system)}, {"role": "user", "content": writable(user)}]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the reply, as strict structured output takes it; bounds are checked in reading."""
        entry = {"reason": {"type": "string"}, "score": {"type": "number"}}
        if not self.grouped:
            return closed_object(entry)
        item = closed_object({"id": {"type": "integer"}, **entry})
        return closed_object({"scores": {"type": "array", "items": item}})

    def read(self, reply: str) -> Ratings:
        """(score, reason) of each answer, in order; BadReplyError where the reply is anything else."""
        read = partial(read_group, count=len(self.answers)) if self.grouped else read_single
        return read(reply, low=self.low, high=self.high)

    def key(self, judge: str) -> str:
        """What a cache knows it by: of the judge and of everything that is said to it."""
        return digest([judge, self.system, self.user])


def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    """A schema of an object with these properties, all of them, and no other."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def digest(texts: list[str]) -> str:
    """SHA-256 of some texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
