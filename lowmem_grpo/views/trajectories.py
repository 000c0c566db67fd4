"""Episodes as a report and a terminal show them: what was sampled told from what came from outside, and the end."""

import json
from typing import Any

from lowmem_grpo.views.headline import clipped

Record = dict[str, Any]

SAMPLED_SIGN, CONTEXT_SIGN = "\u25cf", "\u25cb"  # a full circle and an empty one
MOST_TURNS = 40  # of an episode that a page shows
TEXTS = 3  # an episode may have as many characters as so many single texts
FEWEST = 80  # characters of a text in it


def shown_turns(turns: list[Record], longest: int) -> list[Record]:
    """What a page shows of the turns of an episode: texts are cut so that all together have about three times the
    length of one, and of very many turns the middle is left out."""
    half = MOST_TURNS // 2
    numbered = [{"number": number, **turn} for number, turn in enumerate(turns, start=1)]
    kept = numbered if len(turns) <= MOST_TURNS else [*numbered[:half], *numbered[-half:]]
    texts = sum(1 + len(turn.get("replies") or ()) for turn in kept)
    each = max(FEWEST, min(longest, TEXTS * longest // max(1, texts)))
    return [shown_turn(turn, each) for turn in kept]


def shown_turn(turn: Record, longest: int) -> Record:
    """A turn with its texts cut, and its calls of tools as text."""
    found = turn | {"text": clipped(str(turn.get("text", "")), longest)}
    if turn.get("calls"):
        found["calls"] = [clipped(call_text(call), longest) for call in turn["calls"]]
    if turn.get("replies"):
        found["replies"] = [reply | {"content": clipped(str(reply.get("content", "")), longest)}
                            for reply in turn["replies"]]
    return found


def call_text(call: Record) -> str:
    """A call of a tool as people write it: multiply(a=6, b=7)."""
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return f"{call.get('name')}({'' if arguments is None else arguments})"
    given = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{call.get('name')}({given})"
