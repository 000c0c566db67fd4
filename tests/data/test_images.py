"""Rows with images become prompts whose tokens name them, and what cannot be read is named before a step is lost."""

import io
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tables import every_row
from vision_models import END, IMAGE, START, WORDS, saved_vision_model

from lowmem_grpo import FastVisionModel
from lowmem_grpo.data.images import ImageEncoder, ImageError, ImageReader, opened
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.models.vision import ImageStore
from lowmem_grpo.types import ImageToken

RED, BLUE = Image.new("RGB", (56, 84), "red"), Image.new("RGB", (112, 56), "blue")  # 2 x 3 and 4 x 2 features
ASK: dict[str, Any] = {"type": "text", "text": "Describe it"}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    _, made = FastVisionModel.from_pretrained(str(saved_vision_model("Qwen2_5_VL", tmp_path_factory.mktemp("vl"))),
                                              max_seq_length=256, load_in_4bit=False)
    return made


@pytest.fixture
def encoder(processor: Any) -> ImageEncoder:
    return ImageEncoder(ImageReader(processor, ImageStore()), 64)


def in_bytes(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chat(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}]


PLACE: dict[str, Any] = {"type": "image"}
ROWS = {  # rows that mean the red picture, or the red and the blue one
    "a picture in `image`": {"prompt": chat(PLACE, ASK), "image": RED},
    "a list in `image`": {"prompt": chat(PLACE, ASK), "image": [RED]},
    "a list in `images`": {"prompt": chat(PLACE, ASK), "images": [RED]},
    "a picture inside its part": {"prompt": chat({"type": "image", "image": RED}, ASK)},
    "bytes": {"prompt": chat(PLACE, ASK), "image": in_bytes(RED)},
    "datasets.Image": {"prompt": chat(PLACE, ASK), "image": {"bytes": in_bytes(RED), "path": None}},
    "an array": {"prompt": chat(PLACE, ASK), "image": numpy.asarray(RED)},
    "a tensor": {"prompt": chat(PLACE, ASK), "image": torch.from_numpy(numpy.array(RED))},
    "no place": {"prompt": [{"role": "user", "content": "Describe it"}], "images": [RED]},
    "text with a place": {"prompt": "<|im_start|> user <|vision_start|> <|image_pad|> <|vision_end|> Describe it "
                                    "<|im_end|> <|im_start|> assistant", "image": RED},
}


@every_row("row", ROWS)
def test_a_picture_is_read_wherever_and_however_the_row_has_it(row: str, encoder: ImageEncoder) -> None:
    prompt = encoder.encode(ROWS[row])
    assert isinstance(prompt, Prompt), prompt
    image = [token for token in prompt.ids if isinstance(token, ImageToken)]
    (picture,) = encoder.reader.store.pictures.values()
    assert picture.grid == (1, 6, 4) and len(image) == 6 and {*image} == {ImageToken(IMAGE, picture.name)}
    words = [WORDS[token] for token in prompt.ids]
    assert words == ["<|im_start|>", "user", "<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>", "Describe",
                     "it", "<|im_end|>", "<|im_start|>", "assistant"]


def test_ids_and_patches_are_those_of_transformers_image_processor_and_tokenizer(processor: Any) -> None:
    encoder = ImageEncoder(ImageReader(processor, ImageStore()), 64)
    messages = chat({"type": "image", "image": RED}, {"type": "image", "image": BLUE}, ASK)
    prompt = encoder.encode({"prompt": messages})
    assert isinstance(prompt, Prompt)
    made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    plain = processor.image_processor(images=[RED, BLUE], return_tensors="pt")
    assert made["input_ids"].tolist() == [[*map(int, prompt.ids)]]
    assert made["mm_token_type_ids"].tolist() == [[int(token == IMAGE) for token in map(int, prompt.ids)]]
    held = encoder.reader.store.pictures.values()
    for found in (made["pixel_values"], torch.cat([picture.patches for picture in held])):
        torch.testing.assert_close(found, plain["pixel_values"], rtol=0, atol=0)
    assert [[*picture.grid] for picture in held] == plain["image_grid_thw"].tolist() == made["image_grid_thw"].tolist()


def test_several_pictures_take_their_places_in_order_and_equal_ones_are_read_once(encoder: ImageEncoder) -> None:
    row = {"prompt": chat(PLACE, {"type": "image", "image": BLUE}, PLACE, ASK), "images": [RED, RED.copy()]}
    prompt = encoder.encode(row)
    assert isinstance(prompt, Prompt)
    places = [at for at, token in enumerate(prompt.ids) if token == START]
    ends = [at for at, token in enumerate(prompt.ids) if token == END]
    assert [end - at - 1 for at, end in zip(places, ends, strict=True)] == [6, 8, 6]
    assert prompt.ids[places[0] + 1] == prompt.ids[places[2] + 1] != prompt.ids[places[1] + 1]
    assert len(encoder.reader.store.pictures) == 2


def test_rows_of_text_are_mixed_with_rows_of_images(encoder: ImageEncoder) -> None:
    prompt = encoder.encode({"prompt": [{"role": "user", "content": "Describe it"}], "image": None})
    assert isinstance(prompt, Prompt) and not any(isinstance(token, ImageToken) for token in prompt.ids)


def test_nothing_is_cut_inside_a_prompt_with_images_and_texts_are_cut_as_before(processor: Any) -> None:
    encoder = ImageEncoder(ImageReader(processor, ImageStore()), 8, None, True)
    assert encoder.encode(ROWS["bytes"]) == "prompt with images longer than 8 tokens"
    text = encoder.encode({"prompt": "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"})
    assert isinstance(text, Prompt) and [WORDS[token] for token in text.ids] == [f"w{at}" for at in range(3, 11)]


GIF = in_bytes(RED, "GIF", save_all=True, append_images=[RED.copy().rotate(90)])
LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "no picture": ({"prompt": chat(PLACE, ASK)}, "the prompt has 1 places of images, and the row has 0 images"),
    "more places": ({"prompt": chat(PLACE, PLACE, ASK), "image": RED}, "has 2 places of images, and the row has 1"),
    "more pictures": ({"prompt": chat(PLACE, ASK), "images": [RED, BLUE]}, "has 1 places of images, and the row has 2"),
    "a place in the text": ({"prompt": "<|image_pad|>"}, "the prompt has 1 places of images, and the row has 0"),
    "broken": ({"prompt": chat(PLACE, ASK), "image": in_bytes(RED)[:60]}, "image 1 cannot be read"),
    "empty": ({"prompt": chat(PLACE, ASK), "image": b""}, "image 1 is an empty file"),
    "no image": ({"prompt": chat(PLACE, ASK), "image": b"text"}, "image 1 is in no format that PIL reads"),
    "not there": ({"prompt": chat(PLACE, ASK), "image": "nowhere.png"}, "image 1 is not at 'nowhere.png'"),
    "outside": ({"prompt": chat(PLACE, ASK), "image": "../../etc/hostname"}, "leads out of the working directory"),
    "an address": ({"prompt": chat(PLACE, ASK), "image": "https://example.com/cat.png"}, "nothing is fetched"),
    "animated": ({"prompt": chat(PLACE, ASK), "image": GIF}, "image 1 has 2 frames"),
    "16 bits": ({"prompt": chat(PLACE, ASK), "image": Image.new("I;16", (30, 30))}, "more than 8 bits"),
    "floats": ({"prompt": chat(PLACE, ASK), "image": numpy.zeros((4, 4, 3))}, r"an array of float64 \(4, 4, 3\)"),
    "a number": ({"prompt": chat(PLACE, ASK), "image": 7}, "image 1 is a int; give a PIL image"),
    "long and thin": ({"prompt": chat(PLACE, ASK), "image": Image.new("RGB", (900, 1))}, "900 x 1 pixels: .*ratio"),
    "in an answer": ({"prompt": [*chat(ASK), {"role": "assistant", "content": [PLACE]}], "image": RED},
                     "an image in a message of the role 'assistant'"),
    "of a tool": ({"prompt": [*chat(ASK), {"role": "tool", "content": [PLACE]}], "image": RED}, "of the role 'tool'"),
    "video": ({"prompt": chat({"type": "video"}, ASK)}, "message 1 of prompt has a part of type 'video'"),
    "no text": ({"prompt": []}, "empty prompt"), "no prompt": ({"prompt": None, "image": RED}, "empty prompt"),
}


@every_row("row", LEFT_OUT)
def test_a_row_that_cannot_be_read_is_left_out_with_the_reason(row: str, encoder: ImageEncoder) -> None:
    given, reason = LEFT_OUT[row]
    said = encoder.encode(given)
    assert isinstance(said, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(said)


KINDS = {
    "CMYK": Image.new("CMYK", (30, 30), (0, 255, 255, 0)), "a palette": Image.new("RGB", (30, 30), "red").convert("P"),
    "grey": Image.new("L", (30, 30)), "with transparency": Image.new("RGBA", (30, 30), "red"),
    "one bit": Image.new("1", (30, 30)), "one pixel": Image.new("RGB", (1, 1), "red"),
}


@every_row("kind", KINDS)
def test_a_picture_of_another_kind_is_read_in_rgb(kind: str, encoder: ImageEncoder) -> None:
    prompt = encoder.encode({"prompt": chat(PLACE, ASK), "image": KINDS[kind]})
    assert isinstance(prompt, Prompt), prompt
    plain = encoder.encode({"prompt": chat(PLACE, ASK), "image": KINDS[kind].convert("RGB")})
    assert isinstance(plain, Prompt) and plain.ids == prompt.ids


def test_a_picture_of_200_megapixels_is_refused_before_its_pixels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "convert", None)
    header = bytearray(in_bytes(RED))
    header[16:24] = (20_000).to_bytes(4, "big") + (10_000).to_bytes(4, "big")
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(ImageError, match=r"more than 67,108,864 pixels|has 200,000,000 pixels"):
        opened(bytes(header))


def test_a_photo_is_turned_as_its_file_says_and_one_with_another_behind_it_is_read(encoder: ImageEncoder) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    photo = in_bytes(BLUE, "JPEG", exif=turned)
    assert opened(photo).size == (56, 112) and opened(Image.open(io.BytesIO(photo))).size == (112, 56)
    pair = in_bytes(RED, "MPO", save_all=True, append_images=[RED.copy()])
    assert isinstance(encoder.encode({"prompt": chat(PLACE, ASK), "image": pair}), Prompt)


def test_a_picture_is_read_once_for_each_time_its_row_is_encoded(
    encoder: ImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = encoder.reader.read, list[Any]()
    monkeypatch.setattr(encoder.reader, "read", lambda value: reads.append(value) or read(value))
    assert isinstance(encoder.encode(ROWS["bytes"]), Prompt) and len(reads) == 1


def test_a_file_in_the_working_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: ImageEncoder
) -> None:
    monkeypatch.chdir(tmp_path)
    RED.save("red.png")
    for place in ("red.png", str(tmp_path / "red.png"), {"path": "red.png", "bytes": None}):
        assert isinstance(encoder.encode({"prompt": chat(PLACE, ASK), "image": place}), Prompt)
    (tmp_path / "empty.png").touch()
    assert encoder.encode({"prompt": chat(PLACE, ASK), "image": "empty.png"}) == "image 1 is an empty file"


def test_the_processor_takes_text_and_images_in_either_order_and_by_name(processor: Any) -> None:
    text = processor.apply_chat_template(chat(PLACE, ASK), add_generation_prompt=True)
    calls = [processor(RED, text, return_tensors="pt"), processor(RED, chat(PLACE, ASK), return_tensors="pt"),
             processor(text, RED, return_tensors="pt"),
             processor(text=[text], images=[[RED]], return_tensors="pt"), processor(images=RED, text=text,
                                                                                   return_tensors="pt")]
    for made in calls:
        assert made["input_ids"].tolist() == calls[0]["input_ids"].tolist() and made["pixel_values"].shape == (24, 1176)
    assert set(processor("w1 w2")) == {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"} - {
        *({"token_type_ids"} - set(processor.tokenizer("w1")))}
    with pytest.raises(ValueError, match="the text has 1 places of images, and there are 2 images"):
        processor(images=[RED, BLUE], text=text)
    with pytest.raises(ValueError, match="the processor takes text, and images"):
        processor(images=RED)
    assert processor.eos_token == "<|im_end|>" and processor.decode([WORDS.index("Describe")]) == "Describe"
