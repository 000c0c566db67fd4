"""The cases of bench/memory/bench.py, and the stages in which features that save memory are switched on."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Features:
    """Features with which a step saves memory. The defaults are those of our runs; the host embedding is optional."""

    checkpointing: bool | str = "offload"
    no_logits: bool = True
    kernels: bool = True  # our LoRA layers, tiled MLPs and norms; else those of PEFT and transformers
    packing: bool = True  # micro-batches of one sequence's length; else all at once, padded to the longest
    shared_weights: bool = True  # else the rollout engine has its own weights in 16 bits
    optim: str = "adamw_8bit"
    host_embedding: bool = False
    mlp_tile: int | None = None  # tokens; None: the loader's size
    logits_chunk: int = 1024  # tokens
    kept_layers: int = 0  # layers, the last ones, that keep all they compute
    head_groups: int = 1  # groups of heads that attention's backward pass takes in turn
    expert_lora: bool = False  # LoRA on each expert too
    modules_to_save: tuple[str, ...] = ()  # embedding and head, where they are trained whole


@dataclass(frozen=True)
class Case:
    """A model, the tokens of its longest sequence, the completions of a prompt, and LoRA's rank."""

    shape: str
    context: int
    generations: int = 8
    rank: int = 32


CASES = [
    Case("llama-3.1-8b", 20480), Case("llama-3.1-8b", 131072), Case("qwen3-8b", 20480), Case("qwen2.5-1.5b", 2048),
    Case("qwen2.5-3b", 8192), Case("qwen2.5-7b", 8192), Case("qwen3-4b", 8192), Case("llama-3.2-3b", 8192),
    Case("phi-4-14b", 8192), Case("llama-3.3-70b", 2048),
]

NAIVE = Features(
    checkpointing=False, no_logits=False, kernels=False, packing=False, shared_weights=False, optim="adamw_torch",
)
CHANGES: dict[str, dict[str, object]] = {
    "naive": {},
    "+ checkpointing": {"checkpointing": True},
    "+ offload": {"checkpointing": "offload"},
    "+ no logits": {"no_logits": True},
    "+ tiled MLP": {"kernels": True},
    "+ packing": {"packing": True},
    "+ shared weights": {"shared_weights": True},
    "+ 8-bit optimizer": {"optim": "adamw_8bit"},
    "+ host embedding": {"host_embedding": True},
}


def stages() -> dict[str, Features]:
    """Return the features of each stage: those of the one before, and one more."""
    found, now = {}, NAIVE
    for name, change in CHANGES.items():
        now = replace(now, **change)  # type: ignore[arg-type]
        found[name] = now
    return found


STAGES = stages()


def completion_lengths(case: Case) -> list[int]:
    """Return the tokens of each sequence, prompt included: evenly from all of the context down to half of it."""
    last = case.generations - 1
    return [case.context - number * case.context // (2 * last) for number in range(case.generations)]
