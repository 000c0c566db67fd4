"""GGUF files, which llama.cpp's own converter writes and its package `gguf` reads back."""

import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lowmem_grpo.models.gguf_header import PACKAGE, gguf_header

SCRIPT, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
DIRECT = ("bf16", "f16", "f32", "q8_0")  # types that the converter itself writes
TYPES = (*DIRECT, "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "q3_k_l", "q3_k_m",
         "q3_k_s", "q2_k")  # all others come from llama-quantize, out of a file in bf16
ADVICE = (
    "llama.cpp's own converter writes GGUF files: git clone https://github.com/ggml-org/llama.cpp, and name the folder "
    "with --llama-cpp DIR (in Python: llama_cpp=DIR)"
)
BUILD = (
    "build llama.cpp (cmake -B build && cmake --build build --target llama-quantize) and name its folder with "
    "--llama-cpp DIR (in Python: llama_cpp=DIR), or take one of " + ", ".join(DIRECT)
)


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
    quantizer: Path | None = None  # only for the types that the script does not write

    def convert(self, merged: Path, out: Path, kind: str) -> GGUFContent:
        """Write a GGUF file and read it back. GGUFError if either fails."""
        direct = kind in DIRECT
        first = out if direct else out.with_suffix(".bf16")
        run([sys.executable, str(self.script), str(merged), "--outfile", str(first), "--outtype",
             kind if direct else "bf16"], first, SCRIPT)
        if not direct:
            run([str(self.quantizer), str(first), str(out), kind.upper()], out, QUANTIZER)
            first.unlink()
        return read_gguf(out)


def find_converter(llama_cpp: Path | None, kinds: Sequence[str] = ()) -> Converter:
    """Return llama.cpp's programs for these GGUF types, from its folder or the PATH; GGUFError if one is missing."""
    if find_spec("gguf") is None:
        raise GGUFError(PACKAGE)
    folder = llama_cpp.parent if llama_cpp is not None and llama_cpp.name == SCRIPT else llama_cpp
    script = program(folder, SCRIPT)
    if script is None:
        raise GGUFError(f"there is no {SCRIPT} in {folder}. {ADVICE}" if folder else
                        f"{SCRIPT} is not on the PATH. {ADVICE}")
    needed = [kind for kind in kinds if kind not in DIRECT]
    quantizer = program(folder, QUANTIZER, f"build/bin/{QUANTIZER}") if needed else None
    if needed and quantizer is None:
        where = f"in {folder}" if folder else "on the PATH"
        raise GGUFError(f"{needed[0]} is made by {QUANTIZER}, which is not {where}: {BUILD}")
    return Converter(script, quantizer)


def program(folder: Path | None, name: str, *others: str) -> Path | None:
    """Return a llama.cpp program in the folder, or None. Without a folder, or with `others`, the PATH counts too."""
    if folder is not None:
        path = next((folder / each for each in (name, *others) if (folder / each).is_file()), None)
        if path is not None or not others:
            return path
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def run(words: list[str], out: Path, name: str) -> None:
    """Run a program of llama.cpp; GGUFError if it fails or writes no file."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not out.is_file():
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise GGUFError(f"{name} ended with {done.returncode} and wrote no usable file:\n{said}")


def read_gguf(path: Path) -> GGUFContent:
    """Return the architecture and tensor shapes of a GGUF file. GGUFError if the file is damaged."""
    try:
        header = gguf_header(path)
    except ValueError as error:
        raise GGUFError(str(error)) from error
    return GGUFContent(header.architecture, {name: place.shape[::-1] for name, place in header.places.items()})
