"""Episodes of a whole trainer with scripted completions: TRL's own tool loop on the CPU, with its ids, masks, messages
and rewards of each episode, and the same in ours.

    played = trl_episodes(rows, scripts, environment_factory=Counter, max_completion_length=200)
    played[0].completion_ids, played[0].mask, played[0].messages, played[0].rewards
"""

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from small_models import random_model
from template_tokenizers import tokenizer_of
from trl_runs import PLAIN

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.engines.base import Conversation
from lowmem_grpo.types import Rollout

TEMPLATE = "qwen2_5"  # of which TRL knows how tool calls are written
Script = list[str]  # what the policy says, turn by turn


@dataclass(frozen=True)
class Played:
    """An episode: all that followed the prompt, and which of it the policy drew."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]  # 1: drawn by the policy
    messages: list[dict[str, Any]]
    rewards: dict[str, float]


def call(name: str, **arguments: Any) -> str:
    """A tool call as the template's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sampled(text: str) -> list[int]:
    """The tokens that a policy draws to say this."""
    tokenizer = tokenizer_of(TEMPLATE)
    return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


class ScriptedTrainer(trl.GRPOTrainer):
    """TRL's trainer whose sampler says what is scripted: `scripts[row]`, turn by turn."""

    scripts: list[Script]
    drawn: dict[int, list[int]]  # of each row, its last prompt and what was drawn after it

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        answers, rows = [], []
        for ids in prompt_ids:
            row = self.row_of(ids, rows)
            rows.append(row)
            answer = sampled(self.scripts[row].pop(0))[: self.max_completion_length]
            answers.append(answer)
            self.drawn[row] = [*ids, *answer]
        return answers, None

    def row_of(self, ids: list[int], taken: list[int]) -> int:
        """The row whose last prompt and answer these ids continue; a new one in the first call."""
        if len(self.drawn) < len(self.scripts):
            return len(self.drawn)
        return next(row for row, held in self.drawn.items() if row not in taken and ids[: len(held)] == held)


def trl_episodes(
    rows: list[dict[str, Any]], scripts: list[Script], num_generations: int = 2, reward_funcs: Any = (),
    tools: Any = None, environment_factory: Any = None, rollout_func: Any = None, **settings: Any,
) -> list[Played]:
    """Each row is played `num_generations` times, once for each of its scripts, side by side; a `rollout_func` needs no
    scripts."""
    seen: list[list[dict[str, Any]]] = []

    def keep(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    tokenizer = copy.deepcopy(tokenizer_of(TEMPLATE))  # TRL gives it a response template
    model = random_model("Llama")
    model.resize_token_embeddings(len(tokenizer))
    repeated = [dict(row) for row in rows for _ in range(num_generations)]
    args = trl.GRPOConfig(**PLAIN | {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": len(repeated),
        "num_generations": num_generations, "beta": 0.0} | settings)
    trainer = ScriptedTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        reward_funcs=[keep, *reward_funcs], tools=tools, environment_factory=environment_factory,
        rollout_func=rollout_func)
    trainer.scripts, trainer.drawn = [list(script) for script in scripts], {}
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(repeated)
    return [played(batch, row, messages, trainer._logs["rewards"]) for row, messages in enumerate(seen)]


def played(batch: dict[str, Any], row: int, messages: list[dict[str, Any]], rewards: dict[str, Any]) -> Played:
    """One row of TRL's batch, without padding."""
    def real(name: str) -> list[int]:
        mask = batch[f"{name}_mask"][row].bool()
        return batch[f"{name}_ids"][row][mask].tolist()  # type: ignore[no-any-return]

    ids = real("completion")
    paid = {name: list(values)[row] for name, values in rewards.items() if name != "keep"}
    return Played(real("prompt"), ids, batch["tool_mask"][row][: len(ids)].tolist(), messages, paid)


class ScriptedEngine:
    """An engine whose every episode says `scripts[key]`, turn by turn."""

    name, kv_bytes, capabilities = "scripted", 0, frozenset({"converse"})

    def __init__(self, scripts: list[list[str]], tokenizer: Any) -> None:
        self.scripts, self.tokenizer = [list(script) for script in scripts], tokenizer
        self.asked: list[list[int]] = []

    def converse(self, conversation: Conversation, params: Any) -> None:
        while requests := conversation.next_requests(busy=False):
            for request in requests:
                self.asked.append(request.ids)
                conversation.add_rollout(request.key, self.drawn(self.scripts[request.key].pop(0), request.max_tokens))

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
