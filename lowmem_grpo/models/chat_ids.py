"""Results of `apply_chat_template` that work in programs written for transformers 4 and for transformers 5.

Without `return_dict`, version 4 returned token ids and version 5 returns a dictionary with them. Programs for version 4
take the result's length, decode it or put it into a dataset, and pass a tensor to `model.generate(input_ids=...)`;
programs for version 5 look up "input_ids", or write `**result`.
"""

import traceback
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import TemplateError
from transformers import BatchEncoding

from lowmem_grpo.models.hub import first_line
from lowmem_grpo.models.template_trial import ChatTemplateError
from lowmem_grpo.utils import UnsupportedError

MEDIA = ("image", "video", "audio")  # types of a message's part, or in them, as in "image_url"; options of processors
TEXT_ALONE = ("images and sounds are not supported, only text is trained here: leave them out of the messages and out "
              "of the tokenizer's call (docs/families.md names the multimodal checkpoints whose text model loads)")


class TokenIds(list[Any]):
    """The list of ids that version 4 returned, with the keys, attributes and methods of version 5's `BatchEncoding`."""

    encoding: BatchEncoding

    def __init__(self, encoding: BatchEncoding) -> None:
        super().__init__(encoding["input_ids"])
        self.encoding = encoding

    def __getitem__(self, place: Any) -> Any:
        return self.encoding[place] if isinstance(place, str) else super().__getitem__(place)

    def __contains__(self, value: object) -> bool:
        return value in self.encoding if isinstance(value, str) else super().__contains__(value)

    def __getattr__(self, name: str) -> Any:
        if name == "encoding" or name.startswith("__"):  # copying looks up attributes before `__init__` has set any
            raise AttributeError(name)
        return getattr(self.encoding, name)

    def __reduce__(self) -> Any:
        return list, ([*self],)  # pickles as a plain list of the ids


class IdsTokenizer:
    """A mixin for tokenizer classes, whose `apply_chat_template` returns `TokenIds`. Images and sounds are refused:
    programs for multimodal models pass them to a processor, and this tokenizer takes its place."""

    of_processor = False  # True: the tokenizer of a processor, which writes the places of images

    def __call__(self, *args: Any, **options: Any) -> Any:
        if any(options.get(name) is not None for each in MEDIA for name in (each, f"{each}s")) or any(
                map(is_picture, args[:2])):
            raise UnsupportedError(TEXT_ALONE)
        return super().__call__(*args, **options)  # type: ignore[misc]

    def apply_chat_template(self, conversation: Any, *args: Any, **options: Any) -> Any:
        """Return transformers' result, as `TokenIds` if it holds lists of ids and `return_dict` was not given.
        UnsupportedError if a message has an image or a sound, ChatTemplateError for whatever the template raises."""
        if not self.of_processor and has_media(conversation):
            raise UnsupportedError(TEXT_ALONE)
        try:
            answer = super().apply_chat_template(conversation, *args, **options)  # type: ignore[misc]
        except Exception as error:
            if not from_template(error):
                raise
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ChatTemplateError("the chat template cannot write these messages: "
                                    f"{kind}{first_line(error):.500}") from error
        lists = isinstance(answer, BatchEncoding) and isinstance(answer["input_ids"], list)
        return TokenIds(answer) if lists and "return_dict" not in options else answer

    def __reduce__(self) -> Any:
        return empty_tokenizer, (type(self).__bases__[1],), vars(self)


def from_template(error: BaseException) -> bool:
    """Return whether a chat template raised an error, or is none."""
    return isinstance(error, TemplateError) or any(
        frame.f_code.co_filename == "<template>" for frame, _ in traceback.walk_tb(error.__traceback__))


def is_picture(value: Any) -> bool:
    """Return whether a value is an image of PIL, or a list that begins with one."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return hasattr(first, "size") and hasattr(first, "convert")


def has_media(conversation: Any) -> bool:
    """Return whether a message of a conversation, or of one of several, has a part that is not text."""
    if isinstance(conversation, list | tuple):
        return any(map(has_media, conversation))
    content = conversation.get("content") if isinstance(conversation, Mapping) else None
    return isinstance(content, list | tuple) and any(
        isinstance(part, Mapping) and any(name in str(part.get("type")) for name in MEDIA) for part in content)


@cache
def class_with_ids(cls: type) -> type:
    """Return a subclass of `cls` with the `IdsTokenizer` mixin, under the name of `cls`, which is saved."""
    return type(cls.__name__, (IdsTokenizer, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def empty_tokenizer(cls: type) -> Any:
    """Return a tokenizer without attributes; copying or unpickling sets them afterwards."""
    own: Any = class_with_ids(cls)
    return own.__new__(own)


def with_ids(tokenizer: Any) -> Any:
    """Return a shallow copy of the tokenizer, with the `IdsTokenizer` mixin; both share their attributes."""
    tokenizer_copy = empty_tokenizer(type(tokenizer))
    vars(tokenizer_copy).update(vars(tokenizer))
    return tokenizer_copy


def generate_inputs(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for `generate`; a mapping passed as `input_ids` or `inputs` is unpacked into keywords."""
    name = next((name for name in ("input_ids", "inputs") if name in options), None)
    given = args[0] if args else options.get(str(name))
    if not isinstance(given, Mapping):
        return args, options
    return args[1:], {**given, **{key: value for key, value in options.items() if args or key != name}}
