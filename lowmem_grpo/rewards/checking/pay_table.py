"""Shows a check of reward functions on the terminal. What a model wrote is shown as text and cannot style it."""

from statistics import fmean

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowmem_grpo.rewards.checking.result import RewardCheck, Trial
from lowmem_grpo.views.answers import plain, shortened
from lowmem_grpo.views.console import any_console

COLORS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
PROMPTS = 2  # whose best and worst completions are shown
AMOUNTS = ("weight", "mean", "lowest", "highest", "none", "empty", "right", "seconds")
DROPPED = ("seconds", "kind", "none", "empty", "lowest", "weight")  # in this order, on a narrow terminal
LONGEST = 300  # characters of a prompt or completion: its beginning and its end


def print_check(result: RewardCheck, console: Console | None = None) -> None:
    """Print what each function paid, a few completions with their pay, the signal, and the findings."""
    console = console or any_console()
    console.print(fitting_table(result, console))
    console.print(samples_table(result, console.width))
    low, high = result.signal_interval
    console.print(Text(
        f"groups with signal: {result.groups_with_signal} of {result.groups}, {result.signal_share:.0%} (95% interval "
        f"{low:.0%} to {high:.0%}); {len(result.completions)} completions checked in {result.seconds:.1f} s"
    ), soft_wrap=True)
    for finding in result.findings:
        severity = (finding.severity, COLORS[finding.severity])
        console.print(Text.assemble(severity, " ", plain(str(finding))), soft_wrap=True)
    if not result.findings:
        console.print(Text("no problems found"))


def fitting_table(result: RewardCheck, console: Console) -> Table:
    """The table of functions, without the columns for which the terminal has no room next to the whole names."""
    tables = (functions_table(result, DROPPED[:count]) for count in range(len(DROPPED)))
    fits = (table for table in tables if console.measure(table).maximum < console.width)
    return next(fits, functions_table(result, DROPPED))


def functions_table(result: RewardCheck, without: tuple[str, ...] = ()) -> Table:
    """One line for each function, without some of the columns."""
    table = Table(title="What the reward functions pay", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("function", overflow="fold")
    for name in ("kind", *AMOUNTS):
        if name not in without:
            table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for trial in result.trials:
        cells = [trial.kind, f"{trial.weight:g}", *amounts(trial), f"{trial.seconds:.3f}"]
        pairs = zip(("kind", *AMOUNTS), cells, strict=True)
        table.add_row(plain(trial.name), *(cell for name, cell in pairs if name not in without))
    return table


def amounts(trial: Trial) -> list[str]:
    """mean, lowest, highest, share of None, pay of the empty answer, share of right verdicts."""
    if trial.error is not None:
        return ["failed", *[""] * 5]
    paid, empty = trial.paid, [pay for pay in trial.empty if pay is not None]
    numbers = [fmean(paid), min(paid), max(paid)] if paid else [None] * 3
    none = 1 - len(paid) / len(trial.pays)
    right = "" if trial.verdicts is None else f"{trial.verdicts:.0%}"
    return [*map(number, numbers), f"{none:.0%}" if none else "", number(fmean(empty) if empty else None), right]


def number(value: float | None) -> str:
    return "None" if value is None else f"{value:.3g}"


def samples_table(result: RewardCheck, width: int) -> Table:
    """The best and the worst completion of the first prompts, with what each function paid for them. Names of functions
    are not broken if they fit into half of `width` characters."""
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
            table.add_row(plain(shown), plain(completion), pay_of(result, index))
    return table


def pay_of(result: RewardCheck, index: int) -> Text:
    """Each function's pay for one completion, and their weighted sum."""
    lines = [f"{trial.name} {number(trial.pays[index])}" for trial in result.trials if trial.error is None]
    return plain("\n".join([*lines, f"sum {number(result.totals[index])}"]))
