"""Converts users' prompts and chat messages to text and token ids.

Arrow (datasets, parquet) gives all dicts of a column the same keys, with None for keys that a dict did not have. Chat
templates write such keys out or refuse them, so they are dropped at any depth, as in TRL's `remove_none_values`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams, as_sampling_params

Encoded = tuple[str, list[int]]  # text and token ids of a prompt
Form = Callable[[Any], Any]  # changes the function in a tool call
WRITTEN: dict[tuple[str, bool], tuple[Form, Form]] = {}  # by chat template, and whether tools are told
KINDS = "text, chat messages, token ids, what a tokenizer returned, or a list of these"
CLOSED = {"add_generation_prompt": False, "continue_final_message": False}  # render without a generation prompt
TOKENS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks")  # columns converted to lists
OF_VLLM = {"prompt", "prompt_token_ids"}  # keys of its TextPrompt and TokensPrompt
HALF = re.compile("[\ud800-\udfff]")  # surrogates without their other half, which no tokenizer takes
IMAGES = "only text is generated here: leave images, video and sound out of the prompt"


def encoded(tokenizer: Any, prompts: Any, vocabulary: int, images: Any = None) -> list[Encoded]:
    """Return each prompt as text and ids. TypeError for a value that is not a prompt. ValueError for a prompt that is
    empty, has a message without text, has ids beyond the model's `vocabulary`, or has images, unless an `ImageReader`
    reads these."""
    many = [(images and images.encoded(prompt)) or encode(tokenizer, prompt, vocabulary) for prompt in as_list(prompts)]
    if not many:
        raise ValueError("fast_generate got no prompt, or an empty one")
    return many


def as_list(prompts: Any) -> list[Any]:
    """Return a list of prompts from one prompt, several, or a tokenizer's output. TypeError for anything else."""
    if is_encoding(prompts):
        return without_padding(plain(prompts["input_ids"]), plain(prompts.get("attention_mask")))
    prompts = plain(prompts)
    if isinstance(prompts, Mapping) and OF_VLLM & prompts.keys():
        return [prompts]
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"fast_generate got a {type(prompts).__name__}; pass {KINDS}")
    single = isinstance(prompts, str) or (bool(prompts) and (isinstance(prompts[0], int) or is_message(prompts[0])))
    many = [prompts] if single else list(prompts)
    return [inner for prompt in many for inner in (as_list(prompt) if is_encoding(prompt) else [prompt])]


def is_encoding(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "input_ids" in prompt


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def without_padding(ids: Any, mask: Any) -> list[list[int]]:
    """Return the rows of a tokenizer's encoding without the tokens that its attention mask excludes."""
    rows = ids if ids and not isinstance(ids[0], int) else [ids]
    rows = [list(plain(row)) for row in rows]
    if mask is None:
        return rows
    masks = mask if mask and not isinstance(mask[0], int) else [mask]
    return [[token for token, real in zip(row, plain(kept), strict=True) if real]
            for row, kept in zip(rows, masks, strict=True)]


def encode(tokenizer: Any, prompt: Any, vocabulary: int = sys.maxsize) -> Encoded:
    """Return the text and ids of one prompt. A string is used as it is; chat messages go through the chat template."""
    prompt = plain(prompt)
    if isinstance(prompt, Mapping):
        return encode(tokenizer, from_vllm(prompt), vocabulary)
    if not hasattr(prompt, "__len__"):
        raise TypeError(f"fast_generate got a prompt that is a {type(prompt).__name__}; pass {KINDS}")
    if len(prompt) == 0:
        raise ValueError("fast_generate got no prompt, or an empty one")
    if isinstance(prompt, str):
        return prompt, known_ids(text_ids(tokenizer, prompt), vocabulary)
    if isinstance(prompt[0], int):
        ids = known_ids(prompt, vocabulary)
        return tokenizer.decode(ids), ids
    text = chat_text(tokenizer, [in_text(each) for each in prompt])
    return text, known_ids(tokenizer(whole_text(text), add_special_tokens=False).input_ids, vocabulary)


def known_ids(ids: Any, vocabulary: int) -> list[int]:
    """Return token ids as a list; ValueError for an id that the model lacks."""
    if wrong := [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]:
        raise ValueError(f"a prompt has the token id {wrong[0]!r}; the model's are 0 to {vocabulary - 1}. A token that "
                         "was only added to the tokenizer has no weights: leave it out of the prompt, or add it with "
                         "add_new_tokens before get_peft_model")
    return list(ids)


def half_pair(text: str, name: str) -> str:
    """Return the reason to refuse a text with a lone surrogate (half of a pair); "" if it has none."""
    return f"{name} has half of a surrogate pair, which is no character" if HALF.search(text) else ""


def whole_text(text: str) -> str:
    """Return the text; ValueError if it has a lone surrogate (half of a pair)."""
    if why := half_pair(text, "a prompt"):
        raise ValueError(f"{why}: write it as text.encode('utf-8', 'replace').decode()")
    return text


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text for the model to continue: with the tokenizer's leading special tokens exactly once, and
    without its trailing special tokens. ValueError if the text has a lone surrogate."""
    text = whole_text(text)
    plain, around = (list(tokenizer(text or " ", add_special_tokens=special).input_ids) for special in (False, True))
    places = range(len(around) - len(plain) + 1)
    begin = next((around[:at] for at in places if around[at : at + len(plain)] == plain), [])
    if not text:
        return begin
    return plain if plain[: len(begin)] == begin else begin + plain


def chat_text(tokenizer: Any, messages: list[Any], options: Mapping[str, Any] | None = None) -> str:
    """Return the messages rendered by the chat template for the model to continue: in the last message if that is the
    assistant's, otherwise after a generation prompt. ValueError if the continued message calls tools."""
    begun = messages[-1]["role"] == "assistant"
    ways = {"add_generation_prompt": not begun, "continue_final_message": begun, **(options or {})}
    if ways["continue_final_message"] and messages[-1].get("tool_calls"):
        raise ValueError("a prompt ends with tool calls; add a message of the role tool with their result")
    return str(tokenizer.apply_chat_template(readable(tokenizer, messages, ways), tokenize=False, **ways))


def readable(tokenizer: Any, messages: list[Any], ways: Mapping[str, Any]) -> list[Any]:
    """Return the messages in a form in which the chat template renders all tool calls: arguments as objects or as JSON
    text, whichever it writes well (see `forms_of`), and empty content as "" or None. If the template raises for every
    form, return `messages`. ValueError if the template leaves out a call, or if a call has no name."""
    names = [name_of(call) for message in messages for call in message.get("tool_calls") or []]
    if not names:
        return messages
    lost = ""
    for form in forms_of(tokenizer, ways):
        for same in contents(messages):
            shaped = [with_functions(message, form) for message in same]
            try:
                text = str(tokenizer.apply_chat_template(shaped, tokenize=False, **ways))
            except Exception:  # noqa: BLE001 - templates may raise anything; rendering raises it again if no form works
                continue
            lost = next((name for name in names if name not in text), "")
            if not lost:
                return shaped
    if lost:
        raise ValueError(f"the chat template leaves out the call of {lost}; set tokenizer.chat_template to one that "
                         "writes tool calls, or write the call into the content of its message")
    return messages


def contents(messages: list[Any]) -> Iterator[list[Any]]:
    """Yield the messages with missing content as "" or None, then with empty content beside calls as None."""
    yield [{**message, "content": ""} if message.get("content") is None else message for message in messages]
    yield [{"content": None, **message} for message in messages]
    yield [{**message, "content": message.get("content") or None} if message.get("tool_calls") else message
           for message in messages]


def forms_of(tokenizer: Any, ways: Mapping[str, Any]) -> tuple[Form, Form]:
    """Return `with_object` and `with_text`, first the one whose arguments the chat template writes better. A made-up
    call tells: JSON text that is dumped has escaped quotes, and an object that is printed is no JSON but Python."""
    key = str(tokenizer.get_chat_template(ways.get("chat_template"), ways.get("tools"))), bool(ways.get("tools"))
    if key not in WRITTEN:
        first, second = sorted((with_object, with_text), key=lambda form: fault_of(tokenizer, ways, form))
        WRITTEN[key] = first, second
    return WRITTEN[key]


def fault_of(tokenizer: Any, ways: Mapping[str, Any], form: Form) -> int:
    """Return 0 if the template writes the arguments of a made-up call well, 1 if badly, 2 if not at all."""
    call = form({"name": "Zq7name", "arguments": {"Zq7key": "Zq7word"}})
    asked = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00000", "type": "function", "function": call}]}]
    told = {"role": "tool", "tool_call_id": "call00000", "name": "Zq7name", "content": "Answer"}
    faults = [2]
    for messages in (same for talk in ([*asked, told], asked) for same in contents(talk)):
        with suppress(Exception):  # templates may raise anything
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **{**ways, **CLOSED}))
            if all(word in text for word in ("Zq7name", "Zq7key", "Zq7word")):
                faults.append(int('\\"Zq7key' in text or "{'Zq7key'" in text))
    return min(faults)


def name_of(call: Any) -> str:
    """Return the name of the function in a tool call. ValueError if it has none."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"a message has the tool call {str(call)[:80]!r}; a call is a dict such as "
                         '{"function": {"name": "f", "arguments": {}}}')
    return name


def with_functions(message: Any, form: Callable[[Any], Any]) -> Any:
    """Return a message with `form` applied to the function (name and arguments) of each of its tool calls."""
    calls = [{**call, "function": form(call["function"])} if "function" in call else form(call)
             for call in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls} if calls else message


def with_object(function: Any) -> Any:
    """Return a function with its arguments as an object: {} for none, and unchanged if their text is no JSON object."""
    arguments: Any = function.get("arguments") or {}
    with suppress(TypeError, ValueError, RecursionError):  # an object already, or no JSON that can be read
        value = json.loads(arguments)
        arguments = value if isinstance(value, dict) else arguments
    return {**function, "arguments": arguments}


def with_text(function: Any) -> Any:
    arguments = function.get("arguments") or {}
    return {**function, "arguments": arguments if isinstance(arguments, str) else
            json.dumps(arguments, ensure_ascii=False)}


def from_vllm(prompt: Mapping[str, Any]) -> Any:
    """Return the text or ids of vLLM's TextPrompt or TokensPrompt. TypeError for other dicts, ValueError for images."""
    ids = prompt.get("prompt_token_ids")
    if ids is None and not isinstance(prompt.get("prompt"), str):
        raise TypeError(f"a prompt is a dictionary with {', '.join(map(str, prompt)) or 'nothing'}; pass {KINDS}")
    other = sorted(str(key) for key, value in prompt.items() if key not in OF_VLLM and value)
    if other:
        raise ValueError(f"a prompt has {', '.join(other)}; {IMAGES}")
    return prompt["prompt"] if ids is None else ids


def in_text(message: Any) -> Any:
    """Return a chat message with its content joined to one string. ValueError if a part is not text, or if there is
    neither text nor a tool call."""
    if not is_message(message):
        raise TypeError(f"a prompt is a list with a {type(message).__name__}; pass {KINDS}")
    message = plain_message(message)
    said = message.get("content")
    if isinstance(said, list):
        kinds = {part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__ for part in said}
        if other := sorted(kinds - {"text"}):
            raise ValueError(f"a message has a part of type {other[0]!r}; {IMAGES}")
        texts = [part.get("text") for part in said]
        said = "".join(texts) if all(isinstance(text, str) for text in texts) else 0
        message = {**message, "content": said}
    if not isinstance(said, str) and (said is not None or not message.get("tool_calls")):
        raise ValueError(f"a message of the role {message['role']!r} has no text; its content must be a text, or a "
                         "list of text parts")
    return message


def calls_of(prompts: list[Encoded], sampling_params: Any, longest: int) -> list[tuple[SamplingParams, list[Encoded]]]:
    """Return (parameters, prompts) of each engine call: one for all prompts, or one each for a list of parameters."""
    if not isinstance(sampling_params, list | tuple):
        return [(as_sampling_params(sampling_params, longest), prompts)]
    if len(sampling_params) != len(prompts):
        raise ValueError(f"sampling_params has {len(sampling_params)} entries and there are {len(prompts)} prompts; "
                         "pass one for each prompt, or one for all")
    return [(as_sampling_params(each, longest), [prompt])
            for each, prompt in zip(sampling_params, prompts, strict=True)]


def without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def plain_message(message: Any) -> Any:
    """Return a chat message without keys that map to None. If it has tool calls, a missing content is set to None."""
    if not is_message(message) or not message.keys() & {"content", "tool_calls"}:
        return message
    content = without_none(message.get("content"))
    kept = {key: without_none(value) if key == "tool_calls" else value for key, value in message.items()
            if value is not None and (key, value) != ("tool_calls", [])}
    return kept | {"content": content} if "content" in message or "tool_calls" in kept else kept


def joined_text(message: Any) -> Any:
    """Return a chat message with its content joined to one string if all its parts are text; otherwise unchanged."""
    parts = message.get("content") if is_message(message) else None
    if not isinstance(parts, list) or not parts:
        return message
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
             for part in parts]
    return {**message, "content": "".join(texts)} if all(isinstance(text, str) for text in texts) else message


def plain_row(row: Mapping[str, Any], arrays: bool = False) -> dict[str, Any]:
    """Return a row in plain values. Arrays become lists if `arrays` is True, or if they hold objects or token ids."""
    return {name: without_none(plain_value(value, True)) if name == "tools" else
            plain_value(value, arrays or name in TOKENS) for name, value in row.items()}


def plain_value(value: Any, arrays: bool) -> Any:
    if arrays or str(getattr(value, "dtype", "")) == "object":
        value = plain(value)
    if isinstance(value, list):
        parts = (plain_value(part, arrays) for part in value)
        return [joined_text(plain_message(part)) if isinstance(part, dict) else part for part in parts]
    return {key: plain_value(part, arrays) for key, part in value.items()} if isinstance(value, dict) else value
