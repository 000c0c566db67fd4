"""Rows, steps, epochs and learning rates of TRL 1.16's trainers, run beside ours with the same settings."""

from pathlib import Path
from typing import Any

import pytest
from beside_trl import our_grpo, our_sft, their_grpo, their_sft
from trainer_runs import load, moved, plain_peft, relative, same

BATCH, TOGETHER, EPOCHS = "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"
TEXTS = [f"{'ab' * count} {count}" for count in range(1, 21)]
SFT: list[tuple[Any, ...]] = [  # rows, batch, accumulation, epochs
    (6, 4, 4, 3), (20, 8, 4, 10), (5, 16, 1, 1), (6, 4, 1, 1.5), (7, 2, 2, 2.3), (12, 3, 4, 0.3), (9, 2, 3, 2),
    (1, 1, 1, 2), (8, 4, 2, 3), (13, 4, 2, 2), (10, 1, 4, 1), (3, 1, 1, 0.1),
]
GRPO: list[tuple[Any, ...]] = [  # rows, batch, accumulation, epochs, generations, steps per generation, iterations
    (6, 8, 1, 1, 2, None, 1), (7, 4, 1, 2, 2, None, 1), (7, 4, 2, 1.5, 2, None, 1), (9, 4, 1, 1, 2, 2, 1),
    (9, 4, 1, 2, 2, 2, 2), (5, 4, 1, 1, 4, None, 2), (10, 4, 2, 1, 2, 1, 1), (6, 4, 4, 1, 4, 1, 1),
    (6, 2, 2, 2, 2, None, 1), (8, 4, 2, 3, 4, 4, 1), (11, 2, 4, 1, 4, 4, 1), (5, 4, 1, 1.4, 2, None, 3),
]
NAMES = (BATCH, TOGETHER, EPOCHS, "num_generations", "steps_per_generation", "num_iterations")


@pytest.mark.every(4)
@pytest.mark.parametrize("case", SFT)
def test_fine_tuning_uses_the_rows_and_makes_the_steps_of_trl(case: tuple[Any, ...], tmp_path: Path) -> None:
    rows, settings = TEXTS[: case[0]], dict(zip(NAMES, case[1:], strict=False))
    evaluated = {"eval_strategy": "epoch", "evaluated": 1} if case[0] < 8 else {}
    theirs, ours = (run(tmp_path / run.__name__, rows, **settings, **evaluated) for run in (their_sft, our_sft))
    assert (ours.drawn, ours.counted, ours.count("on_evaluate")) == (
        theirs.drawn, theirs.counted, theirs.count("on_evaluate"))


@pytest.mark.parametrize(("settings", "more"), [
    ({"max_steps": 5}, {}), ({"max_steps": 1, TOGETHER: 2}, {}), ({"max_steps": 4}, {"stream": True}),
    ({EPOCHS: 2, "packing": True, "max_length": 32}, {}), ({EPOCHS: 2, "completion_only_loss": True}, {"cut": True}),
])
def test_so_do_runs_of_so_many_steps_streams_packs_and_rows_that_cannot_be_used(
    settings: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    rows: Any = TEXTS[:6]
    if more.pop("cut", False):  # TRL drops rows of which nothing is left to train; so do we
        rows = [{"prompt": "ab" * (20 if row in (0, 3) else 2), "completion": f"{row}"} for row in range(7)]
        settings["max_length"] = 16
    theirs, ours = (run(tmp_path / run.__name__, rows, **{BATCH: 4}, **settings, **more)
                    for run in (their_sft, our_sft))
    assert ours.counted == theirs.counted
    assert sorted(sum(ours.drawn, ())) == sorted(sum(theirs.drawn, ()))  # the tokens, as TRL joins those of a pack


@pytest.mark.every(4)
@pytest.mark.parametrize("case", GRPO)
def test_grpo_uses_the_prompts_and_makes_the_steps_of_trl(case: tuple[Any, ...], tmp_path: Path) -> None:
    settings = dict(zip(NAMES, case[1:], strict=True))
    theirs, ours = (run(tmp_path / run.__name__, case[0], **settings) for run in (their_grpo, our_grpo))
    assert (ours.drawn, ours.counted) == (theirs.drawn, theirs.counted)


@pytest.mark.parametrize(("settings", "more"), [
    ({"max_steps": 3, BATCH: 8}, {}), ({"max_steps": 3, BATCH: 4, "num_iterations": 2}, {}),
    ({"max_steps": 3, BATCH: 8}, {"stream": True}),
])
def test_so_does_grpo_with_so_many_steps(settings: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = (run(tmp_path / run.__name__, 6, num_generations=2, **settings, **more)
                    for run in (their_grpo, our_grpo))
    assert (ours.drawn, ours.counted) == (theirs.drawn, theirs.counted)


def test_fewer_prompts_than_a_generation_are_one_generation_where_trl_trains_nothing(tmp_path: Path) -> None:
    settings = {BATCH: 8, "num_generations": 2, EPOCHS: 2}
    with pytest.raises(ValueError, match="does not have a length"):
        their_grpo(tmp_path / "theirs", 3, **settings)
    ours = our_grpo(tmp_path / "ours", 3, **settings)
    assert ours.rows == [["p0", "p1", "p2"]] * 2 and ours.counted[:4] == (2, 2, 2.0, 2)


def test_dynamic_sampling_draws_on_into_the_next_epoch(tmp_path: Path) -> None:
    ours = our_grpo(tmp_path, 3, **{BATCH: 4, "num_generations": 2, "max_steps": 3}, dynamic_sampling_rounds=1)
    assert [len(rows) for rows in ours.rows] == [2, 2, 2] and ours.state.epoch >= 2


@pytest.mark.parametrize("settings", [{BATCH: 4}, {BATCH: 2, TOGETHER: 4}])
def test_the_short_batch_of_an_epoch_has_trls_loss_and_gradient(settings: dict[str, Any], tmp_path: Path) -> None:
    model = moved(load())
    models = plain_peft(model, tmp_path / "adapter"), model
    theirs, ours = (run(tmp_path / run.__name__, TEXTS[:5], model=model, learning_rate=0.0, max_grad_norm=1e9,
                        **settings, **{EPOCHS: 1}) for run, model in zip((their_sft, our_sft), models, strict=True))
    for found, expected in zip(ours.losses, theirs.losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert relative(ours.gradients, theirs.gradients) < 1e-5


def test_a_run_that_stops_within_an_epoch_goes_on_bit_for_bit_with_the_rows_that_are_left(tmp_path: Path) -> None:
    settings: Any = {BATCH: 2, EPOCHS: 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9,
                     "shuffle_dataset": True}
    straight = our_sft(tmp_path / "run", TEXTS[:7], **settings)
    for step in (3, 4, 6):
        resumed = our_sft(tmp_path / "run", TEXTS[:7], resume=str(tmp_path / f"run/checkpoint-{step}"), **settings)
        assert resumed.rows == straight.rows[step:] and resumed.counted[:4] == straight.counted[:4]
        assert same(resumed.weights, straight.weights)
    assert sorted(straight.drawn[:7]) == sorted(straight.drawn[7:]) != straight.drawn[:7]


def test_a_finished_run_that_is_lengthened_begins_with_a_step_of_learning_rate_0_as_in_transformers(
    tmp_path: Path
) -> None:
    rates = []
    for run in (their_sft, our_sft):
        folder, saves = tmp_path / run.__name__, {BATCH: 4, "save_strategy": "epoch"}
        run(folder, TEXTS[:8], **saves, **{EPOCHS: 1})
        rates.append(run(folder, TEXTS[:8], resume=str(folder / "checkpoint-2"), **saves, **{EPOCHS: 2}).counted[-1])
    assert rates[0] == rates[1] == [0.0, 0.00025]
