"""Training, sampling, evaluating and saving leave each module's mode as it was, and `generate` says the same in all of
them: what plain transformers and PEFT say in evaluation mode with the same weights."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import peft
import pytest
import torch
from small_models import TINY, load_model, with_adapter
from tables import every_row
from torch import nn
from trainer_runs import ROWS, TEXTS, by_letters, load, make, moved, plain_peft
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from lowmem_grpo import FastLanguageModel, SamplingParams, SFTConfig, SFTTrainer
from lowmem_grpo.models.policy import evaluating, in_mode

PROMPTS = ["Start with 17. Add 8. What is the result?\n", "Start with 3.\n"]  # the shorter one is padded on the left
ANSWERED = [{"prompt": row["prompt"], "completion": "14"} for row in TEXTS]
STEP: dict[str, Any] = {"max_steps": 1, "learning_rate": 0.1, "report_to": "none"}
Modes = dict[str, bool]


def modes(model: nn.Module) -> Modes:
    return {path: module.training for path, module in model.named_modules()}


def said(model: Any, **options: Any) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    answer: torch.Tensor = model.generate(**inputs, **{"max_new_tokens": 12, "do_sample": False} | options)
    return answer


def dropping(checkpointing: bool | str) -> Any:
    """The shallow model with an adapter that matters and drops, its modules in several modes."""
    return moved(load(checkpointing=checkpointing, lora_dropout=0.1))


def failing(*given: Any, **named: Any) -> Any:
    raise KeyboardInterrupt


def sample(model: Any, folder: Path) -> None:
    model.save_lora(folder / "saved")
    model.fast_generate(PROMPTS, SamplingParams(max_tokens=4, logprobs=2), model.current_lora())
    model.fast_generate(PROMPTS, SamplingParams(max_tokens=4), model.load_lora(folder / "saved"))


def grpo(model: Any, folder: Path) -> None:
    trainer = make(folder / "grpo", by_letters, model=model, beta=0.1, eval_dataset=ROWS[:1], **STEP)
    trainer.train()
    trainer.evaluate()


def sft(model: Any, folder: Path) -> None:
    settings = SFTConfig(output_dir=str(folder / "sft"), **STEP)
    trainer = SFTTrainer(model, ANSWERED, settings, eval_dataset=ANSWERED[:2], compute_metrics=lambda both: {"n": 1.0})
    trainer.evaluate()
    trainer.train()


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder / "adapter")
    model.save_pretrained_merged(folder / "merged")


def fail(model: Any, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(folder / "failed", failing, model=model, **STEP).train()
    with pytest.raises(ValueError, match="leaves no room"):
        model.fast_generate([[5] * 200], SamplingParams(max_tokens=4), model.current_lora())
    with pytest.raises(KeyboardInterrupt):
        said(model, logits_processor=[failing])


@pytest.mark.every(2)
@pytest.mark.parametrize(("act", "checkpointing", "mode"), [
    (sample, True, None), (grpo, True, None), (sft, True, None), (save, True, None), (fail, True, None),
    (grpo, False, False), (sft, "unsloth", False),
])
def test_every_module_keeps_its_mode_and_generate_says_what_plain_peft_says(
    act: Callable[[Any, Path], None], checkpointing: bool | str, mode: bool | None, tmp_path: Path
) -> None:
    model = dropping(checkpointing) if mode is None else dropping(checkpointing).train(mode)
    before = modes(model)
    assert len({*before.values()}) == (2 if mode is None else 1), "modes of a fresh model differ, as PEFT leaves them"
    act(model, tmp_path)
    assert modes(model) == before
    wanted = said(plain_peft(model, tmp_path / "now"))
    assert torch.equal(said(model), wanted) and modes(model) == before
    model.train()
    assert torch.equal(said(model), wanted) and all(modes(model).values())


def test_lora_is_in_the_modes_that_plain_peft_leaves_it_in() -> None:
    plain = with_adapter(load_model("shallow"), lora_dropout=0.1)
    ours = load(lora_dropout=0.1, r=4)
    shared = modes(plain).keys() & modes(ours).keys()
    assert len(shared) > 100 and {name: ours.get_submodule(name).training for name in shared} == {
        name: plain.get_submodule(name).training for name in shared}


def test_the_callers_own_peft_model_says_after_training_what_plain_peft_says(tmp_path: Path) -> None:
    load(lora_dropout=0.1).save_lora(tmp_path / "start")
    base = AutoModelForCausalLM.from_pretrained(load().loaded.name)
    brought = peft.PeftModel.from_pretrained(base, tmp_path / "start")  # in evaluation mode
    trainer = make(tmp_path / "run", by_letters, model=brought, processing_class=AutoTokenizer.from_pretrained(TINY),
                   **STEP)
    trainer.train()
    assert not any(modes(brought).values())
    assert torch.equal(said(brought), said(plain_peft(trainer.model, tmp_path / "now")))


@every_row("options", [
    {"use_cache": False}, {"num_beams": 3}, {"do_sample": True, "temperature": 0.7}, {"cache_implementation": "static"},
    {"num_return_sequences": 2, "do_sample": True},
])
def test_every_kind_of_generate_is_plain_pefts_from_train_mode(options: dict[str, Any], tmp_path: Path) -> None:
    model = dropping(True).train()
    answers = []
    for each in (model, plain_peft(model, tmp_path)):
        torch.manual_seed(0)
        answers.append(said(each, **options))
    assert torch.equal(*answers)


def test_a_bare_model_and_a_streamer_in_another_thread_say_the_same() -> None:
    bare, tokenizer = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    plain = said(AutoModelForCausalLM.from_pretrained(TINY))
    bare.train()
    assert torch.equal(said(bare), plain) and all(modes(bare).values())
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {"streamer": streamer, "max_new_tokens": 12, "do_sample": False}
    thread = Thread(target=bare.generate, kwargs={**ids, **options})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text and tokenizer.decode(plain[0], skip_special_tokens=True).endswith(text.removesuffix("<|im_end|>"))


def test_a_mode_that_was_set_by_hand_outlives_nested_contexts_and_errors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)).train()
    model[1].eval()
    before = modes(model)
    with pytest.raises(RuntimeError), evaluating(model), in_mode(model, True):
        assert all(modes(model).values())
        raise RuntimeError
    assert modes(model) == before


def test_a_mode_stays_until_the_last_of_several_threads_has_left_it() -> None:
    """Arithmetic: two threads' calls overlap, and the first to come is the first to go, as equal requests are."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    model[0].eval()
    before, (first, second, third) = modes(model), [evaluating(model) for _ in range(3)]
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(modes(model).values()), "the second thread still samples"
    third.__enter__()
    second.__exit__(None, None, None)
    assert not any(modes(model).values())
    third.__exit__(None, None, None)
    assert modes(model) == before
