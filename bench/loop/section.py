"""What a step of the whole loop should reach beside peers, and its section of bench/RESULTS.md."""

from typing import Any

from bench.common import tables
from bench.common.rows import newest
from bench.common.targets import BELOW_ONE, OURS, ByProvider, Goal, Row, judged, section
from lowmem_grpo.units import GIB

PEERS = ("trl", "trl_nf4", "unsloth")  # whose loops have vLLM too
PHASES = ("generate", "switch", "score", "train", "optimizer", "rest")  # as shares are shown
CASE = ("shape", "prompts", "gib", "provider", "device", "gpu", "cpu", "cores", "threads")
COLUMNS = ("case", "provider", "s / step", *PHASES, "tokens/s", "sampling", "training", "peak on the card, GiB",
           "on the host, GiB", "planned, GiB", "machine", "commit")


def beside(peer: str, ours: str = OURS, memory: bool = False) -> Goal:
    """Return the goal for ours divided by a peer's: seconds of a step, or the most that was in use on the card."""
    def measure(row: Row) -> float:
        return float(max(row["used_bytes"].values()) if memory else row["seconds"])

    def ratio(run: ByProvider) -> float:
        return measure(run[ours]) / measure(run[peer])

    demand = "memory in use: at most" if memory else "seconds of a step: below"
    return Goal(f"loop, full, {ours}", f"{demand} 1 x {peer}", 1.0 if memory else BELOW_ONE, ratio,
                lambda value, run: f"{value:.3g} x", {"device": "cuda", "shape": "full"})


GOALS = [beside(peer, memory=memory) for peer in PEERS for memory in (False, True)]
GOALS.append(beside("trl_transformers", ours=f"{OURS}_transformers"))  # without vLLM only the time is compared


def loop_table(rows: list[Row]) -> list[str]:
    """Return the newest row of each provider, case and machine; then the targets."""
    lines = [
        "", "## A step of the whole loop: time by phase, and peaks", "",
        "Llama-3.1-8B's shape with random weights. `switch` is sleeping, waking, and updating the sampler's weights. "
        "The peak on the card is all memory in use there; a CPU has none.", "",
        *tables.markdown(COLUMNS, map(cells_of, newest(rows, *CASE).values())),
    ]
    return lines + section("The whole loop: the targets", judged(GOALS, rows))


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row: sequences and what of the card may be used, then figures or why there are none."""
    cap = f", {row['gib']:g} GiB" if row["gib"] else ""
    case = (f"{row['shape']}: {row['prompts']} x {row['generations']} x {row['completion_tokens']:,} tokens after "
            f"{row['prompt_tokens']:,}{cap}")
    where = row["gpu"] if row["device"] == "cuda" else f"{row['cpu']}, {row['threads']} threads"
    figures = tables.missing(row["missing"], len(COLUMNS) - 4) if row.get("missing") else measures(row)
    return [case, row["provider"], *figures, where, row["commit"]]


def measures(row: dict[str, Any]) -> list[str]:
    """Return seconds, shares, speeds, peaks, and the larger of both phases that the planner said."""
    shares = [f"{row['shares'].get(name, 0):.1%}" for name in PHASES]
    speeds = [tables.number(row["tokens_per_second"], name, ".0f") for name in ("step", "generate", "train")]
    plan = {name: size for name, size in row.get("planned", {}).items() if name in ("rollout_bytes", "train_bytes")}
    return [f"{row['seconds']:.2f}", *shares, *speeds, *map(peak, (row.get("used_bytes"), row.get("host_bytes"), plan))]


def peak(sizes: dict[str, int] | None) -> str:
    return f"{max(sizes.values()) / GIB:.2f}" if sizes else ""
