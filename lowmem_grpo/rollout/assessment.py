"""Evaluation of a model: the accuracy of its answers, and the rewards of completions sampled as in training."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.data import stream
from lowmem_grpo.data.harmony import ReadMessage, message_reader
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, check_dataset
from lowmem_grpo.losses.loss_metrics import FIRST_WORDS
from lowmem_grpo.rewards.calling.reward_batch import score_groups
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.reward import Verifier
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring, rollout_metrics
from lowmem_grpo.runs.accuracy import Answers
from lowmem_grpo.runs.state import speed
from lowmem_grpo.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)
TOGETHER = 256  # completions per call of the sampler
Right = Callable[..., Sequence[float | None]] | Verifier
Part = tuple[list[RolloutGroup], dict[str, float]]  # groups, and the metrics that reward functions logged for them


def answer(
    model: Any, rows: list[dict[str, Any]], functions: list[Right], params: SamplingParams, adapter: Any = None,
    together: int = TOGETHER,
) -> Answers:
    """Sample `params.n` answers to each row, in batches of about `together` answers. An answer is right if the first
    function returns more than 0 for it. The values of each other function are averaged."""
    prompts = prompts_of(model, rows)
    outputs = [output for part, seed in parts(prompts, params, together) for output in
               model.fast_generate(part, seeded(params, seed).of_call(len(part)), adapter)]
    completions = [completion for output in outputs for completion in output.outputs]
    each = (row for row in rows for _ in range(params.n))
    verdicts, metrics = judge(functions, [RolloutGroup(row, [], [Rollout(
        list(completion.token_ids), [], completion.finish_reason, completion.text,
    )]) for row, completion in zip(each, completions, strict=True)], reads=message_reader(model.loaded.tokenizer))
    texts = [completion.text for completion in completions]
    return Answers(in_rows(texts, params.n), in_rows([bool(verdict) for verdict in verdicts], params.n),
                   verdicts.count(None), sum(len(completion.token_ids) for completion in completions),
                   sum(completion.finish_reason == "length" for completion in completions), metrics)


def prompts_of(model: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """Return the rows' prompts, with their pictures in vLLM's form; DataError for images if the model reads text."""
    if model.loaded.processor is None:
        for row in rows:
            stream.refuse_images([], row, "the dataset")
        return [row["prompt"] for row in rows]
    from lowmem_grpo.data.images import pictures_of  # imports PIL

    held = [(row["prompt"], pictures_of(row)) for row in rows]
    return [{"prompt": prompt, "multi_modal_data": {"image": pictures}} if pictures else prompt
            for prompt, pictures in held]


def parts(prompts: list[Any], params: SamplingParams, together: int) -> Iterator[tuple[list[Any], int]]:
    """Yield batches of prompts to sample together, each with a distinct number to add to the seed."""
    size = max(1, together // params.n)
    return ((prompts[start : start + size], start) for start in range(0, len(prompts), size))


def seeded(params: SamplingParams, number: int) -> SamplingParams:
    return replace(params, seed=None if params.seed is None else params.seed + number)


def in_rows(values: list[Any], width: int) -> list[list[Any]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


def judge(
    functions: list[Right], groups: list[RolloutGroup], episodes: bool = False, reads: ReadMessage | None = None
) -> tuple[list[bool | None], dict[str, float]]:
    """Return the first function's verdicts (N,) on the rollouts, and the mean value of each other function, by name. A
    verdict is None if the function returned None."""
    rewards = [function.reward() if isinstance(function, Verifier) else function for function in functions]
    scorer = RewardScorer(rewards, episodes=episodes)
    scorer.reads = reads
    scores = score_groups(scorer, groups, None)
    first, *others = scorer.names
    verdicts = [None if value is None else value > 0 for value in scores.rewards[first]]
    return verdicts, {name: mean(scores.rewards[name]) for name in others}


def mean(values: list[float | None]) -> float:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else float("nan")


def rows_of(dataset: Any, limit: int | None) -> list[dict[str, Any]]:
    """Return those of the first `limit` rows that have a prompt; warn of empty prompts. ValueError if all are empty."""
    check_dataset(dataset)
    dataset = stream.rows_of(dataset, images=True)
    rows = [dataset[index] for index in range(min(len(dataset), limit or len(dataset)))]
    usable = [row for row in rows if row["prompt"]]
    if not usable:
        raise ValueError("no row has a prompt")
    if len(usable) < len(rows):
        logger.warning("%d of %d rows have an empty prompt and are left out", len(rows) - len(usable), len(rows))
    return usable


class Evaluation:
    """Evaluation on rows of a dataset, sampled with `params` in batches of `size` prompts."""

    def __init__(
        self, ranks: Any, dataset: Any, params: SamplingParams, size: int, encoder: PromptEncoder, sampler: Sampler,
        scoring: Scoring,
    ) -> None:
        """`ranks` divide the batches among themselves (see trainer/distributed.py). `dataset` has the rows of all
        evaluation datasets, for preflight's checks."""
        self.ranks, self.dataset, self.params, self.size, self.encoder = ranks, dataset, params, size, encoder
        self.sampler, self.scoring = sampler, scoring

    def run(self, rows: Any, measure: Callable[[list[RolloutGroup]], dict[str, float]]) -> dict[str, float]:
        """Return rewards, lengths and logged metrics on `rows`, and those of `measure`; DataError if no row is
        usable."""
        encoded = [self.encoder.encode(rows[index]) for index in range(len(rows))]
        prompts = [prompt for prompt in encoded if isinstance(prompt, Prompt)]
        if not prompts:
            raise DataError(f"no row of the evaluation dataset can be used; the first one: {encoded[0]}")
        batches = [prompts[start : start + self.size] for start in range(0, len(prompts), self.size)]
        mine = [batches[place] for place in self.ranks.process.share(len(batches))]
        parts: list[Part] = self.ranks.gather("the evaluation", self.groups_of(mine))
        groups = [group for sampled, _ in parts for group in sampled]
        return measure(groups) | rollout_metrics(groups, self.scoring.names) | over_completions(parts)

    def groups_of(self, batches: list[list[Prompt]]) -> Part:
        """Return the sampled and scored groups of all batches, and the means of the logged columns and metrics."""
        groups: list[RolloutGroup] = []
        if not batches:
            return groups, {}
        with self.scoring.start_batch([prompt for batch in batches for prompt in batch]) as calls:
            for batch in batches:
                groups += self.sampler.sample(batch, self.params)
            scores = calls.settle(groups)
        self.scoring.apply(groups, scores)
        known = {name: [value for value in values if value is not None] for name, values in scores.extras.items()}
        means = {name: sum(values) / len(values) for name, values in known.items()
                 if values and all(isinstance(value, (int, float)) for value in values)}
        return groups, means | scores.metrics


def over_completions(parts: list[Part]) -> dict[str, float]:
    """Return the mean of each logged metric over the parts that logged it, weighted by each part's completions."""
    logs: dict[str, list[tuple[float, int]]] = {}
    for groups, logged in parts:
        size = sum(len(group.rollouts) for group in groups)
        for name, value in logged.items():
            logs.setdefault(name, []).append((value, size))
    return {name: sum(value * size for value, size in pairs) / sum(size for _, size in pairs)
            for name, pairs in logs.items()}


LONGEST = 100_000  # the most rows of a stream to evaluate on
OF_ALL = frozenset(name.removeprefix("_") for name in ("num_tokens", *speed("", 1.0, 1, 1)))  # in every evaluation
OF_LOSS = ("loss", "policy_loss", "kl", "entropy", *FIRST_WORDS, "sampling", "distillation",
           "mean_token_accuracy")  # the learner's metrics that evaluations have, as in TRL


def indexed_rows(dataset: Any, parameter: str, images: bool = False) -> Any:
    """Return indexable evaluation rows. A stream is read to its end; DataError if it has more than LONGEST rows."""
    rows = stream.rows_of(dataset, parameter, images)
    if not isinstance(rows, stream.Stream):
        return rows
    read = rows.peek(LONGEST + 1)
    if len(read) > LONGEST:
        raise DataError(f"{parameter} is a stream of more than {LONGEST:,} rows; pass list(stream.take(200))")
    return stream.rows_of(read, parameter, images)


def evaluation_sets(dataset: Any, args: TrainSettings, read: Callable[[Any, str], Any]) -> Any:
    """Return `read` of a dataset or of each in a dict; ValueError for None if the settings ask for evaluations."""
    if dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
        asked = f'eval_strategy is "{args.eval_strategy}"' if args.eval_strategy != "no" else "eval_on_start is True"
        raise ValueError(f"{asked}, which needs an eval_dataset; pass one")
    if isinstance(dataset, Mapping):
        if not dataset:
            raise DataError("eval_dataset is an empty dict; pass rows, or a dict of datasets by name")
        return {str(name): read(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}
    return None if dataset is None else read(dataset, "eval_dataset")


def evaluate_sets(trainer: Any, dataset: Any, prefix: str) -> dict[str, float]:
    """Evaluate `dataset` and return its metrics. `dataset` is rows, a dict of datasets by name, the name of one of
    the trainer's evaluation datasets, or None for all of the trainer's. ValueError for None if the trainer has none."""
    if isinstance(dataset, str) and isinstance(trainer.eval_sets, dict) and dataset in trainer.eval_sets:
        return evaluate_rows(trainer, trainer.eval_sets[dataset], prefix)
    rows = trainer.eval_sets if dataset is None else evaluation_sets(dataset, trainer.args, trainer.evaluation_rows)
    if rows is None:
        raise ValueError("there is no eval_dataset; pass one to the trainer, or to evaluate(eval_dataset=...)")
    sets = {f"{prefix}_{name}": part for name, part in rows.items()} if isinstance(rows, dict) else {prefix: rows}
    return {name: value for key, part in sets.items() for name, value in evaluate_rows(trainer, part, key).items()}


def evaluate_rows(trainer: Any, rows: Any, prefix: str) -> dict[str, float]:
    """Evaluate one dataset, log its metrics and its speed, and return them."""
    began, state = time.monotonic(), trainer.state
    measured = trainer.measure_evaluation(rows) | {"num_tokens": state.num_tokens}
    seconds, steps = time.monotonic() - began, math.ceil(len(rows) / trainer.args.per_device_eval_batch_size)
    metrics = {"step": state.global_step, "epoch": state.epoch,
               **{f"{prefix}_{name}": value for name, value in measured.items()},
               **speed(prefix, seconds, len(rows), steps)}
    trainer.log(metrics)
    trainer.notify("on_evaluate", metrics=metrics)
    return metrics


def check_best_metric(
    wanted: str | None, sets: Any, names: Collection[str], may_measure: Callable[[str], bool]
) -> None:
    """Raise ValueError if metric_for_best_model (`wanted`) names a metric that no evaluation can have."""
    several = isinstance(sets, dict)
    prefixes = [f"eval_{name}_" for name in sets] if several else ["eval_"]
    if wanted is None or any(wanted.startswith(prefix) and may_measure(wanted.removeprefix(prefix))
                             for prefix in prefixes):
        return
    listed = ", ".join(f"{prefixes[0]}{name}" for name in sorted(names))
    others = f", and the same of {', '.join(list(sets)[1:])}" if several and len(prefixes) > 1 else ""
    raise ValueError(f"metric_for_best_model: no evaluation has a metric {wanted!r}; it has {listed}{others}. What a "
                     "reward function logs counts where it names log_metric or log_extra as a parameter")
