"""The top of a report: what was trained, how it ended, how much is right before and after, and what it cost."""

from html import escape
from statistics import median
from typing import Any

from lowmem_grpo.units import count_text, size_text, time_text
from lowmem_grpo.views.accuracy import Measured, baselines, before_and_after
from lowmem_grpo.views.charts import taught

Record = dict[str, Any]

NOTHING = "\u2013"  # a dash where a value is missing
LONGEST_ERROR = 6000  # characters


def headline(name: str, rows: list[Record], summary: Record, missing: list[str], state: str = "") -> str:
    """Title and status, why a run ended early, accuracy, and tiles. `missing` is what the run did not leave behind,
    `state` what is known in place of the summary's status: that it is running, killed or silent now."""
    status = state or str(summary.get("status") or "running")
    title = escape(str(summary.get("recipe") or name))
    parts = [summary.get("model"), "supervised fine-tuning" if taught(summary) else None,
             name if summary.get("recipe") else None]
    about = " · ".join(escape(str(part)) for part in parts if part)
    tiles = "".join(tile(label, value) for label, value in facts_of(rows, summary).items())
    return (f'<header><h1>{title} <span class="status {escape(status)}">{escape(status)}</span></h1>'
            f'<p class="quiet">{about}</p>{ending(status, rows, summary, missing, bool(state))}{accuracy(summary)}'
            f'<div class="tiles">{tiles}</div></header>')


def ending(status: str, rows: list[Record], summary: Record, missing: list[str], known: bool = False) -> str:
    """Why a run is not finished and what to do, and what this page lacks; empty for a finished run with everything.
    `known` says that the status is that of now, and not that of when the page was written."""
    step, steps = reached(rows, summary)
    place = f"after step {step:,} of {steps:,}" if steps else f"after step {step:,}"
    said = {
        "finished": "",
        "failed": f"This run failed {place}.",
        "interrupted": f"This run was stopped {place}: by Ctrl-C, by a signal, or by a callback. The same command with "
                       "resume=true goes on.",
        "running": f"This page was written {place}, while the run was going on. If it no longer is, it was killed; "
                   "resume=true goes on from its last checkpoint.",
        "killed": f"This run was killed {place}: its process is gone, and did not say why. The same command with "
                  "resume=true goes on from its last checkpoint.",
        "silent": f"This run has written nothing for long {place}. Its process is on another machine, so that nobody "
                  "here knows whether it lives.",
    }.get(status, f"The status of this run is {status}, {place}.")
    if known and status == "running":
        return ""
    why = str(summary.get("error") or "")
    if status == "failed" and not why:
        said += " Why was not recorded; the output of the command tells."
    shown = f"<pre>{escape(clipped(why, LONGEST_ERROR))}</pre>" if why and status != "finished" else ""
    lacks = f"<p>Not on this page: {escape('; '.join(missing))}.</p>" if missing else ""
    if not said and not lacks:
        return ""
    return f'<div class="card ending {escape(status)}"><p><b>{escape(said)}</b></p>{shown}{lacks}</div>'


def reached(rows: list[Record], summary: Record) -> tuple[int, int | None]:
    """The last step, and how many were asked for, if that is known."""
    logged = rows[-1]["step"] if rows else 0
    asked = (summary.get("config") or {}).get("max_steps")
    return max(logged, summary.get("steps") or 0), asked if isinstance(asked, int) and asked > 0 else None


def clipped(text: str, longest: int) -> str:
    """A text of more than `longest` characters as its beginning and its end, and how much is left out."""
    half = longest // 2
    left_out = len(text) - 2 * half
    return text if len(text) <= longest else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def accuracy(summary: Record) -> str:
    """Right answers before and after training with their intervals, and the difference, if they were measured."""
    before, after = before_and_after(summary)
    if before is None and after is None:
        return ""
    nothing = "not yet measured" if summary.get("status") == "running" else "not measured"
    shown = " \u2192 ".join(nothing if each is None else f"{each.share:.1%}" for each in (before, after))
    lines = ["right answers before \u2192 after training"]
    if problems := summary.get("eval_problems"):
        lines[0] += f", n = {count_text(problems, 'held-out problem')}"
    if spans := [f"{span(each)} {when}" for each, when in ((before, "before"), (after, "after")) if span(each)]:
        lines.append(f"95% interval{'s' * (len(spans) > 1)}: {', '.join(spans)}")
    lines += paired(summary)
    if found := baselines(summary):
        lines.append("baselines: " + ", ".join(f"{name} {share:.1%}" for name, share in found.items()))
    told = "".join(f'<div class="quiet">{escape(line)}</div>' for line in lines)
    return f'<div class="card accuracy"><div class="number">{escape(shown)}</div>{told}</div>'


def span(found: Measured | None) -> str:
    """The interval in words; empty if it is not known."""
    return "" if found is None or found.interval is None else f"{found.interval[0]:.1%} to {found.interval[1]:.1%}"


def paired(summary: Record) -> list[str]:
    """The difference on the same problems, if the run measured it."""
    if not (change := summary.get("difference")):
        return []
    low, high = change["interval"]
    sure = "more than chance" if low > 0 or high < 0 else "may be chance"
    return [f"change {100 * change['accuracy']:+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f} "
            f"(paired on the same problems): {sure}"]


def facts_of(rows: list[Record], summary: Record) -> dict[str, str]:
    """The tiles: what each counts, and its value. What was not recorded has none."""
    last, machine = rows[-1] if rows else {}, summary.get("machine") or {}
    step, steps = reached(rows, summary)
    # the summary has it at the end; until then it has that of the last time, or 0
    known = (summary.get("train_seconds"), last.get("elapsed"))
    seconds = max((each for each in known if each is not None), default=None)
    made, noun = count_text(step, "step").split()
    if steps and steps != step:
        made, noun = f"{made} of {steps:,}", "steps"
    found = {noun: made, "training time": NOTHING if seconds is None else time_text(seconds)}
    if last.get("reward") is not None:
        spread = f" \u00b1 {last['reward_std']:.2f}" if last.get("reward_std") is not None else ""
        found["reward in the last step, mean and spread"] = f"{last['reward']:.2f}{spread}"
    if peaks := numbers(rows, "memory/peak_bytes"):
        found[memory_label(machine)] = size_text(max(peaks))
    for key, what in (("loss", "loss"), ("eval_loss", "evaluation loss")) if taught(summary) else ():
        if losses := numbers(rows, key):
            found[f"{what} of a trained token, first \u2192 last"] = f"{losses[0]:.3g} \u2192 {losses[-1]:.3g}"
    if taught(summary) and (tokens := numbers(rows, "num_tokens")):
        found["tokens read, of prompts and answers"] = f"{tokens[-1]:,.0f}"
    if speeds := numbers(rows, "tokens_per_second"):
        kind = "trained tokens per second" if taught(summary) else "tokens per second while sampling"
        found[f"{kind} (median)"] = f"{median(speeds):,.0f}"
    if times := numbers(rows, "step_time"):
        found["a step (median)"] = time_text(median(times))
    return found | machine_facts(machine)


def memory_label(machine: Record) -> str:
    """What the peak of memory is of."""
    if machine.get("card_bytes"):
        return f"peak memory, of {size_text(machine['card_bytes'])} on the card"
    return "peak memory of the process" if machine else "peak memory"


def machine_facts(machine: Record) -> dict[str, str]:
    """Size of the model, card and version."""
    found = {}
    if machine.get("parameters"):
        trained = short_text(machine.get("trainable_parameters") or 0)
        found[f"parameters ({machine.get('weights')} weights), {trained} more in the adapter"] = \
            short_text(machine["parameters"])
    if machine.get("card") or machine.get("processor"):
        found["card" if machine.get("card") else "processor (no card)"] = machine.get("card") or machine["processor"]
    if machine.get("version"):
        found[f"version of lowmem-grpo, with torch {machine.get('torch')}"] = str(machine["version"])
    return found


def short_text(count: float) -> str:
    """A number of parameters as people read it: 8.03 B, 1.2 M, 640 k."""
    for size, unit, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 0)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f}"


def numbers(rows: list[Record], key: str) -> list[float]:
    """The values of a metric, of the steps that logged it."""
    return [row[key] for row in rows if row.get(key) is not None]


def tile(label: str, value: str) -> str:
    """One number and what it counts."""
    css = "number" if len(value) <= 14 else "number long"
    return f'<div class="tile"><div class="{css}">{escape(value)}</div><div class="quiet">{escape(label)}</div></div>'
