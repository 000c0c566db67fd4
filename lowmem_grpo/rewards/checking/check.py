"""`rewards.check`: tries reward functions on a model's samples before a run is spent on them."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowmem_grpo.config.grpo import GRPOConfig, longest_prompt
from lowmem_grpo.data.brought import rows_of
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, PromptSource, as_group
from lowmem_grpo.data.stream import Stream, source_of
from lowmem_grpo.losses.advantages import AdvantageSettings, assign_advantages
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.checking.diagnosis import about_samples, faulty_rows, findings_of, groups_with_signal
from lowmem_grpo.rewards.checking.result import RewardCheck, print_check
from lowmem_grpo.rewards.checking.trials import Trial, try_all
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
    reward_funcs: Any, dataset: Any, model: "FastGeneration",
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
    several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
    scorer = RewardScorer(list(reward_funcs) if several else reward_funcs, args.reward_weights, limit)
    source = prompt_source(dataset, model, args, tokenizer)
    prompts = source.take(min(groups, len(source.dataset)))
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
    findings += about_samples(sampled, sum(trial.error is not None for trial in trials))
    with_signal, rollouts = groups_with_signal(sampled), [rollout for group in sampled for rollout in group.rollouts]
    share = with_signal / len(sampled)
    result = RewardCheck(
        by_severity(findings), trials, [prompt.text for prompt in prompts],
        [rollout.text for rollout in rollouts], [rollout.reward for rollout in rollouts], len(sampled), with_signal,
        share, wilson_interval(share, len(sampled)), time.monotonic() - started, columns,
    )
    if show:
        print_check(result, console)
    return result


def prompt_source(dataset: Any, model: "FastGeneration", args: GRPOConfig, tokenizer: Any) -> PromptSource:
    """Return the prompts of the run, in its order."""
    longest = longest_prompt(args.max_prompt_length, args.max_completion_length, model.loaded.max_seq_length)
    encoder = PromptEncoder(tokenizer or model.loaded.tokenizer, longest, args.chat_template_kwargs)
    return source_of(rows_of(dataset, "dataset"), encoder, args.seed, args.shuffle_dataset)


def spread_rows(source: PromptSource) -> list[tuple[int, dict[str, Any]]]:
    """Return at most ROWS rows of the dataset, spread evenly, each with its number."""
    rows = source.dataset.peek(ROWS) if isinstance(source.dataset, Stream) else source.dataset
    return [(number, rows[number]) for number in sorted({place * len(rows) // ROWS for place in range(ROWS)})]


def sample(model: "FastGeneration", prompts: list[Prompt], args: GRPOConfig, tokenizer: Any) -> list[RolloutGroup]:
    """Return a group for each prompt, sampled by the model as it is."""
    engine = model.engine(None, tokenizer)
    try:
        completions = engine.generate([prompt.ids for prompt in prompts], args.draws.for_step(step=0))
    finally:
        engine.sleep()
    return [as_group(prompt, rollouts) for prompt, rollouts in zip(prompts, completions, strict=True)]


def set_rewards(groups: list[RolloutGroup], trials: list[Trial], required: list[str]) -> None:
    """Set what functions pay for every rollout, and the sum as the run has it. A group in which a `required` function
    paid None is `unjudged`."""
    worked = [trial for trial in trials if trial.error is None]
    for index, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.rewards = {trial.name: trial.pays[index] for trial in worked}
    if worked:
        weights = AdvantageSettings(reward_weights=[trial.weight for trial in worked])
        assign_advantages(groups, [trial.name for trial in worked], weights)
    for group in groups:
        group.unjudged = any(rollout.rewards.get(name, 0.0) is None for rollout in group.rollouts for name in required)
