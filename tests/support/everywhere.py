"""Fixtures and hooks of the processes in which tests run, as a plugin of pytest: conftest.py loads it there only."""

import gc
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator

import card
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.internal.constants_ast import Constants
from small_models import FAMILIES, HYBRIDS, TINY, load_model, with_adapter
from tables import in_short_lane
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lowmem_grpo.models.policy import Policy

# The same examples in every run, and none that fails since a machine is busy.
hypothesis_settings.register_profile(
    "lowmem_grpo", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("lowmem_grpo")


class SteadyProvider(HypothesisProvider):
    """Draws the same examples whichever modules earlier tests have loaded: hypothesis draws their constants as well."""

    _local_constants = Constants()  # private; checked with hypothesis 6.170


assert hasattr(HypothesisProvider, "_local_constants"), "hypothesis keeps the constants of modules in another place"
AVAILABLE_PROVIDERS["hypothesis"] = SteadyProvider


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no card, or none that computes in the dtype of the test. Of a test
    marked `every(n)`, one of n cases stays in the short lane, and the others are marked `slow`."""
    numbers = Counter[str]()
    for item in items:
        every = item.get_closest_marker("every")
        if every and not item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
            test = item.nodeid.partition("[")[0]
            if not in_short_lane(test, numbers[test], every.args[0]):
                item.add_marker(pytest.mark.slow)
            numbers[test] += 1
        call = getattr(item, "callspec", None)
        why = card.why_skipped({} if call is None else call.params)
        if item.get_closest_marker("gpu") and why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


FROZEN, FREEZE = pytest.MonkeyPatch(), gc.freeze


def pytest_collection_finish() -> None:
    """Freeze what imports and the collection of tests have made: where memory runs out, and where an engine starts, all
    objects are looked through, and these are most of them."""
    gc.collect()
    gc.freeze()
    keep_frozen()


def keep_frozen() -> None:
    """Keep frozen what is, and freeze nothing else, so that engines are collected: vLLM freezes all that is there when
    it starts, and thaws all, what imports have made too, when it ends; then each collection takes most of a second."""
    FROZEN.setattr(gc, "freeze", lambda: None)
    FROZEN.setattr(gc, "unfreeze", lambda: None)


def thaw() -> None:
    """Let vLLM freeze and thaw as in a run, until `keep_frozen` is called."""
    FROZEN.undo()
    gc.unfreeze()


def pytest_sessionfinish() -> None:
    thaw()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin each test with the same random states, so that it does not depend on those that ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def log_level_as_it_was() -> Iterator[None]:
    """The command sets the level of the package's log: it is set back, so that no test counts more lines for that."""
    log = logging.getLogger("lowmem_grpo")
    before = log.level
    yield
    if log.level != before:  # setting it walks through all loggers
        log.setLevel(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="session", params=["tiny", *FAMILIES, *HYBRIDS])
def policy(request: pytest.FixtureRequest) -> Policy:
    """A policy of every family, one after the other."""
    return Policy(with_adapter(load_model(request.param)))


@pytest.fixture(scope="session")
def tiny_policy() -> Policy:
    """The embedded model with an adapter."""
    return Policy(with_adapter(load_model("tiny")))


@pytest.fixture(scope="module", autouse=True)
def no_engine_left_behind() -> Iterator[None]:
    """A process has one engine of vLLM: what a module's tests left of theirs is closed before the next module."""
    yield
    choice = sys.modules.get("lowmem_grpo.engines.choice")
    engine = None if choice is None else choice.living()
    if engine is not None:
        engine.close()
