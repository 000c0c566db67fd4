"""The result of a check of reward functions, and its tables. What a model wrote is shown as text, without style."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowmem_grpo.rewards.checking.trials import Trial
from lowmem_grpo.runs.findings import Finding, has_error
from lowmem_grpo.views.console import any_console, plain, print_line, shortened

COLORS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
PROMPTS = 2  # whose best and worst completions are shown
AMOUNTS = ("weight", "mean", "lowest", "highest", "none", "empty", "right", "seconds")
DROPPED = ("seconds", "kind", "none", "empty", "lowest", "weight")  # in this order, on a narrow terminal
LONGEST = 300  # characters of a prompt or completion: its beginning and its end


@dataclass
class RewardCheck:
    """The result of `rewards.check`."""

    findings: list[Finding]  # errors first
    trials: list[Trial]  # one for each function, in order
    prompts: list[str]  # (P,) texts as the model sees them
    completions: list[str]  # (P * G,) prompt by prompt
    totals: list[float | None]  # (P * G,) weighted sums
    groups: int
    groups_with_signal: int
    signal_share: float  # share of groups whose completions differ in their sum
    signal_interval: tuple[float, float]  # 95% Wilson interval of that share
    seconds: float  # for the whole check
    columns: list[str] = field(default_factory=list)  # of the dataset

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_error(self.findings)

    def of(self, function: str) -> list[Finding]:
        """Return the findings about one function, by its name."""
        return [finding for finding in self.findings if finding.about == function]

    def to_dict(self) -> dict[str, Any]:
        """Return findings and shares as plain values, for a record of the run."""
        return {
            "findings": [vars(finding) for finding in self.findings], "signal_share": self.signal_share,
            "signal_interval": list(self.signal_interval), "groups": self.groups, "seconds": self.seconds,
        }


def print_check(result: RewardCheck, console: Console | None = None) -> None:
    """Print what each function paid, a few completions with their pay, the signal, and the findings."""
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
    """Return the table of functions, without the columns for which the terminal has no room beside whole names."""
    tables = (functions_table(result, DROPPED[:count]) for count in range(len(DROPPED)))
    fits = (table for table in tables if console.measure(table).maximum < console.width)
    return next(fits, functions_table(result, DROPPED))


def functions_table(result: RewardCheck, without: tuple[str, ...]) -> Table:
    """Return one line for each function, without some of the columns."""
    table = Table(title="What the reward functions pay", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("function", overflow="fold")
    shown = [name for name in ("kind", *AMOUNTS) if name not in without]
    for name in shown:
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for trial in result.trials:
        cells = dict(zip(("kind", *AMOUNTS), cells_of(trial), strict=True))
        table.add_row(plain(trial.name), *(cells[name] for name in shown))
    return table


def cells_of(trial: Trial) -> list[str]:
    """Return the kind, and the amounts in the order of AMOUNTS."""
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
    """Return the best and the worst completion of the first prompts, with what each function paid for them. Names of
    functions are not broken if they fit into half of `width` characters."""
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
