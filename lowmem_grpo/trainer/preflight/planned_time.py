"""Time estimates from the card's data sheet: of the run before its first step, and of each step as metrics."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import COMPLETION_SHARE, MemoryPlan, Workload
from lowmem_grpo.memory.time_plan import TimePlan, plan_time
from lowmem_grpo.trainer.preflight.subject import Subject
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.utils import time_text


class PlannedTime:
    """Plans the seconds of steps under a memory plan; plans nothing on the CPU and on cards without a data sheet."""

    def __init__(self, plan: MemoryPlan | None, model_config: Any) -> None:
        self.plan = plan
        self.shape = None if plan is None else ModelShape.from_config(model_config)

    def metrics(
        self, sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1,
        fields: Sequence[str] = (),
    ) -> dict[str, float]:
        """Return planned seconds: sampling, training, both; `fields` are log-probabilities computed before training."""
        passes = len({field == "ref_logprobs" for field in fields})  # one pass for the reference, one for the policy
        generated = self.plan_step(workload_of(sampled))
        learned = self.plan_step(workload_of(trained, updates, iterations, passes))
        if generated is None or learned is None:
            return {}
        generate, train = generated.generate_seconds or 0.0, learned.train_seconds or 0.0
        around = (generated.step_seconds or 0.0) - generate - (generated.train_seconds or 0.0)
        return {"time/planned_generate_s": generate, "time/planned_train_s": train,
                "time/planned_step_s": generate + train + around}

    def plan_step(self, work: Workload | None) -> TimePlan | None:
        """Return the time plan of a workload; None without a plan, a workload, or known seconds."""
        if self.plan is None or self.shape is None or work is None:
            return None
        time = plan_time(self.plan, self.shape, work)
        return time if time.seconds else None


def workload_of(
    groups: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1, forward_only: int = 0
) -> Workload | None:
    """Return the workload of the groups that have a trained completion; None if there are none."""
    filled = [group for group in groups if any(rollout.num_trained for rollout in group.rollouts)]
    if not filled:
        return None
    lengths = [max(1, rollout.num_trained) for group in filled for rollout in group.rollouts]
    generations = max(1, round(len(lengths) / len(filled)))
    prompt = fmean(max(1, len(group.prompt_ids)) for group in filled)
    return Workload(len(filled), generations, prompt, fmean(lengths), max(lengths), iterations, updates, forward_only)


def how_long(subject: Subject) -> str | None:
    """Return one line with the run's estimated time; None on the CPU, on an unknown card, and in fine-tuning."""
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
            f"{train:.0%}), so {time_text(each * steps)} for {steps} steps, if completions average {mean:.0f} of at "
            f"most {longest} tokens; after the second step the measured time follows")
