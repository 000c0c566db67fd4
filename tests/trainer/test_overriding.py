"""A subclass of a trainer: what our loop calls counts, and what it never calls is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import not_refused
from trainer_runs import ROWS, SMALL, digit_sum, load

from lowmem_grpo import GRPOConfig, GRPOTrainer, RLOOTrainer, SFTConfig, SFTTrainer
from lowmem_grpo.rewards.calling.scorer import RewardError
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.trl_api import NEVER_CALLED
from lowmem_grpo.utils import UnsupportedError


def method(*_: Any) -> None:
    """Nothing."""


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer, SFTTrainer])
@pytest.mark.parametrize("name", ["compute_loss", "training_step", "get_train_dataloader", "prediction_step",
                                  "_prepare_inputs", "_generate"])
def test_a_method_that_is_never_called_is_refused_when_the_class_is_made(trainer: type, name: str) -> None:
    with pytest.raises(TypeError, match=f"^Mine defines {name}, which is never called here: .{{20}}"):
        type("Mine", (trainer,), {name: method})
    with pytest.raises(TypeError, match=f"Mine defines {name}"):
        type("Mine", (type("Mixin", (), {name: method}), trainer), {})


def test_all_useless_methods_of_a_subclass_are_named_together() -> None:
    with pytest.raises(TypeError, match=r"defines training_step, .*; Mine defines compute_loss, "):
        type("Mine", (GRPOTrainer,), {"compute_loss": method, "training_step": method, "helper": method})


def test_a_method_put_on_a_trainer_that_is_never_called_is_refused(tmp_path: Path) -> None:
    trainer = GRPOTrainer(load(), digit_sum, GRPOConfig(output_dir=str(tmp_path), **SMALL), ROWS)
    with pytest.raises(UnsupportedError, match=r"GRPOTrainer\.compute_loss is never called here: the loss is"):
        trainer.compute_loss = method
    for name in ("compute_metrics", "data_collator", "compute_loss_func", "ref_model", "rollout_func", "epsilon_low",
                 "generation_config"):
        with pytest.raises(UnsupportedError, match=rf"GRPOTrainer\.{name} is never called here: "):
            setattr(trainer, name, method)


@pytest.mark.parametrize("kind", [GRPOTrainer, SFTTrainer])
def test_what_a_trainer_has_read_is_not_changed_in_silence(kind: Any, tmp_path: Path) -> None:
    settings: Any = SFTConfig(output_dir=str(tmp_path)) if kind is SFTTrainer else GRPOConfig(
        output_dir=str(tmp_path), **SMALL)
    rewards = {} if kind is SFTTrainer else {"reward_funcs": digit_sum}
    rows = [{"prompt": "a", "completion": "b"}] * 4
    trainer = kind(load(), args=settings, train_dataset=rows, **rewards)
    names = ["model", "model_wrapped", "processing_class", "tokenizer", "args", "train_dataset", "eval_dataset",
             "optimizer", "lr_scheduler", "state", "callback_handler", "accelerator"]
    names += [] if kind is SFTTrainer else ["reward_funcs", "reward_weights", "tools"]
    rows = [(name, (f"{kind.__name__}.{name} cannot be changed; ", "make a new trainer")) for name in names]
    assert not_refused(lambda name: setattr(trainer, name, [object()]), rows, UnsupportedError) == []
    model = trainer.model
    trainer.model, trainer.optimizer, trainer.beta_of_mine = model.train(), trainer.optimizer, 1
    assert trainer.model is model and trainer.beta_of_mine == 1


def test_trls_methods_that_our_trainers_lack_are_all_refused() -> None:
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    theirs = {name for cls in (trl.GRPOTrainer, trl.SFTTrainer, trl.RLOOTrainer, transformers.Trainer)
              for name in dir(cls) if callable(getattr(cls, name)) and not name.startswith("__")}
    ours = {name for cls in (GRPOTrainer, SFTTrainer) for name in dir(cls)}
    assert sorted(theirs - ours - set(NEVER_CALLED)) == []
    assert sorted(ours & set(NEVER_CALLED)) == []


def test_a_subclass_trains_on_the_objective_that_it_names(tmp_path: Path) -> None:
    class LogLikelihood(GRPOObjective):
        def loss(self, batch: Any, outputs: Any, totals: Any) -> Any:
            return replace(super().loss(batch, outputs, totals), loss=-outputs.logprobs.sum())

    class Imitation(GRPOTrainer):
        objective_class = LogLikelihood

    trainer = Imitation(load(), digit_sum, GRPOConfig(output_dir=str(tmp_path), **SMALL), ROWS)
    groups = trainer.rollout()
    assert trainer.forward_backward(groups)["loss"] > 1.0, "the sum of all log-likelihoods, and no policy gradient"


def word_count(completions: list[Any], answer: list[str], log_metric: Any, **kwargs: Any) -> list[float | None]:
    """Words; no opinion on the first completion."""
    log_metric("answers", float(len(answer)))
    return [None, *(float(len(completion[0]["content"].split())) for completion in completions[1:])]


class Early(GRPOTrainer):
    def __init__(self, model: Any, args: Any, **options: Any) -> None:
        self.model, self.args, self.ref_model = "before", args, None  # as programs for TRL do
        super().__init__(model, args=args, **options)


def test_what_a_subclass_sets_before_the_trainer_is_made_is_replaced(tmp_path: Path) -> None:
    trainer = Early(load(), GRPOConfig(output_dir=str(tmp_path), **SMALL), reward_funcs=digit_sum, train_dataset=ROWS)
    assert trainer.ref_model is None and trainer.model is trainer.policy.model


class Doubled(GRPOTrainer):
    """Pays double, and the first function only where the second one has an opinion."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        self.seen = inputs, prompts, completions, completion_ids_list
        self.table = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.paid = torch.where(self.table[:, 1:].isnan(), torch.nan, self.table * 2)
        return self.paid


def test_a_subclasss_calculate_rewards_gets_trls_arguments_and_what_it_returns_is_paid(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), score_while_sampling=True, **SMALL)
    trainer = Doubled(load(), [digit_sum, word_count], config, ROWS)
    groups = trainer.rollout()
    inputs, prompts, completions, ids = trainer.seen
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [row["answer"] for row in inputs] == ["14"] * 8 and [row["prompt"] for row in inputs] == prompts
    assert ids == [rollout.completion_ids for rollout in rollouts]
    assert completions[0] == [{"role": "assistant", "content": rollouts[0].text}]
    assert rollouts[0].rewards == {"digit_sum": None, "word_count": None}
    paid = [[rollout.rewards["digit_sum"], rollout.rewards["word_count"]] for rollout in rollouts]
    assert trainer.table.dtype == torch.float32 and paid[1:] == trainer.paid.tolist()[1:]
    assert trainer.collector.metrics(groups, 1.0)["answers"] == 8.0


def test_a_calculate_rewards_of_another_shape_is_refused(tmp_path: Path) -> None:
    wrong = type("Wrong", (GRPOTrainer,), {"_calculate_rewards": lambda self, *_: torch.zeros(8, 2)})
    trainer = wrong(load(), digit_sum, GRPOConfig(output_dir=str(tmp_path), **SMALL), ROWS)
    with pytest.raises(RewardError, match=r"returned 8 rows of 2 rewards; expected are 8 rows, .* of 1"):
        trainer.rollout()


class Logged(GRPOTrainer):
    """Adds to every line of the log, as programs over TRL do."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        logs["mine"] = 0.5 if start_time else 0.25
        super().log(logs, start_time)


def test_a_subclasss_log_gets_the_lines_of_steps_evaluations_and_the_end(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), eval_on_start=True, logging_steps=2, **SMALL)
    trainer = Logged(load(), digit_sum, config, ROWS, eval_dataset=ROWS[:1])
    trainer.train()
    lines = [(line["step"], line["mine"], "loss" in line) for line in trainer.state.log_history]
    assert lines == [(0, 0.25, False), (2, 0.5, True), (2, 0.25, False)]
    assert '"mine": 0.5' in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
