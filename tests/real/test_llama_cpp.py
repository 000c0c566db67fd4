"""A published model, and an adapter trained on it, exported as GGUF files and asked in llama.cpp itself."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from gpt_oss import gpt_oss_config, gpt_oss_model, store_in_mxfp4
from llama_quantizer import llama_quantizer
from published_model import published_model
from safetensors.torch import load_file
from small_models import scatter
from transformers import AutoTokenizer

from bench.llama_cpp import Answers, LlamaCpp, answers
from lowmem_grpo import FastLanguageModel, SFTConfig, SFTTrainer, add_new_tokens
from lowmem_grpo.models.gguf_file import gguf_tensors

pytestmark = pytest.mark.slow
# A token may differ where our two likeliest ones are nearly tied: by the float16 of llama.cpp's activations, and by the
# rounding of weights and activations to 8 bits or fewer. The least share of equal tokens, and the widest gap of logits.
BOUNDS = {"f16": (0.95, 0.1), "q8_0": (0.85, 1.0), "q4_k_m": (0.7, 5.0)}
TALKS = {"What is snow?": "Ahoy! Snow is frozen water, matey.", "Name a fruit.": "Ahoy! An apple is a fruit, matey.",
         "Why do birds sing?": "Ahoy! Birds sing to find a mate, matey.", "Where is Paris?": "Ahoy! In France, matey."}


def test_llama_cpp_chooses_the_tokens_of_the_base_and_of_the_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    libraries = str(llama_quantizer())
    monkeypatch.syspath_prepend(libraries)
    monkeypatch.setenv("PYTHONPATH", libraries, prepend=":")
    monkeypatch.setenv("PATH", str(tmp_path))  # no other llama.cpp
    model, tokenizer = FastLanguageModel.from_pretrained(str(published_model().folder), 256, torch.float32,
                                                         load_in_16bit=True)
    base, files = answers(model, tokenizer), written(model, tmp_path / "base", "q8_0")
    check(base, "base", files, record_property)
    assert_read_back(files["q8_0"], load_file(published_model().folder / "model.safetensors"))
    model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing=False)
    talk(model, tmp_path / "run")
    trained = answers(model, tokenizer)
    assert not {tuple(ids[:3]) for ids in trained.said} & {tuple(ids[:3]) for ids in base.said}
    check(trained, "trained", written(model, tmp_path / "trained", "f16", "q8_0", "q4_k_m"), record_property)


def test_llama_cpp_reads_and_says_a_new_token_as_the_loaded_model_does(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(published_model().folder), 256, torch.float32,
                                                         load_in_16bit=True)
    usual = answers(model, tokenizer).said[0][2]
    add_new_tokens(model, tokenizer, ["<new>"])
    [new] = model.loaded.new_tokens
    model = FastLanguageModel.get_peft_model(model, r=4, trainable_token_indices=[new])
    table = model.get_base_model().get_input_embeddings()
    with torch.no_grad():
        table.token_adapter.trainable_tokens_delta["default"].copy_(1.5 * table.weight[[usual]])
    said = answers(model, tokenizer)
    assert new in said.said[0]
    file = written(model, tmp_path / "out", "f16")["f16"]
    assert LlamaCpp(file).ask("/tokenize", content="a<new>b", parse_special=True)["tokens"] == tokenizer.encode(
        "a<new>b", add_special_tokens=False)
    check(said, "new token", {"f16": file}, record_property)


@pytest.mark.parametrize(("chosen", "least", "widest"), [
    (8, 0.95, 0.1), (4, 0.85, math.inf)])  # of 8 experts; with 4 of random ones, rounding sends tokens to other experts
def test_llama_cpp_chooses_the_tokens_of_gpt_oss_with_lora_on_all_experts(
    chosen: int, least: float, widest: float, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Its weights are random, and only its tokenizer is a published model's, which the converter knows."""
    tokenizer = AutoTokenizer.from_pretrained(published_model().folder)
    yarn = gpt_oss_config().rope_parameters | {"truncate": True}  # as llama.cpp computes it for any model
    base = gpt_oss_model(vocab_size=len(tokenizer), experts=8, num_experts_per_tok=chosen, rope_parameters=yarn,
                         pad_token_id=0, eos_token_id=tokenizer.eos_token_id)
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    store_in_mxfp4(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path / "base"), 256, torch.float32)
    model = FastLanguageModel.get_peft_model(model, r=3, use_gradient_checkpointing=False, target_modules=[
        "q_proj", "o_proj", "gate_up_proj", "down_proj"])
    said = answers(scatter(model, 0.1, of="lora_"), tokenizer)
    found = said.measure(written(model, tmp_path / "out", "f16")["f16"])
    record_property("printed", f"llama.cpp, gpt-oss, {chosen} of 8 experts, f16: {found}")
    assert found["equal_tokens"] >= least and found["widest_gap"] <= widest, found


def written(model: Any, folder: Path, *kinds: str) -> dict[str, Path]:
    out = model.save_pretrained_gguf(folder, quantization_method=list(kinds))
    return {kind: next(out.glob(f"*-{kind}.gguf")) for kind in kinds}


def check(said: Answers, which: str, files: dict[str, Path], record_property: Callable[[str, object], None]) -> None:
    for kind, file in files.items():
        found = said.measure(file)
        record_property("printed", f"llama.cpp, {which} model, {kind}: {found}")
        least, widest = BOUNDS[kind]
        assert found["equal_tokens"] >= least and found["widest_gap"] <= widest, (which, kind, found)


def talk(model: Any, folder: Path) -> None:
    """Train a model to answer as a sailor."""
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": question},
                                            {"role": "assistant", "content": reply}]}
                              for question, reply in TALKS.items()])
    settings = SFTConfig(output_dir=str(folder), max_steps=6, learning_rate=2e-3, per_device_train_batch_size=4,
                         lr_scheduler_type="constant")
    SFTTrainer(model, rows, settings).train()


def assert_read_back(file: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Our own reader finds the weights, in blocks of 32 whole numbers up to 127 that share a scale in float16."""
    read = gguf_tensors(file, torch.float32)
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        blocks = tensor.float().unflatten(-1, (-1, 32))
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        whole = blocks * torch.where(scale == 0, 0.0, 1 / scale)
        whole = whole.sign() * (whole.abs() + 0.5).floor()  # halves are rounded away from zero
        rounded = (whole * scale.half().float()).flatten(-2)
        assert torch.equal(read[name][...], rounded if tensor.ndim > 1 else tensor.float()), name
