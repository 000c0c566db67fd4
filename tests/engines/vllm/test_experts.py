"""vLLM samples with a mixture on the trainer's own experts, and hands on the routes that it returns."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from card import CPU
from episodes import Talk
from families import saved_family
from trainer_runs import adapter, make, same
from vllm_models import (
    CONTEXT,
    HEADS,
    KV_BYTES,
    LONG,
    NEEDS_VLLM,
    OTHER,
    PLAIN,
    SAME,
    WIDER,
    assert_borrowed,
    bound_of,
    differences,
    engine_on,
    move_adapter,
)

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.engines.vllm.installed import import_plugin
from lowmem_grpo.engines.vllm.requests import CallSampling, OpenTurns
from lowmem_grpo.engines.vllm.shared_linear import BorrowError, check_family
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing
from lowmem_grpo.models.policy import Policy

pytestmark = NEEDS_VLLM
BF16, FP32 = torch.bfloat16, torch.float32
PROMPTS = [[5, 6, 7, 8], [9] * 40, list(range(20, 120)), LONG]
MIXTURE = WIDER | HEADS["qwen3"] | {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4}


def mixture(folder: Path, dtype: torch.dtype, four_bit: bool = False, **changes: Any) -> Policy:
    """A policy as a user gets it, with an adapter that does nothing yet."""
    saved_family("qwen3_moe", folder, **(MIXTURE | changes))
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=CONTEXT, load_in_4bit=four_bit,
                                                 dtype=dtype)
    policy = Policy(FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False))
    move_adapter(policy, 0.0)
    return policy


def by_letters(completions: list[Any], **kwargs: Any) -> list[float]:
    """Differs between most completions."""
    return [float(sum(map(ord, one[0]["content"])) % 17) for one in completions]


@pytest.mark.parametrize(("dtype", "four_bit"), [
    *(pytest.param(BF16, four_bit, marks=pytest.mark.slow) for four_bit in (False, True)), (FP32, False),
])
def test_sampled_logprobs_are_the_trainers_before_and_after_the_adapter_moves(
    dtype: torch.dtype, four_bit: bool, tmp_path: Path
) -> None:
    policy = mixture(tmp_path, dtype, four_bit)
    params = SamplingParams(n=8, max_tokens=40, seed=1, ignore_eos=True)
    with engine_on(policy) as engine:
        for version, size in enumerate((0.0, 0.05)):
            move_adapter(policy, size)
            engine.on_policy_update(version)
            groups = engine.generate(PROMPTS, params)
            assert differences(policy, PROMPTS, groups).abs().mean() <= bound_of(policy, PROMPTS, groups)
        move_adapter(policy, 0.0)
        assert differences(policy, PROMPTS, groups).abs().mean() > OTHER  # the adapter mattered
        assert_borrowed(engine, policy)


@pytest.mark.slow
def test_a_layer_without_experts_is_shared_too_and_a_moved_tensor_is_noticed(tmp_path: Path) -> None:
    policy = mixture(tmp_path, FP32, num_hidden_layers=3, mlp_only_layers=[1])
    assert policy.routed_places == (0, 2)
    with engine_on(policy) as engine:
        groups = engine.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
        assert differences(policy, PROMPTS, groups).abs().mean() <= SAME
        gate = policy.base.get_submodule("model.layers.2.mlp.gate")
        gate.weight.data = gate.weight.data.clone()
        with pytest.raises(BorrowError, match="were moved or replaced"):
            engine.generate(PROMPTS, SamplingParams(max_tokens=8))


@pytest.mark.slow
def test_where_vllm_returns_no_routes_one_line_says_that_tokens_are_routed_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = mixture(tmp_path, FP32)
    with engine_on(policy) as engine:
        (group,) = engine.generate(PROMPTS[:1], SamplingParams(n=2, max_tokens=8, seed=1))
    said = [record.message for record in caplog.records if "which experts tokens took" in record.message]
    assert len(said) == 1 and "Model Runner V2" in said[0]
    assert [rollout.routes for rollout in group] == [None, None]


@pytest.mark.slow
def test_a_run_learns_and_every_ratio_is_one_before_the_first_update(tmp_path: Path) -> None:
    saved_family("qwen3_moe", tmp_path / "model", **MIXTURE)
    model, _ = FastLanguageModel.from_pretrained(
        str(tmp_path / "model"), max_seq_length=128, load_in_4bit=True, fast_inference="vllm", kv_cache_bytes=KV_BYTES)
    model = FastLanguageModel.get_peft_model(model, r=4)
    trainer = make(tmp_path / "run", by_letters, model=model, parity_steps=1)
    before = adapter(trainer)
    metrics = trainer.sampler.engine.name, trainer.parity.check(trainer.rollout())
    assert metrics[0] == "vllm"
    assert metrics[1]["sampling/parity/max"] <= 1e-4  # float32, as on every CPU; experts in 4 bits
    trainer.train()
    assert not same(before, adapter(trainer))
    trainer.sampler.engine.close()


# What a card would do, where vLLM's setting is on


def output(prompt: list[int], ids: list[int], first: int = 0, dtype: Any = np.uint8) -> SimpleNamespace:
    """A completion of vLLM's, with routes."""
    routes = np.arange(first, first + len(prompt) + len(ids) - 1)[:, None, None] + np.zeros((1, 4, 2))
    routes[:, 1] = 99  # a layer without experts
    return SimpleNamespace(token_ids=ids, finish_reason="stop", routed_experts=routes.astype(dtype),
                           logprobs=SimpleNamespace(start_indices=range(len(ids)), logprobs=[-1.0] * len(ids)))


def sampling(**options: Any) -> CallSampling:
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    return CallSampling(SamplingParams(**options), CONTEXT, 1000, [2], tokenizer, dict, (0, 2, 3))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_that_vllm_returns_are_those_of_the_layers_with_experts(dtype: Any) -> None:
    prompt, ids = [5, 6, 7], [8, 9]
    rollout = sampling().rollout(output(prompt, ids, 3, dtype), prompt, 1)
    assert rollout.routes is not None
    routes = torch.cat(rollout.routes.parts)
    assert routes.shape == (4, 3, 2) and routes.dtype == (torch.uint8 if dtype is np.uint8 else torch.int16)
    assert routes[:, :, 0].T.tolist() == [[3, 4, 5, 6]] * 3
    with pytest.raises(RuntimeError, match="routes of 4 tokens, and 5 ran"):
        sampling().rollout(output(prompt, ids), [4, *prompt], 1)


def test_a_turn_shares_the_routes_of_the_turn_that_it_goes_on_from() -> None:
    talk = Talk([[5, 6, 7]])
    call = OpenTurns(talk, sampling(), torch.device("cpu"))
    for turn in range(3):
        (request,) = talk.next_requests(busy=False)
        call.open[0], call.keys["1"] = (request, None), 0
        made = output(request.ids, [8, 9], 10 * turn)
        call.give_turn(SimpleNamespace(request_id="1-abc", outputs=[made], num_cached_tokens=0), 0)
    first, *others = (rollout.routes for rollout in talk.drawn[0])
    for routes in others:
        assert routes.parts[0].data_ptr() == first.parts[0].data_ptr()
    assert torch.cat(others[0].parts)[:, 0, 0].tolist() == [0, 1, 2, 3, *range(14, 19)]


def test_a_mixture_asks_for_routes_and_a_dense_model_does_not(tmp_path: Path) -> None:
    policy = mixture(tmp_path, FP32)
    capacity = vllm_settings.Capacity(policy, 512, PLAIN)
    asked = [vllm_settings.llm_options(capacity, "name", True, False, routes) for routes in (True, False)]
    assert asked[0]["enable_return_routed_experts"] is True and "enable_return_routed_experts" not in asked[1]


def test_graphs_are_refused_with_a_mixture_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = mixture(tmp_path, FP32)
    assert vllm_settings.is_eager(policy, None) and not vllm_settings.is_eager(policy, False)
    monkeypatch.setattr(vllm_settings, "on_card", lambda policy: True)
    assert vllm_settings.is_eager(policy, None)
    with pytest.raises(ValueError, match="Leave enforce_eager out"):
        vllm_settings.is_eager(policy, False)


# Refusals


@pytest.mark.parametrize(("name", "missing"), [("EXPERTS", "RoutedExperts"), ("ROUTES", "renamed")])
def test_a_version_of_vllm_that_lacks_what_a_mixture_needs_is_refused_by_name(
    name: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = import_plugin()
    plugin.check_routes()
    monkeypatch.setattr(plugin, name, None if name == "EXPERTS" else missing)
    policy = mixture(tmp_path, FP32)
    with pytest.raises(BorrowError, match=r'this vLLM has no .*fast_inference="transformers"'), engine_on(policy):
        pass


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "olmoe"])
def test_other_mixtures_are_refused_and_not_given_to_vllm_in_16_bits(kind: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(BorrowError, match=f'experts of {kind} are not shared .*fast_inference="transformers"'):
        check_family(AutoConfig.for_model(kind), BF16, torch.device("cpu"))


def test_experts_that_the_trainer_does_not_hold_are_refused_where_vllm_makes_them(tmp_path: Path) -> None:
    policy = mixture(tmp_path, FP32)
    with pytest.raises(BorrowError, match=r"\(model.layers.9.mlp.experts\) is a mixture .* those of Qwen3-MoE are"):
        WeightSharing(policy.base, CPU).routed("model.layers.9.mlp.experts")
    plugin = import_plugin()
    lent = WeightSharing(policy.base, CPU).routed("model.layers.0.mlp.experts")
    right: dict[str, Any] = {"global_num_experts": 16, "hidden_size": 128, "top_k": 4, "renormalize": True,
                             "activation": SimpleNamespace(value="silu"),
                             "moe_config": SimpleNamespace(intermediate_size_per_partition=64)}
    lent.block.gate.norm_topk_prob = True
    plugin.check_experts(lent, SimpleNamespace(**right))
    for wrong in ({"top_k": 2}, {"renormalize": False}, {"activation": SimpleNamespace(value="gelu")}):
        with pytest.raises(BorrowError, match="vLLM wants"):
            plugin.check_experts(lent, SimpleNamespace(**(right | wrong)))
