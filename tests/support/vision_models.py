"""Small random models of images, pictures for them, and what plain transformers makes of both."""

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from small_models import scatter
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from lowmem_grpo.models.vision import PatchedImage
from lowmem_grpo.types import ImageToken, Rollout, RolloutGroup

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
START, END, IMAGE, VIDEO = 3, 4, 5, 6
WORDS = [*SPECIAL, *(f"w{number}" for number in range(300)), "user", "assistant", "system", "tool", "Describe", "it"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} "
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")
TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 0, "initializer_range": 0.2}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
          "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.2}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
       "pad_token_id": 0, "eos_token_id": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {"text_config": TEXT | {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
                   "vision_config": VISION | {"window_size": 112, "fullatt_block_indexes": [1]}},
    "Qwen3VL": {"text_config": TEXT | {"head_dim": 16, "rope_parameters": ROPE | {
                    "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
                "vision_config": VISION | {"depth": 3, "num_position_embeddings": 64,
                                           "deepstack_visual_indexes": [0, 1]}},
}
FAMILIES = list(CONFIGS)
SIZES = {"cat": (4, 6), "dog": (6, 4), "owl": (2, 10)}  # patches of each picture


def vision_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A seeded random model of images."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family], **IDS)
    return getattr(transformers, f"{family}ForConditionalGeneration")(config).to(dtype).eval()


def saved_vision_model(family: str, folder: Path) -> Path:
    """Such a model in a folder, with a tokenizer, a chat template and an image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision_model(family).save_pretrained(folder)
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="w0",
        additional_special_tokens=SPECIAL[1:])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=28 * 28,
                             max_pixels=28 * 28 * 16).save_pretrained(folder)
    return folder


def with_language_adapter(model: Any) -> peft.PeftModel:
    """The model with a random LoRA on the linear layers of its language layers."""
    target = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    return scatter(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM")))


def pictures() -> dict[str, PatchedImage]:
    """Random pictures by name."""
    generator = torch.Generator().manual_seed(0)
    return {name: PatchedImage(name, torch.randn(h * w, 3 * 2 * 14 * 14, generator=generator), (1, h, w))
            for name, (h, w) in SIZES.items()}


def prompt_of(*parts: str | int) -> list[int]:
    """A prompt of pictures by name, each between its start and its end, and of so many random tokens of text."""
    generator, ids = torch.Generator().manual_seed(len(parts)), list[int]()
    for part in parts:
        if isinstance(part, str):
            h, w = SIZES[part]
            ids += [START, *[ImageToken(IMAGE, part)] * (h * w // 4), END]
        else:
            ids += torch.randint(7, 320, (part,), generator=generator).tolist()
    return ids


def group_of(prompt: list[int], *lengths: int) -> RolloutGroup:
    """Random completions of a prompt."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return RolloutGroup({}, prompt, [
        Rollout(torch.randint(7, 320, (length,), generator=generator).tolist(), [0.0] * length, "stop")
        for length in lengths])


def given(prompt: list[int]) -> dict[str, Tensor]:
    """transformers' inputs for the pictures of a prompt; one that stands in it twice is there twice."""
    held = pictures()
    seen = [held[token.image] for before, token in zip([0, *prompt], prompt, strict=False)
            if isinstance(token, ImageToken) and before == START]
    kinds = {"mm_token_type_ids": torch.tensor([[int(token == IMAGE) for token in map(int, prompt)]])}
    return kinds if not seen else kinds | {"pixel_values": torch.cat([each.patches for each in seen]),
                                           "image_grid_thw": torch.tensor([each.grid for each in seen])}


def alone(model: Any, group: RolloutGroup, rollout: Rollout) -> Tensor:
    """(C,) log-probabilities of a completion by transformers' own forward pass."""
    ids = torch.tensor([[*group.prompt_ids, *rollout.completion_ids]])
    seen = given([*group.prompt_ids, *rollout.completion_ids])
    if "pixel_values" in seen:
        seen["pixel_values"] = seen["pixel_values"].to(model.dtype)
    logits = model(input_ids=ids, use_cache=False, **seen).logits[0]
    at = torch.arange(len(group.prompt_ids) - 1, ids.shape[1] - 1)
    found: Tensor = logits[at].log_softmax(-1).gather(-1, ids[0, 1:][at][:, None])[:, 0]
    return found
