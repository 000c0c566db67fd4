"""Run one variant of bench/smoke/bench.py: load, LoRA, a few GRPO steps, in a process of its own."""

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from bench.gate.pretend import is_pretend
from bench.smoke.variants import CACHE, CARD, VARIANTS, Variant
from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.stored_model import TINY, resolve
from lowmem_grpo.recipes.arithmetic import make_dataset
from lowmem_grpo.types import Rollout

KEPT = ("loss", "grad_norm", "entropy", "groups/with_signal", "memory/oom_train", "memory/oom_generate",
        "memory/peak_bytes", "sampling/parity/mean", "step_time", "learning_rate")
KV_BYTES = 64 * 2**20
SMALL = 1024  # bytes from which a layer's input is offloaded; this model's inputs are below the usual limit


def every_other(completions: list[Any], **columns: Any) -> list[float]:
    """Return rewards that differ within every group, whatever is sampled."""
    return [float(number % 2) for number in range(len(completions))]


class WholeLengths(TransformersEngine):
    """An engine for a pretend card, which counts no tokens: every completion has `max_tokens` tokens, so that there is
    something to train on."""

    def generate(self, prompts: list[list[int]], params: SamplingParams, *others: Any) -> list[list[Rollout]]:
        super().generate(prompts, params)
        length = params.max_tokens
        return [[Rollout([5] * length, [-1.0] * length, "length") for _ in range(params.n)] for _ in prompts]


class Filling(TrainerCallback):
    """A callback that takes all of the card but `left` bytes after the first step. It frees them into torch's cache at
    once, or holds them until `rewards` scores the second rollout."""

    def __init__(self, what: str, left: int) -> None:
        self.what, self.left = what, left
        self.held: torch.Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            self.held = torch.empty(free - self.left, dtype=torch.uint8, device="cuda")
            if self.what == CACHE:
                self.held = None

    def rewards(self, completions: list[Any], **columns: Any) -> list[float]:
        """Free the memory that is held, and score as `every_other` does."""
        self.held = None
        torch.cuda.empty_cache()
        return every_other(completions)


def untied(folder: Path) -> str:
    """Save the tiny model with a separate head in a folder."""
    source = resolve(TINY)
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    return str(folder)


def make_trainer(variant: Variant, device: str, steps: int, folder: Path, blind: bool) -> GRPOTrainer:
    """Return a trainer of the tiny model with LoRA. `blind`: values mean nothing, so checks of values are off."""
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
    filling = Filling(variant.fills, variant.load["kv_cache_bytes"] // 2) if variant.fills else None
    engine = WholeLengths(Policy(model), tokenizer, 256) if blind and not variant.sleeps else None
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, args=config, callbacks=[filling] if filling else [], engine=engine,
        reward_funcs=[filling.rewards if filling else every_other], train_dataset=make_dataset("train", 4 * steps),
    )
    if isinstance(trainer.learner.offload, ActivationOffload):
        trainer.learner.offload = ActivationOffload(trainer.policy.model, min_bytes=SMALL)
    return trainer


def walk(variant: Variant, device: str, steps: int, blind: bool) -> dict[str, Any]:
    """Train a variant and return its measures; no model or tensor of it stays alive."""
    with tempfile.TemporaryDirectory(prefix="card_smoke_") as folder:
        trainer = make_trainer(variant, device, steps, Path(folder), blind)
        before = [parameter.detach().clone() for parameter in trainer.policy.trainable]
        wrong = wrong_sleep(trainer.engine) if device == "cuda" and variant.sleeps else []
        trainer.train()
        moved = max((old - new).abs().max().item() for old, new in zip(before, trainer.policy.trainable, strict=True))
        logged = [line for line in trainer.state.log_history if "loss" in line]
        lines = [{name: line[name] for name in KEPT if name in line} for line in logged]
        wrong += wrong_state(trainer, variant, device)
        wrong += wrong_after_filling(trainer, variant, lines) if variant.fills else []
        found = {"engine": trainer.engine.name, "steps": lines, "adapter_moved": moved, "wrong": wrong,
                 "fills": variant.fills}
        trainer.model.close_engine()
    return found


def free_bytes() -> int:
    """Return the free bytes of the card, after all its work is done."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def wrong_sleep(engine: Any) -> list[str]:
    """Return what is wrong after sleep and wake: sleep must free the KV cache, and waking must bring it back."""
    kv_bytes, before = engine.kv_bytes, free_bytes()
    engine.sleep()
    asleep = free_bytes()
    engine.wake()
    awake, wrong = free_bytes(), []
    if asleep - before < 0.9 * kv_bytes:
        wrong.append(f"sleep gave {asleep - before:,} bytes back, of a key-value cache of {kv_bytes:,}")
    if before - awake > 0.1 * kv_bytes:  # fewer is fine: dequantized weights return with the next call
        wrong.append(f"after sleep and wake {before - awake:,} more bytes are taken than before")
    if engine.kv_bytes != kv_bytes:
        wrong.append(f"the key-value cache has {engine.kv_bytes:,} bytes after sleep and wake, and had {kv_bytes:,}")
    return wrong


def wrong_after_filling(trainer: Any, variant: Variant, lines: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with waking: torch's full cache must not matter, a full card must shrink the KV cache."""
    shortages = max((line["memory/oom_generate"] for line in lines), default=0)
    trainer.engine.wake()
    asked, had = variant.load["kv_cache_bytes"], trainer.engine.kv_bytes
    trainer.engine.sleep()
    if variant.fills == CACHE and (shortages or had != asked):
        return [f"waking ran out of memory {shortages} times beside torch's cache, and the key-value cache has {had:,} "
                f"of {asked:,} bytes: the cache was not given back first"]
    if variant.fills == CARD and (not shortages or not 0 < had <= asked // 2):
        return [f"waking ran out of memory {shortages} times on a full card, and the key-value cache has {had:,} of "
                f"{asked:,} bytes: at most half has room"]
    return []


def wrong_state(trainer: GRPOTrainer, variant: Variant, device: str) -> list[str]:
    """Return what differs from the variant's options after its last step."""
    wrong, engine = [], variant.load.get("fast_inference", "transformers")
    offload = trainer.learner.offload
    if trainer.engine.name != engine:
        wrong.append(f"the engine is {trainer.engine.name}, not {engine}")
    if device == "cuda" and engine == "vllm" and trainer.engine.sleeps and trainer.engine.kv_bytes and not (
            trainer.engine.stays):
        wrong.append("vLLM is awake after a rollout")
    if device == "cuda" and isinstance(offload, ActivationOffload) and not offload.host_bytes_peak:
        wrong.append("nothing was offloaded to the host")
    return wrong


def allocated(device: str) -> int:
    """Return the bytes that torch holds on the card, after garbage collection; 0 on the CPU."""
    gc.collect()
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def run(name: str, device: str, steps: int) -> dict[str, Any]:
    """Run a variant; return all its measures. On a card it runs twice: the first run leaves workspaces and caches of
    libraries behind, but what the second one leaves is a leak."""
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
