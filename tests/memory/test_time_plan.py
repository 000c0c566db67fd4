"""A step's planned seconds: what they are made of, that they tell before from after, and what they do at extremes."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tables import not_refused

from bench.loop import planned_rows
from lowmem_grpo.kernels.few_rows import decode_launch, narrow_launch, taken_rows
from lowmem_grpo.memory.cards import SPEEDS, device
from lowmem_grpo.memory.layer_forms import DECODE_INSTRUCTIONS, block_outputs
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import MemoryPlan, RunSettings, Workload
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.memory.time_plan import (
    StepTime,
    TimePlan,
    faster_in_16_bit,
    micro_batches,
    plan_time,
    rows_of_codes,
    sampled_together,
)

CONFIG = named_config("qwen2.5-3b")
SHAPE = ModelShape.from_config(CONFIG)
GSM8K = Workload(8, 8, 100, 200, 512)
PARTS = ["prefill", "decode", "forward", "backward", "optimizer", "copies", "memory", "engine"]
DOWN = next(linear for linear in SHAPE.linears() if linear.name == "down_proj")
MEMORY = 4.8e12 * 0.9  # bytes a second of an H200
WIDE = {"sampling_weights": "16bit"}


def planned(card: str = "h200", **settings: Any) -> MemoryPlan:
    asked = RunSettings(640, sequences=64, completions_per_step=64, **settings)
    return plan(CONFIG, asked, device(card), "qwen2.5-3b")


def seconds(work: Workload = GSM8K, card: str = "h200", **settings: Any) -> TimePlan:
    return plan_time(planned(card, **settings), SHAPE, work)


def step(card: str = "h200", rows: int = 64, work: Workload = GSM8K, shape: ModelShape = SHAPE, **settings: Any
         ) -> StepTime:
    return StepTime(shape, RunSettings(640, **settings), SPEEDS[card], work, rows)


@pytest.mark.parametrize("name", ["gemma-4-e4b", "qwen3.5-4b"])
def test_layers_of_several_kinds_take_the_time_of_each_kind(name: str) -> None:
    shape = ModelShape.from_config(named_config(name))
    alone = [step(shape=replace(kind, layers=count)) for count, kind in shape.each()]
    assert len(alone) > 1 and len({kind.passes()["backward"][0] / kind.shape.layers for kind in alone}) > 1
    backward = sum(kind.passes()["backward"][0] for kind in alone)
    assert step(shape=shape).passes()["backward"][0] == pytest.approx(backward)
    assert step(shape=shape).prefill() == pytest.approx(sum(kind.prefill() for kind in alone))


def test_a_token_step_and_a_small_micro_batch_of_an_h100_take_what_was_measured() -> None:
    """202 token steps of 64 rows in 1.42 s (results/loop.jsonl); forward and backward of one prompt in 0.43 to 0.49 s,
    with all layers kept, whose bound is the host. The code of these rows launched more than today's."""
    held = step("h100", lora_rank=16, **WIDE)
    small = step("h100", work=Workload(1, 8, 100, 202, 202), kept_layers=36)
    with planned_rows.of_its_day({"date": "2026-11-27"}, wide=True):
        assert held.token_step(64, 201) == pytest.approx(1.42 / 202, rel=0.05)
        assert sum(host for _, host in small.passes().values()) == pytest.approx(0.45, rel=0.05)
        assert all(card < host for card, host in small.passes().values())
    assert held.token_step(64, 201) == pytest.approx(1.42 / 202 - 36 * 7 * 3.1e-6 - 64 * 2e-6, rel=0.05)


def test_parts_add_up_to_the_step_and_its_phases_also_in_json() -> None:
    time = json.loads(json.dumps(asdict(seconds())))
    assert list(time["seconds"]) == PARTS and time["estimated"] is True and time["why"] is None
    assert time["step_seconds"] == pytest.approx(sum(time["seconds"].values()))
    assert time["step_seconds"] == pytest.approx(
        time["generate_seconds"] + time["train_seconds"] + time["seconds"]["engine"])
    assert time["generate_seconds"] == pytest.approx(time["seconds"]["prefill"] + time["seconds"]["decode"])
    assert json.loads(json.dumps(asdict(seconds(card="16GiB"))))["step_seconds"] is None


def test_seconds_are_flop_and_bytes_over_what_the_card_reaches() -> None:
    assert step().multiply(10**9, 10**4) == pytest.approx(2 * 10**13 / 791e12, rel=0.01)
    assert step().multiply(10**9, 1) == pytest.approx(2 * 10**9 / MEMORY / 0.72)
    assert step().dequantize([DOWN]) == pytest.approx(2.52 * DOWN.weights / MEMORY, rel=0.02)
    assert step(form="16bit").dequantize([DOWN]) == 0.0


def test_the_4_bit_kernel_takes_what_its_instructions_and_cache_reads_take() -> None:
    down = replace(DOWN, rows=4096, columns=14336)  # of Llama-3.1-8B
    # 37 and 66 us were measured, with loops of 7.8 and 9.2 instructions; 3.5 us do not depend on them.
    assert step("h100").product(down, 8) == pytest.approx(3.5e-6 + 33.5e-6 * 5.0 / 7.8, rel=0.05)
    assert step("h100").product(down, 64) == pytest.approx(3.5e-6 + 62.5e-6 * 7.8 / 9.2, rel=0.1)
    assert step("t4").product(down, 8) == pytest.approx(17.6 * down.weights / (40 * 1.59 * 128e9) / 0.82, rel=0.1)


def test_the_fp8_kernel_reads_a_byte_a_weight_at_few_rows() -> None:
    few, many = (step(form="fp8").product(DOWN, rows) for rows in (8, 65))
    assert few == pytest.approx(DOWN.weights / MEMORY / 0.82, rel=0.1)
    assert many == pytest.approx((3 + 2 / 0.72) * DOWN.weights / MEMORY, rel=0.1)  # dequantized, and read in 16 bits


def test_the_4_bit_kernel_is_planned_as_it_is_launched() -> None:
    for form, tables in DECODE_INSTRUCTIONS.items():
        for capability, table in tables.items():
            assert max(table) == taken_rows(capability, form)
    for rows in (1, 8, 16, 17, 32, 33, 64):
        for outputs in (4096, 8191, 8192, 28672):
            assert block_outputs(outputs, rows, "fp8") == decode_launch(rows, outputs, 90).constexprs["BLOCK_N"]
            assert block_outputs(outputs, rows, "nf4") == narrow_launch(rows, outputs, 4096, 90).constexprs["BLOCK_N"]


def test_rows_beyond_what_the_4_bit_kernel_takes_dequantize_every_token() -> None:
    for card, rows, times in (("h100", 64, 1.1), ("t4", 40, 1.0)):
        few, many = (step(card).product(DOWN, n) for n in (rows, rows + 1))
        assert many > times * few
        assert many > step(card).dequantize([DOWN])
    assert step("t4").token_step(64, 300) == pytest.approx(0.062, rel=0.1)  # 24 ms dequantize, 27 multiply


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


def test_small_micro_batches_wait_for_launches_and_large_ones_for_the_card() -> None:
    small, large = seconds(Workload(1, 2, 20, 20, 40)), seconds(Workload(8, 8, 100, 400, 512))
    assert set(small.bound.values()) == {"launches"} and set(large.bound.values()) == {"card"}
    layers = 36
    card, _ = zip(*step(work=Workload(1, 2, 20, 20, 40), mlp_tile=0).passes().values(), strict=True)
    for name, launches, waits in (("forward", 27, card[0]), ("backward", 47, card[1])):
        assert small.seconds[name] == pytest.approx(layers * launches * 133e-6 + 0.18 * waits, rel=2e-3)


def test_tiles_dequantize_the_mlp_again_and_recomputation_costs_a_forward_pass() -> None:
    once, tiled, kept, grouped = (
        step(max_tokens=16384, **changes) for changes in (
            {"mlp_tile": 16384}, {"mlp_tile": 512}, {"mlp_tile": 0, "checkpointing": False},
            {"mlp_tile": 16384, "head_groups": 4}))
    mlp = [linear for linear in SHAPE.linears() if linear.name in ("gate_proj", "up_proj", "down_proj")]
    (forward, _), (backward, host) = once.passes().values()
    more = 36 * 26 * once.dequantize(mlp)  # 13,592 tokens are 27 tiles
    assert tiled.passes()["forward"][0] - forward == pytest.approx(more)
    assert backward > 1.3 * kept.passes()["backward"][0]
    assert host == pytest.approx(47 / 26 * kept.passes()["backward"][1])  # without 21 launches of recomputation
    qkv = 2 * 13_592 * 2048 * (2048 + 2 * 256) / (989e12 * 0.8)
    attention = 2 * 2048 * 64 * GSM8K.squared_length / (989e12 * 0.35)
    assert grouped.passes()["backward"][0] - backward == pytest.approx(36 * (attention + qkv))  # each once more


def test_a_trained_head_makes_one_product_in_the_forward_pass_and_three_in_the_backward_pass() -> None:
    frozen, trained = (step(modules_to_save=names).passes() for names in ((), ("lm_head",)))
    product = 1.17 * 2 * 64 * 200 * 151_936 * 2048 / (989e12 * 0.8)  # multiplications and additions
    for name, more in (("forward", -1), ("backward", 3)):
        assert trained[name][0] - frozen[name][0] == pytest.approx(more * product)
    own = step(optim="adamw_8bit", modules_to_save=("lm_head",)).optimizer()
    numbers = 151_936 * 2048  # Qwen2.5-3B ties them: one matrix
    assert own - step(optim="adamw_8bit").optimizer() == pytest.approx((24 + 2 * 2.03125) * numbers / MEMORY)


def test_passes_dequantize_nothing_where_sampling_keeps_weights_in_16_bits() -> None:
    own, lent = (step(**WIDE, sleeps=sleeps, mlp_tile=0, checkpointing=False).passes() for sleeps in (True, False))
    plain = step(form="16bit", mlp_tile=0, checkpointing=False).passes()
    for name, launches, fewer in (("forward", 27, 23), ("backward", 26, 22)):
        assert own[name][1] / launches == pytest.approx(lent[name][1] / fewer)
        assert own[name][0] > lent[name][0] == pytest.approx(plain[name][0])


def test_layer_inputs_cost_only_what_the_link_takes_longer_than_the_pass() -> None:
    assert step().copies(1.0, 1.0) == 0.0
    link = 2 * GSM8K.places * 2048 * 36 / (63e9 * 0.85)
    assert step().copies(0.0, link / 2) == pytest.approx(1.5 * link)
    assert step(head_groups=2).copies(0.0, link / 2) == pytest.approx(2 * link)
    assert step(checkpointing=True).copies(0.0, 0.0) == 0.0


def test_a_token_step_computes_the_rows_that_have_not_ended() -> None:
    two = step(rows=2, work=Workload(1, 2, 100, 200, 300))  # lengths 300 (1 - x^2): at x = 3/4 131.25
    assert two.stretches() == [(131.25, 2, 2, 165.625), (168.75, 1, 1, 315.625)]
    assert two.decode() == pytest.approx(131.25 * two.token_step(2, 165.625) + 168.75 * two.token_step(1, 315.625))
    waits = replace(two, work=Workload(2, 2, 100, 200, 300)).stretches()
    assert waits[0] == (200, 2, 2, 200) and waits[1:] == two.stretches()  # a free row goes to the next sequence
    assert [seconds(work).token_steps for work in (GSM8K, replace(GSM8K, prompts=64))] == [512, 512 + 200]


# Decoding 64 sequences of 202 tokens (at most 512), of which fewer and fewer run.
@pytest.mark.parametrize(("model", "card", "pays"), [
    ("qwen2.5-3b", "h100", True), ("llama-3.1-8b", "h100", True), ("qwen2.5-3b", "t4", True),
    ("qwen2.5-3b", "rtx4090", False),
])
def test_weights_in_16_bits_are_chosen_by_the_sum_over_falling_rows(model: str, card: str, pays: bool) -> None:
    shape = ModelShape.from_config(named_config(model))
    held, wide = (step(card, work=Workload(8, 8, 100, 202, 512), shape=shape, **form).decode() for form in ({}, WIDE))
    assert wide <= held and (wide < 0.95 * held) == pays
    assert faster_in_16_bit(shape, card, 64, 640) == pays


def test_the_form_of_weights_is_that_of_the_fewer_seconds_of_each_number_of_rows() -> None:
    few = {card: rows_of_codes(SHAPE, card) for card in ("h100", "a100-80", "rtx4090", "t4", "24GiB")}
    assert few["h100"] == 8, "measured: 2.4 and 2.5 ms of a token at 8 rows, 2.7 and 2.5 at 16"
    assert 16 <= few["t4"] <= 24  # estimated by hand
    assert few["rtx4090"] == 64 and few["24GiB"] == 0, "all that the kernel takes, and not known"
    both, codes = step("h100", **WIDE), step("h100")
    assert both.token_step(few["h100"], 300) == codes.token_step(few["h100"], 300)
    assert both.token_step(few["h100"] + 1, 300) < codes.token_step(few["h100"] + 1, 300)


def test_few_rows_or_cards_with_slow_memory_are_given_weights_in_16_bits() -> None:
    faster = {
        ("NVIDIA H200", 256, "nf4"): True, ("NVIDIA A100-SXM4-80GB", 8, "nf4"): False, ("24GiB", 8, "nf4"): True,
        ("NVIDIA GeForce RTX 4090", 64, "nf4"): False, ("NVIDIA H200", 8, "fp8"): False,
        ("NVIDIA GeForce RTX 4090", 64, "fp8"): False, ("Tesla T4", 8, "fp8"): False,
    }
    assert {case: faster_in_16_bit(SHAPE, *case[:2], 640, case[2]) for case in faster} == faster
    own = [faster_in_16_bit(SHAPE, "h100", 64, 612, "nf4", "transformers", (False, sleeps)) for sleeps in (False, True)]
    assert own == [True, False], "not where their graphs would be recorded in each step, and those of codes would not"


def test_our_own_engine_launches_more_than_vllm_and_records_its_graphs_in_each_step_only_where_it_sleeps() -> None:
    own, other = step(engine="transformers"), step()
    rows = [row for _, _, row, _ in own.stretches()]
    assert [*dict.fromkeys(rows)] == [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1], "those of its graphs"
    more = 36 * 2 * 4.6e-6 - (150 + 8 * 16 - 100) * 1e-6  # two launches a layer more, less waiting for the host
    more -= own.move(26 * 4 * 8 * own.shape.vocabulary)  # of 30 passes over the logits, four are left
    assert own.token_step(8, 300) - other.token_step(8, 384) == pytest.approx(more), "it reads whole pieces of 128"
    equal = replace(own, work=Workload(8, 8, 100, 512, 512))
    kept = replace(equal, settings=replace(equal.settings, sleeps=False))
    assert equal.decode() - kept.decode() == pytest.approx(5 * 0.15)  # 101 to 611 places: one for each 128
    assert kept.decode() == pytest.approx(512 * own.token_step(64, 356))
    wide, kept_wide = (replace(each, settings=replace(each.settings, **WIDE)) for each in (equal, kept))
    assert wide.decode() - kept_wide.decode() == pytest.approx(5 * 0.15), "graphs stay with the weights that they read"


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3-30b-a3b"])
def test_our_own_engine_waits_for_its_host_where_a_step_cannot_be_a_graph(name: str) -> None:
    shape = ModelShape.from_config(named_config(name))
    assert step(rows=1, shape=shape, engine="transformers").token_step(1, 300) == pytest.approx(shape.layers * 2.5e-3)


def test_only_as_many_sequences_are_sampled_together_as_the_cache_has_room_for() -> None:
    assert sampled_together(planned(kv_bytes=3 * SHAPE.kv_bytes(612)), SHAPE, GSM8K) == 3
    assert seconds().sampled_together == 64


def test_lengths_have_their_mean_and_none_is_longer_than_the_longest() -> None:
    equal, many = replace(GSM8K, completion_length=512), GSM8K.lengths(1000)
    assert equal.squared_length == pytest.approx(612**2) and equal.lengths(8) == pytest.approx([512.0] * 8)
    spread = replace(GSM8K, longest=10**9).squared_length
    assert spread == pytest.approx(100**2 + 2 * 100 * 200 + 2 * 200**2)
    assert GSM8K.places == 8 * (99 + 8 * 200)
    assert sum(many) / 1000 == pytest.approx(200, rel=0.01)
    assert many == sorted(many, reverse=True) and 500 < max(many) <= 512


def test_micro_batches_hold_whole_sequences_up_to_the_bound() -> None:
    bounds = {16384: 1, 13600: 1, 6800: 2, 5120: 3, 640: 32, 1: 64, None: 1}
    held = {tokens: replace(planned(), settings=RunSettings(640, max_tokens=tokens, spread=100.0)) for tokens in bounds}
    assert {tokens: micro_batches(memory, GSM8K) for tokens, memory in held.items()} == bounds


def test_a_size_and_a_plan_that_does_not_fit_have_no_time_and_say_why() -> None:
    config, time = named_config("llama-3.3-70b"), seconds(card="16GiB")
    assert time.step_seconds is None and time.seconds == {}
    assert time.why is not None and "'16GiB'" in time.why and "name a card, such as t4" in time.why
    time = plan_time(plan(config, RunSettings(2048), device("4090")), ModelShape.from_config(config), GSM8K)
    assert time.step_seconds is None and time.why == "the plan does not fit rtx4090"


@pytest.mark.slow
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
            time = plan_time(whole, ModelShape.from_config(config), work)
            assert time.why is None, engine
            assert 0 < (time.step_seconds or 0) < 10**6, engine
            assert all(value >= 0 for value in time.seconds.values()), engine


def test_lengths_that_contradict_each_other_are_named() -> None:
    given: dict[str, Any] = {"prompts": 8, "prompt_length": 100, "completion_length": None, "longest": 512}
    assert not_refused(lambda changes: Workload.within(640, generations=8, **given | changes), [
        ({"prompts": 0}, "prompts is 0; it must be a whole number, at least 1"),
        ({"prompt_length": 0}, "prompt_length is 0"), ({"completion_length": 0}, "completion_length is 0"),
        ({"completion_length": 600}, "give a mean of at most 512"),
        ({"longest": 640}, "do not fit a context of 640; raise --context"),
        ({"prompt_length": 640}, "do not fit a context of 640"),
    ]) == []


def test_lengths_left_out_fit_any_context() -> None:
    for context in (1, 2, 5, 640, 131072):
        work = Workload.within(context, None, 8)
        assert work.prompts == 8, context
        assert work.prompt_length + work.longest <= max(2, context), context
        assert 1 <= work.completion_length <= work.longest, context


def test_planning_time_needs_no_torch() -> None:
    code = ("import sys; from click.testing import CliRunner; from lowmem_grpo.__main__ import main; "
            "done = CliRunner().invoke(main, 'plan --model qwen2.5-3b --gpu h200 --json'.split()); "
            "assert done.exit_code == 0, done.output; assert 'step_seconds' in done.output; "
            "print(sorted({'torch', 'transformers'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_compares_all_committed_rows_with_the_plan() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "plan.md"
    assert planned_rows.table() in page.read_text(encoding="utf-8"), "put what bench.loop.planned_rows prints there"


def test_training_asks_the_driver_anew_for_what_a_sleeping_vllm_gave_back_and_else_for_nothing() -> None:
    """42 GB of kept layers took 0.064 s in training and 0.044 s in sleep."""
    asked = RunSettings(302, 8, 16, checkpointing="auto", sequences=64, completions_per_step=64)
    work = Workload(8, 8, 100, 202, 202)
    stays = plan(CONFIG, asked, device("h100"))
    own = plan(CONFIG, replace(asked, engine="transformers"), device("h100"))
    slept = plan_time(replace(stays, settings=replace(stays.settings, sleeps=True)), SHAPE, work).seconds
    taken = slept["memory"] / 0.064 * 42e9
    assert 20e9 < taken < 70e9 and slept["engine"] == pytest.approx(0.03 + 0.044 * taken / 42e9)
    assert not stays.settings.sleeps
    assert not any(plan_time(kept, SHAPE, work).seconds["memory"] for kept in (stays, own))


def test_a_card_whose_power_limits_it_computes_at_the_rate_that_it_sustains() -> None:
    for card, rate in (("t4", 22e12), ("l4", 55e12), ("a10", 70e12), ("a10g", 0.8 * 70e12)):
        assert step(card).multiply(DOWN.weights, 1e5) == pytest.approx(2e5 * DOWN.weights / rate), card


def test_the_tail_is_what_few_sequences_reach_and_a_part_of_decoding() -> None:
    even, long = Workload(8, 8, 100, 512, 512), Workload(8, 8, 100, 100, 1024)
    times = [seconds(work) for work in (even, GSM8K, long)]
    # the longest less the length that 15 of 64 exceed: L (15.5 / 64)^(1 / k), k = 1.56 and 9.24
    assert [time.tail_steps for time in times] == [0, 206, 878]
    shares = [time.tail_seconds / time.seconds["decode"] for time in times]
    assert shares[0] == 0 < shares[1] < shares[2] < 1
    assert seconds(Workload(1, 4, 100, 200, 512)).tail_seconds == 0  # of four, a single one is no fewer
