"""What the KL term compares with: the adapter that the trainer began with, in a resumed run too, or the base model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import shallow
from torch import Tensor
from trainer_runs import Gradients, adapter, adapter_of, load, make, moved, naive_logprobs, plain_peft, same
from transformers import AutoModelForCausalLM

from lowmem_grpo import GRPOConfig
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.saved_adapter import MismatchError
from lowmem_grpo.types import RolloutGroup
from tests.attacks.small_run import StopAt

FILE = "reference.safetensors"
SETTINGS: dict[str, Any] = {"beta": 0.5, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def kl_of(folder: Path) -> list[float]:
    return [line["kl"] for line in read_lines(folder / "metrics.jsonl")]


@torch.no_grad()
def k3(groups: list[RolloutGroup], policy: Any, reference: Any) -> float:
    """The mean over all tokens, by plain transformers and PEFT."""
    tokens: list[Tensor] = []
    for group in groups:
        for rollout in group.rollouts:
            logp, ref = (naive_logprobs(one, group.prompt_ids, rollout.completion_ids) for one in (policy, reference))
            tokens.append((ref - logp).exp() - 1 - (ref - logp))
    return float(torch.cat(tokens).mean())


def test_a_run_that_goes_on_from_an_adapter_begins_with_a_kl_of_0_against_it(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", model=moved(load()), beta=0.1)
    begun = plain_peft(trainer.model, tmp_path / "begun")
    assert abs(trainer.update(trainer.rollout())["kl"]) < 1e-8
    trainer.state.policy_version += 1
    after, groups = plain_peft(trainer.model, tmp_path / "after"), trainer.rollout()
    wanted = k3(groups, after, begun)
    assert wanted > 1e-4 and trainer.update(groups)["kl"] == pytest.approx(wanted, rel=1e-3)


def test_the_base_model_is_the_reference_where_the_settings_say_so(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", model=moved(load()), beta=0.1, kl_reference="base")
    plain, groups = plain_peft(trainer.model, tmp_path / "begun"), trainer.rollout()
    wanted = k3(groups, plain, AutoModelForCausalLM.from_pretrained(shallow()))
    assert wanted > 1e-3 and trainer.update(groups)["kl"] == pytest.approx(wanted, rel=1e-3)


def test_the_reference_computes_without_the_dropout_of_the_adapter(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", model=moved(load(lora_dropout=0.5)), beta=0.1)
    groups = trainer.rollout()
    plain = plain_peft(trainer.model, tmp_path / "begun")
    trainer.model.train()
    trainer.learner.prepare(groups, 1)
    assert trainer.model.training
    for rollout in groups[0].rollouts:
        wanted = naive_logprobs(plain, groups[0].prompt_ids, rollout.completion_ids)
        assert rollout.ref_logprobs is not None and (rollout.ref_logprobs - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 0.1, "kl_reference": "base"}])
def test_no_copy_is_kept_that_nothing_compares_with_and_a_fresh_adapter_needs_none(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    assert make(tmp_path, model=moved(load()), **settings).policy.reference_adapter is None
    assert make(tmp_path, beta=0.1).policy.reference_adapter == {}


def test_the_live_adapter_keeps_its_memory_and_its_bits_when_the_reference_fails(tmp_path: Path) -> None:
    trainer = make(tmp_path, model=moved(load()), beta=0.1)
    places = {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    trainer.model.get_parameter(next(name for name in places if "lora_B" in name)).data += 1
    before = adapter(trainer)
    with pytest.raises(RuntimeError, match="broken"), trainer.policy.reference():
        assert not same(adapter(trainer), before)
        raise RuntimeError("broken")
    assert same(adapter(trainer), before)
    assert {name: p.data_ptr() for name, p in trainer.model.named_parameters()} == places


# A reference that follows the policy


def test_a_reference_that_follows_is_mixed_number_by_number_at_its_steps(tmp_path: Path) -> None:
    """TRL: target.mul_(1 - alpha).add_(parameter, alpha=alpha) after every ref_model_sync_steps steps."""
    trainer = make(tmp_path, beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.25, ref_model_sync_steps=2,
                   max_steps=4)
    begun, seen = adapter(trainer), []
    assert same(trainer.policy.reference_adapter or {}, begun)

    class Keeps:
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(adapter(trainer))

    trainer.add_callback(Keeps())
    trainer.train()
    for name, kept in (trainer.policy.reference_adapter or {}).items():
        first = 0.75 * begun[name] + 0.25 * seen[1][name]
        torch.testing.assert_close(kept, 0.75 * first + 0.25 * seen[3][name], rtol=1e-6, atol=1e-8)
        assert not torch.equal(kept, begun[name])


def test_the_base_model_as_reference_begins_to_follow_with_nothing_added(tmp_path: Path) -> None:
    trainer = make(tmp_path, model=moved(load()), beta=0.1)
    own, trainer.policy.reference_adapter = adapter(trainer), {}
    trainer.policy.move_reference(0.25)
    found = trainer.policy.reference_adapter
    assert found.keys() == own.keys()
    for name, kept in found.items():
        torch.testing.assert_close(kept, own[name] * (0.25 if "lora_B" in name else 1))


@pytest.mark.parametrize(("settings", "message"), [
    ({"sync_ref_model": True}, "no KL term, whose weight is GRPOConfig's beta: nothing is compared with"),
    ({"sync_ref_model": True, "beta": 0.1, "kl_reference": "base"}, "kl_reference is 'base', which stays as it is"),
    ({"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha is 1.5"), ({"ref_model_sync_steps": 0}, "at least 1"),
])
def test_a_reference_that_cannot_follow_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)


# Runs that stop and go on


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Gradients]:
    """A run from an adapter, without a stop; and the adapter that it began with."""
    folder, model = tmp_path_factory.mktemp("straight"), moved(load())
    begun = adapter_of(model)
    make(folder, model=model, **SETTINGS).train()
    return folder, begun


def stopped(folder: Path, model: FastPeftModel, **settings: Any) -> Path:
    """A run that stopped after two steps."""
    make(folder, model=model, callbacks=[StopAt(2)], **SETTINGS | settings).train()
    return folder


def final(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("fresh", [True, False], ids=["a new adapter", "another adapter"])
@pytest.mark.every(2)
def test_a_resumed_run_compares_with_what_the_run_began_with_bit_for_bit(
    fresh: bool, straight: tuple[Path, Gradients], tmp_path: Path
) -> None:
    stopped(tmp_path, moved(load()))
    kept = load_file(tmp_path / "checkpoint-2" / FILE)
    assert same(kept, straight[1])
    other = load() if fresh else make(tmp_path / "other", model=moved(load())).model
    make(tmp_path, model=other, **SETTINGS).train(resume_from_checkpoint=True)
    assert same(load_file(tmp_path / "checkpoint-4" / FILE), kept)
    assert same(final(tmp_path), final(straight[0])) and kl_of(tmp_path) == kl_of(straight[0])


@pytest.mark.parametrize("older", [True, False], ids=["an older checkpoint", "a fresh adapter"])
def test_a_run_that_began_with_the_base_as_reference_keeps_it(older: bool, tmp_path: Path) -> None:
    folder = stopped(tmp_path, load()) / "checkpoint-2"
    assert not (folder / FILE).exists()
    trainer = make(tmp_path, model=moved(load()), **SETTINGS)
    assert trainer.policy.reference_adapter
    if older:
        saved = trainer.saver.snapshot()
        del saved["keeps_reference"]
        trainer.saver.restore_reference(folder, saved)
    else:
        trainer.saver.load(folder)
    assert trainer.policy.reference_adapter == {}


def test_a_run_that_gets_a_kl_term_when_it_is_resumed_compares_with_the_adapter_that_its_trainer_has(
    tmp_path: Path
) -> None:
    stopped(tmp_path, moved(load()), beta=0.0)
    trainer = make(tmp_path, model=moved(load()), **SETTINGS)
    trainer.saver.load(tmp_path / "checkpoint-2")
    assert same(trainer.policy.reference_adapter or {}, adapter_of(moved(load())))


def test_a_reference_of_another_adapter_is_refused(tmp_path: Path) -> None:
    folder = stopped(tmp_path, moved(load())) / "checkpoint-2"
    kept = load_file(folder / FILE)
    save_file({name: tensor[:1] for name, tensor in kept.items()}, folder / FILE)
    trainer = make(tmp_path, model=moved(load()), **SETTINGS)
    with pytest.raises(MismatchError, match=r"lora_.* is \[1, .* in the checkpoint"):
        trainer.saver.restore_reference(folder, {})
