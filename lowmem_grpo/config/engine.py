"""Which engine is asked for, on which device, and what vLLM's is made with. Needs no library, so that wrong values are
refused before torch is imported."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.memory.cache_dtype import AUTO, CACHE_DTYPES, in_8_bits
from lowmem_grpo.utils import TRUTH, Rule, at_least, check_ranges, number, one_of

TRANSFORMERS, VLLM = "transformers", "vllm"
ENGINES = (True, False, TRANSFORMERS, VLLM)
FOUR, SIXTEEN = "4bit", "16bit"  # the forms of weights to sample with
ANYWHERE = (None, "auto", "balanced", "balanced_low_0", "sequential", "unsloth")  # device maps that name no device
GPU_SHARE = number("in (0, 1]", lambda value: value is not True and 0 < value <= 1)
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class EngineSettings:
    """The options of vLLM's engine. The transformers engine reserves no memory, and takes `enforce_eager` and
    `sampling_weights` only."""

    gpu_memory_utilization: float = 0.5  # the share of the card that may be in use, the key-value cache included
    kv_cache_bytes: int | None = None  # for the key-value cache, instead of gpu_memory_utilization
    max_num_seqs: int | None = None  # sequences that are decoded together; None: what a run samples at once
    enforce_eager: bool | None = None  # True: no CUDA graphs. None: graphs on a card
    block_size: int | None = None  # tokens of a block of the cache. None: vLLM's own; 32 for short contexts on the CPU
    sampling_weights: str | None = None  # "16bit": 4-bit weights are dequantized to sample. None: where there is room
    kv_cache_dtype: str = AUTO  # what the key-value cache holds: the model's, or 8-bit floats (CACHE_DTYPES)

    RANGES: ClassVar[dict[str, Rule]] = {
        "gpu_memory_utilization": GPU_SHARE, "enforce_eager": TRUTH,
        "kv_cache_bytes": at_least(1, int), "max_num_seqs": at_least(1, int),
        "block_size": at_least(1, int), "sampling_weights": one_of(FOUR, SIXTEEN),
        "kv_cache_dtype": one_of(*CACHE_DTYPES),
    }

    def __post_init__(self) -> None:
        check_ranges(self)

    def check_for(self, fast_inference: bool | str) -> None:
        """Raise ValueError where a setting has nothing to act on in that engine."""
        if self.in_8_bits and fast_inference in (False, TRANSFORMERS):
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype!r} and fast_inference is {fast_inference!r}: "
                             "only vLLM holds its cache in 8 bits, the transformers engine in the model's dtype. "
                             'Leave it out, or load with fast_inference="vllm"')

    @property
    def in_8_bits(self) -> bool:
        return in_8_bits(self.kv_cache_dtype)


def check_engine(fast_inference: bool | str) -> None:
    """Raise ValueError for an engine that there is not."""
    if fast_inference not in ENGINES:
        raise ValueError(f'fast_inference is {fast_inference!r}; allowed are True, False, "transformers" and "vllm"')


def named_device(device: str | None, device_map: Any) -> str | None:
    """Return the one device that is asked for by name, None where the choice is ours; ValueError for another form."""
    if isinstance(device_map, dict):
        places = {str(place) for place in device_map.values()}
        if len(places) != 1:
            raise ValueError(f"device_map is {device_map!r}: a model lies on one device here; leave it out")
        device_map = next(iter(device_map.values()))
    mapped = None if device_map in ANYWHERE else str(device_map)
    mapped = f"cuda:{mapped}" if mapped is not None and mapped.isdigit() else mapped
    named = None if device is None else str(device)
    if named is not None and mapped not in (None, named):
        raise ValueError(f"device is {device!r} and device_map names {mapped!r}; give one of them")
    if mapped is not None and not DEVICE.fullmatch(mapped):
        allowed = ", ".join(repr(place) for place in ANYWHERE if place)
        raise ValueError(f"device_map is {device_map!r}; allowed are {allowed}, and one device such as 'cuda:0' or "
                         "'cpu'")
    if named is not None and not DEVICE.fullmatch(named):
        raise ValueError(f"device is {device!r}; allowed are 'cpu', 'cuda' and one card such as 'cuda:0'")
    return named or mapped
