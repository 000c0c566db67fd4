"""What a check of reward functions found: findings, what each function paid, and how many groups would teach."""

from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.runs.findings import Finding


@dataclass
class Trial:
    """One reward function on N sampled completions, and on an empty completion of each prompt."""

    name: str
    kind: str  # "verifier": it pays a verdict; "reward": it makes up the number itself
    weight: float
    pays: list[float | None] = field(default_factory=list)  # (N,); empty where it failed
    empty: list[float | None] = field(default_factory=list)  # one per prompt
    invalid: int = 0  # NaN and infinite values among `pays`, where they are None
    converted: list[str] = field(default_factory=list)  # types that it returned beside numbers
    verdicts: float | None = None  # the share of right verdicts, of a verifier
    seconds: float = 0.0  # that the N completions took
    error: Exception | None = None  # why it failed on the samples
    empty_error: Exception | None = None  # why it failed on empty completions alone
    own_limit: float | None = None  # seconds that it keeps to by itself, whatever the run allows
    trouble: Finding | None = None  # why it paid None where it could not judge

    @property
    def paid(self) -> list[float]:
        """The pays that are numbers."""
        return [pay for pay in self.pays if pay is not None]


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
    signal_share: float  # groups whose completions differ in their sum, of all groups sampled
    signal_interval: tuple[float, float]  # 95% Wilson interval of that share
    seconds: float  # that the whole check took
    columns: list[str] = field(default_factory=list)  # of the dataset

    @property
    def ok(self) -> bool:
        """Whether nothing found is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def of(self, function: str) -> list[Finding]:
        """The findings about one function, by its name."""
        return [finding for finding in self.findings if finding.about == function]

    def to_dict(self) -> dict[str, Any]:
        """Findings and shares in plain values, for a record of the run."""
        return {
            "findings": [vars(finding) for finding in self.findings], "signal_share": self.signal_share,
            "signal_interval": list(self.signal_interval), "groups": self.groups, "seconds": self.seconds,
        }
