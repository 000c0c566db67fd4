"""A weight of a decoder layer: its sizes, and its bytes in each form that it may be held in."""

from dataclasses import dataclass

FORMS = NF4, FP8, FP8_BLOCK, BITS_16 = "nf4", "fp8", "fp8-block", "16bit"  # in which weights are held
BLOCK, NESTED_BLOCK = 64, 256  # NF4: weights that share a scale, scales that share one of theirs
TABLES = 4 * (16 + 256 + 1)  # bytes: NF4's values, those of the scales, and their offset


@dataclass(frozen=True)
class Linear:
    """A weight (out, in) of a layer."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    lora: bool = True  # whether it is adapted where no target is named
    experts: int = 1  # so many of them lie in one stack
    taken: int = 1  # and a token goes through so many

    @property
    def weights(self) -> int:
        return self.experts * self.rows * self.columns

    @property
    def passed(self) -> int:
        """Numbers that a token is multiplied with."""
        return self.taken * self.rows * self.columns

    @property
    def nf4_bytes(self) -> int:
        """In NF4 with double quantization."""
        blocks = -(-self.weights // BLOCK)
        return -(-self.weights // 2) + blocks + 4 * -(-blocks // NESTED_BLOCK) + TABLES

    def bytes_in(self, form: str) -> int:
        """In one of FORMS: FP8 has a scale for each row, or for each block of 128 x 128."""
        scales = {FP8: self.rows, FP8_BLOCK: -(-self.rows // 128) * -(-self.columns // 128)}
        if form in scales:
            return self.weights + 4 * scales[form]
        return self.nf4_bytes if form == NF4 else 2 * self.weights
