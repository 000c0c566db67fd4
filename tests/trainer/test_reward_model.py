"""RewardTrainer: learns to tell sides apart, from every form of a model; its adapters score alike in plain transformers
and peft; and what cannot be trained, or used as a model of words, is refused by name."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from recipe_runs import invoke
from run_pages import Page
from small_models import saved_reward_model, scatter, shallow
from torch import Tensor
from trainer_runs import load
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTTrainer
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.memory.rows import fixed_rows
from lowmem_grpo.memory.training_step import CHUNK, StepShape
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.score_head import group_to_score, score_of_hidden
from lowmem_grpo.runs.saved_adapter import AdapterError
from lowmem_grpo.trainer import run_memory
from lowmem_grpo.trainer.nonfinite import NonFiniteError
from lowmem_grpo.utils import UnsupportedError
from tests.attacks.small_run import StopAt, differences

SUMS = [(a, b) for a in range(1, 9) for b in range(1, 5)]
ROWS = [{"prompt": f"{a} + {b} = ", "chosen": f"{a + b}?", "rejected": f"{a + b}!"} for a, b in SUMS]
SETTINGS: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
                            "disable_tqdm": True, "save_strategy": "no"}


def make(folder: Path, model: Any = None, rows: Any = ROWS, **settings: Any) -> RewardTrainer:
    names = ("callbacks", "eval_dataset", "processing_class", "peft_config")
    parts = {name: settings.pop(name) for name in names if name in settings}
    return RewardTrainer(load() if model is None else model, RewardConfig(str(folder), **SETTINGS | settings),
                         train_dataset=rows, **parts)


def classifier(path: Any = None, labels: int = 1) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return AutoModelForSequenceClassification.from_pretrained(path or shallow(), num_labels=labels,
                                                                  dtype=torch.float32, pad_token_id=None)


def ids_of(texts: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(shallow())
    return [list(tokenizer(text + tokenizer.eos_token).input_ids) for text in texts]


TEXTS = [row["prompt"] + row[side] for row in ROWS[:3] for side in ("chosen", "rejected")]


@torch.no_grad()
def scores(trainer: RewardTrainer) -> Tensor:
    """(N,) of TEXTS, sorted, since packing orders them."""
    (batch,) = pack([group_to_score(ids_of(TEXTS))])
    return score_of_hidden(trainer.policy.head, trainer.policy.at_trained(batch)[0]).sort().values


@torch.no_grad()
def plain_scores(folder: Path) -> Tensor:
    model = peft.PeftModel.from_pretrained(classifier(), folder).eval()
    return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in ids_of(TEXTS)]).sort().values


def test_held_out_pairs_are_told_apart_and_the_adapter_scores_alike_in_transformers(tmp_path: Path) -> None:
    trainer = make(tmp_path, rows=ROWS[:24], eval_dataset=ROWS[24:], eval_strategy="steps", eval_steps=15, max_steps=15,
                   per_device_train_batch_size=8)
    assert trainer.evaluate()["eval_accuracy"] < 0.9
    output = trainer.train()
    last = [line for line in trainer.state.log_history if "eval_accuracy" in line][-1]
    assert (last["eval_accuracy"], output.finished) == (1.0, True) and last["eval_margin"] > 0.5
    assert (scores(trainer) - plain_scores(tmp_path / "adapter")).abs().max() < 1e-5
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    card = (tmp_path / "adapter/README.md").read_text()
    assert "# Reward model on " in card and "AutoModelForSequenceClassification" in card
    assert "text-generation" not in card
    page = Page(tmp_path / "report.html")
    assert {"Pairs told apart", "Scores", "Loss"} <= {*page.titles()} and "reward model" in page.prose


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3,
                "eval_dataset": ROWS[:4]}
    make(tmp_path / "whole", load(lora_dropout=0.1), disable_dropout=False, **settings).train()
    make(tmp_path / "parts", load(lora_dropout=0.1), disable_dropout=False, callbacks=[StopAt(2)], **settings).train()
    again = make(tmp_path / "parts", load(lora_dropout=0.1), disable_dropout=False, **settings)
    assert again.train(resume_from_checkpoint=True).finished
    assert differences(tmp_path / "parts", tmp_path / "whole") == []


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
SEQ_CLS = peft.LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"])


def forms(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The forms in which a model may be given."""
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=64, load_in_4bit=False)
    stored = saved_reward_model(folder / "stored", pad_token_id=2)
    return {
        "a name": (str(shallow()), {}), "ours, bare": (bare, {}), "ours, with LoRA": (load(), {}),
        "a classifier": (classifier(), {"peft_config": SEQ_CLS}),
        "a classifier of peft": (peft.get_peft_model(classifier(), SEQ_CLS), {}),
        "a stored classifier": (str(stored), {"peft_config": peft.LoraConfig(**LORA, task_type="SEQ_CLS")}),
    }


@pytest.mark.parametrize("form", ["a name", "ours, bare", "ours, with LoRA", "a classifier", "a classifier of peft",
                                  "a stored classifier"])
def test_every_form_of_a_model_is_trained_and_saved(form: str, tmp_path: Path) -> None:
    model, parts = forms(tmp_path)[form]
    trainer = make(tmp_path / "run", model, **parts)
    trainer.train()
    config = peft.PeftConfig.from_pretrained(tmp_path / "run/adapter")
    assert (str(config.task_type), config.modules_to_save) == ("SEQ_CLS", ["score"])
    if form != "a stored classifier":
        assert (scores(trainer) - plain_scores(tmp_path / "run/adapter")).abs().max() < 1e-5


def test_the_head_of_a_classifier_is_the_start_and_no_pass_reads_a_vocabulary(tmp_path: Path) -> None:
    model = scatter(peft.get_peft_model(classifier(), SEQ_CLS), 0.1, of="score.modules_to_save")
    row = model.base_model.model.score.modules_to_save["default"].weight.detach().clone()
    trainer = make(tmp_path, model)
    assert torch.equal(trainer.policy.head.weight, row)
    base: Any = trainer.policy.base
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    base.get_output_embeddings().register_forward_hook(lambda *_: pytest.fail("the head of the vocabulary was read"))
    assert trainer.step()["loss"] > 0


def test_a_second_trainer_goes_on_from_the_head_of_the_first(tmp_path: Path) -> None:
    first = make(tmp_path / "first", model := load())
    first.train()
    row = first.policy.head.weight.detach().clone()
    second = make(tmp_path / "second", model)
    assert torch.equal(second.policy.head.weight, row)
    assert model.peft_config["default"].modules_to_save == ["score"]


def test_an_untrained_head_follows_the_seed(tmp_path: Path) -> None:
    rows = [make(tmp_path, seed=seed).policy.head.weight.detach().clone() for seed in (1, 1, 2)]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_settings_of_a_command_line_and_trls_calls_afterwards(tmp_path: Path, capsys: Any) -> None:
    """As TRL's script for reward models makes them."""
    words = ["--output_dir", str(tmp_path), "--max_steps", "1", "--center_rewards_coefficient", "0.01", "--max_length",
             "64", "--eval_strategy", "steps", "--eval_steps", "1", "--dataset_num_proc", "2"]
    (config,) = HfArgumentParser(RewardConfig).parse_args_into_dataclasses(words)
    trainer = RewardTrainer(model=classifier(), args=config, train_dataset=ROWS, eval_dataset=ROWS[:2],
                            peft_config=SEQ_CLS)
    trainer.train()
    trainer.save_model(config.output_dir)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    assert {"eval_loss", "eval_accuracy", "eval_margin", "eval_min_reward"} <= json.loads(
        (tmp_path / "eval_results.json").read_text()).keys()
    assert (plain_scores(tmp_path) - plain_scores(tmp_path / "adapter")).abs().max() == 0


def test_a_config_without_the_head_is_told_what_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, classifier(), peft_config=peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))
    assert "the score head is trained and saved all the same" in caplog.text
    caplog.clear()
    make(tmp_path, classifier(), peft_config=SEQ_CLS)
    assert "score head" not in caplog.text


def test_pairs_that_cannot_be_compared_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "", "rejected": "b"},
           {"prompt": "a", "chosen": "b" * 80, "rejected": "c"}, ROWS[0] | {"margin": "much"}]
    trainer = make(tmp_path, rows=[*odd, *ROWS[:8]], max_length=32, max_steps=-1, num_train_epochs=1)
    metrics = trainer.train().metrics
    assert trainer.state.global_step == 2 and metrics["train_loss"] < 10
    assert sum(trainer.source.skipped.values()) == 4
    with pytest.raises(DataError, match="no row"):
        make(tmp_path, rows=odd[:2]).train()


def test_pairs_of_several_batches_that_are_trained_at_once_stay_pairs(tmp_path: Path) -> None:
    rows, found = ROWS[:4], []
    for batches in (1, 2):
        trainer = make(tmp_path, rows=rows, per_device_train_batch_size=4 // batches, shuffle_dataset=False)
        groups = [group for _ in range(batches) for group in trainer.next_groups()]
        found.append((trainer.forward_backward(groups), trainer.policy.head.linear.weight.grad.clone()))
    (first, gradient), (second, same) = found
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6) and torch.allclose(gradient, same, atol=1e-6)


def test_a_model_is_as_before_if_its_rows_cannot_be_read(tmp_path: Path) -> None:
    model = load()
    with pytest.raises(DataError):
        make(tmp_path, model, rows=[{"prompt": "a", "completion": "b"}])
    model.save_lora(tmp_path / "adapter")
    assert "score" not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert model.fast_generate("3")


def test_scores_that_are_nan_stop_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, nonfinite_steps=2, max_steps=5)
    with torch.no_grad():
        trainer.policy.head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        trainer.train()


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_labels=3, and a reward model scores with one number"):
        make(tmp_path, classifier(labels=3), peft_config=SEQ_CLS)
    with pytest.raises(ValueError, match="compute_metrics"):
        make(tmp_path).__class__(load(), train_dataset=ROWS, compute_metrics=len)
    with pytest.raises(ValueError, match="pad_token"):
        RewardConfig(pad_token="x")
    with pytest.raises(TypeError, match="no option 'center_reward'; did you mean center_rewards_coefficient"):
        RewardConfig(center_reward=0.1)
    with pytest.raises(DataError, match="needed are chosen and rejected"):
        make(tmp_path, rows=[{"prompt": "a", "completion": "b"}])


def test_a_reward_model_is_not_sampled_from_merged_or_trained_as_a_model_of_words(tmp_path: Path) -> None:
    trainer = make(tmp_path, model := load(), save_strategy="no")
    trainer.train()
    for refused in (lambda: model.fast_generate("3"), lambda: model.save_pretrained_merged(tmp_path / "merged"),
                    lambda: model.save_pretrained_gguf(tmp_path / "gguf", quantization_method="bf16")):
        with pytest.raises(UnsupportedError, match=r"is a reward model and cannot be .*rewards.from_adapter"):
            refused()
    with pytest.raises(ValueError, match="that of a reward model, which RewardTrainer trains"):
        SFTTrainer(model, [{"text": "a"}])
    with pytest.raises(ValueError, match="that of a reward model"):
        GRPOTrainer(model, len, GRPOConfig(str(tmp_path / "grpo")), [{"prompt": "a"}])
    result = invoke("export", tmp_path / "adapter", "--out", tmp_path / "out")
    assert result.exit_code and "is a reward model" in result.output, result.output
    with pytest.raises(AdapterError, match="is a reward model"):
        FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), load_in_4bit=False)


def test_the_plan_counts_no_logits_and_no_head_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_memory, "this_card", lambda _: device("16GiB"))
    trainer = make(tmp_path, model=str(shallow()))
    found = run_memory.plan_training(RunMemory(), trainer.model, trainer.args, trainer.policy, "transformers", 128)
    assert found is not None
    shape, ours = replace(ModelShape.from_config(trainer.model.config), tied=False), found.settings
    for settings, held in ((ours, 0), (replace(ours, logits=True, own_head=True), shape.table_bytes)):
        assert sum(row.train for row in fixed_rows(shape, settings) if row.name == "head") == held
        assert bool(StepShape(shape, settings, 128, 0).head()[CHUNK]) == bool(held)
