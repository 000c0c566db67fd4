"""A run's own seconds, estimated from the data sheet of its card: of all of it before the first step, and of each step
by the lengths that it had, beside what was measured."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.memory.time_plan import COMPLETION_SHARE, TimePlan, Workload, plan_time
from lowmem_grpo.trainer.preflight.subject import Subject
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.utils import time_text


class PlannedTime:
    """The seconds of steps under a memory plan; nothing on the CPU and on cards without a data sheet."""

    def __init__(self, plan: MemoryPlan | None, model_config: Any) -> None:
        self.plan = plan
        self.shape = None if plan is None else ModelShape.from_config(model_config)

    def metrics(
        self, sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1,
        fields: Sequence[str] = (),
    ) -> dict[str, float]:
        """Return the planned seconds of a step: sampling, training, both; `fields` were computed before training."""
        passes = len({field == "ref_logprobs" for field in fields})  # the policy's own take one pass together
        generated = self.plan_step(workload_of(sampled))
        learned = self.plan_step(workload_of(trained, updates, iterations, passes))
        if generated is None or learned is None:
            return {}
        generate, train = generated.generate_seconds or 0.0, learned.train_seconds or 0.0
        around = (generated.step_seconds or 0.0) - generate - (generated.train_seconds or 0.0)
        return {"time/planned_generate_s": generate, "time/planned_train_s": train,
                "time/planned_step_s": generate + train + around}

    def plan_step(self, work: Workload | None) -> TimePlan | None:
        """Return what a step of such lengths should take; None where that is not known, or there is nothing to do."""
        if self.plan is None or self.shape is None or work is None:
            return None
        time = plan_time(self.plan, self.shape, work)
        return time if time.seconds else None


def workload_of(
    groups: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1, forward_only: int = 0
) -> Workload | None:
    """Return what groups were made of; None where there is none with a completion."""
    filled = [group for group in groups if any(rollout.num_trained for rollout in group.rollouts)]
    if not filled:
        return None
    lengths = [max(1, rollout.num_trained) for group in filled for rollout in group.rollouts]
    generations = max(1, round(len(lengths) / len(filled)))
    prompt = fmean(max(1, len(group.prompt_ids)) for group in filled)
    return Workload(len(filled), generations, prompt, fmean(lengths), max(lengths), iterations, updates, forward_only)


def how_long(subject: Subject) -> str | None:
    """Return a run's estimate in one line; None on the CPU, on an unknown card, and in fine-tuning."""
    args, lengths = subject.args, [looked.tokens for looked in subject.sample.fitting]
    if not subject.samples or not lengths:
        return None
    longest, updates = args.max_completion_length, args.optimizer_steps_per_generation * args.num_iterations
    mean = max(1.0, COMPLETION_SHARE * longest)  # a guess
    time = PlannedTime(subject.plan, subject.policy.base.config).plan_step(Workload(
        args.prompts_per_generation, args.num_generations, max(1.0, fmean(lengths)), mean, longest,
        args.num_iterations, updates, int(args.beta != 0)))
    if time is None or not time.step_seconds:
        return None
    generate, train = ((part or 0.0) / time.step_seconds for part in (time.generate_seconds, time.train_seconds))
    each, steps = time.step_seconds / updates, subject.state.max_steps - subject.state.global_step
    return (f"estimated, not measured: {time_text(each)} a step on {time.card} (sampling {generate:.0%}, training "
            f"{train:.0%}), so {time_text(each * steps)} for {steps} steps, if completions have {mean:.0f} of at most "
            f"{longest} tokens; the second step measures it")
