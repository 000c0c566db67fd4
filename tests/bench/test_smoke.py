"""The smoke run for cards: a variant trains on the CPU, what cannot run here is named, and what is wrong is found."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import every_row

from bench.smoke import provider
from bench.smoke.bench import judged, main
from bench.smoke.variants import VARIANTS
from lowmem_grpo.utils import GIB


def called(*arguments: str) -> Result:
    """The command, in this process: its variants run in others."""
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.slow
def test_a_variant_that_needs_a_card_is_missing_and_one_that_does_not_end_is_a_failure(tmp_path: Path) -> None:
    """That a variant trains is judged by the command itself, which `make gpu-cpu` runs with two of them."""
    output = tmp_path / "rows.jsonl"
    half = called("--device", "cpu", "--output", str(output), "--variant", "fp16")
    row = json.loads(output.read_text())
    assert half.exit_code == 0 and (row["status"], row["missing"]) == ("missing", row["why"])
    assert row["why"] in half.output
    endless = called("--device", "cpu", "--time-limit", "0.2", "--output", str(output), "--variant", "4-bit")
    assert endless.exit_code == 1 and endless.stdout == "4-bit: failed: it took more than 0.2 s\n"


STEP = {"loss": 0.1, "grad_norm": 1.0, "entropy": 2.0, "groups/with_signal": 4, "memory/oom_train": 0,
        "memory/oom_generate": 0}
GOOD = {"engine": "vllm", "steps": [STEP], "adapter_moved": 0.01, "wrong": [], "left_bytes": 2**20, "pretend": False}


@every_row(("change", "words"), [
    ({"steps": [STEP, STEP | {"loss": float("nan")}]}, "step 2: loss is nan"),
    ({"steps": [{name: value for name, value in STEP.items() if name != "entropy"}]}, "step 1: entropy is None"),
    ({"steps": [STEP | {"grad_norm": 0.0}]}, "the gradient is zero"),
    ({"steps": [STEP | {"memory/oom_train": 1}]}, "memory ran out"),
    ({"adapter_moved": 0.0}, "the adapter is what it was"),
    ({"left_bytes": 3 * 2**20}, "3,145,728 bytes are still allocated"),
    ({"wrong": ["vLLM is awake after a rollout"]}, "vLLM is awake"),
    ({"steps": []}, "no step was recorded"),
])
def test_what_is_wrong_with_a_variant_fails_it(change: dict[str, Any], words: str) -> None:
    row = judged(GOOD | change)
    assert row["status"] == "failed"
    assert words in row["why"]


def test_a_variant_without_fault_is_ok_and_without_differing_rewards_it_needs_no_gradient() -> None:
    alike = STEP | {"groups/with_signal": 0, "grad_norm": 0.0}
    for steps in ([STEP], [STEP, alike]):
        assert judged(GOOD | {"steps": steps})["status"] == "ok"


def test_on_the_pretend_device_values_are_not_judged_and_the_rest_is() -> None:
    blind = GOOD | {"pretend": True, "steps": [STEP | {"grad_norm": 0.0}], "adapter_moved": 0.0}
    assert judged(blind)["status"] == "walked"
    row = judged(blind | {"wrong": ["nothing was offloaded to the host"]})
    assert (row["status"], row["why"]) == ("failed", "nothing was offloaded to the host")


class Engine:
    """Stands for vLLM: `had` bytes of cache after waking, and what its sleep frees."""

    def __init__(self, asked: int, had: int, frees: int) -> None:
        self.kv_bytes, self.had, self.frees, self.asleep = asked, had, frees, False

    def sleep(self) -> None:
        self.asleep, self.kv_bytes = True, 0

    def wake(self) -> None:
        self.asleep, self.kv_bytes = False, self.had


def wrong_nap(monkeypatch: pytest.MonkeyPatch, had: int, frees: int) -> list[str]:
    """What is said of the sleep of an engine with a cache of 1 GiB."""
    engine = Engine(GIB, had, frees)
    monkeypatch.setattr(provider, "free_bytes", lambda: 8 * GIB + (frees if engine.asleep else 0))
    return provider.wrong_sleep(engine)


def test_a_nap_that_gives_no_memory_back_or_loses_some_of_the_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_nap(monkeypatch, GIB, GIB) == []
    kept, shrunk = wrong_nap(monkeypatch, GIB, 0), wrong_nap(monkeypatch, GIB // 2, GIB)
    assert len(kept) == 1 and "sleep gave 0 bytes back" in kept[0]
    assert len(shrunk) == 1 and "536,870,912 bytes after sleep and wake" in shrunk[0]


@every_row(("name", "shortages", "share", "good"), [
    ("vllm wakes beside a full cache", 0, 1.0, True), ("vllm wakes beside a full cache", 1, 1.0, False),
    ("vllm wakes beside a full cache", 0, 0.5, False), ("vllm wakes on a full card", 1, 0.5, True),
    ("vllm wakes on a full card", 0, 1.0, False), ("vllm wakes on a full card", 1, 1.0, False),
    ("vllm wakes on a full card", 1, 0.0, False),
])
def test_waking_is_as_ever_beside_a_full_cache_and_takes_less_on_a_full_card(
    name: str, shortages: int, share: float, good: bool
) -> None:
    variant = VARIANTS[name]
    asked = variant.load["kv_cache_bytes"]
    trainer: Any = SimpleNamespace(engine=Engine(asked, int(asked * share), 0))
    lines = [{"memory/oom_generate": 0}, {"memory/oom_generate": shortages}]
    assert (provider.wrong_after_filling(trainer, variant, lines) == []) == good


def test_a_shortage_that_a_variant_makes_is_not_held_against_it() -> None:
    short = STEP | {"memory/oom_generate": 1}
    assert judged(GOOD | {"steps": [short], "fills": "the card"})["status"] == "ok"
    assert judged(GOOD | {"steps": [short], "fills": ""})["status"] == "failed"
