"""Supervised fine-tuning: the gradient of plain cross-entropy however a step is cut, rows as GRPO will sample them."""

import json
import math
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from memory import LiveStorage
from run_pages import Page, texts_of
from small_models import SHAPE, TINY, shallow
from tables import every_row
from trainer_runs import Gradients, adapter_of, moved, relative
from trainer_runs import load as load_shallow
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm_models import NEEDS_VLLM

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from lowmem_grpo.data.examples import Example
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.trainer.nonfinite import NonFiniteError
from lowmem_grpo.trainer.preflight.checks import PreflightError
from lowmem_grpo.trainer.sft import as_groups
from lowmem_grpo.types import RolloutGroup

END = "<|im_end|>"

def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROWS: list[dict[str, Any]] = [
    {"prompt": question("Start with 3. Add 4. What is the result?"), "completion": "3 + 4 = 7\n<answer>7</answer>"},
    {"prompt": question("Start with 52. Subtract 20. Add 4. Multiply by 2. What is the result?"),
     "completion": "52 - 20 = 32\n32 + 4 = 36\n36 * 2 = 72\n<answer>72</answer>"},
    {"prompt": question("Start with 9."), "completion": "<answer>9</answer>"},
    {"prompt": question("Start with 15. Subtract 6. What is the result?"), "completion": "15 - 6 = 9\n9"},
    {"prompt": question("Start with 1. Add 1. Add 1. What is the result?"), "completion": "3"},
    {"prompt": question("Start with 80. Subtract 30. What is the result?"),
     "completion": "80 - 30 = 50\n<answer>50</answer>"},
]
FORMAT = [
    {"prompt": question(f"Start with {n}. Add {n}. What is the result?"),
     "completion": f"{n} + {n} = {2 * n}\nAnswer = {2 * n}"} for n in range(1, 25)
]


load = partial(load_shallow, r=8, lora_alpha=16)
MODEL = cache(load)  # one that no test trains


def load_form(name: str = "tiny", four_bit: bool = False, dtype: Any = None, checkpointing: Any = False,
              engine: Any = "transformers") -> FastPeftModel:
    bare, _ = FastLanguageModel.from_pretrained(
        name, max_seq_length=128, load_in_4bit=four_bit, dtype=dtype, fast_inference=engine)
    return FastLanguageModel.get_peft_model(bare, use_gradient_checkpointing=checkpointing, r=8, lora_alpha=16)


def make(folder: Path, rows: Any = ROWS, model: Any = None, **settings: Any) -> SFTTrainer:
    parts = {name: settings.pop(name) for name in ("callbacks", "eval_dataset", "processing_class") if name in settings}
    known = {"max_steps": 2, "learning_rate": 3e-3, "disable_tqdm": True} | settings
    return SFTTrainer(model or load(), rows, SFTConfig(output_dir=str(folder), **known), **parts)


def test_chat_template_and_end_token_of_the_settings_are_the_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL's own scripts set them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}")
    trainer = make(tmp_path, [{"messages": [*question("3"), {"role": "assistant", "content": "4"}]}],
                   chat_template_path="~/template.jinja", eos_token="<|im_start|>", activation_offloading=True)
    rendered = trainer.tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    assert rendered == "user: 3<|im_start|>assistant: 4<|im_start|>"
    assert trainer.tokenizer.eos_token == "<|im_start|>"


def groups_of(trainer: SFTTrainer, rows: list[dict[str, Any]]) -> list[RolloutGroup]:
    encoded = [trainer.source.encoder.encode(row) for row in rows]
    assert all(isinstance(example, Example) for example in encoded)
    return as_groups(encoded)  # type: ignore[arg-type]


def gradients(trainer: SFTTrainer, groups: list[RolloutGroup]) -> tuple[float, Gradients]:
    """Loss and gradient of one step on these rows."""
    loss = trainer.learner.forward_backward(groups)["loss"]
    return loss, {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def plain_gradients(
    model: FastPeftModel, folder: Path, rows: list[dict[str, Any]], loss_type: str = "nll",
    dtype: torch.dtype = torch.float32,
) -> tuple[float, Gradients]:
    """Cross-entropy of transformers' own loss on padded rows, labels -100 on prompts and padding; plain peft. For "dft"
    each token's is multiplied by its probability, which has no gradient."""
    model.save_lora(folder)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    bare = AutoModelForCausalLM.from_pretrained(shallow(), attn_implementation="eager")
    plain = peft.PeftModel.from_pretrained(bare, folder, is_trainable=True).train().to(dtype)
    prompts = [f"<|im_start|>user\n{row['prompt'][0]['content']}{END}\n<|im_start|>assistant\n" for row in rows]
    completions = [row["completion"] + END for row in rows]
    ids = [(tokenizer.encode(p), tokenizer.encode(c)) for p, c in zip(prompts, completions, strict=True)]
    width = max(len(prompt) + len(completion) for prompt, completion in ids)
    input_ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for place, (prompt, completion) in enumerate(ids):
        total = len(prompt) + len(completion)
        input_ids[place, :total], mask[place, :total] = torch.tensor(prompt + completion), 1
        labels[place, len(prompt) : total] = torch.tensor(completion)
    out = plain(input_ids=input_ids, attention_mask=mask, labels=labels)
    loss = out.loss
    if loss_type == "dft":
        every = out.logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        chosen = every[labels[:, 1:] != -100]
        loss = -(chosen * chosen.detach().exp()).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


# The gradient.


@pytest.mark.parametrize(("settings", "checkpointing"), [
    ({"per_device_train_batch_size": 6}, False), ({"per_device_train_batch_size": 1}, False),
    ({"per_device_train_batch_size": 4}, False), ({"max_tokens_per_micro_batch": 1}, False),
    ({"max_tokens_per_micro_batch": 90}, "offload"), ({"max_tokens_per_micro_batch": 90}, True),
    ({"logits_chunk": 3}, False),
], ids=str)
@pytest.mark.every(2)
def test_the_gradient_is_that_of_transformers_cross_entropy_however_the_step_is_cut(
    settings: dict[str, Any], checkpointing: Any, tmp_path: Path
) -> None:
    model = moved(load(checkpointing=checkpointing))
    trainer = make(tmp_path, model=model, **settings)
    loss, found = gradients(trainer, groups_of(trainer, ROWS))
    plain_loss, expected = plain_gradients(model, tmp_path / "plain", ROWS)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("settings", [{"per_device_train_batch_size": 6}, {"max_tokens_per_micro_batch": 1},
                                      {"logits_chunk": 3}], ids=str)
def test_the_gradient_of_dft_is_that_of_its_formula_in_float64_however_the_step_is_cut(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = moved(load())
    trainer = make(tmp_path, model=model, loss_type="dft", eval_dataset=ROWS, **settings)
    loss, found = gradients(trainer, groups_of(trainer, ROWS))
    plain_loss, expected = plain_gradients(model, tmp_path / "plain", ROWS, "dft", torch.float64)
    assert loss == pytest.approx(plain_loss, rel=1e-5) == trainer.evaluate()["eval_loss"]
    assert relative(found, expected) < 1e-5
    assert loss < plain_gradients(model, tmp_path / "plain", ROWS)[0]  # as no probability is above 1


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_rows_of_a_pack_do_not_see_each_other_and_a_step_counts_packs(strategy: str, tmp_path: Path) -> None:
    model = moved(load())
    expected = plain_gradients(model, tmp_path / "plain", ROWS)[0]
    trainer = make(tmp_path, model=model, packing=True, packing_strategy=strategy, max_length=128, max_steps=-1,
                   num_train_epochs=2, per_device_train_batch_size=3, learning_rate=0.0)
    lengths = trainer.train_dataset["seq_lengths"][:]
    assert (len(lengths), trainer.state.max_steps) == (3, 2) and sum(map(len, lengths)) == len(ROWS)
    assert trainer.train().metrics["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_wrapped_rows_see_those_before_them(tmp_path: Path) -> None:
    model = moved(load())
    trainer = make(tmp_path, [{"text": "12 + 3 = 15"}] * 3, model, packing=True, packing_strategy="wrapped",
                   max_length=16, per_device_train_batch_size=9, max_steps=1, learning_rate=0.0)
    line = [*trainer.tokenizer.encode("12 + 3 = 15"), trainer.tokenizer.eos_token_id] * 3
    blocks = [torch.tensor([line[at : at + 16]]) for at in range(0, len(line), 16)]
    assert trainer.train_dataset["input_ids"][:] == [block[0].tolist() for block in blocks]
    with torch.no_grad():
        sums = sum(model(block, labels=block).loss.item() * (block.shape[1] - 1) for block in blocks)
    count = sum(block.shape[1] - 1 for block in blocks)
    assert trainer.evaluate([{"text": "12 + 3 = 15"}] * 3)["eval_loss"] == pytest.approx(sums / count, rel=1e-5)


def test_a_step_takes_as_many_rows_as_batch_and_accumulation_say_and_their_tokens_weigh_alike(tmp_path: Path) -> None:
    model = moved(load())
    before = adapter_of(model)
    trainer = make(tmp_path, model=model, per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=1,
                   max_grad_norm=1e6)
    expected = plain_gradients(model, tmp_path / "plain", ROWS)[1]
    metrics = trainer.step()  # six rows, so all of them, in some order
    norm = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    after = adapter_of(model)
    for name, gradient in expected.items():  # Adam's first step goes by the sign alone
        clear = gradient.abs() > 1e-4
        assert torch.equal((after[name] - before[name]).sign()[clear], -gradient.sign()[clear])


def test_logits_of_all_tokens_never_exist(tmp_path: Path) -> None:
    vocabulary = 8192
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(SHAPE | {"vocab_size": vocabulary}))).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "model")
    model = load_form(str(tmp_path / "model"))
    trainer = make(tmp_path, model=model, logits_chunk=8)
    groups = groups_of(trainer, ROWS)
    tokens = sum(len(group.rollouts[0].completion_ids) for group in groups)
    logits = tokens * vocabulary * 4
    with LiveStorage() as meter:
        trainer.learner.forward_backward(groups)
    assert meter.largest < logits / 4
    with LiveStorage() as meter, torch.no_grad():
        model(torch.ones(1, tokens, dtype=torch.long))
    assert meter.largest >= logits  # what the meter would have seen


# Training.


@pytest.mark.slow
@pytest.mark.parametrize("parts", [
    {}, {"four_bit": True}, {"four_bit": True, "dtype": torch.bfloat16, "checkpointing": "offload"},
], ids=str)
def test_the_loss_falls_whatever_the_weights_are(parts: dict[str, Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, FORMAT[:6], load_form(**parts), max_steps=12, learning_rate=1e-2,
                   per_device_train_batch_size=6, lr_scheduler_type="constant")
    output = trainer.train()
    losses = [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert output.finished and len(losses) == 12
    assert losses[-1] < losses[0] / 3


def test_the_records_hold_every_step_and_the_adapter_is_saved(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=3, per_device_train_batch_size=3, seed=7)
    trainer.train()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    wanted = {"loss", "entropy", "grad_norm", "learning_rate", "num_tokens", "epoch", "step_time", "tokens_per_second",
              "optimizer/skipped", "nonfinite/steps", "memory/oom_train", "data/skipped_rows"}
    assert wanted <= lines[0].keys()
    ids = [(len(g.prompt_ids), len(g.rollouts[0].completion_ids)) for g in groups_of(trainer, ROWS)]
    assert lines[1]["num_tokens"] == sum(map(sum, ids)) and lines[1]["epoch"] == 1.0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["method"], summary["steps"], summary["seed"]) == ("finished", "sft", 3, 7)
    saved = load().load_lora(tmp_path / "adapter")
    assert saved.path == tmp_path / "adapter"


def test_the_report_shows_what_fine_tuning_has_and_nothing_of_samples_and_rewards(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2, eval_dataset=ROWS[:3], eval_strategy="steps", eval_steps=1).train()
    page = Page(tmp_path / "report.html")
    lines = read_lines(tmp_path / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    for expected in ("supervised fine-tuning", f"{losses[0]:.3g} \u2192 {losses[1]:.3g}", "trained tokens per second",
                     "tokens read, of prompts and answers", "peak memory", "learning_rate"):
        assert expected in page.prose
    assert [1, 2] in [line["steps"] for chart in page.data["charts"] for line in chart["lines"]
                      if line["name"] == "evaluation"]
    shown = "\n".join(texts_of({**page.data, "settings": None}, keys=False))
    for absent in ("sampl", "Reward", "reward in", "held-out", "not measured", "watch the"):
        assert absent not in shown, absent


def test_lines_are_means_over_logging_steps_and_the_last_step_is_never_left_out(tmp_path: Path) -> None:
    make(tmp_path / "each", max_steps=5).train()
    make(tmp_path / "pairs", max_steps=5, logging_steps=2).train()
    each, pairs = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("each", "pairs"))
    assert [line["step"] for line in pairs] == [2, 4, 5]
    assert pairs[0]["loss"] == pytest.approx((each[0]["loss"] + each[1]["loss"]) / 2)
    assert pairs[2]["loss"] == each[4]["loss"]


def test_the_evaluation_loss_is_that_of_plain_cross_entropy_without_dropout(tmp_path: Path) -> None:
    model = moved(load(lora_dropout=0.0))
    expected = plain_gradients(model, tmp_path / "plain", ROWS[:3])[0]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    trainer = make(tmp_path / "run", model=model, eval_dataset=[*ROWS[:3], {"prompt": "", "completion": "x"}],
                   eval_strategy="steps", eval_steps=2, max_steps=4, learning_rate=0.0)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.train()
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[1]["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_steps_that_are_not_finite_train_nothing_and_stop_the_run_with_a_checkpoint_of_the_step_before(
    tmp_path: Path,
) -> None:
    model = load()
    trainer = make(tmp_path, model=model, max_steps=9)
    trainer.step()
    before = adapter_of(model)
    trainer.policy.backbone.norm.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="3 steps in a row") as stopped:
        trainer.train()
    (checkpoint,) = list_checkpoints(tmp_path)
    assert str(checkpoint) in stopped.value.__notes__[0]
    assert all(torch.equal(value, before[name]) for name, value in adapter_of(model).items())
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    page = (tmp_path / "report.html").read_text()
    assert "This run failed after step 3 of 9" in page and "3 steps in a row" in page and "Not on this page" not in page


def test_the_live_view_shows_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, max_steps=1, disable_tqdm=None).train()
    assert "step 1/1  loss " in capsys.readouterr().out


# Rows, by way of the trainer.


def test_bad_rows_are_left_out_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROWS[0], {"prompt": question("x"), "completion": ""}, {"prompt": question("x"), "completion": 3}, ROWS[1]]
    trainer = make(tmp_path, rows, max_steps=1, per_device_train_batch_size=2, shuffle_dataset=False)
    trainer.train()
    trainer.source.take(1)
    assert "row 1 skipped: empty completion" in caplog.text and "row 2 skipped: completion is int" in caplog.text
    assert json.loads((tmp_path / "summary.json").read_text())["skipped_rows"] == {
        "empty completion": 1, "completion is int, not text or chat": 1,
    }
    assert read_lines(tmp_path / "metrics.jsonl")[0]["data/skipped_rows"] == 2


def test_a_dataset_of_another_shape_is_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="columns are prompt, answer; needed are prompt and completion"):
        make(tmp_path, [{"prompt": "a", "answer": "b"}])


@every_row(("messages", "reason"), [
    (None, "empty messages"), ("text", "messages is str, not text or chat"), ([], "empty messages"),
    (question("only a question"), "messages has no message of the assistant (assistant_only_loss=False trains all)"),
    ([{"role": "assistant"}], "message 1 of messages has no role, or no text"),
    ([{"role": "assistant", "content": "2"}], "messages has nothing before the assistant's answer (assistant_only"),
    ([*question("a"), {"role": "assistant", "content": [{"type": "audio", "url": "b"}]}], "message 2 of messages has a "
     "part of type 'audio', and only text is read here"),
])
def test_conversations_without_an_answer_are_refused_with_their_column_and_the_cause(
    messages: Any, reason: str, tmp_path: Path
) -> None:
    trainer = make(tmp_path, [{"messages": messages}], MODEL(), assistant_only_loss=None)
    with pytest.raises(PreflightError, match=rf"can be used: {re.escape(reason)}.* correct the column `messages`"):
        trainer.train()


@every_row(("rows", "mode", "trained"), [
    ([*question("1 + 1?"), {"role": "assistant", "content": "2"}, *question("Thanks")], None, "2<|im_end|>"),
    ([*question("1 + 1?"), {"role": "assistant", "content": "2"}, *question("And 2 + 2?"),
      {"role": "assistant", "content": "4"}], None, "4<|im_end|>"),
    ([*question("1 + 1?"), {"role": "assistant", "content": [{"type": "text", "text": "2"}, {"text": "!"}]}], None,
     "2!<|im_end|>"),
    ([{"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]},
      {"role": "assistant", "content": [{"type": "text", "text": "2"}]}], None, "2<|im_end|>"),
    ([*question("1 + 1?"), {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}],
     True, "2<|im_end|>3<|im_end|>"),
])
def test_conversations_that_end_otherwise_and_contents_of_parts_are_trained(
    rows: Any, mode: bool | None, trained: str, tmp_path: Path
) -> None:
    given = [{"messages": rows}, {"messages": rows}]
    alike = len({type(message["content"]) for message in rows}) == 1  # Arrow holds nothing else
    for held in (given, Dataset.from_list(given)) if alike else (given,):
        (example, *_) = make(tmp_path, held, MODEL(), assistant_only_loss=mode).source.take(1)
        assert isinstance(example, Example) and "1 + 1?" in example.text
        pairs = zip(example.completion_ids, example.trained or [True] * 99, strict=False)
        assert MODEL().loaded.tokenizer.decode([token for token, counts in pairs if counts]) == trained


def test_settings_that_do_not_fit_the_model_or_the_data_are_refused(tmp_path: Path) -> None:
    model = load()
    with pytest.raises(ValueError, match="max_length is 129 and the context has 128 tokens"):
        make(tmp_path, model=model, max_length=129)
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        make(tmp_path, model=model, eval_strategy="steps")
    with pytest.raises(DataError, match="no row of the evaluation dataset can be used: empty completion"):
        make(tmp_path, model=model, eval_dataset=[{"prompt": "a", "completion": ""}])
    with pytest.raises(ValueError, match="this model has LoRA already"):
        SFTTrainer(model.get_base_model(), ROWS)


# Into GRPO.


def tagged(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 where a completion ends in the taught format."""
    return [float(re.search(r"\nAnswer = \d+$", completion[0]["content"]) is not None) for completion in completions]


def hand_over(model: FastPeftModel, folder: Path) -> None:
    """Sample, fine-tune, and sample again in GRPO: the first rollouts have the taught format."""
    config = GRPOConfig(output_dir=str(folder / "grpo"), num_generations=4, per_device_train_batch_size=16, max_steps=1,
                        max_completion_length=48, beta=0.1, disable_tqdm=True, learning_rate=1e-3, save_strategy="no")
    questions = [{"prompt": row["prompt"]} for row in FORMAT[:4]]
    before = GRPOTrainer(model, tagged, config, questions).rollout()
    assert not any(rollout.reward for group in before for rollout in group.rollouts)
    make(folder / "sft", FORMAT, model, max_steps=15, per_device_train_batch_size=8, learning_rate=5e-3).train()
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = GRPOTrainer(model, tagged, config, questions)
    groups = trainer.rollout()
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    assert sum(rewards) / len(rewards) > 0.8
    trainer.update(groups)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.ref_logprobs is not None:  # the reference is the model with what fine-tuning taught
            sampled = torch.tensor(rollout.rollout_logprobs)
            torch.testing.assert_close(rollout.ref_logprobs, sampled, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(value, base[name]) for name, value in model.named_parameters() if not value.requires_grad)


@pytest.mark.slow
def test_the_first_rollouts_of_grpo_have_the_taught_format_and_the_reference_keeps_it(tmp_path: Path) -> None:
    hand_over(load_form(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=NEEDS_VLLM)])
def test_an_engine_that_sampled_before_sees_what_was_taught(engine: str, tmp_path: Path) -> None:
    model = load_form(engine=engine)
    try:
        hand_over(model, tmp_path)
    finally:
        model.close_engine()
