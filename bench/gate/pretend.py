"""A pretend CUDA device: allocations, types and streams are real, kernels do nothing, and so every value is garbage.

It walks the code for a card where there is none. The card's name in a row shows that the row was made on it.
"""

NAME = "Null CUDA"  # the beginning of such a device's name
# Workers that compile for a card never end there, and only vLLM's older model runner counts tokens.
ALWAYS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
# For processes that branch on values, such as token ids: they read zeros instead of garbage. Without torch's cache,
# memory is fresh and holds zeros, or what was copied there. Sleep mode's pool is part of that cache, so with sleep
# everything that is read from the card is zero.
UNCACHED = ALWAYS | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
CACHED = ALWAYS | {"NULL_CUDA_READ_ZEROS": "1"}


def is_pretend(gpu: str | None) -> bool:
    """Whether a card of this name computes nothing."""
    return gpu is not None and gpu.startswith(NAME)


def environment(gpu: str | None, sleeps: bool = False) -> dict[str, str]:
    """Environment variables that a child process needs; none for a real card, or without a card. `sleeps`: the process
    measures what vLLM gives back when it sleeps."""
    return {} if not is_pretend(gpu) else CACHED if sleeps else UNCACHED
