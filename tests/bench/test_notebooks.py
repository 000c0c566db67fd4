"""The bench of public notebooks changes only what it says it changes, and its verdicts are what happened."""

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from click.testing import CliRunner
from tables import every_row
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import notebooks
from bench.common.rows import read_rows
from bench.made_rows import DATASETS, MORE, load_dataset
from bench.notebooks import (
    THINKING,
    UPLOAD,
    NotebookChanges,
    changes_of,
    notebooks_table,
    reason,
    small_model,
    upload,
)

SCRIPT = Path(__file__).parents[1] / "support" / "unsloth_grpo_notebook.py"


@every_row(("before", "after", "kind"), [
    ("!pip install unsloth vllm\nx = 1", "pass\nx = 1", "imports"),
    ("if a:\n    !uv pip install \\\n      x\nb", "if a:\n    pass\nb", "imports"),
    ("%%capture\nimport os", "pass\nimport os", "imports"),
    ("%%bash\nls", "", "imports"),
    ("from unsloth import FastModel as F", "from lowmem_grpo import FastModel as F", "imports"),
    ("from unsloth.chat_templates import a", "from lowmem_grpo.chat_templates import a", "imports"),
    ("from trl import GRPOConfig, PPO", "from lowmem_grpo import GRPOConfig\nfrom trl import PPO", "imports"),
    ("if 1:\n    from vllm import SamplingParams", "if 1:\n    from lowmem_grpo import SamplingParams", "imports"),
    ("from datasets import load_dataset", "from bench.made_rows import load_dataset", "dataset"),
    ("FastModel.from_pretrained(model_name='a/b', r=1)", "FastModel.from_pretrained(model_name='small', r=1)", "model"),
    ("model_id = 'a/b-c'", "model_id = 'small'", "model"),
    ("model_id, out = 'a/b', 'c/d'", "model_id, out = 'small', 'c/d'", "model"),
    ("notebook_login()", "None", "login"),
    ("GRPOTrainer('é', model='a/b')", "GRPOTrainer('é', model='small')", "model"),
    ("SFTConfig(max_steps = 60, a=1)", "SFTConfig(max_steps = 2, a=1)", "steps"),
    ("SFTConfig(\n    a=1,\n    num_train_epochs = 3,\n)", "SFTConfig(\n    a=1,\n    max_steps = 2,\n)", "steps"),
    ("SFTConfig(a=1)", "SFTConfig(max_steps = 2, a=1)", "steps"),
    ("SFTConfig()", "SFTConfig(max_steps = 2)", "steps"),
    ("f(x).to('cuda')", "f(x).to('cpu')", "device"),
    ("f(x).cuda().y", "f(x).y", "device"),
    ("f(x, attn_implementation='flash_attention_2')", "f(x, attn_implementation='eager')", "device"),
    ("import wandb", "pass", "login"), ("wandb.init(project='a')", "None", "login"),
    ("trainer.push_to_hub('a/b')", "None", "login"),
    ("P.from_pretrained(base, f'me/{out}')", "P.from_pretrained(base, f'{out}')", "login"),
    ("adapter = f'me/{out}'", "adapter = f'{out}'", "login"),
    ("m.push_to_hub(f'me/{out}-merged')", UPLOAD.format("m", "f'{out}-merged'", "small"), "login"),
    ("m.push_to_hub('<your-id>', private=True)", UPLOAD.format("m", "'your-id'", "small"), "login"),
    ("pipeline('text-generation', model='<your-id>')", "pipeline('text-generation', model='your-id')", "login"),
    ("pipeline(model=f'me/{out}')", "pipeline(model=f'{out}')", "login"),
    ("vllm.LLM(x, max_model_len=256)", "vllm.LLM(x, max_model_len=1024)", "length"),
    ("login()", "None", "login"),
    ("LLM(x)", "LLM(x, gpu_memory_utilization=0.1)", "device"),
    ("out = 'x-y'\nout = 'me/x-y'", "out = 'x-y'\nout = 'x-y'", "login"),
    ("get_peft_model(m, target_modules=['q_proj', 'w1'])", "get_peft_model(m, target_modules=['q_proj', 'gate_proj'])",
     "model"),
    ("f(target_modules=['w3', 'up_proj', 'fc1', 'lm_head', 'embed_tokens'])",  # what is not trained stays named
     "f(target_modules=['up_proj', 'lm_head', 'embed_tokens'])", "model"),
    ("from unsloth.trainer import A", "from lowmem_grpo import A", "imports"),
    ("from unsloth_zoo.utils import Version", "from bench.common.public_code import Version", "imports"),
    ("assert transformers.__version__ == '5.15.0'", "pass", "imports"),
])
def test_a_change_is_made_and_counted(before: str, after: str, kind: str) -> None:
    changes = NotebookChanges("small", has_card=False)
    assert ast.unparse(ast.parse(changes.rewrite(before))) == ast.unparse(ast.parse(after))
    assert changes.counts == {kind: 1}
    assert changes.beside == {name for name in ("lm_head", "embed_tokens") if name in before}


def test_settings_send_nothing_away() -> None:
    changes = NotebookChanges("small", has_card=False)
    cell = "GRPOConfig(max_steps=9, push_to_hub=True, report_to=['wandb'], trackio_space_id='a/b')"
    assert changes.rewrite(cell) == (
        "GRPOConfig(max_steps=2, push_to_hub=False, report_to='none', trackio_space_id=None)")
    assert changes.counts == {"steps": 1, "login": 3}
    assert changes.rewrite("SFTConfig(max_steps=9, max_length=8)") == "SFTConfig(max_steps=2, max_length=32)"
    assert changes.counts["length"] == 1
    assert "report_to='none')" in changes.rewrite("SFTConfig(report_to = 'none')") and changes.counts["login"] == 3


def test_the_small_model_has_room_for_tokens_of_thought_and_its_tokenizer_lies_beside_what_was_uploaded(
    tmp_path: Path
) -> None:
    path = small_model(tmp_path / "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert {*THINKING} <= {*tokenizer.get_added_vocab()} and len(tokenizer) <= model.config.vocab_size
    upload(model, str(tmp_path / "mine"), path)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "mine")) == len(tokenizer)


def test_the_largest_change_of_an_embedding_is_that_of_a_tied_head_and_rounding_is_no_change(tmp_path: Path) -> None:
    path = small_model(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert changes_of(model, path, ["embed_tokens", "lm_head"]) == {"embed_tokens": 0, "lm_head": 0}
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[7].sign() * 4
    assert changes_of(model, path, {"embed_tokens"})["embed_tokens"] > 3 and changes_of(model, path, ()) == {}


@every_row("cell", [
    "x = 'cuda'; y = 'a/b'", "from datasets import Dataset", "import torch",
    "t.apply_chat_template(x, tokenize = True)", "m(target_modules = ['q_proj', 'lm_head'])",
    "from transformers import TrainingArguments", "from vllm import SamplingParams, LLM", "no python at all",
    "vllm.LLM(x, max_model_len=a.b)",
])
def test_nothing_else_is_changed(cell: str) -> None:
    changes = NotebookChanges("small", has_card=False)
    assert (changes.rewrite(cell), changes.counts) == (cell, {})


def test_gpt_oss_is_replaced_by_a_small_gpt_oss_whose_lengths_count_bytes() -> None:
    changes = NotebookChanges("small", has_card=True, gpt_oss="oss")
    assert changes.rewrite("GRPOConfig(max_prompt_length=9, max_steps=1)") == (
        "GRPOConfig(max_prompt_length=9, max_steps=2)")
    assert changes.rewrite("F.from_pretrained('unsloth/gpt-oss-20b', max_seq_length=most)") == (
        "F.from_pretrained('oss', max_seq_length=4 * most)")
    assert changes.rewrite("GRPOConfig(max_prompt_length=a + 1, max_steps=1)") == (
        "GRPOConfig(max_prompt_length=4 * (a + 1), max_steps=2)")
    assert changes.counts == {"model": 1, "length": 2, "steps": 2} and changes.models == ["unsloth/gpt-oss-20b"]
    assert changes.rewrite("F.from_pretrained('unsloth/Qwen3-4B')") == "F.from_pretrained('small')"


def test_on_a_card_the_device_stays() -> None:
    changes = NotebookChanges("small", has_card=True)
    assert (changes.rewrite("f(x).to('cuda')"), changes.counts) == ("f(x).to('cuda')", {})


def test_made_rows_have_parts_and_unknown_names_are_refused() -> None:
    assert all(len(load_dataset(name, split="train[:5%]")) == MORE.get(name, 256) for name in DATASETS)
    assert next(iter(load_dataset("openai/gsm8k", name="main", split="train", streaming=True)))["question"]
    assert load_dataset("csv", data_files="a.csv", column_names=["a", "b"])["train"].column_names == ["a", "b"]
    assert {*load_dataset("openai/gsm8k", "main")} == {"train", "validation", "test"}
    with pytest.raises(LookupError, match="no made rows for 'a/b'"):
        load_dataset("a/b")


OURS = {"steps": [], "raised_in": "lowmem_grpo.loader"}


@every_row(("row", "expected"), [
    ({"steps": [2]}, "runs"), ({"steps": []}, "trains nothing"), ({"steps": [0]}, "trains nothing"),
    ({"steps": [2], "models": ["unsloth/gpt-oss-20b"]}, "runs"),
    (OURS | {"error": "ValueError: a", "models": ["unsloth/gpt-oss-20b"]}, "refused: other"),
    ({"steps": [2], "models": ["LiquidAI/LFM2.5-1.2B"]}, "refused: the model's family"),
    (OURS | {"error": "UnsupportedError: images and sounds are not supported"}, "refused: images"),
    (OURS | {"error": "UnsupportedError: lowmem_grpo has no CPOTrainer. Take DPOTrainer"}, "refused: preferences"),
    (OURS | {"error": "ValueError: target_modules names lm_head; the head and the embedding stay frozen here"},
     "refused: trained embeddings"),
    (OURS | {"error": "ValueError: FastVisionModel: full_finetuning=True is not supported"},
     "refused: full fine-tuning"),
    (OURS | {"error": "ValueError: r is 0"}, "refused: other"),
    (OURS | {"error": "TypeError: SFTConfig has no option 'a'; did you mean b?"}, "refused: other"),
    (OURS | {"error": "KeyError: 'a'"}, "raw error of this package"),
    (OURS | {"error": "TypeError: f() got an unexpected keyword argument"}, "raw error of this package"),
    ({"steps": [], "error": "ImportError: cannot import name 'a' from 'lowmem_grpo'", "raised_in": "__main__"},
     "raw error of this package"),
    ({"steps": [], "error": "KeyError: 'a'", "raised_in": "transformers.x"}, "stops elsewhere"),
    ({"steps": [], "error": "KeyError: 'a'", "raised_in": "transformers.x", "asks": "images"},
     "stops before: images"),
    ({"steps": [], "asks": "preferences"}, "stops before: preferences"), ({"steps": [2], "asks": "images"}, "runs"),
    (OURS | {"error": "ToolFormError: the chat template has no tool calls"}, "refused: other"),
])
def test_the_reason_is_a_run_a_refusal_by_wish_or_whose_error_it_was(row: dict[str, Any], expected: str) -> None:
    assert reason(row) == expected


@pytest.mark.slow
def test_a_folder_is_run_and_each_verdict_is_what_happened(tmp_path: Path) -> None:
    script = SCRIPT.read_text()
    write(tmp_path / "good.ipynb", ["!pip install unsloth", *script.split("\n\n\n")])
    write(tmp_path / "bad.ipynb", ["x = 1", "raise ValueError('no | good')"])
    write(tmp_path / "dropped.ipynb", [script, "dict(modules_to_save=['lm_head'])"])
    write(tmp_path / "idle.ipynb", ["x = 1"])
    done = CliRunner().invoke(notebooks.main, [str(tmp_path), "--output", str(tmp_path / "rows.jsonl")])
    assert done.exit_code == 0, done.output
    assert "1 of 4 notebooks ran to their end" in done.output
    lines = notebooks_table(read_rows(tmp_path / "rows.jsonl") * 2)
    assert lines[3].startswith("1 of 4 ran to their end. `device`: ") and len(lines) == 18
    assert {*lines[7:11]} == {"| raw error of this package | 1 |", "| runs | 1 |", "| stops elsewhere | 1 |",
                              "| trains nothing | 1 |"}
    assert "cell 1: ValueError: no / good |" in lines[14] and "| 2 |" in lines[16] and "| runs |" in lines[16]
    assert "beside LoRA, and unchanged: {'lm_head': 0.0}" in lines[15] and "it trains nothing" in lines[17]


def write(path: Path, cells: list[str]) -> None:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
