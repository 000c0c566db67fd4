"""The run's engine and guesses: which settings reach it, and which engine is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainer_runs import load, make, moved

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
