"""Make the embedded model of images: a small Qwen2.5-VL that sees shapes, but answers wrongly more often than not.

    python -m bench.tiny_shapes --out DIR

It is trained from scratch on generated pictures of the training split: first with right answers, until it sees how many
shapes there are, in which colour and where, and then with answers that are wrong with probability ERROR_RATE. GRPO has
the second part to improve, and must keep the first. This takes a few minutes on one CPU core, and the result depends
only on the seed. The files ship in `lowmem_grpo/assets/tiny-shapes`.
"""

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from bench.tiny_model import CONTEXT, END, PAD, train
from lowmem_grpo.models.vision_processor import VisionProcessor
from lowmem_grpo.recipes.shapes import COLOURS, QUESTIONS, SIDES, TINY_MOST, Scene, scenes

ERROR_RATE = 0.62
ANSWERS = {"count": [str(number) for number in range(1, TINY_MOST + 1)], "colour": list(COLOURS), "place": list(SIDES)}
SPECIAL = [PAD, "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORD = r"\w+|[^\w\s]"
WORDS = sorted({word for text in (*QUESTIONS.values(), *(" ".join(each) for each in ANSWERS.values()),
                                  "system user assistant tool") for word in re.findall(WORD, text)})
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
VISION = {"depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 3, "out_hidden_size": 64,
          "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
          "fullatt_block_indexes": [0, 1], "initializer_range": 0.1}
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]  # the model's inputs, and labels (B, T), -100 if not trained


def make_processor() -> VisionProcessor:
    """Return a tokenizer of whole words, and an image processor for small pictures."""
    unknown = "<|unknown|>"
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*SPECIAL, unknown, *WORDS])}, unknown))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=unknown, additional_special_tokens=SPECIAL[1:],
        chat_template=TEMPLATE, model_max_length=CONTEXT, clean_up_tokenization_spaces=False)
    return VisionProcessor(tokenizer, Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 64))


def batches(processor: VisionProcessor, source: Iterator[Scene], rng: random.Random, errors: float) -> Iterator[Batch]:
    """Yield right-padded batches of 48 without end; only answers are trained, of which the share `errors` is wrong."""
    while True:
        chosen = list(islice(source, 48))
        said = [rng.choice([word for word in ANSWERS[scene.kind] if word != scene.answer])
                if rng.random() < errors else scene.answer for scene in chosen]
        texts = [processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTIONS[scene.kind]}]}],
            add_generation_prompt=True) + word + END for scene, word in zip(chosen, said, strict=True)]
        inputs = dict(processor([scene.picture() for scene in chosen], texts, return_tensors="pt", padding=True))
        lengths = inputs.pop("attention_mask").sum(1, keepdim=True)
        places = torch.arange(inputs["input_ids"].shape[1])
        answers = (places >= lengths - 2) & (places < lengths)  # a word and END
        yield inputs, inputs["input_ids"].where(answers, -100)


def loss_of(model: Qwen2_5_VLForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the labelled tokens."""
    inputs, labels = batch
    logits = model(**inputs).logits[:, :-1]  # right-padded: causal attention needs no mask
    return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


def endless(seed: int) -> Iterator[Scene]:
    """Yield scenes of the training split, which begin anew with another seed before they are few."""
    while True:
        yield from islice(scenes("train", seed, TINY_MOST), 4096)
        seed += 1


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", default=600, show_default=True, help="Of right answers.")
@click.option("--wrong-steps", default=120, show_default=True, help="Of answers that are wrong with ERROR_RATE.")
def main(out: Path, seed: int, steps: int, wrong_steps: int) -> None:
    """Make the processor and the model, train, and write them. The model card is written by hand."""
    processor = make_processor()
    ids = {f"{name}_token_id": processor.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in (
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("pad", "endoftext"),
        ("eos", "im_end"))}
    torch.manual_seed(seed)
    plain = {"pad_token_id": ids["pad_token_id"], "eos_token_id": ids["eos_token_id"], "bos_token_id": None}
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=TEXT | plain, vision_config=VISION, tie_word_embeddings=True, **ids))
    for errors, length, rate in ((0.0, steps, 2e-3), (ERROR_RATE, wrong_steps, 5e-4)):
        rows = batches(processor, endless(seed), random.Random(seed), errors)
        train(model, rows, length, rate, loss_of)
    model.to(torch.bfloat16).save_pretrained(out)
    processor.save_pretrained(out)
    click.echo(f"wrote {model.num_parameters():,} parameters to {out}")


if __name__ == "__main__":
    main()
