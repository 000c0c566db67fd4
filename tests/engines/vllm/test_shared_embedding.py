"""vLLM samples with the embedding and the head that are trained beside LoRA, which it borrows and does not copy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from card import CPU
from memory import Operations
from trained_embedding import (
    BOTH,
    CASES,
    OTHER,
    PROMPTS,
    SAME,
    WHOLE,
    adapted,
    far,
    plain,
    saved_base,
    train,
)
from vllm_models import NEEDS_VLLM, assert_borrowed, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.engines.vllm.weight_sharing import BorrowedTable, WeightSharing
from lowmem_grpo.models.policy import Head, Policy

pytestmark = pytest.mark.usefixtures("no_layers_left")
PARAMS = SamplingParams(n=4, max_tokens=12, seed=1, ignore_eos=True)
IDS = torch.tensor(PROMPTS[0])


@contextmanager
def sampling(folder: Path, settings: dict[str, Any], **options: Any) -> Iterator[tuple[Any, VLLMEngine]]:
    """A model whose embedding or head is trained, and its engine."""
    model = adapted(folder, settings, fast_inference="vllm", kv_cache_bytes=64 << 20, **options)
    try:
        yield model, model.engine()
    finally:
        model.close_engine()


@pytest.mark.vllm
@pytest.mark.skipif(NEEDS_VLLM[1].args[0], reason=NEEDS_VLLM[1].kwargs["reason"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(2)
def test_the_sampler_agrees_with_the_trainer_after_a_step_and_with_the_base_while_the_adapter_is_off(
    case: str, tmp_path: Path
) -> None:
    tied, settings = CASES[case]
    base = plain(saved_base(tmp_path, tied, wide=True))
    with sampling(tmp_path, settings) as (_, engine):
        assert far(base, engine.generate(PROMPTS, PARAMS)) <= SAME
        for _ in range(2):
            train(engine.policy)
            found = engine.generate(PROMPTS, PARAMS)
            assert far(engine.policy, found) <= SAME and far(base, found) > OTHER
            for off in (engine.policy.base_model, engine.base_model):
                with off():
                    assert far(base, engine.generate(PROMPTS, PARAMS)) <= SAME
            assert ids_of(engine.generate(PROMPTS, PARAMS)) == ids_of(found)
        assert_borrowed(engine, engine.policy)


def lent(folder: Path, settings: dict[str, Any], **options: Any) -> tuple[Policy, WeightSharing, list[BorrowedTable]]:
    """A policy that was trained for a step, and its embedding and head as an engine borrows them."""
    policy = Policy(adapted(folder, settings, **options).inner)
    loan = WeightSharing(policy.base, CPU)
    loan.linear("model.layers.0.self_attn.q_proj", {})
    tables = [loan.embedding("model.embed_tokens", head=False), loan.embedding("lm_head", head=True)]
    train(policy)
    return policy, loan, tables


@pytest.mark.parametrize("settings", [WHOLE, BOTH], ids=["whole", "rows"])
def test_a_recorded_lookup_and_the_logits_follow_the_adapter_and_the_base(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    policy, loan, (embedding, head) = lent(saved_base(tmp_path, False), settings)
    hidden, own = torch.randn(3, 32), policy.base.get_input_embeddings()(IDS).detach()
    with policy.base_model():
        logits, rows = policy.head.logits(hidden), policy.base.get_input_embeddings()(IDS)
    assert (own - rows).abs().max() > OTHER
    with Operations() as operations:
        looked_up = embedding.embed(IDS)
    for base_model, expected in [(False, own), (True, rows), (False, own)]:
        loan.check()
        loan.use_policy(base_model)
        operations.again()
        assert torch.equal(looked_up, expected)
        assert torch.equal(head.logits(hidden), logits if base_model else policy.head.logits(hidden))
    with policy.base_model():
        loan.check()
        assert loan.use_policy(False) == "base"
        operations.again()
        assert torch.equal(looked_up, rows) and torch.equal(head.logits(hidden), logits)


def test_a_float32_copy_of_a_float16_embedding_gives_what_the_layers_compute_in(tmp_path: Path) -> None:
    policy, loan, (embedding, head) = lent(saved_base(tmp_path, False), WHOLE, dtype=torch.float16)
    loan.use_policy(False)
    hidden, linear = torch.randn(3, 32).half(), policy.base.get_output_embeddings().modules_to_save["default"]
    assert embedding.embed(IDS).dtype == torch.float16
    assert linear.weight.dtype == torch.float32
    assert torch.equal(head.logits(hidden), Head(linear).logits(hidden))


@pytest.mark.parametrize("settings", [WHOLE, BOTH], ids=["whole", "rows"])
def test_cached_prefixes_are_those_of_the_trained_values(settings: dict[str, Any], tmp_path: Path) -> None:
    policy, loan, _ = lent(saved_base(tmp_path, False), settings)
    before = loan.use_policy(False)
    assert loan.use_policy(False) == before
    with torch.no_grad():
        next(weight for weight in policy.trained if weight.group).parameter.add_(1)
    assert loan.use_policy(False) != before


def test_a_second_adapter_with_a_copy_of_its_own_is_refused_with_the_fix(tmp_path: Path) -> None:
    policy, loan, _ = lent(saved_base(tmp_path, False), WHOLE)
    policy.model.add_adapter("saved", peft.LoraConfig(r=4, target_modules=["q_proj"], **WHOLE))  # type: ignore[arg-type]
    policy.model.set_adapter("saved")
    with pytest.raises(BorrowError, match=r"'saved' has a copy of its own.*load_lora"):
        loan.use_policy(False)
