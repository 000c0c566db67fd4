"""One step on prompts with images beside TRL 1.16: advantages are given, loss and LoRA gradients are compared."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from parity_runs import our_groups, our_learner
from PIL import Image
from trainer_runs import relative
from transformers import AutoModelForImageTextToText
from trl_runs import Rollouts, gradients, make_trainer, prepare
from vision_models import FAMILIES, IMAGE, given, group_of, pictures, prompt_of, saved_vision_model, vision_model

from lowmem_grpo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from lowmem_grpo.losses.advantages import assign_advantages
from lowmem_grpo.models.lean_modules import make_lean
from lowmem_grpo.models.policy import Policy

GENERATIONS, LONGEST = 2, 12
LORA = {"r": 4, "target_modules": r".*language_model.*\.(q|k|v|o|gate|up|down)_proj", "task_type": "CAUSAL_LM"}
PROMPTS = [prompt_of(3, "cat", 4), prompt_of("owl", 1, "cat", 1, "owl", 2), prompt_of(2, "dog", 6), prompt_of(5)]


def with_images(trainer: Any, batch: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """TRL's batch with what its processor would add to it, and the reference's log-probabilities of that."""
    seen = [given(prompt) for prompt in prompts]
    kinds = torch.cat([batch["prompt_ids"] == IMAGE, torch.zeros_like(batch["completion_ids"], dtype=torch.bool)], 1)
    whole = {"pixel_values": torch.cat([each["pixel_values"] for each in seen if "pixel_values" in each]),
             "image_grid_thw": torch.cat([each["image_grid_thw"] for each in seen if "pixel_values" in each]),
             "num_images": [len(each.get("image_grid_thw", ())) for each in seen], "mm_token_type_ids": kinds.long()}
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    with torch.no_grad(), trainer.model.disable_adapter():
        reference, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1], **whole)
    return batch | whole | {"ref_per_token_logps": reference}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*(rollout_func|supports vLLM).*")
def test_a_step_with_images_is_trls(family: str, tmp_path: Path) -> None:
    groups = [group_of(prompt, length, LONGEST) for length, prompt in enumerate(PROMPTS, 3)]
    prompts = [group.prompt_ids for group in groups for _ in group.rollouts]
    rollouts = Rollouts([[*map(int, prompt)] for prompt in prompts],
                        [rollout.completion_ids for group in groups for rollout in group.rollouts],
                        {"reward": [1.0, 0.25, 0.0, 0.5, 0.75, 0.0, 0.3, 0.9]}, GENERATIONS)
    settings = {"beta": 0.05, "loss_type": "dapo", "use_bias_correction_kl": False}
    trainer = make_trainer(rollouts, vision_model(family), adapter=peft.LoraConfig(**LORA), settings=settings | {
        "max_completion_length": LONGEST}, tokenizer=saved_vision_model(family, tmp_path))
    batch = with_images(trainer, prepare(trainer, rollouts), prompts)
    model = peft.get_peft_model(vision_model(family), peft.LoraConfig(**LORA))
    make_lean(model.get_base_model(), None)
    policy = Policy(model)
    for picture in pictures().values():
        policy.inputs.store.put(picture)
    learner = our_learner(trainer.model, policy, num_generations=GENERATIONS, max_completion_length=LONGEST, **settings)
    ours = our_groups(rollouts)
    for group, named in zip(ours, groups, strict=True):
        group.prompt_ids = named.prompt_ids
    assign_advantages(ours, ["reward"], learner.config)
    learner.prepare(ours, 1)
    trainer.model.zero_grad()
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert learner.forward_backward(ours)["loss"] == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
    assert relative(gradients(model), gradients(trainer.model)) <= 1e-5
    assert policy.inputs.store.encoded == 3


def every_second(completions: list[Any], **_: Any) -> list[float]:
    """Pay one of the two completions of each prompt, so that every step has a gradient."""
    assert all(isinstance(completion[0]["content"], str) for completion in completions)
    return [float(place % 2) for place in range(len(completions))]


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("given_as", ["a name", "a model"])
@pytest.mark.parametrize("trainer", [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["GRPO", "RLOO"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every(4)
def test_models_rows_and_settings_of_trls_own_tests_train(
    family: str, trainer: Any, given_as: str, images: int, tmp_path: Path
) -> None:
    folder = saved_vision_model(family, tmp_path / "model")
    model = str(folder) if given_as == "a name" else AutoModelForImageTextToText.from_pretrained(folder)
    column = {"image": Image.new("RGB", (60, 40), "red")} if images == 1 else {
        "images": [Image.new("RGB", (60, 40), colour) for colour in ("red", "blue")]}
    rows = [{"prompt": [{"role": "user", "content": f"Describe w{number}"}]} | column for number in range(6)]
    kind, settings = trainer
    args = settings(str(tmp_path / "run"), learning_rate=0.1, per_device_train_batch_size=2, num_generations=2,
                    max_completion_length=8, report_to="none", beta=0.1, log_completions=True, log_multimodal=False,
                    max_steps=2, disable_tqdm=True)
    made = kind(model=model, reward_funcs=every_second, args=args, train_dataset=rows,
                peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    made.train()
    assert made.state.log_history[-1]["train_loss"] is not None
    changed = {name for name, value in made.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name} and all("language_model" in name for name in changed)
