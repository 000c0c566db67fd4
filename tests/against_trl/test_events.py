"""Events, epochs and requests that one callback sees in TRL's trainers (transformers' loop) and in ours.

What differs on purpose: `on_substep_end` and `on_prediction_step` never happen here; the last step is always logged; a
run that a callback stops is saved; and steps that share their completions are one update, with one `on_step_begin`,
`on_step_end` and `on_log`.
"""

from pathlib import Path
from typing import Any

import pytest
from beside_trl import Record, our_grpo, our_sft, their_grpo, their_sft
from transformers import EarlyStoppingCallback

BATCH, EPOCHS = "per_device_train_batch_size", "num_train_epochs"
TEXTS = [f"{'ab' * count} {count}" for count in range(1, 11)]
NEVER = ("on_init_end", "on_substep_end", "on_prediction_step")
EVERY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "evaluated": 2}
IN_STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4, "evaluated": 2}
BEST = EVERY_EPOCH | {"load_best_model_at_end": True}
REQUESTS = ("should_evaluate", "should_save", "should_log", "should_epoch_stop", "should_training_stop")
PLACES = [("on_epoch_end", 4), ("on_epoch_end", 2), ("on_log", 2), ("on_optimizer_step", 1), ("on_train_begin", 0),
          ("on_epoch_begin", 0), ("on_epoch_begin", 2), ("on_step_begin", 1), ("on_step_end", 1), ("on_evaluate", 4),
          ("on_save", 4), ("on_pre_optimizer_step", 2)]


def seen(record: Record) -> list[Any]:
    return [event for event in record.events if event[0] not in NEVER]


def without_last_save(theirs: list[Any], ours: list[Any]) -> list[Any]:
    """Our events without the save of a run that was stopped, which transformers does not make."""
    if "should_training_stop" in ours[-1][-1] and len(ours) == len(theirs) + 1 and ours[-3][0] == "on_save":
        return [*ours[:-3], *ours[-2:]]
    return ours


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [
    {EPOCHS: 2}, {EPOCHS: 2, BATCH: 1, "gradient_accumulation_steps": 4}, {EPOCHS: 2} | EVERY_EPOCH,
    {EPOCHS: 3} | IN_STEPS, {"max_steps": 3} | EVERY_EPOCH, {EPOCHS: 2} | BEST,
    {"max_steps": 1, "eval_on_start": True, "evaluated": 2}, {EPOCHS: 2, "logging_steps": 3},
    {EPOCHS: 4, "early": True, "metric_for_best_model": "loss"} | BEST, {"max_steps": 5, "stream": True},
])
def test_fine_tuning_has_the_events_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {BATCH: 4} | settings
    early = settings.pop("early", False)
    theirs, ours = (seen(run(
        tmp_path / run.__name__, TEXTS[:6], **settings, callbacks=[EarlyStoppingCallback(1, 99.0)] if early else [],
    )) for run in (their_sft, our_sft))
    if settings.get("logging_steps"):  # the last step is logged here, and at each multiple there
        assert [event for event in ours if event[0] == "on_log"][-2][1] == 4
        theirs, ours = ([event[:3] for event in events if event[0] != "on_log"] for events in (theirs, ours))
    assert ours == theirs


@pytest.mark.every(10)
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_request_is_honoured_whenever_it_is_made(place: tuple[str, int], request_: str, tmp_path: Path) -> None:
    theirs, ours = (seen(run(
        tmp_path / run.__name__, TEXTS[:8], asks={place: (request_,)}, logging_steps=2, eval_strategy="steps",
        eval_steps=4, evaluated=2, save_strategy="epoch" if place[0] == "on_save" else "no", **{BATCH: 4, EPOCHS: 2},
    )) for run in (their_sft, our_sft))
    assert place in [event[:2] for event in theirs]
    assert without_last_save(theirs, ours) == theirs


@pytest.mark.parametrize("settings", [
    {EPOCHS: 2}, {EPOCHS: 1} | EVERY_EPOCH, {"max_steps": 3} | IN_STEPS | {"save_steps": 2},
    {EPOCHS: 2, "metric_for_best_model": "eval_reward"} | BEST, {EPOCHS: 1, "gradient_accumulation_steps": 2},
    {EPOCHS: 2, "asks": {("on_epoch_end", 6): ("should_save",), ("on_step_end", 1): ("should_epoch_stop",)}},
])
def test_grpo_has_the_events_of_trl(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = (seen(run(tmp_path / run.__name__, 6, **{BATCH: 4, "num_generations": 2}, **settings,
                             per_device_eval_batch_size=2)) for run in (their_grpo, our_grpo))
    assert ours == theirs


def test_steps_that_share_their_completions_are_one_update(tmp_path: Path) -> None:
    theirs, ours = (seen(run(tmp_path / run.__name__, 4, **{BATCH: 4, "num_generations": 2, EPOCHS: 1},
                             num_iterations=2)) for run in (their_grpo, our_grpo))
    once = ("on_step_begin", "on_step_end", "on_log")
    assert [event[:2] for event in ours if event[0] not in once] == [
        event[:2] for event in theirs if event[0] not in once]
    assert [step for name, step, *_ in ours if name == "on_step_end"] == [2, 4]


def test_a_resumed_run_has_the_events_of_transformers(tmp_path: Path) -> None:
    events = []
    for run in (their_sft, our_sft):
        folder = tmp_path / run.__name__
        settings = {BATCH: 4, EPOCHS: 2} | IN_STEPS | {"eval_steps": 1, "save_steps": 1}
        run(folder, TEXTS[:8], **settings)
        events.append(seen(run(folder, TEXTS[:8], resume=str(folder / "checkpoint-3"), **settings)))
    assert events[1] == events[0]
