"""Our rewards under TRL's own trainer, and TRL's rewards under our scorer."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from small_models import TINY, load_model, saved_reward_model
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward
from trl_runs import PLAIN

from lowmem_grpo import rewards
from lowmem_grpo.rewards.reward_model import with_models

READY = [
    rewards.number_equal(), rewards.proximity(), rewards.format_match().reward(name="in_format"),
    rewards.repetition_penalty(), rewards.length_near(4, 8), rewards.too_long(2),
    rewards.soft_overlong_penalty(12, 4), rewards.keyword_present(),
]


def said(texts: list[str], chat: bool = True) -> list[Any]:
    """The texts, or chats whose only message they are."""
    return [[{"role": "assistant", "content": text}] for text in texts] if chat else texts


def trainer_of(folder: Path, rows: list[dict[str, Any]], funcs: Any, model: str = "Llama", **more: Any) -> Any:
    """TRL's trainer with these rewards, four completions a step."""
    settings = PLAIN | {"output_dir": str(folder), "per_device_train_batch_size": 4, "num_generations": 4,
                        "logging_strategy": "steps", "logging_steps": 1}
    return GRPOTrainer(model=load_model(model), args=GRPOConfig(**settings), train_dataset=Dataset.from_list(rows),
                       reward_funcs=funcs, processing_class=AutoTokenizer.from_pretrained(TINY), **more)


@pytest.mark.parametrize("chat", [False, True])
def test_trl_can_train_on_a_ready_made_reward(tmp_path: Path, chat: bool) -> None:
    question = [{"role": "user", "content": "9 + 1"}] if chat else "9 + 1"
    trainer = trainer_of(tmp_path, [{"prompt": question, "answer": "10", "keyword": "ten"}] * 4, READY, "tiny")
    trainer.train()
    line = trainer.state.log_history[0]
    assert {f"rewards/{reward.__name__}/mean" for reward in READY} <= set(line)
    assert line["rewards/number_equal/mean"] == pytest.approx(6 * line["verdicts/number_equal"] - 3)


@pytest.mark.parametrize("chat", [False, True])
def test_trls_reward_path_and_our_scorer_pay_the_same(tmp_path: Path, chat: bool) -> None:
    texts = ["it is 10", "9", "ten", "<start_working_out>1<end_working_out><SOLUTION>10</SOLUTION>"]
    completions, prompts = said(texts, chat), [[{"role": "user", "content": "9 + 1"}] if chat else "9 + 1"] * 4
    ids = [[1, 2, 3], [4], [5, 6, 5, 6, 5, 6], [7] * 11]
    rows = [{"prompt": prompt, "answer": answer, "keyword": "ten"}
            for prompt, answer in zip(prompts, ["10", "10", "none", "10"], strict=True)]
    trainer = trainer_of(tmp_path, rows, READY)
    theirs = trainer._calculate_rewards(rows, prompts, completions, ids)
    columns = {name: [row[name] for row in rows] for name in ("answer", "keyword")}
    ours = rewards.RewardScorer(READY).score(prompts, completions, ids, columns, None).rewards
    found = [[None if pay != pay else round(pay, 5) for pay in column] for column in theirs.T.tolist()]
    assert found == [[None if pay is None else round(pay, 5) for pay in column] for column in ours.values()]
    assert found[0] == [3.0, -3.0, None, 3.0]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_trls_reward_path_and_ours_score_the_same_by_a_reward_model(tmp_path: Path, chat: bool, padded: bool) -> None:
    texts = ["it is 10", "9", "ten " * 20, ""]
    completions, prompts = said(texts, chat), [[{"role": "user", "content": "9 + 1"}] if chat else "9 + 1"] * 4
    judge, tokenizer = str(saved_reward_model(tmp_path / "judge")), AutoTokenizer.from_pretrained(TINY)
    if not padded:
        tokenizer.pad_token = None
    rows = [{"prompt": prompt} for prompt in prompts]
    trainer = trainer_of(tmp_path, rows, judge, reward_processing_classes=copy.copy(tokenizer))
    theirs = trainer._calculate_rewards(rows, prompts, completions, [[1]] * 4)[:, 0].tolist()
    scorer = rewards.RewardScorer(with_models([judge], tokenizer))
    assert scorer.names == trainer.reward_func_names == ["judge"]
    ours = scorer.score(prompts, completions, [[1]] * 4, {}, None).rewards["judge"]
    assert ours == pytest.approx(theirs, rel=1e-5) and len({round(score, 4) for score in theirs}) == 4


def test_a_reward_of_trl_can_be_scored_here() -> None:
    texts = ["<think>9 + 1</think>10", "10"]
    ids = [[1, 2, 1, 2, 1], [3] * 11]
    funcs = [think_format_reward, get_repetition_penalty_reward(2, -1.0), get_soft_overlong_punishment(12, 4)]
    scores = rewards.RewardScorer(funcs).score(["p"] * 2, said(texts), ids, {}, None)
    assert list(scores.rewards.values()) == [[1.0, 0.0], [-0.5, -0.9], [0.0, -0.75]] and not scores.converted


def test_trls_accuracy_reward_can_be_scored_here() -> None:
    pytest.importorskip("math_verify")
    from trl.rewards import accuracy_reward

    chats = said([r"\boxed{\frac{1}{2}}", r"\boxed{3}", r"\boxed{1}"])
    columns = {"solution": [r"\frac{1}{2}", r"\frac{1}{2}", "what?"]}
    scores = rewards.RewardScorer(accuracy_reward).score(["p"] * 3, chats, [[1]] * 3, columns, None)
    assert scores.rewards == {"accuracy_reward": [1.0, 0.0, None]}
    ours = rewards.math_match("solution").reward()(completions=chats, **columns)
    assert ours[:2] == [1.0, 0.0]


def test_a_thought_before_the_answer_is_paid_as_by_trl() -> None:
    texts = ["<think>a</think>b", "<think>\na\n</think>\nb", "<think></think>b", "<think>a<tag>b</think>c", "<think>a",
             "a</think>b", "a<think>b</think>c", "<think>a<think>b</think></think>c", "a", "",
             "<think>a</think>\nb\n<think>c</think>"]
    ours = rewards.format_match(("<think>", "</think>")).reward()
    assert ours(completions=said(texts)) == think_format_reward(said(texts))


@pytest.mark.parametrize("seed", range(3))
def test_repetition_is_paid_as_by_trl(seed: int) -> None:
    rng = random.Random(seed)
    ids = [[rng.randint(0, 4) for _ in range(rng.randint(0, 40))] for _ in range(100)]
    theirs = get_repetition_penalty_reward(3, -0.7)(completion_ids=ids)
    assert rewards.repetition_penalty(3, -0.7)(completions=[""] * 100, completion_ids=ids) == pytest.approx(theirs)
