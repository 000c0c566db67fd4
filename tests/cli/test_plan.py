"""`lowmem-grpo plan`: the table, JSON, and errors for people."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tables import every_row

from lowmem_grpo.cli.main import main
from lowmem_grpo.memory.named_configs import named_config
from lowmem_grpo.utils import GIB


def plan(*words: Any) -> Result:
    return CliRunner().invoke(main, ["plan", *(str(word) for word in words)])


def test_the_promised_case_prints_a_plan_that_fits_as_json() -> None:
    done = plan("--model", "llama-3.1-8b", "--context", 20480, "--generations", 8, "--gpu", "16GiB", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["fits"] is True
    assert found["train"] <= 11 * GIB
    assert found["rollout"] <= 16 * GIB
    assert found["model"] == "llama-3.1-8b"
    assert sum(row["train"] for row in found["rows"]) == found["train"]


def test_the_table_names_components_choices_and_the_verdict() -> None:
    done = plan("--model", "meta-llama/Llama-3.1-8B-Instruct", "--context", 20480, "--gpu", "t4")
    assert done.exit_code == 0, done.output
    for word in ("weights", "KV cache", "layer recompute", "rollout", "train", "host", "optim", "Fits:"):
        assert word in done.output


def test_a_plan_that_does_not_fit_says_what_would_and_ends_with_an_error() -> None:
    done = plan("--model", "llama-3.3-70b", "--gpu", "4090")
    assert done.exit_code == 1
    assert "Does not fit" in done.output
    assert "the largest known model that fits" in done.output


def test_the_longest_context_is_found_and_planned_for() -> None:
    done = plan("--model", "qwen2.5-1.5b", "--gpu", "3GiB", "--max-context", "--json")
    found = json.loads(done.output)
    assert found["max_context"] >= 2048
    assert found["settings"]["context"] == found["max_context"]
    assert found["fits"] is True


def test_a_folder_with_a_config_is_planned_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(named_config("qwen3-4b")))
    for name in (tmp_path, tmp_path / "config.json"):
        done = plan("--model", name, "--gpu", "t4", "--json")
        assert json.loads(done.output)["train"] > 2 * GIB


@every_row(("words", "engine"), [
    (("--gpu", "t4"), "transformers"), (("--gpu", "4090"), "vllm"), (("--gpu", "16GiB"), "vllm"),
    (("--gpu", "t4", "--engine", "vllm"), "vllm"), (("--gpu", "4090", "--engine", "transformers"), "transformers"),
])
def test_the_plan_is_of_the_engine_that_samples_on_the_card(words: tuple[str, ...], engine: str) -> None:
    assert json.loads(plan("--model", "qwen2.5-3b", *words, "--json").output)["settings"]["engine"] == engine


def test_a_cache_in_8_bits_and_the_longest_completion_reach_the_plan() -> None:
    words = ("--model", "llama-3.1-8b", "--context", 20480, "--gpu", "16GiB", "--json")
    whole, eight, group = (json.loads(plan(*words, *more).output) for more in (
        (), ("--kv-cache-dtype", "fp8"),
        ("--kv-cache-dtype", "fp8", "--prompt-length", 4096, "--max-completion-length", 16384)))
    assert [one["concurrent_sequences"] for one in (whole, eight, group)] == [3, 7, 8]
    assert eight["settings"]["kv_cache_dtype"] == "fp8" and group["settings"]["longest_completion"] == 16384


def test_settings_reach_the_plan() -> None:
    done = plan("--model", "qwen3-4b", "--gpu", "80GiB", "--rank", 64, "--16bit", "--optim", "adamw_torch",
                "--max-tokens", 4096, "--mlp-tile", 512, "--checkpointing", "true", "--engine", "transformers",
                "--gpu-memory-utilization", 0.5, "--json")
    found = json.loads(done.output)
    settings = found["settings"]
    assert (settings["lora_rank"], settings["load_in_4bit"], settings["optim"]) == (64, False, "adamw_torch")
    assert (settings["max_tokens"], settings["mlp_tile"], settings["checkpointing"]) == (4096, 512, True)
    assert (settings["engine"], found["device"]["budget"]) == ("transformers", 40 * GIB)


def test_fp8_weights_take_a_byte_each_and_an_fp8_checkpoint_is_planned_so(tmp_path: Path) -> None:
    words = ("--gpu", "h200", "--prompts", 16, "--json")
    four_bit, fp8, plain = (json.loads(plan("--model", "qwen3-4b", *words, *form).output)
                            for form in ((), ("--fp8",), ("--16bit",)))
    weights = [found["rows"][0]["train"] for found in (four_bit, fp8, plain)]
    assert weights[1] == pytest.approx(weights[2] / 2, rel=0.002)
    assert weights[0] == pytest.approx(weights[1] * 0.516, rel=0.01)
    assert "FP8, a scale for each row" in fp8["rows"][0]["note"]
    assert fp8["settings"]["sampling_weights"] == "16bit"
    stored = named_config("qwen3-4b") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    done = plan("--model", tmp_path, *words)
    assert "is stored in FP8" in done.stderr
    assert json.loads(done.stdout)["rows"] == fp8["rows"]
    (tmp_path / "config.json").write_text(json.dumps(stored | {"quantization_config": {"quant_method": "gptq"}}))
    assert "is stored in GPTQ" in plan("--model", tmp_path, "--gpu", "h200").output


CASE = ("--model", "qwen2.5-3b", "--gpu", "h200", "--context", 640)
GSM8K = ("--prompts", 8, "--prompt-length", 100, "--completion-length", 200, "--max-completion-length", 512)


def test_the_time_of_a_step_is_given_by_part_and_marked_as_estimated() -> None:
    found = json.loads(plan(*CASE, *GSM8K, "--json").output)["time"]
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert {"prefill", "decode", "forward", "backward", "optimizer", "copies"} <= found["seconds"].keys()
    assert (found["card"], found["why"], found["estimated"]) == ("h200", None, True)
    work = found["workload"]
    assert [work[name] for name in ("prompts", "generations", "prompt_length", "completion_length", "longest")] == [
        8, 8, 100, 200, 512
    ]


def test_the_table_of_time_says_that_it_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in ("80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        shown = plan(*CASE, *GSM8K).output
        assert "A step's time (estimated, not measured)" in shown
        assert "512 token steps of 64 sequences" in shown
        assert max(map(len, shown.splitlines())) <= int(width)


def test_more_prompts_take_more_time_and_more_room_where_they_are_sampled_together() -> None:
    few, many = (json.loads(plan(*CASE, "--prompts", count, "--json").output) for count in (8, 16))
    assert many["time"]["step_seconds"] > few["time"]["step_seconds"]
    assert (few["settings"]["sequences"], many["settings"]["sequences"]) == (64, 128)
    rows = [{row["name"]: row["rollout"] for row in one["rows"]} for one in (few, many)]
    assert rows[0]["engine workspace"] < rows[1]["engine workspace"]


def test_a_size_in_place_of_a_card_has_no_time_and_says_why() -> None:
    words = ("--model", "qwen2.5-3b", "--gpu", "16GiB", "--context", 640)
    found = json.loads(plan(*words, "--json").output)["time"]
    assert found["step_seconds"] is None and "no data sheet is known of '16GiB'" in found["why"]
    assert "A step's time is not estimated: no data sheet is known of '16GiB'" in plan(*words).output


def test_a_config_of_the_hub_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(**named_config("qwen3-4b"))
    monkeypatch.setattr("lowmem_grpo.models.hub.find_model", lambda *_, **__: None)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, **_: config)
    there = json.loads(plan("--model", "someone/some-model", "--gpu", "t4", "--json").output)
    here = json.loads(plan("--model", "qwen3-4b", "--gpu", "t4", "--json").output)
    assert there["rows"] == here["rows"]


def test_a_plan_says_what_is_known_of_the_models_family(tmp_path: Path) -> None:
    config, told = tmp_path / "config.json", {}
    for kind in ("qwen2", "smollm3", "helium", "gpt_oss"):
        config.write_text(json.dumps(named_config("qwen2.5-1.5b") | {"model_type": kind}))
        told[kind] = plan("--model", config, "--gpu", "24GiB").output
    assert "sampled by: vLLM and transformers" in told["qwen2"] and "note:" not in told["qwen2"]
    assert "note: vLLM does not sample SmolLM3: plan with --engine transformers" in told["smollm3"]
    assert "a family that was not checked here (helium)" in told["helium"]
    assert "is of the family gpt-oss: its attention has sinks" in told["gpt_oss"] and "weights" not in told["gpt_oss"]
