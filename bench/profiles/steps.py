"""What bench/profiles/bench.py profiles: a training step and a decoding call of a model with random weights."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.rollout.shapes import LORA_RANK, Shape
from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.types import Rollout, RolloutGroup

WARM_UP = 2  # calls before the one that is profiled
DECODED = {"full": 64, "tiny": 8}  # tokens of each completion in the decoding call
Work = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """A call to profile, the number of its steps, and its settings."""

    work: Work
    steps: int
    settings: dict[str, Any]


def load(folder: Path, size: Shape, device: str, engine: str) -> FastPeftModel:
    """NF4 weights with LoRA on all linears and the package's own checkpointing."""
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=size.context, load_in_4bit=True, dtype="bfloat16", fast_inference=engine,
        device=device, kv_cache_bytes=size.kv_bytes, max_num_seqs=size.sequences,
    )
    return FastLanguageModel.get_peft_model(model, r=LORA_RANK, lora_alpha=LORA_RANK, random_state=0)


def train_job(folder: Path, size: Shape, device: str, engine: str, outputs: str) -> Job:
    """One optimizer step on completions of the full length; nothing is sampled, so the engine is the one that costs
    nothing."""
    model = load(folder, size, device, "transformers")
    args = GRPOConfig(
        output_dir=outputs, max_steps=WARM_UP + 1, per_device_train_batch_size=size.n,
        gradient_accumulation_steps=size.prompts, num_generations=size.n,
        max_completion_length=size.completion_tokens, beta=0.0, disable_tqdm=True, save_strategy="no",
    )
    rows = [{"prompt": "unused"}]
    trainer = GRPOTrainer(model=model, reward_funcs=[unused], args=args, train_dataset=rows)
    groups = random_groups(size)

    def work() -> None:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.policy_version = trainer.state.policy_version  # as if it had been sampled just now
        trainer.forward_backward(groups)
        trainer.optim_step()

    return Job(work, 1, {"sequences": size.sequences, "tokens": size.context,
                         "max_tokens_per_micro_batch": trainer.memory.train.planned})


def unused(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that is never asked for."""
    raise RuntimeError("nothing is sampled here, so nothing is scored")


def decode_job(folder: Path, size: Shape, device: str, engine: str, outputs: str, tokens: int) -> Job:
    """One call of the engine for some tokens of each completion, one decode step each; the first reads the prompts."""
    model = load(folder, size, device, engine)
    sampler = model.engine()
    prompts = [random_ids(size.prompt_tokens, size, seed) for seed in range(size.prompts)]
    params = SamplingParams(n=size.n, max_tokens=tokens, seed=0, ignore_eos=True)
    settings = {"engine": sampler.name, "sequences": size.sequences, "prompt_tokens": size.prompt_tokens}
    return Job(lambda: sampler.generate(prompts, params), tokens, settings)


def random_groups(size: Shape) -> list[RolloutGroup]:
    """Groups with advantages of both signs and none of 0."""
    groups = []
    for number in range(size.prompts):
        rollouts = [Rollout(random_ids(size.completion_tokens, size, f"{number}-{place}"),
                            [-8.0] * size.completion_tokens, "length", reward=float(place),
                            advantage=1.0 if place % 2 else -1.0) for place in range(size.n)]
        groups.append(RolloutGroup({}, random_ids(size.prompt_tokens, size, number), rollouts))
    return groups


def random_ids(count: int, size: Shape, seed: int | str) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, size.config["vocab_size"]) for _ in range(count)]


def recorded(job: Job, device: str, path: Path) -> None:
    """Call the job some times, then once more under torch's profiler, whose trace is written to `path`."""
    for _ in range(WARM_UP):
        job.work()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        torch.cuda.synchronize()
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        job.work()
        if device != "cpu":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
