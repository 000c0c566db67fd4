"""What a decoder layer hands to a card, held: launches in training and for a sampled token."""

import json
import subprocess

import pytest
from programs import ROOT, ran
from tables import every_row

from bench import launches
from lowmem_grpo.memory import time_plan

TRAINING, KEPT, LENT, DECODE = 86, 62, 50, 16  # at most


@pytest.mark.slow
def test_a_layer_makes_few_launches_of_which_the_time_plan_counts_no_fewer_and_only_json_is_printed() -> None:
    printed = ran("launches", "--json").stdout
    found = json.loads(printed)
    assert printed.strip() == json.dumps(found) and found["host_us_per_op"] > 0
    for name, most in (("forward", time_plan.LAUNCHES_FORWARD), ("backward", time_plan.LAUNCHES_BACKWARD),
                       ("decode", time_plan.LAUNCHES_DECODE["vllm"])):
        assert found[f"launches_{name}"] <= most, f"raise LAUNCHES_{name.upper()} in lowmem_grpo/memory/time_plan.py"
    assert 20 < found["launches_forward"] < found["launches_backward"]
    assert found["launches_layer"] == found["launches_forward"] + found["launches_backward"] <= TRAINING
    assert found["launches_kept"] <= KEPT and found["launches_lent"] <= LENT
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


def test_dequantized_weights_take_one_product_with_a_below_them_and_one_launch_for_all_b() -> None:
    counts = launches.counted("16bit")
    assert {name: dict(found) for name, found in counts.items()} == {
        name: {"addmm" if name == "qkv" else "mm": 1, "lora_up": 1} for name in launches.LAYERS}
