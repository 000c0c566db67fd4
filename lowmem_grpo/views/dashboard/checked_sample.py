"""A line of completions.jsonl as a page can trust it: what has another form than a run writes is left out."""

import json
from typing import Any

Record = dict[str, Any]

MOST_REWARDS = 64
LARGEST = 1e300
NUMBERS = ("reward", "advantage")
COUNTS = ("tokens", "num_turns", "sampled_tokens", "sequences")
TEXTS = ("completion", "finish_reason", "ending")
OF_TURN: dict[str, Any] = {
    "text": str, "calls": list, "replies": list, "reward": (int, float), "failures": int, "cut_off": bool,
    "tokens": int, "context": int, "rewritten": bool, "cached": int, "prompt_tokens": int, "seconds": (int, float),
}


def checked_sample(record: Record) -> Record:
    """The record with fields of the right types only; `step` was checked before."""
    found: Record = {"step": record["step"], "prompt": as_text(record.get("prompt"))}
    found |= {name: record[name] for name in TEXTS if isinstance(record.get(name), str)}
    found |= {name: record[name] for name in NUMBERS if is_number(record.get(name))}
    found |= {name: record[name] for name in COUNTS if is_number(record.get(name))}
    rewards = record.get("rewards")
    if isinstance(rewards, dict):
        found["rewards"] = {name: value for name, value in list(rewards.items())[:MOST_REWARDS]
                            if value is None or is_number(value)}
    if isinstance(turns := record.get("turns"), list):
        found["turns"] = [checked_turn(turn) for turn in turns if isinstance(turn, dict)]
    return found | ({"replayed_from": record["replayed_from"]} if is_number(record.get("replayed_from")) else {})


def checked_turn(turn: Record) -> Record:
    """A turn of an episode."""
    found = {name: turn[name] for name, kind in OF_TURN.items() if isinstance(turn.get(name), kind)}
    found["calls"] = [call for call in found.get("calls", ()) if isinstance(call, dict)]
    found["replies"] = [{name: as_text(reply.get(name)) for name in ("role", "name", "content") if reply.get(name)}
                        for reply in found.get("replies", ()) if isinstance(reply, dict)]
    return found


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST
