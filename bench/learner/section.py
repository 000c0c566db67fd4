"""The section of bench/RESULTS.md about the learner, from the rows of bench/learner/bench.py."""

from typing import Any

from bench.common import tables
from bench.common.rows import newest
from bench.gate.pretend import is_pretend
from lowmem_grpo.units import MIB

CASE = ("recipe", "size", "device", "gpu", "cpu", "engine")
COLUMNS = ("recipe", "parameters", "engine", "before", "after", "problems", "reward, first to last steps", "steps",
           "training, s", "pretraining, s", "peak, MiB", "machine", "commit")


def card_learning_table(rows: list[dict[str, Any]]) -> list[str]:
    """The newest row of each recipe, size, engine and machine, without models too small to learn anything."""
    kept = [row for row in newest(rows, *CASE).values() if row["size"] != "tiny" and not is_pretend(row["gpu"])]
    if not kept:
        return []
    lines = [
        "", "## Learning with the full stack: NF4 weights, LoRA, activations on the host, packed micro-batches", "",
        "The model was trained from scratch on the same machine, on generated problems with planted mistakes. "
        "Accuracy is the share of held-out problems right at temperature 1, in brackets its standard error.", "",
    ]
    return lines + tables.markdown(COLUMNS, map(cells_of, kept))


def cells_of(row: dict[str, Any]) -> list[str]:
    """One row, or why there is none."""
    where = [row["gpu"] if row["device"] == "cuda" else row["cpu"], row["commit"]]
    if "missing" in row:
        return [row["recipe"], *tables.missing(row["missing"], len(COLUMNS) - 3), *where]
    return [row["recipe"], f"{row['parameters'] / 1e6:.1f} M", row["engine"], accuracy(row, "before"),
            accuracy(row, "after"), str(row["eval_problems"]), ends(row["rewards"]), str(row["steps"]),
            f"{row['train_seconds']:.0f}", f"{row['pretrain']['seconds']:.0f}", f"{row['peak_bytes'] / MIB:.0f}",
            *where]


def accuracy(row: dict[str, Any], when: str) -> str:
    """A share and its standard error."""
    share = row[f"accuracy_{when}"]
    return f"{share:.1%} ({(share * (1 - share) / row['eval_problems']) ** 0.5:.1%})"


def ends(rewards: list[float]) -> str:
    """Mean rewards of the first and the last five steps."""
    first, last = rewards[:5], rewards[-5:]
    return f"{sum(first) / len(first):.2f} to {sum(last) / len(last):.2f}"
