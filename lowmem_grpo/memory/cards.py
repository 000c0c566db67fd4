"""Cards by name: their memory, their speed by the data sheet, and what they can hold a key-value cache in."""

import difflib
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowmem_grpo.utils import GIB, MIB


class CardSpeed(NamedTuple):
    """The speeds in NVIDIA's data sheet of a card."""

    tflops: float  # dense, 16-bit, sums in float32: half of the best rate on a GeForce card
    memory_tb_s: float
    pcie_gb_s: float  # in one direction
    sms: int
    ghz: float  # boost
    capability: int  # 75 is sm_75


SHEETS: dict[str, tuple[Any, ...]] = {  # MiB of memory as the driver reports them, and a CardSpeed
    "t4": (15360, 65, 0.320, 15.75, 40, 1.59, 75), "p100": (16384, 18.7, 0.732, 15.75, 56, 1.30, 60),
    "v100-16": (16384, 125, 0.900, 15.75, 80, 1.53, 70), "v100-32": (32768, 125, 0.900, 15.75, 80, 1.53, 70),
    "a10g": (23028, 70, 0.600, 31.5, 72, 1.71, 86), "a10": (23028, 125, 0.600, 31.5, 72, 1.695, 86),
    "l4": (23034, 121, 0.300, 31.5, 58, 2.04, 89), "rtx3060": (12288, 25.5, 0.360, 31.5, 28, 1.78, 86),
    "rtx3090": (24576, 71, 0.936, 31.5, 82, 1.695, 86), "rtx4060ti-16": (16380, 44.1, 0.288, 15.75, 34, 2.535, 89),
    "rtx4070ti": (12282, 80.2, 0.504, 31.5, 60, 2.61, 89), "rtx4080": (16376, 97.5, 0.717, 31.5, 76, 2.505, 89),
    "rtx4090": (24564, 165.2, 1.008, 31.5, 128, 2.52, 89), "rtx5080": (16303, 112.6, 0.960, 63, 84, 2.62, 120),
    "rtx5090": (32607, 209.5, 1.792, 63, 170, 2.41, 120), "a4000": (16376, 76.7, 0.448, 31.5, 48, 1.56, 86),
    "a5000": (24564, 111.1, 0.768, 31.5, 64, 1.695, 86), "a6000": (49140, 154.8, 0.768, 31.5, 84, 1.80, 86),
    "l40s": (46068, 362, 0.864, 31.5, 142, 2.52, 89), "a100-40": (40960, 312, 1.555, 31.5, 108, 1.41, 80),
    "a100-80": (81920, 312, 2.039, 31.5, 108, 1.41, 80), "h100": (81559, 989, 3.35, 63, 132, 1.83, 90),
    "h100-nvl": (95830, 835, 3.9, 63, 132, 1.785, 90), "h200": (143771, 989, 4.8, 63, 132, 1.83, 90),
    "b200": (183359, 2250, 8.0, 63, 148, 1.965, 100),
}
CARDS = {name: sheet[0] for name, sheet in SHEETS.items()}
SPEEDS = {name: CardSpeed(*sheet[1:]) for name, sheet in SHEETS.items()}
SAME = {"a100": "a100-40", "v100": "v100-16", "3060": "rtx3060", "3090": "rtx3090", "4080": "rtx4080",
        "4090": "rtx4090", "5080": "rtx5080", "5090": "rtx5090", "4070ti": "rtx4070ti", "4060ti-16": "rtx4060ti-16"}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|mib)")
UNITS = {"gib": GIB, "g": GIB, "gb": 10**9, "mib": MIB}
DEFAULT_SHARE = 0.95  # usable part of a named card: a display, or what another program holds, takes the rest


PREFILL = ((18 * GIB, 2048), (26 * GIB, 4096))  # tokens that vLLM reads at a time, on cards of less than so many bytes
LARGE_PREFILL = 8192  # on the others
MASK_PLACES = 2**26  # places in attention's masks in a pass of the transformers engine
LEAST_PIECE = 256  # tokens of each prompt that it reads in a pass, at least
GRAPH_PLACES = 128  # cache places by which graphs of our own engine differ, at least
MOST_SEQUENCES = 256  # decoded together at most, where nothing else was asked for


@dataclass(frozen=True)
class Device:
    """A card's memory and the part of it that a run may fill, in bytes."""

    name: str
    total: int
    budget: int


def device(name: str, gpu_memory_utilization: float | None = None) -> Device:
    """A card by name ("t4", "a100-40"), of which all but 5% may be filled, or a size ("16GiB"), which may be filled.

    `gpu_memory_utilization` is another share. ValueError names cards with a similar name.
    """
    share = gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization is {share}; it must be above 0 and at most 1")
    plain = name.strip().lower()
    if size := SIZE.fullmatch(plain):
        total = int(float(size[1]) * UNITS[size[2]])
        return Device(name.strip(), total, int(total * (share or 1.0)))
    plain = re.sub(r"[\s_]+", "-", plain).removeprefix("nvidia-").removeprefix("geforce-").removeprefix("tesla-")
    plain = re.sub(r"(?<=\d)gi?b$", "", plain.replace("rtx-", "rtx"))
    plain = SAME.get(plain, plain)
    if plain not in CARDS:
        close = difflib.get_close_matches(plain, [*CARDS, *SAME], n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"no card {name!r}; {hint}Known are {', '.join(CARDS)}, and sizes such as 16GiB")
    total = CARDS[plain] * MIB
    return Device(plain, total, int(total * (share or DEFAULT_SHARE)))


def prefill_tokens(total: int, sequences: int = 1) -> int:
    """Tokens of prompts that vLLM reads in one pass on a card of `total` bytes; one for each sequence at least, as vLLM
    asks. Its own choice (8,192 or 16,384) is profiled beside the trainer's model, for which small cards have no room.
    """
    return max(next((tokens for limit, tokens in PREFILL if total < limit), LARGE_PREFILL), sequences)


def prefill_piece(prompts: int, longest: int) -> int:
    """Return how many tokens of each prompt the transformers engine reads in one pass, so that its masks stay small."""
    return max(LEAST_PIECE, min(LARGE_PREFILL, MASK_PLACES // longest) // prompts)


def graph_rows(rows: int) -> int:
    """Return the rows of our engine's CUDA graph for so many: 1, 2, 4, 8, by eights, above 64 by eighths of 2^n."""
    power = 1 << (rows - 1).bit_length()
    step = power if rows <= 8 else max(8, power // 8)
    return -(-rows // step) * step


def graph_width(width: int, least: int = GRAPH_PLACES) -> int:
    """Return the places that a graph reads: multiples of `least`, above 2,048 of a sixteenth of the next power of 2."""
    step = max(least, (1 << (width - 1).bit_length()) // 16)
    return -(-width // step) * step


def sequences_at_once(sampled: int | None, longest_in_cache: int) -> int:
    """Sequences decoded together: those a run samples, and no more than fit a cache when they are half as long."""
    return max(1, min(sampled or MOST_SEQUENCES, MOST_SEQUENCES, 2 * longest_in_cache))


# The driver's names that do not follow from those here. Another name (a laptop's card, an H100 on PCIe) has no speed.
DRIVER_NAMES = {
    "tesla p100-pcie-16gb": "p100", "tesla v100-sxm2-16gb": "v100-16", "tesla v100-sxm2-32gb": "v100-32",
    "nvidia geforce rtx 4060 ti": "rtx4060ti-16", "nvidia a100-sxm4-40gb": "a100-40", "nvidia h100 nvl": "h100-nvl",
    "nvidia a100-pcie-40gb": "a100-40", "nvidia a100-sxm4-80gb": "a100-80", "nvidia a100 80gb pcie": "a100-80",
    "nvidia h100 80gb hbm3": "h100",
}


def engine_of(card: Device) -> str:
    """Return what samples on a card where nobody names an engine: below sm_80 vLLM was not tested."""
    return "transformers" if card.name in SPEEDS and SPEEDS[card.name].capability < 80 else "vllm"


def card_of(name: str) -> str | None:
    """Return the card of `SPEEDS` that a name means, ours ("h200") or the driver's ("NVIDIA H200"); else None."""
    plain = name.strip().lower()
    short = plain.removeprefix("nvidia ").removeprefix("tesla ").removeprefix("geforce ")
    card = DRIVER_NAMES.get(plain, short.replace("rtx a", "a").replace(" ", ""))
    return card if card in SPEEDS else None


# What a number of the key-value cache is held in, by vLLM's names, and which device can hold it so

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
    """Return in words what a cache of this dtype holds its numbers in."""
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
