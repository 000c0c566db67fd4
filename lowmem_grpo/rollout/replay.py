"""The replay buffer keeps groups with signal. Each kept group can later replace one group without signal."""

import base64
import logging
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import pstdev
from typing import Any

import torch

from lowmem_grpo.models.routes import Routes, give_routes, routes_of
from lowmem_grpo.types import TOKEN_FIELDS, ImageToken, Rollout, RolloutGroup, Split, Turn

logger = logging.getLogger(__name__)
FLOATS, INTEGERS, FLAGS = "d", "i", "b"  # 8, 4 and 1 bytes, enough to store every value exactly
KINDS = (INTEGERS, INTEGERS, FLOATS)  # a turn's prompt, completion and log-probabilities
OF_TURN = ("finish_reason", "text", "policy_version", "cached_tokens", "message", "replies", "reward", "state", "calls",
           "failures", "seconds", "exact")
PLAIN = ("finish_reason", "text", "reward", "ending", "opening", "unit")  # fields that are JSON values
OF_ROLLOUT = (*PLAIN, "policy_version", "trained", "splits", "turns", "routes")  # kept as they were sampled


class ReplayBuffer:
    """At most `size` sampled and scored groups, oldest first. The buffer prefers groups whose rewards spread more, and
    newer groups among equals. Each group is returned once, without `extras` and the fields that an update fills in."""

    def __init__(self, size: int, max_age: int | None = None) -> None:
        self.size, self.max_age = size, max_age
        self.entries: tuple[RolloutGroup, ...] = ()  # replaced, never mutated, so that an older tuple can be restored

    def __len__(self) -> int:
        return len(self.entries)

    def offer(self, groups: Iterable[RolloutGroup]) -> None:
        """Keep copies of fresh groups if there is room, or if their rewards spread more than those of a kept group."""
        kept = [*self.entries, *map(as_sampled, filter(usable, groups))]
        self.entries = tuple(kept[place] for place in sorted(by_spread(kept)[: self.size]))

    def take_groups(self, count: int, policy_version: int) -> list[RolloutGroup]:
        """Remove and return up to `count` groups, marked as replayed. Drops groups too old for this policy version."""
        young = [group for group in self.entries
                 if self.max_age is None or age_of(group, policy_version) <= self.max_age]
        order = by_spread(young)
        self.entries = tuple(young[place] for place in sorted(order[count:]))
        return [replace(as_sampled(young[place]), replayed=True) for place in order[:count]]

    def state(self) -> list[dict[str, Any]]:
        """Return JSON values for `restore`: about 16 characters per token, the texts, and the index of each row."""
        return [pack_group(group) for group in self.entries]

    def restore(self, state: list[dict[str, Any]], dataset: Any, names: Sequence[str], num_generations: int,
                encoder: Any = None) -> None:
        """Restore a `state`. Groups of another size, with other reward functions or with other images (`encoder` reads
        them again) are left out, with a warning."""
        fit = [packed for packed in state if len(packed["rollouts"]) == num_generations
               and all(set(rollout["rewards"]) == set(names) for rollout in packed["rollouts"])]
        groups = [unpack_group(packed, dataset[packed["row"]]) for packed in fit]
        self.entries = tuple(group for group in groups if has_images_again(group, encoder))
        if len(self.entries) < len(state):
            logger.warning(
                "%d of %d groups kept for replay are left out: num_generations, the reward functions or the images "
                "have changed", len(state) - len(self.entries), len(state),
            )
        self.offer([])  # the buffer may have become smaller


def has_images_again(group: RolloutGroup, encoder: Any) -> bool:
    """Read the images of a restored group's row again, if it has some; return False if they are others now."""
    if encoder is None or ImageToken not in map(type, group.prompt_ids):
        return True
    prompt = encoder.encode(group.row)
    if same := not isinstance(prompt, str) and prompt.ids == group.prompt_ids:
        group.prompt_ids = prompt.ids
    return same


def age_of(group: RolloutGroup, policy_version: int) -> int:
    return policy_version - min(rollout.policy_version for rollout in group.rollouts)


def by_spread(groups: Sequence[RolloutGroup]) -> list[int]:
    """Return the indices of groups, largest standard deviation of rewards first, and the newest first among equals."""
    rewards = [[rollout.reward for rollout in group.rollouts if rollout.reward is not None] for group in groups]
    return sorted(range(len(groups)), key=lambda place: (pstdev(rewards[place] or [0.0]), place), reverse=True)


def as_sampled(group: RolloutGroup) -> RolloutGroup:
    """Return a copy of a group with new rollouts, without the fields that updates fill in."""
    return replace(group, rollouts=[
        Rollout(completion_ids=list(rollout.completion_ids), rollout_logprobs=list(rollout.rollout_logprobs),
                rewards=dict(rollout.rewards),
                fields={name: value for name, value in rollout.fields.items() if TOKEN_FIELDS[name].kept},
                **{name: getattr(rollout, name) for name in OF_ROLLOUT})
        for rollout in group.rollouts
    ])


def usable(group: RolloutGroup) -> bool:
    """Return True if the group is freshly sampled and its rewards and log-probabilities are finite."""
    valid = not any(rollout.invalid_rewards for rollout in group.rollouts)
    return not group.replayed and valid and all(math.isfinite(v) for r in group.rollouts for v in r.rollout_logprobs)


def pack(kind: str, values: Sequence[float]) -> Any:
    """Encode numbers exactly, as base64 text; the ids of a prompt with images as a list, with [id, name] for images."""
    if ImageToken in map(type, values):
        return [[int(token), token.image] if isinstance(token, ImageToken) else token for token in values]
    numbers: array[Any] = array(kind, values)
    return base64.b64encode(numbers.tobytes()).decode()


def unpack(kind: str, saved: Any) -> list[Any]:
    if isinstance(saved, list):
        return [ImageToken(*token) if isinstance(token, list) else token for token in saved]
    numbers: array[Any] = array(kind)
    numbers.frombytes(base64.b64decode(saved))
    return numbers.tolist()


def pack_group(group: RolloutGroup) -> dict[str, Any]:
    """Return a kept group as JSON values, with its row as an index."""
    return {
        "row": group.row_index, "prompt": pack(INTEGERS, group.prompt_ids), "baseline": group.baseline,
        "rollouts": [
            {"ids": pack(INTEGERS, rollout.completion_ids), "logprobs": pack(FLOATS, rollout.rollout_logprobs),
             "version": rollout.policy_version, "rewards": rollout.rewards,
             "fields": {name: torch.as_tensor(value).tolist() for name, value in rollout.fields.items()},
             **{name: getattr(rollout, name) for name in PLAIN},
             **pack_routes(rollout, group.prompt_ids), **pack_episode(rollout, group.prompt_ids)}
            for rollout in group.rollouts
        ],
    }


def unpack_group(packed: dict[str, Any], row: dict[str, Any]) -> RolloutGroup:
    """Return a group from the JSON values of `pack_group` and its row; values that older checkpoints lack are empty."""
    prompt, rollouts = unpack(INTEGERS, packed["prompt"]), []
    for saved in packed["rollouts"]:
        plain = {name: saved[name] for name in PLAIN if name in saved}  # older checkpoints have fewer
        rollout = Rollout(unpack(INTEGERS, saved["ids"]), unpack(FLOATS, saved["logprobs"]), **plain,
                          policy_version=saved["version"], rewards=saved["rewards"])
        for name, values in saved.get("fields", {}).items():
            rollout.fields[name] = torch.tensor(values, dtype=TOKEN_FIELDS[name].torch_dtype)
        unpack_episode(rollout, prompt, saved)
        if "routes" in saved:
            give_routes(rollout, prompt, [packed and Routes.unpacked(packed) for packed in saved["routes"]])
        rollouts.append(rollout)
    return RolloutGroup(row, prompt, rollouts, packed["baseline"], packed["row"])


def pack_routes(rollout: Rollout, prompt_ids: list[int]) -> dict[str, Any]:
    """Return {"routes": the expert routes of each sequence, as JSON values}; {} for a rollout without routes."""
    routes = routes_of(rollout, prompt_ids)
    return {"routes": [sequence.packed() if sequence else None for sequence in routes]} if any(routes) else {}


def pack_episode(rollout: Rollout, prompt_ids: list[int]) -> dict[str, Any]:
    """Return the episode fields of a rollout as JSON values; {} for a single-turn completion."""
    if rollout.trained is None and not rollout.turns:
        return {}
    turns, before = [], 0
    for turn in rollout.turns:
        numbers: tuple[Sequence[float], ...] = (turn.prompt_ids, turn.completion_ids, turn.logprobs)
        told = numbers == numbers_of_turn(rollout, prompt_ids, before, len(turn.completion_ids))
        turns.append({name: getattr(turn, name) for name in OF_TURN} | {
            "tokens": len(turn.completion_ids),
            "numbers": None if told else [pack(kind, values) for kind, values in zip(KINDS, numbers, strict=True)],
        })
        before += len(turn.completion_ids)
    splits = [[split.start, None if split.prompt_ids is None else pack(INTEGERS, split.prompt_ids)]
              for split in rollout.splits]
    trained = None if rollout.trained is None else pack(FLAGS, rollout.trained)
    return {"trained": trained, "splits": splits, "turns": turns}


def unpack_episode(rollout: Rollout, prompt_ids: list[int], saved: dict[str, Any]) -> None:
    """Set the episode fields of a rollout from the JSON values of `pack_episode`; none for a single completion."""
    if "turns" not in saved:
        return
    trained = saved["trained"]
    rollout.trained = None if trained is None else [bool(flag) for flag in unpack(FLAGS, trained)]
    rollout.splits = [Split(start, None if ids is None else unpack(INTEGERS, ids)) for start, ids in saved["splits"]]
    before = 0
    for turn in saved["turns"]:
        numbers: Any = numbers_of_turn(rollout, prompt_ids, before, turn["tokens"])
        if turn["numbers"] is not None:
            numbers = [unpack(kind, text) for kind, text in zip(KINDS, turn["numbers"], strict=True)]
        rollout.turns.append(Turn(*numbers, **{name: turn[name] for name in OF_TURN if name in turn}))
        before += turn["tokens"]


def numbers_of_turn(
    rollout: Rollout, prompt_ids: list[int], before: int, count: int
) -> tuple[list[int], list[int], list[float]]:
    """Return (context ids, sampled ids, log-probabilities of the sampled ids) of a turn. The turn has `count` of the
    rollout's sampled tokens, and earlier turns have `before` of them."""
    ids, trained = rollout.completion_ids, rollout.trained
    places = [place for place in range(len(ids)) if trained is None or trained[place]][before : before + count]
    if not places:
        return [], [], []
    split = [Split(0), *(candidate for candidate in rollout.splits if candidate.start <= places[0])][-1]
    prompt = prompt_ids if split.prompt_ids is None else split.prompt_ids
    return ([*prompt, *ids[split.start : places[0]]], [ids[place] for place in places],
            [rollout.rollout_logprobs[place] for place in places])
