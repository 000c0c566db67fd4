"""The optimizer of what is trained beside LoRA: its own learning rate, whole matrices in 16 bits, moments in 8 bits."""

from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
from small_models import random_model, shallow
from torch import Tensor, nn

from lowmem_grpo import FastLanguageModel, GRPOConfig, SFTConfig
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.trained_set import TrainedSet
from lowmem_grpo.runs.checkpoint import load_checkpoint, save_checkpoint
from lowmem_grpo.runs.checkpoint_state import encode
from lowmem_grpo.runs.saved_adapter import MismatchError
from lowmem_grpo.trainer import embedding_optimizer
from lowmem_grpo.trainer.embedding_optimizer import rounded
from lowmem_grpo.trainer.optim import OptimizerCopy, learning_rates, make_optimizer, own_or_made
from lowmem_grpo.trainer.trajectories import StepSettings
from tests.attacks import small_run
from tests.attacks.small_run import StopAt, differences, records

BOTH: dict[str, Any] = {"modules_to_save": ["embed_tokens", "lm_head"]}


def trained(**beside: Any) -> TrainedSet:
    """What a random model trains: LoRA, and what `beside` says."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **beside)
    return TrainedSet.of(peft.get_peft_model(random_model("Llama"), config))


@pytest.mark.parametrize("beside", [BOTH, {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}}],
                         ids=["whole", "rows"])
def test_embedding_and_head_have_their_own_rate_which_follows_the_schedule_and_is_logged(beside: Any) -> None:
    config = SFTConfig(learning_rate=5e-5, embedding_learning_rate=5e-6, weight_decay=0.01)  # as in Unsloth's notebooks
    held = trained(**beside)
    optimizer, schedule = own_or_made(None, held, config, 10)
    named = {group.get("name"): [id(parameter) for parameter in group["params"]] for group in optimizer.param_groups}
    assert named == {name or None: [id(w.parameter) for w in held if w.group == name]
                     for name in ("", "embed_tokens", "lm_head")}
    for _ in range(5):  # of 10, so that half of each rate is left
        optimizer.step()
        schedule.step()
    assert learning_rates(optimizer) == pytest.approx(
        {"learning_rate": 2.5e-5, "learning_rate/embed_tokens": 2.5e-6, "learning_rate/lm_head": 2.5e-6})
    usual, _ = own_or_made(None, held, SFTConfig(learning_rate=5e-5), 10)
    assert {group["lr"] for group in usual.param_groups} == {5e-5}


def test_a_step_with_another_learning_rate_leaves_the_embeddings_own() -> None:
    config, held = GRPOConfig(learning_rate=1e-3, embedding_learning_rate=1e-5, max_steps=9), trained(**BOTH)
    optimizer, schedule = own_or_made(None, held, config, 10)
    own = {"learning_rate/embed_tokens": 1e-5, "learning_rate/lm_head": 1e-5}
    settings = StepSettings(config, schedule)
    with settings.changed({"learning_rate": 1e-4}):
        assert learning_rates(optimizer) == {"learning_rate": 1e-4} | own
    with settings.changed({}):
        assert learning_rates(optimizer) == {"learning_rate": 1e-3} | own


def test_a_rate_that_would_have_no_effect_is_refused_by_name() -> None:
    config = GRPOConfig(embedding_learning_rate=5e-6)
    with pytest.raises(ValueError, match="embedding_learning_rate is 5e-06, and the model trains LoRA alone: name"):
        own_or_made(None, trained(), config, 10)
    held = trained(**BOTH)
    with pytest.raises(ValueError, match="embedding_learning_rate is 5e-06, and optimizers brings its own rates"):
        own_or_made((torch.optim.SGD(held.parameters, lr=0.1), None), held, config, 10)
    for wrong in (0, -1e-6, float("nan"), float("inf"), "5e-6"):
        with pytest.raises(ValueError, match=r"embedding_learning_rate is .*; it must be above 0, or None"):
            GRPOConfig(embedding_learning_rate=wrong)


def gradients(weight: nn.Parameter, steps: int = 8, rows: int | None = None) -> list[Tensor]:
    """Gradients of so many steps, for the first `rows` only: those of a frequent token, and of three rare ones."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1.0, 1e-3, 1e-3, 1e-3]).repeat(len(weight))[: len(weight), None]
    sizes[rows or len(weight) :] = 0
    return [(torch.randn(weight.shape, generator=generator) * sizes).to(weight) for _ in range(steps)]


def stepped(weight: Tensor, slopes: list[Tensor], optimizer: Any = None, **settings: Any) -> nn.Parameter:
    """The weight after steps with these gradients, by our optimizer or by one that is made of parameters."""
    held = nn.Parameter(weight.detach().clone())
    config = GRPOConfig(**({"learning_rate": 1e-2} | settings))
    groups: list[Any] = [{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [held], "name": "lm_head"}]
    made = make_optimizer(groups, config) if optimizer is None else optimizer([held])
    for slope in slopes:
        held.grad = slope.to(held)
        made.step()
    return held


def weights(rows: int, width: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype))


@pytest.mark.parametrize("rows", [None, 1], ids=["all rows", "one row"])
def test_a_step_is_that_of_adamw_in_float64_and_rows_without_a_gradient_stay(
    rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_optimizer, "CACHED", 40)  # three rows, of which the last band has two
    weight = weights(11, 13)
    slopes = gradients(weight, rows=rows)
    held = stepped(weight, slopes, weight_decay=0.1)
    exact = stepped(weight.double(), slopes, partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1))
    torch.testing.assert_close(held[:rows].double(), exact[:rows], rtol=1e-5, atol=1e-8)
    assert torch.equal(held[rows or 11 :], weight[rows or 11 :])
    assert rows is None or not torch.equal(exact[1:], weight[1:].double())
    assert torch.equal(stepped(weight, [torch.zeros_like(weight)] * 2, weight_decay=0.1), weight)
    assert stepped(weight, [slope * 1e18 for slope in slopes]).isfinite().all()


@pytest.mark.parametrize(("width", "small", "ours", "theirs"), [
    (256, 1.0, 0.02, (0, 0.02)), (256, 1e-3, 0.1, (0.2, 1)), (64, 1.0, 0.02, (0.3, 1)), (13, 1.0, 1e-6, (0.3, 1)),
])
def test_moments_in_8_bits_are_no_further_from_adamws_than_those_of_bitsandbytes(
    width: int, small: float, ours: float, theirs: tuple[float, float]
) -> None:
    """Beside a large number, the square of a `small` one is 0 in bitsandbytes' 8 bits. In its blocks of 256, a row of
    64 of a rare token has others beside it."""
    weight = weights(400, width)
    slopes = [slope * torch.tensor([1.0, *[small] * 12]).repeat(width)[:width] for slope in gradients(weight)]
    exact, bnb = (stepped(kind, slopes, partial(made, lr=1e-2, weight_decay=0)) for kind, made in (
        (weight.double(), torch.optim.AdamW), (weight, bitsandbytes.optim.AdamW8bit)))
    errors = [((found - exact).norm() / (exact - weight).norm()).item()
              for found in (stepped(weight, slopes, optim="adamw_8bit"), bnb)]
    assert errors[0] < ours and errors[0] < errors[1] and theirs[0] <= errors[1] < theirs[1]


def test_weights_in_bfloat16_move_by_the_step_on_average_where_the_nearest_one_is_the_old() -> None:
    weight = nn.Parameter(torch.full((512, 2048), 0.02, dtype=torch.bfloat16))  # 2**20 numbers, 1.2e-4 apart
    weight[:, ::2].data.neg_()
    slope = torch.ones_like(weight)
    assert torch.equal(stepped(weight, [slope], partial(torch.optim.AdamW, lr=5e-6, weight_decay=0)), weight)
    held = stepped(weight, [slope], learning_rate=5e-6).double()
    near = torch.tensor(0.02, dtype=torch.bfloat16).view(torch.int16)
    gap = abs((near + 1).view(torch.bfloat16) - (near).view(torch.bfloat16)).double()
    for part, begun in ((held[:, ::2], weight[0, 0]), (held[:, 1::2], weight[0, 1])):
        moved = part - begun.double()
        share = 5e-6 / gap  # of the numbers that take the next value; the others stay
        spread = gap * (share * (1 - share) / part.numel()).sqrt()
        assert set(moved.unique().tolist()) == {0.0, -gap.item()}
        assert abs(moved.mean() + 5e-6) < 4 * spread


def test_a_value_is_rounded_to_one_of_its_neighbours_and_infinity_and_nan_stay() -> None:
    inf, nan = float("inf"), torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e-40, inf, -inf, 3.3895313892515355e38]).bfloat16().float()
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).mul(3)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(rounded(exact, generator).float(), exact)
        assert rounded(nan, generator).isnan().all()
        found, nearest = rounded(values, generator), values.bfloat16()
        assert ((found.float() - values).abs() < values.abs() / 128).all() and not torch.equal(found, nearest)


MADE = ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"]


def run_of(optim: str, seed: int = 42) -> tuple[Any, Any, Any]:
    """A model in bfloat16 whose embedding and head are trained, its optimizer and its schedule."""
    base = random_model("Llama", hidden_size=64, num_hidden_layers=1).bfloat16()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **BOTH))
    settings = SFTConfig(optim=optim, learning_rate=1e-3, embedding_learning_rate=1e-4, weight_decay=0.1, seed=seed)
    return model, *own_or_made(None, TrainedSet.of(model), settings, 10)


def walk(model: Any, optimizer: Any, schedule: Any, steps: range) -> None:
    for number in steps:
        ids = torch.tensor([[3, 4, 5 + number, 4]])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()


def everything(model: Any, optimizer: Any, schedule: Any) -> dict[str, Tensor]:
    """All trained weights, and every tensor of the optimizer's state."""
    found = {weight.name: weight.parameter.detach().clone() for weight in TrainedSet.of(model)}
    encode(optimizer.state_dict(), "optimizer", found)
    return {name: value.clone() for name, value in found.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        value.dtype == second[name].dtype and torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("optim", MADE)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(optim: str, tmp_path: Path) -> None:
    straight, first, second, other = (run_of(optim, seed) for seed in (42, 42, 42, 43))
    walk(*straight, range(4))
    walk(*first, range(2))
    folder = save_checkpoint(tmp_path, 2, *first, {})
    torch.manual_seed(5)  # rounding draws from no state that others draw from, and that differs from rank to rank
    random = torch.get_rng_state()
    walk(*second, range(3))
    assert torch.equal(torch.get_rng_state(), random)
    load_checkpoint(folder, *second)
    assert same(everything(*first), everything(*second))
    walk(*second, range(2, 4))
    assert same(everything(*second), everything(*straight))
    walk(*other, range(4))
    assert not same(everything(*other), everything(*straight))
    other[1].load_state_dict(first[1].state_dict())
    other[0].load_state_dict(first[0].state_dict())
    assert same(everything(*other), everything(*first))


@pytest.mark.parametrize("optim", MADE)
def test_a_step_that_is_undone_and_made_again_is_the_same_step(optim: str) -> None:
    run = run_of(optim)
    walk(*run, range(2))
    run[0](input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    before, copied = everything(*run), OptimizerCopy(run[1], each_step=True)
    assert copied.copy_state(TrainedSet.of(run[0]).parameters)
    run[1].step()
    after = everything(*run)
    copied.restore()
    assert same(everything(*run), before) and not same(after, before)
    run[1].step()
    assert same(everything(*run), after)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, *run_of("adamw_torch"), {})
    with pytest.raises(MismatchError, match=r"the state of AdamW over \[2, 1, 1\] .* here it is AdamW8bit"):
        load_checkpoint(folder, *run_of("adamw_8bit"))


def test_a_gradient_that_overflows_under_loss_scaling_skips_all_parts_of_the_step() -> None:
    model, optimizer, _ = run_of("adamw_torch")
    scaler, before = torch.amp.GradScaler("cpu"), everything(model, optimizer, None)
    scaler.scale(model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss).backward()
    model.get_parameter("base_model.model.lm_head.modules_to_save.default.weight").grad[3, 3] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert same(everything(model, optimizer, None), before)


def in_16_bits(**beside: Any) -> FastPeftModel:
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=64, load_in_4bit=False,
                                                dtype=torch.bfloat16)
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False, **beside)


@pytest.mark.parametrize(("make", "settings", "beside"), [
    (small_run.make, {"max_completion_length": 8, "optim": "adamw_8bit"}, BOTH),
    (small_run.make_sft, {}, BOTH), (small_run.make_sft, {}, {"trainable_token_indices": [3, 30, 31]}),
], ids=["GRPO", "SFT", "SFT of rows"])
def test_a_run_in_bfloat16_is_resumed_bit_for_bit_and_logs_rate_and_norm_of_the_embedding(
    make: Any, settings: Any, beside: Any, tmp_path: Path
) -> None:
    settings = settings | {"max_steps": 3, "embedding_learning_rate": 1e-5, "weight_decay": 0.1, "logging_steps": 1,
                           "warmup_steps": 0}
    model = in_16_bits(**beside)
    make(tmp_path / "whole", model=model, **settings).train()
    make(tmp_path / "parts", callbacks=[StopAt(2)], model=in_16_bits(**beside), **settings).train()
    make(tmp_path / "parts", model=in_16_bits(**beside), **settings).train(resume_from_checkpoint=True)
    assert differences(tmp_path / "parts", tmp_path / "whole") == []
    (embedding,) = [weight for weight in TrainedSet.of(model) if weight.group]
    assert embedding.base is not None and not torch.equal(embedding.parameter, embedding.base)
    line = records(tmp_path / "whole", completions=False)[0][0]
    assert 0 < line["learning_rate/embed_tokens"] <= 1e-5 < line["learning_rate"]
    assert 0 < line["grad_norm/embed_tokens"] <= line["grad_norm"]
