"""Evaluations: their loss by hand and by TRL, several datasets, streams, and the metric that says what is best."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from naive_loss import LONGEST, example
from trainer_runs import ROWS, adapter, digit_sum, load, make, moved, naive_logprobs, plain_peft, same

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.rollout import assessment
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.types import RolloutGroup

TEXTS = [{"prompt": f"Start with {n}. Add {n + 3}.\n", "completion": f"{n} + {n + 3} = {2 * n + 3}"} for n in range(6)]
TIMED = ("runtime", "per_second")


def test_an_evaluation_has_the_metrics_of_every_loss_type() -> None:
    for name in LOSS_TYPES:
        metrics = grpo_loss(**example(), loss_type=name, max_completion_length=LONGEST).metrics
        assert {metric.partition("/")[0] for metric in metrics} <= {*assessment.OF_LOSS}, "FIRST_WORDS in loss_metrics"


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.endswith(TIMED)}


def taught(folder: Path, eval_dataset: Any = None, **settings: Any) -> SFTTrainer:
    config = SFTConfig(output_dir=str(folder), max_steps=1, disable_tqdm=True, **settings)
    return SFTTrainer(load(), TEXTS, config, eval_dataset=eval_dataset)


def sampled(trainer: Any) -> list[RolloutGroup]:
    """What an evaluation samples, scored."""
    found: list[RolloutGroup] = []

    def keep(groups: list[RolloutGroup]) -> dict[str, float]:
        found.extend(groups)
        return {}

    trainer.evaluation.run(trainer.eval_sets, keep)
    return found


def test_the_loss_of_an_evaluation_is_that_of_one_step_on_what_it_sampled(tmp_path: Path) -> None:
    """Written out: on-policy the ratio is 1, so dapo's loss is -sum A over all tokens / tokens + beta k3."""
    trainer = make(tmp_path / "run", model=moved(load(lora_dropout=0.5)), eval_dataset=ROWS[:2], beta=0.1)
    begun = plain_peft(trainer.model, tmp_path / "begun")
    with torch.no_grad():
        for name, value in trainer.model.named_parameters():
            if "lora_B" in name:
                value.mul_(1.5)
    trainer.weights_changed()
    policy, metrics = plain_peft(trainer.model, tmp_path / "policy"), trainer.evaluate()
    total, kls = 0.0, []
    for group in sampled(trainer):
        assert len(group.rollouts) == trainer.args.num_generations
        for rollout in group.rollouts:
            total -= rollout.advantage * len(rollout.completion_ids)
            logp, ref = (naive_logprobs(one, group.prompt_ids, rollout.completion_ids).detach()
                         for one in (policy, begun))
            kls.append((ref - logp).exp() - 1 - (ref - logp))
    kl = float(torch.cat(kls).mean())
    assert metrics["eval_kl"] == pytest.approx(kl, rel=1e-3) and kl > 1e-5
    assert metrics["eval_loss"] == pytest.approx(total / sum(map(len, kls)) + 0.1 * kl, rel=1e-3)
    assert metrics["eval_clip_ratio/region_mean"] == 0 and metrics["eval_entropy"] > 0
    assert metrics["eval_samples_per_second"] == pytest.approx(2 / metrics["eval_runtime"])
    assert metrics["eval_steps_per_second"] == pytest.approx(1 / metrics["eval_runtime"])
    assert metrics["eval_num_tokens"] == trainer.state.num_tokens == 0 and trainer.model.training


def test_every_evaluation_has_what_the_constructor_knows_of(tmp_path: Path) -> None:
    for number, trainer in enumerate((make(tmp_path / "g", eval_dataset=ROWS[:1]), taught(tmp_path / "s", TEXTS[:2]))):
        assert {f"eval_{name}" for name in trainer.evaluation_names()} <= trainer.evaluate().keys(), number


def of_both(rows: list[dict[str, Any]]) -> list[Any]:
    """The same two datasets as a dict, and as what the library datasets has."""
    a, b = Dataset.from_list(rows[:1]), Dataset.from_list(rows[1:3])
    streams = {"a": a.to_iterable_dataset(), "b": b.to_iterable_dataset()}
    return [{"a": rows[:1], "b": rows[1:3]}, DatasetDict(a=a, b=b), streams, IterableDatasetDict(streams)]


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.every(2)
def test_several_datasets_are_evaluated_each_under_its_name(kind: int, tmp_path: Path) -> None:
    given, alone = of_both(ROWS)[kind], make(tmp_path / "alone")
    trainer = make(tmp_path / "run", eval_dataset=given)
    found = trainer.evaluate()
    assert trainer.eval_dataset is given and len(trainer.state.log_history) == 2
    for name, rows in (("a", ROWS[:1]), ("b", ROWS[1:3])):
        wanted = untimed(alone.evaluate(rows))
        assert {key.replace("eval_", f"eval_{name}_"): value for key, value in wanted.items()}.items() <= found.items()
        assert untimed(trainer.evaluate(name)) == wanted  # by its name, as in transformers
    assert untimed(alone.evaluate(given)) == untimed(found)


def test_a_stream_is_read_to_its_end_and_one_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Dataset.from_list(TEXTS[:3]).to_iterable_dataset()
    whole = taught(tmp_path / "rows", TEXTS[:3]).evaluate()
    assert untimed(taught(tmp_path / "stream", stream).evaluate()) == untimed(whole)
    monkeypatch.setattr(assessment, "LONGEST", 5)
    with pytest.raises(DataError, match=r"eval_dataset\['all'\] is a stream of more than 5 rows; pass list"):
        taught(tmp_path / "long", {"all": lambda: chain.from_iterable(iter(lambda: TEXTS, None))})


def test_the_best_checkpoint_may_be_that_of_the_lowest_evaluation_loss(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
                "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "beta": 0.1}
    trainer = make(tmp_path, eval_dataset=ROWS[:2], **settings)
    trainer.train()
    losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    assert len(losses) == 2 and trainer.state.best_metric == min(losses.values())
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{min(losses, key=losses.__getitem__)}")


def logged(completions: list[Any], log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("accuracy", 0.5)
    return digit_sum(completions)


@pytest.mark.parametrize(("reward", "settings", "message"), [
    (digit_sum, {"metric_for_best_model": "rewards/digits/mean"}, "no evaluation has a metric 'eval_rewards/digits/m"),
    (digit_sum, {"metric_for_best_model": "eval_accuracy"}, "eval_accuracy.*it has eval_completions/.*eval_rewards/"),
    (digit_sum, {"metric_for_best_model": "kl"}, "has a metric 'eval_kl'"),
    (logged, {"metric_for_best_model": "acc"}, ""),
    (digit_sum, {"metric_for_best_model": "kl", "beta": 0.1}, ""),
    (digit_sum, {"metric_for_best_model": "clip_ratio/high_mean"}, ""),
    (digit_sum, {"metric_for_best_model": "loss", "eval_dataset": {"a": ROWS, "b": ROWS}}, "eval_a_loss.*same of b"),
    (digit_sum, {"metric_for_best_model": "eval_b_loss", "eval_dataset": {"a": ROWS, "b": ROWS}}, ""),
])
def test_a_metric_that_no_evaluation_has_is_refused_by_the_constructor(
    reward: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if not message:
        make(tmp_path, reward, **settings)
        return
    with pytest.raises(ValueError, match=message):
        make(tmp_path, reward, **settings)


def test_an_evaluation_at_the_start_comes_before_the_first_step_and_changes_no_step(tmp_path: Path) -> None:
    plain, trainer = make(tmp_path / "plain"), make(tmp_path / "run", eval_dataset=ROWS[:1], eval_on_start=True)
    plain.train()
    trainer.train()
    assert trainer.state.log_history[0]["step"] == 0 and "eval_loss" in trainer.state.log_history[0]
    assert same(adapter(plain), adapter(trainer))
    with pytest.raises(ValueError, match="eval_on_start is True, which needs an eval_dataset"):
        make(tmp_path / "none", eval_on_start=True)


def test_epochs_say_when_to_evaluate_and_to_save(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, disable_tqdm=True,
                       eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
                       metric_for_best_model="loss")
    trainer = SFTTrainer(load(), TEXTS, config, eval_dataset=TEXTS[:2])
    trainer.train()  # 6 rows: an epoch has a batch of 4 and one of 2
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [2, 4]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]


def test_accuracy_is_the_share_of_trained_tokens_that_the_model_finds_likeliest(tmp_path: Path) -> None:
    trainer = taught(tmp_path, TEXTS[:4])
    plain, right, entropies = plain_peft(trainer.model, tmp_path / "plain"), [], []
    for group in trainer.eval_sets:
        (rollout,) = group.rollouts
        ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logits = plain(ids).logits[0, len(group.prompt_ids) - 1 : -1]
        right += (logits.argmax(-1) == torch.tensor(rollout.completion_ids)).tolist()
        entropies += torch.distributions.Categorical(logits=logits).entropy().tolist()
    found, share = trainer.evaluate(), sum(right) / len(right)
    assert 0 < share < 1 and found["eval_mean_token_accuracy"] == pytest.approx(share)
    assert found["eval_entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert 0 < trainer.update(trainer.eval_sets)["mean_token_accuracy"] == pytest.approx(share)
