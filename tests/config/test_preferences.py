"""Settings of training on preferences: TRL's names work or are refused by name, with what to do instead."""

from typing import Any

from tables import not_refused

from lowmem_grpo import DPOConfig, KTOConfig, ORPOConfig, RewardConfig

REFUSED: dict[Any, list[tuple[dict[str, Any], str]]] = {
    DPOConfig: [
        ({"loss_type": "kto"}, "one of sigmoid, hinge, ipo"), ({"use_weighting": True}, "distribution of each token"),
        ({"truncation_mode": "keep_end"}, "Of longer rows the start is kept"), ({"beta": 0}, "above 0"),
        ({"rpo_alpha": 1.0}, "with loss_weights"), ({"reference_free": True}, "ORPOTrainer"),
        ({"ref_adapter_name": "reference"}, "the adapter as it is when the trainer is made"),
        ({"model_adapter_name": "train"}, "Load one adapter"), ({"loss_type": ["sigmoid"], "loss_weights": [1, 2]},
                                                                "one number for each"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "leave one of them out"),
        ({"label_smoothing": 0.1}, "label_smoothing is 0.1"), ({"loss_type": "exo_pair"}, "exo_pair"),
        ({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "f_divergence_type is 'forward_kl'"),
        ({"generate_during_eval": True}, "fast_generate"),
    ],
    ORPOConfig: [({"beta": -1}, "0 or above"), ({"is_encoder_decoder": True}, "Only decoders")],
    KTOConfig: [
        ({"per_device_train_batch_size": 1}, "a step has one row"), ({"loss_type": "bco"}, "one of kto, apo_zero"),
        ({"train_sampling_strategy": "random"}, "shuffle_dataset=True"), ({"desirable_weight": -1}, "0 or above"),
    ],
}


def test_settings_that_make_no_sense_are_refused() -> None:
    for config, rows in REFUSED.items():
        assert not_refused(lambda given, config=config: config(**given), rows, ValueError) == []


def test_settings_that_change_nothing_are_taken() -> None:
    DPOConfig(padding_free=True, precompute_ref_batch_size=4, model_adapter_name="default", reference_free=False,
              loss_type=("sigmoid", "sft"), loss_weights=(1, 0.5), remove_unused_columns=False, max_target_length=8)
    KTOConfig(loss_type="apo_zero_unpaired", per_device_train_batch_size=1, train_sampling_strategy="sequential")
    ORPOConfig(beta=0, max_completion_length=8, padding_value=0)


def test_the_first_argument_is_the_folder_as_in_trl() -> None:
    for config in (DPOConfig, KTOConfig, ORPOConfig, RewardConfig):
        assert config("runs/here").output_dir == "runs/here"
