"""Reward models: their scores are those of plain transformers, and what cannot score is refused before a run."""

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from card import gpu
from small_models import SHAPE, TINY, random_model, saved_reward_model
from trainer_runs import ROWS, SMALL, digit_sum, load
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from lowmem_grpo import GRPOConfig, GRPOTrainer
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.rows import build
from lowmem_grpo.models.pretrained import linears_in_4bit
from lowmem_grpo.rewards import RewardError, RewardScorer, check, reward_model
from lowmem_grpo.rewards.reward_model import RewardModel, with_models
from lowmem_grpo.trainer.preflight.checks import PreflightError
from lowmem_grpo.utils import GIB

TURN = [{"role": "user", "content": "9 + 1"}]
PROMPTS: list[Any] = ["9 + 1 is", "Start with 3.", TURN, [{"role": "system", "content": "Reckon."}, *TURN]]
ANSWERS = ["10", "it is ten, and " * 9, "", "10"]
COMPLETIONS = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
               for prompt, text in zip(PROMPTS, ANSWERS, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_reward_model(tmp_path_factory.mktemp("org") / "judge-0.1B")


def model_of(folder: Path, **options: Any) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, **options)


def one_by_one(folder: Path, prompts: list[Any] = PROMPTS, completions: list[Any] = COMPLETIONS) -> list[float]:
    """The scores by plain transformers, each text alone and without padding."""
    model, tokenizer = model_of(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        text = prompt + completion if isinstance(prompt, str) else \
            tokenizer.apply_chat_template(prompt + completion, tokenize=False)
        with torch.no_grad():
            scores.append(float(model(tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids).logits))
    return scores


def scored(given: Any, prompts: list[Any] = PROMPTS, completions: list[Any] = COMPLETIONS) -> list[float | None]:
    (column,) = RewardScorer(given).score(prompts, completions, [[1]] * len(prompts), {}, None).rewards.values()
    return column


def test_scores_are_those_of_each_text_alone_by_name_and_by_a_frozen_object_without_dropout(folder: Path) -> None:
    expected, model = one_by_one(folder), model_of(folder, attention_dropout=0.5).train()
    assert len({round(score, 4) for score in expected}) == 4
    assert scored(str(folder)) == pytest.approx(expected, rel=1e-5)
    assert scored([model]) == pytest.approx(expected, rel=1e-5)
    assert not model.training and not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_rows_are_scored_in_batches_which_change_no_score(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_model, "TOKENS", 60)
    judge, sizes = RewardModel(str(folder)), []
    whole = judge.forward
    monkeypatch.setattr(judge, "forward", lambda texts: sizes.append(len(texts)) or whole(texts))
    assert scored(judge, PROMPTS * 3, COMPLETIONS * 3) == pytest.approx(one_by_one(folder) * 3, rel=1e-5)
    assert sum(sizes) == 12 and max(sizes) > 1 and len(sizes) > 3, "several rows at once, and a long one alone"


def test_fewer_rows_are_scored_at_once_where_memory_runs_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge, sizes = RewardModel(str(folder)), []
    whole = judge.forward

    def forward(texts: list[str]) -> list[float]:
        sizes.append(len(texts))
        if len(texts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(texts)

    monkeypatch.setattr(judge, "forward", forward)
    assert scored(judge) == pytest.approx(one_by_one(folder), rel=1e-5)
    assert sizes == [4, 2, 1, 1, 1, 1] and "out of memory in the reward model judge-0.1B" in caplog.text


def test_a_tokenizer_without_padding_pads_with_its_end_and_the_model_looks_for_that(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    model = model_of(folder)
    (judge,) = with_models([model], tokenizer)
    assert judge.tokenizer is tokenizer and tokenizer.pad_token == tokenizer.eos_token
    assert model.config.pad_token_id == tokenizer.eos_token_id
    assert scored(judge, PROMPTS[:2], COMPLETIONS[:2]) == pytest.approx(one_by_one(folder)[:2], rel=1e-5)


def test_a_model_in_4_bits_stays_so(folder: Path, tmp_path: Path) -> None:
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    by_name = RewardModel(str(folder), init={"quantization_config": how})
    by_name.load(torch.device("cpu"))
    assert len(list(linears_in_4bit(by_name.model))) == 14 and by_name.weight_bytes < RewardModel(
        model_of(folder)).weight_bytes
    model_of(folder, quantization_config=how).dequantize().save_pretrained(tmp_path)  # the same numbers in 32 bits
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    expected = one_by_one(tmp_path)
    assert scored(by_name) == pytest.approx(expected, rel=1e-4)
    assert scored(model_of(folder, quantization_config=how)) == pytest.approx(expected, rel=1e-4)
    assert expected != pytest.approx(one_by_one(folder), rel=1e-2), "4 bits are other weights"


def test_a_model_that_reads_both_ways_scores_too_and_says_how_long_a_text_may_be(tmp_path: Path) -> None:
    folder = saved_reward_model(tmp_path / "bert", "Bert", max_position_embeddings=40, type_vocab_size=2)
    assert scored(str(folder), PROMPTS[:2], ["10", "9"]) == pytest.approx(
        one_by_one(folder, PROMPTS[:2], ["10", "9"]), rel=1e-5)
    with pytest.raises(RewardError, match=r"has 5\d tokens, and the reward model has 40 positions: lower max_comp"):
        scored(str(folder), ["9" * 50], ["10"])


# What is refused


def test_what_cannot_score_is_refused_by_name_before_its_weights_are_read(folder: Path, tmp_path: Path) -> None:
    two = saved_reward_model(tmp_path / "two", num_labels=2)
    bare = AutoTokenizer.from_pretrained(folder)
    bare.add_tokens([f"<{number}>" for number in range(100)])
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        ("tiny", None, TypeError, "reward_funcs holds tiny, a Qwen2ForCausalLM; a reward model is a model for sequence "
         r"classification with num_labels=1"),
        (random_model("Llama"), None, TypeError, "a LlamaForCausalLM; a reward model is"),
        (load(), None, TypeError, "a FastPeftModel; a reward model is"),
        (torch.nn.Linear(1, 1), None, TypeError, "holds Linear, a Linear; a reward model is"),
        (str(two), None, ValueError, "the reward model two has 2 labels"),
        (model_of(two), None, ValueError, "the reward model two has 2 labels"),
        (str(tmp_path / "none"), None, OSError, "no model .*none"),
        (str(folder), bare, ValueError, r"tokenizer of the reward model judge-0\.1B has 422 tokens, and the model 384"),
        (LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)), None, ValueError,
         "LlamaForSequenceClassification has no tokenizer beside it"),
    ]
    for given, tokenizer, error, message in refused:
        with pytest.raises(error, match=message):
            with_models([given], tokenizer)
    with pytest.raises(ValueError, match="2 reward_processing_classes and 1 reward functions: the numbers must match"):
        with_models([str(folder)], [None, None])


def test_a_head_that_would_be_random_is_refused(folder: Path, tmp_path: Path) -> None:
    model_of(folder).model.save_pretrained(tmp_path)  # without its head
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    judge = RewardModel(str(tmp_path))
    with pytest.raises(ValueError, match=r"lacks score\.weight, which would be random"):
        judge.load(torch.device("cpu"))


# In a run


def run(folder: Path, reward_funcs: Any, processing_classes: Any) -> GRPOTrainer:
    config = GRPOConfig(output_dir=str(folder), report_to="none", **(SMALL | {"max_steps": 1}))
    return GRPOTrainer(load(), reward_funcs, config, ROWS, reward_processing_classes=processing_classes)


def test_a_run_beside_a_function_logs_its_rewards_under_its_name(folder: Path, tmp_path: Path) -> None:
    trainer = run(tmp_path, [digit_sum, str(folder)], [None, None])
    assert trainer.reward_func_names == ["digit_sum", "judge-0.1B"] and trainer.reward_weights.tolist() == [1.0, 1.0]
    assert trainer.reward_processing_classes[0] is None and len(trainer.reward_processing_classes) == 2
    trainer.train()
    sampled = [(group.row["prompt"], rollout) for group in trainer.sampled for rollout in group.rollouts]
    chats = [[{"role": "assistant", "content": rollout.text}] for _, rollout in sampled]
    expected = one_by_one(folder, [prompt for prompt, _ in sampled], chats)
    assert [rollout.rewards["judge-0.1B"] for _, rollout in sampled] == pytest.approx(expected, abs=1e-5)
    line = trainer.state.log_history[0]
    assert line["rewards/judge-0.1B/mean"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_a_chat_that_the_tokenizer_cannot_render_is_found_before_step_one(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    trainer = run(tmp_path, str(folder), tokenizer)
    with pytest.raises(PreflightError, match="the reward model's tokenizer has no chat template"):
        trainer.train()


def test_rewards_check_tries_it(folder: Path) -> None:
    found = check(str(folder), ROWS, load(), GRPOConfig(num_generations=2, max_completion_length=4), groups=2,
                  show=False)
    assert [trial.name for trial in found.trials] == ["judge-0.1B"] and found.trials[0].error is None
    assert len(found.trials[0].pays) == 4


# Memory


def test_the_plan_counts_it_where_it_scores_and_where_it_waits() -> None:
    shape, card = ModelShape.from_config(named_config("qwen2.5-3b")), device("24GiB")
    settings = RunSettings(640, max_tokens=640, mlp_tile=4096, chunk_rows=1024, optim="adamw_8bit",
                           host_embedding=False)
    without = build(shape, settings, card)
    small, large = (build(shape, RunSettings(**(vars(settings) | {"reward_bytes": size, "reward_host_bytes": 3 * GIB})),
                          card) for size in (1000, 8 * GIB))
    assert small.train == without.train and small.rollout == without.rollout, "another moment holds more"
    assert small.host - without.host == 3 * GIB
    assert large.moment == "scoring" and {row.name: row.train for row in large.rows}["reward model"] == 8 * GIB
    fixed = sum(row.train for row in without.rows if row.name in ("weights", "embedding", "head", "adapters",
                                                                  "gradients", "optimizer"))
    assert large.train_allocated == fixed + 8 * GIB


def test_its_bytes_are_those_of_its_tensors(folder: Path) -> None:
    judge = RewardModel(model_of(folder))
    parameters = sum(p.numel() for p in judge.model.parameters())
    assert 4 * parameters <= judge.weight_bytes < 4 * parameters + 1000, "and a few numbers of the positions"
    assert judge.scoring_bytes == judge.weight_bytes + 4 * 8192 * (2 * 48 + 6 * 32)


@gpu
@pytest.mark.parametrize("bits", [4, 16])
def test_it_waits_on_the_host_and_scores_on_the_card(
    bits: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")} if bits == 4 else {}
    judge = RewardModel(str(folder), init=how)
    gc.collect()  # what earlier tests left
    before = torch.cuda.memory_allocated()
    with caplog.at_level(logging.INFO, logger="lowmem_grpo"):
        judge.load(torch.device("cuda"))
    assert "waits on the host" in caplog.text
    first = scored(judge)
    assert torch.cuda.memory_allocated() == before and {p.device.type for p in judge.model.parameters()} == {"cpu"}
    assert scored(judge) == first, "moved twice, it is the same"
    assert first == pytest.approx(one_by_one(folder), abs=1e-4 if bits == 16 else 10.0)
