"""Make random weights and an adapter (`make`), and one provider's rollouts with them (`run`), each in a process that
bench/common/child.py starts."""

import gc
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.loop.inputs import TARGETS
from bench.loop.phase_watch import used_bytes
from bench.rollout.shapes import LORA_RANK, SHAPES, Shape
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.kernels.frozen_weight import frozen_weight
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.stored_model import TINY, resolve
from lowmem_grpo.types import Rollout, RolloutGroup

SYNCS = 20  # optimizer steps whose sync is timed
PARITY_TOKENS = 8192  # per micro-batch when the trainer computes log-probabilities
Groups = list[list[Rollout]]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage behind some tensors, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, with the scales of quantized ones."""
    found: list[torch.Tensor] = list(model.buffers())
    for parameter in model.parameters():
        found += frozen_weight(parameter).tensors
        found += [tensor for tensor in vars(parameter).values() if torch.is_tensor(tensor)]
    return found


def load_trainer(options: Any, shape: Shape, four_bit: bool, engine: str, **settings: Any) -> FastPeftModel:
    """Return the trainer's model with the saved adapter in it; `settings` are further ones of `from_pretrained`."""
    model, _ = FastLanguageModel.from_pretrained(
        str(options.folder), max_seq_length=shape.context, load_in_4bit=four_bit, dtype="bfloat16",
        fast_inference=engine, device=options.device, kv_cache_bytes=shape.kv_bytes, max_num_seqs=shape.sequences,
        **settings,
    )
    adapted = FastLanguageModel.get_peft_model(
        model, r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=TARGETS, use_gradient_checkpointing=False
    )
    set_peft_model_state_dict(adapted, load_file(options.folder / "adapter" / "adapter_model.safetensors"))
    return adapted.eval()


def milliseconds(call: Callable[[], None]) -> float:
    """Return the milliseconds from a call until the card has done its work."""
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


class Ours:
    """One of our engines on the trainer's NF4 weights and live adapter."""

    def __init__(self, options: Any, shape: Shape, engine: str, graphs: bool = True, **settings: Any) -> None:
        self.shape, self.model = shape, load_trainer(options, shape, four_bit=True, engine=engine, **settings)
        self.engine: Any = self.model.engine()
        if not graphs:  # the engine without vLLM then runs its steps eagerly
            self.engine.step.record, self.engine.step.block = None, 1

    def sample(self, prompts: list[list[int]], seed: int) -> Groups:
        """Return completions of the full length."""
        return self.engine.generate(prompts, SamplingParams(
            n=self.shape.n, max_tokens=self.shape.completion_tokens, seed=seed, ignore_eos=True))

    def measures(self) -> dict[str, Any]:
        """Return bytes of weights and of the KV cache, and milliseconds of sync, and of sleep with vLLM on a card."""
        held = storages(tensors_of(self.model))
        llm = getattr(self.engine, "llm", None)
        engine = storages(llm.apply_model(tensors_of)[0]) if llm else {}
        added = sum(size for address, size in engine.items() if address not in held)
        return {"trainer_bytes": sum(held.values()), "added_bytes": added, "kv_bytes": self.engine.kv_bytes,
                "sync_ms": self.sync(), **(self.sleep() if llm and torch.cuda.is_available() else {})}

    def sleep(self) -> dict[str, float]:
        """Return the bytes that sleeping frees on the card, and the milliseconds to fall asleep and to wake."""
        before = torch.cuda.mem_get_info()[0]
        falling = milliseconds(self.engine.sleep)
        freed = torch.cuda.mem_get_info()[0] - before
        return {"sleep_freed_bytes": freed, "sleep_ms": falling, "wake_ms": milliseconds(self.engine.wake)}

    def sync(self) -> list[float]:
        """Return the milliseconds, for each of SYNCS optimizer steps, until the engine is ready to sample with it."""
        times = []
        for step in range(SYNCS):
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.data.mul_(1)  # in place, as an optimizer does it
            begin = time.perf_counter()
            self.engine.on_policy_update(step + 1)
            if hasattr(self.engine, "forget_prefixes"):  # the next call would do this because of the step
                self.engine.forget_prefixes(("timed", step))
            times.append(1e3 * (time.perf_counter() - begin))
        return times

    def trainer(self) -> FastPeftModel:
        """Return the model that would be trained with these rollouts; the sampler may be gone afterwards."""
        return self.model


class VLLM:
    """vLLM with its own weights and adapter, and its default settings."""

    def __init__(self, options: Any, shape: Shape, quantization: str | None) -> None:
        import vllm
        from vllm.lora.request import LoRARequest

        self.options, self.shape, self.quantization, self.vllm = options, shape, quantization, vllm
        self.adapter = LoRARequest("adapter", 1, str(options.folder / "adapter"))
        self.llm: Any = vllm.LLM(
            str(options.folder), dtype="bfloat16", quantization=quantization, enable_lora=True,
            max_lora_rank=LORA_RANK, max_model_len=shape.context, max_num_seqs=shape.sequences,
            kv_cache_memory_bytes=shape.kv_bytes, logprobs_mode="processed_logprobs", generation_config="vllm",
            enforce_eager=options.device == "cpu",
        )

    def sample(self, prompts: list[list[int]], seed: int) -> Groups:
        settings = self.vllm.SamplingParams(
            n=self.shape.n, max_tokens=self.shape.completion_tokens, seed=seed, ignore_eos=True, logprobs=0,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, settings, use_tqdm=False, lora_request=self.adapter)
        return [[Rollout(list(each.token_ids), [step[token].logprob for step, token in zip(
            each.logprobs, each.token_ids, strict=True)], "length") for each in output.outputs] for output in outputs]

    def measures(self) -> dict[str, Any]:
        if self.options.device == "cpu":  # there vLLM packs its weights where they cannot be counted
            return {"kv_bytes": self.shape.kv_bytes}
        own = storages(self.llm.apply_model(tensors_of)[0])
        return {"added_bytes": sum(own.values()), "kv_bytes": self.shape.kv_bytes}

    def trainer(self) -> FastPeftModel:
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if self.options.device != "cpu":
            torch.cuda.empty_cache()
        return load_trainer(self.options, self.shape, self.quantization is not None, "transformers")


PROVIDERS = {
    "lowmem_grpo": lambda options, shape: Ours(options, shape, "vllm"),
    "lowmem_grpo_eager": lambda options, shape: Ours(options, shape, "vllm", enforce_eager=True),
    "lowmem_grpo_fp8_cache": lambda options, shape: Ours(options, shape, "vllm", kv_cache_dtype="fp8"),
    "vllm_bnb_lora": lambda options, shape: VLLM(options, shape, "bitsandbytes"),
    "vllm_bf16_lora": lambda options, shape: VLLM(options, shape, None),
    "transformers": lambda options, shape: Ours(options, shape, "transformers"),
    "transformers_eager": lambda options, shape: Ours(options, shape, "transformers", graphs=False),
}


def make(folder: str, shape: str, device: str) -> dict[str, Any]:
    """Write a model with random weights, its adapter and a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape].config, pad_token_id=0, bos_token_id=None, eos_token_id=2, rope_theta=5e5)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="4GB")
    AutoTokenizer.from_pretrained(resolve(TINY), trust_remote_code=False).save_pretrained(folder)
    adapted = get_peft_model(model, LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=TARGETS, task_type="CAUSAL_LM"
    ))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(f"{folder}/adapter")
    return {}


def random_prompts(shape: Shape) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(3, shape.config["vocab_size"]) for _ in range(shape.prompt_tokens)]
            for _ in range(shape.prompts)]


def timed(provider: Ours | VLLM, shape: Shape, rounds: int, device: str) -> tuple[list[float], Groups]:
    """Return the seconds of each call but the first, and the completions of the last one."""
    prompts, seconds = random_prompts(shape), []
    for number in range(rounds + 1):
        begin = time.perf_counter()
        groups = provider.sample(prompts, seed=number)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    assert all(len(r.completion_ids) == shape.completion_tokens for group in groups for r in group)
    return seconds[1:], groups


@torch.no_grad()
def parity(model: FastPeftModel, groups: Groups, shape: Shape) -> dict[str, float]:
    """Return the difference between the sampler's and the trainer's log-probabilities."""
    policy, difference = Policy(model.eval()), []
    packed = [RolloutGroup({}, *pair) for pair in zip(random_prompts(shape), groups, strict=True)]
    for batch in pack(packed, PARITY_TOKENS, None):
        batch = batch.to(policy.device)
        difference.append(policy.logprobs(batch, 1.0)[0] - batch.at_trained(batch.rollout_logprobs))
    whole = torch.cat(difference).double()
    return {"parity_mean": whole.abs().mean().item(), "parity_max": whole.abs().max().item(),
            "importance_ratio": whole.exp().mean().item()}


def run(what: str, folder: str, shape: str, device: str, rounds: int) -> dict[str, Any]:
    """Run one provider; return all its measures."""
    size, before = SHAPES[shape], used_bytes(device)
    provider = PROVIDERS[what](SimpleNamespace(folder=Path(folder), device=device), size)
    seconds, groups = timed(provider, size, rounds, device)
    held = used_bytes(device) - before
    found = provider.measures()
    return {"seconds": seconds, "tokens": size.sequences * size.completion_tokens, "used_bytes": held,
            **found, **parity(provider.trainer(), groups, size)}
