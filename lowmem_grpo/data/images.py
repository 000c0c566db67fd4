"""Rows with images: from the user's pictures to a prompt whose tokens name them.

A row has its pictures in the column `image` or `images`, or inside the parts of its messages: as PIL images, paths,
bytes, arrays, or the dicts of `datasets.Image`. The size of a picture is decided here, once, by the image processor.
"""

import hashlib
import io
import warnings
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from lowmem_grpo.data.prompt_inputs import chat_text, half_pair, is_message, text_ids
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, is_chat, no_chat, odd_role
from lowmem_grpo.models.vision import ImageName, ImageStore, PatchedImage
from lowmem_grpo.types import ImageToken

COLUMNS = ("image", "images")
INSIDE = ("image", "path", "url", "base64")  # keys of a part of a message that may hold its picture
MOST_PIXELS = 64 << 20  # of a picture before it is resized
WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # more than 8 bits a value
ASSISTANT = "an image in a message of the role {!r}; images are read from the first prompt's user and system messages"


class ImageError(ValueError):
    """A picture that cannot be read; the message says why."""


def opened(value: Any) -> Image.Image:
    """Return a picture in RGB. ImageError, with the reason, for one that cannot be read as it is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = undecoded(value)
            check(image)
            if image is not value:  # a file may say how it is to be turned; transformers and datasets do so
                ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")
        except ImageError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise ImageError(f"has more than {MOST_PIXELS:,} pixels; make it smaller") from None
        except UnidentifiedImageError:
            raise ImageError("is in no format that PIL reads") from None
        except (OSError, ValueError, TypeError, SyntaxError, EOFError) as error:
            raise ImageError(f"cannot be read ({type(error).__name__}: {error})") from None


def undecoded(value: Any) -> Image.Image:
    """Return a picture as PIL's image. ImageError for another kind of value."""
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not len(value):
            raise ImageError("is an empty file")
        return Image.open(io.BytesIO(value))
    if isinstance(value, (str, Path)):
        return Image.open(io.BytesIO(inside(value).read_bytes()))
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if str(value.dtype).removeprefix("torch.") != "uint8" or len(value.shape) not in (2, 3):
            raise ImageError(f"is an array of {value.dtype} {tuple(value.shape)}; give (height, width, 3) in uint8")
        return Image.fromarray(getattr(value, "numpy", lambda: value)())
    raise ImageError(f"is a {type(value).__name__}; give a PIL image, a path, bytes or an array")


def inside(value: str | Path) -> Path:
    """Return the path of a picture. ImageError for an address, a missing file, or a relative path that leaves the
    working directory."""
    if "://" in str(value) or str(value).startswith("data:"):
        raise ImageError(f"is the address {str(value)[:60]!r}; nothing is fetched: give the file")
    path = Path(value).expanduser()
    if not path.is_absolute() and not path.resolve().is_relative_to(Path.cwd().resolve()):
        raise ImageError(f"is at {str(path)!r}, which leads out of the working directory; give an absolute path")
    if not path.is_file():
        raise ImageError(f"is not at {str(path)!r}")
    if not path.stat().st_size:
        raise ImageError("is an empty file")
    return path


def check(image: Image.Image) -> None:
    """Raise ImageError for a picture that would lose what it shows."""
    if image.width * image.height > MOST_PIXELS:
        raise ImageError(f"has {image.width * image.height:,} pixels, at most {MOST_PIXELS:,} are read; resize it")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a photo with another one behind it
        raise ImageError(f"has {getattr(image, 'n_frames', 1)} frames; give one of them (image.seek(0); image.copy())")
    if image.mode in WIDE_MODES:
        raise ImageError(f"has values of more than 8 bits (PIL's mode {image.mode!r}), which would be cut off: scale "
                         "them to 8 bits")


def thumbnail(value: Any) -> bytes:
    """Return a picture as a JPEG file of at most 96 pixels a side; b"" if it cannot be read any more."""
    file = io.BytesIO()
    with suppress(ImageError):
        image = opened(value)
        image.thumbnail((96, 96))
        image.save(file, "JPEG", quality=80)
    return file.getvalue()


class ImageReader:
    """Reads pictures with the image processor of a processor, into the store of a model."""

    def __init__(self, processor: Any, store: ImageStore) -> None:
        self.tokenizer, self.images = processor.tokenizer, processor.image_processor
        self.token: int = processor.image_token_id
        self.store = store
        store.read = self.read

    def read(self, value: Any) -> list[ImageToken]:
        """Return the tokens of a picture; ImageError if it cannot be read."""
        image = opened(value)
        name = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()[:32]
        if name not in self.store.pictures:
            try:
                made = self.images(images=[image], return_tensors="pt", input_data_format="channels_last")
            except ValueError as error:
                raise ImageError(f"has {image.width} x {image.height} pixels: {error}") from None
            t, h, w = made["image_grid_thw"][0].tolist()
            self.store.put(PatchedImage(name, made["pixel_values"], (t, h, w)))
        t, h, w = self.store.get(name).grid
        return [ImageToken(self.token, ImageName.of(name, value))] * (t * h * w // self.images.merge_size**2)

    def prompt(self, ids: list[int], pictures: list[Any]) -> list[int]:
        """Return a prompt's ids with each place of an image widened to the image's tokens. ImageError if places and
        pictures differ in number, or a picture cannot be read."""
        if (places := ids.count(self.token)) != len(pictures):
            raise ImageError(f"the prompt has {places} places of images, and the row has {len(pictures)} images")
        made, given = list[int](), iter(enumerate(pictures, 1))
        for token in ids:
            if token != self.token:
                made.append(token)
                continue
            number, picture = next(given)
            try:
                made += self.read(picture)
            except ImageError as error:
                raise ImageError(f"image {number} {error}") from None
        return made

    def encoded(self, prompt: Any) -> tuple[str, list[int]] | None:
        """Return the text and ids of a prompt with images: chat messages with pictures inside of parts, or vLLM's
        dictionary with `multi_modal_data`; None for any other prompt. ValueError if it cannot be read."""
        pictures = list[Any]()
        if isinstance(prompt, Mapping) and (data := prompt.get("multi_modal_data")):
            if other := sorted(set(data) - {"image"}):
                raise ValueError(f"multi_modal_data has {other[0]!r}; only image is read")
            pictures = pictures_of(data)
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
        elif not has_parts(prompt):
            return None
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if why := refused(prompt, self.tokenizer):
                raise ValueError(why)
            prompt, pictures = placed(prompt, pictures)
            prompt = chat_text(self.tokenizer, prompt)
            ids = self.tokenizer(prompt, add_special_tokens=False).input_ids
        else:
            ids = text_ids(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt or [])
        text = prompt if isinstance(prompt, str) else str(self.tokenizer.decode(ids))
        return text, self.prompt(ids, pictures)


def has_parts(prompt: Any) -> bool:
    """Return whether a prompt is a chat with an image in it."""
    return isinstance(prompt, list) and any(
        is_message(message) and isinstance(message.get("content"), (list, tuple)) and any(
            isinstance(part, Mapping) and part.get("type") == "image" for part in message["content"])
        for message in prompt)


class ImageEncoder(PromptEncoder):
    """Encodes the prompt of a row with or without images."""

    by_text, images = False, True

    def __init__(self, reader: ImageReader, *settings: Any) -> None:
        super().__init__(reader.tokenizer, *settings)
        self.reader = reader

    def fitted(self, row: dict[str, Any], prompt: Prompt | str) -> Prompt | str:
        if isinstance(prompt, Prompt) and len(prompt.ids) > self.max_prompt_length and any(
                isinstance(token, ImageToken) for token in prompt.ids):
            return f"prompt with images longer than {self.max_prompt_length} tokens"  # never cut
        return super().fitted(row, prompt)

    def of_any_length(self, row: dict[str, Any]) -> Prompt | str:
        said: Any = row.get("prompt")
        pictures = pictures_of(row)
        if not isinstance(said, str):
            if why := refused(said, self.tokenizer):
                return why
            said, pictures = placed(said, pictures)
            text = self.render(said, self.options(row))
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            text = said
            ids = text_ids(self.tokenizer, text) if text.strip() else []
        if why := half_pair(text, "prompt") if text.strip() else "empty prompt":
            return why
        try:
            return Prompt(row, self.reader.prompt(ids, pictures), text)
        except ImageError as error:
            return str(error)


def pictures_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the pictures in a row's columns; a list may also stand in `image`."""
    found = [row[name] for name in COLUMNS if row.get(name) is not None]
    return [one for each in found for one in (each if isinstance(each, (list, tuple)) else [each]) if one is not None]


def parts_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def refused(prompt: Any, tokenizer: Any) -> str:
    """Return the reason to leave out a prompt that is no chat of texts and images; "" if there is none."""
    if not isinstance(prompt, list) or not all(map(is_message, prompt)):
        return no_chat(prompt, "prompt")
    for place, message in enumerate(prompt, 1):
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in parts_of(message)]
        if odd := next((kind for kind in kinds if kind not in ("text", "image")), None):
            return f"message {place} of prompt has a part of type {odd!r}; read are text and image"
        if "image" in kinds and message["role"] not in ("user", "system"):
            return ASSISTANT.format(message["role"])
    plain = [{**message, "content": "".join(str(part.get("text") or "") for part in parts_of(message))}
             for message in prompt]
    return odd_role(plain, tokenizer) if is_chat(plain) else no_chat(plain, "prompt")


def placed(messages: list[Any], pictures: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages with parts, and the pictures in the order of their places: those inside of parts, and the
    row's in the other places. Without any place, the row's come before the first user message's text, as in TRL."""
    shaped = [{**message, "content": [*map(dict, parts_of(message))]} if isinstance(message.get("content"), list)
              else dict(message) for message in messages]
    images = [part for message in shaped if isinstance(message.get("content"), list) for part in message["content"]
              if part.get("type") == "image"]
    if not images and pictures:
        first = next((message for message in shaped if message["role"] == "user"), shaped[0])
        first["content"] = [*[{"type": "image"} for _ in pictures], *map(dict, parts_of(first))]
        return shaped, pictures
    others, order = iter(pictures), list[Any]()
    for part in images:
        own = next((part.pop(key) for key in INSIDE if part.get(key) is not None), None)
        order += [own] if own is not None else list(islice(others, 1))
    return shaped, [*order, *others]

