"""The targets of rollouts, and their section of bench/RESULTS.md."""

from collections.abc import Callable
from typing import Any

from bench.common import tables
from bench.common.rows import newest
from bench.common.targets import OURS, ByProvider, Goal, judged, section
from lowmem_grpo.utils import MIB

BNB, BF16 = "vllm_bnb_lora", "vllm_bf16_lora"
EAGER = "lowmem_grpo_eager"  # ours without CUDA graphs
FP8_CACHE = "lowmem_grpo_fp8_cache"  # ours with a KV cache in 8 bits


def goal(
    demand: str, limit: float, value: Callable[[ByProvider], float], at_least: bool = False, device: str = "cuda",
    shape: str = "full",
) -> Goal:
    fields = {"device": device, "shape": shape}
    return Goal(f"rollout, {shape}", demand, limit, value, lambda value, run: f"{value:.4g}", fields, at_least)


def speedup(other: str) -> Callable[[ByProvider], float]:
    """Return the function of our tokens per second divided by another provider's."""
    return lambda run: run[OURS]["p50"] / run[other]["p50"]


def of_ours(name: str) -> Callable[[ByProvider], float]:
    return lambda run: run[OURS][name]


def added_share(run: ByProvider) -> float:
    """Return the bytes of weights that the engine adds, divided by those that it borrows."""
    return float(run[OURS]["added_bytes"] / run[OURS]["trainer_bytes"])


def alike(device: str, shape: str) -> list[Goal]:
    """Return the goals that hold on every machine."""
    return [
        goal("weights that vLLM adds, of the model's bytes: under 1%", 0.01, added_share, device=device, shape=shape),
        goal("sync after an optimizer step, ms: at most 1", 1.0, of_ours("sync_ms"), device=device, shape=shape),
        goal("importance ratio, distance from 1: at most 0.001", 0.001,
             lambda run: abs(run[OURS]["importance_ratio"] - 1), device=device, shape=shape),
    ]


GOALS = [
    goal(f"tokens/s at least 1.5 x {BNB}", 1.5, speedup(BNB), at_least=True),
    goal(f"tokens/s at least 1 x {BF16}", 1.0, speedup(BF16), at_least=True),
    goal("weights of rollout and training: at most 1.02 x one NF4 copy", 1.02, lambda run: 1 + added_share(run)),
    *alike("cuda", "full"),
    goal("sleep frees, of the key-value cache: at least 0.95", 0.95,
         lambda run: run[OURS]["sleep_freed_bytes"] / run[OURS]["kv_bytes"], at_least=True),
    goal("log-probabilities, mean difference: at most 0.003", 0.003, of_ours("parity_mean"), device="cpu",
         shape="tiny"),
    *alike("cpu", "tiny"),
]
CASE = ("shape", "provider", "device", "gpu", "cpu", "cores", "threads")
COLUMNS: tables.Columns = {
    "shape": lambda row: f"{row['shape']}: {row['sequences']} x {row['completion_tokens']}", "provider": "provider",
    "tokens/s p20": ("p20", ".0f"), "p50": ("p50", ".0f"), "p80": ("p80", ".0f"),
    "trainer's weights, MiB": ("trainer_bytes", ".2f", MIB), "added, MiB": ("added_bytes", ".2f", MIB),
    "KV cache, MiB": ("kv_bytes", ".2f", MIB), "parity mean": ("parity_mean", ".5f"), "max": ("parity_max", ".5f"),
    "sync, ms": ("sync_ms", ".4f"), "machine": lambda row: row["gpu"] or f"{row['cpu']}, {row['threads']} threads",
    "commit": "commit",
}


def rollout_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the section with the newest row of each provider, shape and machine, then the targets."""
    lines = ["", "## Rollouts: our engine on the trainer's NF4 weights and live LoRA, and vLLM with weights of its own",
             "", *tables.page(newest(rows, *CASE).values(), COLUMNS)]
    return lines + section("Rollouts: the targets", judged(GOALS, rows))
