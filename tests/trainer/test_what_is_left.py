"""What a run leaves beside its adapter: its tokenizer and its end tokens, which every reader of the folder takes up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_tools import export_command
from peft import LoraConfig
from small_models import random_model, shallow
from trainer_runs import ROWS, SMALL, digit_sum, load, make
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

from lowmem_grpo import (
    FastLanguageModel,
    GRPOConfig,
    GRPOTrainer,
    SamplingParams,
    SFTConfig,
    SFTTrainer,
    add_new_tokens,
)
from lowmem_grpo.cli import eval as eval_command
from lowmem_grpo.cli import playing
from lowmem_grpo.data.prompt_inputs import encode
from lowmem_grpo.models.pretrained import tokenizer_beside
from lowmem_grpo.rewards import SelfJudge
from lowmem_grpo.runs.records import RecordError
from lowmem_grpo.trainer.preflight.checks import PreflightError

SHALLOW = shallow()
TEMPLATE = ("{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'answer: <extra>' }}{% endif %}")
CHAT = [{"role": "user", "content": "Start with 3. Add 4."}]
FORM = {"load_in_4bit": False, "load_in_fp8": False}
LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
Loaded = Callable[[Path], Any]


def changed(new: int = 0) -> Any:
    """The embedded tokenizer with another template, another end token and a token of its own, and so many `new` ones
    that the model's embedding has too few rows."""
    tokenizer = AutoTokenizer.from_pretrained(SHALLOW)
    tokenizer.add_tokens(["<extra>", *(f"<new {number}>" for number in range(new))])
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, "?"
    return tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokenizer is not the model's, and that ends completions at "!" as well."""
    folder, tokenizer = tmp_path_factory.mktemp("left") / "run", changed()
    stop = tokenizer.convert_tokens_to_ids("!")
    make(folder, processing_class=tokenizer, max_steps=1, save_strategy="steps", save_steps=1,
         vllm_sampling_params=SamplingParams(stop_token_ids=[stop])).train()
    return folder


@pytest.fixture(scope="module")
def ends() -> list[int]:
    """The base's end token, the tokenizer's, and the run's own."""
    return sorted([2, *AutoTokenizer.from_pretrained(SHALLOW).convert_tokens_to_ids(["?", "!"])])


def prompt_ids() -> list[int]:
    return list(changed().apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("folder", ["checkpoint-1", "adapter"])
def test_plain_transformers_reads_the_tokenizer_of_the_training_from_each_folder(
    folder: str, run: Path, ends: list[int]
) -> None:
    saved = AutoTokenizer.from_pretrained(run / folder)
    assert (saved.chat_template, saved.eos_token, saved.convert_tokens_to_ids("<extra>")) == (TEMPLATE, "?", 322)
    assert saved.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False) == prompt_ids()
    assert GenerationConfig.from_pretrained(run / folder).eos_token_id == ends


def from_pretrained(folder: Path) -> Any:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=128)[0]


def generate(folder: Path) -> Any:
    return playing.load(str(SHALLOW), playing.adapter_and_base(folder)[0], 128, **FORM)[0]


def evaluate(folder: Path) -> Any:
    return eval_command.find_subject(str(folder), None, False).load("transformers", 128)[0]


@pytest.mark.parametrize("load", [from_pretrained, generate, evaluate])
def test_every_reader_of_an_adapter_renders_and_ends_as_its_training_did(
    load: Loaded, run: Path, ends: list[int]
) -> None:
    model = load(run / "adapter")
    assert encode(model.loaded.tokenizer, CHAT)[1] == prompt_ids()
    assert model.engine().eos_ids == ends


@pytest.mark.parametrize("load", [from_pretrained, generate, evaluate])
def test_an_adapter_without_a_tokenizer_has_the_bases_and_a_broken_one_is_refused(
    load: Loaded, run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run / "adapter", tmp_path / "copy"))
    (copy / "tokenizer.json").unlink()  # transformers alone would make an empty tokenizer of the rest
    with pytest.raises(ValueError, match=r"the tokenizer beside the adapter in .*copy cannot be read.*no vocabulary"):
        load(copy)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (copy / name).unlink()
    assert load(copy).loaded.tokenizer.chat_template == AutoTokenizer.from_pretrained(SHALLOW).chat_template


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"added_tokens": [], "model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_file_beside_an_adapter_is_named(content: bytes, tmp_path: Path) -> None:
    changed().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match="the tokenizer beside the adapter in"):
        tokenizer_beside(tmp_path)


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_an_export_has_the_tokenizer_and_all_end_tokens_of_the_training(
    kind: str, run: Path, ends: list[int], tmp_path: Path
) -> None:
    done = export_command(run, "--format", kind, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False) == prompt_ids()
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ends


def test_a_merge_of_the_live_model_ends_where_its_sampler_did(tmp_path: Path, ends: list[int]) -> None:
    trainer = make(tmp_path / "run", processing_class=changed(), max_steps=1)
    trainer.model.get_base_model().generation_config.eos_token_id = [2, ends[0] if ends[0] != 2 else ends[1]]
    sampled = trainer.policy.eos_token_ids(trainer.tokenizer)
    trainer.model.save_pretrained_merged(tmp_path / "live")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "live")
    assert plain.generation_config.eos_token_id == sampled and len(sampled) > 1
    assert AutoTokenizer.from_pretrained(tmp_path / "live").chat_template == TEMPLATE


def test_an_adapter_that_is_saved_with_a_tokenizer_has_that_one(tmp_path: Path) -> None:
    model = make(tmp_path / "run").model
    model.save_pretrained_merged(tmp_path / "out", changed(), save_method="lora")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    model.save_lora(tmp_path / "own")
    assert AutoTokenizer.from_pretrained(tmp_path / "own").chat_template != TEMPLATE


def test_a_judge_keeps_the_base_models_tokenizer_when_a_training_brings_another(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    judge = SelfJudge(trainer.model)
    make(tmp_path / "other", model=trainer.model, processing_class=changed())
    assert trainer.model.loaded.tokenizer.chat_template == TEMPLATE
    assert judge.tokenizer.chat_template == AutoTokenizer.from_pretrained(SHALLOW).chat_template


def test_a_base_without_a_generation_config_gets_one_with_the_end_tokens(tmp_path: Path) -> None:
    base = Path(shutil.copytree(SHALLOW, tmp_path / "base"))
    (base / "generation_config.json").unlink()
    model, _ = FastLanguageModel.from_pretrained(str(base), max_seq_length=64, load_in_4bit=False)
    FastLanguageModel.get_peft_model(model, r=1).save_lora(tmp_path / "adapter")
    (tmp_path / "adapter" / "generation_config.json").unlink()  # as of an adapter that another program wrote
    assert export_command(tmp_path / "adapter", "--out", tmp_path / "out").exit_code == 0
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2


# resized embeddings


def resized_first(tokenizer: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(SHALLOW), max_seq_length=128, load_in_4bit=False)
    model.resize_token_embeddings(len(tokenizer))
    return FastLanguageModel.get_peft_model(model, r=2, trainable_token_indices=[5, 384])


def resized_last(tokenizer: Any) -> Any:
    adapted = load()
    adapted.get_base_model().resize_token_embeddings(len(tokenizer))
    return adapted


def brought(tokenizer: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(SHALLOW)
    model.resize_token_embeddings(len(tokenizer))
    return model


def with_new_tokens(tokenizer: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(SHALLOW), max_seq_length=128, load_in_4bit=False)
    add_new_tokens(model, tokenizer, [f"<newer {number}>" for number in range(38)])
    return FastLanguageModel.get_peft_model(model, r=2, trainable_token_indices=[5, 384])


@pytest.mark.parametrize("build", [resized_first, resized_last, brought, with_new_tokens])
def test_new_tokens_that_are_not_trained_are_refused_before_anything_is_trained_or_written(
    build: Callable[[Any], Any], tmp_path: Path
) -> None:
    tokenizer = changed(99)
    lora = LORA if build is brought else None
    with pytest.raises(ValueError, match=r"new tokens would not be trained.*list\(range\(38[45], 4.*trainable_token"):
        GRPOTrainer(build(tokenizer), digit_sum, GRPOConfig(output_dir=str(tmp_path / "run"), **SMALL), ROWS,
                    processing_class=tokenizer, peft_config=lora)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resized_model_that_was_saved_first_trains_loads_and_exports(tmp_path: Path) -> None:
    tokenizer = changed(99)
    brought(tokenizer).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path / "base"), max_seq_length=128, load_in_4bit=False)
    trainer = make(tmp_path / "run", model=FastLanguageModel.get_peft_model(model, r=2), max_steps=1)
    trainer.train()
    again = from_pretrained(tmp_path / "run" / "adapter")
    assert encode(again.loaded.tokenizer, "<new 98>")[1] == [421]
    done = export_command(tmp_path / "run", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 422


def test_a_model_of_no_stored_name_is_not_taken_for_a_resized_one(tmp_path: Path) -> None:
    model, config = random_model("Llama", vocab_size=640), SFTConfig(output_dir=str(tmp_path), max_steps=1)
    trainer = SFTTrainer(model, [{"prompt": "a", "completion": "b"}] * 8, config, peft_config=LORA,
                         processing_class=changed())
    assert trainer.model.loaded.vocabulary is None


def test_an_answer_with_an_id_that_the_model_lacks_is_refused_before_training(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "<new 98>"}] * 8
    trainer = SFTTrainer(SHALLOW, rows, SFTConfig(output_dir=str(tmp_path / "run"), max_steps=1), peft_config=LORA,
                         processing_class=changed(99))
    with pytest.raises(PreflightError, match=r"a row contains the token 421 \('<new 98>'\)"):
        trainer.train()


class At(TrainerCallback):
    """Does something to the run's folder, once, at the end of a step."""

    def __init__(self, step: int, act: Callable[[Path], Any]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            self.act(Path(args.output_dir))


@pytest.mark.parametrize(("step", "act"), [
    (1, shutil.rmtree), (3, shutil.rmtree), (3, lambda run: run.rename(run.with_name("elsewhere"))),
    (3, lambda run: (run / "metrics.jsonl").unlink()),
], ids=["deleted", "deleted after the last step", "moved after the last step", "metrics deleted"])
def test_a_run_that_loses_its_folder_fails_with_the_reason_and_saves_its_weights(
    step: int, act: Callable[[Path], Any], tmp_path: Path
) -> None:
    trainer = make(tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=1)
    trainer.add_callback(At(step, act))
    with pytest.raises(RecordError, match=r"lost lines that this run wrote: the file or its folder was deleted, moved"):
        trainer.train()
    assert any((tmp_path / "run" / name / "adapter_model.safetensors").is_file()
               for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"))
