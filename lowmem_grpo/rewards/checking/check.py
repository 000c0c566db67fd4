"""`rewards.check`, which tries reward functions on a model's completions before a run, and prints the result."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import longest_prompt
from lowmem_grpo.data.harmony import message_reader
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, PromptSource, as_group
from lowmem_grpo.data.stream import Stream, rows_of, source_of
from lowmem_grpo.losses.advantages import AdvantageSettings, assign_advantages
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.checking.diagnosis import (
    RewardTrial,
    about_samples,
    faulty_rows,
    findings_of,
    groups_with_signal,
    try_all,
)
from lowmem_grpo.runs.accuracy import wilson_interval
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.runs.views.console import any_console, plain, print_line, shortened
from lowmem_grpo.types import Finding, RolloutGroup, by_severity, has_error

if TYPE_CHECKING:
    from lowmem_grpo.fast_model import FastGeneration

ROWS = 256  # rows that are tested with `Reward.fault_of_row`
SECONDS = 10.0  # time limit of a function in the check, unless the run allows less
COLORS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
PROMPTS = 2  # prompts of which the best and the worst completion are shown
AMOUNTS = ("weight", "mean", "lowest", "highest", "none", "empty", "right", "seconds")
DROPPED = ("seconds", "kind", "none", "empty", "lowest", "weight")  # in this order, if the terminal is narrow
LONGEST = 300  # characters shown of a prompt or completion, from its beginning and its end


@dataclass
class RewardCheck:
    """The result of `rewards.check`."""

    findings: list[Finding]  # errors first
    trials: list[RewardTrial]  # one for each function, in order
    prompts: list[str]  # (P,) texts as the model sees them
    completions: list[str]  # (P * G,) prompt by prompt
    totals: list[float | None]  # (P * G,) weighted sums of the rewards
    groups: int
    groups_with_signal: int
    seconds: float  # for the whole check
    columns: list[str] = field(default_factory=list)  # the dataset's

    @property
    def signal_share(self) -> float:
        """The share of groups whose completions differ in their weighted sum of rewards."""
        return self.groups_with_signal / self.groups

    @property
    def signal_interval(self) -> tuple[float, float]:
        """The 95% Wilson interval of `signal_share`."""
        return wilson_interval(self.signal_share, self.groups)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_error(self.findings)

    def of(self, function: str) -> list[Finding]:
        """Return the findings about the function of this name."""
        return [finding for finding in self.findings if finding.about == function]


def check(reward_funcs: Any, dataset: Any, model: "FastGeneration",
          args: GRPOConfig | None = None, *, groups: int = 8, timeout: float | None = None, tokenizer: Any = None,
          console: Console | None = None, show: bool = True) -> RewardCheck:
    """Sample completions for `groups` prompts as a run with `args` would, score them, and report what is wrong.

    The check finds functions that fail, take too long, return no list of numbers, need a missing column, pay the same
    for all completions, pay the same as another function, or pay for the empty answer. It estimates the share of groups
    whose rewards will differ: only these give the run a signal. `model` is what FastLanguageModel returned, with LoRA
    or without. The model's weights, the dataset and torch's random state are unchanged. `timeout` is the seconds that
    each function may take here: by default `args.reward_timeout`, but at most 10.

    TypeError for a value that is not a function, ValueError for a wrong number of weights or for `groups` below 1,
    DataError for a dataset that cannot be trained on."""
    started = time.monotonic()
    if groups < 1:
        raise ValueError(f"groups is {groups}; at least one prompt has to be sampled")
    args = args or GRPOConfig()
    limit = min(args.reward_limit, SECONDS) if timeout is None else timeout
    several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
    scorer = RewardScorer(list(reward_funcs) if several else reward_funcs, args.reward_weights, limit)
    scorer.reads = message_reader(tokenizer or model.loaded.tokenizer)
    source = prompt_source(dataset, model, args, tokenizer)
    prompts = source.take(min(groups, len(source.dataset)))
    if show:  # on a CPU, sampling can take minutes
        print_line(console or any_console(), f"sampling {len(prompts) * args.num_generations} completions, each of at "
                   f"most max_completion_length={args.max_completion_length} tokens")
    sampled = sample(model, prompts, args, tokenizer)
    columns = sorted({name for group in sampled for name in group.row})
    trials = try_all(scorer, sampled, TrainerState(max_steps=max(args.max_steps, 0)))
    per_step = args.prompts_per_generation * args.num_generations
    findings = findings_of(trials, args.num_generations, columns, limit, args.reward_limit, per_step)
    rows = spread_rows(source)
    for name, func in scorer.by_name.items():
        findings += faulty_rows(name, func, rows)
    if source.skipped:
        findings.append(Finding("warning", "", f"rows were skipped: {source.skip_summary()}", "correct or remove them"))
    set_rewards(sampled, trials, scorer.required)
    findings += about_samples(sampled, sum(trial.error is not None for trial in trials),
                              taught=args.num_generations < 2)
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    result = RewardCheck(
        by_severity(findings), trials, [prompt.text for prompt in prompts], [rollout.text for rollout in rollouts],
        [rollout.reward for rollout in rollouts], len(sampled), groups_with_signal(sampled),
        time.monotonic() - started, columns,
    )
    if show:
        print_check(result, console)
    return result


def prompt_source(dataset: Any, model: "FastGeneration", args: GRPOConfig, tokenizer: Any) -> PromptSource:
    longest = longest_prompt(args.max_prompt_length, args.max_completion_length, model.loaded.max_seq_length)
    encoder = PromptEncoder(tokenizer or model.loaded.tokenizer, longest, args.chat_template_kwargs)
    return source_of(rows_of(dataset, "dataset"), encoder, args.seed, args.shuffle_dataset)


def spread_rows(source: PromptSource) -> list[tuple[int, dict[str, Any]]]:
    """Return at most ROWS rows as (index, row), spread evenly over the dataset. Of a stream, return the first rows."""
    rows = source.dataset.peek(ROWS) if isinstance(source.dataset, Stream) else source.dataset
    return [(number, rows[number]) for number in sorted({place * len(rows) // ROWS for place in range(ROWS)})]


def sample(model: "FastGeneration", prompts: list[Prompt], args: GRPOConfig, tokenizer: Any) -> list[RolloutGroup]:
    engine = model.engine(None, tokenizer)
    try:
        completions = engine.generate([prompt.ids for prompt in prompts],
                                      args.draws.for_step(step=0).of_call(len(prompts)))
    finally:
        engine.sleep()
    return [as_group(prompt, rollouts) for prompt, rollouts in zip(prompts, completions, strict=True)]


def set_rewards(groups: list[RolloutGroup], trials: list[RewardTrial], required: list[str]) -> None:
    """Set each rollout's rewards and their weighted sum, as the run does. A group in which a `required` function
    returned None is marked as `unjudged`."""
    worked = [trial for trial in trials if trial.error is None]
    for index, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.rewards = {trial.name: trial.pays[index] for trial in worked}
    if worked:
        weights = AdvantageSettings(reward_weights=[trial.weight for trial in worked])
        assign_advantages(groups, [trial.name for trial in worked], weights)
    for group in groups:
        group.unjudged = any(rollout.rewards.get(name, 0.0) is None for rollout in group.rollouts for name in required)


def print_check(result: RewardCheck, console: Console | None = None) -> None:
    """Print the statistics of each function, a few completions with their rewards, the signal, and the findings."""
    console = console or any_console()
    console.print(fitting_table(result, console))
    console.print(samples_table(result, console.width))
    low, high = result.signal_interval
    print_line(console, (
        f"groups with signal: {result.groups_with_signal} of {result.groups}, {result.signal_share:.0%} (95% interval "
        f"{low:.0%} to {high:.0%}); {len(result.completions)} completions checked in {result.seconds:.1f} s"
    ))
    for finding in result.findings:
        severity = (finding.severity, COLORS[finding.severity])
        print_line(console, Text.assemble(severity, " ", plain(str(finding))))
    if not result.findings:
        console.print(Text("no problems found"))


def fitting_table(result: RewardCheck, console: Console) -> Table:
    """Return the table of functions. Columns in DROPPED are left out one by one until it fits the terminal."""
    tables = (functions_table(result, DROPPED[:count]) for count in range(len(DROPPED)))
    fits = (table for table in tables if console.measure(table).maximum < console.width)
    return next(fits, functions_table(result, DROPPED))


def functions_table(result: RewardCheck, without: tuple[str, ...]) -> Table:
    """Return a row for each reward function, without the columns named in `without`."""
    table = Table(title="What the reward functions pay", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("function", overflow="fold")
    shown = [name for name in ("kind", *AMOUNTS) if name not in without]
    for name in shown:
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for trial in result.trials:
        cells = dict(zip(("kind", *AMOUNTS), cells_of(trial), strict=True))
        table.add_row(plain(trial.name), *(cells[name] for name in shown))
    return table


def cells_of(trial: RewardTrial) -> list[str]:
    paid, empty = trial.paid, [pay for pay in trial.empty if pay is not None]
    numbers = [fmean(paid), min(paid), max(paid)] if paid else [None] * 3
    none = 1 - len(paid) / max(len(trial.pays), 1)
    right = "" if trial.verdicts is None else f"{trial.verdicts:.0%}"
    amounts = [*map(number, numbers), f"{none:.0%}" if none else "", number(fmean(empty) if empty else None), right]
    if trial.error is not None:
        amounts = ["failed", *[""] * 5]
    return [trial.kind, f"{trial.weight:g}", *amounts, f"{trial.seconds:.3f}"]


def number(value: float | None) -> str:
    return "None" if value is None else f"{value:.3g}"


def samples_table(result: RewardCheck, width: int) -> Table:
    """Return a table of the best and the worst completion of the first prompts, with the rewards of each function."""
    table = Table(title="What they pay for what", title_justify="left", box=SIMPLE, show_lines=True)
    for name in ("prompt", "completion"):
        table.add_column(name, ratio=1, overflow="fold")
    longest = max((len(trial.name) for trial in result.trials), default=0) + len(" -0.333")
    table.add_column("pay", min_width=min(longest, width // 2), overflow="fold")
    size = len(result.completions) // result.groups
    for place, prompt in enumerate(result.prompts[:PROMPTS]):
        ranked = sorted(range(place * size, (place + 1) * size), key=lambda index: result.totals[index] or 0.0)
        for index in dict.fromkeys((ranked[-1], ranked[0])):
            shown = shortened(prompt, LONGEST) if index == ranked[-1] else ""
            completion = shortened(result.completions[index], LONGEST)
            pays = [f"{trial.name} {number(trial.pays[index])}" for trial in result.trials if trial.error is None]
            pays.append(f"sum {number(result.totals[index])}")
            table.add_row(plain(shown), plain(completion), plain("\n".join(pays)))
    return table
