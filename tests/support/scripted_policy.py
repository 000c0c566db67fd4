"""A sampler that says what is scripted, and a small model for its tokenizer: episodes of a whole trainer by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_models import random_model
from template_tokenizers import tokenizer_of

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.engines.base import Conversation
from lowmem_grpo.types import Rollout


class ScriptedEngine:
    """An engine whose every episode says `scripts[key]`, turn by turn."""

    name, kv_bytes = "scripted", 0

    def __init__(self, scripts: list[list[str]], tokenizer: Any) -> None:
        self.scripts, self.tokenizer = [list(script) for script in scripts], tokenizer
        self.asked: list[list[int]] = []

    def converse(self, conversation: Conversation, params: Any) -> None:
        while requests := conversation.take(busy=False):
            for request in requests:
                self.asked.append(request.ids)
                conversation.give(request.key, self.drawn(self.scripts[request.key].pop(0), request.max_tokens))

    def drawn(self, text: str, most: int) -> Rollout:
        """The rollout of a text and the end token, cut to so many tokens."""
        ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        kept = ids[:most]
        return Rollout(kept, [-1.0] * len(kept), "stop" if kept == ids else "length",
                       self.tokenizer.decode(kept, skip_special_tokens=True))

    def nothing(self, *_: Any) -> None:
        """What an engine is told, and this one need not know."""

    generate = on_policy_update = sleep = wake = close = nothing


def scripted_trainer(
    folder: Path, template: str, rows: list[dict[str, Any]] | None, scripts: list[list[str]], num_generations: int = 2,
    reward_funcs: Any = (), settings: dict[str, Any] | None = None, **given: Callable[..., Any] | Any,
) -> GRPOTrainer:
    """Our trainer, whose next rollout plays the scripts; `given` are its other parameters."""
    tokenizer, model = tokenizer_of(template), random_model("Llama")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    bare, loaded = FastLanguageModel.from_pretrained(str(folder), max_seq_length=4096, load_in_4bit=False)
    args = GRPOConfig(**{
        "output_dir": str(folder / "run"), "num_generations": num_generations, "shuffle_dataset": False,
        "per_device_train_batch_size": len(scripts), "max_steps": 1, "parity_steps": 0, "disable_tqdm": True,
        "save_strategy": "no"} | (settings or {}))
    return GRPOTrainer(
        FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False), list(reward_funcs), args, rows,
        processing_class=loaded, engine=ScriptedEngine(scripts, loaded), **given)
