"""The last line of a run's log: transformers' figures, whatever lines were logged before; seconds of each phase of a
step, and means over steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_runs import load, make

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.runs import state as module
from lowmem_grpo.runs.state import Clock, mean_of, summary

TRANSFORMERS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss",
                "epoch", "step"}
TEXTS = [{"prompt": f"Start with {n}.\n", "completion": f"{n}"} for n in range(6)]


def losses_of(trainer: Any) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def test_a_run_without_steps_has_no_loss() -> None:
    from lowmem_grpo.runs.state import TrainerState

    state = TrainerState(log_history=[{"step": 2, "loss": 3.0, "reward": 1.0}], num_tokens=10, global_step=2, epoch=0.5)
    assert summary(state, [], 0, 2.0, 7) == {
        "train_runtime": 2.0, "train_samples_per_second": 0.0, "train_steps_per_second": 0.0, "total_flos": 420.0,
        "train_loss": 0.0, "step": 2, "epoch": 0.5}


@pytest.mark.parametrize("trained", ["grpo", "sft"])
def test_the_loss_of_a_run_is_the_mean_over_its_steps_not_over_its_lines(trained: str, tmp_path: Path) -> None:
    def run(name: str, **settings: Any) -> Any:
        if trained == "grpo":
            return make(tmp_path / name, max_steps=3, beta=0.1, **settings)
        config = SFTConfig(output_dir=str(tmp_path / name), max_steps=3, per_device_train_batch_size=2,
                           disable_tqdm=True, **settings)
        return SFTTrainer(load(), TEXTS, config, callbacks=settings.pop("callbacks", None))

    each = run("each")
    each.train()
    losses, heard = losses_of(each), []
    pairs = run("pairs", logging_steps=2)
    pairs.add_callback(SimpleNamespace(on_log=lambda *_, logs, **__: heard.append(logs),
                                       on_train_end=lambda *_, **__: heard.append({"over": True})))
    output = pairs.train()
    last = pairs.state.log_history[-1]
    mean = sum(losses.values()) / 3
    assert output.training_loss == last["train_loss"] == pytest.approx(mean, abs=1e-6)
    assert abs(sum(losses_of(pairs).values()) / 2 - mean) > 1e-4  # what the mean over the lines would be
    assert last.keys() >= TRANSFORMERS and not {"loss", "grad_norm", "learning_rate"} & last.keys()
    assert output.metrics == last and heard[-2:] == [last, {"over": True}]
    samples = 24 if trained == "grpo" else 6
    assert last["train_samples_per_second"] == pytest.approx(samples / last["train_runtime"])
    assert last["train_steps_per_second"] == pytest.approx(3 / last["train_runtime"])
    parameters = pairs.model.get_base_model().num_parameters(exclude_embeddings=True)
    assert last["total_flos"] == 6.0 * pairs.state.num_tokens * parameters > 0


def test_a_resumed_run_counts_its_own_steps_and_has_the_lines_before(tmp_path: Path) -> None:
    whole = make(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=1, beta=0.1)
    whole.train()
    again = make(tmp_path / "run", max_steps=3, save_strategy="steps", save_steps=1, beta=0.1)
    output = again.train(resume_from_checkpoint=True)
    before = [line for line in again.state.log_history if line["step"] < 3]
    assert before == whole.state.log_history[:-1] and losses_of(again).keys() == {1, 2, 3}
    assert output.metrics["step"] == 3
    assert again.state.log_history[-1]["train_loss"] == pytest.approx(losses_of(again)[3])
    assert output.metrics["train_samples_per_second"] == pytest.approx(8 / output.metrics["train_runtime"])


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clock reads; a test adds to them."""
    seconds = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


def test_the_clock_gives_each_phase_its_share_and_the_rest_to_idle(now: list[float]) -> None:
    clock = Clock()
    for name, seconds in (("generate", 5.0), ("train", 1.0), ("train", 2.0)):
        with clock.phase(name):
            now[0] += seconds
    now[0] += 2.0
    clock.moved_to_train(1.0)
    shares = clock.metrics()
    assert shares["step_time"] == 10.0
    parts = {name: shares[f"time/{name}"] for name in ("generate", "reward", "train", "idle")}
    assert parts == pytest.approx({"generate": 0.4, "reward": 0.0, "train": 0.4, "idle": 0.2})


def test_a_phase_that_fails_is_counted_and_a_restart_forgets_it(now: list[float]) -> None:
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock.phase("reward"):
        now[0] += 3.0
        raise ZeroDivisionError
    assert clock.seconds["reward"] == 3.0
    clock.restart()
    assert clock.seconds == {"generate": 0.0, "reward": 0.0, "train": 0.0}
    now[0] += 1.0
    assert clock.metrics()["step_time"] == 1.0


def test_the_mean_over_optimizer_steps_takes_those_that_have_the_metric() -> None:
    assert mean_of([{"loss": 1.0, "kl": 3.0}, {"loss": 2.0}]) == {"kl": 3.0, "loss": 1.5}
