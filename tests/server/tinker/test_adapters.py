"""Several models on one base: their gradients against dense logits, and that none touches another's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tables import every_row
from tinker_server import same
from torch import Tensor
from trainer_runs import exact

from lowmem_grpo.losses.token_losses import LOSSES, checked_settings, token_losses
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.server.tinker.adapters import Adam, Adapters, LoraSettings
from lowmem_grpo.server.tinker.calls import CreateModel, OptimStep, read
from lowmem_grpo.server.tinker.datum import Cells, Datum, Pass


def adapters(tokens: int | None = None, heads: int = 0) -> Adapters:
    policy = Policy(exact())
    return Adapters(policy, RunMemory().train, tokens, heads=heads)


def of_attention() -> Adapters:
    """As of a mixture of experts."""
    made = adapters()
    made.layers = [path for path in made.layers if ".self_attn." in path]
    return made


def created(made: Adapters, *models: str, **settings: Any) -> Adapters:
    """Create models whose B is random too, so that every factor has a gradient."""
    for number, model in enumerate(models):
        made.create(model, LoraSettings(rank=3 + number, seed=number, **settings))
        torch.manual_seed(number)
        for one in made.held[model].parameters.values():
            one.data = torch.randn_like(one, dtype=torch.float64) * 0.1
    return made


def data(seed: int = 0) -> list[Datum]:
    """Return three datums whose targets are not the next tokens, one of them of a single token."""
    torch.manual_seed(seed)
    return [Datum(torch.randint(3, 384, (length,)).tolist(), torch.randint(3, 384, (length,)),
                  {"weights": torch.randn(length), "advantages": torch.randn(length),
                   "logprobs": torch.randn(length) - 6, "sequence_ratio_mask": (torch.arange(length) > 2).float()})
            for length in (7, 12, 1)]


def asked(loss: str, given: list[Datum], forward_only: bool = False) -> Pass:
    needs = LOSSES[loss].needs
    cut = [replace(one, values={name: one.values[name] for name in needs}) for one in given]
    return Pass(cut, loss, checked_settings(loss, {}), forward_only)


def dense(made: Adapters, model: str, asked: Pass) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """Return log-probabilities, gradients and the loss by whole logits, one datum at a time."""
    with made.active(model) as held:
        expected, total = [], torch.zeros((), dtype=torch.float64)
        for one in asked.data:
            whole = made.model(input_ids=torch.tensor([one.ids])).logits[0].log_softmax(-1)
            if one.cells:
                logprobs = whole[one.cells.rows, one.cells.tokens]
                total = total - (one.cells.weights.double() * logprobs).sum()
                matrix = torch.zeros(one.cells.length, one.cells.width).double()
                matrix[one.cells.rows, one.cells.columns] = logprobs.detach()
                expected.append(matrix)
                continue
            logprobs = whole[torch.arange(len(one.ids)), one.targets]
            values = {name: value.double() for name, value in one.values.items()}
            total = total + token_losses(asked.loss, logprobs, values, asked.settings,
                                         torch.zeros(len(one.ids), dtype=torch.long), 1).sum()
            expected.append(logprobs.detach())
        slopes = torch.autograd.grad(total, list(held.parameters.values()))
    return expected, dict(zip(held.parameters, slopes, strict=True)), total.item()


def check_against_whole_logits(asked: Pass, tokens: int | None) -> None:
    """Check that the second of two models computes what whole logits give, and the first one has no gradient."""
    made = created(adapters(tokens), "a", "b")
    expected, slopes, loss = dense(made, "b", asked)
    logprobs, metrics = made.run("b", asked)
    assert [one.shape for one in logprobs] == [one.shape for one in expected]
    for one, other in zip(logprobs, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-6)
    assert metrics["loss:sum"] == pytest.approx(loss, rel=1e-9)
    assert metrics["num_tokens:sum"] == sum(len(one.ids) for one in asked.data)
    got = gradients(made, "b")
    assert got.keys() == slopes.keys() and not gradients(made, "a")
    for name, slope in slopes.items():
        assert slope.norm() > 0 and (got[name] - slope).norm() <= 1e-9 * slope.norm(), name


def gradients(made: Adapters, model: str) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in made.held[model].parameters.items() if one.grad is not None}


@pytest.mark.parametrize("tokens", [None, 8])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.every(2)
def test_log_probabilities_and_gradients_are_those_of_whole_logits(loss: str, tokens: int | None) -> None:
    check_against_whole_logits(asked(loss, data()), tokens)


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_a_model_of_one_part_trains_the_layers_of_this_part_as_whole_logits_say(part: str) -> None:
    made, chosen = adapters(), {"attention": part == "attention", "mlp": part == "mlp"}
    made.create("a", LoraSettings(rank=3, seed=1, **chosen))
    part_of = {name.split(".")[-4] for name in made.held["a"].parameters}
    assert part_of == {"self_attn" if part == "attention" else "mlp"}
    whole, expected, _ = dense(made, "a", asked("ppo", data()))
    found, _ = made.run("a", asked("ppo", data()))
    assert all(torch.allclose(logprobs.double(), other, rtol=1e-6)
               for logprobs, other in zip(found, whole, strict=True))
    got = gradients(made, "a")
    assert any(slope.norm() > 0 for slope in expected.values())
    for name, slope in expected.items():
        assert (got[name] - slope).norm() <= 1e-9 * slope.norm(), name


def wide_data() -> list[Datum]:
    """Four datums with several targets for a token, of several widths; the second has cells that are left out, the last
    one target for each."""
    torch.manual_seed(0)
    made = []
    for length, width, kept in ((7, 3, 1.0), (12, 5, 0.4), (1, 2, 1.0)):
        rows, columns = (torch.rand(length, width) < kept).nonzero(as_tuple=True)
        cells = Cells(rows, columns, torch.randint(3, 384, rows.shape), torch.randn(len(rows)), length, width)
        made.append(Datum(torch.randint(3, 384, (length,)).tolist(), torch.zeros(length, dtype=torch.long), {}, cells))
    return [*made, replace(data()[0], values={"weights": data()[0].values["weights"]})]


@pytest.mark.parametrize("tokens", [None, 8])
@pytest.mark.parametrize("block", [4, 4096])
def test_several_targets_have_the_log_probabilities_and_gradients_of_whole_logits(
    tokens: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.models.policy.HEAD_ROWS", block)
    check_against_whole_logits(Pass(wide_data(), "cross_entropy", {}, False), tokens)


def test_gradients_of_calls_add_up_until_the_step() -> None:
    made = created(adapters(), "a")
    made.run("a", asked("cross_entropy", data()))
    once = gradients(made, "a")
    made.run("a", asked("cross_entropy", data()))
    for name, twice in gradients(made, "a").items():
        assert torch.allclose(twice, 2 * once[name], rtol=1e-12)
    made.optim_step("a", Adam())
    assert gradients(made, "a") == {}


def test_a_forward_pass_leaves_no_gradient_and_tells_the_same_log_probabilities() -> None:
    made = created(adapters(), "a")
    found, told = made.run("a", asked("cross_entropy", data(), forward_only=True))
    assert gradients(made, "a") == {}
    again, metrics = made.run("a", asked("cross_entropy", data()))
    assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(found, again, strict=True))
    assert told == pytest.approx(metrics, rel=1e-12)


def test_calls_for_one_model_leave_factors_gradients_and_moments_of_another_as_they_are() -> None:
    made = created(adapters(), "a", "b")
    made.run("a", asked("cross_entropy", data()))
    made.optim_step("a", Adam())
    made.run("a", asked("ppo", data(1)))
    before = [made.state("a"), gradients(made, "a")]
    made.run("b", asked("ppo", data(2)))
    made.optim_step("b", Adam(learning_rate=0.1))
    made.create("c", LoraSettings(rank=8, seed=5))
    made.delete("b")
    assert same(made.state("a"), before[0]) and same(gradients(made, "a"), before[1])


def test_a_step_is_that_of_adamw_with_the_settings_of_the_call() -> None:
    made = created(adapters(), "a")
    name, one = next(iter(made.held["a"].parameters.items()))
    copy = torch.nn.Parameter(one.detach().clone())
    kept: dict[str, Any] = {}
    for rate in (0.1, 0.003):
        made.run("a", asked("cross_entropy", data()))
        found = gradients(made, "a")
        norm = torch.stack([one.norm() for one in found.values()]).norm()
        copy.grad = found[name] * (0.5 / norm)
        plain = torch.optim.AdamW([copy], lr=rate, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
        if kept:
            plain.load_state_dict(kept | {"param_groups": plain.state_dict()["param_groups"]})
        plain.step()
        kept = plain.state_dict()
        made.optim_step("a", Adam(learning_rate=rate, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2,
                                  grad_clip_norm=0.5))
        assert norm > 0.5 and torch.allclose(one, copy, rtol=1e-5)


def test_a_gradient_that_is_not_finite_is_dropped_and_told() -> None:
    made = created(adapters(), "a")
    made.run("a", asked("cross_entropy", data()))
    before = gradients(made, "a")
    wild = [replace(one, values=one.values | {"logprobs": one.values["logprobs"] - 1000}) for one in data()]
    with pytest.raises(ValueError, match="gradient is NaN or infinite"):
        made.run("a", asked("importance_sampling", wild))
    assert same(gradients(made, "a"), before)


# Trained heads


HEAD = "base_model.model.lm_head.weight"


def with_heads(*models: str) -> Adapters:
    return created(adapters(heads=2), *models, unembed=True)


@pytest.mark.parametrize("work", [asked("ppo", data()), Pass(wide_data(), "cross_entropy", {}, False)],
                         ids=["a target each", "several"])
def test_a_heads_gradient_is_that_of_whole_logits_and_another_models_stays(work: Pass) -> None:
    made = with_heads("a", "b")
    before = made.state("a")
    expected, slopes, _ = dense(made, "b", work)
    found, _ = made.run("b", work)
    assert all(torch.allclose(mine.double(), whole, rtol=1e-6) for mine, whole in zip(found, expected, strict=True))
    got = gradients(made, "b")
    assert HEAD in got and got.keys() == slopes.keys() and not gradients(made, "a")
    for name, slope in slopes.items():
        assert slope.norm() > 0 and (got[name] - slope).norm() <= 1e-9 * slope.norm(), name
    base = made.policy.base.lm_head.original_module.weight.clone()
    made.optim_step("b", Adam())
    assert same(made.state("a"), before) and torch.equal(made.policy.base.lm_head.original_module.weight, base)
    assert made.policy.head.weight is made.policy.base.lm_head.original_module.weight


def test_a_heads_step_is_that_of_adamw_with_the_settings_of_the_call() -> None:
    made = with_heads("a")
    copy = torch.nn.Parameter(made.held["a"].parameters[HEAD].detach().clone())
    plain = torch.optim.AdamW([copy], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    for rate in (0.1, 0.003):
        made.run("a", asked("cross_entropy", data()))
        copy.grad, plain.param_groups[0]["lr"] = gradients(made, "a")[HEAD], rate
        plain.step()
        made.optim_step("a", Adam(learning_rate=rate, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2))
        assert torch.allclose(made.held["a"].parameters[HEAD], copy, rtol=1e-4, atol=1e-6)


def test_a_head_in_16_bits_goes_on_bit_for_bit_from_its_state_and_its_size_is_told() -> None:
    made = Adapters(Policy(exact().bfloat16()), RunMemory().train, heads=3)
    made.create("a", LoraSettings(rank=2, seed=1, unembed=True))

    def step(model: str) -> dict[str, Tensor]:
        made.run(model, asked("cross_entropy", data()))
        made.optim_step(model, Adam(learning_rate=1e-4))
        return made.state(model)

    state, base = step("a"), made.policy.base.lm_head.original_module.weight
    assert state[HEAD].dtype == torch.bfloat16 and not torch.equal(state[HEAD], base)
    assert made.size("a", moments=True) == pytest.approx(sum(each.nbytes for each in state.values()), rel=0.03)
    for model, seed in (("again", 1), ("of another seed", 2)):
        made.create(model, LoraSettings(rank=2, seed=seed, unembed=True))
        made.restore(model, state)
    following = step("a")
    assert same(step("again"), following) and not same(step("of another seed"), following)


def test_the_least_recently_used_head_makes_room_and_deletion_frees_it() -> None:
    made = with_heads("a", "b")
    made.create("plain", LoraSettings(rank=2))
    made.create("c", LoraSettings(rank=2, unembed=True))
    assert [*made.held] == ["b", "plain", "c"]
    copies = made.policy.base.lm_head.modules_to_save
    assert len(copies) == 2
    made.delete("c")
    made.delete("b")
    assert not copies
    with pytest.raises(ValueError, match="started with --train-unembed N"):
        adapters().create("a", LoraSettings(rank=2, unembed=True))


# Wrong settings


@every_row(("make", "told"), [
    (lambda: read(CreateModel, b'{"model_seq_id": 0, "lora_config": {"rank": 0}}'), "lora_config.rank is 0"),
    (lambda: read(CreateModel, b'{"model_seq_id": 0, "lora_config": {"rank": 513}}'), "rank is 513; .* equal to 512"),
    (lambda: LoraSettings(rank=4, attention=False, mlp=False), "train_attn"),
    (lambda: read(CreateModel, b'{"model_seq_id": 0, "lora_config": {"rank": 4, "bias": 1}}'),
     "lora_config.bias is not .* Known are rank, seed, train_attn, train_mlp"),
    (lambda: read(OptimStep, b'{"adam_params": {"beta2": 1.0}}'), "adam_params.beta2 is 1.0; it must be less than 1"),
    (lambda: read(OptimStep, b'{"adam_params": {"learning_rate": NaN}}'), "learning_rate is NaN"),
    (lambda: read(OptimStep, b'{"adam_params": {"rho": 1}}'), "adam_params.rho is not .* Known are learning_rate"),
    (lambda: created(adapters(), "a").optim_step("a", Adam()), "call forward_backward"),
    (lambda: of_attention().create("a", LoraSettings(rank=4, attention=False)), "train_attn is False"),
])
def test_wrong_settings_are_refused_by_name(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # type: ignore[operator]
