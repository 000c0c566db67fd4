"""What a run samples: ids without a text are said. When its engine sleeps."""

from pathlib import Path

import pytest
import torch
from small_models import shallow
from trainer_runs import make
from transformers import AutoModelForCausalLM


def test_sampled_ids_that_pad_the_vocabulary_are_said_once_and_have_plain_transformers_probabilities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "plain").next_groups()
    assert "pad the model's vocabulary" not in caplog.text, "every sampled id has a text"
    trainer = make(tmp_path / "run", temperature=20.0)
    groups = [*trainer.next_groups(), *trainer.next_groups()]
    said = [record.message for record in caplog.records if "pad the model's vocabulary" in record.message]
    assert len(said) == 1
    drawn = [(group, rollout) for group in groups for rollout in group.rollouts if max(rollout.completion_ids) >= 322]
    assert drawn  # the tokenizer has 322 tokens, and the model 384 rows
    group, rollout = drawn[0]
    ids = torch.tensor([[*group.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(shallow())(ids).logits[0, len(group.prompt_ids) - 1 : -1] / 20.0
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
    assert rollout.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("stays", [False, True])
def test_after_sampling_a_run_lets_the_engine_sleep_unless_the_plan_lets_it_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    trainer, slept = make(tmp_path), list[str]()
    monkeypatch.setattr(trainer.engine, "sleep", lambda: slept.append("slept"))
    monkeypatch.setattr(trainer.engine, "stays", stays, raising=False)
    trainer.next_groups()
    assert slept == ["slept"] * (not stays)
