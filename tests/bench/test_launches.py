"""What a decoder layer hands to a card, held: launches in training and for a sampled token."""

import json
import subprocess
from pathlib import Path

import pytest
from programs import ROOT, ran
from small_models import TINY, random_model
from tables import every_row
from transformers import AutoTokenizer

from bench import launches
from lowmem_grpo.memory import time_plan

TRAINING, KEPT, LENT, DECODE = 82, 59, 47, 16  # at most, of the embedded model


@pytest.mark.slow
def test_a_layer_of_a_published_models_form_makes_45_launches_and_those_that_the_time_plan_counts(
    tmp_path: Path
) -> None:
    """With q, k and v that end at blocks of the double quantization."""
    random_model("Llama", hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
                 intermediate_size=1024, num_hidden_layers=3).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    forward, backward = (counts.total() for counts in launches.layer_launches(name=str(tmp_path)).values())
    kept, lent = (sum(counts.total() for counts in launches.layer_launches(False, held, str(tmp_path)).values())
                  for held in (False, True))
    assert (forward, backward) == (time_plan.LAUNCHES_FORWARD, time_plan.LAUNCHES_BACKWARD)
    assert forward + backward - kept == time_plan.LAUNCHES_AGAIN and lent <= 45
    assert kept - lent == 2 * time_plan.LAUNCHES_DEQUANTIZE


@pytest.mark.slow
def test_a_layer_makes_few_launches_and_only_json_is_printed() -> None:
    printed = ran("launches", "--json").stdout
    found = json.loads(printed)
    assert printed.strip() == json.dumps(found) and found["host_us_per_op"] > 0
    assert found["launches_decode"] <= time_plan.LAUNCHES_DECODE["vllm"], "raise LAUNCHES_DECODE in time_plan.py"
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
