"""`lowmem-grpo pairs`: makes rows of preferences from the completions that a run recorded."""

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.runs.records import COMPLETIONS, PAIRS, read_lines, replace_text, to_line
from lowmem_grpo.runs.views.samples import MOST_REWARDS
from lowmem_grpo.runs.views.terminal import UserPath, echo, plain_errors
from lowmem_grpo.utils import count_text

ROUNDING = 1e-9  # of differences between rewards
Line = dict[str, Any]
Scored = tuple[float, str]  # reward and text of a completion


@click.command(short_help="Make preference pairs from a run's completions.")
@click.argument("run_dir", metavar="RUN", type=UserPath(exists=True, file_okay=False))
@click.option("--out", type=UserPath(dir_okay=False), help=f"The JSON lines to write.  [default: RUN/{PAIRS}]")
@click.option("--reward", metavar="NAME", help="Compare by this reward function.  [default: the weighted sum of all]")
@click.option("--margin", type=click.FloatRange(min=0, min_open=True), default=0.5, show_default=True,
              help="By how much the chosen completion's reward is higher, at least.")
@click.option("--most", type=click.IntRange(min=1), help="The most pairs of a prompt.  [default: as many as there are]")
@click.option("--seed", default=0, show_default=True, help="Decides among completions with equal rewards.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def pairs(
    run_dir: Path, out: Path | None, reward: str | None, margin: float, most: int | None, seed: int, overwrite: bool
) -> None:
    """Write rows with prompt, chosen and rejected for DPOTrainer and RewardTrainer, from the completions of RUN.

    Of each prompt, the completion with the highest reward stands against the one with the lowest, the second highest
    against the second lowest, and so on, so that no completion is in two pairs. Prompts that were chats give chats."""
    with plain_errors():
        out = out or run_dir / PAIRS
        if out.exists() and not overwrite:
            raise ValueError(f"{out} is there already; choose another file with --out, or replace it with --overwrite")
        if not (run_dir / COMPLETIONS).is_file():
            raise ValueError(f"{run_dir} has no {COMPLETIONS}; name the folder of a run (its output_dir) that sampled "
                             "completions and scored them")
        prompts, left_out = by_prompt(read_lines(run_dir / COMPLETIONS), reward)
        rng = random.Random(seed)
        made = [[row_of(prompt, *pair) for pair in matched(scored, margin, most, rng)]
                for prompt, scored in prompts.values()]
        if not any(made):
            raise ValueError(why_none(prompts, margin, left_out))
        out.parent.mkdir(parents=True, exist_ok=True)  # whose error is about the folder, and not about a run
        replace_text(out, "".join(to_line(row) for rows in made for row in rows))
    echo(f"{out}: {count_text(sum(map(len, made)), 'pair')} from {sum(map(bool, made))} of "
         f"{count_text(len(made), 'prompt')}{left_out}")


def by_prompt(lines: list[Line], reward: str | None) -> tuple[dict[str, tuple[Any, list[Scored]]], str]:
    """Return, by prompt, its text or messages and its completions; and a text on what was left out. ValueError for an
    unknown reward function."""
    names = dict.fromkeys(name for line in lines for name in rewards_of(line))
    if reward is not None and reward not in names:
        known = ", ".join(f"{' '.join(name.split()):.80}" for name in [*names][:MOST_REWARDS])
        raise ValueError(f"--reward is {reward!r}; the run's reward functions are {known or 'none'}")
    prompts: dict[str, tuple[Any, list[Scored]]] = {}
    seen, left_out = defaultdict[str, set[str]](set), Counter[str]()
    for line in lines:
        key, text = to_line({name: line.get(name) for name in ("prompt", "role", "messages")}), line.get("completion")
        value = line.get("reward") if reward is None else rewards_of(line).get(reward)
        if reason := unusable(line, value) or ("repeated" if text in seen[key] else ""):
            left_out[reason] += 1
            continue
        assert isinstance(text, str) and value is not None
        seen[key].add(text)
        prompts.setdefault(key, (prompt_of(line), []))[1].append((float(value), text))
    told = ", ".join(f"{reason} {count}" for reason, count in left_out.items())
    return prompts, f"; completions left out: {told}" if told else ""


def rewards_of(line: Line) -> Line:
    return rewards if isinstance(rewards := line.get("rewards"), dict) else {}


def unusable(line: Line, reward: Any) -> str:
    """Return the reason to leave a completion out, or ""."""
    text, prompt = line.get("completion"), line.get("prompt")
    if line.get("turns") or line.get("images"):
        return "of several turns" if line.get("turns") else "with images"
    if not isinstance(text, str) or not text.strip() or not isinstance(prompt, str) or not prompt.strip():
        return "empty"
    if not isinstance(line.get("role", ""), str) or not is_chat(line.get("messages") or []):
        return "with a prompt that is no chat"
    if line.get("finish_reason") != "stop":  # it would be trained with an end that it did not have
        return "cut off"
    return "" if isinstance(reward, (int, float)) else "without a reward"


def is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str | None)
        for each in messages)


def prompt_of(line: Line) -> Any:
    """Return the prompt as the run's rows had it: messages or text."""
    one = [{"role": line["role"], "content": line["prompt"]}] if "role" in line else line["prompt"]
    return line.get("messages") or one


def matched(scored: list[Scored], margin: float, most: int | None, rng: random.Random) -> list[tuple[str, str]]:
    """Return (chosen, rejected) pairs of a prompt's completions, the largest differences first."""
    mixed = sorted(rng.sample(scored, len(scored)), key=lambda one: one[0])
    both = zip(reversed(mixed), mixed[: len(mixed) // 2], strict=False)
    return [(high[1], low[1]) for high, low in both if high[0] - low[0] >= margin - ROUNDING][:most]


def row_of(prompt: Any, chosen: str, rejected: str) -> Line:
    sides = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt} | {name: text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                                 for name, text in sides.items()}


def why_none(prompts: dict[str, tuple[Any, list[Scored]]], margin: float, left_out: str) -> str:
    if not prompts:
        return f"no completion of the run can be used{left_out}"
    rewards = [[reward for reward, _ in scored] for _, scored in prompts.values()]
    most = max(max(of_prompt) - min(of_prompt) for of_prompt in rewards)
    fix = f"; give a --margin of at most {most:g}" if most > ROUNDING else ""
    return (f"no pair: the completions of a prompt differ by at most {most:g} in their reward, and --margin is "
            f"{margin:g}{fix}{left_out}")
