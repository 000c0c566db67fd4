"""Whole trajectories as a judge reads them: a message a line, as JSON, so that no message can look like two.

What all trajectories of a group began with is shown once.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lowmem_grpo.rewards.judge.question import Question

RESULT_CHARS = 4000  # of what was said to the agent in one message; a longer text loses its middle
NOTHING = "(nothing more)"

Transcript = tuple[str, ...]  # lines


def transcript_of(messages: Sequence[Mapping[str, Any]]) -> Transcript:
    """A line for each message: its role, what it says, and its calls."""
    return tuple(map(line_of, messages))


def line_of(message: Mapping[str, Any]) -> str:
    role, content = str(message.get("role", "")), message.get("content")
    said: dict[str, Any] = {"role": role, "content": content if role == "assistant" else shortened(content)}
    if calls := message.get("tool_calls"):
        said["calls"] = [call_of(call) for call in calls]
    return as_line(said)


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call's name, and its arguments as they were meant."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what is no JSON is shown as it was written
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def shortened(content: Any) -> Any:
    """A text without its middle if it is too long."""
    if not isinstance(content, str) or len(content) <= RESULT_CHARS:
        return content
    half = RESULT_CHARS // 2
    return f"{content[:half]} [... {len(content) - 2 * half} characters are left out here ...] {content[-half:]}"


def as_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def compared(
    prompt: str, transcripts: Sequence[Transcript], rubric: str, reference: str | None = None
) -> Question:
    """The question about these trajectories side by side; they are not all alike. `prompt` stands above what all of
    them began with."""
    least = min(map(len, transcripts))
    shared = next((number for number in range(least) if len({one[number] for one in transcripts}) > 1), least)
    task = "\n".join(filter(None, [prompt, *transcripts[0][:shared]]))
    rest = tuple("\n".join(one[shared:]) or NOTHING for one in transcripts)
    return Question(task, rest, rubric, reference, grouped=True, transcripts=True)
