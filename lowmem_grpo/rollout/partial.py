"""Partial rollouts: a step leaves what is unfinished when its groups are complete, and the next step goes on with it.

Each token is tagged with the version of the policy that drew it, and its recorded log-probability is that version's.
So the weights that correct what sampler and trainer disagree on also correct its age, token by token. The oldest groups
are trained on first, and one that would be too old in the next step is waited for.
"""

import math
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, PromptSource, as_group
from lowmem_grpo.engines.base import Until
from lowmem_grpo.engines.rounds import takes
from lowmem_grpo.rollout.replay import pack_group, unpack_group
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class Carried:
    """A prompt and its completions, some of which may be unfinished."""

    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def complete(self) -> bool:
        """Whether it only waits to be trained on."""
        return all(rollout.finish_reason != "unfinished" for rollout in self.rollouts)

    @property
    def oldest(self) -> int:
        """The version that drew its oldest token; where there is none, the one that it was begun with."""
        return min(rollout.policy_version for rollout in self.rollouts)

    def tagged(self, before: "Carried | None", version: int) -> "Carried":
        """The same with versions of the tokens: those that were there `before` keep theirs."""
        earlier = [[] if before is None else versions_of(rollout) for rollout in (before or self).rollouts]
        return replace(self, rollouts=[
            replace(rollout, policy_version=min([*known[:1], version]),
                    versions=[*known, *[version] * (len(rollout.completion_ids) - len(known))])
            for rollout, known in zip(self.rollouts, earlier, strict=True)
        ])


@dataclass
class PartialRollouts:
    """What is carried from step to step, oldest first."""

    staleness: int  # the most optimizer steps that a token may be old when it is trained on
    ahead: float  # more prompts at once than a step needs, as a share of these
    stride: int = 1  # optimizer steps between two generations
    entries: tuple[Carried, ...] = ()  # replaced, never changed: an older one can be put back
    drawn: int = 0  # tokens, in the last step
    counts: dict[str, float] = field(default_factory=dict)  # of the last step

    def sample(
        self, source: PromptSource, sampler: Sampler, params: SamplingParams, count: int, version: int
    ) -> list[tuple[Prompt, RolloutGroup]]:
        """`count` complete groups, oldest first; what is left is carried."""
        ready = [one for one in self.entries if one.complete]
        began = [one for one in self.entries if not one.complete]
        wanted = max(0, count - len(ready))
        fresh = source.take(max(0, math.ceil(count * (1 + self.ahead)) - len(self.entries)))
        last = version + self.stride - self.staleness  # what is older must not wait for the next step
        until = Until(
            params.n, wanted, frozenset(place for place, one in enumerate(began) if one.oldest < last),
            {place: one.rollouts for place, one in enumerate(began)},
        )
        groups = sampler.sample([*(one.prompt for one in began), *fresh], params, until=until) if wanted else []
        found = self.tagged(groups, until, [*began, *(None for _ in fresh)], fresh, version) if wanted else [
            *began, *self.begun(fresh, params.n, version)]
        self.drawn = tokens_of(found) - tokens_of(began)
        done = sorted([*ready, *(one for one in found if one.complete)], key=lambda one: one.oldest)
        taken, rest = done[:count], done[count:]
        self.entries = tuple(sorted([*rest, *(one for one in found if not one.complete)], key=lambda one: one.oldest))
        self.measure(taken, version)
        return [(one.prompt, as_group(one.prompt, one.rollouts)) for one in taken]

    def tagged(
        self, groups: list[RolloutGroup], until: Until, before: list[Carried | None], fresh: list[Prompt], version: int
    ) -> list[Carried]:
        """What the engine sampled or left, with versions."""
        prompts = [*(one.prompt for one in before if one is not None), *fresh]
        return [Carried(prompt, until.left.get(place) or group.rollouts).tagged(earlier, version)
                for place, (prompt, group, earlier) in enumerate(zip(prompts, groups, before, strict=True))]

    def begun(self, prompts: list[Prompt], n: int, version: int) -> list[Carried]:
        """Prompts that have no token yet."""
        return [Carried(prompt, [Rollout([], [], "unfinished", policy_version=version, versions=[]) for _ in range(n)])
                for prompt in prompts]

    def measure(self, taken: list[Carried], version: int) -> None:
        """How old what is trained on is, how long by age, and what is carried on."""
        rollouts = [rollout for one in taken for rollout in one.rollouts]
        ages = [version - tag for rollout in rollouts for tag in versions_of(rollout)]
        new = [len(one.completion_ids) for one in rollouts if one.policy_version == version]
        old = [len(one.completion_ids) for one in rollouts if one.policy_version < version]
        name = "sampling/partial/"
        self.counts = {
            f"{name}carried_share": sum(age > 0 for age in ages) / max(len(ages), 1),
            f"{name}age": fmean(ages or [0]), f"{name}max_age": max(ages, default=0),
            **({f"{name}new_length": fmean(new)} if new else {}),
            **({f"{name}carried_length": fmean(old)} if old else {}),
            f"{name}left_groups": len(self.entries), f"{name}left_tokens": tokens_of(self.entries),
        }

    def state(self) -> list[dict[str, Any]]:
        """What `restore` needs, as JSON."""
        return [pack_group(as_group(one.prompt, one.rollouts)) | {"epoch": one.prompt.epoch} for one in self.entries]

    def restore(self, state: list[dict[str, Any]], dataset: Any) -> None:
        """Take over a `state`."""
        self.entries = tuple(self.unpacked(packed, dataset[packed["row"]]) for packed in state)

    @staticmethod
    def unpacked(packed: dict[str, Any], row: dict[str, Any]) -> Carried:
        """One carried prompt of a checkpoint."""
        group = unpack_group(packed, row)
        prompt = Prompt(row, group.prompt_ids, "", packed["row"], packed["epoch"])
        return Carried(prompt, group.rollouts)


def versions_of(rollout: Rollout) -> list[int]:
    """(C,) the version that drew each token."""
    if rollout.versions is not None:
        return rollout.versions
    return [rollout.policy_version] * len(rollout.completion_ids)


def tokens_of(carried: Any) -> int:
    """Tokens that these have drawn."""
    return sum(len(rollout.completion_ids) for one in carried for rollout in one.rollouts)


def check_partial(on: bool, params: SamplingParams, engine: Any, mixture: bool, stream: bool) -> None:
    """Raise ValueError where sequences cannot be carried."""
    if not on:
        return
    wrong = {
        f"the engine {engine.name} samples all completions to their ends (its generate takes no until)":
            not takes(engine.generate, "until"),
        "the model has experts, whose choices are not carried": mixture,
        "the rows are a stream, in which a carried row cannot be found again after a resume": stream,
        "vLLM does not see a stop string of which the first part was drawn in the step before (use stop_token_ids, or "
        'fast_inference="transformers")': engine.name == "vllm" and bool(params.stop_strings),
    }
    if reasons := [why for why, holds in wrong.items() if holds]:
        raise ValueError(f"partial_rollouts=True: {reasons[0]}; mend that, or leave partial_rollouts out")
