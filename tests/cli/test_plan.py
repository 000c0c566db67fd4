"""`lowmem-grpo plan`: the table, JSON, and errors for people."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from recipe_runs import invoke
from tables import every_row

from lowmem_grpo.memory.model_shape import named_config
from lowmem_grpo.utils import GIB


def plan(*words: Any) -> Result:
    return invoke("plan", *words)


def test_the_promised_case_prints_a_plan_that_fits_as_json() -> None:
    done = plan("--model", "llama-3.1-8b", "--context", 20480, "--generations", 8, "--gpu", "16GiB", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["fits"] is True
    assert found["train"] <= 11 * GIB
    assert found["rollout"] <= 16 * GIB
    assert found["model"] == "llama-3.1-8b"
    assert sum(row["train"] for row in found["rows"]) == found["train"]


def test_a_model_of_images_has_rows_of_its_tower_and_a_model_of_text_takes_no_images(tmp_path: Path) -> None:
    vision = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584,
              "patch_size": 14, "spatial_merge_size": 2}
    older = named_config("qwen2.5-7b") | {"model_type": "qwen2_5_vl", "vision_config": vision}  # without a text_config
    (tmp_path / "config.json").write_text(json.dumps(older))
    done = plan("--model", tmp_path, "--gpu", "24GiB", "--images", 2)
    assert done.exit_code == 0, done.output
    assert "an image of 262,144 pixels is 324 tokens of a prompt" in done.output and "vision tower" in done.output
    assert "family: Qwen2.5-VL" in done.output and "engine transformers" not in done.output
    refused = plan("--model", "qwen2.5-7b", "--gpu", "24GiB", "--image-pixels", 1000)
    assert refused.exit_code == 1 and "--image-pixels: this model reads text only" in refused.output


def test_the_table_names_components_choices_and_the_verdict_and_what_does_not_fit_ends_with_an_error() -> None:
    done = plan("--model", "meta-llama/Llama-3.1-8B-Instruct", "--context", 20480, "--gpu", "t4")
    words = ("weights", "KV cache", "layer recompute", "rollout", "train", "host", "optim", "Fits:")
    assert done.exit_code == 0 and [word for word in words if word not in done.output] == []
    done = plan("--model", "llama-3.3-70b", "--gpu", "4090")
    assert done.exit_code == 1 and "Does not fit" in done.output
    assert "the largest known model that fits" in done.output


def test_a_teachers_weights_adapter_and_hidden_states_would_be_missing_in_the_plan() -> None:
    def found(*words: Any) -> dict[str, Any]:
        done = plan("--model", "llama-3.1-8b", "--gpu", "h200", "--context", 2048, "--prompts", 2, "--json", *words)
        assert done.exit_code == 0, done.output
        told: dict[str, Any] = json.loads(done.output)
        return told | {row["name"]: row for row in told["rows"]}

    alone, base, ema, other = (found(*words) for words in ((), ("--teacher", "base"), ("--teacher", "ema"),
                                                           ("--teacher", "qwen3-4b")))
    hidden = 16 * 2048 * 4096 * 2
    assert base["host"] - alone["host"] == hidden and ema["host"] - base["host"] == alone["adapters"]["train"]
    assert "the teacher's adapter, the teacher's hidden states" in ema["host buffers"]["note"]
    assert other["teacher"]["train"] == other["teacher"]["rollout"] > 0.9 * 2**31 and "teacher" not in ema
    assert other["host"] - alone["host"] == 16 * 2048 * 2560 * 2
    assert base["time"]["seconds"]["forward"] > alone["time"]["seconds"]["forward"]


def test_an_adapters_folder_and_a_teacher_elsewhere_would_be_looked_up_as_models(tmp_path: Path) -> None:
    words = "--model", "tiny", "--gpu", "t4", "--json", "--teacher"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    assert plan(*words, tmp_path).output == plan(*words, "adapter").output
    for teacher in ("stored", "http://127.0.0.1:8000/v1"):
        assert "takes no memory here; leave --teacher out" in plan(*words, teacher).output


def test_what_is_trained_beside_lora_would_be_missing_in_the_plan_and_in_its_table() -> None:
    words = "--model", "llama-3.1-8b", "--gpu", "24GiB", "--modules-to-save", "embed_tokens, lm_head"
    rows = {row["name"]: row for row in json.loads(plan(*words, "--trained-rows", 0, "--json").output)["rows"]}
    assert rows["trained copies"]["train"] == rows["trained copies"]["rollout"] == 2 * 2 * 128_256 * 4096
    assert "of embed_tokens and lm_head, 16 bits; the adapter's file takes 2.27 GiB" in rows["trained copies"]["note"]
    shown = plan(*words)
    assert "trained copies" in shown.output and shown.exit_code == 0
    on_t4 = json.loads(plan("--model", "qwen3-4b", "--gpu", "t4", *words[4:], "--json").output)
    assert on_t4["settings"]["saved_itemsize"] == 4, "beside float16, copies are in float32"


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


def test_settings_reach_the_plan_and_its_time() -> None:
    found = json.loads(plan(
        "--model", "qwen3-4b", "--gpu", "h200", "--rank", 64, "--16bit", "--optim", "adamw_torch", "--max-tokens", 4096,
        "--mlp-tile", 512, "--checkpointing", "true", "--gpu-memory-utilization", 0.5, "--kv-cache-dtype", "fp8",
        "--prompts", 16, "--prompt-length", 100, "--completion-length", 200, "--max-completion-length", 512, "--json",
    ).output)
    settings, work = found["settings"], found["time"]["workload"]
    assert settings | {
        "lora_rank": 64, "form": "16bit", "optim": "adamw_torch", "max_tokens": 4096, "mlp_tile": 512,
        "checkpointing": True, "kv_cache_dtype": "fp8", "longest_completion": 512, "sequences": 128} == settings
    assert work | {"prompts": 16, "prompt_length": 100, "completion_length": 200, "longest": 512} == work
    assert found["device"]["budget"] == found["device"]["total"] / 2


def test_lora_on_experts_and_an_embedding_on_the_host_are_planned_where_asked() -> None:
    words = ("--gpu", "h100", "--engine", "transformers", "--expert-lora", "--offload-embedding")
    settings = json.loads(plan("--model", "qwen3-30b-a3b", *words, "--json").output)["settings"]
    assert settings["expert_lora"] and settings["host_embedding"]
    assert "--expert-lora: this model has no experts" in plan("--model", "qwen3-4b", *words).output


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


def test_the_table_of_time_says_that_it_is_estimated_and_a_size_in_place_of_a_card_why_it_has_none(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ("--model", "qwen2.5-3b", "--context", 640, "--max-completion-length", 512, "--gpu")
    for width in ("80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        shown = plan(*case, "h200").output
        assert "A step's time (estimated, not measured)" in shown and "512 token steps of 64 sequences" in shown
        assert max(map(len, shown.splitlines())) <= int(width)
    assert "A step's time is not estimated: no data sheet is known of '16GiB'" in plan(*case, "16GiB").output


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
    for kind in ("qwen2", "helium", "gemma2", "smollm3"):
        config.write_text(json.dumps(named_config("qwen2.5-1.5b") | {"model_type": kind}))
        told[kind] = plan("--model", config, "--gpu", "24GiB").output
    assert "sampled by: vLLM and transformers" in told["qwen2"] and "note:" not in told["qwen2"]
    assert "sampled by: transformers" in told["smollm3"] and "note:" not in told["smollm3"], "it is planned so"
    with_vllm = plan("--model", config, "--gpu", "24GiB", "--engine", "vllm").output
    assert "note: vLLM does not sample SmolLM3: plan with --engine transformers" in with_vllm
    assert "a family that was not checked here (helium)" in told["helium"]
    assert "is of the family Gemma 2: its attention has soft" in told["gemma2"] and "weights" not in told["gemma2"]
