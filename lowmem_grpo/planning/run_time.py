"""Planned beside measured seconds: what a run's own steps should take on its card, by the lengths that they had."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.planning.time_plan import TimePlan, plan_time
from lowmem_grpo.planning.workload import Workload
from lowmem_grpo.types import RolloutGroup


class PlannedTime:
    """The seconds of steps under a memory plan; nothing on the CPU and on cards without a data sheet here."""

    def __init__(self, plan: MemoryPlan | None, model_config: Any) -> None:
        self.plan = plan
        self.shape = None if plan is None else ModelShape.of(model_config)

    def metrics(
        self, sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1,
        fields: Sequence[str] = (),
    ) -> dict[str, float]:
        """Seconds that this step should have taken: its sampling, its training, and both.

        `fields` are those that were computed before training (`Objective.needed_before`).
        """
        passes = len({field == "ref_logprobs" for field in fields})  # the policy's own take one pass together
        generated = self.of(workload_of(sampled))
        learned = self.of(workload_of(trained, updates, iterations, passes))
        if generated is None or learned is None:
            return {}
        generate, train, whole = generated.generate_seconds, learned.train_seconds, generated.step_seconds
        if generate is None or train is None or whole is None:
            return {}
        around = whole - generate - (generated.train_seconds or 0.0)
        return {"time/planned_generate_s": generate, "time/planned_train_s": train,
                "time/planned_step_s": generate + train + around}

    def of(self, work: Workload | None) -> TimePlan | None:
        """What a step of such lengths should take; None where there is no plan, or nothing to do."""
        if self.plan is None or self.shape is None or work is None:
            return None
        return plan_time(self.plan, self.shape, work)


def workload_of(
    groups: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1, forward_only: int = 0
) -> Workload | None:
    """What groups were made of; None where there is none with a completion."""
    filled = [group for group in groups if any(rollout.num_trained for rollout in group.rollouts)]
    if not filled:
        return None
    lengths = [max(1, rollout.num_trained) for group in filled for rollout in group.rollouts]
    generations = max(1, round(len(lengths) / len(filled)))
    prompt = fmean(max(1, len(group.prompt_ids)) for group in filled)
    return Workload(len(filled), generations, prompt, fmean(lengths), max(lengths), iterations, updates, forward_only)
