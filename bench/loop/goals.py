"""The numbers that a step of the whole loop should reach beside peers."""

from bench.common.targets import BELOW_ONE, OURS, ByProvider, Goal, Row

PEERS = ("trl", "trl_nf4", "unsloth")  # whose loops have vLLM too
FULL = {"device": "cuda", "shape": "full"}


def beside(peer: str, ours: str = OURS, memory: bool = False) -> Goal:
    """Ours divided by a peer's: seconds of a step, or the most that was in use on the card."""
    def measure(row: Row) -> float:
        return float(max(row["used_bytes"].values()) if memory else row["seconds"])

    def ratio(run: ByProvider) -> float:
        return measure(run[ours]) / measure(run[peer])

    demand = "memory in use: at most" if memory else "seconds of a step: below"
    return Goal(f"loop, full, {ours}", f"{demand} 1 x {peer}", 1.0 if memory else BELOW_ONE, ratio,
                lambda value, run: f"{value:.3g} x", FULL)


GOALS = [beside(peer, memory=memory) for peer in PEERS for memory in (False, True)]
GOALS.append(beside("trl_transformers", ours=f"{OURS}_transformers"))  # without vLLM only the time is compared
