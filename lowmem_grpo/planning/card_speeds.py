"""How fast each card is by its data sheet, and the share of that which programs reach.

The numbers are NVIDIA's: dense 16-bit products with sums in float32 (without sparsity), device memory, the PCIe link in
one direction, multiprocessors, boost clock, L2 cache. A GeForce card sums in float32 at half of its best rate, which is
what counts here. None of it was measured but the H200's shares, so a time from it is an estimate.
"""

from dataclasses import dataclass

GEMM_SHARE = 0.80  # of dense products: 788 of 989 TFLOP/s, 8192 x 8192 x 8192 in bf16 on an H200; assumed for others
MEMORY_SHARE = 0.90  # of device memory: a copy of 4.3 of 4.8 TB/s on an H200; assumed for others
ATTENTION_SHARE = 0.35  # of dense products: FlashAttention 2 on Hopper, 350 of 989 TFLOP/s; an assumption
PCIE_SHARE = 0.85  # of the link, from pinned memory; an assumption
L2_BYTES_A_CLOCK = 24  # of one multiprocessor: 5.6 TB/s on an H200; an assumption, as no data sheet has it
WARP = 32  # lanes
ISSUES_A_CLOCK = 4  # instructions of warps that one multiprocessor begins


@dataclass(frozen=True)
class CardSpeed:
    """One card's data sheet. Its properties are what programs are taken to reach of it, a second."""

    tflops: float  # dense, 16-bit, sums in float32
    memory_tb_s: float
    pcie_gb_s: float  # in one direction
    sms: int
    ghz: float  # boost
    l2_mb: float
    capability: int  # 75 is sm_75

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16; float16 is used where it does not, at the same rate."""
        return self.capability >= 80

    @property
    def gemm(self) -> float:
        """FLOP of dense products."""
        return self.tflops * 1e12 * GEMM_SHARE

    @property
    def attention(self) -> float:
        """FLOP of fused attention."""
        return self.tflops * 1e12 * ATTENTION_SHARE

    @property
    def memory(self) -> float:
        """Bytes of device memory."""
        return self.memory_tb_s * 1e12 * MEMORY_SHARE

    @property
    def pcie(self) -> float:
        """Bytes between host and device, in one direction."""
        return self.pcie_gb_s * 1e9 * PCIE_SHARE

    @property
    def l2(self) -> float:
        """Bytes of the L2 cache."""
        return self.sms * self.ghz * 1e9 * L2_BYTES_A_CLOCK

    @property
    def lanes(self) -> float:
        """Instructions of single lanes that all multiprocessors begin."""
        return self.sms * self.ghz * 1e9 * ISSUES_A_CLOCK * WARP


# By the names of `cards.CARDS`: TFLOP/s, TB/s, PCIe GB/s, multiprocessors, GHz, MB of L2, compute capability.
SPEEDS = {
    "t4": CardSpeed(65, 0.320, 15.75, 40, 1.59, 4, 75),
    "p100": CardSpeed(18.7, 0.732, 15.75, 56, 1.30, 4, 60),
    "v100-16": CardSpeed(125, 0.900, 15.75, 80, 1.53, 6, 70),
    "v100-32": CardSpeed(125, 0.900, 15.75, 80, 1.53, 6, 70),
    "a10g": CardSpeed(70, 0.600, 31.5, 72, 1.71, 6, 86),
    "a10": CardSpeed(125, 0.600, 31.5, 72, 1.695, 6, 86),
    "l4": CardSpeed(121, 0.300, 31.5, 58, 2.04, 48, 89),
    "rtx3060": CardSpeed(25.5, 0.360, 31.5, 28, 1.78, 3, 86),
    "rtx3090": CardSpeed(71, 0.936, 31.5, 82, 1.695, 6, 86),
    "rtx4060ti-16": CardSpeed(44.1, 0.288, 15.75, 34, 2.535, 32, 89),
    "rtx4070ti": CardSpeed(80.2, 0.504, 31.5, 60, 2.61, 48, 89),
    "rtx4080": CardSpeed(97.5, 0.717, 31.5, 76, 2.505, 64, 89),
    "rtx4090": CardSpeed(165.2, 1.008, 31.5, 128, 2.52, 72, 89),
    "rtx5080": CardSpeed(112.6, 0.960, 63, 84, 2.62, 64, 120),
    "rtx5090": CardSpeed(209.5, 1.792, 63, 170, 2.41, 96, 120),
    "a4000": CardSpeed(76.7, 0.448, 31.5, 48, 1.56, 4, 86),
    "a5000": CardSpeed(111.1, 0.768, 31.5, 64, 1.695, 6, 86),
    "a6000": CardSpeed(154.8, 0.768, 31.5, 84, 1.80, 6, 86),
    "l40s": CardSpeed(362, 0.864, 31.5, 142, 2.52, 96, 89),
    "a100-40": CardSpeed(312, 1.555, 31.5, 108, 1.41, 40, 80),
    "a100-80": CardSpeed(312, 2.039, 31.5, 108, 1.41, 40, 80),
    "h100": CardSpeed(989, 3.35, 63, 132, 1.83, 50, 90),
    "h100-nvl": CardSpeed(835, 3.9, 63, 132, 1.785, 50, 90),
    "h200": CardSpeed(989, 4.8, 63, 132, 1.83, 50, 90),
    "b200": CardSpeed(2250, 8.0, 63, 148, 1.965, 126, 100),
}
# What the driver calls a card where that is not "NVIDIA" or "NVIDIA GeForce" and its name here. A name that is neither
# here nor there (a laptop's card, an H100 on PCIe) has another speed, and gets no estimate.
DRIVER_NAMES = {
    "tesla t4": "t4", "tesla p100-pcie-16gb": "p100", "tesla v100-sxm2-16gb": "v100-16",
    "tesla v100-sxm2-32gb": "v100-32", "nvidia geforce rtx 4060 ti": "rtx4060ti-16",
    "nvidia geforce rtx 4070 ti": "rtx4070ti", "nvidia rtx a4000": "a4000", "nvidia rtx a5000": "a5000",
    "nvidia rtx a6000": "a6000", "nvidia a100-sxm4-40gb": "a100-40", "nvidia a100-pcie-40gb": "a100-40",
    "nvidia a100-sxm4-80gb": "a100-80", "nvidia a100 80gb pcie": "a100-80", "nvidia h100 80gb hbm3": "h100",
    "nvidia h100 nvl": "h100-nvl",
}


def card_of(name: str) -> str | None:
    """The card of `SPEEDS` that a name means, ours ("h200") or the driver's ("NVIDIA H200"); None for any other."""
    plain = name.strip().lower()
    if plain in DRIVER_NAMES:
        return DRIVER_NAMES[plain]
    plain = plain.removeprefix("nvidia ").removeprefix("geforce ").replace("rtx ", "rtx")
    return plain if plain in SPEEDS else None
