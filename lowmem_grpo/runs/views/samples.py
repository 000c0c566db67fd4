"""The samples of a run for a page: a bounded number, spread over the steps, with texts cut. Lines of completions.jsonl
are not trusted: fields of unexpected types are left out."""

import json
from collections import defaultdict, deque
from statistics import fmean
from typing import Any

from lowmem_grpo.runs.records import PICTURE
from lowmem_grpo.runs.views.chart import even_places
from lowmem_grpo.utils import visible

Record = dict[str, Any]

LONGEST, SHORTEST = 4000, 80  # characters of a text; texts of an episode are cut further, down to SHORTEST
TEXTS = 3  # the texts of an episode together may have TEXTS * LONGEST characters
MOST_TURNS, MOST_OF_A_TURN = 40, 20  # turns of an episode; calls and replies of a turn
MOST_REWARDS, LONGEST_NAME, MOST_IMAGES = 64, 200, 8
LARGEST = 1e300  # larger values cannot be drawn
LAST_STEPS, MOST_COMMON = 5, 5  # steps of which the commonest completions are shown, and their number
WHOLE_GROUP = 8  # completions of a step worth keeping together, before steps are left out
NUMBER = (int, float)
OF_SAMPLE: dict[str, Any] = {
    "step": NUMBER, "prompt": str, "completion": str, "reward": NUMBER, "advantage": NUMBER, "tokens": NUMBER,
    "finish_reason": str, "ending": str, "num_turns": NUMBER, "sampled_tokens": NUMBER, "sequences": NUMBER,
    "replayed_from": NUMBER,
}
OF_TURN: dict[str, Any] = {
    "text": str, "reward": NUMBER, "failures": NUMBER, "cut_off": bool, "tokens": NUMBER, "context": NUMBER,
    "rewritten": bool, "cached": NUMBER, "prompt_tokens": NUMBER, "seconds": NUMBER,
}


def shown_sample(record: Record) -> Record:
    """Return the part of a completion's record that a page shows; an episode shows turns instead of a completion."""
    sample = fields_of(record, OF_SAMPLE, LONGEST)
    if not isinstance(record.get("prompt"), str | None):
        sample["prompt"] = clipped(json.dumps(record["prompt"], ensure_ascii=False), LONGEST)
    if isinstance(names := record.get("images"), list):
        sample["images"] = [name for name in names[:MOST_IMAGES] if isinstance(name, str) and PICTURE.fullmatch(name)]
    if isinstance(rewards := record.get("rewards"), dict):
        sample["rewards"] = {name[:LONGEST_NAME]: value for name, value in list(rewards.items())[:MOST_REWARDS]
                             if value is None or fits(value, NUMBER)}
    if isinstance(turns := record.get("turns"), list) and turns:
        sample["turns"] = shown_turns([turn for turn in turns if isinstance(turn, dict)])
        sample.pop("completion", None)
    return sample


def shown_turns(turns: list[Record]) -> list[Record]:
    """Return at most `MOST_TURNS` turns of an episode for a page, with about `TEXTS * LONGEST` characters in all."""
    half = MOST_TURNS // 2
    numbered = [{"number": number, **turn} for number, turn in enumerate(turns, start=1)]
    kept = numbered if len(turns) <= MOST_TURNS else [*numbered[:half], *numbered[-half:]]
    texts = sum(1 + len(parts_of(turn, "replies")) for turn in kept)
    longest = max(SHORTEST, min(LONGEST, TEXTS * LONGEST // max(1, texts)))
    return [shown_turn(turn, longest) for turn in kept]


def shown_turn(turn: Record, longest: int) -> Record:
    shown = {"number": turn["number"], "text": ""} | fields_of(turn, OF_TURN, longest)
    if calls := parts_of(turn, "calls"):
        shown["calls"] = [clipped(call_text(call), longest) for call in calls]
    if replies := parts_of(turn, "replies"):
        shown["replies"] = [fields_of(reply, {"role": str, "name": str, "content": str}, longest) for reply in replies]
    return shown


def parts_of(turn: Record, name: str) -> list[Record]:
    parts = turn.get(name)
    return [part for part in parts[:MOST_OF_A_TURN] if isinstance(part, dict)] if isinstance(parts, list) else []


def fields_of(record: Record, kinds: dict[str, Any], longest: int) -> Record:
    """Return the fields of a record that have the expected type, with texts cut to about `longest` characters."""
    kept = {name: record[name] for name, kind in kinds.items() if fits(record.get(name), kind)}
    return {name: clipped(value, longest) if isinstance(value, str) else value for name, value in kept.items()}


def fits(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is not NUMBER or abs(value) < LARGEST)


def clipped(text: str, longest: int) -> str:
    text, half = visible(text), longest // 2
    left_out = len(text) - 2 * half
    return text if len(text) <= longest else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def call_text(call: Record) -> str:
    """Return a tool call in the form multiply(a=6, b=7)."""
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return f"{call.get('name')}({'' if arguments is None else arguments})"
    values = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{call.get('name')}({values})"


def thinned(samples: list[Record], limit: int) -> list[Record]:
    """Return at most `limit` samples: the first ones of evenly spaced steps, among them the first and the last step."""
    if len(samples) <= limit:
        return samples
    by_step: dict[int, list[Record]] = defaultdict(list)
    for sample in samples:
        by_step[sample["step"]].append(sample)
    steps = sorted(by_step)
    per_step = min(limit, max(WHOLE_GROUP, limit // len(steps)))
    count = min(len(steps), limit // per_step)
    kept = steps[-1:] if count == 1 else [steps[place] for place in even_places(len(steps), count)]
    return [sample for step in kept for sample in by_step[step][:per_step]]


def commonest(samples: list[Record]) -> Record | None:
    """Return the completions that occur most often in the last steps, with their number and mean reward; None if no
    completion occurs twice."""
    last = sorted({sample["step"] for sample in samples})[-LAST_STEPS:]
    rewards: dict[str, list[float | None]] = defaultdict(list)
    for sample in samples:
        if sample["step"] in last and "completion" in sample:
            rewards[sample["completion"]].append(sample.get("reward"))
    total, most = sum(map(len, rewards.values())), sorted(rewards.items(), key=lambda pair: -len(pair[1]))
    rows = []
    for text, paid in most[:MOST_COMMON]:
        known = [reward for reward in paid if reward is not None]
        if len(paid) > 1:
            rows.append({"text": text, "count": len(paid), "reward": fmean(known) if known else None})
    return {"total": total, "steps": len(last), "rows": rows} if rows else None


def fitting(samples: list[Record], limit: int, room: int) -> list[Record]:
    """Return at most `limit` samples, spread over the run, that take at most `room` bytes of a page."""
    while limit > 0:
        kept = thinned(samples, limit)
        taken = len(json_text(kept).encode("utf-8", errors="replace"))
        if taken <= room:
            return kept
        limit = min(len(kept) - 1, int(0.95 * len(kept) * room / taken))
    return []


def json_text(value: Any) -> str:
    """Return JSON that is safe inside a script element of a page."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


class Reservoir:
    """A bounded sample of a growing run: at most `limit` samples of evenly spaced steps, and the `newest` samples."""

    def __init__(self, limit: int, newest: int = 0) -> None:
        self.limit, self.every = limit, 1
        self.kept: list[Record] = []
        self.tail: deque[Record] = deque(maxlen=newest)

    def add_sample(self, sample: Record) -> None:
        self.tail.append(sample)
        if sample["step"] % self.every == 0:
            self.kept.append(sample)
        if len(self.kept) > self.limit:
            self.every *= 2
            fewer = [held for held in self.kept if held["step"] % self.every == 0]
            # the first half, if all are of one step or the steps are out of order
            self.kept = fewer if 0 < len(fewer) <= self.limit else self.kept[: self.limit // 2]

    def samples(self) -> list[Record]:
        steps = {sample["step"] for sample in self.kept}
        return sorted([*self.kept, *(sample for sample in self.tail if sample["step"] not in steps)],
                      key=lambda sample: sample["step"])
