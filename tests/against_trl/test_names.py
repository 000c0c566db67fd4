"""Everything that TRL's trainers offer has a fate here: it works, or it is refused with what to do instead."""

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from trainer_runs import ROWS, SMALL, digit_sum, load

from lowmem_grpo import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    SDFTConfig,
    SDFTTrainer,
    SDPOConfig,
    SDPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowmem_grpo.config.from_trl import COMPUTED, DIFFERENT, REFUSED, TAKEN_OVER, plain, settings_of
from lowmem_grpo.trainer.trl_api import NOT_HERE
from lowmem_grpo.utils import UnsupportedError

trl = pytest.importorskip("trl")
sdpo, sdft, orpo = (pytest.importorskip(f"trl.experimental.{name}") for name in ("sdpo", "sdft", "orpo"))
PAIRS = [(trl.GRPOTrainer, GRPOTrainer), (trl.SFTTrainer, SFTTrainer)]
TEACHING = [(trl.DistillationTrainer, DistillationTrainer), (sdpo.SDPOTrainer, SDPOTrainer),
            (sdft.SDFTTrainer, SDFTTrainer)]
PREFERRING = [(trl.DPOTrainer, DPOTrainer), (trl.KTOTrainer, KTOTrainer), (orpo.ORPOTrainer, ORPOTrainer)]
CONFIGS = [(trl.GRPOConfig, GRPOConfig), (trl.SFTConfig, SFTConfig), (trl.DistillationConfig, DistillationConfig),
           (sdpo.SDPOConfig, SDPOConfig), (sdft.SDFTConfig, SDFTConfig),
           (trl.DPOConfig, DPOConfig), (trl.KTOConfig, KTOConfig), (orpo.ORPOConfig, ORPOConfig)]
OF_THE_CHOICE = {"scale_rewards", "epsilon", "importance_sampling_level", "steps_per_generation", "report_to", "fp16"}


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """A trainer that has trained."""
    folder = tmp_path_factory.mktemp("grpo")
    trainer = GRPOTrainer(load(), digit_sum, GRPOConfig(output_dir=str(folder), **(SMALL | {"max_steps": 1})), ROWS)
    trainer.train()
    return trainer


def parameters(trainer: type) -> list[str]:
    return [name for name in inspect.signature(trainer).parameters if name not in ("self", "args", "model")]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_parameter_of_trls_constructor_is_ours_too_or_refused_with_advice(theirs: Any, ours: Any) -> None:
    own = inspect.signature(ours).parameters
    assert [name for name in parameters(theirs) if name not in own and name not in REFUSED] == []
    if ours is GRPOTrainer:
        assert parameters(ours)[: len(parameters(theirs))] == parameters(theirs), "they stand in another order"
    needed = {"reward_funcs": digit_sum} if ours is GRPOTrainer else {}
    taken = {"formatting_func", "compute_metrics", "preprocess_logits_for_metrics"}
    works = taken if ours is SFTTrainer else set()
    refused = [name for name in REFUSED if name in parameters(theirs) and name not in works]
    assert refused or ours is GRPOTrainer  # which takes all of them
    for name in refused:
        with pytest.raises(ValueError, match=f"{ours.__name__}: {name} .* is not supported; {REFUSED[name][:20]}"):
            ours(model=None, train_dataset=ROWS, **needed, **{name: object()})


@pytest.mark.parametrize(("theirs", "ours"), [*TEACHING, *PREFERRING])
def test_a_trainer_with_a_teacher_or_on_preferences_has_trls_parameters_in_trls_order(theirs: Any, ours: Any) -> None:
    assert parameters(ours)[: len(parameters(theirs))] == parameters(theirs)


@pytest.mark.parametrize(("theirs", "ours"), [*PAIRS, TEACHING[0], *PREFERRING])
def test_every_public_name_of_trls_trainer_is_ours_too_or_refused_with_advice(
    theirs: Any, ours: Any, grpo: GRPOTrainer
) -> None:
    names = [name for name in dir(theirs) if not name.startswith("_")]
    assert [name for name in names if not hasattr(ours, name) and name not in NOT_HERE] == []
    assert {"_metrics", "_logs"} <= NOT_HERE.keys()  # which rewards and callbacks for TRL write to
    for name, advice in NOT_HERE.items():
        assert not hasattr(grpo, name)
        with pytest.raises(UnsupportedError) as refusal:
            getattr(grpo, name)
        assert name in str(refusal.value) and advice in str(refusal.value)


@pytest.mark.parametrize(("theirs", "ours"), CONFIGS)
def test_every_field_of_trls_settings_is_read_or_refused_by_name(theirs: Any, ours: Any) -> None:
    own = {field.name for field in dataclasses.fields(ours)}
    for field in dataclasses.fields(theirs):
        name = field.name
        if name in own or name in COMPUTED or name in ("local_rank", "do_predict", *ours.renamed):
            continue
        given = theirs(use_cpu=True)
        object.__setattr__(given, name, "set by hand")
        try:
            settings_of(given, ours)
        except ValueError as refusal:
            assert f"{name}='set by hand' is not supported" in str(refusal)
        else:
            assert ours.unsupported[name].any_value, name


@pytest.mark.parametrize(("theirs", "ours"), [*CONFIGS, (transformers.TrainingArguments, SFTConfig)])
def test_every_default_that_differs_from_trls_is_taken_over_or_said_to_differ(theirs: Any, ours: Any) -> None:
    usual, own = theirs(use_cpu=True), ours()
    differ = {name for name in (field.name for field in dataclasses.fields(own)) if hasattr(usual, name)
              and plain(getattr(usual, name)) != getattr(own, name) and getattr(own, name) is not None}
    assert differ - set(TAKEN_OVER) - set(DIFFERENT) - OF_THE_CHOICE - {"use_cpu"} == set()


def test_what_was_set_is_read_and_what_was_not_keeps_our_default_or_trls(caplog: pytest.LogCaptureFixture) -> None:
    given = trl.GRPOConfig("out", max_steps=3, num_generations=4, optim="adamw_8bit", lr_scheduler_type="cosine",
                           report_to="trackio", use_cpu=True, epsilon=0.3, gradient_accumulation_steps=2)
    assert settings_of(given, GRPOConfig) == GRPOConfig(
        output_dir="out", max_steps=3, num_generations=4, optim="adamw_8bit", lr_scheduler_type="cosine",
        report_to="trackio", epsilon=0.3, gradient_accumulation_steps=2, steps_per_generation=2, logging_steps=10,
        save_steps=500, use_cpu=True,
    )
    assert "bf16: the model's own precision" in caplog.text and "optim:" not in caplog.text
    taught = settings_of(trl.DistillationConfig("out", use_cpu=True, beta=0.3), DistillationConfig)
    assert (taught.divergence, taught.learning_rate, taught.logging_steps) == (0.3, 1e-6, 10)
    for theirs, ours in ((sdpo.SDPOConfig, SDPOConfig), (sdft.SDFTConfig, SDFTConfig)):
        read = settings_of(theirs("out", use_cpu=True, teacher_model_kind="live", distillation_alpha=1.0), ours)
        assert (read.teacher_model_kind, read.distillation_alpha, read.learning_rate) == ("live", 1.0, 5e-5)
    sft = settings_of(trl.SFTConfig("out", use_cpu=True, bf16=False, packing=True), SFTConfig)
    assert (sft.max_length, sft.truncation_mode, sft.assistant_only_loss) == (1024, "keep_start", False)


@pytest.mark.parametrize(("given", "ours", "message"), [
    (trl.SFTConfig(use_cpu=True), GRPOConfig, r"SFTConfig; allowed are GRPOConfig of lowmem_grpo"),
    (SFTConfig(), GRPOConfig, "lowmem_grpo.config.sft.SFTConfig; allowed"), ({}, SFTConfig, "builtins.dict; allowed"),
])
def test_settings_of_another_trainer_are_refused(given: Any, ours: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        settings_of(given, ours)


def test_what_scripts_do_after_training_works(grpo: GRPOTrainer, tmp_path: Path, capsys: Any) -> None:
    stats = grpo.state.log_history[-2]
    grpo.save_model(str(tmp_path / "model"))
    assert {"adapter_model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "model").iterdir()}
    grpo.log_metrics("train", {"train_runtime": 75.0, "loss": 0.123456})
    assert "train_runtime = 1 min 15 s" in capsys.readouterr().out
    grpo.save_metrics("train", {"loss": 1.0})
    assert '"loss": 1.0' in (grpo.run_dir / "all_results.json").read_text()
    grpo.model.add_model_tags("sums")
    grpo.create_model_card(dataset_name="mine", tags=["maths"])
    said = (grpo.run_dir / "README.md").read_text()
    assert "- data: mine\n" in said and "- sums\n" in said and "- maths\n" in said
    grpo.log({"mine": 1.0})
    assert grpo.state.log_history[-1] == {"step": 1, "epoch": grpo.state.epoch, "mine": 1.0}
    grpo.accelerator.print("done")
    assert grpo.accelerator.is_main_process and grpo.is_world_process_zero() and "done" in capsys.readouterr().out
    assert grpo.processing_class is grpo.tokenizer and grpo.train_dataset is ROWS and grpo.eval_dataset is None
    assert (grpo.args.push_to_hub, grpo.args.load_best_model_at_end, grpo.args.do_eval) == (False, False, False)
    assert grpo.get_learning_rates() == [stats["learning_rate"] * 0] and grpo.get_total_train_batch_size() == 8
    for touched in ("gather", "backward"):
        with pytest.raises(UnsupportedError, match="accelerate is not used"):
            getattr(grpo.accelerator, touched)
    with pytest.raises(UnsupportedError, match="make a new trainer"):
        grpo.train_dataset = []
    with pytest.raises(ValueError, match="no eval_dataset; pass one"):
        grpo.evaluate()
    assert grpo.evaluate(ROWS[:1], metric_key_prefix="test")["test_reward"] is not None


def test_an_upload_goes_to_the_named_repository(grpo: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem_grpo.models import hub

    sent: dict[str, Any] = {}

    def upload(folder_path: str, **options: Any) -> str:
        sent.update(options, files={path.name for path in Path(folder_path).iterdir()})
        return "the address"

    api = SimpleNamespace(whoami=lambda: {"name": "me"}, create_repo=lambda **options: sent.update(options),
                          upload_folder=upload, file_exists=lambda repo, name: False)
    monkeypatch.setattr(hub, "client", lambda token=None: api)
    assert grpo.push_to_hub("Trained", dataset_name="mine") == "the address"
    assert (sent["repo_id"], sent["commit_message"], sent["private"]) == (f"me/{grpo.run_dir.name}", "Trained", True)
    assert {"README.md", "adapter_model.safetensors", "tokenizer.json"} <= sent["files"]
