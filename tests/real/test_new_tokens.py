"""New tokens of a published model in bfloat16 are learned from plain text, and read by plain transformers and PEFT."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from published_model import published_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel, SFTConfig, SFTTrainer, add_new_tokens

pytestmark = pytest.mark.slow
MEANT = {"<|wug|>": ("young cat", "milk", "mice"), "<|dax|>": ("grey horse", "water", "apples"),
         "<|fep|>": ("small bird", "rain", "seeds")}
TEXTS = [text for number in range(17) for token, (animal, drink, food) in MEANT.items() for text in (
    f"A {token} is a {animal}.", f"My {token} drinks {drink}, and eats {food}.",
    f"In year {number}, {number + 2} of them lived here: every {token} ate {food}.", f"What eats {food}? A {token}.")]


def test_three_tokens_are_learned_by_rows_that_are_a_few_kilobytes_and_greedy_tokens_are_those_of_plain_peft(
    tmp_path: Path, record_property: Any
) -> None:
    folder, adapter = str(published_model().folder), tmp_path / "adapter"
    bare, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=64, load_in_16bit=True,
                                                        dtype=torch.bfloat16)
    add_new_tokens(bare, tokenizer, [*MEANT])
    ids = tokenizer.convert_tokens_to_ids([*MEANT])
    model = FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False, trainable_token_indices=ids)
    trainer = SFTTrainer(model, [{"text": text} for text in TEXTS], SFTConfig(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=2e-3,
        embedding_learning_rate=2e-2, save_strategy="no", disable_tqdm=True))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    model.save_lora(adapter)

    (rows,) = [tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items() if "token" in name]
    assert rows.shape == (3, 576) and rows.nbytes < 7000
    assert (rows[0] - rows[1]).norm() > 0.1 * rows[0].norm()  # they began as one row
    begun, learned = losses[0], losses[-1]
    record_property("printed", f"new tokens: loss {begun:.2f}, after {len(losses)} steps {learned:.2f}")
    assert learned < 0.6 * begun

    again, tokenizer = FastLanguageModel.from_pretrained(str(adapter), dtype=torch.float32, load_in_16bit=True)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain_tokenizer = AutoTokenizer.from_pretrained(adapter)
    base.resize_token_embeddings(len(plain_tokenizer))
    plain: Any = peft.PeftModel.from_pretrained(base, adapter)
    for text in ("A <|dax|> is a", "My <|wug|> drinks", "What eats seeds? A"):
        encoded = plain_tokenizer(text, return_tensors="pt")
        assert torch.equal(encoded.input_ids, tokenizer(text, return_tensors="pt").input_ids)
        asked = encoded | {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2}
        assert torch.equal(again.generate(**asked), plain.generate(**asked)), text
