"""The guard against NaN and infinity in rewards, log-probabilities and gradients: a step with such a value is skipped,
and the run stops after `nonfinite_steps` skipped steps in a row."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.runs.records import NONFINITE as FILE
from lowmem_grpo.runs.records import RecordError, RunRecords, prompt_text
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import TOKEN_FIELDS, MicroBatch, Rollout, RolloutGroup

logger = logging.getLogger(__name__)
WRITTEN = 16  # the most rollouts written per step; one more line says how many were left out
NAMED = 5  # the most parameters named whose gradients are not finite
ADVICE = {
    "reward": "a division by zero, a logarithm of 0 or an overflow in the reward function; for a completion without a "
              "reward it should return None",
    "rollout_logprobs": 'the sampler: dtype=torch.bfloat16 in place of fp16, or fast_inference="transformers"',
    **dict.fromkeys(("logprobs", "old_logprobs"), "the policy itself: dtype=torch.bfloat16 in place of fp16, a lower "
                    "learning_rate, an earlier checkpoint whose adapter is sound"),
    "ref_logprobs": "the weights and dtype of the base model, and the adapter that training began with (kl_reference)",
    **dict.fromkeys(("values", "returns"), "the critic: a lower critic_learning_rate, dtype=torch.bfloat16 in place of "
                    "fp16"),
    "advantages": "the rewards and their weights, which overflow, or advantages that were set by hand",
    "loss": "ratios that overflow: a lower learning_rate, fewer num_iterations, delta as a bound",
    "gradient": "the parameters that the file names: a lower learning_rate, dtype=torch.bfloat16 in place of fp16",
}


class NonFiniteError(RuntimeError):
    """Too many steps in a row were skipped because of NaN or infinity."""


@dataclass
class BadRollout:
    """A rollout with NaN or infinity, and where it occurred: "reward NAME", "logprobs", one of TOKEN_FIELDS, "loss" or
    "gradient"."""

    group: RolloutGroup
    rollout: Rollout
    what: list[str]


class Flags:
    """The rollouts with NaN or infinity in a training pass. Flags stay on the device until `read` is called."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.tables: list[Tensor] = []  # (F + 2, R) of each micro-batch, F = len(TOKEN_FIELDS)
        self.known: list[tuple[Rollout, list[str]]] = []  # bad rollouts that were read already

    @torch.no_grad()
    def check_batch(self, batch: MicroBatch, logprobs: Tensor | None, loss: Tensor) -> None:
        """Flag rollouts with NaN or infinity in log-probabilities (N,), if there are any, or in a token field; all if
        only the loss is bad."""
        none = loss.new_zeros(len(batch.trained))
        rows = [none if logprobs is None else logprobs,
                *(batch.at_trained(batch.fields[name]) if name in batch.fields else none for name in TOKEN_FIELDS)]
        wrong = torch.stack([values.isfinite().logical_not().view(len(none), -1).any(1) for values in rows])
        table = torch.zeros(len(rows) + 1, len(batch.rollouts), device=none.device)
        table[:-1].index_add_(1, batch.at_trained(batch.sequence_ids), wrong.to(table.dtype))
        table[-1] = loss.isfinite().logical_not() & (table[:-1].sum() == 0)
        self.tables.append(table)
        self.rollouts += batch.rollouts

    def read(self) -> list[tuple[Rollout, list[str]]]:
        """Return the bad rollouts, each with what was bad. Only this call synchronizes with the device."""
        if not self.tables:
            return self.known
        columns = torch.cat(self.tables, 1).gt(0).T.tolist()
        names = ["logprobs", *TOKEN_FIELDS, "loss"]
        named = [[name for name, wrong in zip(names, column, strict=True) if wrong] for column in columns]
        return [*self.known, *((rollout, what) for rollout, what in zip(self.rollouts, named, strict=True) if what)]


class Guard:
    """Collects a step's rollouts with NaN or infinity; then writes them to `nonfinite.jsonl` and counts the skipped
    step, or stops the run. A step that is skipped only to lower the loss scale of fp16 is not counted."""

    def __init__(self, limit: int, state: TrainerState, records: RunRecords | None = None) -> None:
        """The run stops after `limit` skipped steps in a row. Without `records` nothing is written."""
        self.limit, self.state, self.records = limit, state, records
        self.bad: list[BadRollout] = []  # in the step in progress
        self.groups: list[RolloutGroup] = []  # trained on in the step in progress
        self.causes: list[str] = []  # why the latest steps in a row were skipped

    def rewards(self, groups: list[RolloutGroup]) -> bool:
        """Record the rollouts with a reward of NaN or infinity, and return whether there are any."""
        bad = [BadRollout(group, rollout, [f"reward {name}" for name in rollout.invalid_rewards])
                 for group in groups for rollout in group.rollouts if rollout.invalid_rewards]
        self.bad += bad
        return bool(bad)

    def passed(self, groups: list[RolloutGroup], flags: Flags) -> bool:
        """Record the flags of a training pass over these groups; return whether the pass met NaN or infinity."""
        self.groups += groups
        home = {id(rollout): group for group in groups for rollout in group.rollouts}
        bad = [BadRollout(home[id(rollout)], rollout, what) for rollout, what in flags.read()]
        self.bad += bad
        return bool(bad)

    def judge(self, parameters: list[str], handled: bool = False) -> dict[str, float]:
        """End a step, and return its metrics. `parameters` had NaN or infinity in the gradient; if `handled`, the loss
        scale was lowered for that. NonFiniteError if too many steps in a row are skipped."""
        bad, groups = self.bad, self.groups
        self.bad, self.groups = [], []
        causes = sorted({what for entry in bad for what in entry.what})
        if parameters and not causes and not handled:
            causes = ["gradient"]
            bad = [BadRollout(group, rollout, causes) for group in groups for rollout in group.rollouts]
        if causes:
            self.skip(causes, bad, parameters)
        elif not parameters:
            self.state.nonfinite_in_a_row, self.causes = 0, []
        return {"nonfinite/rollouts": float(len(bad)), "nonfinite/steps": float(self.state.nonfinite_steps)}

    def over(self, steps: list[dict[str, float]]) -> dict[str, float]:
        rollouts = sum(step["nonfinite/rollouts"] for step in steps)
        return {"nonfinite/rollouts": rollouts, "nonfinite/steps": float(self.state.nonfinite_steps)}

    def skip(self, causes: list[str], bad: list[BadRollout], parameters: list[str]) -> None:
        """Write the bad rollouts; then warn and count the step, or raise NonFiniteError at the limit."""
        step, where = self.state.global_step + 1, self.write(bad, parameters)
        self.causes += [cause for cause in causes if cause not in self.causes]
        if self.state.nonfinite_in_a_row + 1 >= self.limit:
            said, self.causes, self.state.nonfinite_in_a_row = self.causes, [], 0
            kinds = dict.fromkeys(cause.partition(" ")[0] for cause in said)
            advice = "; ".join(dict.fromkeys(ADVICE.get(kind, f"what computes {kind}") for kind in kinds))
            raise NonFiniteError(f"NaN or infinity in {self.limit} steps in a row, the last of them step {step}: "
                                 f"{', '.join(said)}; {where}. Nothing was trained on them. Look at {advice}. After "
                                 f"{self.limit} such steps (nonfinite_steps) a run stops")
        self.state.nonfinite_in_a_row += 1
        self.state.nonfinite_steps += 1
        logger.warning(
            "step %d is skipped, nothing is trained: NaN or infinity (%s) in %d of its rollouts; %s. %d of %d in a row",
            step, ", ".join(causes), len(bad), where, self.state.nonfinite_in_a_row, self.limit,
        )

    def write(self, bad: list[BadRollout], parameters: list[str]) -> str:
        """Append the rollouts to `nonfinite.jsonl`; return a phrase that says where they are, or why writing failed."""
        if self.records is None:
            return "they are not written anywhere"
        path = self.records.run_dir / FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.records.append(FILE, lines(self.state.global_step + 1, bad, parameters))
        except (RecordError, OSError) as error:
            return f"the rollouts could not be written ({error})"
        return f"the rollouts are in {path}"


def lines(step: int, bad: list[BadRollout], parameters: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a step's lines of `nonfinite.jsonl`: at most WRITTEN bad rollouts, and the number of the other ones."""
    for entry in bad[:WRITTEN]:
        group, rollout = entry.group, entry.rollout
        yield {"step": step, "what": ", ".join(entry.what), "prompt": prompt_text(group.row.get("prompt")),
               "completion": rollout.text, "prompt_ids": group.prompt_ids, "completion_ids": rollout.completion_ids,
               "rewards": {name: spelled(value) for name, value in (rollout.rewards | rollout.invalid_rewards).items()},
               "reward": spelled(rollout.reward), "advantage": spelled(rollout.advantage),
               **({"parameters": parameters[:NAMED]} if "gradient" in entry.what else {})}
    if len(bad) > WRITTEN:
        yield {"step": step, "what": "rollouts that are not listed", "left_out": len(bad) - WRITTEN}


def spelled(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def broken_gradients(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters with NaN or infinity in the gradient; all names if only the norm overflowed."""
    broken = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    return broken or list(parameters)
