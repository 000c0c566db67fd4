"""The charts of a run, including its accuracy, and charts that compare several runs."""

from dataclasses import replace
from statistics import fmean

from lowmem_grpo.runs.accuracy import wilson_interval
from lowmem_grpo.runs.listeners import reward_name
from lowmem_grpo.runs.trajectory import ENDINGS
from lowmem_grpo.runs.views.chart import Chart, Line
from lowmem_grpo.runs.views.samples import Record
from lowmem_grpo.utils import GIB

OF_EPISODES = (
    Chart("Turns", "of the policy in an episode", "turns",
          {"turns/mean": "mean", "turns/min": "min", "turns/max": "max"}, from_zero=True),
    Chart("Tool calls", "", "calls of an episode", {"tools/call_frequency": "calls"}, from_zero=True),
    Chart("Tool failures", "calls that could not be read, or failed", "share of calls",
          {"tools/failure_frequency": "failed"}, share=True),
    Chart("Cached tokens", "of prompts, which the engine did not compute again", "share of prompt tokens",
          {"tokens/cached_share": "cached"}, share=True),
    Chart("Waiting for tools and environments", "by an episode, on average", "share of the time of sampling",
          {"tools/waiting_share": "waiting"}, share=True),
)
OF_TEACHER = (
    Chart("Divergence", "policy from its teacher", "nats per token", {"distillation/divergence": "divergence"}),
    Chart("Agreement", "tokens where policy and teacher have the same likeliest token", "share of tokens",
          {"distillation/agreement": "same"}, share=True),
    Chart("Successes", "that a teacher may be shown, and completions that are distilled", "share",
          {"self_distillation/success_group_fraction": "groups with a success",
           "self_distillation/reprompt_sample_fraction": "completions distilled",
           "self_distillation/cut_fraction": "with a part of what the teacher is told"}, share=True),
)
OF_CRITIC = (
    Chart("Critic", "explained variance: 1 if its values foretell the rewards, 0 if a constant does as well", "",
          {"critic/explained_variance": "explained variance"}),
    Chart("Critic's loss", "half the squared error of its values", "loss", {"critic/loss": "loss"}, from_zero=True),
    Chart("Values", "of the critic, and what they are to be", "reward",
          {"critic/values": "values", "critic/returns": "returns"}),
)
CHARTS = (
    Chart("Groups with signal", "whose completions differ in reward", "groups",
          {"groups/total": "all", "groups/with_signal": "with signal"}, from_zero=True),
    Chart("Completion length", "", "tokens",
          {"completions/mean_length": "mean", "completions/min_length": "min", "completions/max_length": "max"},
          from_zero=True),
    Chart("Completions cut off", "that reached the length limit", "share of completions",
          {"completions/clipped_ratio": "cut off"}, share=True),
    Chart("Repetition", "4-grams of tokens that occur earlier in the completion", "share of 4-grams",
          {"completions/repetition": "repeated"}, share=True),
    Chart("Entropy", "", "nats per token", {"entropy": "entropy", "distillation/teacher_entropy": "of the teacher"}),
    Chart("KL divergence", "policy from reference model", "nats per token", {"kl": "KL"}),
    Chart("Clip ratio", "tokens whose gradient was clipped away", "share of tokens",
          {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "clip_ratio/region_mean": "either"},
          share=True),
    Chart("Where the time goes", "", "share of each step",
          {"time/generate": "generate", "time/reward": "reward", "time/train": "train", "time/idle": "idle"},
          share=True, stacked=True, smooth=False),
    Chart("Seconds of a step", "", "seconds",
          {"step_time": "measured", "time/planned_step_s": "estimated from the card's data sheet"}, from_zero=True),
    Chart("Where the time of sampling goes", "tail: fewer than a quarter of the most sequences are left", "seconds",
          {"time/sampling/prefill_s": "prompts", "time/sampling/full_s": "full width", "time/sampling/tail_s": "tail"},
          from_zero=True, stacked=True, smooth=False),
    Chart("Tokens per second", "completion tokens, while generating", "tokens per second",
          {"tokens_per_second": "tokens/s", "tokens_per_second/full": "at full width",
           "tokens_per_second/tail": "in the tail"}, from_zero=True),
    Chart("Peak memory", "", "GiB", {"memory/peak_bytes": "peak"}, scale=1 / GIB, from_zero=True, smooth=False),
    Chart("Memory against the plan", "peak of each phase", "GiB",
          {"memory/generate_bytes": "sampling", "memory/planned_generate_bytes": "sampling, planned",
           "memory/train_bytes": "training", "memory/planned_train_bytes": "training, planned"}, scale=1 / GIB,
          from_zero=True, smooth=False),
    Chart("Loss", "not a measure of progress; watch the reward", "loss", {"loss": "loss"}),
    Chart("Gradient norm", "", "norm", {"grad_norm": "norm"}, from_zero=True),
    Chart("Learning rate", "", "learning rate", {"learning_rate": "rate"}, from_zero=True, smooth=False),
)
OF_TAUGHT = (  # in supervised fine-tuning, these replace the charts of the same title
    Chart("Loss", "mean of -log p over the trained tokens", "nats per token",
          {"loss": "train", "eval_loss": "evaluation"}),
    Chart("Tokens per second", "trained tokens, over the whole step", "tokens per second",
          {"tokens_per_second": "tokens/s"}, from_zero=True),
    Chart("Trained tokens", "", "tokens of a step", {"completions/tokens": "tokens"}, from_zero=True),
)
OF_PREFERENCES = (  # rewards of sides: beta times the log ratio of policy and reference; in ORPO beta times log p
    Chart("Chosen sides ahead", "of the rejected side of their pair, in reward", "share of pairs",
          {"rewards/accuracies": "train", "eval_rewards/accuracies": "evaluation"}, share=True),
    Chart("Rewards of both sides", "", "reward", {"rewards/chosen": "chosen", "rewards/rejected": "rejected",
                                                  "rewards/margins": "difference"}, from_zero=True),
)
OF_SCORES = (
    Chart("Pairs told apart", "the chosen side has the higher score", "share of pairs",
          {"accuracy": "train", "eval_accuracy": "evaluation"}, share=True),
    Chart("Scores", "of the texts of a step", "score", {"max_reward": "highest", "mean_reward": "mean",
                                                         "min_reward": "lowest", "margin": "difference of sides"}),
)
PREFERRING = {**dict.fromkeys(("dpo", "orpo", "kto"), OF_PREFERENCES), "reward": OF_SCORES}  # charts by method
DRAWN = {name for chart in (*OF_EPISODES, *OF_TEACHER, *OF_CRITIC, *CHARTS, *OF_TAUGHT, *OF_PREFERENCES, *OF_SCORES)
         for name in chart.metrics}
TOLD = {"reward", "reward_std", "eval_reward", "val/reward", "elapsed", "num_tokens"}  # in the reward chart or tiles
ALWAYS = ("Accuracy", "Reward", "Reward functions", "Verified right", "Groups with signal")  # drawn even if all 0
FAMILIES = ("rewards/", "verdicts/", "episodes/")


def is_drawn(name: str) -> bool:
    return name in DRAWN or name in TOLD or name.startswith(FAMILIES)


def taught(summary: Record) -> bool:
    """Return whether the run trained on given completions, which are not recorded."""
    return summary.get("method") in ("sft", *PREFERRING)


def figures(rows: list[Record], completions: list[Record] | None = None, summary: Record | None = None) -> list[Chart]:
    """Return the charts that have data. `completions` and `summary` are used for the accuracy chart."""
    names = sorted({name for row in rows for key in row if (name := reward_name(key))})
    functions = Chart("Reward functions", "mean of each", "reward", {f"rewards/{name}/mean": name for name in names})
    verifiers = sorted({key.removeprefix("verdicts/") for row in rows for key in row if key.startswith("verdicts/")})
    verdicts = Chart("Verified right", "by the verifier, whatever the reward", "share of completions",
                     {f"verdicts/{name}": name for name in verifiers}, share=True)
    charts = [functions, verdicts, *OF_TEACHER, *OF_CRITIC, *OF_EPISODES, *CHARTS]
    if not any("reward" in row for row in rows):
        charts = [replace(chart, note="") if chart.title == "Loss" else chart for chart in charts]
    if taught(summary or {}):
        own = {chart.title for chart in OF_TAUGHT}
        charts = [*OF_TAUGHT, *(chart for chart in CHARTS if chart.title not in own)]
    if own_charts := PREFERRING.get((summary or {}).get("method", "")):
        charts = [*own_charts, *(replace(chart, note="", axis="loss") if chart.title == "Loss" else chart
                                 for chart in charts)]
    drawn = [accuracy_chart(completions or [], summary or {}), reward_chart(rows), endings_chart(rows)]
    for chart in charts:
        lines = [Line(name, points(rows, key, chart.scale), dots=key.startswith("eval_"))
                 for key, name in chart.metrics.items()]
        drawn.append(replace(chart, lines=[line for line in lines if line.points]))
    return [chart for chart in drawn if chart.lines and (len(chart.lines[0].points) > 1 or not chart.stacked)]


def split_flat(charts: list[Chart]) -> tuple[list[Chart], str]:
    """Return the charts to draw, and a sentence with the titles of those left out because they are 0 in every step."""
    flat = [chart for chart in charts if chart.title not in ALWAYS
            and not any(value for line in chart.lines for _, value in line.points)]
    words = f"At 0 in every step: {', '.join(chart.title.lower() for chart in flat)}." if flat else ""
    return [chart for chart in charts if chart not in flat], words


def endings_chart(rows: list[Record]) -> Chart:
    """Return the chart of each ending's share of the episodes, for endings that occurred."""
    played = [row for row in rows if any(f"episodes/{name}" in row for name in ENDINGS)]
    lines = [Line(name, [(row["step"], row.get(f"episodes/{name}") or 0.0) for row in played]) for name in ENDINGS
             if any(row.get(f"episodes/{name}") for row in played)]
    return Chart("Ends of episodes", "by reason", "share of episodes", share=True, stacked=True, smooth=False,
                 lines=lines)


def points(rows: list[Record], key: str, scale: float = 1.0) -> list[tuple[int, float]]:
    return [(row["step"], row[key] * scale) for row in rows if row.get(key) is not None]


def reward_chart(rows: list[Record]) -> Chart:
    """Return the chart of the mean reward with its standard deviation, and of evaluation rewards if logged."""
    banded = [row for row in rows if row.get("reward") is not None]
    spread = [row.get("reward_std") or 0.0 for row in banded]
    edges = [(row["reward"] - std, row["reward"] + std) for row, std in zip(banded, spread, strict=True)]
    lines = [Line("train", points(rows, "reward"), edges if any(spread) else []),
             Line("evaluation", points(rows, "eval_reward") or points(rows, "val/reward"), dots=True)]
    note = "mean; band: one standard deviation on each side" if any(spread) else "mean"
    return Chart("Reward", note, "reward", lines=[line for line in lines if line.points])


def comparison(runs: dict[str, list[Chart]]) -> list[Chart]:
    """Return a chart per title, with the main line of each run's chart of that title. Stacked charts are left out."""
    titles = dict.fromkeys(chart.title for charts in runs.values() for chart in charts if not chart.stacked)
    compared = []
    for title in titles:
        charts = {name: next((chart for chart in each if chart.title == title), None) for name, each in runs.items()}
        # one line per run, even if empty, so that each run keeps its colour
        lines = [Line(name, main_line(chart).points if chart else []) for name, chart in charts.items()]
        first = next(chart for chart in charts.values() if chart is not None)
        main = main_line(first).name
        note = first.note if main in ("", "train") else ", ".join(filter(None, (main, first.note)))
        compared.append(replace(first, note=note, metrics={}, lines=lines))
    return compared


def main_line(chart: Chart) -> Line:
    """Return a chart's first line that is a curve; if there is no curve, its first line."""
    return next((line for line in chart.lines if not (line.dots or line.level)), chart.lines[0])


def measured(summary: Record) -> dict[str, tuple[int, float, tuple[float, float] | None]]:
    """Return the measured accuracies on held-out problems, by "before" and "after" training, as (step, share, 95%
    interval). The interval is None if the number of problems is unknown."""
    steps, problems = {"before": 0, "after": summary.get("steps") or 0}, summary.get("eval_problems")
    return {when: (step, share, wilson_interval(share, problems) if problems else None)
            for when, step in steps.items() if (share := summary.get(f"accuracy_{when}")) is not None}


def accuracy_chart(completions: list[Record], summary: Record) -> Chart:
    """Return the chart of the accuracy in training, and on held-out problems before and after training."""
    sampled = [line for line in completions if "replayed_from" not in line]
    lines = [Line(f"sampled in training ({name})", shares(sampled, name)) for name in deciding(sampled, summary)]
    tests = measured(summary).values()
    dots = Line("held-out problems, with 95% interval", [(step, share) for step, share, _ in tests],
                [interval for *_, interval in tests if interval is not None], dots=True)
    drawn = [line for line in (*lines, dots) if line.points]
    steps = sorted({step for line in drawn for step, _ in line.points})
    levels = [Line(f"baseline {name}, {share:.1%}", [(step, share) for step in steps], level=True)
              for name, share in baselines(summary).items() if steps]  # such as random and perfect play
    return Chart("Accuracy", "answers that are right", "share of answers", share=True, lines=[*drawn, *levels])


def baselines(summary: Record) -> dict[str, float]:
    """Return baseline accuracies by name: `baselines` of the summary, each a share or a record with a `share`."""
    held = summary.get("baselines")
    shares = {str(name): value.get("share") if isinstance(value, dict) else value
              for name, value in (held.items() if isinstance(held, dict) else ())}
    return {name: float(share) for name, share in shares.items() if isinstance(share, (int, float))}


def deciding(completions: list[Record], summary: Record) -> list[str]:
    """Return the reward functions that decide what is right: the summary's, else all that paid only 0 and 1."""
    paid: dict[str, set[float]] = {}
    for line in completions:
        for name, value in (line.get("rewards") or {}).items():
            paid.setdefault(name, set()).update(() if value is None else (value,))
    if summary.get("right") in paid:
        return [summary["right"]]
    return [name for name, values in paid.items() if values and values <= {0, 1}]


def shares(completions: list[Record], name: str) -> list[tuple[int, float]]:
    """Return, per step, the share of judged completions for which reward function `name` pays more than 0."""
    steps: dict[int, list[bool]] = {}
    for line in completions:
        if (value := (line.get("rewards") or {}).get(name)) is not None:
            steps.setdefault(line["step"], []).append(value > 0)
    return [(step, fmean(right)) for step, right in sorted(steps.items())]
