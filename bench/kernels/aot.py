"""Compile one kernel for one chip without a GPU, and measure the result: registers, spills, shared memory, bytes, and
where it is asked for, instructions of its longest loop.

Registers and stack come from `cuobjdump`, loops from `nvdisasm`, which takes as long as the compiler; both are part of
Triton. A stack need not be a spill (a local array needs one too), so a kernel with a stack is compiled again with the
assembler's log, which counts spilled bytes exactly.
"""

import contextlib
import io
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowmem_grpo.kernels.triton_utils import SHARED_MEMORY, Variant

MAX_SPILL = 64  # bytes per thread
MAX_SECONDS = 60  # per compilation, far more than any should take; an assembler that spills a lot can take hours
MAX_TENSOR_MEMORY = 512  # columns of tensor memory per block, sm_100
DIVISIBLE = [["tt.divisibility", 16]]
TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Weight:
    """The result of one compilation, or its `error`."""

    registers: int = 0  # per thread
    stack_bytes: int = 0  # per thread
    spill_bytes: int = 0  # per thread: the larger of bytes stored and bytes loaded
    shared_bytes: int = 0  # per block
    tensor_memory: int = 0  # columns
    cubin_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    error: str | None = None

    def complaints(self, chip: int) -> list[str]:
        """Return the reasons why this kernel must not ship; none if it may."""
        if self.error:
            return [f"does not compile: {self.error}"]
        found, limit = [], SHARED_MEMORY[chip]
        if self.spill_bytes > MAX_SPILL:
            found.append(f"spills {self.spill_bytes} bytes a thread (at most {MAX_SPILL})")
        if self.shared_bytes > limit:
            found.append(f"shared memory of {self.shared_bytes} bytes (sm_{chip} has {limit})")
        if self.tensor_memory > MAX_TENSOR_MEMORY:
            found.append(f"tensor memory of {self.tensor_memory} columns (at most {MAX_TENSOR_MEMORY})")
        return found


def source(variant: Variant, hints: str) -> ASTSource:
    """Return the kernel with its argument types. As at run time, pointers are known to be aligned to 16 bytes; integers
    are known to be multiples of 16 with hints "aligned", and nothing is known of them with "odd"."""
    constexprs = variant.launch.constexprs | variant.constexprs
    if missing := [name for name in variant.kernel.arg_names if name not in variant.types | constexprs]:
        raise ValueError(f"the variant gives no type for {', '.join(missing)}")
    signature = {name: "constexpr" if name in constexprs else variant.types[name] for name in variant.kernel.arg_names}
    parts = [(path, kind, parameter) for parameter in variant.kernel.params
             for path, kind in parts_of((parameter.num,), signature[parameter.name])]
    ones = {path: 1 for path, kind, _ in parts if kind == "1"}
    attributes = {path: DIVISIBLE for path, kind, parameter in parts if takes_hint(kind, parameter, hints)}
    return ASTSource(variant.kernel, {name: with_ones(kind) for name, kind in signature.items()}, constexprs | ones,
                     attributes)


def parts_of(path: tuple[int, ...], kind: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (path, type) of an argument, or of each part of a nested tuple."""
    if isinstance(kind, tuple):
        for number, part in enumerate(kind):
            yield from parts_of((*path, number), part)
    else:
        yield path, kind


def with_ones(kind: Any) -> Any:
    """Return a type as Triton takes it: "1" is a stride of 1, which a launch passes as a constant."""
    return tuple(map(with_ones, kind)) if isinstance(kind, tuple) else "constexpr" if kind == "1" else kind


def takes_hint(kind: str, parameter: Any, hints: str) -> bool:
    """Return whether a launch would tell the compiler that this argument is a multiple of 16."""
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    return kind.startswith("*") or (hints == "aligned" and re.fullmatch(r"[iu](32|64)", kind) is not None)


def weigh(variant: Variant, chip: int, hints: str) -> Weight:
    """Compile and measure a variant; an error of the compiler becomes part of the result."""
    start = time.perf_counter()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(MAX_SECONDS)
    try:
        result = compiled(variant, chip, hints)
    except Exception as error:  # noqa: BLE001, whatever the compiler raises is what is to be reported
        result = Weight(error=f"{type(error).__name__}: {error}".strip())
    finally:
        signal.alarm(0)
    return replace(result, seconds=round(time.perf_counter() - start, 2))


def give_up(*_: Any) -> None:
    """Raise TimeoutError in the middle of a compilation, which ends the assembler too."""
    raise TimeoutError(f"more than {MAX_SECONDS} s")


def compiled(variant: Variant, chip: int, hints: str) -> Weight:
    """Compile a variant, or take the cached result; read the assembler's log only if there is a stack."""
    kernel = build(variant, chip, hints)
    used = resources(kernel.asm["cubin"])
    return Weight(
        registers=used["REG"], stack_bytes=used["STACK"], cubin_bytes=len(kernel.asm["cubin"]),
        spill_bytes=spilled(variant, chip, hints) if used["STACK"] else 0, shared_bytes=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
    )


def build(variant: Variant, chip: int, hints: str, log: io.StringIO | None = None) -> Any:
    """Return Triton's compiled kernel. The compiler's output goes to `log`: on an error it prints the whole program."""
    options = variant.launch.compiler
    with contextlib.redirect_stdout(log or io.StringIO()):
        return triton.compile(source(variant, hints), target=GPUTarget("cuda", chip, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers (REG) and stack (STACK) of the kernel, the largest of all its functions."""
    listing = read(cubin, "cuobjdump", "--dump-resource-usage")
    return {name: max(map(int, re.findall(rf"\b{name}:(\d+)", listing))) for name in ("REG", "STACK")}


def read(cubin: bytes, tool: str, option: str) -> str:
    """Return what one of Triton's tools prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def longest_loop(variant: Variant, chip: int, hints: str) -> int:
    """Compile a variant, and return the most instructions between a label and a branch back to it; 0 without a loop."""
    listing = read(build(variant, chip, hints).asm["cubin"], "nvdisasm", "-c")
    places: dict[str, int] = {}
    count = longest = 0
    for label, branch in re.findall(r"^(\.L_\w+):|^\s+/\*[0-9a-f]{4,}\*/\s+([^;]+);", listing, re.MULTILINE):
        if label:
            places[label] = count
            continue
        count += 1
        target = re.search(r"\bBRA\b.*?(\.L_\w+)", branch)
        if target and target[1] in places:
            longest = max(longest, count - places[target[1]])
    return longest


def spilled(variant: Variant, chip: int, hints: str) -> int:
    """Compile the kernel again, and return the bytes that the assembler reports as spilled."""
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        build(variant, chip, hints, log)
    counts = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    if not counts:
        raise RuntimeError("the assembler's log does not mention spills; its format may have changed")
    return max(map(int, counts))
