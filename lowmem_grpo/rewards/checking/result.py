"""The result of a check of reward functions: findings, what each function paid, how many groups carry signal."""

from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.runs.findings import Finding


@dataclass
class Trial:
    """One reward function on N sampled completions, and on an empty completion of each prompt."""

    name: str
    kind: str  # "verifier": it pays for a verdict; "reward": it computes the number itself
    weight: float
    pays: list[float | None] = field(default_factory=list)  # (N,); empty where it failed
    empty: list[float | None] = field(default_factory=list)  # one per prompt
    invalid: int = 0  # NaN and infinite values among `pays`, where they are None
    converted: list[str] = field(default_factory=list)  # types other than numbers that it returned
    verdicts: float | None = None  # the share of right verdicts, of a verifier
    seconds: float = 0.0  # for the N completions
    error: Exception | None = None  # why it failed on the samples
    empty_error: Exception | None = None  # why it failed on empty completions only
    own_limit: float | None = None  # its own time limit in seconds, whatever the run allows
    trouble: Finding | None = None  # why it paid None when it could not judge

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
    signal_share: float  # share of groups whose completions differ in their sum
    signal_interval: tuple[float, float]  # 95% Wilson interval of that share
    seconds: float  # for the whole check
    columns: list[str] = field(default_factory=list)  # of the dataset

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def of(self, function: str) -> list[Finding]:
        """The findings about one function, by its name."""
        return [finding for finding in self.findings if finding.about == function]

    def to_dict(self) -> dict[str, Any]:
        """Findings and shares as plain values, for a record of the run."""
        return {
            "findings": [vars(finding) for finding in self.findings], "signal_share": self.signal_share,
            "signal_interval": list(self.signal_interval), "groups": self.groups, "seconds": self.seconds,
        }
