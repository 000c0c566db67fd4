"""What a run will use on this machine, and what is missing, for `lowmem-grpo doctor`. A look that fails is a finding.
"""

from typing import Any

from lowmem_grpo.memory.families import trained
from lowmem_grpo.models.card_check import missing_compiler
from lowmem_grpo.rewards.sandbox.check import SandboxTrials
from lowmem_grpo.trainer.preflight import machine
from lowmem_grpo.trainer.preflight.machine import Checkup, MachineProbe, attempt


def examine(look: MachineProbe | None = None) -> Checkup:
    """Look at everything."""
    look, checkup = look or MachineProbe(), Checkup()
    trials = SandboxTrials(lambda: look.load("lowmem_grpo.rewards.sandbox.isolation"))
    machine.look_at_versions(look, checkup)
    broken = machine.look_at_imports(look, checkup)
    torch = None if "torch" in broken else attempt(look.load, "torch")[0]
    machine.look_at_card(torch, checkup)
    machine.look_at_host(look, checkup)
    look_at_engine(look, checkup)
    look_at_kernels(torch, checkup)
    look_at_weights(look, torch, broken, checkup)
    look_at_training(look, checkup)
    checkup.used["code sandbox"] = trials.line()
    checkup.used["model families"] = trained()
    checkup.used["sampled by vLLM"] = trained(by_vllm=True)
    return checkup


def look_at_engine(look: MachineProbe, checkup: Checkup) -> None:
    """Note which engine samples."""
    if not checkup.can_train:
        checkup.used["engine"] = "none: see the findings below"
        return
    device = "cuda:0" if checkup.card.get("name") else "cpu"
    wanted = True if checkup.card.get("name") else "transformers"  # as `lowmem-grpo run` chooses
    choice, why = attempt(lambda: look.load("lowmem_grpo.engines.choice").choose_engine(wanted, device))
    if why is not None:
        checkup.used["engine"] = f"unknown ({why})"
        return
    checkup.used["engine"] = f"{choice.name}: {choice.why if wanted is True else 'there is no card'}"
    capability = str(checkup.card.get("capability") or "8.0")
    if float(capability) < 8:
        checkup.say(f"vLLM is not known to work on a card of compute capability {capability}",
                    'sample with the transformers engine (fast_inference="transformers")')
    elif choice.name == "vllm" and device != "cpu" and not has_pool(look):
        checkup.say("this vLLM has no memory pool (vllm.cumem_allocator): its key-value cache stays on the card during "
                    "training", "install vLLM's own build for CUDA")
    elif choice.name != "vllm" and device != "cpu":
        checkup.say(f"vLLM does not sample here: {choice.why}",
                    "mend that, because transformers samples several times slower")


def has_pool(look: MachineProbe) -> bool:
    """Return whether the installed vLLM has what its sleep mode needs. vLLM is not imported."""
    files, _ = attempt(look.files, "vllm")
    return any(str(file).startswith("vllm/cumem_allocator") for file in files or [])


def look_at_kernels(torch: Any, checkup: Checkup) -> None:
    """Note whether Triton's kernels or the reference will be used, and which attention."""
    if torch is None:
        return
    if not checkup.card.get("name"):
        checkup.used["kernels"] = "reference in plain torch, as always on a CPU"
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
    """Run one small kernel of this package on the card."""
    from lowmem_grpo.kernels import rms_norm

    rms_norm(torch.ones(2, 64, device="cuda"), torch.ones(64, device="cuda"), 1e-6)
    torch.cuda.synchronize()


def look_at_weights(look: MachineProbe, torch: Any, broken: set[str], checkup: Checkup) -> None:
    """Note whether weights can be held in 4 bit: a few are quantized."""
    if torch is None or "bitsandbytes" in broken:
        checkup.used["4-bit weights"] = "no: bitsandbytes is missing or broken; load with load_in_fp8=True (needs none)"
        return
    device = "cuda" if checkup.card.get("name") else "cpu"

    def quantize() -> None:
        look.load("bitsandbytes").functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")

    _, why = attempt(quantize)
    checkup.used["4-bit weights"] = "NF4 by bitsandbytes" if why is None else f"no: {why}"
    if why is not None:
        checkup.say(f"bitsandbytes cannot quantize here ({why})", "install it again, or use load_in_fp8=True")


def look_at_training(look: MachineProbe, checkup: Checkup) -> None:
    """Note whether the package's own loader and trainer can be imported."""
    for name in ("lowmem_grpo.loader", "lowmem_grpo.trainer.grpo"):
        _, why = attempt(look.load, name) if checkup.can_train else (None, None)
        if why is not None:
            checkup.say(f"{name} cannot be imported ({why})", "install this package and its requirements again",
                        fatal=True)
