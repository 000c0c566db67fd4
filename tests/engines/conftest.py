"""What the tests of both engines share: prompts, policies in float64, and less garbage to look through.

What a batch computes has other last bits in another batch, and on each processor others. In float32 that changes a
token once in some hundred thousand; in float64 it does not.
"""

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vllm is imported

import pytest

if TYPE_CHECKING:  # the process that hands out the tests reads this file too, and starts without them
    from transformers import PreTrainedTokenizerBase

    from lowmem_grpo.models.policy import Policy

QUESTION = "Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?"
# The first have caches of all kinds: without windows, with windows, with both, with states of gated delta nets.
FAMILIES = ["Llama", "Mistral", "Gemma3", "Qwen3_5",
            *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny", "Qwen3", "Phi3"))]


def pytest_configure(config: pytest.Config) -> None:
    """Import vLLM where tests run, so that what it makes is frozen when collection is done."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from lowmem_grpo.engines.vllm.installed import import_plugin, installed

        if installed() is not None:
            import_plugin()


def policy_of(name: str) -> "Policy":
    """A small model with an adapter, in float64."""
    from small_models import load_model, with_adapter

    from lowmem_grpo.models.policy import Policy

    return Policy(with_adapter(load_model(name)).double())


@pytest.fixture(scope="module", autouse=True)
def only_new_objects_are_collected() -> None:
    """Freeze what earlier modules left: vLLM collects garbage ten times from an engine's start to its end."""
    from everywhere import FREEZE

    gc.collect()
    FREEZE()


@pytest.fixture(scope="module")
def all_is_collected() -> Iterator[None]:
    """For tests of what an engine leaves behind: to the end of the module vLLM freezes and thaws, as in a run."""
    from everywhere import keep_frozen, thaw

    from lowmem_grpo.engines.choice import living

    thaw()
    yield
    if (engine := living()) is not None:
        engine.close()
    keep_frozen()


@pytest.fixture(scope="session", params=FAMILIES)
def policy(request: pytest.FixtureRequest) -> "Policy":
    """A policy of every family, one after the other."""
    return policy_of(request.param)


@pytest.fixture(scope="session")
def small_policy() -> "Policy":
    """A random Llama of two layers: for tests to which its words say nothing."""
    return policy_of("Llama")


@pytest.fixture(scope="session")
def tiny_policy() -> "Policy":
    """The embedded model with an adapter."""
    return policy_of("tiny")


@pytest.fixture(scope="module")
def prompts(tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Token ids of different lengths, a single token among them."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    question = chat["input_ids"] if not isinstance(chat, list) else chat
    return [question, tokenizer("Start with 5.")["input_ids"], [100]]
