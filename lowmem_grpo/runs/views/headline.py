"""The top of a run's page: title, status, ending, accuracy, tiles with facts, and alarms."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from lowmem_grpo.runs.accuracy import interval_text
from lowmem_grpo.runs.alarms import ALARMS
from lowmem_grpo.runs.views.charts import baselines, measured, taught
from lowmem_grpo.runs.views.samples import Record, clipped
from lowmem_grpo.utils import count_text, size_text, time_text

NOTHING = "\u2013"  # a dash for a missing value
LONGEST_ERROR = 6000  # characters
ENDED = {
    "finished": "",
    "failed": "This run failed {place}.",
    "interrupted": "This run was stopped {place}: by Ctrl-C, by a signal, or by a callback. The same command with "
                   "resume=true continues it.",
    "running": "This page was written {place}, while the run was in progress. If the run has ended since, it "
               "was killed; resume=true continues it from its last checkpoint.",
    "killed": "This run was killed {place}: its process is gone and recorded no error. The same command with "
              "resume=true continues it from its last checkpoint.",
    "silent": "This run has written nothing for a long time {place}. Its process is on another machine, so it cannot "
              "be told here whether it still runs.",
}
LOSSES = {"loss": "loss", "eval_loss": "evaluation loss"}
METHODS = {"sft": "supervised fine-tuning", "distillation": "distillation", "sdpo": "self-distillation",
           "sdft": "self-distillation", "dpo": "direct preference optimization",
           "orpo": "odds-ratio preference optimization", "kto": "Kahneman-Tversky optimization",
           "reward": "reward model"}
PREFIX = "alarms/"


def headline(name: str, rows: list[Record], summary: Record, missing: list[str], state: str = "") -> Record:
    """Return the top of a run's page. `state` (running, killed or silent) overrides the summary's status."""
    status = state or str(summary.get("status") or "running")
    about = [summary.get("model"), METHODS.get(str(summary.get("method"))),
             name if summary.get("recipe") else None]
    return {"title": str(summary.get("recipe") or name), "status": status,
            "about": " · ".join(str(part) for part in about if part),
            "ending": None if state == "running" else ending(status, rows, summary, missing),
            "accuracy": accuracy(summary) or None, "tiles": list(facts_of(rows, summary).items())}


def ending(status: str, rows: list[Record], summary: Record, missing: list[str]) -> Record | None:
    """Return why a run ended early, its error, and what its page lacks; None for a finished run that lacks nothing."""
    step, steps = reached(rows, summary)
    place = f"after step {step:,} of {steps:,}" if steps else f"after step {step:,}"
    said = ENDED.get(status, "The status of this run is {status}, {place}.").format(status=status, place=place)
    why = str(summary.get("error") or "")
    if status == "failed" and not why:
        said += " The reason was not recorded; see the output of the command."
    lacks = f"Not on this page: {'; '.join(missing)}." if missing else ""
    error = clipped(why, LONGEST_ERROR) if status != "finished" else ""
    return {"said": said, "error": error, "lacks": lacks} if said or lacks else None


def reached(rows: list[Record], summary: Record) -> tuple[int, int | None]:
    """Return the last step, and max_steps if it is known."""
    logged = rows[-1]["step"] if rows else 0
    asked = summary.get("max_steps") or (summary.get("config") or {}).get("max_steps")
    return max(logged, summary.get("steps") or 0), asked if isinstance(asked, int) and asked > 0 else None


def accuracy(summary: Record) -> list[str]:
    """Return lines with the accuracy before and after training, intervals and difference; [] if not measured."""
    tests = measured(summary)
    if not tests:
        return []
    nothing = "not yet measured" if summary.get("status") == "running" else "not measured"
    shown = " \u2192 ".join(f"{tests[when][1]:.1%}" if when in tests else nothing for when in ("before", "after"))
    problems = summary.get("eval_problems")
    lines = ["right answers before \u2192 after training"
             + (f", n = {count_text(problems, 'held-out problem')}" if problems else "")]
    if spans := [f"{span[0]:.1%} to {span[1]:.1%} {when}" for when, (*_, span) in tests.items() if span]:
        lines.append(f"95% interval{'s' * (len(spans) > 1)}: {', '.join(spans)}")
    lines += paired(summary)
    if kinds := summary.get("kinds"):
        lines.append("by kind: " + ", ".join(f"{kind} {found['before']:.0%} \u2192 {found['after']:.0%}"
                                             for kind, found in kinds.items()))
    if others := baselines(summary):
        lines.append("baselines: " + ", ".join(f"{name} {share:.1%}" for name, share in others.items()))
    return [shown, *lines]


def paired(summary: Record) -> list[str]:
    """Return the line on the paired difference; [] if it was not measured."""
    if not (change := summary.get("difference")):
        return []
    low, high = change["interval"]
    sure = "more than chance" if low > 0 or high < 0 else "may be chance"
    return [f"change {100 * change['accuracy']:+.1f} points, {interval_text(change['interval'])} (paired on the same "
            f"problems): {sure}"]


def facts_of(rows: list[Record], summary: Record) -> dict[str, str]:
    """Return the tiles of the page: values by label."""
    last, machine = rows[-1] if rows else {}, summary.get("machine") or {}
    step, steps = reached(rows, summary)
    # during a run the summary has the value of an earlier start, or 0
    known = (summary.get("train_seconds"), last.get("elapsed"))
    seconds = max((value for value in known if value is not None), default=None)
    made, noun = count_text(step, "step").split()
    if steps and steps != step:
        made, noun = f"{made} of {steps:,}", "steps"
    facts = {noun: made, "training time": NOTHING if seconds is None else time_text(seconds)}
    if last.get("reward") is not None:
        spread = f" \u00b1 {last['reward_std']:.2f}" if last.get("reward_std") is not None else ""
        facts["reward in the last step, mean and spread"] = f"{last['reward']:.2f}{spread}"
    if apart := numbers(rows, "distillation/divergence"):
        facts["nats of divergence from the teacher, first \u2192 last"] = f"{apart[0]:.3g} \u2192 {apart[-1]:.3g}"
    if peaks := numbers(rows, "memory/peak_bytes"):
        card = machine.get("card_bytes")
        whose = f", of {size_text(card)} on the card" if card else " of the process" if machine else ""
        facts[f"peak memory{whose}"] = size_text(max(peaks))
    if taught(summary):
        of = " of a trained token" if summary.get("method") == "sft" else ""
        facts |= {f"{words}{of}, first \u2192 last": f"{losses[0]:.3g} \u2192 {losses[-1]:.3g}"
                  for key, words in LOSSES.items() if (losses := numbers(rows, key))}
        if ahead := numbers(rows, "rewards/accuracies") or numbers(rows, "accuracy"):
            facts["pairs whose chosen side is ahead, first \u2192 last"] = f"{ahead[0]:.1%} \u2192 {ahead[-1]:.1%}"
        if tokens := numbers(rows, "num_tokens"):
            facts["tokens read, of prompts and answers"] = f"{tokens[-1]:,.0f}"
    if speeds := numbers(rows, "tokens_per_second"):
        kind = "trained tokens per second" if taught(summary) else "tokens per second while sampling"
        facts[f"{kind} (median)"] = f"{median(speeds):,.0f}"
    if times := numbers(rows, "step_time"):
        facts["a step (median)"] = time_text(median(times))
    return facts | machine_facts(machine)


def machine_facts(machine: Record) -> dict[str, str]:
    """Return {what is counted: its text} of a run's `machine` in summary.json, such as parameters and the card."""
    facts = {}
    if machine.get("parameters"):
        trained = short_text(machine.get("trainable_parameters") or 0)
        facts[f"parameters ({machine.get('weights')} weights), {trained} more in the adapter"] = \
            short_text(machine["parameters"])
    if machine.get("card") or machine.get("processor"):
        facts["card" if machine.get("card") else "processor (no card)"] = \
            str(machine.get("card") or machine["processor"])
    if machine.get("version"):
        facts[f"version of lowmem-grpo, with torch {machine.get('torch')}"] = str(machine["version"])
    return facts


def short_text(count: float) -> str:
    """Return a short text of a number of parameters: 8.03 B, 1.2 M, 640 k."""
    for size, unit, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 0)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f}"


def numbers(rows: list[Record], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


@dataclass(frozen=True)
class Warned:
    """The number of warnings of an alarm, and its first and last step."""

    times: int
    first: int
    last: int

    @property
    def words(self) -> str:
        if self.times == 1:
            return f"in step {self.first:,}"
        return f"{count_text(self.times, 'time')}, first in step {self.first:,}, last in step {self.last:,}"


def count_alarms(rows: Iterable[Record], earlier: dict[str, Warned] | None = None) -> dict[str, Warned]:
    """Return each alarm's warnings by name: those in `rows` added to `earlier`."""
    alarms = dict(earlier or {})
    for row in rows:
        for key, value in row.items():
            if key.startswith(PREFIX) and value:
                name, step = key.removeprefix(PREFIX), row["step"]
                before = alarms.get(name, Warned(0, step, step))
                alarms[name] = Warned(before.times + 1, min(before.first, step), max(before.last, step))
    return alarms


def alarms_in_words(alarms: dict[str, Warned]) -> list[Record]:
    """Return texts for each alarm that warned, the most recent first; an unknown alarm has only its name as title."""
    known = {alarm.name: alarm for alarm in ALARMS}
    return [{"title": sentence(known[name].title if name in known else name), "times": warned.words,
             "words": f"{sentence(known[name].means)}. {sentence(known[name].fix)}." if name in known else ""}
            for name, warned in sorted(alarms.items(), key=lambda alarm: alarm[1].last, reverse=True)]


def sentence(words: str) -> str:
    words = words.removeprefix("so ").removeprefix("and ")
    return words[:1].upper() + words[1:]
