"""Check the GPU before anything is downloaded (driver, compute capability, C compiler); choose the compute dtype."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from lowmem_grpo.memory.families import check_float16
from lowmem_grpo.utils import size_text, torch

DRIVER_FILE = Path("/proc/driver/nvidia/version")
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # by CUDA's major version (NVIDIA: CUDA minor version compatibility)
OLDER_TORCH = ("install a torch for CUDA 12.6, which driver 525 is enough for, and leave vLLM out: pip install "
               '"torch>=2.11,<2.15" --index-url https://download.pytorch.org/whl/cu126')
OLDEST_CARD = (7, 5)  # compute capability that the kernels are compiled for
MANAGED_MEMORY = 83  # CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY of cuda.h
LARGER = 1.1  # ratio of memory from which a card counts as larger; cards of one model differ by less
NO_COMPILER = ("Triton builds its launcher with a C compiler, and there is neither gcc nor clang here, nor the "
               "variable CC: sudo apt install gcc")
NO_HEADER = ("Triton builds its launcher against Python's headers, and {} does not exist: sudo apt install "
             "python{}-dev, or use a Python of uv or conda, which has them")


def use_card(device: str, cuda: Any = None) -> None:
    """Make `device` the current CUDA device, on which kernels are launched; do nothing for the CPU. RuntimeError if the
    driver, card or C compiler is missing or too old, ValueError if no card has this index."""
    if not device.startswith("cuda"):
        return
    cuda = cuda or torch.cuda
    if not cuda.is_available():
        problem, fix = no_card(driver_version(), torch.version.cuda, torch.__version__)
        raise RuntimeError(f"the model is to be on {device!r}, and {problem}: {fix}")
    index = int(device.partition(":")[2] or 0)
    if index >= (count := cuda.device_count()):
        raise ValueError(f"device is {device!r}, and this process sees {count} card{'s' * (count > 1)}: allowed are "
                         + ", ".join(f"'cuda:{number}'" for number in range(count)))
    if (capability := cuda.get_device_capability(index)) < OLDEST_CARD:
        raise RuntimeError(f"{cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}, and "
                           "the kernels need 7.5 (a T4) or newer: take a newer card, or device='cpu' for small models")
    if missing := missing_compiler():
        raise RuntimeError(missing)
    cuda.set_device(index)


def larger_card(device: str, cuda: Any = None) -> str | None:
    """Return advice on a visible card with more memory than `device`; None without one, or with several processes."""
    if not device.startswith("cuda:") or "WORLD_SIZE" in os.environ:
        return None
    cuda = cuda or torch.cuda
    sizes = [cuda.get_device_properties(number).total_memory for number in range(cuda.device_count())]
    own, most = sizes[int(device.partition(":")[2])], max(sizes)
    return None if most <= LARGER * own else (
        f"the model is on {device!r}, which has {size_text(own)}, and 'cuda:{sizes.index(most)}' has "
        f"{size_text(most)}: CUDA_VISIBLE_DEVICES={sizes.index(most)}, set before torch is imported, takes that one; "
        f"device={device!r} takes this one without this line")


def no_card(driver: str | None, built_for: str | None, version: str, why: str | None = None) -> tuple[str, str]:
    """Return why torch finds no card, and what to do. `version` is torch's, `built_for` its CUDA version (None: built
    for CPUs), and `why` the text of its error."""
    needed = OLDEST_DRIVER.get(int((built_for or "13").partition(".")[0]), 0)
    if driver is None:
        return "there is no NVIDIA driver, so no card is found", (
            f"if this machine has a card, install driver {needed} or newer (on Colab, choose a runtime with a GPU); "
            "without one, leave device out or take device='cpu', which is enough for small models")
    if built_for is None:
        return f"there is a card (driver {driver}), but torch is built for CPUs", "pip install torch from a CUDA index"
    if int(driver.partition(".")[0]) < needed:
        return (f"driver {driver} is too old for torch {version}, which is built for CUDA {built_for} and needs "
                f"{needed} or newer"), f"update the driver; or {OLDER_TORCH}"
    return (f"driver {driver} is new enough for CUDA {built_for}, but torch finds no card ({why or 'it sees none'})",
            "look at nvidia-smi and at CUDA_VISIBLE_DEVICES")


def driver_version() -> str | None:
    """Return the NVIDIA driver's version; None without a driver."""
    text = DRIVER_FILE.read_text() if DRIVER_FILE.is_file() else ""
    if match := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text):
        return match[1]
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None


def has_managed_memory(index: int) -> bool:
    """Return whether the card supports managed memory, which paged optimizers use; True if the driver cannot tell."""
    shared, card = ctypes.c_int(1), ctypes.c_int()
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == driver.cuDeviceGet(ctypes.byref(card), index) == 0:
            driver.cuDeviceGetAttribute(ctypes.byref(shared), MANAGED_MEMORY, card)
    return bool(shared.value)


def missing_compiler() -> str | None:
    """Return what Triton lacks to build its launcher (triton/runtime/build.py) and how to install it, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return NO_COMPILER
    scheme = sysconfig.get_default_scheme()
    header = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme), "Python.h")
    return None if header.is_file() else NO_HEADER.format(header, sysconfig.get_python_version())


def compute_dtype(dtype: "torch.dtype | str | None") -> "torch.dtype":
    """Return the dtype to load in: `dtype` if it is set, else float32 on the CPU, and on a card bfloat16, or float16 if
    the card lacks bfloat16. ValueError for any other dtype."""
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, dtype)
    if isinstance(dtype, torch.dtype):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}; allowed are float32, bfloat16 and float16")
        return dtype
    if dtype not in (None, "auto"):
        raise ValueError(f'dtype is {dtype!r}; allowed are float32, bfloat16, float16, "auto" and None')
    if not torch.cuda.is_available():
        return torch.float32
    return torch.bfloat16 if is_bfloat16_supported() else torch.float16


def mixed_dtype(model: Any, bf16: bool | None, fp16: bool | None) -> "torch.dtype | None":
    """Return the dtype of mixed precision; None if none is requested, or the model already has that dtype. ValueError
    if the model is in another 16-bit dtype."""
    embedding = model.get_input_embeddings()
    own: torch.dtype = getattr(embedding, "original_module", embedding).weight.dtype  # PEFT may train a wider copy
    wanted = torch.bfloat16 if bf16 else torch.float16 if fp16 else own
    if wanted == own:
        return None
    if own != torch.float32:
        raise ValueError(f"the model was loaded in {own}, and GRPOConfig asks for {wanted}; make them agree")
    return wanted


def check_dtype(config: Any, *dtypes: "torch.dtype | None") -> None:
    """Raise ValueError if float16 is among `dtypes` and a model of this config cannot compute in it."""
    if torch.float16 in dtypes:
        check_float16(config)


@cache
def has_amx() -> bool:
    """Return whether the processor has AMX for bfloat16. With AVX512 alone, oneDNN does not round float32 factors."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)  # older versions of torch do not tell
    return bool(capabilities().get("amx_bf16"))


def is_bfloat16_supported() -> bool:
    """Return whether the card computes in bfloat16 without emulation (sm_80 and later); True on the CPU."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True
