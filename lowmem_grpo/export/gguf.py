"""GGUF files: llama.cpp's own converter writes them, and its package `gguf` reads them back."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCRIPT = "convert_hf_to_gguf.py"
TYPES = ("bf16", "f16", "f32", "q8_0")  # what the converter writes by itself
ADVICE = (
    "llama.cpp's own converter writes GGUF files: git clone https://github.com/ggml-org/llama.cpp, and name the folder "
    "with --llama-cpp DIR"
)
PACKAGE = "the package gguf, which reads GGUF files, is not installed; pip install gguf"


class GGUFError(RuntimeError):
    """No GGUF file could be made, or it is wrong. The message says why, and what to do."""


@dataclass(frozen=True)
class GGUFContent:
    """What a GGUF file contains."""

    architecture: str
    shapes: dict[str, tuple[int, ...]]  # of each tensor, the last dimension first

    @property
    def elements(self) -> int:
        """The number of elements in all matrices. Vectors do not count, because the converter adds some."""
        return sum(shape[0] * shape[1] for shape in self.shapes.values() if len(shape) == 2)


def find_converter(llama_cpp: Path | None) -> Path:
    """The converter in a folder of llama.cpp, or on the PATH. A GGUFError says how to get what is missing."""
    if find_spec("gguf") is None:
        raise GGUFError(PACKAGE)
    if llama_cpp is not None:
        script = llama_cpp if llama_cpp.name == SCRIPT else llama_cpp / SCRIPT
        if not script.is_file():
            raise GGUFError(f"there is no {SCRIPT} in {llama_cpp}. {ADVICE}")
        return script
    found = shutil.which(SCRIPT)
    if found is None:
        raise GGUFError(f"{SCRIPT} is not on the PATH. {ADVICE}")
    return Path(found)


def command(script: Path, merged: Path, out: Path, kind: str) -> list[str]:
    """The converter's command line for a merged model."""
    return [sys.executable, str(script), str(merged), "--outfile", str(out), "--outtype", kind]


def convert(script: Path, merged: Path, out: Path, kind: str) -> GGUFContent:
    """Run the converter and read the file that it wrote. GGUFError if either fails."""
    done = subprocess.run(command(script, merged, out, kind), capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not out.is_file():
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise GGUFError(f"{SCRIPT} ended with {done.returncode} and wrote no usable file:\n{said}")
    return read_gguf(out)


def read_gguf(path: Path) -> GGUFContent:
    """Names and shapes of the tensors in a GGUF file. Raises GGUFError for a damaged file."""
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        """Stops at the end of the file. GGUFReader itself believes the lengths that a damaged file gives."""

        def _get(self, offset: int, dtype: Any, count: Any = 1, *order: Any, **named: Any) -> Any:
            values = super()._get(offset, dtype, count, *order, **named)
            if len(values) < int(count):
                raise EOFError(f"it promises {int(count):,} values at byte {offset:,} and ends before them")
            return values

    try:
        reader = BoundedReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
    except (ValueError, IndexError, KeyError, EOFError, RecursionError) as error:
        raise GGUFError(f"{path} is not a whole GGUF file: {error!r}") from error
    return GGUFContent(architecture, {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors})
