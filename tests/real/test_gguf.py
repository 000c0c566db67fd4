"""A published model out of its GGUF file: as transformers reads it, and in every command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from published_model import PublishedModel, published_model
from served import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.__main__ import main
from lowmem_grpo.models.gguf_file import digest_of

pytestmark = pytest.mark.slow
CHATS = [
    [{"role": "user", "content": "Why do leaves turn red?"}],
    [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "  Zwölf\n\nÄpfel? 你好 123"},
     {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "<|im_end|>"}],
]


@pytest.fixture(scope="module")
def published() -> PublishedModel:
    return published_model()


def command(*words: Any) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_weights_and_tokens_are_those_that_transformers_reads(published: PublishedModel) -> None:
    folder, name = published.gguf.parent, published.gguf.name
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), gguf_file=name, dtype=torch.float32,
                                                         load_in_16bit=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).state_dict()
    ours = model.inner.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())
    other = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    for chat in CHATS:
        for prompt in (True, False):
            assert tokenizer.apply_chat_template(chat, add_generation_prompt=prompt) == other.apply_chat_template(
                chat, add_generation_prompt=prompt, return_dict=False)


def test_every_command_takes_the_file(
    published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, data = published.gguf, tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "What is the capital of France?", "answer": "Paris"}) + "\n")
    Path("r.py").write_text("def right(completions, **others):\n    return [1.0 for _ in completions]\n")
    assert json.loads(command("plan", "--model", file, "--gpu", "16GiB", "--json"))["family"]["family"] == "Llama"
    said = command("generate", "What is the capital of France?", "--model", file, "--max-tokens", 12,
                   "--temperature", 0.01)
    assert "Paris" in said
    evaluated = command("eval", file, "--dataset", data, "--reward", "r.py:right", "--max-tokens", 8, "--json")
    assert json.loads(evaluated)["model"] == str(file)
    command("run", "arithmetic", f"model={file}", "max_steps=1", "num_generations=2", "per_device_train_batch_size=4",
            "max_completion_length=8", "max_seq_length=256", "load_in_4bit=false", "output_dir=run",
            "eval_problems=4")
    record = json.loads(Path("run/adapter/base_model.json").read_text())
    assert (record["model"], record["sha256"]) == (str(file), digest_of(file))
    assert json.loads(Path("run/summary.json").read_text())["model_sha256"] == digest_of(file)
    assert "logits" in command("export", "run", "--format", "merged", "--out", "merged")
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert (merged.dtype, merged.generation_config.eos_token_id) == (torch.bfloat16, 2)
    with serving(tmp_path / "served", str(file), context=128) as served, served.openai() as client:
        reply = client.chat.completions.create(model=str(file), messages=CHATS[0], max_tokens=4)  # type: ignore[arg-type]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4
