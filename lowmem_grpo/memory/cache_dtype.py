"""What a number of the key-value cache is held in, by vLLM's names, and which device can hold it so."""

AUTO = "auto"  # the model's own dtype
CACHE_DTYPES = (AUTO, "fp8", "fp8_e4m3", "fp8_e5m2")  # "fp8" is e4m3
NATIVE = (8, 9)  # compute capability from which on cards convert e4m3 themselves, which vLLM's own kernels need
LOWEST = (8, 0)  # from which on FlashInfer's kernels do without
IN_16_BITS = 'Leave kv_cache_dtype at "auto"'


def in_8_bits(cache_dtype: str) -> bool:
    return cache_dtype != AUTO


def cache_itemsize(cache_dtype: str, itemsize: int = 2) -> int:
    """Bytes of a number of the cache; `itemsize` is that of the model's dtype."""
    return 1 if in_8_bits(cache_dtype) else itemsize


def cache_text(cache_dtype: str) -> str:
    return f"8 bits ({cache_dtype})" if in_8_bits(cache_dtype) else "16 bits"


def why_not_on_card(capability: tuple[int, int], flashinfer: bool) -> str | None:
    """Why vLLM cannot hold the cache in 8 bits on a card; None where it can, as its source says (0.26 to 0.33). Its
    Triton kernels ask for compute capability 8.9 and FlashAttention's for 9.0; only FlashInfer's take 8.0."""
    number = "{}.{}".format(*capability)
    if capability < LOWEST:
        return f"vLLM holds it so from compute capability 8.0 on, and this card has {number}"
    if capability < NATIVE and not flashinfer:
        return (f"below compute capability 8.9 vLLM holds it so with FlashInfer only, which is not installed, and this "
                f"card has {number} (pip install flashinfer-python)")
    return None


def why_not_on_cpu(instructions: str) -> str | None:
    """The same for vLLM's build for CPUs, by the instructions that torch says a CPU has."""
    if "AVX512" in instructions.upper():
        return None
    return f"on a CPU vLLM holds it so with AVX-512 only, and this one has {instructions}"
