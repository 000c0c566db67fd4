"""Short runs of GRPOTrainer on the embedded model, and the same computed plainly."""

import math
from pathlib import Path
from typing import Any

import peft
import torch
from small_models import TINY, scatter
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.fast_model import FastPeftModel

QUESTIONS = (
    "Start with 3. Add 4. Multiply by 2. What is the result?", "Start with 52. Subtract 20. Add 4. What is the result?",
    "Start with 15. Subtract 6. Add 31. What is the result?", "Start with 9. Subtract 9. Add 2. What is the result?",
)
ROWS = [{"prompt": [{"role": "user", "content": question}], "answer": "14"} for question in QUESTIONS]
TEXTS = [{"prompt": f"Start with {n}. Add {n + 3}. Multiply by 2. What is the result?\n"} for n in range(1, 8)]
SMALL: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 24, "max_steps": 2,
    "learning_rate": 1e-2, "save_strategy": "no",
}
Gradients = dict[str, torch.Tensor]


def digit_sum(completions: list[Any], **kwargs: Any) -> list[float]:
    """Differs between most completions, and depends on nothing else."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(int(c) for c in text if c in "0123456789")) for text in texts]


def load(max_seq_length: int = 128, **lora: Any) -> FastPeftModel:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=max_seq_length, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False, **lora)


def moved(model: FastPeftModel) -> FastPeftModel:
    """The model with an adapter that matters, so that both of its factors have a gradient."""
    return scatter(model)


def make(folder: Path, reward: Any = digit_sum, rows: Any = ROWS, model: Any = None, **settings: Any) -> GRPOTrainer:
    parts = {name: settings.pop(name) for name in ("callbacks", "eval_dataset", "processing_class") if name in settings}
    config = GRPOConfig(output_dir=str(folder), **(SMALL | settings))
    return GRPOTrainer(model or load(), reward, config, rows, **parts)


def adapter_of(model: Any) -> Gradients:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def adapter(trainer: GRPOTrainer) -> Gradients:
    return adapter_of(trainer.model)


def same(first: Gradients, second: Gradients) -> bool:
    """Equal bit for bit."""
    assert first.keys() == second.keys() and first
    return all(torch.equal(first[name], second[name]) for name in first)


def relative(first: Gradients, second: Gradients) -> float:
    """Norm of the difference over the norm of `second`."""
    assert first.keys() == second.keys()
    difference = math.sqrt(sum((first[n] - second[n]).square().sum().item() for n in second))
    norm = math.sqrt(sum(g.square().sum().item() for g in second.values()))
    return difference / norm


def plain_peft(model: FastPeftModel, folder: Path) -> peft.PeftModel:
    """The same weights in plain transformers and peft, which know nothing of this package."""
    model.save_lora(folder)
    plain = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).eval()


def naive_logprobs(model: peft.PeftModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
