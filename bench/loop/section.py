"""The targets of a step of the whole loop against peers, and its section of bench/RESULTS.md."""

from bench.common import tables
from bench.common.rows import newest
from bench.common.targets import BELOW_ONE, OURS, ByProvider, Goal, Row, judged, section
from lowmem_grpo.utils import GIB

PEERS = ("trl", "trl_nf4", "unsloth")  # whose loops have vLLM too
PHASES = ("generate", "switch", "score", "train", "optimizer", "rest")  # in the order of the table
CASE = ("shape", "prompts", "gib", "provider", "device", "gpu", "cpu", "cores", "threads")
def beside(peer: str, ours: str = OURS, memory: bool = False) -> Goal:
    """Return the goal for our figure divided by a peer's: seconds of a step, or the peak in use on the card."""
    def measure(row: Row) -> float:
        return float(max(row["used_bytes"].values()) if memory else row["seconds"])

    def ratio(run: ByProvider) -> float:
        return measure(run[ours]) / measure(run[peer])

    demand = "memory in use: at most" if memory else "seconds of a step: below"
    return Goal(f"loop, full, {ours}", f"{demand} 1 x {peer}", 1.0 if memory else BELOW_ONE, ratio,
                lambda value, run: f"{value:.3g} x", {"device": "cuda", "shape": "full"})


GOALS = [beside(peer, memory=memory) for peer in PEERS for memory in (False, True)]
GOALS.append(beside("trl_transformers", ours=f"{OURS}_transformers"))  # without vLLM only the time is compared


def case_of(row: Row) -> str:
    """Return the sequences and their lengths, and the limit of the card's memory."""
    cap = f", {row['gib']:g} GiB" if row["gib"] else ""
    return (f"{row['shape']}: {row['prompts']} x {row['generations']} x {row['completion_tokens']:,} tokens after "
            f"{row['prompt_tokens']:,}{cap}")


def peak(name: str, *phases: str) -> tables.Figure:
    """Return the figure of a row's most bytes, of all phases or of these, in GiB."""
    def most(row: Row) -> str:
        sizes = [size for phase, size in (row.get(name) or {}).items() if not phases or phase in phases]
        return f"{max(sizes) / GIB:.2f}" if sizes else ""

    return most


COLUMNS: tables.Columns = {
    "case": case_of, "provider": "provider", "s / step": ("seconds", ".2f"),
    **{phase: lambda row, phase=phase: f"{row['shares'].get(phase, 0):.1%}" for phase in PHASES},
    **{name: lambda row, kind=kind: tables.number(row["tokens_per_second"], kind, ".0f")
       for name, kind in (("tokens/s", "step"), ("sampling", "generate"), ("training", "train"))},
    "peak on the card, GiB": peak("used_bytes"), "on the host, GiB": peak("host_bytes"),
    "planned, GiB": peak("planned", "rollout_bytes", "train_bytes"),  # the larger of both phases
    "machine": lambda row: row["gpu"] if row["device"] == "cuda" else f"{row['cpu']}, {row['threads']} threads",
    "commit": "commit",
}


def loop_table(rows: list[Row]) -> list[str]:
    """Return the section with the newest row of each provider, case and machine, then the targets."""
    lines = [
        "", "## A step of the whole loop: time by phase, and peaks", "",
        "Llama-3.1-8B's shape with random weights. `switch` is sleeping, waking, and updating the sampler's weights. "
        "The peak on the card is all memory in use there; a CPU has none.", "",
        *tables.page(newest(rows, *CASE).values(), COLUMNS),
    ]
    return lines + section("The whole loop: the targets", judged(GOALS, rows))
