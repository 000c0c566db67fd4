"""The result of `lowmem-grpo eval` on the terminal."""

from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from lowmem_grpo.runs.accuracy import changed_first
from lowmem_grpo.runs.records import prompt_text
from lowmem_grpo.views.answers import answers_table
from lowmem_grpo.views.console import any_console, print_line

MODELS = ("base", "adapter")
OF_EPISODES = (  # metric, words, format
    ("turns/mean", "turns of an episode", ".2f"), ("tools/call_frequency", "calls of tools", ".2f"),
    ("tools/failure_frequency", "of these failed", ".1%"), ("episodes/max_turns", "ended by max_turns", ".1%"),
    ("episodes/parse_error", "ended by unreadable calls", ".1%"), ("episodes/context", "did not fit", ".1%"),
    ("episodes/environment_error", "environment failed", ".1%"), ("episodes/timeout", "took too long", ".1%"),
)
LONGEST = 600  # characters of an answer that are shown


def show_result(result: dict[str, Any], note: str, shown: int, width: int | None = None) -> None:
    """Print the numbers, and the first answers to the first `shown` prompts side by side."""
    console = any_console(width=width, highlight=False)
    named = [name for name in MODELS if name in result]
    print_line(console, title(result, note))
    console.print(numbers_table(result, named))
    if "difference" in result:
        print_line(console, change_text(result))
    if shown:
        rows = [(prompt_text(row["prompt"]), row.get("answer"),
                 [(row[name][0]["text"], row[name][0]["right"]) for name in named])
                for row in first_shown(result["rows"], named, shown)]
        console.print(answers_table(("prompt", *named), rows, LONGEST))


def title(result: dict[str, Any], note: str) -> str:
    held = "4-bit" if result["load_in_4bit"] else "FP8" if result.get("load_in_fp8") else "16-bit"
    source = f"recipe {result['recipe']}" if result["recipe"] else result["dataset"]
    answers = "one answer" if result["samples"] == 1 else f"{result['samples']} answers"
    name = f"{result['model']} ({held} weights){f', {note}' if note else ''}"
    return (f"{name}: {result['prompts']} prompts of {source}, {answers} each at temperature {result['temperature']:g}")


def numbers_table(result: dict[str, Any], named: list[str]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("")
    for name in named:
        table.add_column(name, justify="right")
    results = [result[name] for name in named]
    episodes = [each.get("episodes", {}) for each in results]
    table.add_row("success rate" if episodes[0] else "accuracy", *(f"{each['accuracy']:.1%}" for each in results))
    table.add_row("95% interval", *(f"{each['interval'][0]:.1%} to {each['interval'][1]:.1%}" for each in results))
    for k in results[0]["pass_at_k"]:
        if k != "1":
            table.add_row(f"pass@{k}", *(f"{each['pass_at_k'][k]:.1%}" for each in results))
    for name in results[0].get("rewards", {}):
        table.add_row(name, *(f"{each['rewards'][name]:.3f}" for each in results))
    for name, words, form in OF_EPISODES:
        if any(each.get(name) for each in episodes):
            table.add_row(words, *(format(each.get(name, 0.0), form) for each in episodes))
    whole = "an episode" if episodes[0] else "an answer"
    table.add_row(f"tokens of {whole}", *(f"{each['mean_tokens']:.0f}" for each in results))
    for name, words in (("cut_off", f"cut off at {result['max_tokens']} tokens"), ("unjudged", "not judged")):
        if any(each[name] for each in results):
            table.add_row(words, *(f"{each[name]:.1%}" for each in results))
    return table


def change_text(result: dict[str, Any]) -> str:
    change = result["difference"]
    low, high = change["interval"]
    sure = "more than chance" if low > 0 or high < 0 else "may be chance: take more prompts (--limit)"
    interval = f"95% interval {100 * low:+.1f} to {100 * high:+.1f}, {sure}"
    return (f"adapter - base: {100 * change['accuracy']:+.1f} points ({interval}); prompts: "
            f"{change['better']} better, {change['worse']} worse, {change['same']} the same")


def first_shown(rows: list[dict[str, Any]], named: list[str], shown: int) -> list[dict[str, Any]]:
    """The first rows; of two models, those first whose answer changed between wrong and right."""
    if len(named) < 2:
        return rows[:shown]
    pairs = [(row[named[0]][0]["right"], row[named[1]][0]["right"]) for row in rows]
    return [rows[place] for place in changed_first(pairs, shown)]
