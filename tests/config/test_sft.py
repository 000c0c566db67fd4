"""Settings of supervised fine-tuning: values without meaning and contradictions are refused."""

from typing import Any

from tables import not_refused

from lowmem_grpo import SFTConfig

REFUSED: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    TypeError: [
        ({"learning_rates": 1}, "SFTConfig has no option 'learning_rates'; did you mean learning_rate"),
        ({"max_seq_length": 5, "max_length": 6}, "the same option"),
    ],
    ValueError: [
        ({"packing_strategy": "ffd"}, "one of bfd, bfd_split, wrapped"),
        ({"truncation_mode": "keep"}, "one of keep_start, keep_end, or None"),
        ({"load_best_model_at_end": True}, "needs eval_strategy='steps' and save_strategy='steps'"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4}, "mul"),
        ({"report_to": ["all", "wandb"]}, "'all' stands by itself"),
        ({"loss_type": "orpo"}, "one of nll, chunked_nll, dft"), ({"neftune_noise_alpha": 5}, "leave it out"),
        ({"max_length": 0}, "max_length is 0; it must be a whole number, at least 1"),
    ],
}


def test_any_number_is_better_than_no_number() -> None:
    settings = SFTConfig(metric_for_best_model="loss")
    assert settings.is_better(2.0, float("nan")) and settings.is_better(2.0, None)
    assert not settings.is_better(float("nan"), 2.0) and settings.is_better(1.0, 2.0)


def test_options_that_make_no_sense_are_refused() -> None:
    for error, rows in REFUSED.items():
        assert not_refused(lambda given: SFTConfig(**given), rows, error) == []
