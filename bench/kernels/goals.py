"""The numbers that the kernels should reach."""

from typing import Any

from bench.common.targets import OURS, ByProvider, Goal

GB = 1e9
LOGPROB_PEERS = ("trl_chunked", "trl_full_logits", "liger_grpo_loss", "cut_cross_entropy", "torch_compile")
NAMES = {"p50": "time", "peak_bytes": "memory", "roofline": "share of copy bandwidth"}  # fields of a row


class Asked:
    """An op with its sizes on one device; its methods make goals."""

    def __init__(self, op: str, passes: str, shape: dict[str, int], dtype: str, device: str) -> None:
        self.fields: dict[str, Any] = {"op": op, "passes": passes, "shape": shape, "dtype": dtype, "device": device}
        sizes = " ".join(f"{name}={size}" for name, size in shape.items())
        self.name = f"{op} {passes}, {sizes}, {dtype}"

    def beside(self, provider: str, limit: float = 1.0, measure: str = "p50") -> Goal:
        """Our measure is at most `limit` times that of another provider in the same run."""
        def ratio(run: ByProvider) -> float:
            return float(run[OURS][measure] / run[provider][measure])

        return Goal(self.name, f"{NAMES[measure]} at most {limit:g} x {provider}", limit, ratio,
                    lambda value, run: f"{value:.3g} x", self.fields)

    def memory(self, most: float) -> Goal:
        """Our peak in bytes."""
        return Goal(self.name, f"memory at most {most / GB:g} GB", most, lambda run: run[OURS]["peak_bytes"],
                    lambda value, run: f"{value / GB:.3g} GB", self.fields)

    def roofline(self, least: float) -> Goal:
        """The share of the device's copy bandwidth that we reach."""
        return Goal(self.name, f"{NAMES['roofline']} at least {least:.0%}", least, lambda run: run[OURS]["roofline"],
                    lambda value, run: f"{value:.0%}", self.fields, at_least=True)


def logprob_goals() -> list[Goal]:
    """On the card beside its bare products and every peer; on the CPU beside TRL."""
    found = []
    for vocabulary in (128256, 151936):
        case = Asked("linear_logprobs", "fwd+bwd", {"N": 16384, "D": 4096, "V": vocabulary}, "bfloat16", "cuda")
        found += [case.beside("two_gemms", 1.2), case.memory(GB)]
        found += [case.beside(peer) for peer in LOGPROB_PEERS]
        found += [case.beside(peer, measure="peak_bytes") for peer in LOGPROB_PEERS if peer != "cut_cross_entropy"]
    for dtype in ("float32", "bfloat16"):
        case = Asked("linear_logprobs", "fwd+bwd", {"N": 2048, "D": 512, "V": 32768}, dtype, "cpu")
        for peer in ("trl_full_logits", "trl_chunked"):
            found += [case.beside(peer, 0.125, "peak_bytes"), case.beside(peer)]
    return found


def nf4_goals() -> list[Goal]:
    """Decoding: the share of the byte roofline, bitsandbytes, and a dense product. 64 rows, the batch of 8 x 8, are
    only compared with bitsandbytes, because a dense product reads little more there."""
    found = []
    for outputs, inputs in ((14336, 4096), (4096, 14336), (4096, 4096)):
        for rows in (1, 8, 32, 64):
            case = Asked("nf4_linear", "fwd", {"M": rows, "O": outputs, "I": inputs}, "bfloat16", "cuda")
            found += [case.roofline(0.6)] if rows <= 8 else []
            peers = ("bnb_matmul_4bit", *(["bnb_gemv_4bit"] if rows == 1 else []), *(["dense"] if rows < 64 else []))
            found += [case.beside(peer) for peer in peers]
    return found


def fp8_goals() -> list[Goal]:
    """The same in FP8, beside a dense product, which reads twice the bytes."""
    cases = [(rows, Asked("fp8_linear", "fwd", {"M": rows, "O": outputs, "I": inputs}, "bfloat16", "cuda"))
             for outputs, inputs in ((14336, 4096), (4096, 14336), (4096, 4096)) for rows in (1, 8, 32)]
    return [goal for rows, case in cases
            for goal in ([case.roofline(0.6)] if rows <= 8 else []) + [case.beside("dense")]]


def layer_goals() -> list[Goal]:
    """Norm, rope and gated activations: the share of copy bandwidth, and Liger."""
    shapes = {
        "rms_norm": {"N": 16384, "D": 4096}, "add_rms_norm": {"N": 16384, "D": 4096},
        "rope": {"T": 16384, "H": 32, "K": 8, "D": 128}, "swiglu": {"N": 16384, "F": 14336},
        "geglu": {"N": 16384, "F": 14336},
    }
    cases = [Asked(op, passes, shape, "bfloat16", "cuda")
             for op, shape in shapes.items() for passes in ("fwd", "fwd+bwd")]
    return [goal for case in cases for goal in (case.roofline(0.8), case.beside("liger"))]


GOALS = logprob_goals() + nf4_goals() + fp8_goals() + layer_goals()
