"""One vLLM engine for most tests of a file: a new one is made only where a test closed it or needed another."""

from collections.abc import Iterator

import peft
import pytest
from small_models import load_model, with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import CONTEXT, PLAIN, move_adapter

from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.shared_linear import LAYERS
from lowmem_grpo.models.policy import Policy


class Shared:
    """One engine for most tests of this file: a new one is made where a test closed it or needed another."""

    engine: VLLMEngine | None = None
    policy: Policy


def close_shared() -> None:
    if Shared.engine is not None:
        Shared.engine.close()
        Shared.engine = None


@pytest.fixture(scope="module", autouse=True)
def close_at_the_end() -> Iterator[None]:
    yield
    close_shared()


@pytest.fixture(scope="module")
def policy() -> Policy:
    """The shallow model in float32, under an adapter with dropout, which must never act."""
    return Policy(with_adapter(load_model("shallow"), lora_dropout=0.5).eval())


@pytest.fixture
def engine(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> VLLMEngine:
    """The shared engine; the adapter is as at the start of each test."""
    if Shared.engine is None or Shared.engine.llm is None:
        Shared.engine = VLLMEngine(policy, tokenizer, CONTEXT, PLAIN)
    move_adapter(policy, 0.05)
    Shared.engine.on_policy_update(0)
    return Shared.engine


@pytest.fixture
def alone() -> None:
    """No engine lives."""
    close_shared()


@pytest.fixture
def no_layers_left() -> Iterator[None]:
    """For tests of layers without an engine."""
    yield
    LAYERS.clear()


@pytest.fixture
def tiny() -> peft.PeftModel:
    """The shallow model in float32, its own for each test."""
    return with_adapter(load_model("shallow")).eval()
