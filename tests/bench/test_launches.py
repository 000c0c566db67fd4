"""What a decoder layer hands to a card, held: launches in training and for a sampled token."""

import json
import subprocess
from typing import Any

import pytest
from programs import ROOT, ran
from tables import every_row

from bench import launches
from lowmem_grpo.memory import time_plan

TRAINING, DECODE = 170, 16  # at most


@pytest.fixture(scope="module")
def printed() -> str:
    """Standard output of `make bench-launches JSON=1`, by the command that it runs."""
    return ran("launches", "--json").stdout


@pytest.fixture(scope="module")
def found(printed: str) -> dict[str, Any]:
    return json.loads(printed)


@pytest.mark.slow
def test_one_json_object_is_printed_and_nothing_else(printed: str, found: dict[str, Any]) -> None:
    assert printed.strip() == json.dumps(found)
    assert {"launches_forward", "launches_backward", "launches_decode"} <= found.keys() and found["host_us_per_op"] > 0


@pytest.mark.slow
def test_the_time_plan_counts_no_fewer_launches_than_the_code_makes(found: dict[str, Any]) -> None:
    planned = {"launches_forward": time_plan.LAUNCHES_FORWARD, "launches_backward": time_plan.LAUNCHES_BACKWARD,
               "launches_decode": time_plan.LAUNCHES_DECODE["vllm"]}
    for name, most in planned.items():
        assert found[name] <= most, f"raise {name.upper()} in lowmem_grpo/memory/time_plan.py"


@pytest.mark.slow
def test_a_layer_trains_with_few_launches(found: dict[str, Any]) -> None:
    assert 20 < found["launches_forward"] < found["launches_backward"]
    assert found["launches_layer"] == found["launches_forward"] + found["launches_backward"] <= TRAINING


@pytest.mark.slow
def test_a_sampled_token_takes_few_launches_of_a_layer(found: dict[str, Any]) -> None:
    assert 4 <= found["launches_decode"] <= DECODE


@every_row("target", ["bench-launches", "bench-memory", "bench-step", "bench-rollout", "compile-kernels"])
def test_make_runs_each_bench_and_asks_for_json_on_demand(target: str) -> None:
    make = ["make", "--no-print-directory", "--dry-run", "--always-make", target]  # `make test` is a make around it
    commands = [subprocess.run([*make, *more], cwd=ROOT, capture_output=True, text=True,
                               check=True).stdout.splitlines()[-1] for more in ([], ["JSON=1"])]
    module = next(word for word in commands[0].split() if word.startswith("bench."))
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    assert "--json" not in commands[0]
    assert "--json" in commands[1]


@pytest.mark.parametrize(("form", "kernel"), [("4bit", "nf4_decode"), ("fp8", "fp8_decode")])
def test_a_token_of_a_layer_costs_at_most_16_launches_of_which_two_a_linear_layer_are_ours(
    form: str, kernel: str
) -> None:
    parts = launches.breakdown(form)
    assert sum(parts.values()) <= DECODE
    assert {name: parts[name] for name in launches.LAYERS} == dict.fromkeys(launches.LAYERS, 2)
    assert all(dict(counts) == {"mm": 1, kernel: 1} for counts in launches.counted(form).values())


def test_dequantized_weights_take_plain_products_and_neither_cast_nor_join() -> None:
    counts = launches.counted("16bit")
    assert {name: sum(found.values()) for name, found in counts.items()} == {
        "qkv": 5, "o": 3, "gate_up": 4, "down": 3}
    assert {operation for found in counts.values() for operation in found} == {"mm", "addmm", "addmm_"}
