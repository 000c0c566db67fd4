"""What a step of the whole loop is to reach beside peers, and whether the recorded rows reach it."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.common.targets import Verdict, is_meant_for, place

OURS = "lowmem_grpo"
PEERS = ("trl", "trl_nf4", "unsloth")  # whose loops have vLLM too
SECONDS, MEMORY = "seconds", "memory"
CASE = ("run", "shape", "gib", "prompts", "steps")  # rows that are alike in these are compared


@dataclass(frozen=True)
class Target:
    """Ours, by a peer's: seconds of a step, or the most that was in use on the card."""

    peer: str
    measure: str
    device: str = "cuda"
    shape: str = "full"
    ours: str = OURS

    @property
    def demand(self) -> str:
        name = {SECONDS: "seconds of a step: below", MEMORY: "memory in use: at most"}[self.measure]
        return f"{name} 1 x {self.peer}"

    def matches(self, row: dict[str, Any]) -> bool:
        """Whether a row is of this shape and this kind of machine."""
        return is_meant_for(self.device, row) and row["shape"] == self.shape

    def is_met(self, value: float) -> bool:
        return value < 1 if self.measure == SECONDS else value <= 1

    def told(self, value: float) -> str:
        return f"{value:.3g} x"

    def of(self, row: dict[str, Any]) -> float:
        """The row's measure."""
        return float(row["seconds"] if self.measure == SECONDS else max(row["used_bytes"].values()))


def targets() -> list[Target]:
    """All of the card: with vLLM, time and memory by each peer's; without it, time by TRL's."""
    card = [Target(peer, measure) for peer in PEERS for measure in (SECONDS, MEMORY)]
    return [*card, Target("trl_transformers", SECONDS, ours=f"{OURS}_transformers")]


def judge(target: Target, rows: list[dict[str, Any]]) -> Verdict:
    """By the newest case of which both rows are there."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if target.matches(row) and not row.get("missing") and row.get("warm_up", 1):  # an unwarmed step compiles too
            cases.setdefault(tuple(row[name] for name in CASE), {})[row["provider"]] = row
    for case in reversed(cases.values()):
        if target.ours in case and target.peer in case:
            return Verdict(target, target.of(case[target.ours]) / target.of(case[target.peer]))
    return Verdict(target)


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Every target, judged."""
    return [judge(target, rows) for target in targets()]


def table(found: list[Verdict]) -> Table:
    """The verdicts for the terminal."""
    result = Table("where", "ours", "to reach", "measured", "", title="targets")
    for verdict in found:
        target = verdict.target
        where = f"{place(target.device)}, {target.shape}"
        result.add_row(where, target.ours, target.demand, verdict.measured, verdict.colored)
    return result
