"""GGUF files through llama.cpp's own converter: where it is, how it is called, and what it must have written."""

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SCRIPT = "convert_hf_to_gguf.py"
TYPES = ("bf16", "f16", "f32", "q8_0")  # that the converter writes by itself
ADVICE = (
    "GGUF files are written by llama.cpp's own converter: git clone https://github.com/ggml-org/llama.cpp, then "
    "pip install ./llama.cpp/gguf-py, and name the folder with --llama-cpp DIR"
)
MAGIC, STRING, ARRAY = b"GGUF", 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value of each plain kind


class GGUFError(RuntimeError):
    """There is no GGUF file, or not the right one; the message says why and what to do."""


@dataclass(frozen=True)
class GGUFContent:
    """What a file says of itself."""

    architecture: str
    shapes: dict[str, tuple[int, ...]]  # of each tensor, the last dimension first

    @property
    def elements(self) -> int:
        """Numbers in all matrices; vectors are left out, since the converter adds some of its own."""
        total = 0
        for shape in self.shapes.values():
            total += shape[0] * shape[1] if len(shape) == 2 else 0
        return total


def find_converter(llama_cpp: Path | None) -> Path:
    """The converter in that folder of llama.cpp, or on the PATH; GGUFError says how to get it."""
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
    """Run the converter; what is in the file that it wrote."""
    done = subprocess.run(command(script, merged, out, kind), capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not out.is_file():
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise GGUFError(f"{SCRIPT} ended with {done.returncode} and wrote no file that can be used:\n{said}")
    return read_gguf(out)


def read_gguf(path: Path) -> GGUFContent:
    """Names and shapes of a GGUF file's tensors; GGUFError for what is none, or is cut off."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise GGUFError(f"{path} is not a GGUF file")
            _, tensors, settings = struct.unpack("<IQQ", file.read(20))
            architecture = ""
            for _ in range(settings):
                name, value = read_string(file), read_value(file, number(file, "<I"))
                architecture = str(value) if name == "general.architecture" else architecture
            return GGUFContent(architecture, dict(read_tensor(file) for _ in range(tensors)))
    except (struct.error, UnicodeDecodeError, KeyError, EOFError, RecursionError) as error:
        raise GGUFError(f"{path} is cut off or altered: {error!r}") from error


def read_tensor(file: BinaryIO) -> tuple[str, tuple[int, ...]]:
    """Name and shape; kind and place are passed over."""
    name = read_string(file)
    shape = tuple(number(file, "<Q") for _ in range(number(file, "<I")))
    number(file, "<I")
    number(file, "<Q")
    return name, shape


def read_value(file: BinaryIO, kind: int) -> str | None:
    """A string; other values are passed over."""
    if kind == STRING:
        return read_string(file)
    if kind == ARRAY:
        inner, count = number(file, "<I"), number(file, "<Q")
        if inner in SIZES:
            skip(file, SIZES[inner] * count)
        else:
            for _ in range(count):
                read_value(file, inner)
        return None
    skip(file, SIZES[kind])
    return None


def read_string(file: BinaryIO) -> str:
    """A string after its length in bytes (uint64); EOFError where the file is shorter."""
    return file.read(held(file, number(file, "<Q"))).decode()


def skip(file: BinaryIO, size: int) -> None:
    """Go on by `size` bytes; EOFError where the file ends before."""
    file.seek(held(file, size), 1)


def held(file: BinaryIO, size: int) -> int:
    """`size`, if there are so many bytes left; EOFError else."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    if size > left:
        raise EOFError(f"{size:,} bytes are promised and {left:,} are left")
    return size


def number(file: BinaryIO, form: str) -> int:
    """An integer in that form of `struct`."""
    value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return value
