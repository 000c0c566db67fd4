"""Time estimates, and reports on the first steps: an estimate of the run from its card's data sheet before the first
step, planned seconds of each step as metrics, findings about the rewards after the first step, and the time left at
the pace of the second."""

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import COMPLETION_SHARE, MemoryPlan, Workload
from lowmem_grpo.memory.time_plan import TimePlan, plan_time
from lowmem_grpo.rewards.checking.diagnosis import about_rewards
from lowmem_grpo.runs.findings import warn
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.runs.views.live import StepTimes
from lowmem_grpo.trainer.preflight.subject import Subject
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.utils import time_text

logger = logging.getLogger(__name__)
PHASES = {"time/generate": "sampling", "time/reward": "rewards", "time/train": "training"}


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


class FirstSteps:
    """A callback, with the methods of transformers' TrainerCallback, that reports on the first two steps."""

    def __init__(
        self, records: RunRecords, say: Callable[[str], None] | None = None, rewards: Mapping[str, float] | None = None
    ) -> None:
        """`rewards` are the weights of a run's rewards by name; `say` prints a line, or is None to print nothing.
        """
        self.records, self.say, self.rewards = records, say, rewards
        self.step_times = StepTimes()
        self.seen = 0  # updates since `train` was called

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = 0
        self.step_times.start_at(state.global_step)

    def on_step_end(
        self, args: Any, state: Any, control: Any, groups: list[RolloutGroup] | None = None, **kwargs: Any
    ) -> None:
        """`groups` are the scored groups of this step."""
        self.seen += 1
        self.step_times.mark(state.global_step)
        if self.seen == 1 and groups and self.rewards and args.preflight:
            warn(logger, "first step", about_rewards(groups, self.rewards))
        if self.seen == 2:
            self.expect(args, state)

    def expect(self, args: Any, state: TrainerState) -> None:
        """Record how long the whole run will take, and print it unless the run is over."""
        left = self.step_times.left(state.max_steps) or 0.0
        self.records.summary({"expected_seconds": state.elapsed + left})
        if left and self.say is not None and args.preflight:
            self.say(self.expectation(args, state, left))

    def expectation(self, args: Any, state: TrainerState, left: float) -> str:
        """Return the line for the second step: the pace (without the first step, which warms up) and the time left."""
        each = self.step_times.per_step or 0.0
        last = (state.unlogged or state.log_history or [{}])[-1]
        shares = ", ".join(f"{name} {last[key]:.0%}" for key, name in PHASES.items() if key in last)
        every = args.save_steps if getattr(args, "save_strategy", "no") == "steps" else None
        line = (f"{time_text(each)} a step{shares and f' ({shares})'}: {time_text(round(left))} to go until step "
                f"{state.max_steps}")
        if every is None:
            return line
        due = min((state.global_step // every + 1) * every, state.max_steps)
        until_due = round(each * (due - state.global_step))
        return f"{line}; the next checkpoint is due at step {due}, in {time_text(until_due)}"
