"""An episode in completions.jsonl, turn by turn, and as a text that people read."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.types import Message, Rollout, Turn  # which needs torch: a report is written without it

ENDINGS = {  # why an episode ends, in words
    "done": "the environment, or the code that plays, said that it is over",
    "answer": "a turn without a call of a tool",
    "max_turns": "no more turns are allowed",
    "max_tokens": "no room for another turn in max_completion_length",
    "context": "what came back did not fit",
    "parse_error": "calls of tools that could not be read, three in a row",
    "timeout": "a tool or the environment took too long; left out of training",
    "environment_error": "the environment failed; left out of training",
}


def episode_fields(rollout: "Rollout") -> dict[str, Any]:
    """Return the fields of a line that only an episode has; `sampled_tokens` counts what the policy drew."""
    values = {"ending": rollout.ending, "num_turns": len(rollout.turns),
             "sampled_tokens": None if rollout.trained is None else rollout.num_trained,
             "sequences": sequences(rollout), "turns": turn_records(rollout)}
    return {name: value for name, value in values.items() if value not in (None, "", 0, [])}


def sequences(rollout: "Rollout") -> int | None:
    """Return how many sequences an episode is, if the template rewrote the history; None for one."""
    starts = {0, *(split.start for split in rollout.splits)}  # one at 0 has only another prompt than the group
    return len(starts) if len(starts) > 1 else None


def turn_records(rollout: "Rollout") -> list[dict[str, Any]]:
    """A record for each turn; what is 0, empty or unknown is left out."""
    new = [new_context(*pair, bool(rollout.splits)) for pair in pairwise(rollout.turns)]
    return [turn_record(turn, each) for turn, each in zip(rollout.turns, [{}, *new], strict=False)]


def new_context(before: "Turn", turn: "Turn", split: bool) -> dict[str, Any]:
    """Return how many tokens came between two turns, or how many a rewritten history's new prompt has."""
    held = len(before.prompt_ids) + len(before.completion_ids)
    if split and turn.prompt_ids[:held] != before.prompt_ids + before.completion_ids:
        return {"context": len(turn.prompt_ids), "rewritten": True}
    return {"context": len(turn.prompt_ids) - held}


def turn_record(turn: "Turn", new: dict[str, Any]) -> dict[str, Any]:
    """A turn: the text and the tokens that were sampled, what was read from them, what came back, and its reward."""
    calls = [call.get("function", call) for call in turn.message.get("tool_calls") or []]
    values = new | {"prompt_tokens": len(turn.prompt_ids), "cached": turn.cached_tokens, "failures": turn.failures,
                    "seconds": round(turn.seconds, 3), "cut_off": turn.finish_reason == "length",
                    "calls": [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls],
                    "replies": [reply_record(reply) for reply in turn.replies]}
    kept = {name: value for name, value in values.items() if value}
    paid = {} if turn.reward is None else {"reward": turn.reward}
    return {"text": turn.text, "tokens": len(turn.completion_ids), **kept, **paid}


def reply_record(reply: "Message") -> dict[str, Any]:
    named = {"name": reply["name"]} if reply.get("name") else {}
    return {"role": reply.get("role", "user"), **named, "content": content_text(reply)}


def content_text(message: "Message") -> str:
    """A message's content as a text; of content in blocks the texts, and the kinds of the others."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(block.get("text", f"[{block.get('type')}]")) if isinstance(block, dict) else str(block)
                     for block in content)


def speaker(reply: dict[str, Any]) -> str:
    return f"{reply['role']} {reply['name']}" if reply.get("name") else str(reply["role"])


def transcript(turns: list[dict[str, Any]]) -> str:
    """The records of an episode's turns as a text: who said what, and what was paid."""
    parts = []
    for number, turn in enumerate(turns, start=1):
        paid = f", reward {turn['reward']:g}" if "reward" in turn else ""
        parts.append(f"[{number}. assistant{paid}]\n{turn['text']}")
        parts += [f"[{speaker(reply)}]\n{reply['content']}" for reply in turn.get("replies", ())]
    return "\n".join(parts)
