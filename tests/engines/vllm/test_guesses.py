"""Guesses by vLLM's own lookup: what it is told, and what is refused by name before it starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm import guesses

pytestmark = pytest.mark.slow


def policy(device: str = "cuda", model_type: str = "llama", routed: int = 0) -> Any:
    base = SimpleNamespace(config={"model_type": model_type})
    return SimpleNamespace(device=SimpleNamespace(type=device), base=base, routed_layers=routed)


@pytest.fixture
def numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "find_spec", lambda name: object())


@pytest.mark.usefixtures("numba")
@pytest.mark.parametrize(("given", "params", "words"), [
    (policy("cpu"), SamplingParams(), "build for CPUs draws wrong tokens"),
    (policy(), SamplingParams(min_p=0.1), "min_p is 0.1"),
    (policy(routed=3), SamplingParams(), "routes of experts"),
    (policy(model_type="qwen3_5_text"), SamplingParams(), "delta nets"),
])
def test_what_vllm_cannot_do_with_guesses_is_refused_by_name(given: Any, params: SamplingParams, words: str) -> None:
    with pytest.raises(ValueError, match=rf'speculation="lookup" is set, and .*{words}.*Leave speculation out'):
        guesses.check(given, params)


@pytest.mark.usefixtures("numba")
def test_a_plain_model_on_a_card_is_not_refused() -> None:
    guesses.check(policy(), SamplingParams(top_p=0.9))


def test_a_missing_numba_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="numba, which is not installed"):
        guesses.check(policy(), SamplingParams())
