"""The loop on the embedded model: records, listeners and evaluation of a GRPO run."""

import json
import logging
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from small_models import shallow
from trainer_runs import QUESTIONS, ROWS, SMALL, Gradients, adapter, adapter_of, digit_sum, load, make, moved, same
from transformers import AutoModelForCausalLM, TrainerCallback

from lowmem_grpo import GRPOTrainer, SamplingParams
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.runs import listeners
from lowmem_grpo.runs.records import RecordError, read_lines
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from tests.attacks.small_run import StopAt

EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_save", "on_evaluate", "on_train_end")


def noted(event: str) -> Any:
    """A method of a listener as people write them for transformers' Trainer."""
    def note(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert args.learning_rate == SMALL["learning_rate"] and state.max_steps == 3
        self.events.append(event)
        self.given[event] = given

    return note


Recorder = type("Recorder", (TrainerCallback,), {event: noted(event) for event in EVENTS})

# Records

@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOTrainer, Any, Any]:
    """A whole run of three steps, with saves and evaluations."""
    recorder: Any = Recorder()
    recorder.events, recorder.given = [], {}
    trainer = make(
        tmp_path_factory.mktemp("finished") / "run", callbacks=[recorder], max_steps=3, save_strategy="steps",
        save_steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=ROWS, num_generations_eval=2, beta=0.01,
        report_to="tensorboard",
    )
    return trainer, recorder, trainer.train()


def test_metrics_have_trls_names_and_shares_of_time_add_up(finished: Any) -> None:
    trainer, _, output = finished
    lines = [line for line in read_lines(trainer.run_dir / "metrics.jsonl") if "eval_reward" not in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    names = {
        "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "rewards/digit_sum/mean",
        "rewards/digit_sum/std", "completions/mean_length", "completions/min_length", "completions/max_length",
        "completions/clipped_ratio", "completions/mean_terminated_length", "completions/min_terminated_length",
        "completions/max_terminated_length", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "entropy", "kl", "num_tokens", "epoch", "step_time", "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max", "ratio/p01", "ratio/p50", "ratio/p99", "mismatch/p99",
        "mismatch/k3", "mismatch/effective_samples", "mismatch/corrected", "tokens/with_gradient", "groups/with_signal",
    }
    for line in lines:
        assert names <= line.keys(), names - line.keys()
        assert all(isinstance(value, (int, float)) for value in line.values())
        shares = [line[f"time/{name}"] for name in ("generate", "reward", "train", "idle")]
        assert sum(shares) == pytest.approx(1, abs=0.02)
        assert min(shares) >= 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-3  # sampler and trainer agree
        assert line["memory/peak_bytes"] > 0
    assert lines[0]["learning_rate"] > lines[1]["learning_rate"] > 0
    assert [line["epoch"] for line in lines] == [0.5, 1.0, 1.5]
    assert lines[2]["elapsed"] == pytest.approx(sum(line["step_time"] for line in lines))
    assert (output.global_step, output.finished) == (3, True)
    assert output.metrics.items() >= trainer.state.log_history[-1].items() and output.metrics["train_runtime"] > 0


def test_the_evaluation_and_the_summary_of_a_run_are_recorded(finished: Any) -> None:
    trainer, _, _ = finished
    evaluated, last = [line for line in read_lines(trainer.run_dir / "metrics.jsonl") if "eval_reward" in line]
    assert (evaluated["step"], last["step"]) == (2, 3) and evaluated["eval_reward"] >= 0
    assert {"eval_reward_std", "eval_rewards/digit_sum/mean", "eval_completions/mean_length",
            "eval_completions/clipped_ratio"} <= evaluated.keys()
    summary = json.loads((trainer.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["model"]) == ("finished", 3, str(shallow()))
    assert summary["config"]["num_generations"] == 4 and (trainer.run_dir / "report.html").stat().st_size > 10_000


def test_all_completions_are_recorded(finished: Any) -> None:
    trainer, _, _ = finished
    lines = read_lines(trainer.run_dir / "completions.jsonl")
    assert [line["step"] for line in lines] == [1] * 8 + [2] * 8 + [3] * 8
    for line in lines:
        assert line["prompt"] in QUESTIONS
        assert line["reward"] == line["rewards"]["digit_sum"] == digit_sum([line["completion"]])[0]
        assert 1 <= line["tokens"] <= 24
        assert line["finish_reason"] in ("stop", "length")
    for start in range(0, 24, 4):
        assert sum(line["advantage"] for line in lines[start : start + 4]) == pytest.approx(0, abs=1e-3)


def test_tensorboard_gets_the_rewards(finished: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, _, _ = finished
    events = EventAccumulator(str(trainer.run_dir / "tensorboard")).Reload()
    recorded = [line["reward"] for line in read_lines(trainer.run_dir / "metrics.jsonl") if "reward" in line]
    assert [event.value for event in events.Scalars("train/reward")] == pytest.approx(recorded)


def test_a_missing_library_for_report_to_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install wandb"):
        make(tmp_path, report_to="wandb")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, the system refuses to let a file grow beyond `size` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Gradients:
    """The adapter after three steps without a stop."""
    trainer = make(tmp_path_factory.mktemp("straight") / "run", max_steps=3)
    trainer.train()
    return adapter(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("full", ["metrics.jsonl", "completions.jsonl"])
def test_a_full_disk_leaves_whole_lines_and_the_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, straight: Gradients
) -> None:
    run = tmp_path / "run"
    trainer = make(run, max_steps=3, save_strategy="steps", save_steps=1)
    append = trainer.records.append

    def limited(name: str, lines: Any) -> None:
        if name == full and trainer.state.global_step == 2:
            with largest_file((run / name).stat().st_size + 100):
                append(name, lines)
        append(name, lines)

    monkeypatch.setattr(trainer.records, "append", limited)
    with pytest.raises(RecordError, match=rf"{full}.*too large; .*ulimit"):
        trainer.train()
    assert (run / full).read_bytes().endswith(b"}\n")
    assert {line["step"] for line in read_lines(run / full)} == {1}
    resumed = make(run, max_steps=3, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in read_lines(run / "completions.jsonl")] == [1] * 8 + [2] * 8 + [3] * 8
    assert same(adapter(resumed), straight)


# Listeners


def test_a_callback_written_for_transformers_gets_every_event_and_what_it_reads(finished: Any) -> None:
    _, recorder, _ = finished
    one, measured = ["on_step_begin", "on_step_end", "on_log"], ["on_log", "on_evaluate", "on_save"]
    assert recorder.events == ["on_train_begin", *one, *one, *measured, *one, *measured, "on_log", "on_train_end"]
    given = recorder.given["on_step_end"]
    assert given["model"] is not None and given["processing_class"] is not None
    assert given["optimizer"].param_groups and given["lr_scheduler"].get_last_lr()
    assert recorder.given["on_evaluate"]["metrics"]["step"] == 3 and recorder.given["on_log"]["logs"]["step"] == 3


def test_a_callback_can_stop_the_run_and_the_same_trainer_can_go_on(tmp_path: Path) -> None:
    stop = StopAt(1)
    trainer = make(tmp_path, callbacks=[stop], max_steps=3)
    first = trainer.train()
    assert (first.global_step, first.finished) == (1, False)
    assert (tmp_path / "checkpoint-1").is_dir()  # although save_strategy is "no": the run is not over
    stop.stop = 9
    second = trainer.train(resume_from_checkpoint=True)
    assert (second.global_step, second.finished) == (3, True)


def test_no_step_goes_beyond_max_steps(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_iterations=2, max_steps=3)
    assert trainer.train().global_step == 3


@pytest.mark.parametrize(("name", "value"), [
    ("learning_rate", 0.5), ("max_steps", 5), ("output_dir", "elsewhere"), ("temperature", 0.5), ("top_k", 3),
    ("num_generations", 2), ("reward_weights", [2.0]), ("vllm_sampling_params", None),
])
def test_settings_changed_after_a_trainer_has_read_them_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    trainer = make(tmp_path, vllm_sampling_params=SamplingParams())
    setattr(trainer if name == "temperature" else trainer.args, name, value)
    with pytest.raises(ValueError, match=rf"args\.{name} is {re.escape(repr(value))}, and was .* when this"):
        trainer.train()


def test_a_setting_of_the_sampler_that_a_callback_changes_stops_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    class Cooler(TrainerCallback):
        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            args.temperature = 0.5

    with pytest.raises(ValueError, match=r"args\.temperature is 0\.5, and was 1\.0 when"):
        make(tmp_path, callbacks=[Cooler()]).train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]


def test_a_trainers_attribute_of_trl_is_the_setting_that_the_loss_reads(tmp_path: Path) -> None:
    made, changed = make(tmp_path / "made", beta=0.5), make(tmp_path / "changed")
    changed.beta = 0.5
    _ = made.train(), changed.train()
    assert changed.args.beta == 0.5 == changed.beta and changed.delta is None
    assert same(adapter_of(made.model), adapter_of(changed.model))


def test_rounding_to_whole_groups_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=1)
    assert "3) x gradient_accumulation_steps (2) = 6 completions" in caplog.text
    assert "each step uses 8" in caplog.text
    assert len(trainer.rollout()) == 2
    caplog.clear()
    make(tmp_path)
    assert "gradient_accumulation_steps" not in caplog.text


# Evaluation


def test_evaluation_leaves_the_training_as_it_is(tmp_path: Path, finished: Any) -> None:
    without = make(tmp_path, max_steps=3, beta=0.01)
    without.train()
    assert same(adapter(without), adapter(finished[0]))


def test_unusable_evaluation_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'prompt'"):
        make(tmp_path, eval_strategy="steps", eval_dataset=[{"question": "?"}])
    with pytest.raises(ValueError, match="eval_dataset"):
        make(tmp_path, eval_strategy="steps")
    with pytest.raises(DataError, match="no row"):
        make(tmp_path, eval_dataset=[{"prompt": ""}]).evaluate()


def test_a_signal_that_comes_while_the_ranks_agree_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, max_steps=50, save_strategy="no")
    gather = run.ranks.gather

    def signalled(what: str, own: Any) -> list[Any]:
        told = gather(what, own)
        if what == "what is asked for" and run.state.global_step == 1 and not run.interrupt.requested:
            run.interrupt.on_signal(signal.SIGINT)
        return told

    monkeypatch.setattr(run.ranks, "gather", signalled)
    run.train()
    assert run.state.global_step == 1, "it ends after its step"
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
    assert same(adapter_of(run.model), adapter_of(PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(shallow()), tmp_path / "adapter", is_trainable=True)))


# Options of TRL's and transformers' settings


def test_the_cpu_is_where_a_named_model_is_loaded_and_one_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    for settings in ({"use_cpu": True}, {"no_cuda": True}):
        assert make(tmp_path, **settings).policy.device.type == "cpu"
    model = load()
    model.get_input_embeddings = lambda: SimpleNamespace(weight=torch.empty(1, device="meta"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match='use_cpu is True, and the model lies on meta; load it with device="cpu"'):
        make(tmp_path, model=model, use_cpu=True)


def test_dropout_is_off_where_the_settings_say_so(tmp_path: Path) -> None:
    model, plain = load(lora_dropout=0.5), load()
    for one in (model, plain):
        moved(one)
    model.get_base_model().config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    assert make(tmp_path / "drops", model=load(lora_dropout=0.5)).policy.drops
    found = []
    for name, one in (("off", model), ("plain", plain)):
        trainer = make(tmp_path / name, model=one, disable_dropout=name == "off")
        assert not trainer.policy.drops
        trainer.train()
        found.append(adapter(trainer))
    assert same(*found)


def test_the_order_of_the_rows_has_a_seed_of_its_own(tmp_path: Path) -> None:
    def order(**seeds: int) -> list[int]:
        return [prompt.index for prompt in make(tmp_path, **seeds).source.take(8)]

    assert order(seed=1) == order(seed=2, data_seed=1) != order(seed=2)


def test_the_level_of_the_log_is_the_settings_own(tmp_path: Path) -> None:
    logger = logging.getLogger("lowmem_grpo")
    before = logger.level
    try:
        make(tmp_path, log_level="error")
        assert logger.level == logging.ERROR
        make(tmp_path)
        assert logger.level == logging.ERROR  # passive leaves it
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(("settings", "words"), [
    ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "weights each sequence by its completion length"),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, ""),
    ({"loss_type": "luspo"}, "its paper has 'sequence'"),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, ""),
])
def test_what_trl_warns_of_is_warned_of(
    settings: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, **settings)
    told = [message for message in caplog.messages if "loss_type" in message]
    assert [words in message for message in told] == [True] * bool(words)
