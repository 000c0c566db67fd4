"""The gated delta rule and its convolution: chunks of packed runs against the rule token by token, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_each_as_accurate, in_float64
from card import DEVICES
from memory import LiveStorage
from torch import Tensor

from lowmem_grpo.kernels import delta_rule as module
from lowmem_grpo.kernels.delta_rule import causal_conv, delta_rule, delta_rule_ref
from lowmem_grpo.kernels.varlen import CHUNK, VarlenSequences

RUNS = {
    "one token": (1,), "a chunk": (CHUNK,), "borders": (CHUNK - 1, CHUNK + 1, 2 * CHUNK), "odd": (5, 1, 0, 131, 17),
    "nothing first": (0, 3), "the longest last": (1, 2, 3, 150),
}
DECAYS = {"weak": 1e-3, "usual": 0.3, "strong": 30.0, "then none": None}
EPSILON = 2e-6  # of the largest value: sums of a chunk, in another order than token by token
NAMES = ("query", "key", "value", "g", "beta", "initial")


def problem(lengths: tuple[int, ...], decay: float | None, groups: int = 2, device: Any = "cpu") -> dict[str, Tensor]:
    """Random inputs of 2 key heads; `decay` is the mean of -g, None strong for a half of a chunk and then nearly 0."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    g = -(torch.rand(tokens, 2 * groups, generator=generator) * 2 * (decay or 1e-3))
    if decay is None:
        strong = (torch.arange(tokens) % CHUNK < CHUNK // 2)[:, None]
        g = torch.where(strong, g - 40, g)
    made = [draw(tokens, 2, 8), draw(tokens, 2, 8), draw(tokens, 2 * groups, 6), g,
            draw(tokens, 2 * groups).sigmoid(), draw(len(lengths), 2 * groups, 8, 6)]
    return {name: one.to(device).requires_grad_() for name, one in zip(NAMES, made, strict=True)}


def outcome(run: Any, given: dict[str, Tensor], runs: VarlenSequences) -> dict[str, Tensor]:
    """Result, final states, and the gradient of every input for a loss of both."""
    result, final = run(*(given[name] for name in NAMES[:5]), runs, given["initial"])
    loss = sum((one * torch.linspace(-1, 1, one.numel(), device=one.device).view(one.shape)).sum()
               for one in (result, final))
    grads = torch.autograd.grad(loss, list(given.values()))
    return {"result": result, "final": final, **{f"gradient of {n}": g for n, g in zip(given, grads, strict=True)}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.every(2)
def test_chunks_are_as_accurate_as_the_rule_token_by_token(name: str, device: torch.device) -> None:
    for decay, mean in DECAYS.items():
        given, runs = problem(RUNS[name], mean, device=device), VarlenSequences(RUNS[name], device)
        reference, truth = (outcome(delta_rule_ref, same, runs) for same in (given, in_float64(given)))
        assert_each_as_accurate(outcome(delta_rule, given, runs), reference, truth, EPSILON, f"of {decay}")


def test_heads_in_tiles_are_the_heads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given, runs = problem(RUNS["odd"], 0.3), VarlenSequences(RUNS["odd"], torch.device("cpu"))
    together = outcome(delta_rule, given, runs)
    monkeypatch.setattr(module, "SCRATCH", 1)
    for what, one in outcome(delta_rule, given, runs).items():
        torch.testing.assert_close(one, together[what], msg=what)


def test_a_decay_that_forgets_all_leaves_numbers() -> None:
    given, runs = problem((70, 3), 0.3), VarlenSequences((70, 3), torch.device("cpu"))
    with torch.no_grad():
        given["g"][10] = given["g"][69] = -torch.inf
    found = outcome(delta_rule, given, runs)
    assert all(one.isfinite().all() for one in found.values())
    later = {key: one.detach()[11:70].requires_grad_() for key, one in given.items() if key != "initial"}
    zeros = torch.zeros(1, 4, 8, 6)
    with torch.no_grad():  # what the token itself wrote is all that is left of the past
        _, first = delta_rule(*(given[key].detach()[10:11] for key in NAMES[:5]), VarlenSequences((1,), zeros.device),
                              zeros)
        after, _ = delta_rule(*later.values(), VarlenSequences((59,), zeros.device), first)
    torch.testing.assert_close(found["result"][11:70], after)


def test_only_the_inputs_are_kept_for_backward() -> None:
    given, runs = problem((700,), 0.3), VarlenSequences((700,), torch.device("cpu"))
    chunks = runs.chunks
    with LiveStorage() as storage:
        result, final = delta_rule(*(given[key] for key in NAMES[:5]), runs, given["initial"])
        kept = storage.live
    assert chunks is runs.chunks and kept == result.nbytes + final.nbytes
    assert storage.peak > 5 * kept  # what is computed on the way is seen


def test_the_convolution_is_that_of_each_run_alone_with_its_state_before_it() -> None:
    lengths, width, channels = (5, 1, 0, 40, 2), 4, 6
    generator = torch.Generator().manual_seed(0)
    x, weight, initial = (torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
                          for shape in ((48, channels), (channels, width), (5, 3, channels)))
    result, final = causal_conv(x, weight, VarlenSequences(lengths, torch.device("cpu")), initial)
    expected, states = [], []
    for before, piece in zip(initial, x.split(lengths), strict=True):
        whole = torch.cat([before, piece])
        expected += [F.silu((whole[end - width : end] * weight.T).sum(0)) for end in range(width, len(whole) + 1)]
        states.append(whole[-3:])
    torch.testing.assert_close(result, torch.stack(expected))
    assert torch.equal(final, torch.stack(states))
    loss = [(a.sin().sum() + b.cos().sum()) for a, b in ((result, final), (torch.stack(expected), torch.stack(states)))]
    for ours, theirs in zip(*(torch.autograd.grad(one, (x, weight, initial)) for one in loss), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("off", "agrees"), [(1e-3, True), (0.1, False)])
def test_kernels_of_the_field_that_give_something_else_are_not_taken(
    off: float, agrees: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(*given: Any) -> tuple[Tensor, Tensor]:
        result, final = delta_rule_ref(*given)
        return result * (1 + off), final

    monkeypatch.setattr(module, "by_fla", other)
    module.fla_agrees.cache_clear()
    assert module.fla_agrees(torch.device("cpu"), torch.float32) is agrees
    module.fla_agrees.cache_clear()
    assert ("plain torch computes it" in caplog.text) is not agrees


@pytest.mark.parametrize(("release", "is_taken"), [
    ("0.6.0", True), ("0.6rc1", True), ("1.0", True), ("0.5.9", False), ("main", False)])
def test_any_form_of_flas_version_is_read(release: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda name: release)
    assert module.fla_version.__wrapped__() == (release if is_taken else None)


@pytest.mark.gpu
def test_the_kernels_of_the_field_agree_on_a_card() -> None:
    if module.fla_version() is None:
        pytest.skip(f"{module.FLA} is not installed")
    assert module.fla_agrees(torch.device("cuda:0"), torch.bfloat16)
