"""Episodes as records in completions.jsonl, turn by turn, and as readable transcripts."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.types import Message, Rollout, Turn  # needs torch, which reports do without

ENDINGS = {  # descriptions of the endings of an episode
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
    """Return an episode's fields in completions.jsonl; fields that are 0 or empty are left out."""
    starts = {0, *(split.start for split in rollout.splits)}  # a split at 0 only has another prompt than the group
    values = {"ending": rollout.ending, "num_turns": len(rollout.turns),
             "sampled_tokens": None if rollout.trained is None else rollout.num_trained,
             "sequences": len(starts) if len(starts) > 1 else None, "turns": turn_records(rollout)}
    return {name: value for name, value in values.items() if value not in (None, "", 0, [])}


def turn_records(rollout: "Rollout") -> list[dict[str, Any]]:
    new = [new_context(*pair, bool(rollout.splits)) for pair in pairwise(rollout.turns)]
    return [turn_record(turn, each) for turn, each in zip(rollout.turns, [{}, *new], strict=False)]


def new_context(before: "Turn", turn: "Turn", split: bool) -> dict[str, Any]:
    """Return the number of tokens between two turns. If the history was rewritten, count the whole new prompt."""
    held = len(before.prompt_ids) + len(before.completion_ids)
    if split and turn.prompt_ids[:held] != before.prompt_ids + before.completion_ids:
        return {"context": len(turn.prompt_ids), "rewritten": True}
    return {"context": len(turn.prompt_ids) - held}


def turn_record(turn: "Turn", new: dict[str, Any]) -> dict[str, Any]:
    """Return a turn's record: the sampled text and its number of tokens, tool calls, replies, and reward."""
    calls = [call.get("function", call) for call in turn.message.get("tool_calls") or []]
    values = new | {"prompt_tokens": len(turn.prompt_ids), "cached": turn.cached_tokens, "failures": turn.failures,
                    "seconds": round(turn.seconds, 3), "cut_off": turn.finish_reason == "length",
                    "calls": [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls],
                    "replies": [{"role": reply.get("role", "user"),
                                 **({"name": reply["name"]} if reply.get("name") else {}),
                                 "content": content_text(reply)} for reply in turn.replies]}
    kept = {name: value for name, value in values.items() if value}
    paid = {} if turn.reward is None else {"reward": turn.reward}
    return {"text": turn.text, "tokens": len(turn.completion_ids), **kept, **paid}


def content_text(message: "Message") -> str:
    """Return a message's content as text; a block that is not text is shown by its type, such as [image]."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(block_text(block) if isinstance(block, dict) else str(block) for block in content)


def block_text(block: dict[str, Any]) -> str:
    said = block.get("text")  # None too, where other blocks of a dataset's column have text
    return f"[{block.get('type')}]" if said is None else str(said)


def speaker(reply: dict[str, Any]) -> str:
    return f"{reply['role']} {reply['name']}" if reply.get("name") else str(reply["role"])


def transcript(turns: list[dict[str, Any]]) -> str:
    """Return a readable transcript of an episode's turn records, with speakers and rewards."""
    parts = []
    for number, turn in enumerate(turns, start=1):
        paid = f", reward {turn['reward']:g}" if "reward" in turn else ""
        parts.append(f"[{number}. assistant{paid}]\n{turn['text']}")
        parts += [f"[{speaker(reply)}]\n{reply['content']}" for reply in turn.get("replies", ())]
    return "\n".join(parts)
