"""The live view of a run in the terminal, redrawn at each log; one plain line per log if piped. No thread redraws it,
since a forked reward function could inherit the thread's lock."""

import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowmem_grpo.runs.listeners import numbers, reward_name
from lowmem_grpo.runs.trajectory import ENDINGS, turn_records
from lowmem_grpo.runs.views.chart import LINES, intervals
from lowmem_grpo.runs.views.console import Cell, any_console, episode_lines, plain, print_line, shortened
from lowmem_grpo.types import Rollout
from lowmem_grpo.utils import size_text, time_text

BLOCKS = "▁▂▃▄▅▆▇█"
OF_EPISODES = (  # label, metric, format
    ("tools", "tools/call_frequency", "{:.2f} calls an episode"),
    ("failed", "tools/failure_frequency", "{:.0%} of calls"),
    ("waiting", "tools/waiting_share", "{:.0%} of sampling time"),
    ("cached", "tokens/cached_share", "{:.0%} of prompt tokens"),
)
CURVES = (  # metric, its label on the panel, and in a plain line
    ("eval_reward", "evaluation reward", "eval_reward"), ("turns/mean", "turns", "turns"),
    ("distillation/divergence", "divergence from teacher", "divergence"),
    ("distillation/agreement", "agreement with teacher", "agreement"),
    ("completions/mean_length", "completion length", "length"), ("entropy", "entropy", "entropy"),
    ("distillation/teacher_entropy", "entropy of teacher", "teacher's entropy"), ("kl", "KL", "kl"),
    ("tokens_per_second", "tokens/s", "tokens/s"), ("memory/peak_bytes", "peak memory", "memory"),
)
OF_RANKS = {"generate_s": "sampling", "train_s": "training", "waiting_s": "waiting for others"}
OF_SAMPLING = {
    "time/sampling/prefill_s": "prompts", "time/sampling/full_s": "full width", "time/sampling/tail_s": "tail",
}
SHARES = ("generate", "reward", "train", "idle")
MAX_WIDTH = 100
SAMPLE_SECONDS = 20.0  # least time that a sample stays on the panel
SAMPLE_LENGTH, SAMPLE_LINES = 400, 8  # a sample's characters, and its lines on the panel
EPISODE_LINES = 12


class StepTimes:
    """The times of steps. The first step includes warm-up, so its time is used only until the second step is done."""

    def __init__(self) -> None:
        self.start_at(0)

    def start_at(self, step: int) -> None:
        self.marks = [(step, time.monotonic())]

    def mark(self, step: int) -> None:
        if step != self.marks[-1][0]:
            self.marks = [*self.marks[:2], (step, time.monotonic())]

    @property
    def per_step(self) -> float | None:
        if len(self.marks) < 2:
            return None
        (first, began), (last, now) = self.marks[-2:]
        return (now - began) / (last - first)

    def left(self, max_steps: int) -> float | None:
        each = self.per_step
        return None if each is None else each * max(max_steps - self.marks[-1][0], 0)


class LiveView:
    """The live view, a listener with the methods of transformers' TrainerCallback. Its creator calls `close()`."""

    title = "GRPO"
    first: tuple[tuple[str, str, str], ...] = ()  # entries of `curves` that a subclass puts first

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or any_console()
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self.draws = terminal or self.console.is_jupyter
        self.live: Live | Cell | None = None
        self.sample: Rollout | None = None
        self.sampled_at = -math.inf
        self.history: dict[str, list[float]] = {}
        self.step = self.max_steps = 0
        self.step_times = StepTimes()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        self.history = {}
        self.step, self.max_steps = state.global_step, state.max_steps
        self.step_times.start_at(self.step)
        if self.draws:
            self.live = Cell(MAX_WIDTH) if self.console.is_jupyter else Live(console=self.console, auto_refresh=False)
            self.live.start()
            self.live.update(self.panel(), refresh=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = {key: value for key, value in numbers(logs).items() if math.isfinite(value)}
        if "train_runtime" in logs:  # the summary of the whole run, which `train` returns
            return
        self.step, self.max_steps = state.global_step, state.max_steps
        self.step_times.mark(self.step)
        for key, value in logs.items():
            self.history.setdefault(key, []).append(value)
        if self.live is not None:
            self.live.update(self.panel(), refresh=True)
        elif not self.draws and logs:
            self.console.print(Text(self.line(logs)), soft_wrap=True)

    def on_step_end(self, args: Any, state: Any, control: Any, groups: Any = (), **kwargs: Any) -> None:
        """Keep one of the step's completions for the panel, at most every `SAMPLE_SECONDS`."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if rollouts and time.monotonic() - self.sampled_at >= SAMPLE_SECONDS:
            self.sample, self.sampled_at = rollouts[state.global_step % len(rollouts)], time.monotonic()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        live, self.live = self.live, None
        if live is not None:
            live.stop()

    def time_left(self) -> str:
        left = self.step_times.left(self.max_steps)
        return "unknown" if left is None else time_text(round(left))

    def say(self, text: str) -> None:
        print_line(self.console, text)

    def panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        head.add_row(
            Text(f"step {self.step}/{self.max_steps}", style="bold"),
            ProgressBar(total=max(self.max_steps, 1), completed=self.step, complete_style=LINES[0]),
            Text(f"left {self.time_left()}"),
        )
        width = min(self.console.width, MAX_WIDTH)
        parts = [head, Text(), self.table(), self.words(), *self.sample_lines()]
        return Panel(Group(*parts), title=Text(self.title), border_style=LINES[0], width=width)

    def sample_lines(self) -> list[RenderableType]:
        """Return the kept sample: its reward, and the first lines of a completion or the lines of an episode."""
        if self.sample is None:
            return []
        reward = "" if self.sample.reward is None else f", reward {self.sample.reward:.3f}"
        if self.sample.turns:
            title = f"an episode{reward}, ended by {self.sample.ending}"
            return [Text(), Text(title, style="bold"), *episode_lines(turn_records(self.sample), EPISODE_LINES)]
        lines = plain(shortened(self.sample.text.strip(), SAMPLE_LENGTH)).split(allow_blank=True)
        cut = [Text("...")] if len(lines) > SAMPLE_LINES else []
        return [Text(), Text(f"a completion{reward}", style="bold"), *lines[:SAMPLE_LINES], *cut]

    def table(self) -> Table:
        """Return a table with each metric's current value and its history as a sparkline."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold", overflow="ellipsis", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for key, label, _ in self.curves(self.history):
            if key in self.history:
                value = shown(key, self.history[key][-1]) + self.deviation(key, " \u00b1 ")
                table.add_row(Text(label), Text(value), Text(sparkline(self.history[key])))
        return table

    def words(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        now = {key: values[-1] for key, values in self.history.items()}
        for label, value in in_words(now).items():
            table.add_row(Text(label), Text(value))
        return table

    def curves(self, logged: Iterable[str]) -> list[tuple[str, str, str]]:
        """Return (key, label on the panel, label in a line) of all metrics to show, the most important first."""
        functions = [(key, f"  {name}", name) for key in logged if (name := reward_name(key))]
        return [*self.first, ("reward", "reward", "reward"), *functions, *CURVES]

    def deviation(self, key: str, before: str, after: str = "") -> str:
        deviations = self.history.get("reward_std") if key == "reward" else None
        return f"{before}{deviations[-1]:.3f}{after}" if deviations else ""

    def line(self, logs: dict[str, float]) -> str:
        parts = [f"step {self.step}/{self.max_steps}"]
        parts += [f"{name} {shown(key, logs[key])}{self.deviation(key, ' (std ', ')')}"
                  for key, _, name in self.curves(logs) if key in logs]
        parts += [f"{'time:' if label == 'time' else label} {value}" for label, value in in_words(logs).items()]
        return "  ".join([*parts, f"left {self.time_left()}"])


class DistillationView(LiveView):
    title = "Distillation"


class SFTView(LiveView):
    """The live view of supervised fine-tuning, which begins with the loss."""

    title, first = "SFT", (("loss", "loss", "loss"), ("eval_loss", "evaluation loss", "eval_loss"))


class PreferenceView(LiveView):
    """The live view of training on preferences: the loss, and how far the preferred sides are ahead."""

    title, first = "Preferences", (
        *SFTView.first, ("rewards/accuracies", "preferred sides ahead", "accuracy"),
        ("eval_rewards/accuracies", "ahead in evaluation", "eval_accuracy"), ("rewards/margins", "margin", "margin"),
        ("rewards/chosen", "reward of chosen", "chosen"), ("rewards/rejected", "reward of rejected", "rejected"))


class RewardView(LiveView):
    """The live view of training a reward model: the loss, and how far the chosen sides' scores are ahead."""

    title, first = "Reward model", (
        *SFTView.first, ("accuracy", "chosen sides ahead", "accuracy"),
        ("eval_accuracy", "ahead in evaluation", "eval_accuracy"), ("margin", "margin", "margin"),
        ("mean_reward", "mean score", "mean_reward"))


def shown(key: str, value: float) -> str:
    if key == "memory/peak_bytes":
        return size_text(value)
    if key in ("completions/mean_length", "tokens_per_second"):
        return f"{value:.0f}"
    if key == "turns/mean":
        return f"{value:.1f}"
    return f"{value:.2e}" if 0 < abs(value) < 0.001 else f"{value:.3f}"


def in_words(logs: dict[str, float]) -> dict[str, str]:
    """Return a log's text lines by label: times, endings of episodes, tools, ranks, groups with signal."""
    lines = {}
    if times := [f"{name} {logs[f'time/{name}']:.0%}" for name in SHARES if f"time/{name}" in logs]:
        lines["time"] = " ".join(times)
    if {*OF_SAMPLING} <= logs.keys():
        lines["sampling"] = " ".join(f"{name} {logs[key]:.2f} s" for key, name in OF_SAMPLING.items())
    if {"step_time", "time/planned_step_s"} <= logs.keys():
        lines["step"] = f"{logs['step_time']:.2f} s, estimated {logs['time/planned_step_s']:.2f} s"
    if ends := [f"{name} {share:.0%}" for name in ENDINGS if (share := logs.get(f"episodes/{name}"))]:
        lines["ended by"] = " ".join(ends)
    lines |= {label: words.format(logs[key]) for label, key, words in OF_EPISODES if key in logs}
    ranks = sorted({int(match[1]) for key in logs if (match := re.fullmatch(r"ranks/(\d+)/busy_s", key))})
    lines |= {f"rank {rank}": " ".join(f"{name} {logs[key]:.2f} s" for part, name in OF_RANKS.items()
                                       if (key := f"ranks/{rank}/{part}") in logs) for rank in ranks}
    if (successes := logs.get("self_distillation/success_group_fraction")) is not None:
        lines["groups with a success"] = f"{successes:.0%}"
    elif {"groups/with_signal", "groups/total"} <= logs.keys():
        lines["groups with signal"] = f"{logs['groups/with_signal']:.0f}/{logs['groups/total']:.0f}"
    return lines


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Return the whole history in at most `width` blocks, each a mean, scaled from lowest to highest."""
    count = min(len(values), width)
    means = [sum(values[start:end]) / (end - start) for start, end in intervals(len(values), count)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


class TrajectoryView(LiveView):
    """A line for each step, without a panel: the terminal belongs to the caller's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False

    def line(self, logs: dict[str, float]) -> str:
        """Return a step's line, without unknown max_steps and time left; a log without a loss shows all its metrics."""
        if "loss" not in logs:
            own = (f"{name} {shown(name, value)}" for name, value in logs.items() if name not in ("step", "epoch"))
            return "  ".join([f"step {logs['step']:.0f}", *own])
        head, *middle, left = super().line(logs).split("  ")
        known = self.step < self.max_steps
        return "  ".join([head, *middle, left] if known else [head.partition("/")[0], *middle])
