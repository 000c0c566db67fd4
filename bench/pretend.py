"""A pretend CUDA device: allocations, types and streams are real, kernels do nothing, and so every value is garbage.

It serves to walk the code of a card where there is none. Rows that were made on it say so by the card's name.
"""

NAME = "Null CUDA"  # begins the name that such a device gives itself
# For processes whose values steer them (token ids, say). Memory that is not used again is zero, not what was left
# there; and the workers that compile for a card never end.
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def is_pretend(gpu: str | None) -> bool:
    """Whether a card of this name computes nothing."""
    return gpu is not None and gpu.startswith(NAME)


def environment(gpu: str | None) -> dict[str, str]:
    """What a child process needs beside its own environment; nothing for a real card, or for none."""
    return ENVIRONMENT if is_pretend(gpu) else {}
