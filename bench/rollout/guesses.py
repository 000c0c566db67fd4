"""What guesses by lookup save in the tail of sampling, and what they cost where there is no tail.

    OMP_NUM_THREADS=1 python -m bench.rollout.guesses

The model in the package answers chains of arithmetic, at temperature 1 and to the end that it chooses, with and without
`speculation="lookup"` in turn, with a new seed in each round. Its weights do not change between the rounds, so answers
of earlier rounds are closer to the next ones than those of a policy that learns fast. The cases:

- "even": all answers have the same length. There is no tail, so the switch may cost nothing.
- "tail, first epoch": 30 chains of 2 steps and two of 16, which take several times as long. No earlier answers.
- "tail, later epochs": the same, with the answers of all rounds before.
- "tail, evaluated again": the same greedily, as an evaluation of a policy that has changed little.

The ratios are medians over rounds of the processor seconds with guesses divided by those without; an interval holds 95%
of such medians over random choices of the rounds. `same` is the share of completions with the same tokens.
"""

import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from bench.rollout.turn_overhead import interval
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.engines.earlier import EarlierAnswers
from lowmem_grpo.types import Rollout

RESULTS = Path(__file__).resolve().parents[1] / "results" / "guesses.jsonl"
CONTEXT, SHORT, LONG, N = 512, 2, 16, 4
STEPS = {"even": [SHORT] * 8, "tail, first epoch": [SHORT] * 30 + [LONG] * 2}
STEPS |= dict.fromkeys(("tail, later epochs", "tail, evaluated again"), STEPS["tail, first epoch"])
SHOWN = ("case", "ratio", "interval", "clock", "tokens_per_second", "accepted", "tokens_per_pass", "passes_share",
         "guessing", "same")
console = Console(width=150)


def chain(steps: int, draw: random.Random) -> str:
    """A problem of so many steps."""
    kinds = ("Add {}.", "Subtract {}.", "Multiply by {}.")
    said = [draw.choice(kinds).format(draw.randint(2, 9)) for _ in range(steps)]
    return " ".join([f"Start with {draw.randint(1, 20)}.", *said, "What is the result?"])


class Case:
    """A case: one model, and an engine with guesses and one without."""

    def __init__(self, name: str) -> None:
        bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=CONTEXT, load_in_4bit=False,
                                                    fast_inference=False)
        model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False).eval()
        draw = random.Random(0)
        self.name, self.engines = name, [model.engine(), model.engine()]
        self.engines[1].speculate(SamplingParams())  # type: ignore[attr-defined]
        self.speculation: Any = self.engines[1].speculation  # type: ignore[attr-defined]
        self.prompts = [model.encode([{"role": "user", "content": chain(steps, draw)}])[1] for steps in STEPS[name]]

    def params(self, number: int) -> SamplingParams:
        """How a round is sampled."""
        if self.name == "even":
            return SamplingParams(n=N, max_tokens=40, seed=number, ignore_eos=True)
        greedy = self.name.endswith("again")
        return SamplingParams(n=1 if greedy else N, temperature=0.0 if greedy else 1.0, max_tokens=300, seed=number)

    def sampled(self, which: int, number: int) -> tuple[float, float, list[Rollout]]:
        """(processor seconds, seconds, completions) of a round, without or with guesses."""
        if self.name.endswith("first epoch"):
            self.speculation.earlier = EarlierAnswers()
        begin = time.process_time(), time.perf_counter()
        groups = self.engines[which].generate(self.prompts, self.params(number), lambda index, rollouts: None)
        spent = time.process_time() - begin[0], time.perf_counter() - begin[1]
        return *spent, [rollout for group in groups for rollout in group]

    def figures(self, rounds: int) -> dict[str, Any]:
        """What is recorded of the case."""
        for number in range(4):  # to warm up, and for the switch to settle
            self.sampled(0, number), self.sampled(1, number)
        self.speculation.metrics()
        pairs, same, count = [], 0, 0
        for number in range(100, 100 + rounds):
            order = (0, 1) if number % 2 else (1, 0)
            found = {which: self.sampled(which, number) for which in order}
            pairs.append((found[0], found[1]))
            for plain, guessed in zip(found[0][2], found[1][2], strict=True):
                same, count = same + (plain.completion_ids == guessed.completion_ids), count + 1
        ratios = [guessed[0] / plain[0] for plain, guessed in pairs]
        tokens = [sum(len(each.completion_ids) for each in guessed[2]) / guessed[1] for _, guessed in pairs]
        counted = {name.rpartition("/")[2]: round(value, 4) for name, value in self.speculation.metrics().items()}
        return {"ratio": round(median(ratios), 4), "interval": interval(ratios),
                "clock": round(median(guessed[1] / plain[1] for plain, guessed in pairs), 4),
                "tokens_per_second": round(median(tokens), 1), "guessing": self.speculation.guessing,
                "same": round(same / count, 5), "completions": count, **counted}


@click.command(help="Guesses by lookup: time with and without them.")
@click.option("--rounds", default=30, show_default=True)
@click.option("--case", "cases", type=click.Choice(list(STEPS)), multiple=True, default=list(STEPS),
              help="All of them, if none is named.")
@options.output(RESULTS)
def main(rounds: int, cases: tuple[str, ...], output: Path) -> None:
    rows = []
    for name in cases:
        rows.append({"case": name, "rounds": rounds, **Case(name).figures(rounds), **machine()})
        append_row(output, rows[-1])
    console.print(tables.terminal("guesses by lookup", SHOWN, [[str(row.get(name, "")) for name in SHOWN]
                                                                for row in rows]))


if __name__ == "__main__":
    main()
