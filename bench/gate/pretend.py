"""A pretend CUDA device: allocations, types and streams are real, kernels do nothing, and so every value is garbage.

It runs the code for a card where there is none. The card's name in a row shows that the row was made on it.
"""

NAME = "Null CUDA"  # the beginning of such a device's name
# On a pretend card, Inductor's compile workers never end, and only vLLM's older model runner counts tokens.
ALWAYS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
# For processes that branch on values, such as token ids: they read zeros instead of garbage. Without torch's cache,
# memory is fresh and holds zeros, or what was copied there. Sleep mode's pool is part of that cache, so with sleep
# everything that is read from the card is zero.
UNCACHED = ALWAYS | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
CACHED = ALWAYS | {"NULL_CUDA_READ_ZEROS": "1"}


def is_pretend(gpu: str | None) -> bool:
    """Return whether a card of this name is a pretend one."""
    return gpu is not None and gpu.startswith(NAME)


def environment(gpu: str | None, sleeps: bool = False) -> dict[str, str]:
    """Return environment variables for a child process; none for a real card, or without a card. `sleeps`: the process
    measures the memory that vLLM frees when it sleeps."""
    return {} if not is_pretend(gpu) else CACHED if sleeps else UNCACHED
