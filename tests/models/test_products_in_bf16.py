"""Mixed precision on a CPU with AMX: large products round their factors to bfloat16, and nothing else changes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_runs import QUESTIONS, load, moved, naive_logprobs, plain_peft

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.kernels.custom_op import FactorsInBF16
from lowmem_grpo.models import policy as policy_file
from lowmem_grpo.models.packing import pack, unpack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import RolloutGroup

SLACK = 1e-6  # of rounding in float32
SAMPLED = SamplingParams(n=2, max_tokens=8, seed=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AMX, oneDNN computes the same products in float32."""
    monkeypatch.setattr(policy_file, "has_amx", lambda: True)


def precision() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)


def sampled(policy: Policy, **others: Any) -> list[RolloutGroup]:
    tokenizer = policy.model.loaded.tokenizer
    prompts = [tokenizer(question).input_ids for question in QUESTIONS]
    rollouts = TransformersEngine(policy, tokenizer, 128).generate(prompts, SAMPLED, **others)
    return [RolloutGroup({}, *pair) for pair in zip(prompts, rollouts, strict=True)]


@pytest.fixture(autouse=True)
def usual_precision() -> Iterator[None]:
    """Compute in float32 as torch does at first, whatever another library has set in this process."""
    before, torch.backends.mkldnn.matmul.fp32_precision = precision(), "none"
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


def gradient_of(logprobs: Tensor, model: Any) -> Tensor:
    model.zero_grad()
    logprobs.sum().backward()
    return torch.cat([p.grad.flatten().double() for _, p in sorted(model.named_parameters()) if p.requires_grad])


def test_sampler_and_trainer_are_as_exact_as_a_model_of_transformers_in_bfloat16(tmp_path: Path) -> None:
    model = moved(load())
    policy, plain = Policy(model.eval(), torch.bfloat16), plain_peft(model, tmp_path)
    (batch,) = pack(groups := sampled(policy))
    pairs = [(group.prompt_ids, rollout.completion_ids) for group in groups for rollout in group.rollouts]
    theirs = {}
    for dtype in (torch.bfloat16, torch.float64):
        other = copy.deepcopy(plain).to(dtype)
        logprobs = torch.cat([naive_logprobs(other, *pair) for pair in pairs])
        theirs[dtype] = [logprobs.detach().double(), gradient_of(logprobs, other)]
    with policy.rounding():
        trained = policy.logprobs(batch, 1.0)[0]
        gradient = gradient_of(trained, model)
    values = unpack(trained.detach().double(), batch)
    of_rollout = {id(rollout): found for rollout, found in zip(batch.rollouts, values, strict=True)}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampler = torch.tensor([value for rollout in rollouts for value in rollout.rollout_logprobs])
    in_order = torch.cat([of_rollout[id(rollout)] for rollout in rollouts])
    exact, in_bf16 = theirs[torch.float64], theirs[torch.bfloat16]
    for found, place in ((sampler, 0), (in_order, 0), (gradient, 1)):
        assert (found - exact[place]).norm() <= (in_bf16[place] - exact[place]).norm() + SLACK


class Precisions(TorchDispatchMode):
    """Records the precision in which each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add((func.overloadpacket.__name__, precision()))
        return func(*args, **(kwargs or {}))


def test_attention_adapters_rewards_and_other_models_stay_in_float32() -> None:
    policy, rewarded = Policy(moved(load()), torch.bfloat16), []
    with Precisions() as while_sampling:
        groups = sampled(policy, on_group=lambda *_: rewarded.append(precision()))
    assert ("mm", "bf16") in while_sampling.seen and set(rewarded) == {precision()} == {"none"}
    (batch,) = pack(groups)
    with Precisions() as while_training, policy.rounding():
        policy.logprobs(batch, 1.0)[0].sum().backward()
    assert ("addmm_", "bf16") not in while_sampling.seen  # which adds LoRA
    for seen in (while_sampling.seen, while_training.seen):
        assert {how for name, how in seen if "attention" in name} == {"none"}


def test_a_float32_model_without_mixed_precision_computes_in_float32() -> None:
    with Precisions() as mode:
        sampled(Policy(load()))
    assert {how for _, how in mode.seen} == {"none"}


def test_threads_that_overlap_take_the_setting_back_only_when_the_last_is_done() -> None:
    context = FactorsInBF16()
    with context:
        with context:
            assert precision() == "bf16"
        assert precision() == "bf16"
    assert precision() == "none"
