"""An estimate, before the first step, of how long a run will take: from the data sheet of the card."""

from statistics import fmean

from lowmem_grpo.planning.run_time import PlannedTime
from lowmem_grpo.planning.time_plan import TimePlan
from lowmem_grpo.planning.workload import COMPLETION_SHARE, Workload
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.units import time_text


def how_long(subject: Subject) -> str | None:
    """The estimate in one line; None on the CPU, on a card without a data sheet, and in fine-tuning."""
    work = expected_work(subject)
    if work is None:
        return None
    found = PlannedTime(subject.plan, subject.policy.base.config).of(work)
    return None if found is None else line_of(found, subject.state.max_steps - subject.state.global_step)


def expected_work(subject: Subject) -> Workload | None:
    """The work of a step, with the prompts of the sampled rows. The length of completions is a guess."""
    args, lengths = subject.args, [looked.tokens for looked in subject.sample.fitting]
    if subject.scorer is None or not lengths:
        return None
    longest = args.max_completion_length
    updates = args.optimizer_steps_per_generation * args.num_iterations
    return Workload(
        args.prompts_per_generation, args.num_generations, max(1.0, fmean(lengths)),
        max(1.0, COMPLETION_SHARE * longest), longest, args.num_iterations, updates, int(args.beta != 0),
    )


def line_of(found: TimePlan, steps: int) -> str | None:
    """'estimated, not measured: 2.3 s a step ...'; None without an estimate."""
    whole, generate, train = found.step_seconds, found.generate_seconds, found.train_seconds
    if whole is None or generate is None or train is None:
        return None
    work = found.workload
    each = whole / work.updates
    return (f"estimated, not measured: {time_text(each)} a step on {found.card} (sampling {generate / whole:.0%}, "
            f"training {train / whole:.0%}), so {time_text(each * steps)} for {steps} steps, if completions have "
            f"{work.completion_length:.0f} of at most {work.longest} tokens; the second step measures it")
