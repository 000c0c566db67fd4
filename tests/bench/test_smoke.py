"""The smoke run for cards: a variant trains on the CPU, what cannot run here is named, and what is wrong is found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
JUDGE = "import json, sys, bench.smoke.bench as c; print(json.dumps(c.judged(json.load(sys.stdin))))"


def bench(*arguments: str, content: Any = None, code: int = 0) -> str:
    """Standard output of a call in bench/ that ends with this exit code."""
    done = subprocess.run([sys.executable, *arguments], cwd=BENCH.parent, input=json.dumps(content),
                          capture_output=True,
                          text=True, timeout=230, env=os.environ, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_variant_trains_on_the_cpu_and_what_needs_a_card_is_named_beside_it(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    printed = bench("-m", "bench.smoke.bench", "--device", "cpu", "--steps", "2", "--output", str(output), "--variant",
                    "fp16",
                    "--variant", "packing")
    half, packing = (json.loads(line) for line in output.read_text().splitlines())
    assert (half["status"], half["missing"]) == ("missing", half["why"])
    assert half["why"] in printed
    assert packing["status"] == "ok" and packing["engine"] == "transformers" and len(packing["steps"]) == 2
    assert packing["adapter_moved"] > 0
    assert all(step["grad_norm"] > 0 and step["sampling/parity/mean"] < 1e-3 for step in packing["steps"])
    assert "packing: ok, 2 steps" in printed


@pytest.mark.slow
def test_a_variant_that_does_not_end_is_a_failure_of_the_run(tmp_path: Path) -> None:
    printed = bench("-m", "bench.smoke.bench", "--device", "cpu", "--time-limit", "0.2", "--output",
                    str(tmp_path / "rows.jsonl"),
                    "--variant", "4-bit", code=1)
    assert printed == "4-bit: failed: it ran past 0.2 s\n"


STEP = {"loss": 0.1, "grad_norm": 1.0, "entropy": 2.0, "groups/with_signal": 4, "memory/oom_train": 0,
        "memory/oom_generate": 0}
GOOD = {"engine": "vllm", "steps": [STEP], "adapter_moved": 0.01, "wrong": [], "left_bytes": 2**20, "pretend": False}


@pytest.mark.parametrize(("change", "words"), [
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
    row = json.loads(bench("-c", JUDGE, content=GOOD | change))
    assert row["status"] == "failed"
    assert words in row["why"]


def test_a_variant_without_fault_is_ok_and_without_differing_rewards_it_needs_no_gradient() -> None:
    alike = STEP | {"groups/with_signal": 0, "grad_norm": 0.0}
    for steps in ([STEP], [STEP, alike]):
        assert json.loads(bench("-c", JUDGE, content=GOOD | {"steps": steps}))["status"] == "ok"


def test_on_the_pretend_device_values_are_not_judged_and_the_rest_is() -> None:
    blind = GOOD | {"pretend": True, "steps": [STEP | {"grad_norm": 0.0}], "adapter_moved": 0.0}
    assert json.loads(bench("-c", JUDGE, content=blind))["status"] == "walked"
    row = json.loads(bench("-c", JUDGE, content=blind | {"wrong": ["nothing was offloaded to the host"]}))
    assert (row["status"], row["why"]) == ("failed", "nothing was offloaded to the host")


def test_the_pretend_device_is_told_by_its_name_and_real_cards_keep_their_environment() -> None:
    code = "import json, sys, bench.gate.pretend as p; " \
           "print(json.dumps([p.environment(gpu) for gpu in json.load(sys.stdin)]))"
    nothing, real, pretend = json.loads(bench("-c", code, content=[None, "NVIDIA H200", "Null CUDA sm_90 (no GPU)"]))
    assert nothing == real == {}
    assert pretend["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    sleeping = json.loads(bench("-c",
                                "import json, bench.gate.pretend as p; print(json.dumps(p.environment(p.NAME, True)))"))
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in sleeping, "sleep mode's pool is part of torch's cache"
    assert sleeping["NULL_CUDA_READ_ZEROS"] == "1"


def test_the_reason_of_a_failure_is_the_error_and_not_what_was_said_after_it() -> None:
    said = ["Traceback (most recent call last):", "RuntimeError: CUDA Error: out of memory", "vLLM did not end cleanly"]
    code = "import json, sys, bench.smoke.bench as c; " \
           "print(json.dumps([c.last_words(s) for s in json.load(sys.stdin)]))"
    assert json.loads(bench("-c", code, content=["\n".join(said), "only words\n", ""])) == [
        said[1], "only words", "it said nothing",
    ]


ENGINE = """
import json, sys
import bench.smoke.provider as smoke_run
from bench.smoke.variants import VARIANTS
class Engine:
    def __init__(self, asked, had, frees):
        self.kv_bytes, self.had, self.frees, self.asleep = asked, had, frees, False
    def sleep(self):
        self.asleep, self.kv_bytes = True, 0
    def wake(self):
        self.asleep, self.kv_bytes = False, self.had
def trainer(engine):
    return type("Trainer", (), {"engine": engine})()
GIB = 2**30
"""


def test_a_nap_that_gives_no_memory_back_or_loses_some_of_the_cache_is_seen() -> None:
    code = ENGINE + """
found = []
for had, frees in ((GIB, GIB), (GIB, 0), (GIB // 2, GIB)):
    engine = Engine(GIB, had, frees)
    smoke_run.free_bytes = lambda: 8 * GIB + (engine.frees if engine.asleep else 0)
    found.append(smoke_run.wrong_sleep(engine))
print(json.dumps(found))"""
    right, kept, shrunk = json.loads(bench("-c", code))
    assert right == []
    assert len(kept) == 1 and "sleep gave 0 bytes back" in kept[0]
    assert len(shrunk) == 1 and "536,870,912 bytes after sleep and wake" in shrunk[0]


@pytest.mark.parametrize(("name", "shortages", "share", "good"), [
    ("vllm wakes beside a full cache", 0, 1.0, True), ("vllm wakes beside a full cache", 1, 1.0, False),
    ("vllm wakes beside a full cache", 0, 0.5, False), ("vllm wakes on a full card", 1, 0.5, True),
    ("vllm wakes on a full card", 0, 1.0, False), ("vllm wakes on a full card", 1, 1.0, False),
    ("vllm wakes on a full card", 1, 0.0, False),
])
def test_waking_is_as_ever_beside_a_full_cache_and_takes_less_on_a_full_card(
    name: str, shortages: int, share: float, good: bool
) -> None:
    code = ENGINE + f"""
variant = VARIANTS[{name!r}]
asked = variant.load["kv_cache_bytes"]
lines = [{{"memory/oom_generate": 0}}, {{"memory/oom_generate": {shortages}}}]
print(json.dumps(smoke_run.wrong_after_filling(trainer(Engine(asked, int(asked * {share}), 0)), variant, lines)))"""
    assert (json.loads(bench("-c", code)) == []) == good


def test_a_shortage_that_a_variant_makes_is_not_held_against_it() -> None:
    short = STEP | {"memory/oom_generate": 1}
    assert json.loads(bench("-c", JUDGE, content=GOOD | {"steps": [short], "fills": "the card"}))["status"] == "ok"
    assert json.loads(bench("-c", JUDGE, content=GOOD | {"steps": [short], "fills": ""}))["status"] == "failed"


def test_the_variants_are_listed() -> None:
    assert {"4-bit", "vllm", "offload", "fp16", "packing"} <= set(bench("-m", "bench.smoke.bench",
                                                                        "--list").splitlines())
