"""The numbers that rollouts are to reach, and whether the recorded rows reach them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.common.targets import Verdict, is_meant_for, place, within

OURS, BNB, BF16 = "lowmem_grpo", "vllm_bnb_lora", "vllm_bf16_lora"
EAGER = "lowmem_grpo_eager"  # ours without CUDA graphs
Run = dict[str, dict[str, Any]]  # the row of each provider, of one run of the benchmark


@dataclass(frozen=True)
class Target:
    """A number made of one run's rows, and its limit."""

    demand: str
    device: str
    shape: str
    value: Callable[[Run], float]
    limit: float
    at_least: bool = False

    def matches(self, row: dict[str, Any]) -> bool:
        """Whether a row is of this shape and this kind of machine."""
        return is_meant_for(self.device, row) and row["shape"] == self.shape

    def is_met(self, value: float) -> bool:
        return within(value, self.limit, self.at_least)

    def told(self, value: float) -> str:
        return f"{value:.4g}"


def speedup(other: str) -> Callable[[Run], float]:
    """How many times as many tokens a second as another provider."""
    return lambda run: run[OURS]["p50"] / run[other]["p50"]


def of_ours(name: str) -> Callable[[Run], float]:
    return lambda run: run[OURS][name]


def added_share(run: Run) -> float:
    """Bytes of weights that the engine holds beside those it borrows, by the bytes of these."""
    return run[OURS]["added_bytes"] / run[OURS]["trainer_bytes"]


def alike(device: str, shape: str) -> list[Target]:
    """What is asked for on every machine."""
    return [
        Target("weights that vLLM adds, of the model's bytes: under 1%", device, shape, added_share, 0.01),
        Target("sync after an optimizer step, ms: at most 1", device, shape, of_ours("sync_ms"), 1.0),
        Target("importance ratio, distance from 1: at most 0.001", device, shape,
               lambda run: abs(run[OURS]["importance_ratio"] - 1), 0.001),
    ]


def targets() -> list[Target]:
    """All of them: those of the card, then those of the CPU."""
    card = ("cuda", "full")
    return [
        Target(f"tokens/s at least 1.5 x {BNB}", *card, speedup(BNB), 1.5, at_least=True),
        Target(f"tokens/s at least 1 x {BF16}", *card, speedup(BF16), 1.0, at_least=True),
        Target("weights of rollout and training: at most 1.02 x one NF4 copy", *card,
               lambda run: 1 + added_share(run), 1.02),
        *alike(*card),
        Target("sleep frees, of the key-value cache: at least 0.95", *card,
               lambda run: run[OURS]["sleep_freed_bytes"] / run[OURS]["kv_bytes"], 0.95, at_least=True),
        Target("log-probabilities, mean difference: at most 0.003", "cpu", "tiny", of_ours("parity_mean"), 0.003),
        *alike("cpu", "tiny"),
    ]


def judge(target: Target, rows: list[dict[str, Any]]) -> Verdict:
    """By the newest run that has every row that the target needs."""
    runs: dict[str, Run] = {}
    for row in rows:
        if target.matches(row) and not row.get("missing"):
            runs.setdefault(row["run"], {})[row["provider"]] = row
    for run in reversed(runs.values()):
        try:
            return Verdict(target, target.value(run))
        except KeyError:
            continue  # a provider was left out, or could not run
    return Verdict(target)


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Every target, judged."""
    return [judge(target, rows) for target in targets()]


def table(found: list[Verdict]) -> Table:
    """The verdicts for the terminal."""
    result = Table("where", "to reach", "measured", "", title="targets")
    for verdict in found:
        target = verdict.target
        result.add_row(f"{place(target.device)}, {target.shape}", target.demand, verdict.measured, verdict.colored)
    return result
