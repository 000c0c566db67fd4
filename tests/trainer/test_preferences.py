"""Training on preferences: pairs stay together, the reference stays as it was, bad rows are counted, runs resume."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from run_pages import Page
from trainer_runs import adapter_of, load, moved, relative, same
from transformers import AutoModelForCausalLM

from lowmem_grpo import (
    DPOConfig,
    DPOTrainer,
    FastLanguageModel,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PatchDPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.stored_model import resolve
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.saved_adapter import MismatchError, list_checkpoints
from lowmem_grpo.types import RolloutGroup

KINDS: dict[str, Any] = {"dpo": (DPOTrainer, DPOConfig), "orpo": (ORPOTrainer, ORPOConfig),
                         "kto": (KTOTrainer, KTOConfig)}
ROWS = [{"prompt": f"Start with {n}. Add 2. What is the result?", "chosen": f" It is {n + 2}.",
         "rejected": " No idea" + " at all" * (n % 3)} for n in range(1, 7)]


def make(kind: str, folder: Path, rows: Any = ROWS, model: Any = None, **settings: Any) -> Any:
    trainer, config = KINDS[kind]
    parts = {name: settings.pop(name) for name in ("eval_dataset", "ref_model", "callbacks") if name in settings}
    known = {"max_steps": 3, "per_device_train_batch_size": 3, "learning_rate": 3e-3, "disable_tqdm": True,
             "max_length": 128} | settings
    return trainer(model or load(), args=config(output_dir=str(folder), **known), train_dataset=rows, **parts)


def groups_of(trainer: Any, rows: Any = None) -> list[RolloutGroup]:
    held = trainer.source.dataset if rows is None else rows
    return trainer.groups_of(trainer.encoder.encode(held[place]) for place in range(len(held)))


def gradient(trainer: Any, groups: Any = None) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    metrics = trainer.forward_backward(groups or groups_of(trainer))
    return metrics, {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


# Pairs.


def test_a_pair_that_is_cut_apart_is_noticed_and_none_is(tmp_path: Path) -> None:
    trainer = make("dpo", tmp_path, max_tokens_per_micro_batch=1)
    moved(trainer.model)
    metrics, _ = gradient(trainer)
    assert metrics["micro_batches"] == len(ROWS)
    apart = groups_of(trainer)
    for group in apart:
        for rollout in group.rollouts:
            rollout.unit = None
    with pytest.raises(RuntimeError, match="the sides of a pair are in two micro-batches"):
        trainer.forward_backward(apart)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_no_loss_and_no_gradient(kind: str, tmp_path: Path) -> None:
    found = []
    for number, own in enumerate(({"max_tokens_per_micro_batch": 1}, {"per_device_train_batch_size": 12})):
        trainer = make(kind, tmp_path / str(number), **own)
        moved(trainer.model)
        found.append(gradient(trainer))
    (cut, small), (whole, large) = found
    assert cut.pop("micro_batches") > whole.pop("micro_batches") == 1
    assert cut == pytest.approx(whole, rel=1e-5, abs=1e-6) and relative(small, large) < 1e-5


def test_a_micro_batch_without_a_plan_has_as_many_pairs_as_the_settings_say(tmp_path: Path) -> None:
    trainer = make("dpo", tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert trainer.step()["micro_batches"] == 3


# The reference.


def reference_of(groups: list[RolloutGroup]) -> list[torch.Tensor]:
    return [rollout.ref_logprobs for group in groups for rollout in group.rollouts]  # type: ignore[misc]


def test_reference_passes_have_no_dropout_even_if_training_has(tmp_path: Path) -> None:
    trainer = make("dpo", tmp_path, model=load(lora_dropout=0.5), disable_dropout=False)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    for layer in trainer.policy.base.model.layers:
        layer.mlp.register_forward_hook(lambda mlp, _, out: torch.nn.functional.dropout(out, 0.5, mlp.training))
    trainer.model.train()
    first, again = groups_of(trainer), groups_of(trainer)
    gradient(trainer, first)
    gradient(trainer, again)
    assert all(map(torch.equal, reference_of(first), reference_of(again)))


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_that_is_computed_before_training_gives_the_same_run(kind: str, tmp_path: Path) -> None:
    runs = {}
    for name, own in {"each step": {}, "before": {"precompute_ref_log_probs": True}}.items():
        model = moved(load())
        trainer = make(kind, tmp_path / name, model=model, max_steps=-1, num_train_epochs=2, **own)
        passes = []
        under, learner = trainer.policy.reference, trainer.learner
        trainer.policy.reference = lambda under=under, passes=passes: (passes.append(1), under())[1]
        trainer.train()
        runs[name] = adapter_of(model), len(passes), learner
    assert relative(runs["before"][0], runs["each step"][0]) < 1e-4
    if kind == "dpo":
        assert (runs["before"][1], runs["each step"][1]) == (1, 4)


def test_a_reference_that_follows_the_policy_is_computed_anew(tmp_path: Path) -> None:
    model = load()
    trainer = make("dpo", tmp_path, model=model, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0,
                   per_device_train_batch_size=6)
    groups = groups_of(trainer)
    trainer.update(groups)
    metrics = trainer.update(groups)
    assert metrics["rewards/margins"] == pytest.approx(0, abs=1e-5)  # as the policy is its own reference again


def test_a_reference_model_is_refused_unless_it_is_the_models_own_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = moved(load())
    base = AutoModelForCausalLM.from_pretrained(model.loaded.name)
    expected = make("dpo", tmp_path, model=copy.deepcopy(model), ref_model=base)
    assert "leave it out to save its memory" in caplog.text
    metrics, _ = gradient(expected)
    assert abs(metrics["rewards/margins"]) > 0.01  # the base is the reference, and not the adapter
    named = make("dpo", tmp_path, model=copy.deepcopy(model), ref_model=model.loaded.name)
    assert not named.policy.reference_adapter
    ours, _ = FastLanguageModel.from_pretrained(model.loaded.name, load_in_4bit=False, max_seq_length=128)
    assert not make("dpo", tmp_path, model=copy.deepcopy(model), ref_model=ours).policy.reference_adapter
    for changed in (base.model.layers[0].self_attn.q_proj, base.model.norm):
        kept = changed.weight.data.clone()
        changed.weight.data.mul_(1.01)
        with pytest.raises(ValueError, match=r"ref_model is a Qwen2ForCausalLM, which by .* Leave ref_model"):
            make("dpo", tmp_path, model=model, ref_model=base)
        changed.weight.data = kept
    with pytest.raises(ValueError, match="ref_model is 'another', which by its name or its weights is not the model's"):
        make("dpo", tmp_path, model=model, ref_model="another")
    place = f"{resolve(model.loaded.name)}/../{Path(resolve(model.loaded.name)).name}"
    assert not make("dpo", tmp_path, model=copy.deepcopy(model), ref_model=place).policy.reference_adapter
    with pytest.raises(ValueError, match="ref_model is the model itself, which changes in training"):
        make("kto", tmp_path, model=model, ref_model=model)
    with pytest.raises(TypeError, match=r"ref_model is a DPOConfig, .* write args="):
        DPOTrainer(model, DPOConfig(output_dir=str(tmp_path)), train_dataset=ROWS)


def test_the_reference_of_a_stream_is_not_computed_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="precompute_ref_log_probs=True is not supported with IterableDataset"):
        make("dpo", tmp_path, rows=Dataset.from_list(ROWS).to_iterable_dataset(), precompute_ref_log_probs=True)


def test_a_resumed_run_forgets_what_another_reference_said_of_its_rows(tmp_path: Path) -> None:
    run = partial(make, "dpo", tmp_path, max_steps=2, save_steps=1, eval_dataset=ROWS)
    model = load()
    run(model=model).train()
    again = run(model=model, max_steps=3)  # whose reference is the trained adapter
    before = again.evaluate()
    again.train(resume_from_checkpoint=True)  # and again the base model
    own, fresh = again.evaluate(), again.evaluate(eval_dataset=ROWS)
    assert own["eval_rewards/margins"] == fresh["eval_rewards/margins"] != before["eval_rewards/margins"]


def test_a_completion_that_max_completion_length_makes_equal_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": " yes indeed", "rejected": " yes no"}, *ROWS]
    trainer = make("dpo", tmp_path, rows, max_completion_length=1, max_steps=1, per_device_train_batch_size=7)
    shown = trainer.encoder.encode(rows[0])
    assert isinstance(shown, str) and "equal" in shown


# Rows.


def test_bad_pairs_are_left_out_and_counted_and_no_loss_is_nan(tmp_path: Path) -> None:
    long = "word " * 200
    bad = [{"prompt": "a", "chosen": " b", "rejected": " b"}, {"prompt": "a", "chosen": "", "rejected": " b"},
           {"prompt": long, "chosen": " b", "rejected": " c"}, {"prompt": "a", "chosen": None, "rejected": " c"}]
    trainer = make("dpo", tmp_path, [*bad, *ROWS], max_steps=-1, num_train_epochs=1, shuffle_dataset=False)
    trainer.train()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert len(lines) == 2 and all(line["loss"] == line["loss"] for line in lines)
    assert lines[-1]["data/skipped_rows"] == 4
    reasons = json.loads((tmp_path / "summary.json").read_text())["skipped_rows"]
    assert reasons == {"chosen and rejected are equal": 1, "empty chosen": 2,
                       "no token of chosen is trained within max_length": 1}


@pytest.mark.parametrize(("kind", "settings"), [
    *(("dpo", {"loss_type": [name], "beta": 50.0, **({"label_smoothing": 0.1} if name == "exo_pair" else {})})
      for name in ("sigmoid", "ipo", "exo_pair", "sppo_hard", "discopop", "aot_unpaired")),
    *(("dpo", {"f_divergence_type": name, "beta": 50.0}) for name in ("forward_kl", "js_divergence",
                                                                    "alpha_divergence")),
    ("orpo", {"beta": 50.0}), ("kto", {"beta": 50.0}),
], ids=str)
def test_losses_far_from_the_reference_are_finite(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = make(kind, tmp_path, **settings)
    moved(trainer.model)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(20)
    metrics, found = gradient(trainer)
    assert all(value == value and abs(value) < float("inf") for value in metrics.values())
    assert all(torch.isfinite(value).all() for value in found.values())


def test_a_single_row_has_no_other_prompt_and_is_refused_and_an_epochs_last_row_borrows_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"loss_type 'kto' reads each completion behind .* raise per_device"):
        make("kto", tmp_path, per_device_train_batch_size=1)
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS[:4]]
    with pytest.raises(DataError, match="all rows have the same prompt; add others"):
        make("kto", tmp_path, rows[:1], max_steps=1).step()
    trainer = make("kto", tmp_path, rows, max_steps=-1, num_train_epochs=1)
    moved(trainer.model)
    trainer.step()
    (last,) = trainer.next_groups()
    other = trainer.encoder.encode(rows[0])
    assert last.rollouts[0].fields["next_prompt"] == other.ids != last.prompt_ids
    assert trainer.update([last])["kl"] >= 0


def test_trls_own_collator_is_refused_or_one_that_cuts_is_taken(tmp_path: Path) -> None:
    config = DPOConfig(output_dir=str(tmp_path), max_length=128, disable_tqdm=True)
    collators = pytest.importorskip("trl.trainer.dpo_trainer").DataCollatorForPreference
    DPOTrainer(load(), args=config, train_dataset=ROWS, data_collator=collators(pad_token_id=0))
    with pytest.raises(ValueError, match=r"data_collator \(DataCollatorForPreference\) is not supported"):
        DPOTrainer(load(), args=config, train_dataset=ROWS, data_collator=collators(pad_token_id=0, max_length=9))


def test_a_stream_or_rows_of_one_prompt_end_a_run_of_kto_at_a_step_of_one_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": bool(place % 2)}
            for place, row in enumerate([*ROWS, ROWS[0]])]
    streamed = make("kto", tmp_path / "a", lambda: iter(rows), eval_dataset=rows[:1], max_steps=4)
    streamed.train()
    assert streamed.state.global_step == 4 and "behind its own prompt, as TRL does" in caplog.text
    alike = [row | {"prompt": "One?"} for row in rows[:4]]
    trainer = make("kto", tmp_path / "b", alike, max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize(("before", "now"), [("dpo", "orpo"), ("orpo", "kto"), ("sft", "dpo"), ("kto", "grpo")])
def test_a_checkpoint_of_another_method_is_resumed(before: str, now: str, tmp_path: Path) -> None:
    made = {"sft": lambda folder: SFTTrainer(load(), [{"text": "a b c"}] * 4, args=SFTConfig(
                output_dir=str(folder), max_steps=1, per_device_train_batch_size=2, disable_tqdm=True)),
            "grpo": lambda folder: GRPOTrainer(load(), lambda completions, **_: [0.0] * len(completions), GRPOConfig(
                output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, num_generations=2,
                max_completion_length=4, disable_tqdm=True), [{"prompt": row["prompt"]} for row in ROWS])}
    trainers = [made[kind](tmp_path / kind) if kind in made else make(kind, tmp_path / kind, max_steps=1)
                for kind in (before, now)]
    trainers[0].train()
    (saved,) = list_checkpoints(tmp_path / before)
    weights = adapter_of(trainers[1].model)
    with pytest.raises(MismatchError, match=rf"checkpoint of '{before}', and this run is '{now}', .*from_pretrained"):
        trainers[1].train(resume_from_checkpoint=str(saved))
    assert same(weights, adapter_of(trainers[1].model)) and trainers[1].state.global_step == 0


def test_orpo_would_compute_a_pairs_prompt_twice_or_train_it_twice(tmp_path: Path) -> None:
    groups = groups_of(make("orpo", tmp_path))
    (batch,) = pack(groups)
    prompts, completions = (sum(counts) for counts in zip(*(
        (len(group.prompt_ids) - 1, sum(len(rollout.completion_ids) for rollout in group.rollouts))
        for group in groups), strict=True))
    assert (len(batch.input_ids), len(batch.trained)) == (prompts + completions,) * 2
    assert batch.of_prompts.sum() == prompts


# Runs.


@pytest.mark.every(2)
@pytest.mark.parametrize(("kind", "settings"), [
    ("dpo", {"loss_type": ["sigmoid", "aot"]}), ("dpo", {"precompute_ref_log_probs": True}),
    ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model": "its own base"}),
    ("orpo", {}), ("kto", {"shuffle_dataset": True}),
], ids=str)
def test_a_resumed_run_is_the_undisturbed_one(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = moved(load())
    settings = settings | ({"ref_model": model.loaded.name} if "ref_model" in settings else {})
    run = partial(make, kind, save_steps=2, lr_scheduler_type="constant", **settings)
    straight, parts = copy.deepcopy(model), copy.deepcopy(model)
    run(tmp_path / "straight", model=straight, max_steps=4).train()
    run(tmp_path / "parts", model=copy.deepcopy(model), max_steps=2).train()
    resumed = run(tmp_path / "parts", model=parts, max_steps=4)
    assert resumed.train(resume_from_checkpoint=True).finished
    assert same(adapter_of(parts), adapter_of(straight))
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("straight", "parts")]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]] and len(lines[0]) == 4
    assert len(list_checkpoints(tmp_path / "parts")) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_records_and_report_show_rewards_and_margins(kind: str, tmp_path: Path) -> None:
    several = {"one": ROWS[:3], "two": Dataset.from_list(ROWS[3:])}
    trainer = make(kind, tmp_path, eval_dataset=several, eval_strategy="steps", eval_steps=1, max_steps=2,
                   per_device_train_batch_size=12, metric_for_best_model="one_rewards/margins")
    before = adapter_of(trainer.model)
    trainer.train()
    assert not same(adapter_of(trainer.model), before)
    lines = read_lines(tmp_path / "metrics.jsonl")
    wanted = {"loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "num_tokens"}
    wanted |= {"kto": {"kl"}, "orpo": {"nll_loss", "rewards/accuracies"}, "dpo": {"rewards/accuracies"}}[kind]
    named = [line for line in lines if "eval_one_loss" in line]
    assert wanted - {"num_tokens"} <= {name.removeprefix("eval_one_") for name in named[0]} and len(named) == 2
    assert wanted <= set().union(*lines)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["method"]) == ("finished", kind)
    page = Page(tmp_path / "report.html")
    drawn = {chart["title"] for chart in page.data["charts"]}
    assert {"Loss", "Rewards of both sides"} <= drawn and ("Chosen sides ahead" in drawn) == (kind != "kto")
    assert "optimization" in page.prose and "samples" not in page.prose


def test_the_live_view_shows_how_far_chosen_sides_are_ahead(tmp_path: Path, capsys: Any) -> None:
    make("dpo", tmp_path, max_steps=1, disable_tqdm=None).train()
    said = capsys.readouterr().out
    assert "step 1/1  loss " in said and "accuracy " in said and "margin " in said


def test_preferences_are_learnt(tmp_path: Path) -> None:
    trainer = make("dpo", tmp_path, max_steps=8, per_device_train_batch_size=6, learning_rate=1e-2)
    trainer.train()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[-1]["rewards/accuracies"] == 1 and lines[-1]["loss"] < lines[0]["loss"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [
    {"load_in_4bit": True}, {"load_in_4bit": True, "dtype": torch.bfloat16}, {"bf16": True}], ids=str)
def test_the_loss_falls_whatever_the_weights_are(kind: str, parts: dict[str, Any], tmp_path: Path) -> None:
    own = {name: parts[name] for name in parts if name == "bf16"}
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, **{
        "load_in_4bit": False, **{name: value for name, value in parts.items() if name != "bf16"}})
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing="offload")
    make(kind, tmp_path, model=model, max_steps=8, per_device_train_batch_size=12, learning_rate=1e-2, **own).train()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] * 0.8


def test_arguments_of_older_notebooks_are_taken(tmp_path: Path) -> None:
    PatchDPOTrainer()
    model = load()
    trainer = DPOTrainer(
        model=model, ref_model=None, args=DPOConfig(output_dir=str(tmp_path), max_steps=1), beta=0.3,
        train_dataset=Dataset.from_list(ROWS), tokenizer=model.loaded.tokenizer, max_length=100, max_prompt_length=20,
        max_completion_length=4)
    assert (trainer.args.beta, trainer.args.max_length) == (0.3, 100)
    assert all(len(group.prompt_ids) <= 20 and len(rollout.completion_ids) <= 4
               for group in trainer.next_groups() for rollout in group.rollouts)


def test_a_default_length_above_the_context_is_lowered_and_a_chosen_one_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert make("dpo", tmp_path, max_length=1024).limit == 128 and "the context has 128 tokens" in caplog.text
    with pytest.raises(ValueError, match="max_length is 129 and the context has 128 tokens"):
        make("dpo", tmp_path, max_length=129)
