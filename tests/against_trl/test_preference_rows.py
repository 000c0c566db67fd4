"""Rows of preferences against TRL 1.16: prompts, completions and whole sequences have the same tokens."""

from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from small_models import TINY
from tables import every_row
from template_tokenizers import FAMILY_CHATS, tokenizer_of
from transformers import AutoTokenizer
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

from lowmem_grpo.data.pairs import read_pairs


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASK, AGAIN = {"role": "user", "content": "1 + 1?"}, {"role": "user", "content": "And then?"}
SYSTEM = {"role": "system", "content": "Be short."}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
TEXTS = [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green and red."},
         {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3<|im_end|>"}]
IMPLICIT = [{"chosen": "The sky is blue.", "rejected": "The sky is green."},
            {"chosen": "One and one are two, see", "rejected": "One and one are two, see?"}]
CHATS = [{"prompt": [ASK], "chosen": [say("2")], "rejected": [say("Three, I think.")]},
         {"prompt": [SYSTEM, ASK, say("2"), AGAIN], "chosen": [say("Stop.")], "rejected": [say("4")]}]
TALKS = [{"chosen": [ASK, say("2")], "rejected": [ASK, say("3")]},
         {"chosen": [ASK, say("2"), AGAIN, say("Stop.")], "rejected": [ASK, say("2"), AGAIN, say("4")]}]
TURNS = [{"prompt": [ASK], "chosen": [say("2"), AGAIN, say("3")], "rejected": [say("2"), AGAIN, say("4")]}]
TOOLS = [row | {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}} for row in CHATS]
ROWS = {"texts": TEXTS, "implicit": IMPLICIT, "chats": CHATS, "talks": TALKS, "turns": TURNS, "tools": TOOLS}
CHAT_ROWS = ("chats", "talks", "turns", "tools")
TAKEN = ("tiny", "qwen2_5", "qwen3", "qwen3_6", "llama3", "llama3_2", "gemma", "gemma3", "phi3", "glm4moe", "cohere")
SETTINGS = SimpleNamespace(chat_template_kwargs=None)


def read(function: Any, rows: Any, tokenizer: Any, longest: int = 4096, **more: Any) -> list[Any]:
    found, encoder = function(Dataset.from_list(rows), "train_dataset", SETTINGS, tokenizer, longest,
                              [tokenizer.eos_token_id], **more)
    made = [encoder.encode(found[index]) for index in range(len(found))]
    return [one for one in made if not isinstance(one, str)]


def prepared(trainer: Any, rows: Any, tokenizer: Any, longest: int = 4096) -> Any:
    """TRL's tokenised rows."""
    args = SimpleNamespace(max_length=longest, truncation_mode="keep_start", dataset_num_proc=None,
                           per_device_train_batch_size=2, desirable_weight=1.0, undesirable_weight=1.0)
    held = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    return trainer._prepare_dataset(held, Dataset.from_list(rows), tokenizer, args, "train")


def tokens(rows: Any, longest: int = 4096) -> list[tuple[list[int], list[int]]]:
    """The tokens of TRL's batch of pairs, and their mask."""
    batch = DataCollatorForPreference(0, longest)(list(rows))
    return masked(batch)


def masked(batch: Any) -> list[tuple[list[int], list[int]]]:
    lengths = batch["attention_mask"].sum(1).tolist()
    return [(ids[:length].tolist(), mask[:length].tolist()) for ids, mask, length in zip(
        batch["input_ids"], batch["completion_mask"], lengths, strict=True)]


def ours(examples: Any) -> list[tuple[list[int], list[int]]]:
    return [(example.input_ids, [int(label >= 0) for label in example.labels]) for example in examples]


def tokenizer_for(name: str) -> Any:
    return FAMILY_CHATS[name].tokenizer() if name in FAMILY_CHATS else tokenizer_of(name)


@every_row(("rows", "longest"), [*((name, 4096) for name in ROWS), ("texts", 10), ("chats", 44), ("chats", 15)])
def test_pairs_have_the_tokens_of_trl(rows: str, longest: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    made = read(read_pairs, ROWS[rows], tokenizer, longest)
    wanted = prepared(DPOTrainer, ROWS[rows], tokenizer, longest)
    assert ours([*(pair.chosen for pair in made), *(pair.rejected for pair in made)]) == tokens(wanted, longest)
    for pair in made:
        assert pair.ids == pair.chosen.ids == pair.rejected.ids
