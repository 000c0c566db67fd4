"""What a step of the whole loop is to reach beside peers, and whether the recorded rows reach it."""

from dataclasses import dataclass
from typing import Any

from kernel_targets import CARD, MET, MISSED, NOT_RUN
from rich.table import Table

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
        right_machine = self.device == "cpu" or CARD in (row["gpu"] or "")
        return right_machine and (row["device"], row["shape"]) == (self.device, self.shape)

    def of(self, row: dict[str, Any]) -> float:
        """The row's measure."""
        return float(row["seconds"] if self.measure == SECONDS else max(row["used_bytes"].values()))


@dataclass(frozen=True)
class Verdict:
    """How a target stands, by the newest run that has both rows."""

    target: Target
    value: float | None = None

    @property
    def status(self) -> str:
        if self.value is None:
            return NOT_RUN
        met = self.value < 1 if self.target.measure == SECONDS else self.value <= 1
        return MET if met else MISSED

    @property
    def measured(self) -> str:
        return "" if self.value is None else f"{self.value:.3g} x"


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
    colors = {MET: "green", MISSED: "red", NOT_RUN: "dim"}
    result = Table("where", "ours", "to reach", "measured", "", title="targets")
    for verdict in found:
        where = CARD if verdict.target.device == "cuda" else "CPU"
        result.add_row(f"{where}, {verdict.target.shape}", verdict.target.ours, verdict.target.demand, verdict.measured,
                       f"[{colors[verdict.status]}]{verdict.status}[/]")
    return result
