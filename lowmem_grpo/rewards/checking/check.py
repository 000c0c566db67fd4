"""`rewards.check`: tries reward functions on a model's samples before a run is spent on them."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.data.brought import rows_of
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, PromptSource, as_group, longest_prompt
from lowmem_grpo.data.stream import Stream, source_of
from lowmem_grpo.losses.advantages import combine_rewards, without_metrics_alone
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.checking.diagnosis import (
    about_length,
    about_signal,
    differs,
    faulty_rows,
    findings_of,
    in_groups,
)
from lowmem_grpo.rewards.checking.result import RewardCheck, Trial
from lowmem_grpo.rewards.checking.trials import try_all
from lowmem_grpo.runs.accuracy import wilson_interval
from lowmem_grpo.runs.findings import Finding, by_severity
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup

if TYPE_CHECKING:
    from rich.console import Console

    from lowmem_grpo.fast_model import FastGeneration

ROWS = 256  # that are looked at for what can never be judged
SECONDS = 10.0  # that one function may take here, unless the run allows less


def check(
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]], dataset: Any, model: "FastGeneration",
    args: GRPOConfig | None = None, *, groups: int = 8, timeout: float | None = None, tokenizer: Any = None,
    console: "Console | None" = None, show: bool = True,
) -> RewardCheck:
    """Sample `groups` prompts of the dataset as a run with `args` would, score the samples, and say what is wrong.

    It finds functions that fail, take too long, do not return a list of numbers, need a column that is missing, pay the
    same for all completions, pay the same as another function, or pay for the empty answer. It also estimates the share
    of groups that will carry signal. `model` is what FastLanguageModel returned, with LoRA or without. Its weights, the
    dataset and torch's random state do not change. Tables are printed unless `show` is False. `timeout` is the seconds
    that each function may take here: by default `args.reward_timeout`, but at most 10.

    Raises what a trainer would raise at once: TypeError for what is not a function, ValueError for a wrong number of
    weights or for `groups` below 1, DataError for a dataset that cannot be trained on.
    """
    started = time.monotonic()
    if groups < 1:
        raise ValueError(f"groups is {groups}; at least one prompt has to be sampled")
    args = args or GRPOConfig()
    limit = min(args.reward_limit, SECONDS) if timeout is None else timeout
    functions = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
    scorer = RewardScorer(functions, args.reward_weights, limit)
    source = prompt_source(dataset, model, args, tokenizer)
    prompts = source.take(min(groups, len(source.dataset)))
    sampled = sample(model, prompts, args, tokenizer)
    columns = sorted({name for group in sampled for name in group.row})
    trials = try_all(scorer, sampled, TrainerState(max_steps=max(args.max_steps, 0)), limit)
    found = findings_of(
        trials, args.num_generations, columns, limit, args.reward_limit,
        args.prompts_per_generation * args.num_generations,
    )
    rows = spread_rows(source)
    found += [one for pair in zip(scorer.names, scorer.funcs, strict=True) for one in faulty_rows(*pair, rows)]
    result = summed_up(trials, found + about_samples(sampled, source), prompts, sampled, scorer.required)
    result.columns, result.seconds = columns, time.monotonic() - started
    if show:
        from lowmem_grpo.rewards.checking.pay_table import print_check

        print_check(result, console)
    return result


def prompt_source(dataset: Any, model: "FastGeneration", args: GRPOConfig, tokenizer: Any) -> PromptSource:
    """The prompts of the run, in its order."""
    longest = longest_prompt(args.max_prompt_length, args.max_completion_length, model.loaded.max_seq_length)
    encoder = PromptEncoder(tokenizer or model.loaded.tokenizer, longest, args.chat_template_kwargs)
    return source_of(rows_of(dataset, "dataset"), encoder, args.seed, args.shuffle_dataset)


def spread_rows(source: PromptSource) -> list[tuple[int, dict[str, Any]]]:
    """At most ROWS rows of the dataset, spread evenly, each with its number."""
    rows = source.dataset.peek(ROWS) if isinstance(source.dataset, Stream) else source.dataset
    return [(number, rows[number]) for number in sorted({place * len(rows) // ROWS for place in range(ROWS)})]


def sample(model: "FastGeneration", prompts: list[Prompt], args: GRPOConfig, tokenizer: Any) -> list[RolloutGroup]:
    """A group for each prompt, sampled by the model as it is."""
    engine = model.engine(None, tokenizer)
    try:
        completions = engine.generate([prompt.ids for prompt in prompts], args.draws.of(step=0))
    finally:
        engine.sleep()
    return [as_group(prompt, rollouts) for prompt, rollouts in zip(prompts, completions, strict=True)]


def about_samples(groups: list[RolloutGroup], source: PromptSource) -> list[Finding]:
    """Findings about skipped rows and about completions that were cut off: rewards do not get to see these."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
    found = []
    if source.skipped:
        found.append(Finding("warning", "", f"rows were skipped: {source.skip_summary()}", "correct or remove them"))
    return found + about_length(cut)


def summed_up(
    trials: list[Trial], findings: list[Finding], prompts: list[Prompt], groups: list[RolloutGroup],
    required: list[str],
) -> RewardCheck:
    """The result: weighted sums of what the functions paid, and the share of groups in which these differ. A group in
    which a `required` function paid None has no signal."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    size, worked = len(groups[0].rollouts), [trial for trial in trials if trial.error is None]
    totals = weighted_sums(worked, len(rollouts))
    judges = [in_groups(trial.pays, size) for trial in worked if trial.name in required]
    with_signal = sum(
        differs(sums) and not any(None in pays[number] for pays in judges)
        for number, sums in enumerate(in_groups(totals, size))
    )
    share = with_signal / len(groups)
    failed = sum(trial.error is not None for trial in trials)
    return RewardCheck(
        by_severity(findings + about_signal(share, with_signal, len(groups), failed)), trials,
        [prompt.text for prompt in prompts], [rollout.text for rollout in rollouts], totals, len(groups), with_signal,
        share, wilson_interval(share, len(groups)), 0.0,
    )


def weighted_sums(trials: list[Trial], count: int) -> list[float | None]:
    """(N,) as the run adds them up; None if no function with a weight has an opinion."""
    if not trials:
        return [None] * count
    columns = [[torch.nan if pay is None else pay for pay in trial.pays] for trial in trials]
    weights = torch.tensor([trial.weight for trial in trials], dtype=torch.float64)
    sums = combine_rewards(without_metrics_alone(torch.tensor(columns, dtype=torch.float64).T, weights), weights)
    return [None if total != total else total for total in sums.tolist()]
