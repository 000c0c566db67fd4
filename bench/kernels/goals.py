"""The numbers that the kernels are to reach, and whether the recorded rows reach them."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.common.targets import Verdict, is_meant_for, place, within

OURS = "lowmem_grpo"
GB = 1e9
LOGPROB_PEERS = ("trl_chunked", "trl_full_logits", "liger_grpo_loss", "cut_cross_entropy", "torch_compile")


@dataclass(frozen=True)
class Target:
    """A measure of ours, or its ratio to that of another provider in the same run, and the limit."""

    op: str
    passes: str
    shape: dict[str, int]
    dtype: str
    device: str
    measure: str  # a field of a row: p50, peak_bytes, roofline
    limit: float
    against: str | None = None
    at_least: bool = False

    @property
    def case(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{self.op} {self.passes}, {sizes}, {self.dtype}, {place(self.device)}"

    @property
    def demand(self) -> str:
        name = {"p50": "time", "peak_bytes": "memory", "roofline": "share of copy bandwidth"}[self.measure]
        sign = "at least" if self.at_least else "at most"
        if self.against:
            return f"{name} {sign} {self.limit:g} x {self.against}"
        return f"{name} {sign} " + (f"{self.limit / GB:g} GB" if self.measure == "peak_bytes" else f"{self.limit:.0%}")

    def matches(self, row: dict[str, Any]) -> bool:
        """Whether a row is of this case and this kind of machine."""
        fields = ("op", "passes", "shape", "dtype")
        return is_meant_for(self.device, row) and all(row[name] == getattr(self, name) for name in fields)

    def is_met(self, value: float) -> bool:
        return within(value, self.limit, self.at_least)

    def told(self, value: float) -> str:
        """The value with its unit."""
        if self.against:
            return f"{value:.3g} x"
        return f"{value / GB:.3g} GB" if self.measure == "peak_bytes" else f"{value:.0%}"


def judge(target: Target, rows: list[dict[str, Any]]) -> Verdict:
    """The newest run that has our row, and the other provider's where the target names one."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if target.matches(row):
            runs.setdefault(row["run"], {})[row["provider"]] = row
    for run in reversed(runs.values()):
        ours, other = run.get(OURS), run.get(target.against or OURS)
        if ours and other and ours.get(target.measure) is not None:
            return Verdict(target, ours[target.measure] / (other[target.measure] if target.against else 1))
    return Verdict(target)


def logprob_targets() -> list[Target]:
    """On the card against its bare products and every peer; on the CPU against TRL."""
    found = []
    for vocabulary in (128256, 151936):
        case = ("linear_logprobs", "fwd+bwd", {"N": 16384, "D": 4096, "V": vocabulary}, "bfloat16", "cuda")
        found += [Target(*case, "p50", 1.2, "two_gemms"), Target(*case, "peak_bytes", GB)]
        found += [Target(*case, "p50", 1.0, peer) for peer in LOGPROB_PEERS]
        found += [Target(*case, "peak_bytes", 1.0, peer) for peer in LOGPROB_PEERS if peer != "cut_cross_entropy"]
    for dtype in ("float32", "bfloat16"):
        case = ("linear_logprobs", "fwd+bwd", {"N": 2048, "D": 512, "V": 32768}, dtype, "cpu")
        for peer in ("trl_full_logits", "trl_chunked"):
            found += [Target(*case, "peak_bytes", 0.125, peer), Target(*case, "p50", 1.0, peer)]
    return found


def nf4_targets() -> list[Target]:
    """Decoding: the share of the byte roofline, bitsandbytes, and a dense product; 64 rows, the batch of 8 x 8, only
    beside bitsandbytes, since there a dense product reads little more."""
    found = []
    for outputs, inputs in ((14336, 4096), (4096, 14336), (4096, 4096)):
        for rows in (1, 8, 32, 64):
            case = ("nf4_linear", "fwd", {"M": rows, "O": outputs, "I": inputs}, "bfloat16", "cuda")
            found += [Target(*case, "roofline", 0.6, at_least=True)] if rows <= 8 else []
            peers = ("bnb_matmul_4bit", *(["bnb_gemv_4bit"] if rows == 1 else []), *(["dense"] if rows < 64 else []))
            found += [Target(*case, "p50", 1.0, peer) for peer in peers]
    return found


def layer_targets() -> list[Target]:
    """Norm, rope and gated activations: the share of copy bandwidth, and Liger."""
    shapes = {
        "rms_norm": {"N": 16384, "D": 4096}, "add_rms_norm": {"N": 16384, "D": 4096},
        "rope": {"T": 16384, "H": 32, "K": 8, "D": 128}, "swiglu": {"N": 16384, "F": 14336},
        "geglu": {"N": 16384, "F": 14336},
    }
    cases = [(op, passes, shape, "bfloat16", "cuda") for op, shape in shapes.items() for passes in ("fwd", "fwd+bwd")]
    return [target for case in cases for target in (
        Target(*case, "roofline", 0.8, at_least=True), Target(*case, "p50", 1.0, "liger")
    )]


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    """Every target, judged."""
    return [judge(target, rows) for target in logprob_targets() + nf4_targets() + layer_targets()]


def table(found: list[Verdict]) -> Table:
    """The verdicts for the terminal."""
    result = Table("case", "to reach", "measured", "", title="targets")
    for verdict in found:
        result.add_row(verdict.target.case, verdict.target.demand, verdict.measured, verdict.colored)
    return result
