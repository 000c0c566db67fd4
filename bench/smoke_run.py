"""One variant of bench/card_smoke.py in a process of its own: load, LoRA, a few GRPO steps. Prints one JSON object,
which is `{"missing": reason}` where the variant cannot run here.

    python smoke_run.py VARIANT DEVICE STEPS
"""

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pretend import is_pretend
from smoke_variants import VARIANTS, Variant
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.engines.vllm_import import EngineUnavailableError
from lowmem_grpo.loader import TINY, resolve
from lowmem_grpo.offload import ActivationOffload
from lowmem_grpo.recipes.arithmetic import make_dataset

KEPT = ("loss", "grad_norm", "entropy", "groups/with_signal", "memory/oom_train", "memory/oom_generate",
        "memory/peak_bytes", "sampling/parity/mean", "step_time", "learning_rate")
KV_BYTES = 64 * 2**20
SMALL = 1024  # bytes from which a layer's input is offloaded: those of this model are below the usual bound


def every_other(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that differs within every group, whatever was sampled."""
    return [float(number % 2) for number in range(len(completions))]


def untied(folder: Path) -> str:
    """The tiny model with a head of its own, saved in a folder."""
    source = resolve(TINY)
    model = AutoModelForCausalLM.from_pretrained(source)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(folder)


def make_trainer(variant: Variant, device: str, steps: int, folder: Path, blind: bool) -> GRPOTrainer:
    """The tiny model with LoRA in a trainer. `blind`: values mean nothing, so nothing that judges them is on."""
    name = untied(folder / "untied") if variant.load.get("offload_embedding") else TINY
    load: dict[str, Any] = {"max_seq_length": 256, "device": device, "kv_cache_bytes": KV_BYTES, "max_num_seqs": 16}
    model, tokenizer = FastLanguageModel.from_pretrained(name, **load | variant.load)
    model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, **variant.lora)
    judged = {"parity_steps": 0, "nonfinite_steps": 1000} if blind else {"parity_steps": 1}
    config = GRPOConfig(
        output_dir=str(folder / "run"), max_steps=steps * variant.config.get("num_iterations", 1), num_generations=4,
        per_device_train_batch_size=16, max_completion_length=32, learning_rate=1e-3, disable_tqdm=True,
        **judged, **variant.config,
    )
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=[every_other], args=config,
        train_dataset=make_dataset("train", 4 * steps),
    )
    if isinstance(trainer.learner.offload, ActivationOffload):
        trainer.learner.offload = ActivationOffload(trainer.policy.model, min_bytes=SMALL)
    return trainer


def walk(variant: Variant, device: str, steps: int, blind: bool) -> dict[str, Any]:
    """Train, and say what was seen; nothing of it is alive afterwards."""
    with tempfile.TemporaryDirectory(prefix="card_smoke_") as folder:
        trainer = make_trainer(variant, device, steps, Path(folder), blind)
        before = [parameter.detach().clone() for parameter in trainer.policy.trainable]
        trainer.train()
        moved = max((old - new).abs().max().item() for old, new in zip(before, trainer.policy.trainable, strict=True))
        lines = [{name: line[name] for name in KEPT if name in line} for line in trainer.state.log_history]
        found = {"engine": trainer.engine.name, "steps": lines, "adapter_moved": moved,
                 "wrong": wrong_state(trainer, variant, device)}
        trainer.model.close_engine()
    return found


def wrong_state(trainer: GRPOTrainer, variant: Variant, device: str) -> list[str]:
    """What is not as the variant asked for, after its last step."""
    wrong, engine = [], variant.load.get("fast_inference", "transformers")
    offload = trainer.learner.offload
    if trainer.engine.name != engine:
        wrong.append(f"the engine is {trainer.engine.name}, not {engine}")
    if device == "cuda" and engine == "vllm" and trainer.engine.kv_bytes:
        wrong.append("vLLM is awake after a rollout")
    if device == "cuda" and isinstance(offload, ActivationOffload) and not offload.host_bytes_peak:
        wrong.append("nothing was offloaded to the host")
    return wrong


def allocated(device: str) -> int:
    """Bytes that torch holds on the card, garbage aside; 0 on the CPU."""
    gc.collect()
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def run(name: str, device: str, steps: int) -> dict[str, Any]:
    """Everything that is measured of a variant. On a card it runs twice: what the first one leaves behind is workspaces
    and caches of libraries, what the second one leaves is a leak."""
    variant = VARIANTS[name]
    if device == "cpu" and variant.card_only:
        return {"missing": variant.card_only}
    blind = device == "cuda" and is_pretend(torch.cuda.get_device_name(0))
    begin, left = time.perf_counter(), 0
    found = walk(variant, device, steps, blind)
    if device == "cuda" and not blind:
        left = allocated(device)
        found = walk(variant, device, steps, blind)
        left = allocated(device) - left
    return found | {"left_bytes": left, "seconds": round(time.perf_counter() - begin, 2), "pretend": blind}


def main() -> None:
    name, device, steps = sys.argv[1:]
    try:
        found = run(name, device, int(steps))
    except EngineUnavailableError as error:
        found = {"missing": " ".join(str(error).split())[:300]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
