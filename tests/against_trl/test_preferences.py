"""DPO, ORPO and KTO against TRL 1.16 in float32, on the same weights and rows: losses, metrics and LoRA gradients."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from small_models import SPLIT, scatter, shallow
from trainer_runs import Gradients, load, moved, relative
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.orpo import ORPOConfig as TrlORPOConfig
from trl.experimental.orpo import ORPOTrainer as TrlORPOTrainer
from trl_runs import PLAIN

from lowmem_grpo import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, ORPOConfig, ORPOTrainer

PAIRS = [
    {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 11, or"},
    {"prompt": "Add 3 to 4:", "chosen": " 7 it is", "rejected": " 8"},
    {"prompt": "1 + 1 =", "chosen": " two", "rejected": " one"}, {"prompt": "Say a", "chosen": " a", "rejected": " b!"},
    {"prompt": "9 - 4 is", "chosen": " 5.", "rejected": " 13"},
]
LABELLED = [{"prompt": row["prompt"], "completion": row["rejected" if place % 3 else "chosen"], "label": not place % 3}
            for place, row in enumerate(PAIRS)]
TOLERANCE = 1e-5
Measured = tuple[float, dict[str, float], Gradients]


def settings(**own: Any) -> dict[str, Any]:
    usual = {name: PLAIN[name] for name in PLAIN.keys() - {"shuffle_dataset", "max_completion_length",
                                                           "logging_strategy"}}
    return usual | {"output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": len(PAIRS), "max_length": 64} | own


def trls(kind: Any, config: Any, rows: Any, given: Any = None) -> Any:
    """TRL's trainer on the shallow model with LoRA, or on a `given` model with an adapter."""
    lora = None if given else peft.LoraConfig(r=4, lora_alpha=16, target_modules=SPLIT, task_type="CAUSAL_LM")
    model = given or AutoModelForCausalLM.from_pretrained(shallow())
    return kind(model, args=config, train_dataset=Dataset.from_list(rows), peft_config=lora,
                processing_class=AutoTokenizer.from_pretrained(shallow()))


def theirs(trainer: Any, seed: int = 1) -> Measured:
    """The loss of a batch of all rows, its metrics and gradients, with random weights of the adapter."""
    scatter(trainer.model, seed=seed, of=".lora_B.default")
    trainer.model.train()
    trainer.model.zero_grad()
    store = trainer._stored_metrics if hasattr(trainer, "_stored_metrics") else trainer._metrics
    store["train"].clear()
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    metrics = {name: values[-1] for name, values in store["train"].items()}
    return loss.item(), metrics, {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def ours(trainer: Any, like: Any, seed: int = 1) -> Measured:
    """The same of our trainer, with the weights of TRL's."""
    weights = dict(like.model.named_parameters())
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(weights[name])
    rows = trainer.source.dataset
    groups = trainer.groups_of(trainer.encoder.encode(rows[place]) for place in range(len(rows)))
    metrics = trainer.forward_backward(groups)
    return metrics["loss"], metrics, {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


def same(found: Measured, wanted: Measured, left_out: Iterable[str] = ()) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    names = {name for name in wanted[1] if not name.startswith("logits/")} - {"num_tokens", *left_out}
    assert names
    assert {name: found[1][name] for name in names} == pytest.approx(
        {name: wanted[1][name] for name in names}, rel=TOLERANCE, abs=TOLERANCE)
    assert relative(found[2], wanted[2]) < TOLERANCE


CASES: tuple[dict[str, Any], ...] = (
    *({"loss_type": [name]} for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
                                         "apo_down", "discopop", "sft", "sigmoid_norm", "aot", "aot_unpaired")),
    *({"loss_type": [name], "label_smoothing": 0.1} for name in ("exo_pair", "robust", "aot", "aot_unpaired")),
    *({"f_divergence_type": name, "beta": 0.3} for name in ("forward_kl", "js_divergence", "alpha_divergence")),
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.5},
    {"ld_alpha": 0.3, "loss_type": ["sigmoid", "aot", "sft", "ipo"]}, {"ld_alpha": 0.0},
)


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_metrics_or_gradients_of_dpo_would_not_be_trls(case: dict[str, Any]) -> None:
    trainer = trls(trl.DPOTrainer, trl.DPOConfig(**settings(**case)), PAIRS)
    wanted = theirs(trainer)
    for cut in (2, 1) if len(case) == 1 else (5,):
        config = DPOConfig(**settings(per_device_train_batch_size=cut, **case))
        same(ours(DPOTrainer(load(), args=config, train_dataset=PAIRS), trainer), wanted)


@pytest.mark.parametrize("cut", [1, 5])
def test_the_loss_metrics_or_gradients_of_orpo_would_not_be_trls(cut: int) -> None:
    trainer = trls(TrlORPOTrainer, TrlORPOConfig(**settings(beta=0.4)), PAIRS)
    wanted = theirs(trainer)
    own = ORPOTrainer(load(), ORPOConfig(**settings(beta=0.4, per_device_train_batch_size=cut)), train_dataset=PAIRS)
    same(ours(own, trainer), wanted)


@pytest.mark.parametrize("case", [{}, {"loss_type": "apo_zero_unpaired"}, {
    "desirable_weight": 1.5, "undesirable_weight": 0.7, "beta": 0.4}], ids=str)
def test_the_loss_metrics_or_gradients_of_kto_would_not_be_trls(case: dict[str, Any]) -> None:
    trainer = trls(trl.KTOTrainer, trl.KTOConfig(**settings(**case)), LABELLED)
    wanted = theirs(trainer)
    for cut in (2, 5):
        config = KTOConfig(**settings(per_device_train_batch_size=cut, **case))
        found = ours(KTOTrainer(load(), args=config, train_dataset=LABELLED), trainer)
        same(found, wanted, {"kl"} if case.get("loss_type") else ())


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_reference_of_a_continued_adapter_would_not_be_the_adapter_at_the_start(kind: str, tmp_path: Path) -> None:
    model = moved(load())
    model.save_lora(tmp_path)
    bare = AutoModelForCausalLM.from_pretrained(shallow())
    given = peft.PeftModel.from_pretrained(bare, tmp_path, is_trainable=True)
    rows: Any = PAIRS if kind == "dpo" else LABELLED
    names = {"dpo": (trl.DPOTrainer, trl.DPOConfig, DPOTrainer, DPOConfig),
             "kto": (trl.KTOTrainer, trl.KTOConfig, KTOTrainer, KTOConfig)}[kind]
    trainer = trls(names[0], names[1](**settings()), rows, given)
    assert "ref" in trainer.model.peft_config
    own: Any = names[2](model, args=names[3](**settings()), train_dataset=rows)
    wanted = theirs(trainer, seed=5)
    assert abs(wanted[1]["rewards/chosen"]) > 0.01
    same(ours(own, trainer), wanted)
