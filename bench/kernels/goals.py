"""The targets of the kernels."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.common.targets import OURS, ByProvider, Goal

GB = 1e9
LOGPROB_PEERS = ("trl_chunked", "trl_full_logits", "liger_grpo_loss", "cut_cross_entropy", "torch_compile")
NAMES = {"p50": "time", "peak_bytes": "memory", "roofline": "share of copy bandwidth"}  # fields of a row


class Asked:
    """An op with its sizes on one device; its methods make goals."""

    def __init__(self, op: str, passes: str, shape: dict[str, int], dtype: str = "bfloat16",
                 device: str = "cuda") -> None:
        self.fields: dict[str, Any] = {"op": op, "passes": passes, "shape": shape, "dtype": dtype, "device": device}
        sizes = " ".join(f"{name}={size}" for name, size in shape.items())
        self.name = f"{op} {passes}, {sizes}, {dtype}"

    def beside(self, provider: str, limit: float = 1.0, measure: str = "p50") -> Goal:
        """Return the goal that our measure is at most `limit` times that of another provider in the same run."""
        def ratio(run: ByProvider) -> float:
            return float(run[OURS][measure] / run[provider][measure])

        return Goal(self.name, f"{NAMES[measure]} at most {limit:g} x {provider}", limit, ratio,
                    lambda value, run: f"{value:.3g} x", self.fields)

    def memory(self, most: float) -> Goal:
        """Return the goal for our peak in bytes."""
        return Goal(self.name, f"memory at most {most / GB:g} GB", most, lambda run: run[OURS]["peak_bytes"],
                    lambda value, run: f"{value / GB:.3g} GB", self.fields)

    def roofline(self, least: float) -> Goal:
        """Return the goal for the share of the device's copy bandwidth that we reach."""
        return Goal(self.name, f"{NAMES['roofline']} at least {least:.0%}", least, lambda run: run[OURS]["roofline"],
                    lambda value, run: f"{value:.0%}", self.fields, at_least=True)


def logprob_goals() -> Iterator[Goal]:
    """Yield goals against bare matrix products and every peer on a card, and against TRL on the CPU."""
    for vocabulary in (128256, 151936):
        case = Asked("linear_logprobs", "fwd+bwd", {"N": 16384, "D": 4096, "V": vocabulary})
        yield from (case.beside("two_gemms", 1.2), case.memory(GB), *map(case.beside, LOGPROB_PEERS))
        yield from (case.beside(peer, measure="peak_bytes") for peer in LOGPROB_PEERS if peer != "cut_cross_entropy")
    for dtype in ("float32", "bfloat16"):
        case = Asked("linear_logprobs", "fwd+bwd", {"N": 2048, "D": 512, "V": 32768}, dtype, "cpu")
        for peer in ("trl_full_logits", "trl_chunked"):
            yield from (case.beside(peer, 0.125, "peak_bytes"), case.beside(peer))


def decoding_goals(op: str, rows: tuple[int, ...], peers: Callable[[int], Iterable[str]]) -> Iterator[Goal]:
    """Yield goals for products with few rows: the share of copy bandwidth (up to 8 rows), and the time of peers."""
    for outputs, inputs in ((14336, 4096), (4096, 14336), (4096, 4096)):
        for number in rows:
            case = Asked(op, "fwd", {"M": number, "O": outputs, "I": inputs})
            yield from [case.roofline(0.6)] if number <= 8 else []
            yield from map(case.beside, peers(number))


def layer_goals() -> Iterator[Goal]:
    """Yield goals for norm, rope and gated activations: the share of copy bandwidth, and Liger's time."""
    shapes = {
        "rms_norm": {"N": 16384, "D": 4096}, "add_rms_norm": {"N": 16384, "D": 4096},
        "rope": {"T": 16384, "H": 32, "K": 8, "D": 128}, "swiglu": {"N": 16384, "F": 14336},
        "geglu": {"N": 16384, "F": 14336},
    }
    for op, shape in shapes.items():
        for case in (Asked(op, passes, shape) for passes in ("fwd", "fwd+bwd")):
            yield from (case.roofline(0.8), case.beside("liger"))


def beside_nf4(rows: int) -> list[str]:
    """Return the peers of NF4 products. The dense product is left out at 64 rows, the batch of 8 x 8, because it reads
    little more there."""
    return ["bnb_matmul_4bit", *(["bnb_gemv_4bit"] if rows == 1 else []), *(["dense"] if rows < 64 else [])]


GOALS = [*logprob_goals(), *decoding_goals("nf4_linear", (1, 8, 32, 64), beside_nf4),
         *decoding_goals("fp8_linear", (1, 8, 32), lambda rows: ["dense"]),  # which reads twice the bytes
         *layer_goals()]
