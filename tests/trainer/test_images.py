"""GRPO on rows with images, from the loader to the adapter that plain transformers and PEFT read."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from PIL import Image
from small_models import scatter
from transformers import AutoModelForImageTextToText
from vision_models import FAMILIES, IMAGE, VIDEO, saved_vision_model

from lowmem_grpo import (
    FastLanguageModel,
    FastVisionModel,
    GRPOConfig,
    GRPOTrainer,
    SamplingParams,
    SDFTConfig,
    SDFTTrainer,
)
from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.models import vision
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.vision import store_of
from lowmem_grpo.recipes.guess import Guess
from lowmem_grpo.trainer.preflight.checks import PreflightError
from lowmem_grpo.types import ImageToken, Rollout, RolloutGroup
from tests.attacks.small_run import StopAt, differences

ASK = {"type": "text", "text": "Describe it"}
SIZES = {"red": (56, 84), "blue": (84, 56), "green": (56, 56)}
ROWS: list[dict[str, Any]] = [
    *({"prompt": [{"role": "user", "content": [{"type": "image"}, ASK]}], "image": Image.new("RGB", size, colour),
       "colour": colour} for colour, size in SIZES.items()),
    {"prompt": [{"role": "user", "content": "Describe it w1 w2"}], "image": None, "colour": "none"},
]
SETTINGS: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 8,
    "learning_rate": 1e-2, "disable_tqdm": True, "beta": 0.04, "num_iterations": 2, "save_strategy": "no"}


def paid(completions: list[Any], image: list[Any], colour: list[str], **_: Any) -> list[float]:
    assert [one and one.size for one in image] == [SIZES.get(name) for name in colour]
    return [float(len(str(completion)) % 7) for completion in completions]


def run(folder: Path, model: Any, processor: Any, rows: Any = ROWS, resume: bool = False, reward: Any = paid,
        given: Any = None, **settings: Any) -> GRPOTrainer:
    args = GRPOConfig(output_dir=str(folder / "run"), **SETTINGS | settings)
    trainer = GRPOTrainer(model=model, processing_class=processor, reward_funcs=reward, args=args, train_dataset=rows,
                          **given or {})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def loaded(folder: Path, checkpointing: Any = False, family: str = "Qwen3VL") -> Any:
    where = folder / family
    saved = where if where.exists() else saved_vision_model(family, where)
    model, processor = FastVisionModel.from_pretrained(str(saved), max_seq_length=256, load_in_4bit=False)
    return FastVisionModel.get_peft_model(model, r=4, use_gradient_checkpointing=checkpointing), processor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("four_bit", [False, True], ids=["16bit", "4bit"])
@pytest.mark.every(2)
def test_a_run_reads_each_image_once_and_its_adapter_is_that_of_plain_peft(
    family: str, four_bit: bool, tmp_path: Path
) -> None:
    folder = saved_vision_model(family, tmp_path / "model")
    model, processor = FastVisionModel.from_pretrained(str(folder), max_seq_length=256, load_in_4bit=four_bit)
    model = FastVisionModel.get_peft_model(model, r=4, finetune_vision_layers=False)
    assert {name.partition(".lora_")[0].split(".layers.")[0] for name, parameter in model.named_parameters()
            if parameter.requires_grad} == {"base_model.model.model.language_model"}
    tower = {name: value.clone() for name, value in model.state_dict().items() if ".visual." in name}
    assert all(value.dtype == torch.float32 for value in tower.values()), "the tower is not quantized"
    trainer = run(tmp_path, model, processor)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("sampling/sampling_logp_difference/max", 0) for line in metrics) < 1e-4
    assert store_of(trainer.policy.base).encoded == 3
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tower.items())
    if four_bit:
        return
    model.save_pretrained(str(tmp_path / "adapter"))
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(folder), str(tmp_path / "adapter"))
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": ROWS[0]["image"]}, ASK]}], tokenize=True,
        return_dict=True, add_generation_prompt=True)
    prompt = trainer.source.encoder.encode(ROWS[0])
    (batch,) = pack([RolloutGroup({}, prompt.ids, [Rollout([token], [0.0], "stop") for token in (9, 300)])])
    with torch.no_grad():
        logits = theirs(**inputs).logits[0, -1]
        with theirs.disable_adapter():
            assert (theirs(**inputs).logits[0, -1] - logits).abs().max() > 1e-3
        ours, _ = trainer.policy.logprobs(batch, 1.0)
    torch.testing.assert_close(ours, logits.log_softmax(-1)[batch.targets[batch.trained]], rtol=0, atol=1e-5)


def test_a_prompt_with_an_image_is_sampled_in_unsloths_vllms_and_trls_form(tmp_path: Path) -> None:
    folder = saved_vision_model("Qwen3VL", tmp_path / "model")
    model, processor = FastVisionModel.from_pretrained(str(folder), max_seq_length=256, load_in_4bit=False,
                                                       fast_inference=True)
    assert model.engine_choice.name == "transformers" and "our engine samples" in model.engine_choice.why
    with pytest.raises(EngineUnavailableError, match="fast_inference='vllm': vLLM is not given a tower's features"):
        FastVisionModel.from_pretrained(str(folder), max_seq_length=256, fast_inference="vllm")
    red, blue = (row["image"] for row in ROWS[:2])
    messages = [{"role": "user", "content": [{"type": "image"}, ASK]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inside = [{"role": "user", "content": [{"type": "image", "image": red}, ASK]}]
    params = SamplingParams(temperature=0, max_tokens=6)
    forms = [*({"prompt": text, "multi_modal_data": {"image": image}} for image in (red, [red])), inside,
             {"prompt": text, "multi_modal_data": {"image": blue}}]
    said = [model.fast_generate(form, params)[0] for form in forms]
    whole = processor.apply_chat_template(inside, tokenize=True, return_dict=True, add_generation_prompt=True)
    with torch.no_grad():
        theirs = AutoModelForImageTextToText.from_pretrained(folder).generate(
            **whole, do_sample=False, max_new_tokens=6, suppress_tokens=[IMAGE, VIDEO])
    wanted = theirs[0, whole["input_ids"].shape[1] :].tolist()
    assert [out.outputs[0].token_ids for out in said[:3]] == [wanted] * 3
    assert said[3].outputs[0].token_ids != wanted
    assert model.fast_generate(["Describe it", forms[0]], params)[1].outputs[0].token_ids == wanted
    with pytest.raises(ValueError, match="has 1 places of images, and the row has 0"):
        model.fast_generate(messages, params)
    with pytest.raises(ValueError, match="multi_modal_data has 'video'"):
        model.fast_generate({"prompt": text, "multi_modal_data": {"video": [red]}}, params)


def test_a_row_without_its_picture_is_named_before_the_run(tmp_path: Path) -> None:
    folder = saved_vision_model("Qwen2_5_VL", tmp_path / "model")
    model, processor = FastVisionModel.from_pretrained(str(folder), max_seq_length=256, load_in_4bit=False)
    model = FastVisionModel.get_peft_model(model, r=4)
    rows = [row | {"image": None} for row in ROWS[:3]]
    with pytest.raises(PreflightError, match=r"no row .* can be used: the prompt has 1 places of images, and the row"):
        run(tmp_path, model, processor, rows)


def test_the_tower_is_not_trained_and_a_model_of_text_takes_no_bounds_of_images(tmp_path: Path) -> None:
    folder = str(saved_vision_model("Qwen2_5_VL", tmp_path / "model"))
    model, processor = FastVisionModel.from_pretrained(folder, max_seq_length=256, load_in_4bit=False,
                                                       min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 6)
    with pytest.raises(ValueError, match=r"finetune_vision_layers=True: the tower .* stays frozen"):
        FastVisionModel.get_peft_model(model, r=4, finetune_vision_layers=True)
    grid = processor.image_processor(images=[Image.new("RGB", (280, 280))], return_tensors="pt")["image_grid_thw"]
    assert grid.prod() // 4 <= 6
    with pytest.raises(ValueError, match="min_pixels and max_pixels bound images, and this model reads text"):
        FastLanguageModel.from_pretrained("tiny", max_seq_length=64, min_pixels=4)


def paid_at_first(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    """Without signal from the third step on, so that groups are replayed."""
    return [float(len(str(completion)) % 7) * (trainer_state.global_step < 2) for completion in completions]


STOPPED: dict[str, dict[str, Any]] = {
    "two iterations, several micro-batches, evaluation": {
        "num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "eval_steps": 1,
        "eval_strategy": "steps"},
    "groups of a replay buffer": {"replay_buffer_size": 8, "num_iterations": 1, "dynamic_sampling_rounds": 1},
    "pools": {"difficulty_pools": True},
}


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", STOPPED.values(), ids=STOPPED)
def test_a_resumed_run_with_images_is_the_undisturbed_one(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_steps": 4, "per_device_train_batch_size": 8, "reward": paid_at_first, "save_strategy": "steps",
                "save_steps": 2, **settings}
    if "eval_steps" in settings:
        settings["given"] = {"eval_dataset": ROWS[:2]}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run(straight, *loaded(tmp_path), **settings)
    given = settings.pop("given", {})
    run(stopped, *loaded(tmp_path), **settings, given={**given, "callbacks": [StopAt(2)]})
    monkeypatch.setattr(vision, "HELD_BYTES", 1)  # so that nothing is held by chance, such as what checks have read
    resumed = run(stopped, *loaded(tmp_path), **settings, resume=True, given=given)
    assert differences(stopped / "run", straight / "run") == []
    if "replay_buffer_size" in settings:
        assert sum(line["sampling/replayed_groups"] for line in resumed.state.log_history[2:4]) > 0


def test_images_that_were_dropped_are_read_again_from_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1,
                                "given": {"eval_dataset": ROWS}}
    run(tmp_path / "roomy", *loaded(tmp_path), **settings)
    monkeypatch.setattr(vision, "HELD_BYTES", 1)
    trainer = run(tmp_path / "tight", *loaded(tmp_path), **settings)
    assert differences(tmp_path / "tight" / "run", tmp_path / "roomy" / "run") == []
    assert store_of(trainer.policy.base).encoded > 6


def test_a_row_too_long_for_its_images_is_named_with_their_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, *loaded(tmp_path), max_prompt_length=14, truncate_prompts=True, max_steps=1, save_strategy="no")
    said = next(record.message for record in caplog.records if "will be skipped" in record.message)
    assert "2 of 4 rows will be skipped: longer than max_prompt_length (14)" in said and "cuts them" not in said
    assert "the longest has 15 tokens, 6 of them of images" in said and "max_pixels" in said


OTHER_PROMPTS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [len]}, "environment_factory": {"environment_factory": Guess},
    "rollout_func": {"rollout_func": lambda prompts, trainer: {}},
}


@pytest.mark.parametrize("given", OTHER_PROMPTS.values(), ids=OTHER_PROMPTS)
def test_images_are_refused_where_more_than_the_rows_makes_prompts(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has the column 'image'.*answered once: without tools, environment_factory"):
        run(tmp_path, *loaded(tmp_path), given=given)


def test_a_small_copy_of_each_image_is_kept_once_and_the_report_shows_it(tmp_path: Path) -> None:
    rows = [row | {"image": row["image"] and row["image"].resize((300, 200))} for row in ROWS]
    run(tmp_path, *loaded(tmp_path), rows, reward=paid_at_first, max_prompt_length=None)
    kept = {path.stem: path for path in (tmp_path / "run" / "pictures").iterdir()}
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert {name for line in lines for name in line.get("images", ())} == kept.keys() and len(kept) == 3
    assert all("[image]" in line["prompt"] for line in lines if "images" in line)
    for path in kept.values():
        with Image.open(path) as small:
            assert small.size == (96, 64) and path.stat().st_size < 4000
    report = (tmp_path / "run" / "report.html").read_text()
    assert report.count("data:image/jpeg;base64,") == 3 and "image_pad" not in report


def test_a_teacher_at_a_url_would_be_sent_the_places_of_images_without_them(tmp_path: Path) -> None:
    model, processor = loaded(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # it is there, and answers nothing
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        args = GRPOConfig(output_dir=str(tmp_path / "run"), teacher=url, **SETTINGS)
        with pytest.raises(ValueError, match=f"{url} is another model, which gets none of them; take"):
            GRPOTrainer(model, paid, args, ROWS, processing_class=processor)
        server.shutdown()


def test_a_teacher_would_read_no_images(tmp_path: Path) -> None:
    """Its base reads what the reference of the KL term reads; and a worked solution stands beside the images."""
    args = GRPOConfig(output_dir=str(tmp_path / "run"), teacher="base", **SETTINGS | {"kl_reference": "base"})
    model, processor = loaded(tmp_path)
    trainer = GRPOTrainer(scatter(model), paid, args, ROWS, processing_class=processor)
    groups = trainer.rollout()
    trainer.learner.prepare(groups, 1)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        torch.testing.assert_close(rollout.fields["teacher_logprobs"], rollout.ref_logprobs, rtol=0, atol=1e-6)
    own = {name: value for name, value in SETTINGS.items() if name != "beta"}
    told = SDFTTrainer(loaded(tmp_path)[0], SDFTConfig(output_dir=str(tmp_path / "told"), **own | {"max_steps": 1}),
                       [row | {"privileged_context": "w5"} for row in ROWS], processing_class=processor)
    told.train()
    shown = [[[token for token in ids if isinstance(token, ImageToken)]
              for ids in (group.prompt_ids, group.rollouts[0].teacher_prompt)] for group in told.sampled]
    assert all(student == teacher for student, teacher in shown) and sum(bool(student) for student, _ in shown) == 3
