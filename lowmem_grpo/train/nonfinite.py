"""The guard against NaN and infinity in rewards, log-probabilities and gradients.

A step that meets one is skipped: adapter and optimizer stay as they are, bit for bit, while the schedule and the count
of steps go on. It is counted, and the rollouts concerned are written to `nonfinite.jsonl`. So many skipped steps in a
row (`GRPOConfig.nonfinite_steps`) stop the run.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.runs.records import RecordError, RunRecords, prompt_text
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

FILE = "nonfinite.jsonl"
WRITTEN = 16  # rollouts of a step at most; a line more says how many were left out
NAMED = 5  # parameters whose gradients are not finite
FIELDS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
CAUSES = ("logprobs", *FIELDS, "loss")
ADVICE = {
    "reward": "a division by zero, a logarithm of 0 or an overflow in the reward function, which returns None for a "
              "completion that has no reward",
    "rollout_logprobs": 'the sampler: dtype=torch.bfloat16 in place of fp16, or fast_inference="transformers"',
    **dict.fromkeys(("logprobs", "old_logprobs"), "the policy itself: dtype=torch.bfloat16 in place of fp16, a lower "
                    "learning_rate, an earlier checkpoint whose adapter is sound"),
    "ref_logprobs": "the base model's weights and dtype: the reference is the model without its adapter",
    "advantages": "the rewards and their weights: they overflow, or advantages were set by hand",
    "loss": "ratios that overflow: a lower learning_rate, fewer num_iterations, delta as a bound",
    "gradient": "the parameters that the file names: a lower learning_rate, dtype=torch.bfloat16 in place of fp16",
}


class NonFiniteError(RuntimeError):
    """So many steps in a row were skipped for values that are not finite; the last of them is taken back."""


@dataclass
class Finding:
    """A rollout, and where it met a value that is not finite: "reward NAME", one of CAUSES, or "gradient"."""

    group: RolloutGroup
    rollout: Rollout
    what: list[str]


class Flags:
    """Which rollouts of a training pass met a value that is not finite; on the device until they are read, once."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.tables: list[Tensor] = []  # (CAUSES, S) of each micro-batch

    @torch.no_grad()
    def look(self, batch: MicroBatch, logprobs: Tensor, loss: Tensor) -> None:
        """Take a micro-batch, the policy's log-probabilities (N,) of it and its loss, which where nothing else
        explains it is that of all its rollouts."""
        none = torch.zeros_like(batch.loss_mask)
        rows = [none.masked_scatter(batch.loss_mask, logprobs.isfinite().logical_not())]
        for values in (getattr(batch, name) for name in FIELDS):
            rows.append(none if values is None else values.isfinite().logical_not())
        table = torch.zeros(len(CAUSES), len(batch.cu_seqlens) - 1, device=none.device)
        table[:-1].index_add_(1, batch.sequence_ids, torch.stack(rows).to(table.dtype))
        table[-1] = loss.isfinite().logical_not() & (table[:-1].sum() == 0)
        self.tables.append(table)
        self.rollouts += batch.rollouts

    def read(self) -> list[tuple[Rollout, list[str]]]:
        """The rollouts concerned, each with its CAUSES; the one synchronisation with the device."""
        if not self.tables:
            return []
        columns = torch.cat(self.tables, 1).gt(0).T.tolist()
        named = [[name for name, wrong in zip(CAUSES, column, strict=True) if wrong] for column in columns]
        return [(rollout, what) for rollout, what in zip(self.rollouts, named, strict=True) if what]


class Guard:
    """Collects what a step met that is not finite, and when the step ends counts it, writes it down, or stops the run.

    With fp16, gradients overflow until the scale of the loss has come down to what they bear: at the start of a run
    that is normal. While the scale is above 1, a step skipped for its gradients alone counts for nothing here and is
    not written; `optimizer/skipped` shows it.

    The file is only ever added to, so a step that a resumed run makes again may be in it twice.
    """

    def __init__(self, limit: int, state: TrainerState, records: RunRecords | None = None) -> None:
        """`limit` skipped steps in a row stop the run; without `records` nothing is written."""
        self.limit, self.state, self.records = limit, state, records
        self.findings: list[Finding] = []  # of the step in progress
        self.groups: list[RolloutGroup] = []  # trained on in the step in progress
        self.causes: list[str] = []  # of the steps skipped in a row

    def begin(self, overwrite: bool) -> None:
        """A new run: the file of the one that it overwrites goes."""
        if overwrite and self.records is not None:
            (self.records.run_dir / FILE).unlink(missing_ok=True)

    def rewards(self, groups: list[RolloutGroup]) -> bool:
        """Whether a reward of these groups was NaN or infinite: then the step needs no pass over them."""
        found = [Finding(group, rollout, [f"reward {name}" for name in rollout.invalid_rewards])
                 for group in groups for rollout in group.rollouts if rollout.invalid_rewards]
        self.findings += found
        return bool(found)

    def passed(self, groups: list[RolloutGroup], flags: Flags) -> bool:
        """Take a pass over these groups; whether it met a value that is not finite."""
        self.groups += groups
        home = {id(rollout): group for group in groups for rollout in group.rollouts}
        found = [Finding(home[id(rollout)], rollout, what) for rollout, what in flags.read()]
        self.findings += found
        return bool(found)

    def judge(self, parameters: list[str], handled: bool = False) -> dict[str, float]:
        """The step is over, with the gradients of these parameters not finite; its metrics.

        `handled`: the scale of the loss was lowered for it. Raises NonFiniteError where this is the last step allowed,
        which then counts as not made.
        """
        findings, groups = self.findings, self.groups
        self.findings, self.groups = [], []
        causes = sorted({what for finding in findings for what in finding.what})
        if parameters and not causes and not handled:
            causes = ["gradient"]
            findings = [Finding(group, rollout, causes) for group in groups for rollout in group.rollouts]
        if causes:
            self.skip(causes, findings, parameters)
        elif not parameters:
            self.state.nonfinite_in_a_row, self.causes = 0, []
        return {"nonfinite/rollouts": float(len(findings)), "nonfinite/steps": float(self.state.nonfinite_steps)}

    def over(self, steps: list[dict[str, float]]) -> dict[str, float]:
        """The metrics of several optimizer steps together."""
        rollouts = sum(step["nonfinite/rollouts"] for step in steps)
        return {"nonfinite/rollouts": rollouts, "nonfinite/steps": float(self.state.nonfinite_steps)}

    def skip(self, causes: list[str], findings: list[Finding], parameters: list[str]) -> None:
        """Write the rollouts, say so and count the step; or raise NonFiniteError."""
        step, where = self.state.global_step + 1, self.write(findings, parameters)
        self.causes += [cause for cause in causes if cause not in self.causes]
        if self.state.nonfinite_in_a_row + 1 >= self.limit:
            said, self.causes, self.state.nonfinite_in_a_row = self.causes, [], 0
            raise NonFiniteError(
                f"NaN or infinity in {self.limit} steps in a row, the last of them step {step}: {', '.join(said)}; "
                f"{where}. Nothing was trained on them. Look at {advice(said)}. After {self.limit} such steps "
                "(nonfinite_steps) a run stops"
            )
        self.state.nonfinite_in_a_row += 1
        self.state.nonfinite_steps += 1
        logger.warning(
            "step %d is skipped, nothing is trained: NaN or infinity (%s) in %d of its rollouts; %s. %d of %d in a row",
            step, ", ".join(causes), len(findings), where, self.state.nonfinite_in_a_row, self.limit,
        )

    def write(self, findings: list[Finding], parameters: list[str]) -> str:
        """Add the rollouts to the file; where they are, in words. A failure to write is told, and no more."""
        if self.records is None:
            return "they are not written anywhere"
        path = self.records.run_dir / FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.records.append(FILE, lines(self.state.global_step + 1, findings, parameters))
        except (RecordError, OSError) as error:
            return f"the rollouts could not be written ({error})"
        return f"the rollouts are in {path}"


def advice(causes: Iterable[str]) -> str:
    """What to look at for these causes."""
    return "; ".join(dict.fromkeys(ADVICE[cause.partition(" ")[0]] for cause in causes))


def lines(step: int, findings: list[Finding], parameters: list[str]) -> Iterator[dict[str, Any]]:
    """The records of a step: its first WRITTEN rollouts, and how many there are beside them."""
    for finding in findings[:WRITTEN]:
        group, rollout = finding.group, finding.rollout
        yield {
            "step": step, "what": ", ".join(finding.what), "prompt": prompt_text(group.row.get("prompt")),
            "completion": rollout.text, "prompt_ids": group.prompt_ids, "completion_ids": rollout.completion_ids,
            "rewards": {name: spelled(value) for name, value in (rollout.rewards | rollout.invalid_rewards).items()},
            "reward": spelled(rollout.reward), "advantage": spelled(rollout.advantage),
            **({"parameters": parameters[:NAMED]} if "gradient" in finding.what else {}),
        }
    if len(findings) > WRITTEN:
        yield {"step": step, "what": "rollouts that are not listed", "left_out": len(findings) - WRITTEN}


def spelled(value: float | None) -> float | str | None:
    """A number that JSON can hold, or the word for it: nan, inf, -inf."""
    return value if value is None or math.isfinite(value) else str(float(value))


def broken_gradients(parameters: dict[str, nn.Parameter]) -> list[str]:
    """The names of those whose gradient holds NaN or infinity, or (only their norm overflowed) of all."""
    found = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    return found or list(parameters)
