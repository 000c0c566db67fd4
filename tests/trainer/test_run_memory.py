"""A run's own plan: it is made of the settings that the run has, and never stops one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from card import gpu

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.memory.peaks import PhasePeaks
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.trainer import run_memory
from lowmem_grpo.trainer.run_memory import bind, plan_run, plan_training, settings_of


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_memory, "this_card", lambda _: device("16GiB"))


def loaded(**options: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, max_seq_length=128)
    return FastLanguageModel.get_peft_model(model, r=4, **options)


def test_the_plan_is_made_of_what_the_run_has() -> None:
    config = GRPOConfig(num_generations=4, max_tokens_per_micro_batch=300, logits_chunk=7, optim="adamw_8bit")
    found = settings_of(loaded(mlp_tile=16), config, "transformers", 128)
    assert (found.context, found.num_generations, found.lora_rank, found.max_tokens) == (128, 4, 4, 300)
    assert (found.checkpointing, found.mlp_tile, found.chunk_rows, found.optim) == ("auto", 16, 7, "adamw_8bit")
    assert (found.form, found.host_embedding, found.engine) == ("16bit", False, "transformers")
    assert settings_of(loaded(), config, "mine", 128).engine == "transformers", "a user's engine is planned as ours"


def test_a_plan_chooses_the_size_of_micro_batches_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = loaded()
    with caplog.at_level("INFO", logger="lowmem_grpo"):
        plan = plan_run(settings_of(model, GRPOConfig(), "transformers", 128), model, device("16GiB"))
    assert plan is not None and plan.fits
    assert plan.settings.max_tokens and plan.settings.max_tokens >= 128
    assert "memory planned on 16GiB: rollout" in caplog.text


@pytest.mark.parametrize(("settings", "words"), [
    ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}, "per_device_train_batch_size=1 counts"),
    ({"per_device_train_batch_size": 8}, ""),
])
def test_a_batch_size_that_no_longer_cuts_is_said_and_one_that_changes_nothing_is_not(
    settings: dict[str, int], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, config, bound = loaded(), GRPOConfig(num_generations=8, **settings), RunMemory().train
    found = plan_run(settings_of(model, config, "transformers", 128), model, device("16GiB"))
    assert found is not None
    caplog.clear()
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        bind(bound, found, config)
    assert (bound.planned, bound.spread) == (found.settings.max_tokens, found.settings.spread)
    assert bound.planned == 8 * 128, "no more is planned for than a step holds"
    assert len(caplog.messages) == bool(words) and words in caplog.text


def test_the_groups_of_heads_that_a_plan_chose_are_those_of_the_runs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = loaded(), GRPOConfig(num_generations=4)
    policy = Policy(model)
    assert settings_of(model, config, "transformers", 128).head_groups is None and policy.head_groups == 1
    found = plan_run(settings_of(model, config, "transformers", 128), model, device("16GiB"))
    assert found is not None and found.settings.head_groups == 1  # there is room
    grouped = replace(found, settings=replace(found.settings, head_groups=2, checkpointing=True))
    monkeypatch.setattr(run_memory, "plan_run", lambda *_: grouped)
    assert plan_training(RunMemory(), model, config, policy, "transformers", 128) is grouped
    assert policy.head_groups == 2


@pytest.mark.parametrize(("given", "wanted"), [(None, 24_000), (16, 16)])
def test_mlps_take_a_micro_batch_at_once_where_there_is_room_unless_the_user_said_otherwise(
    given: int | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100 the host launched the kernels of each tile more slowly than the card computed them."""
    model, config = loaded(mlp_tile=given, use_gradient_checkpointing="offload"), GRPOConfig(
        max_tokens_per_micro_batch=24_000)
    monkeypatch.setattr(run_memory, "this_card", lambda _: device("80GiB"))
    found = plan_training(RunMemory(), model, config, Policy(model), "transformers", 128)
    assert found is not None and found.settings.mlp_tile == wanted
    assert {mlp.tile_rows for mlp in run_memory.tiled_mlps(model.get_base_model())} == {wanted}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of the adapter after one backward pass over fixed tokens."""
    model.train().zero_grad()
    model(input_ids=torch.arange(40).view(2, 20)).logits.square().mean().backward()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def flags(model: Any) -> list[tuple[bool, bool]]:
    """Whether each layer is checkpointed, and its MLP in tiles."""
    return [(layer.gradient_checkpointing, bool(layer.mlp.tile_rows)) for layer in model.get_base_model().model.layers]


def test_layers_that_keep_what_they_compute_are_chosen_anew_for_each_run_and_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config, before = loaded(), GRPOConfig(num_generations=4), [(True, True)]
    wanted, count = gradients(model), len(flags(model))
    found = plan_training(RunMemory(), model, config, Policy(model), "transformers", 128)
    assert found is not None and found.settings.kept_layers == count and flags(model) == [(False, False)] * count
    assert not model.get_base_model().is_gradient_checkpointing, "so nothing is sent to the host"
    fewer = replace(found, settings=replace(found.settings, kept_layers=1))
    monkeypatch.setattr(run_memory, "plan_run", lambda settings, *_: {"auto": fewer}[settings.checkpointing])
    plan_training(RunMemory(), model, config, Policy(model), "transformers", 128)
    assert flags(model) == before * (count - 1) + [(False, False)]
    now = gradients(model)
    beside = GRPOConfig(num_generations=4, train_while_sampling=True, beta=0.0)
    monkeypatch.setattr(run_memory, "plan_run", lambda *_: None)
    plan_training(RunMemory(), model, beside, Policy(model), "transformers", 128)
    assert flags(model) == before * count, "a trainer that may keep none finds all layers checkpointed"
    assert wanted.keys() == now.keys() and all(torch.equal(wanted[name], now[name]) for name in wanted)


@pytest.mark.parametrize(("options", "settings", "expected"), [
    ({"use_gradient_checkpointing": "offload"}, {}, "offload"), ({"use_gradient_checkpointing": True}, {}, True),
    ({"use_gradient_checkpointing": False}, {}, False), ({}, {"gradient_checkpointing": True}, "offload"),
    ({}, {"train_while_sampling": True, "beta": 0.0}, "offload"),
])
def test_a_user_who_chose_checkpointing_or_trains_beside_the_sampler_gets_no_other(
    options: dict[str, Any], settings: dict[str, Any], expected: Any
) -> None:
    found = settings_of(loaded(**options), GRPOConfig(num_generations=4, **settings), "transformers", 128)
    assert (found.checkpointing, found.kept_layers, found.max_tokens) == (expected, 0, None)
    assert bool(found.mlp_tile is None) == bool(expected)


@pytest.mark.parametrize(("engine", "rows"), [("transformers", 64), ("vllm", None)])
def test_the_rows_of_our_own_engine_are_bounded_by_the_plan_before_memory_runs_out(
    engine: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, memory = loaded(), RunMemory()
    found = plan_training(memory, model, GRPOConfig(), Policy(model), engine, 128, sequences=64)
    assert found is not None and memory.rollout.planned == rows
    full = replace(found, concurrent_sequences=3)
    monkeypatch.setattr(run_memory, "plan_run", lambda *_: full)
    plan_training(memory, model, GRPOConfig(), Policy(model), engine, 128, sequences=64)
    assert memory.rollout.planned == (None if rows is None else 3)


def test_a_copy_of_the_adapter_as_reference_is_planned_on_the_host() -> None:
    model = loaded()
    policy, numbers = Policy(model), sum(p.numel() for p in model.parameters() if p.requires_grad)
    plans = []
    for kept in ({}, {"an adapter": torch.zeros(1)}):
        policy.reference_adapter = kept
        plans.append(plan_training(RunMemory(), model, GRPOConfig(beta=0.1), policy, "transformers", 128))
    assert plans[0] is not None and plans[1] is not None
    assert plans[1].host - plans[0].host == 4 * numbers and plans[1].train == plans[0].train


def test_a_plan_counts_the_numbers_that_are_trained_on_some_layers_of_several_ranks() -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4, target_modules=["q_proj", "down_proj"], layers_to_transform=[1],
                                             rank_pattern={"down_proj": 8})
    shape = bare.config
    numbers = 4 * (shape.hidden_size + shape.hidden_size) + 8 * (shape.intermediate_size + shape.hidden_size)
    settings = settings_of(model, GRPOConfig(optim="adamw_torch"), "vllm", 128)
    rows = {row.name: row for row in plan(model.config, settings, device("16GiB"), "tiny").rows}
    assert (rows["adapters"].train, rows["gradients"].train, rows["optimizer"].train) == tuple(
        size * numbers for size in (4, 4, 8))
    assert rows["adapter copy"].rollout == 2 * numbers
    assert f"{numbers:,} numbers, of rank 8 at most" in rows["adapters"].note


@pytest.mark.parametrize(("options", "whole", "rows"), [
    ({"modules_to_save": ["embed_tokens", "lm_head"]}, ("embed_tokens", "lm_head"), 0),
    ({"target_modules": ["q_proj", "lm_head"]}, ("embed_tokens", "lm_head"), 0),  # tied: the one matrix
    ({"trainable_token_indices": [3, 5, 7]}, (), 3),
])
def test_what_is_trained_of_embedding_and_head_is_not_planned_as_lora(
    options: dict[str, Any], whole: tuple[str, ...], rows: int
) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4, **{"target_modules": ["q_proj"]} | options)
    assert model.config.tie_word_embeddings
    found = settings_of(model, GRPOConfig(optim="adamw_8bit"), "transformers", 128)
    lora = model.config.num_hidden_layers * 4 * 2 * model.config.hidden_size
    itemsize = bare.get_input_embeddings().weight.element_size()
    assert (found.modules_to_save, found.trained_rows, found.trained) == (whole, rows, lora)
    table = rows or model.config.vocab_size
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == lora + table * model.config.hidden_size
    assert found.saved_itemsize == (itemsize if whole else 2)
    planned = {row.name: row.train for row in plan(model.config, found, device("16GiB"), "tiny").rows}
    size = itemsize * table if whole else 2 * 4 * table  # the values of rows and their originals, in float32
    assert planned["trained copies"] == size * model.config.hidden_size and planned["adapters"] == 4 * lora


def test_heads_stay_together_in_the_plan_of_a_model_whose_attention_drops_out() -> None:
    model = loaded()
    model.get_base_model().config.attention_dropout = 0.1
    assert settings_of(model, GRPOConfig(), "transformers", 128).head_groups == 1


def test_a_model_that_cannot_be_planned_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model = loaded()
    settings = settings_of(model, GRPOConfig(), "transformers", 128)
    model.config.num_local_experts = 8
    with caplog.at_level("INFO", logger="lowmem_grpo"):
        assert plan_run(settings, model, device("16GiB")) is None
    assert "no plan for this model" in caplog.text and "several experts" in caplog.text


def test_phases_on_the_cpu_count_nothing_and_show_no_number_that_was_not_measured() -> None:
    peaks = PhasePeaks(torch.device("cpu"))
    with peaks.phase("train"):
        torch.ones(1000)
    assert peaks.metrics() == {}


@gpu
def test_phases_on_a_card_have_peaks_of_their_own() -> None:
    peaks = PhasePeaks(torch.device("cuda:0"))
    held = torch.cuda.memory_allocated()
    for name, count in (("generate", 2**22), ("train", 2**20), ("train", 2**19)):
        with peaks.phase(name):
            torch.empty(count, dtype=torch.uint8, device="cuda")
    found = peaks.metrics()
    assert found["memory/generate_bytes"] - held >= 2**22 > found["memory/train_bytes"] - held >= 2**20
    assert found["memory/peak_bytes"] >= found["memory/generate_bytes"]
    assert peaks.metrics().keys() == {"memory/peak_bytes", "memory/reserved_bytes"}


def test_the_highest_peaks_of_a_run_outlive_the_reset_that_each_phase_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"allocated": 5, "reserved": 9}  # before the first phase, as of loading
    for name in now:
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", lambda device, name=name: now[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.update(allocated=1, reserved=2))
    peaks = PhasePeaks(torch.device("cuda:0"))
    for phase, allocated, reserved in (("generate", 7, 8), ("train", 3, 4)):
        with peaks.phase(phase):
            now.update(allocated=allocated, reserved=reserved)
    assert peaks.metrics() == {"memory/peak_bytes": 7, "memory/reserved_bytes": 9, "memory/generate_bytes": 7,
                               "memory/train_bytes": 3}
