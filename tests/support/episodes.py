"""Episodes made by hand: a game of two turns, and a question that is answered with a tool."""

from typing import Any

from lowmem_grpo.types import Rollout, Turn

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}


def turn(text: str, *replies: dict[str, Any], reward: float | None = None, **more: Any) -> Turn:
    """A turn that sampled two tokens, and what came back; `episode` gives it its prompt."""
    made = Turn([], [11, 12], [-0.5, -0.25], "stop", text, replies=list(replies), reward=reward, **more)
    made.message = {"role": "assistant", "content": text}
    return made


def episode(*turns: Turn, ending: str = "done", context: int = 3, **more: Any) -> Rollout:
    """The rollout of these turns after a prompt of three tokens, with so many of context between two turns."""
    ids, logprobs, trained = [], [], []  # type: ignore[var-annotated]
    for number, each in enumerate(turns):
        gap = context if number else 0
        each.prompt_ids = [1, 2, 3, *ids, *[9] * gap]
        ids += [9] * gap + each.completion_ids
        logprobs += [0.0] * gap + each.logprobs
        trained += [False] * gap + [True] * len(each.completion_ids)
    text = turns[-1].text if turns else ""
    return Rollout(ids, logprobs, "stop", text, trained=trained, turns=list(turns), ending=ending, **more)


def game(**more: Any) -> Rollout:
    """Two guesses, the second of which is right."""
    lower, right = ({"role": "user", "content": content} for content in ("Lower.", "Right!"))
    return episode(turn("50", lower, reward=0.0, seconds=0.1), turn("25", right, reward=1.0, cached_tokens=8), **more)


def tool_use(**more: Any) -> Rollout:
    """A call of a tool, and the answer that follows."""
    result = {"role": "tool", "name": "multiply", "content": "42"}
    asked = turn("6 times 7", result, calls=1, seconds=0.2)
    asked.message["tool_calls"] = [CALL]
    return episode(asked, turn("The answer is 42."), ending="answer", **more)


