"""Gated delta-net layers in packed micro-batches: each sequence computes what it computes alone, whatever is shared."""

import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from checkpointed_stack import LateCopies
from packed_problem import alone, batch_of, gradients
from small_models import random_model, with_adapter
from transformers import DynamicCache

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.memory.offload.activations import ActivationOffload, enable_checkpointing
from lowmem_grpo.models import delta_net
from lowmem_grpo.models.lean_modules import make_lean
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import MicroBatch

GROUPS = {  # (prompt, completions) of each group; a prompt's last token belongs to its completions
    "one group": [(70, [5, 66, 1, 12])], "a prompt of one token": [(1, [3, 70])],
    "several": [(66, [5, 3]), (1, [4]), (2, [1, 2]), (9, [40]), (3, [65, 64])],
}
BOUND = 1e-5
BY_TENSOR = 5e-6  # of the largest element of a gradient


def assert_same(policy: Policy, batch: MicroBatch, plain: peft.PeftModel, exact: peft.PeftModel) -> None:
    """Log-probabilities and gradients, these relative to their norm, within the bound of the exact ones, and of
    transformers' as far as these are exact themselves."""
    packed, theirs, truth = policy.logprobs(batch, 1.0)[0], alone(plain, batch), alone(exact, batch)
    assert (packed - theirs).abs().max() <= BOUND
    ours, of_plain, exact_ones = gradients(policy.model, packed), gradients(plain, theirs), gradients(exact, truth)
    assert ours.keys() == of_plain.keys() == exact_ones.keys()
    for name, expected in exact_ones.items():
        assert expected.norm() > 0, name
        assert (ours[name] - expected).norm() <= BOUND * expected.norm(), name
        own_error = (of_plain[name] - expected).norm()
        assert (ours[name] - of_plain[name]).norm() <= BOUND * expected.norm() + own_error, name


@pytest.fixture(scope="module")
def plain() -> peft.PeftModel:
    """Transformers' own modules, under PEFT."""
    return with_adapter(random_model("Qwen3_5"))


@pytest.fixture(scope="module")
def exact() -> Any:
    """Return the same model in float64 on our delta net, run sequence by sequence: transformers' has no float64."""
    return Policy(with_adapter(random_model("Qwen3_5")).double()).model


@pytest.mark.parametrize(("name", "lean"), [
    ("one group", False), ("a prompt of one token", True), ("several", False), ("several", True),
])
@pytest.mark.every(2)
def test_packed_sequences_that_share_prompts_learn_what_each_alone_does(
    name: str, lean: bool, plain: peft.PeftModel, exact: peft.PeftModel
) -> None:
    batch, policy = batch_of(GROUPS[name]), Policy(with_adapter(random_model("Qwen3_5")))
    if lean:
        make_lean(policy.base, None)
    assert_same(policy, batch, plain, exact)


@pytest.mark.parametrize("seed", [3, 7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 4, 6, 8, 9, 10))])
@pytest.mark.every(2)
def test_each_gradient_is_as_exact_as_transformers_own_by_its_largest_element(seed: int) -> None:
    """Adam divides each element by its own size, so a tensor of small gradients needs its digits as much."""
    draw = random.Random(seed)
    sizes = {"hidden_size": draw.choice([32, 48, 64]), "linear_num_key_heads": draw.choice([1, 2]),
             "linear_num_value_heads": draw.choice([2, 4]), "linear_key_head_dim": draw.choice([8, 16, 32]),
             "linear_value_head_dim": draw.choice([8, 16]), "initializer_range": draw.choice([0.02, 0.05])}
    batch = batch_of([(draw.randint(1, 150), [draw.randint(1, 150) for _ in range(draw.randint(1, 3))])
                      for _ in range(draw.randint(1, 3))])
    plain, exact, policy = (with_adapter(random_model("Qwen3_5", **sizes)) for _ in range(3))
    truth = Policy(exact.double()).model
    ours = gradients(Policy(policy).model, Policy(policy).logprobs(batch, 1.0)[0])
    theirs, true = gradients(plain, alone(plain, batch)), gradients(truth, alone(truth, batch))
    for name, expected in true.items():
        largest = expected.abs().max()
        own = (theirs[name] - expected).abs().max()
        assert (ours[name] - expected).abs().max() <= own + BY_TENSOR * largest, name


@pytest.mark.parametrize("side", ["left", "right"])
def test_plain_rows_with_padding_are_as_by_transformers(side: str, plain: peft.PeftModel) -> None:
    model = Policy(with_adapter(random_model("Qwen3_5"))).model
    ids = torch.randint(3, 380, (3, 80), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([80, 7, 66])[:, None]
    places = torch.arange(80)
    mask = (places >= 80 - lengths if side == "left" else places < lengths).long()
    with torch.no_grad():
        ours, theirs = (one(input_ids=ids, attention_mask=mask).logits[mask.bool()] for one in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_our_module_goes_on_from_a_cache_of_transformers(plain: peft.PeftModel) -> None:
    model = Policy(with_adapter(random_model("Qwen3_5"))).model
    ids = torch.randint(3, 380, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, cache = plain(input_ids=ids).logits, DynamicCache(config=plain.config)
        parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits
                 for part in ids.split([2, 20, 1, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=2e-5)


def test_layers_that_are_not_ours_are_refused_before_they_mix_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "KINDS", set())
    policy = Policy(random_model("Qwen3_5"))
    with pytest.raises(ValueError, match="in 1 of its 4 layers; in the others, packed sequences would see each other"):
        policy.hidden(batch_of(GROUPS["one group"]))


@pytest.mark.parametrize(("dtype", "mixed"), [(torch.float16, None), (torch.float32, torch.float16)])
def test_float16_is_refused_by_name_with_what_to_take(dtype: torch.dtype, mixed: torch.dtype | None) -> None:
    with pytest.raises(ValueError, match=r"Qwen3\.5.* overflows in float16.*Take bfloat16"):
        Policy(random_model("Qwen3_5").to(dtype), mixed)


def test_float16_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    random_model("Qwen3_5").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="overflows in float16"):
        FastLanguageModel.from_pretrained(str(tmp_path), dtype="float16")


def test_mixed_precision_in_bfloat16_comes_near_float32() -> None:
    batch, model = batch_of(GROUPS["several"]), with_adapter(random_model("Qwen3_5"))
    exact, mixed = (Policy(model, dtype).logprobs(batch, 1.0)[0].detach() for dtype in (None, torch.bfloat16))
    assert 0 < (mixed - exact).abs().max() < 0.02 * exact.abs().max()


def test_what_the_rule_computes_again_in_backward_does_not_go_to_the_host() -> None:
    batch, policy = batch_of([(300, [300])]), Policy(with_adapter(random_model("Qwen3_5")))
    enable_checkpointing(policy.base, "offload")
    policy.model.train()
    offload = ActivationOffload(policy.model, LateCopies(), min_bytes=256, page_bytes=512)
    with offload:
        logprobs, _ = policy.logprobs(batch, 1.0)
        after_forward = offload.host_bytes_peak
        gradients(policy.model, logprobs)
    assert offload.host_bytes_peak <= 1.1 * after_forward
