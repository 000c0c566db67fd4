"""A reward adapter scores completions in the policy's base as transformers and peft score its training texts, leaves
the policy as it was, and is refused for another base or other tokens."""

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from small_models import TINY, scatter, shallow
from trainer_runs import ROWS, SMALL, TEXTS, adapter_of, load, moved, same
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lowmem_grpo import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, rewards
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.rows import build
from lowmem_grpo.runs.saved_adapter import AdapterError, RunError
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.utils import GIB


def saved_reward(folder: Path, names: Any = ("q_proj", "v_proj"), base: Any = None, spread: float = 0.3) -> Path:
    """A reward model that peft made, with the tokenizer beside it, as TRL saves it."""
    torch.manual_seed(2)
    base = base or shallow()
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=[*names], task_type="SEQ_CLS")
    made = scatter(scatter(peft.get_peft_model(model, config), spread), 0.05, of="score.modules_to_save")
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@torch.no_grad()
def plain_scores(folder: Path, texts: list[str]) -> list[float]:
    """By transformers and peft, one text at a time."""
    with warnings.catch_warnings(action="ignore"):
        base = AutoModelForSequenceClassification.from_pretrained(shallow(), num_labels=1, pad_token_id=None,
                                                                  dtype=torch.float32)
    model, tokenizer = peft.PeftModel.from_pretrained(base, folder).eval(), AutoTokenizer.from_pretrained(TINY)
    return [model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0].item()
            for text in texts]


def make(folder: Path, reward: Any, rows: Any = TEXTS, model: Any = None, **settings: Any) -> GRPOTrainer:
    return GRPOTrainer(model or moved(load()), reward, GRPOConfig(str(folder), **SMALL | settings), rows)


def whole(groups: list[RolloutGroup]) -> list[str]:
    """What RewardTrainer would read of these completions."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    made = []
    for group in groups:
        prompt = group.row["prompt"]
        for rollout in group.rollouts:
            answer = {"role": "assistant", "content": rollout.text}
            made.append(prompt + rollout.text + tokenizer.eos_token if isinstance(prompt, str) else
                        tokenizer.apply_chat_template([*prompt, answer], tokenize=False))
    return made


@pytest.mark.parametrize("rows", [TEXTS, ROWS], ids=["texts", "chats"])
@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 60}], ids=str)
def test_scores_are_those_of_transformers_and_peft_also_of_completions_cut_off(
    tmp_path: Path, rows: Any, settings: dict[str, Any],
) -> None:
    trainer = make(tmp_path / "run", rewards.from_adapter(saved_reward(tmp_path / "reward")), rows, **settings)
    groups = trainer.rollout()
    paid = [rollout.rewards["reward"] for group in groups for rollout in group.rollouts]
    assert "length" in {rollout.finish_reason for group in groups for rollout in group.rollouts}
    assert paid == pytest.approx(plain_scores(tmp_path / "reward", whole(groups)), abs=1e-5)
    assert len({*paid}) > 4


def test_the_policy_samples_and_trains_as_with_a_function_that_pays_the_same(tmp_path: Path) -> None:
    adapter = rewards.from_adapter(saved_reward(tmp_path / "reward"), name="taste")
    by_adapter = make(tmp_path / "adapter", [adapter, by_text], beta=0.1)
    paid: list[list[float]] = []
    original = adapter.pay
    adapter.pay = lambda *call: paid.append(original(*call)) or paid[-1]  # type: ignore[method-assign,func-returns-value]
    by_adapter.train()

    def taste(completions: list[Any], **_: Any) -> list[float]:
        return paid.pop(0)

    by_function = make(tmp_path / "function", [taste, by_text], beta=0.1)
    by_function.train()
    assert same(adapter_of(by_adapter.model), adapter_of(by_function.model)) and not paid
    names = {path.name for path in (tmp_path / "adapter/adapter").iterdir()}
    assert names == {path.name for path in (tmp_path / "function/adapter").iterdir()}


def by_text(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def test_a_trained_reward_model_is_found_by_its_run_and_pays_what_it_learnt(tmp_path: Path) -> None:
    pairs = [{"prompt": row["prompt"], "chosen": f"{n}7", "rejected": f"{n}!"} for n, row in enumerate(TEXTS)]
    RewardTrainer(load(), RewardConfig(str(tmp_path / "taste"), max_steps=12, per_device_train_batch_size=7,
                                       learning_rate=1e-2, disable_tqdm=True), train_dataset=pairs).train()
    reward = rewards.from_adapter(tmp_path / "taste")
    assert reward.__name__ == "taste"
    make(tmp_path / "run", reward)
    good, bad = (reward(prompts=[TEXTS[0]["prompt"]] * 2, completions=["57", "5!"]))
    assert good > bad + 1  # type: ignore[operator]


def test_two_reward_models_have_adapters_of_their_own_and_are_replaced_in_the_next_trainer(tmp_path: Path) -> None:
    folders = [saved_reward(tmp_path / name, spread=spread) for name, spread in (("one", 0.3), ("two", 0.6))]
    model = moved(load())
    trainer = make(tmp_path / "run", [rewards.from_adapter(folder) for folder in folders], model=model)
    paid = trainer.rollout()[0].rollouts[0].rewards
    assert paid.keys() == {"one", "two"} and paid["one"] != paid["two"]
    assert model.loaded.slots == ["reward0", "reward1"]
    make(tmp_path / "run", [rewards.from_adapter(folders[0])], model=model)
    assert sorted(model.loaded.slots) == ["reward0", "reward1"]


def test_scores_that_are_nan_are_no_rewards_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path / "run", [rewards.from_adapter(saved_reward(tmp_path / "reward")), by_text])
    with torch.no_grad():
        trainer.reward_funcs[0].slot.head.weight.fill_(torch.nan)
    caplog.set_level(logging.WARNING)
    groups = trainer.rollout()
    assert all(rollout.rewards["reward"] is None for group in groups for rollout in group.rollouts)
    assert "score that is not finite, and no reward" in caplog.text
    assert trainer.update(groups)["nonfinite/steps"] == 0


def test_its_bytes_are_in_the_plan() -> None:
    shape, card = ModelShape.from_config(named_config("qwen2.5-3b")), device("24GiB")
    usual = {"max_tokens": 640, "mlp_tile": 4096, "chunk_rows": 1024, "optim": "adamw_8bit", "host_embedding": False}
    without, own = (build(shape, RunSettings(640, **usual | more), card)  # type: ignore[arg-type]
                    for more in ({}, {"reward_adapter_bytes": GIB}))
    assert own.train_allocated - without.train_allocated == GIB
    assert {row.name: (row.rollout, row.train) for row in own.rows}["reward adapters"] == (GIB, GIB)


def test_what_cannot_score_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no"):
        rewards.from_adapter(tmp_path / "nothing")
    load().save_pretrained(tmp_path / "words")
    with pytest.raises(AdapterError, match="it is no reward model"):
        rewards.from_adapter(tmp_path / "words")
    other = make_base(tmp_path / "other")
    with pytest.raises(AdapterError, match=r"was trained on .*other, and this model is .*any_base=True"):
        make(tmp_path / "run", rewards.from_adapter(saved_reward(tmp_path / "elsewhere", base=other)))
    make(tmp_path / "run", rewards.from_adapter(tmp_path / "elsewhere", any_base=True))
    with pytest.raises(AdapterError, match="layers that the one in the model lacks"):
        make(tmp_path / "run", rewards.from_adapter(saved_reward(tmp_path / "more")),
             model=load(target_modules=("q_proj",)))
    tokens = (tmp_path / "more/tokenizer.json").read_text()
    (tmp_path / "more/tokenizer.json").write_text(tokens.replace('"7":', '"@":', 1).replace('"8":', '"7":', 1)
                                                  .replace('"@":', '"8":', 1))
    with pytest.raises(AdapterError, match="has another tokenizer than the policy"):
        make(tmp_path / "run", rewards.from_adapter(tmp_path / "more"))
    with pytest.raises(TypeError, match="give it to GRPOTrainer"):
        rewards.from_adapter(tmp_path / "elsewhere")(prompts=["a"], completions=["b"])
    with pytest.raises(ValueError, match="train_while_sampling"):
        make(tmp_path / "run", rewards.from_adapter(saved_reward(tmp_path / "reward")), train_while_sampling=True)


def make_base(folder: Path) -> Path:
    """The same weights under another name."""
    return Path(shutil.copytree(shallow(), folder))
