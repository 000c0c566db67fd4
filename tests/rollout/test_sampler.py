"""The run's engine and guesses: which settings reach it, and which engine is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import TINY
from trainer_runs import load, make, moved
from transformers import AutoModelForCausalLM

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.rollout.sampler import speculate

ROWS = [{"prompt": f"Start with {n}. Add {n + 3}. What is the result?\n"} for n in range(1, 5)]
SETTINGS = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "num_generations": 4, "seed": 3,
            "max_completion_length": 100, "max_steps": 3, "shuffle_dataset": False, "logging_steps": 1,
            "learning_rate": 1e-7, "temperature": 2.0}


def completions(folder: Path) -> list[str]:
    return [json.loads(line)["completion"] for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_a_run_with_guesses_samples_the_same_completions_and_logs_what_became_of_them(tmp_path: Path) -> None:
    for name, speculation in (("plain", None), ("guesses", "lookup")):
        run = make(tmp_path / name, model=moved(load()), rows=ROWS, speculation=speculation, **SETTINGS)
        run.train()
    assert completions(tmp_path / "guesses") == completions(tmp_path / "plain")
    logged = [json.loads(line) for line in (tmp_path / "guesses" / "metrics.jsonl").read_text().splitlines()]
    assert any("sampling/speculation/passes_share" in line for line in logged)


def test_an_engine_that_cannot_guess_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r'speculation="lookup" is set, and the engine mine has no speculate\(\)'):
        speculate(SimpleNamespace(name="mine"), SamplingParams())


def test_sampled_ids_that_pad_the_vocabulary_are_said_once_and_have_plain_transformers_probabilities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, temperature=20.0)
    groups = [*trainer.next_groups(), *trainer.next_groups()]
    said = [record.message for record in caplog.records if "pad the model's vocabulary" in record.message]
    assert len(said) == 1
    drawn = [(group, rollout) for group in groups for rollout in group.rollouts if max(rollout.completion_ids) >= 322]
    assert drawn  # the tokenizer has 322 tokens, and the model 384 rows
    group, rollout = drawn[0]
    ids = torch.tensor([[*group.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(TINY)(ids).logits[0, len(group.prompt_ids) - 1 : -1] / 20.0
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
    assert rollout.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_nothing_is_said_where_every_sampled_id_has_a_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path)
    trainer.next_groups()
    assert "pad the model's vocabulary" not in caplog.text
