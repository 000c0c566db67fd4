"""What a training step can use to save memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Features:
    """The defaults are those of a run of ours; the host embedding is a choice."""

    checkpointing: bool | str = "offload"
    no_logits: bool = True
    kernels: bool = True  # LoRA layers as one node, MLPs in tiles, norms; else PEFT's and transformers' own
    packing: bool = True  # micro-batches of one sequence's length; else all of them at once, padded to the longest
    shared_weights: bool = True  # else the rollout engine has weights of its own, in 16 bits
    optim: str = "adamw_8bit"
    host_embedding: bool = False
    mlp_tile: int | None = None  # tokens; None is the loader's own size
    logits_chunk: int = 1024  # tokens
