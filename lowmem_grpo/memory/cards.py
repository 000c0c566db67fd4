"""GPUs by name: their memory, their speed from the data sheet, and the KV cache dtypes that they support."""

import difflib
import re
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from lowmem_grpo.utils import GIB, MIB

GEMM = 0.80  # share of the data sheet's TFLOP/s in large products, unless the card's power limits them; an assumption


class CardSpeed(NamedTuple):
    """A card's speeds from NVIDIA's data sheet."""

    tflops: float  # dense, 16-bit with float32 accumulation, which a GeForce card runs at half its peak rate
    memory_tb_s: float
    pcie_gb_s: float  # in one direction
    sms: int
    ghz: float  # boost
    capability: int  # 75 is sm_75
    sustained: float | None = None  # TFLOP/s in large products, if the card's power limits them; an assumption

    @property
    def products(self) -> float:
        """FLOP/s in large products."""
        return 1e12 * (self.sustained or GEMM * self.tflops)


SHEETS: dict[str, tuple[Any, ...]] = {  # MiB of memory as the driver reports it, then the fields of CardSpeed
    "gtx1660": (6144, 5.0, 0.192, 15.75, 22, 1.785, 75),  # without tensor cores
    "rtx3050-6": (6144, 13.5, 0.168, 15.75, 18, 1.47, 86), "rtx3050-8": (8192, 18.2, 0.224, 15.75, 20, 1.777, 86),
    "rtx3060ti": (8192, 32.4, 0.448, 31.5, 38, 1.665, 86), "rtx3070": (8192, 40.6, 0.448, 31.5, 46, 1.725, 86),
    "rtx3080-10": (10240, 59.5, 0.760, 31.5, 68, 1.71, 86), "rtx4060": (8188, 30.2, 0.272, 15.75, 24, 2.46, 89),
    "rtx4060-laptop": (8188, 29.1, 0.256, 15.75, 24, 2.37, 89),  # clock at the highest power; most laptops allow less
    "rtx4060ti-8": (8188, 44.1, 0.288, 15.75, 34, 2.535, 89), "rtx5060": (8151, 38.4, 0.448, 31.5, 30, 2.497, 120),
    "t4": (15360, 65, 0.320, 15.75, 40, 1.59, 75, 22), "p100": (16384, 18.7, 0.732, 15.75, 56, 1.30, 60),
    "v100-16": (16384, 125, 0.900, 15.75, 80, 1.53, 70), "v100-32": (32768, 125, 0.900, 15.75, 80, 1.53, 70),
    "a10g": (23028, 70, 0.600, 31.5, 72, 1.71, 86), "a10": (23028, 125, 0.600, 31.5, 72, 1.695, 86, 70),
    "l4": (23034, 121, 0.300, 31.5, 58, 2.04, 89, 55), "rtx3060": (12288, 25.5, 0.360, 31.5, 28, 1.78, 86),
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
SAME = {"a100": "a100-40", "v100": "v100-16", "rtx3050": "rtx3050-8", "rtx3080": "rtx3080-10", "1660": "gtx1660"}
SAME |= {name.removeprefix("rtx"): name for name in SHEETS if name.startswith("rtx")}
SAME |= {name.removeprefix("rtx"): SAME[name] for name in ("rtx3050", "rtx3080")}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|mib)")
UNITS = {"gib": GIB, "g": GIB, "gb": 10**9, "mib": MIB}
DEFAULT_SHARE = 0.95  # usable share of a named card; a display or other programs take the rest
PREFILL = ((18 * GIB, 2048), (26 * GIB, 4096))  # (bytes, tokens): vLLM's prefill tokens per pass on smaller cards
LARGE_PREFILL = 8192  # on larger cards
MASK_PLACES = 2**26  # elements of the attention mask in one prefill pass of the transformers engine
LEAST_PIECE = 256  # least tokens of each prompt that the transformers engine prefills in one pass
GRAPH_PLACES = 128  # least difference in cache length between two CUDA graphs of our own engine
MOST_SEQUENCES = 256  # most sequences decoded together, unless the run asks for another number


@dataclass(frozen=True)
class Device:
    """A card's memory and the part of it that a run may fill, in bytes."""

    name: str
    total: int
    budget: int


def device(name: str, gpu_memory_utilization: float | None = None) -> Device:
    """Return a card by name ("t4", or the driver's name) with 95% of its memory as budget, or by size ("16GiB") with
    100%. `gpu_memory_utilization` replaces either share. The ValueError for an unknown card lists similar names."""
    share = gpu_memory_utilization
    if not isinstance(name, str):
        raise ValueError(f"the card is {name!r}; give its name, such as 'h100', or its memory with a unit: '16GiB'")
    if share is not None and not (isinstance(share, Real) and 0 < share <= 1):
        raise ValueError(f"gpu_memory_utilization is {share!r}; it must be above 0 and at most 1")
    plain = name.strip().lower()
    if size := SIZE.fullmatch(plain):
        if not (total := int(float(size[1]) * UNITS[size[2]])):
            raise ValueError(f"the card is {name!r}; its memory must be above 0")
        return Device(name.strip(), total, int(total * (share or 1.0)))
    plain = re.sub(r"[\s_]+", "-", plain).removeprefix("nvidia-").removeprefix("geforce-").removeprefix("tesla-")
    plain = re.sub(r"(?<=\d)gi?b$", "", plain.replace("rtx-", "rtx"))
    plain = SAME.get(plain, card_of(name) or plain)
    if plain not in CARDS:
        close = difflib.get_close_matches(plain, [*CARDS, *SAME], n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ValueError(f"no card {name!r}{hint} Known are {', '.join(CARDS)}, and sizes such as 16GiB")
    total = CARDS[plain] * MIB
    return Device(plain, total, int(total * (share or DEFAULT_SHARE)))


def prefill_tokens(total: int, sequences: int = 1) -> int:
    """Return how many prompt tokens vLLM prefills in one pass on a card of `total` bytes: at least one per sequence.
    With vLLM's default (8,192 or 16,384), its profiling pass does not fit beside the trainer's model on small cards."""
    return max(next((tokens for limit, tokens in PREFILL if total < limit), LARGE_PREFILL), sequences)


def prefill_piece(prompts: int, longest: int) -> int:
    """Return the tokens of each prompt that the transformers engine prefills per pass: few enough for small masks."""
    return max(LEAST_PIECE, min(LARGE_PREFILL, MASK_PLACES // longest) // prompts)


def graph_rows(rows: int) -> int:
    """Round `rows` up to a number for which our engine records CUDA graphs: 1, 2, 4, 8, a multiple of 8 up to 64, and
    then a multiple of an eighth of the next power of 2."""
    power = 1 << (rows - 1).bit_length()
    step = power if rows <= 8 else max(8, power // 8)
    return -(-rows // step) * step


def graph_width(width: int, least: int = GRAPH_PLACES) -> int:
    """Round a cache length up to one for which CUDA graphs are recorded: a multiple of `least`, or of an eighth of the
    next power of 2 if that is more."""
    step = max(least, (1 << (width - 1).bit_length()) // 8)
    return -(-width // step) * step


# The driver's names that `card_of` cannot derive. A card under another name (most laptops, H100 PCIe) has no speed, and
# neither has one whose name does not tell two cards apart (RTX 3050 with 6 and 8 GB, RTX 3080 with 10 and 12 GB).
DRIVER_NAMES = {
    "tesla p100-pcie-16gb": "p100", "tesla v100-sxm2-16gb": "v100-16", "tesla v100-sxm2-32gb": "v100-32",
    "nvidia geforce rtx 4060 ti": "rtx4060ti-16",  # of either size: their speeds are the same
    "nvidia geforce rtx 4060 laptop gpu": "rtx4060-laptop",
    "nvidia a100-sxm4-40gb": "a100-40", "nvidia h100 nvl": "h100-nvl",
    "nvidia a100-pcie-40gb": "a100-40", "nvidia a100-sxm4-80gb": "a100-80", "nvidia a100 80gb pcie": "a100-80",
    "nvidia h100 80gb hbm3": "h100",
}


def engine_of(card: Device) -> str:
    """Return the default engine for a card: transformers below sm_80, where vLLM was not tested."""
    return "transformers" if lacks_bfloat16(card) else "vllm"


def lacks_bfloat16(card: Device) -> bool:
    """Return whether a card is known to be below sm_80, and computes in 16 bits in float16 only."""
    return (name := card_of(card.name)) is not None and SPEEDS[name].capability < 80


def card_of(name: str) -> str | None:
    """Return the key in `SPEEDS` for our name ("h200") or the driver's ("NVIDIA H200") of a card; None if unknown."""
    plain = name.strip().lower()
    short = plain.removeprefix("nvidia ").removeprefix("tesla ").removeprefix("geforce ")
    card = DRIVER_NAMES.get(plain, short.replace("rtx a", "a").replace(" ", ""))
    return card if card in SPEEDS else None


# Dtypes of the KV cache by vLLM's names, and the devices that support them

AUTO = "auto"  # the model's own dtype
CACHE_DTYPES = (AUTO, "fp8", "fp8_e4m3", "fp8_e5m2")  # "fp8" is e4m3
NATIVE = (8, 9)  # least compute capability with e4m3 conversions in hardware, which vLLM's own kernels need
LOWEST = (8, 0)  # least compute capability of FlashInfer's kernels, which do without
IN_16_BITS = 'Leave kv_cache_dtype at "auto"'


def in_8_bits(cache_dtype: str) -> bool:
    return cache_dtype != AUTO


def cache_itemsize(cache_dtype: str, itemsize: int = 2) -> int:
    """Return the bytes of one number in the KV cache; `itemsize` is that of the model's dtype."""
    return 1 if in_8_bits(cache_dtype) else itemsize


def cache_text(cache_dtype: str, itemsize: int = 2) -> str:
    return f"8 bits ({cache_dtype})" if in_8_bits(cache_dtype) else f"{8 * itemsize} bits"


def why_not_on_card(capability: tuple[int, int], flashinfer: bool) -> str | None:
    """Return the reason why vLLM cannot keep an 8-bit KV cache on a card; None if it can. According to vLLM's source
    (0.26 to 0.33), its Triton kernels need compute capability 8.9, FlashAttention's 9.0 and FlashInfer's 8.0."""
    number = "{}.{}".format(*capability)
    if capability < LOWEST:
        return f"vLLM holds it so from compute capability 8.0 on, and this card has {number}"
    if capability < NATIVE and not flashinfer:
        return (f"below compute capability 8.9 vLLM holds it so with FlashInfer only, which is not installed, and this "
                f"card has {number} (pip install flashinfer-python)")
    return None


def why_not_on_cpu(instructions: str) -> str | None:
    """Return the reason why vLLM cannot keep an 8-bit KV cache with the CPU's instruction set; None if it can."""
    if "AVX512" in instructions.upper():
        return None
    return f"on a CPU vLLM holds it so with AVX-512 only, and this one has {instructions}"
