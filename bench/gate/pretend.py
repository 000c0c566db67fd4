"""A pretend CUDA device: allocations, types and streams are real, kernels do nothing, and so every value is garbage.

It serves to walk the code of a card where there is none. Rows that were made on it say so by the card's name.
"""

NAME = "Null CUDA"  # begins the name that such a device gives itself
# The workers that compile for a card never end there; and only vLLM's older model runner counts tokens.
ALWAYS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
# For processes whose values steer them (token ids, say): zeros where garbage would be read. Without torch's cache
# memory is fresh, and holds what was copied there, or zeros. Sleep mode's pool is part of that cache: with it, all that
# is read from the card must be zeros.
UNCACHED = ALWAYS | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
CACHED = ALWAYS | {"NULL_CUDA_READ_ZEROS": "1"}


def is_pretend(gpu: str | None) -> bool:
    """Whether a card of this name computes nothing."""
    return gpu is not None and gpu.startswith(NAME)


def environment(gpu: str | None, sleeps: bool = False) -> dict[str, str]:
    """What a child process needs beside its own environment; nothing for a real card, or for none. `sleeps`: what vLLM
    gives back in its sleep is looked at."""
    return {} if not is_pretend(gpu) else CACHED if sleeps else UNCACHED
