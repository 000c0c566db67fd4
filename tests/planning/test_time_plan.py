"""A step's planned seconds: what they are made of, that they tell before from after, and what they do at extremes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tables import not_refused

from lowmem_grpo.kernels.few_rows import decode_launch, taken_rows
from lowmem_grpo.memory.cards import CARDS, device
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.named_configs import named_config
from lowmem_grpo.memory.plan import MemoryPlan, RunSettings
from lowmem_grpo.planning.card_speeds import SPEEDS, card_of
from lowmem_grpo.planning.costs import (
    CALIBRATION,
    COSTS,
    DECODE_INSTRUCTIONS,
    Costs,
    calibration,
)
from lowmem_grpo.planning.planner import plan
from lowmem_grpo.planning.sampling_time import (
    Sampling,
    block_outputs,
    dequantize_seconds,
    faster_in_16_bit,
    product_seconds,
)
from lowmem_grpo.planning.time_plan import TimePlan, micro_batches, plan_time, sampling_of
from lowmem_grpo.planning.training_time import Training
from lowmem_grpo.planning.workload import Workload

BENCH = Path(__file__).parents[2] / "bench"
CONFIG = named_config("qwen2.5-3b")
SHAPE = ModelShape.of(CONFIG)
H200 = SPEEDS["h200"]
GSM8K = Workload(8, 8, 100, 200, 512)
PARTS = ["prefill", "decode", "forward", "backward", "optimizer", "copies", "engine"]
# How this package ran at commit 56e294e, read and counted there: 74 launches of a layer forward and 193 backward; 58 to
# 88 us in front of an opaque op (7 dequantizations and one of glu forward, 12.5 and two backward); 28 launches of a
# layer and token; eight sequences a micro-batch; a copy of the optimizer's states at every step. Its step of Qwen2.5-3B
# on an H200 was estimated by hand as 2.8 s of sampling, 1.0 s of training, 0.2 s of optimizer and copy, 0.3 s around
# them: 4.3 s. On an A100: 3.1, 1.4, 0.2, 0.3, together 5.0 s.
BEFORE = Costs(launches_forward=74, launches_backward=193, launches_decode=28, opaque_forward=8, opaque_backward=14.5,
               host_us_per_op=73, optimizer_copy_seconds=0.2, sequences_per_micro_batch=8)
FOUR_BITS = {"sampling_weights": "4bit"}


def planned(card: str = "h200", **settings: Any) -> MemoryPlan:
    asked = RunSettings(640, sequences=64, completions_per_step=64, **settings)
    return plan(CONFIG, asked, device(card), "qwen2.5-3b")


def seconds(work: Workload = GSM8K, card: str = "h200", costs: Costs = COSTS, **settings: Any) -> TimePlan:
    return plan_time(planned(card, **settings), SHAPE, work, costs)


def sampled(four_bit: bool, costs: Costs = COSTS, rows: int = 64, card: str = "h200") -> Sampling:
    return Sampling(SHAPE, 32, SPEEDS[card], costs, "vllm", four_bit, rows)


def test_the_old_code_takes_what_was_estimated_of_it_by_hand() -> None:
    found = seconds(costs=BEFORE, **FOUR_BITS)
    assert found.micro_batches == 8
    assert found.bound == {"forward": "launches", "backward": "launches"}
    assert found.generate_seconds == pytest.approx(2.8, rel=0.15)
    assert found.seconds["forward"] + found.seconds["backward"] == pytest.approx(1.0, rel=0.15)
    assert found.seconds["optimizer"] + found.seconds["copies"] == pytest.approx(0.2, rel=0.15)
    assert found.step_seconds == pytest.approx(4.3, rel=0.10)
    assert seconds(card="a100-80", costs=BEFORE, **FOUR_BITS).step_seconds == pytest.approx(5.0, rel=0.10)


def test_a_step_on_an_h200_takes_at_most_what_it_was_to_reach() -> None:
    found = seconds()
    assert found.bound == {"forward": "card", "backward": "card"}
    assert found.sampling_bits == 16
    assert found.step_seconds is not None and found.step_seconds <= 2.4


@pytest.mark.parametrize("changes", [
    {"launches_decode": 28}, {"sequences_per_micro_batch": 8, "host_us_per_op": 73}, {"optimizer_copy_seconds": 0.2},
])
def test_each_old_cost_is_seen_alone(changes: dict[str, Any]) -> None:
    before, after = (seconds(costs=costs).step_seconds or 0 for costs in (replace(COSTS, **changes), COSTS))
    assert before > 1.05 * after
    assert (seconds(**FOUR_BITS).step_seconds or 0) > 1.1 * after


def test_parts_add_up_to_the_step_and_its_phases() -> None:
    found = seconds()
    assert list(found.seconds) == PARTS
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()))
    assert found.step_seconds == pytest.approx(
        (found.generate_seconds or 0) + (found.train_seconds or 0) + found.seconds["engine"]
    )


def test_seconds_are_flop_and_bytes_over_what_the_card_reaches() -> None:
    assert product_seconds(10**9, 10**4, H200) == pytest.approx(2 * 10**13 / 791e12, rel=0.01)
    assert product_seconds(10**9, 1, H200) == pytest.approx(2 * 10**9 / 4.32e12, rel=0.01)
    one = next(SHAPE.linears())
    assert dequantize_seconds(one, H200) == pytest.approx(2.52 * one.weights / 4.32e12, rel=0.02)
    assert H200.l2 == pytest.approx(5.5e12, rel=0.1)


def test_the_4_bit_kernel_takes_what_its_instructions_and_cache_reads_take() -> None:
    llama = ModelShape.of(named_config("llama-3.1-8b"))
    down = next(one for one in llama.linears() if one.name == "down_proj")  # 4096 x 14336
    decode = {rows: Sampling(llama, 32, H200, COSTS, "vllm", True, rows).product(down, rows) for rows in (8, 64)}
    assert decode[8] == pytest.approx(10e-6 / 0.82, rel=0.1)  # 10 us of instructions
    assert decode[64] == pytest.approx(43e-6 / 0.82, rel=0.1)  # 235 MB through the L2 cache


def test_the_4_bit_kernel_is_planned_as_it_is_launched() -> None:
    for form, tables in DECODE_INSTRUCTIONS.items():
        for capability, table in tables.items():
            assert max(table) == taken_rows(capability, form)
    for rows in (1, 8, 16, 17, 32, 33, 64):
        for outputs in (4096, 8191, 8192, 28672):
            assert block_outputs(outputs, rows) == decode_launch(rows, outputs, 90).constexprs["BLOCK_N"]


def test_16_bit_weights_are_faster_than_4_bits_at_many_rows_and_slower_at_one() -> None:
    assert sampled(False).token_step(64, 300) < sampled(True).token_step(64, 300)
    assert sampled(False).token_step(1, 300) > sampled(True).token_step(1, 300)


def test_rows_beyond_what_the_4_bit_kernel_takes_dequantize_every_token() -> None:
    weight = next(SHAPE.linears())
    for card, rows, times in (("h200", 64, 1.1), ("t4", 40, 1.0)):
        few, many = (sampled(True, rows=n, card=card).product(weight, n) for n in (rows, rows + 1))
        assert many > times * few
        assert many > dequantize_seconds(weight, SPEEDS[card])
    assert sampled(True, rows=64, card="t4").token_step(64, 300) == pytest.approx(0.044, rel=0.2)


def test_more_work_takes_longer() -> None:
    for smaller, larger in (
        (GSM8K, replace(GSM8K, prompts=16)), (GSM8K, replace(GSM8K, generations=16)),
        (GSM8K, replace(GSM8K, completion_length=400)), (GSM8K, replace(GSM8K, prompt_length=1000)),
        (replace(GSM8K, longest=300), GSM8K), (GSM8K, replace(GSM8K, forward_only=1)),
        (GSM8K, replace(GSM8K, iterations=2, updates=2)),
    ):
        few, many = seconds(smaller), seconds(larger)
        assert all(many.seconds[part] >= few.seconds[part] for part in PARTS)
        assert (many.step_seconds or 0) > (few.step_seconds or 0)


@pytest.mark.parametrize(("work", "bound"), [
    (Workload(1, 2, 20, 20, 40), "launches"), (Workload(8, 8, 100, 400, 512), "card"),
])
def test_small_micro_batches_wait_for_launches_and_large_ones_for_the_card(work: Workload, bound: str) -> None:
    assert set(seconds(work).bound.values()) == {bound}


def test_a_pass_that_waits_for_launches_takes_what_the_host_takes() -> None:
    work = Workload(1, 2, 20, 20, 40)
    slower = replace(COSTS, host_us_per_launch=2 * COSTS.host_us_per_launch, host_us_per_op=2 * COSTS.host_us_per_op)
    assert seconds(work, costs=slower).seconds["forward"] == pytest.approx(2 * seconds(work).seconds["forward"])
    large = replace(GSM8K, completion_length=400)
    assert seconds(large, costs=slower).seconds["forward"] == seconds(large).seconds["forward"]


def test_tiles_dequantize_the_mlp_again_and_recomputation_costs_a_forward_pass() -> None:
    settings = replace(planned(max_tokens=16384).settings, mlp_tile=512)
    tiled = Training(SHAPE, settings, H200, COSTS, 1)
    assert tiled.tiles(13_000) == 26
    once = Training(SHAPE, replace(settings, mlp_tile=4096), H200, COSTS, 1)
    kept = Training(SHAPE, replace(settings, mlp_tile=0, checkpointing=False), H200, COSTS, 1)
    assert tiled.forward(GSM8K).device > once.forward(GSM8K).device
    assert once.backward(GSM8K).device > 1.3 * kept.backward(GSM8K).device
    assert kept.backward(GSM8K).host < once.backward(GSM8K).host
    grouped = Training(SHAPE, replace(settings, mlp_tile=4096, head_groups=4), H200, COSTS, 1)
    more = grouped.backward(GSM8K).device - once.backward(GSM8K).device
    made = grouped.products(grouped.weights(grouped.before_attention()), GSM8K)
    assert made > 0 and more == pytest.approx(SHAPE.layers * (once.attention(GSM8K) + made))  # each once more


def test_layer_inputs_cost_only_what_the_link_takes_longer_than_the_pass() -> None:
    training = Training(SHAPE, planned().settings, H200, COSTS, 1)
    assert training.copies(GSM8K, 1.0, 1.0) == 0.0
    link = 2 * GSM8K.places * 2048 * 36 / H200.pcie
    assert training.copies(GSM8K, 0.0, link / 2) == pytest.approx(1.5 * link)
    on_card = Training(SHAPE, replace(planned().settings, checkpointing=True), H200, COSTS, 1)
    assert on_card.copies(GSM8K, 0.0, 0.0) == 0.0


def test_steps_are_those_of_the_longest_completion_and_more_where_not_all_fit() -> None:
    assert sampled(True).steps(GSM8K) == 512
    assert sampled(True, rows=32).steps(GSM8K) == 512 + 200
    assert replace(sampled(True, rows=32), engine="transformers").steps(GSM8K) == 512 + 200


def test_only_as_many_sequences_are_sampled_together_as_the_cache_has_room_for() -> None:
    one = SHAPE.kv_bytes(612)
    found = sampling_of(planned(kv_bytes=3 * one), SHAPE, H200, COSTS, GSM8K)
    assert found.together == 3
    assert seconds().sampled_together == 64


def test_the_transformers_engine_waits_for_its_host() -> None:
    found = seconds(engine="transformers")
    assert found.seconds["decode"] == pytest.approx(512 * 36 * 1.2e-3)


def test_lengths_have_their_mean_and_none_is_longer_than_the_longest() -> None:
    equal, many = replace(GSM8K, completion_length=512), replace(GSM8K, generations=1000).lengths()
    assert equal.squared_length == pytest.approx(612**2) and equal.lengths() == pytest.approx([512.0] * 8)
    spread = replace(GSM8K, longest=10**9).squared_length
    assert spread == pytest.approx(100**2 + 2 * 100 * 200 + 2 * 200**2)
    assert GSM8K.places == 8 * (99 + 8 * 200)
    assert sum(many) / 1000 == pytest.approx(200, rel=0.01)
    assert many == sorted(many, reverse=True) and 500 < max(many) <= 512


def test_micro_batches_hold_whole_sequences_up_to_the_bound() -> None:
    bounds = {  # tokens and sequences of a micro-batch
        (16384, None): 1, (13600, None): 1, (6800, None): 2, (5120, None): 3, (640, None): 32, (1, None): 64,
        (None, None): 1, (None, 8): 8, (16384, 7): 10,
    }
    found = {}
    for tokens, most in bounds:
        held = replace(planned(), settings=RunSettings(640, max_tokens=tokens, spread=100.0))
        found[tokens, most] = micro_batches(held, GSM8K, replace(COSTS, sequences_per_micro_batch=most))
    assert found == bounds


def test_few_rows_or_cards_with_slow_memory_are_given_weights_in_16_bits() -> None:
    faster = {
        ("NVIDIA H200", 64, "nf4"): True, ("NVIDIA H200", 8, "nf4"): False, ("24GiB", 8, "nf4"): True,
        ("NVIDIA GeForce RTX 4090", 64, "nf4"): False, ("NVIDIA H200", 64, "fp8"): True,
        ("NVIDIA H200", 8, "fp8"): False, ("NVIDIA GeForce RTX 4090", 64, "fp8"): False, ("Tesla T4", 8, "fp8"): False,
    }
    assert {case: faster_in_16_bit(SHAPE, *case[:2], 320, case[2]) for case in faster} == faster


def test_the_fp8_kernel_reads_a_byte_a_weight_at_few_rows() -> None:
    down = next(one for one in SHAPE.linears() if one.name == "down_proj")
    few, many = (Sampling(SHAPE, 32, H200, COSTS, "vllm", True, rows, form="fp8").product(down, rows)
                 for rows in (8, 65))
    assert few == pytest.approx(down.weights / H200.memory / 0.82, rel=0.1)
    assert many == pytest.approx(5 * down.weights / H200.memory, rel=0.1)  # dequantized, and read in 16 bits


def test_every_card_has_a_speed() -> None:
    assert set(SPEEDS) == set(CARDS)
    for name, speed in SPEEDS.items():
        assert min(speed.tflops, speed.memory_tb_s, speed.pcie_gb_s, speed.sms, speed.ghz, speed.l2_mb) > 0, name
        assert 1 <= speed.tflops / speed.memory_tb_s < 1000, name
    assert {name for name, speed in SPEEDS.items() if not speed.bf16} == {"t4", "p100", "v100-16", "v100-32"}


def test_the_drivers_names_are_known_and_no_other_card_is_taken_for_one() -> None:
    cards = {
        "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "Tesla T4": "t4", "NVIDIA L4": "l4",
        "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100 80GB PCIe": "a100-80", "NVIDIA RTX A6000": "a6000",
        "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 3060": "rtx3060", "NVIDIA B200": "b200",
        "Tesla V100-SXM2-16GB": "v100-16", "rtx4090": "rtx4090", "16GiB": None, "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None, "": None,
    }
    assert {name: card_of(name) for name in cards} == cards


def test_a_t4_without_bfloat16_is_estimated_at_its_rate_of_float16() -> None:
    found = seconds(card="t4")
    assert found.step_seconds is not None
    assert found.step_seconds > 5 * (seconds().step_seconds or 0)


def test_a_size_and_a_plan_that_does_not_fit_have_no_time_and_say_why() -> None:
    found = seconds(card="16GiB")
    assert found.step_seconds is None and found.seconds == {}
    assert found.why is not None and "'16GiB'" in found.why and "name a card, such as t4" in found.why
    config = named_config("llama-3.3-70b")
    found = plan_time(plan(config, RunSettings(2048), device("4090")), ModelShape.of(config), GSM8K)
    assert found.step_seconds is None and found.why == "the plan does not fit rtx4090"


def test_extremes_take_a_finite_and_positive_time() -> None:
    for model, context, work in (
        ("qwen2.5-1.5b", 2048, Workload(1, 1, 1, 1, 1)),
        ("llama-3.1-8b", 131072, Workload(1, 8, 100_000, 10_000, 31_000)),
        ("llama-3.3-70b", 131072, Workload(1, 2, 1000, 2000, 4000)),
        ("llama-3.3-70b", 2048, Workload(64, 64, 50, 50, 50)), ("phi-4-14b", 4096, Workload(8, 8, 100, 200, 512)),
    ):
        config = named_config(model)
        for engine in ("vllm", "transformers"):
            whole = plan(config, RunSettings(context, engine=engine), device("b200"))
            found = plan_time(whole, ModelShape.of(config), work)
            assert found.why is None, engine
            assert 0 < (found.step_seconds or 0) < 10**6, engine
            assert all(value >= 0 for value in found.seconds.values()), engine


def test_lengths_that_contradict_each_other_are_named() -> None:
    given: dict[str, Any] = {"prompts": 8, "prompt_length": 100, "completion_length": None, "longest": 512}
    assert not_refused(lambda changes: Workload.within(640, generations=8, **given | changes), [
        ({"prompts": 0}, "prompts is 0; it must be at least 1"),
        ({"prompt_length": 0}, "prompt_length is 0"), ({"completion_length": 0}, "completion_length is 0"),
        ({"completion_length": 600}, "give a mean of at most 512"),
        ({"longest": 640}, "do not fit a context of 640; raise --context"),
        ({"prompt_length": 640}, "do not fit a context of 640"),
    ]) == []


def test_lengths_left_out_fit_any_context() -> None:
    for context in (1, 2, 5, 640, 131072):
        found = Workload.within(context, None, 8, None, None, None)
        assert found.prompts == 8, context
        assert found.prompt_length + found.longest <= max(2, context), context
        assert 1 <= found.completion_length <= found.longest, context


def test_a_time_plan_can_be_written_as_json() -> None:
    found = json.loads(json.dumps(seconds().to_dict()))
    assert found["estimated"] is True and found["why"] is None
    assert list(found["seconds"]) == PARTS
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert json.loads(json.dumps(seconds(card="16GiB").to_dict()))["step_seconds"] is None


def test_planning_time_needs_no_torch() -> None:
    code = ("import sys; from click.testing import CliRunner; from lowmem_grpo.cli import main; "
            "done = CliRunner().invoke(main, 'plan --model qwen2.5-3b --gpu h200 --json'.split()); "
            "assert done.exit_code == 0, done.output; assert 'step_seconds' in done.output; "
            "print(sorted({'torch', 'transformers'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout.strip() == "[]"


def test_no_row_of_a_card_is_committed_yet_so_nothing_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    from bench.loop import calibrate_time

    assert calibrate_time.factors(calibrate_time.rows()) == CALIBRATION
    assert calibration("h200", "generate") == CALIBRATION.get("h200", {}).get("generate", 1.0)


def test_rows_of_a_card_say_what_planned_seconds_are_multiplied_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    from bench.loop import calibrate_time

    row = {"gpu": "NVIDIA H200", "phases": {"generate": 3.0, "train": 0.5, "optimizer": 0.1},
           "planned_seconds": {"generate": 2.0, "train": 0.5}}
    other = row | {"phases": {"generate": 5.0, "train": 0.5, "optimizer": 0.0}}
    cpu, unknown, old = row | {"gpu": None}, row | {"gpu": "NVIDIA X"}, {"gpu": "NVIDIA H200", "phases": {}}
    assert calibrate_time.factors([row, other, cpu, unknown, old]) == {"h200": {"generate": 2.0, "train": 1.1}}


def test_the_tail_is_what_few_sequences_reach_and_a_part_of_decoding() -> None:
    even, long = Workload(8, 8, 100, 512, 512), Workload(8, 8, 100, 100, 1024)
    times = [seconds(work) for work in (even, GSM8K, long)]
    assert [time.tail_steps for time in times] == [0, 211, 881]
    shares = [time.tail_seconds / time.seconds["decode"] for time in times]
    assert shares[0] == 0 < shares[1] < shares[2] < 1
    for work in (GSM8K, long):
        assert sum(length > work.longest - work.tail_steps for length in work.lengths()) == 2  # a quarter of eight
    assert seconds(Workload(1, 4, 100, 200, 512)).tail_seconds == 0  # of four, a single one is no fewer
