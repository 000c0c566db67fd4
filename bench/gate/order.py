"""The order in which the pieces of the gate run, by their names or the beginnings of their names.

The first piece is the one that most others depend on: an engine of vLLM that samples, sleeps and wakes. Measurements
come next, long lists of tests last. Calls 1, 2 and 3 are for a machine that is lent for ten minutes at a time, 25
minutes in all. A piece that does not fit into the rest of a call is not begun, but shorter ones after it are.
"""

from collections.abc import Iterable

from bench.gate.stages import Piece

ENGINE = "tests/smoke vllm"
SECONDS_OF_A_CALL = 500.0  # out of ten minutes; the rest is for unpacking and for bringing results back
CALLS: dict[int, tuple[str, ...]] = {
    1: (ENGINE, "tests/smoke 4-bit", "kernels/linear_logprobs", "kernels/nf4_linear", "memory/step-16",
        "tests/kernels logprob", "tests/kernels nf4", "tests/kernels"),
    2: ("rollout/lowmem_grpo", "rollout/vllm_bf16_lora", "loop/lowmem_grpo", "profile/decode"),
    3: ("learner/arithmetic", "rollout/vllm_bnb_lora", "profile/train", "tests/vllm on_card", "tests/vllm",
        "tests/smoke vllm wakes", "tests"),
}
NUMBERS = ("kernels", "memory", "rollout", "loop", "switches", "profile", "learner", "peers")  # stages that leave rows
TESTS = "tests"  # the stage that leaves none
DEFAULT = (
    ENGINE, "tests/smoke 4-bit", *(name for call in CALLS.values() for name in call if not name.startswith(TESTS)),
    *NUMBERS, TESTS,
)


def ordered(pieces: Iterable[Piece], asked: Iterable[str]) -> list[Piece]:
    """Return the pieces that were asked for, in that order, each once. The name of a piece means only that piece; any
    other name means all pieces whose names begin with it."""
    held = {piece.name: piece for piece in pieces}
    names = [name for wanted in asked
             for name in ([wanted] if wanted in held else [name for name in held if name.startswith(wanted)])]
    return [held[name] for name in dict.fromkeys(names)]
