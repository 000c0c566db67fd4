"""The processor of a model of images: transformers' own, or one with the same calls where torchvision is missing."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, BatchFeature

from lowmem_grpo.models.template_trial import check_templates
from lowmem_grpo.utils import bytes_of, read_json

IMAGE = "<|image_pad|>"  # the token of an image's features in Qwen's families
OF_IMAGES = ("preprocessor_config.json", "processor_config.json")  # an image processor's settings are in one of them
NEEDS_TEXT = "the processor takes text, and images in the order of their places in it"


class VisionProcessor:
    """A tokenizer and an image processor with the calls of transformers' Qwen processors. Attributes that it lacks are
    the tokenizer's."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.image_token, self.image_token_id = IMAGE, tokenizer.convert_tokens_to_ids(IMAGE)

    def __call__(self, images: Any = None, text: str | Sequence[str] | None = None, return_tensors: str | None = None,
                 **options: Any) -> BatchFeature:
        """Return input_ids, attention_mask and mm_token_type_ids of the texts, with each image's place widened to its
        features, and pixel_values and image_grid_thw of the images."""
        if (first := flat(images)) and isinstance(first[0], str):
            images, text = text, images  # in the other order
        if text is None:
            raise ValueError(NEEDS_TEXT)
        if isinstance(text, list) and text and isinstance(text[0], dict):
            text = self.apply_chat_template(text, add_generation_prompt=True)
        texts, seen = [text] if isinstance(text, str) else list(text), {}
        given = flat(images)
        if given:
            seen = dict(self.image_processor(images=given, return_tensors="pt"))
        merged = self.image_processor.merge_size**2
        counts = [int(grid.prod()) // merged for grid in seen.get("image_grid_thw", [])]
        if (places := sum(each.count(IMAGE) for each in texts)) != len(counts):
            raise ValueError(f"the text has {places} places of images, and there are {len(counts)} images")
        sizes = iter(counts)
        wide = ["".join(part if part != IMAGE else IMAGE * next(sizes) for part in parted(each)) for each in texts]
        made = self.tokenizer(wide, return_tensors=return_tensors, **options)
        kinds = [[int(token == self.image_token_id) for token in row] for row in made["input_ids"]]
        found = {**made, "mm_token_type_ids": torch.tensor(kinds) if return_tensors == "pt" else kinds, **seen}
        return BatchFeature(found)

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, return_dict: bool = False,
                            return_tensors: str | None = None, images: Any = None, **options: Any) -> Any:
        """Return the text of a conversation by the tokenizer's chat template or, with `tokenize`, its inputs. Images
        are those inside its parts, or the given ones."""
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        if not tokenize:
            return text
        talks = [conversation] if isinstance(conversation[0], dict) else conversation
        inside = [part["image"] for talk in talks for message in talk if isinstance(message.get("content"), list)
                  for part in message["content"] if part.get("type") == "image" and part.get("image") is not None]
        made = self(images if images is not None else inside or None, text, return_tensors=return_tensors or "pt",
                    add_special_tokens=False)
        return made if return_dict else made["input_ids"]

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        self.tokenizer.save_pretrained(save_directory, **options)
        self.image_processor.save_pretrained(save_directory)

    def __getattr__(self, name: str) -> Any:
        if name in ("tokenizer", "image_processor"):
            raise AttributeError(name)  # while it is unpickled
        return getattr(self.tokenizer, name)


def parted(text: str) -> list[str]:
    """Return the pieces of a text between its places of images, and these places."""
    first, *others = text.split(IMAGE)
    return [first, *(piece for other in others for piece in (IMAGE, other))]


def flat(images: Any) -> list[Any]:
    """Return one image, a list, or a list of lists as a list."""
    if images is None:
        return []
    return [one for each in images for one in flat(each)] if isinstance(images, (list, tuple)) else [images]


def need_pillow() -> None:
    """Raise ImportError with the fix where Pillow is missing."""
    if find_spec("PIL") is None:
        raise ImportError("images need Pillow, which is not installed: pip install 'lowmem-grpo[vision]'")


def load_processor(path: str, tokenizer: Any, min_pixels: int | None = None, max_pixels: int | None = None,
                   **where: Any) -> Any:
    """Return the processor of a stored model around this tokenizer. `min_pixels` and `max_pixels` bound an image."""
    need_pillow()
    bounds: dict[str, Any] = {name: value for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels))
              if value is not None}
    tokenizer.of_processor = True
    if find_spec("torchvision") is not None:
        made = AutoProcessor.from_pretrained(path, trust_remote_code=False, **bounds, **where)
        made.tokenizer = tokenizer
        return made
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own = Qwen2VLImageProcessorPil.from_pretrained(path, **bounds, **where)
    template = Path(path) / "chat_template.json"  # of processors that were saved with transformers 4
    if not tokenizer.chat_template and template.is_file():
        held = read_json(bytes_of(template))
        if not isinstance(held, dict) or not isinstance(held.get("chat_template"), str):
            raise ValueError(f"{template} has no text under chat_template; correct it, or take it away")
        tokenizer.chat_template = held["chat_template"]
        check_templates(tokenizer, str(template))
    return VisionProcessor(tokenizer, own)


def with_saved_bounds(processor: Any, folder: Path, **bounds: int) -> Any:
    """Return the processor, with the image processor of an adapter's folder, if there is one."""
    if any((folder / name).is_file() for name in OF_IMAGES):
        processor.image_processor = type(processor.image_processor).from_pretrained(folder, **bounds)
    return processor
