"""What people bring to a trainer: models by name and plain ones, peft settings, datasets of every kind, callbacks."""

import itertools
import json
import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pandas
import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_models import shallow
from trainer_runs import ROWS, SMALL, adapter, digit_sum, load, make, same
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers.utils.notebook import NotebookProgressCallback
from trl import RichProgressCallback

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.engines.base import NEEDED
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.state import OF_SETTINGS
from lowmem_grpo.trainer.parts import first_engine, lengths

SHALLOW = shallow()
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
TEXTS = [{"text": f"Question: {number} + 1? Answer: {number + 1}"} for number in range(8)]


def brought(folder: Path, model: Any = SHALLOW, rows: Any = ROWS, **parts: Any) -> GRPOTrainer:
    config = GRPOConfig(output_dir=str(folder), **(SMALL | parts.pop("settings", {})))
    return GRPOTrainer(model, digit_sum, config, rows, **({"peft_config": LORA} | parts))


def taught(folder: Path, rows: Any = TEXTS, model: Any = SHALLOW, **parts: Any) -> SFTTrainer:
    known = {"max_steps": 2, "per_device_train_batch_size": 4, "disable_tqdm": True} | parts.pop("settings", {})
    return SFTTrainer(model, rows, SFTConfig(output_dir=str(folder), **known), **({"peft_config": LORA} | parts))


# Models


@pytest.mark.parametrize("load_it", [
    lambda: AutoModelForCausalLM.from_pretrained(SHALLOW), lambda: FastLanguageModel.from_pretrained(str(SHALLOW))[0],
], ids=["plain", "ours"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["standard", "given"])
def test_a_cell_that_makes_a_trainer_may_be_run_twice(
    load_it: Any, lora: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_it()
    first = brought(tmp_path, model, peft_config=lora)
    assert "goes on from it" not in caplog.text
    again = brought(tmp_path, model, peft_config=lora)
    assert again.model is first.model and "the LoRA of an earlier trainer, and goes on from it" in caplog.text
    with pytest.raises(ValueError, match="earlier trainer, whose peft_config was another one; load the model again"):
        brought(tmp_path, model, peft_config=LoraConfig(r=2))


@pytest.mark.parametrize(("change", "refused"), [
    (lambda model: model.disable_adapter_layers(), None), (lambda model: model.requires_grad_(False), None),
    (lambda model: model.bfloat16(), None),
    (lambda model: model.add_adapter("idle", LoraConfig(target_modules=["o_proj"])), None),
    (lambda model: model.merge_adapter(), r"the adapter is merged, .*unmerge it"),
    (lambda model: model.merge_and_unload(), r"no LoRA any more: merge_and_unload, .*load the model again"),
    (lambda model: model.delete_adapter("default"), "no LoRA any more"),
    (lambda model: (model.add_adapter("b", LORA), model.set_adapter("b")), r"has the adapters .* delete the others"),
], ids=["off", "frozen", "bf16", "idle", "merged", "unloaded", "deleted", "other"])
def test_our_own_model_whose_lora_was_changed_is_trained_or_refused_in_words(
    change: Any, refused: str | None, tmp_path: Path
) -> None:
    model = load()
    change(model)
    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            brought(tmp_path, model, peft_config=None)
        return
    trainer = brought(tmp_path, model, peft_config=None)
    before = adapter(trainer)
    trainer.train()
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    assert not same(before, adapter(trainer))


def test_a_name_and_a_plain_model_train_as_the_loaders_own_does(tmp_path: Path) -> None:
    bare, _ = FastLanguageModel.from_pretrained(str(SHALLOW), max_seq_length=2048, load_in_4bit=False)
    own = FastLanguageModel.get_peft_model(bare, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                                           random_state=42)
    torch.manual_seed(42)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(SHALLOW), LORA)
    ends = []
    for name, parts in (("own", {"model": own, "peft_config": None}), ("name", {}), (
        "plain", {"model": AutoModelForCausalLM.from_pretrained(SHALLOW)}
    ), ("peft", {"model": theirs, "peft_config": None})):
        trainer = brought(tmp_path / name, **parts)
        trainer.train()
        ends.append(adapter(trainer))
    assert all(same(ends[0], end) for end in ends[1:])
    trainer.save_model(str(tmp_path / "saved"))
    theirs.save_pretrained(str(tmp_path / "callers"))  # the model that the caller holds is the trained one
    files = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("saved", "callers")]
    assert same(*files) and any(value.any() for name, value in files[0].items() if "lora_B" in name)


def test_without_peft_config_a_run_trains_a_lora_that_plain_peft_loads(tmp_path: Path) -> None:
    trainer = taught(tmp_path / "run", peft_config=None)
    assert trainer.train().global_step == 2
    trainer.save_model(str(tmp_path / "saved"))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(SHALLOW), str(tmp_path / "saved"))
    ids = torch.tensor([[5, 9, 11, 200, 31]])
    with torch.no_grad():
        wanted, got = (model.eval()(input_ids=ids).logits for model in (trainer.model, plain))
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (plain.peft_config["default"].r, plain.peft_config["default"].lora_alpha) == (16, 16)


def test_a_name_is_quantized_where_the_caller_says_so(tmp_path: Path) -> None:
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert brought(tmp_path, quantization_config=four_bit).model.get_base_model().is_loaded_in_4bit


def test_a_model_by_name_is_loaded_with_the_settings_of_vllm(tmp_path: Path) -> None:
    options = {"vllm_gpu_memory_utilization": 0.7, "vllm_max_model_length": 96, "vllm_enable_sleep_mode": True}
    loaded = brought(tmp_path, settings=options).model.loaded
    assert (loaded.keeper.settings.gpu_memory_utilization, loaded.max_seq_length) == (0.7, 96)


def test_a_bound_of_prompt_and_completion_leaves_out_longer_prompts_and_one_above_the_context_is_refused(
    tmp_path: Path
) -> None:
    assert lengths(make(tmp_path, vllm_max_model_length=80).args, 128) == (72, 80)
    with pytest.raises(ValueError, match="is 256, and the model was loaded with a context of 128"):
        make(tmp_path, vllm_max_model_length=256)


@pytest.mark.parametrize("share", [None, 0.3, 0.5, 0.9])
def test_a_share_of_the_card_other_than_that_of_a_loaded_engine_of_vllm_is_refused(
    share: float | None, tmp_path: Path
) -> None:
    trainer = make(tmp_path, vllm_gpu_memory_utilization=share)  # the engine of transformers takes no share
    engine = cast(Any, SimpleNamespace(**dict.fromkeys(NEEDED) | {"name": "vllm"}))
    with nullcontext() if share != 0.9 else pytest.raises(ValueError, match=r"is 0\.9, .* loaded with .*=0\.5; set"):
        first_engine(trainer.parts, trainer.args, engine)


def test_without_target_modules_those_of_peft_are_adapted(tmp_path: Path) -> None:
    trainer = brought(tmp_path, peft_config=LoraConfig())
    config = trainer.model.peft_config["default"]
    assert (config.target_modules, config.r, config.lora_alpha) == ({"q_proj", "v_proj"}, 8, 8)


@pytest.mark.parametrize(("parts", "error", "message"), [
    ({"peft_config": LoraConfig(use_dora=True)}, ValueError, "peft_config: use_dora=True is not supported"),
    ({"peft_config": LoraConfig(task_type="SEQ_CLS")}, ValueError, 'allowed is "CAUSAL_LM"'),
    ({"peft_config": LoraConfig(modules_to_save=["norm"])}, ValueError, "norm cannot be trained"),
    ({"peft_config": {"r": 4}}, TypeError, "peft_config is a dict; allowed is peft.LoraConfig"),
    ({"model": "peft"}, ValueError, "the model has LoRA already"),
    ({"model": 5}, TypeError, "model is a int; load it with FastLanguageModel"),
    ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, ValueError, "allowed is transformers.BitsAndB"),
    ({"settings": {"model_init_kwargs": {"max_memory": {}}}}, ValueError, "model_init_kwargs: max_memory"),
    ({"settings": {"model_init_kwargs": {"device_map": {"a": 0, "b": 1}}}}, ValueError, "a model lies on one device"),
    ({"model": "plain", "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, ValueError, "loaded already"),
    ({"processing_class": "tiny"}, TypeError, "processing_class is a str; pass a tokenizer"),
    ({"settings": {"use_vllm": True}, "model": "plain"}, ValueError, 'fast_inference="vllm"'),
    ({"optimizers": 5}, TypeError, "it must be a pair"),
    ({"optimizers": (None, "plan")}, TypeError, "holds a str; needed is a torch LRScheduler"),
    ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, ValueError, "no parameter of the adapter"),
    ({"data_collator": len}, ValueError, r"data_collator \(len\) is not supported; rows are tokenised and packed"),
    ({"rewards": [len]}, TypeError, "no parameter 'rewards'; did you mean reward"),
])
def test_what_cannot_be_trained_is_refused_with_what_to_do(
    parts: dict[str, Any], error: type, message: str, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(SHALLOW) if parts.get("model") in ("plain", "peft") else None
    if plain is not None:
        parts = parts | {"model": plain if parts["model"] == "plain" else get_peft_model(plain, LORA)}
    with pytest.raises(error, match=message):
        brought(tmp_path, **parts)


def test_the_callers_optimizer_and_schedule_make_the_steps(tmp_path: Path) -> None:
    model = load()
    before = adapter(make(tmp_path / "first", model=model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    trainer = GRPOTrainer(model, digit_sum, GRPOConfig(output_dir=str(tmp_path / "run"), **SMALL), ROWS,
                          optimizers=(optimizer, schedule))
    trainer.train()
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is schedule
    assert same(adapter(trainer), before)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(SHALLOW), LORA)
    own = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.5)
    assert brought(tmp_path / "peft", model=theirs, peft_config=None, optimizers=(own, None)).optimizer is own
    with pytest.raises(ValueError, match="of another optimizer"):
        brought(tmp_path / "other", model=model, peft_config=None, optimizers=(torch.optim.SGD(
            model.parameters(), lr=1.0), schedule))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for pair, needs in (((optimizer, plateau), "metrics"), ((torch.optim.LBFGS(model.parameters()), None), "closure")):
        with pytest.raises(ValueError, match=rf"whose step\(\) needs {needs}; a run calls"):
            brought(tmp_path / "step", model=model, peft_config=None, optimizers=pair)


def test_an_optimizer_without_some_of_what_is_trained_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(SHALLOW).half()
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True,
                        task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)  # its matrix has 16 bits, of which loss scaling takes no gradients
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        brought(tmp_path, model=adapted, peft_config=None, optimizers=(optimizer, None))
    assert re.search(r"holds 4 of the 5 trained parameters, .*embed_tokens.* among them", caplog.text)


def test_a_model_in_64_bits_is_trained_as_it_is(tmp_path: Path) -> None:
    trainer = brought(tmp_path, model=AutoModelForCausalLM.from_pretrained(SHALLOW, dtype=torch.float64))
    assert trainer.train().finished and {p.dtype for p in trainer.model.parameters()} == {torch.float64}


# Datasets


def generator() -> Iterator[dict[str, Any]]:
    yield from ROWS


@pytest.mark.parametrize("kind", ["list", "frame", "dataset", "torch"])
def test_rows_of_every_kind_give_the_same_run(kind: str, tmp_path: Path) -> None:
    class Rows(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return ROWS[index]

    kinds = {"list": tuple(ROWS), "frame": pandas.DataFrame(ROWS), "dataset": Dataset.from_list(ROWS), "torch": Rows()}
    found, usual = make(tmp_path / "it", rows=kinds[kind]), make(tmp_path / "list")
    assert [prompt.ids for prompt in found.source.take(9)] == [prompt.ids for prompt in usual.source.take(9)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "iterable", "torch"])
def test_a_resumed_stream_goes_on_with_the_row_at_which_it_stopped(kind: str, tmp_path: Path) -> None:
    class Rows(torch.utils.data.IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return generator()

    def run(folder: str, steps: int, resume: bool | None = None) -> list[Any]:
        rows = {"function": generator, "iterable": Dataset.from_list(ROWS).to_iterable_dataset(), "torch": Rows()}
        trainer = make(tmp_path / folder, rows=rows[kind], max_steps=steps, save_strategy="steps", save_steps=1)
        trainer.train(resume_from_checkpoint=resume)
        return [line["prompt"] for line in read_lines(tmp_path / folder / "completions.jsonl")]

    straight = run("straight", 4)
    run("parts", 3)
    assert run("parts", 4, resume=True) == straight and len(set(straight)) == 4


@pytest.mark.parametrize(("rows", "settings", "message"), [
    (DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS)), {}, r"'train', 'test'.*\['train'\]"),
    ({"prompt": ["a"], "answer": ["b"]}, {}, r"with the columns 'prompt', 'answer'; pass datasets.Dataset.from_dict"),
    ({"prompt": numpy.array(["a"])}, {}, r"with the columns 'prompt'; pass datasets.Dataset.from_dict"),
    ({"train": ROWS, "test": ROWS}, {}, r"with the splits 'train', 'test'; pass one of them: dataset\['train'\]"),
    (pandas.Series(["a"]), {}, "a Series with a str for a row; each row must be a dict of columns"),
    (torch.utils.data.TensorDataset(torch.tensor([1])), {}, "a TensorDataset with a tuple for a row"),
    ("openai/gsm8k", {}, r"pass datasets.load_dataset\('openai/gsm8k'"), (None, {}, "`train_dataset` is required"),
    (["a", "b"], {}, "a list of str; each row must be a dict"), ([], {}, "no rows"),
    ([*ROWS, None], {}, "a list of NoneType; each row must be a dict"),
    ([{**ROWS[0], 5: "a"}], {}, "train_dataset has the column 5, and names of columns are texts"),
    (pandas.DataFrame({("prompt", "x"): ["a"]}), {}, r"has the column \('prompt', 'x'\)"),
    ([{"question": "?"}], {}, r"no column 'prompt'.*question.*rename_column"),
    (7, {}, r"pass a datasets\.Dataset or a list of rows"),
    (generator, {"max_steps": -1}, "no length: set max_steps"), (generator, {"difficulty_pools": True}, "difficulty"),
    (generator, {"replay_buffer_size": 8}, "replay_buffer_size is set, and the rows are a stream"),
    (lambda: iter(["text"]), {}, "the stream gave a str"),
    (ROWS, {"eval_dataset": {}}, "eval_dataset is an empty dict"),
    (ROWS, {"eval_dataset": {"prompt": ["a", "b"]}}, r"eval_dataset\['prompt'\] is a list of str; each row must be"),
])
def test_a_dataset_that_cannot_be_taken_is_refused_with_what_to_pass(
    rows: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, rows=rows, **settings).train()


def test_a_generator_that_ends_is_refused_with_the_function_as_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"only once, and 4 rows were not enough; pass the generator's function") as end:
        make(tmp_path, rows=generator(), max_steps=9).train()
    assert "checkpoint-2" in end.value.__notes__[0]


def test_long_prompts_are_cut_from_the_left_where_that_is_asked_for(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole").source.take(1)[0].ids
    with pytest.raises(ValueError, match=r"longer than max_prompt_length \(5\).*truncate_prompts=True cuts them"):
        make(tmp_path / "none", max_prompt_length=5).train()
    trainer = make(tmp_path / "cut", max_prompt_length=5, truncate_prompts=True)
    assert trainer.source.take(1)[0].ids == whole[-5:]
    assert trainer.train().finished


# Fine-tuning as TRL's notebooks call it


def test_a_notebook_of_older_trl_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHALLOW)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(SHALLOW), tokenizer=tokenizer,
        train_dataset=Dataset.from_list(TEXTS), dataset_text_field="text", max_seq_length=64,
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer),
        dataset_num_proc=2, packing=False, peft_config=LORA, args=TrainingArguments(
            per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=1, max_steps=2, fp16=False,
            learning_rate=2e-4, bf16=False, logging_steps=1, optim="adamw_8bit", weight_decay=0.01, seed=3407,
            lr_scheduler_type="linear", output_dir=str(tmp_path), report_to="none", use_cpu=True,
        ),
    )
    stats = trainer.train()
    assert stats.metrics["train_runtime"] > 0 and stats.training_loss > 0 and stats.metrics["train_samples_per_second"]
    assert (trainer.args.max_length, trainer.args.warmup_steps, trainer.args.optim) == (64, 1, "adamw_8bit")
    assert tokenizer.decode(trainer.train_dataset[5]["input_ids"]).startswith(TEXTS[5]["text"])


def test_settings_may_stand_second_as_in_trl(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path), max_steps=1)
    assert SFTTrainer(load(), config, train_dataset=TEXTS).args is config
    assert SFTTrainer(load(), config, None, TEXTS).args is config
    with pytest.raises(TypeError, match="args is given twice"):
        SFTTrainer(load(), TEXTS, config, args=config)


@pytest.mark.parametrize(("parts", "error", "message"), [
    ({"compute_loss_func": len}, ValueError, "compute_loss_func .* is not supported; the loss is that of the trainer"),
    ({"formatting_func": 5}, DataError, "formatting_func is 5; it must be a function that makes a text of a row"),
    ({"callbacks": 5}, TypeError, "callbacks is a int; it must be a list of callbacks"),
    ({"formatting_func": lambda row: 5}, DataError, "formatting_func returned a int for the first row"),
    ({"chat_template_path": "x"}, ValueError, r"chat_template_path is 'x'; it must be a file of a chat template"),
    ({"eos_token": "<x>"}, ValueError, r"eos_token is '<x>', which is no token of the tokenizer; take one of its own"),
    ({"tokenizer": 1, "processing_class": 2}, TypeError, "two names of the same"),
])
def test_what_fine_tuning_cannot_do_is_refused(
    parts: dict[str, Any], error: type, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        taught(tmp_path, **parts)


# Callbacks


EVALUATED = ["epoch", "eval_entropy", "eval_loss", "eval_mean_token_accuracy", "eval_num_tokens", "eval_runtime",
             "eval_samples_per_second", "eval_steps_per_second", "step"]


NOTED = {"on_init_end": "init", "on_epoch_begin": "epoch", "on_pre_optimizer_step": "before", "on_log": "log",
         "on_optimizer_step": "after", "on_substep_end": "never", "on_save": "save", "on_evaluate": "evaluated"}


def noted(name: str) -> Any:
    """A hook that remembers when it was called, and with which metrics."""
    def note(self: Any, args: Any, state: Any, control: Any, metrics: Any = (), **given: Any) -> None:
        self.calls.append((f"{name} {sorted(metrics)}" if metrics else name, state.global_step))

    return note


class Hooks(TrainerCallback):
    """Remembers what was called, and asks for something at a step."""

    def __init__(self, step: int = 0, ask: str = "") -> None:
        self.step, self.ask, self.calls = step, ask, list[tuple[str, int]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.ask and state.global_step == self.step:
            setattr(control, self.ask, True)
        return control


Seen: Any = type("Seen", (Hooks,), {hook: noted(name) for hook, name in NOTED.items()})


def test_each_hook_is_called_when_transformers_calls_it_and_one_that_never_is_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    taught(tmp_path, callbacks=[seen], settings={"max_steps": 3}).train()
    step = [("before", 0), ("after", 0), ("log", 1)]
    assert seen.calls == [("init", 0), ("epoch", 0), *step, *((name, at + 1) for name, at in step), ("epoch", 2),
                          *((name, at + 2) for name, at in step), ("save", 3), ("log", 3)]
    assert "Seen.on_substep_end is never called" in caplog.text


@pytest.mark.parametrize(("ask", "expected"), [
    ("should_evaluate", (f"evaluated {EVALUATED}", 2)), ("should_log", ("log", 2)),
    ("should_epoch_stop", ("epoch", 2)), ("should_save", ("save", 2)),
])
def test_what_a_callback_asks_for_is_done_at_the_end_of_the_step(
    ask: str, expected: tuple[str, int], tmp_path: Path
) -> None:
    seen = Seen(2, ask)
    taught(tmp_path, callbacks=[seen], eval_dataset=TEXTS[:2], settings={
        "max_steps": 4, "logging_steps": 3, "per_device_train_batch_size": 3,
    }).train()
    assert expected in seen.calls


def test_early_stopping_ends_the_run_and_the_best_adapter_is_loaded(tmp_path: Path) -> None:
    callbacks = [EarlyStoppingCallback(2), PrinterCallback, NotebookProgressCallback]
    trainer = taught(tmp_path, model="tiny", eval_dataset=TEXTS[:2], callbacks=callbacks, settings={
        "max_steps": 9, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.3,
        "metric_for_best_model": "loss", "load_best_model_at_end": True, "lr_scheduler_type": "constant",
    })
    stats = trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    best = losses.index(min(losses)) + 1
    assert stats.global_step == best + 2 < 9 and trainer.state.best_metric == min(losses)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses))


def test_early_stopping_waits_while_the_metric_rises(tmp_path: Path) -> None:
    values = itertools.count(1.0)
    trainer = taught(tmp_path, eval_dataset=TEXTS[:2], callbacks=[EarlyStoppingCallback(1)],
                     compute_metrics=lambda _: {"exact": next(values)}, settings={
        "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "exact"})
    assert trainer.train().global_step == 3 == trainer.state.best_metric
    named = taught(tmp_path / "loss", eval_dataset=TEXTS[:2], settings={
        "eval_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True})
    assert (named.args.metric_for_best_model, named.args.greater_is_better) == ("loss", False)  # transformers' rule


def test_callbacks_can_be_added_popped_and_removed(tmp_path: Path) -> None:
    trainer = taught(tmp_path)
    seen = Seen()
    trainer.add_callback(seen)
    trainer.add_callback(ProgressCallback)
    assert trainer.pop_callback(Seen) is seen and trainer.pop_callback(Seen) is None
    trainer.remove_callback(ProgressCallback)
    handler = trainer.callback_handler  # transformers' names
    handler.add_callback(PrinterCallback)
    assert type(handler.callbacks[-1]) is PrinterCallback and handler.callback_list.endswith("\nPrinterCallback")
    assert type(handler.pop_callback(TrainerCallback)) is PrinterCallback  # also by a class that it inherits from
    trainer.log({"mine": 0.5})
    assert trainer.state.log_history[-1]["mine"] == 0.5
    trainer.train()
    assert seen.calls == []


def test_callbacks_read_what_transformers_state_and_arguments_say(tmp_path: Path) -> None:
    heard: dict[str, Any] = {}
    reader = SimpleNamespace(on_step_end=lambda args, state, control, **kwargs: heard.update(
        kwargs, state=replace(state), args=args))
    trainer = taught(tmp_path, callbacks=[reader], eval_dataset=TEXTS[:2], settings={
        "max_steps": 3, "save_steps": 2, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 5})
    trainer.train()
    state = heard["state"]
    # 8 rows in batches of 4: step 3 is in the second epoch
    assert [getattr(state, name) for name in OF_SETTINGS] == [3, 4, 5, 2, 4, 2]
    trainer.state.save_to_json(str(tmp_path / "state.json"))
    assert json.loads((tmp_path / "state.json").read_text())["log_history"] == trainer.state.log_history
    theirs = TrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=4)
    for name in ("world_size", "process_index", "local_process_index", "should_save", "should_log", "n_gpu", "device",
                 "train_batch_size", "eval_batch_size"):
        assert getattr(replace(heard["args"], use_cpu=True), name) == getattr(theirs, name), name
    assert heard["args"].get_process_log_level() == logging.WARNING
    assert json.loads(heard["args"].to_json_string())["max_steps"] == 3
    with heard["args"].main_process_first(desc="mapping"):
        assert heard["args"].to_sanitized_dict().keys() == heard["args"].to_dict().keys()
    with pytest.raises(AttributeError, match="no option 'set_training'; set the fields themselves"):
        heard["args"].set_training(learning_rate=1e-4)
    for loader in (heard["train_dataloader"], heard["eval_dataloader"]):
        assert not loader
        for use in (len, iter, lambda given: given.batch_size):
            with pytest.raises(AttributeError, match=r"there are no data loaders: trainer\.source\.take"):
                use(loader)


def test_trls_bar_is_left_out_as_the_view_shows_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = taught(tmp_path, callbacks=[RichProgressCallback()])
    assert "RichProgressCallback is left out, as the live view shows progress" in caplog.text
    assert trainer.pop_callback(RichProgressCallback) is None


@pytest.mark.parametrize(("callback", "message"), [
    (TensorBoardCallback, "use report_to for"), (DefaultFlowCallback, "the settings say when to log"),
    (5, "none of the hooks on_init_end"),
])
def test_callbacks_that_make_no_sense_here_are_refused(callback: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        taught(tmp_path, callbacks=[callback])
