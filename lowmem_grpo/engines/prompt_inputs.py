"""What people pass to `fast_generate`, as text and token ids: strings, chats, ids, tensors, a tokenizer's encoding, and
vLLM's dictionaries."""

from collections.abc import Mapping
from typing import Any

from lowmem_grpo.messages import plain_message

Encoded = tuple[str, list[int]]  # text and token ids of a prompt
KINDS = "text, chat messages, token ids, what a tokenizer returned, or a list of these"
OF_VLLM = {"prompt", "prompt_token_ids"}  # keys of its TextPrompt and TokensPrompt
IMAGES = "only text is generated here: leave images, video and sound out of the prompt"


def encoded(tokenizer: Any, prompts: Any) -> list[Encoded]:
    """Each prompt as text and ids. TypeError for what is no prompt, ValueError for an empty one and for images."""
    many = [encode(tokenizer, prompt) for prompt in as_list(prompts)]
    if not many:
        raise ValueError("fast_generate got no prompt, or an empty one")
    return many


def as_list(prompts: Any) -> list[Any]:
    """One prompt of any kind, or several, as a list."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
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
    """Whether it is what a tokenizer returns, such as a BatchEncoding of transformers 5."""
    return isinstance(prompt, Mapping) and "input_ids" in prompt


def is_message(value: Any) -> bool:
    """Whether it is one message of a chat, with a role."""
    return isinstance(value, Mapping) and "role" in value


def plain(value: Any) -> Any:
    """Tensors and arrays as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def without_padding(ids: Any, mask: Any) -> list[list[int]]:
    """The rows of a tokenizer's encoding, without the places that its attention mask leaves out."""
    rows = ids if ids and not isinstance(ids[0], int) else [ids]
    rows = [list(plain(row)) for row in rows]
    if mask is None:
        return rows
    masks = mask if mask and not isinstance(mask[0], int) else [mask]
    return [[token for token, real in zip(row, plain(kept), strict=True) if real]
            for row, kept in zip(rows, masks, strict=True)]


def encode(tokenizer: Any, prompt: Any) -> Encoded:
    """Text and ids of one prompt. A string is taken as it is, chat messages through the tokenizer's template."""
    prompt = plain(prompt)
    if isinstance(prompt, Mapping):
        return encode(tokenizer, of_vllm(prompt))
    if not hasattr(prompt, "__len__"):
        raise TypeError(f"fast_generate got a prompt that is a {type(prompt).__name__}; pass {KINDS}")
    if len(prompt) == 0:
        raise ValueError("fast_generate got no prompt, or an empty one")
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt).input_ids
    if isinstance(prompt[0], int):
        return tokenizer.decode(prompt), list(prompt)
    text = tokenizer.apply_chat_template([in_text(each) for each in prompt], tokenize=False, add_generation_prompt=True)
    return text, tokenizer(text, add_special_tokens=False).input_ids


def of_vllm(prompt: Mapping[str, Any]) -> Any:
    """What vLLM's dictionary of a prompt says."""
    ids = prompt.get("prompt_token_ids")
    if ids is None and not isinstance(prompt.get("prompt"), str):
        raise TypeError(f"a prompt is a dictionary with {', '.join(map(str, prompt)) or 'nothing'}; pass {KINDS}")
    other = sorted(str(key) for key, value in prompt.items() if key not in OF_VLLM and value)
    if other:
        raise ValueError(f"a prompt has {', '.join(other)}; {IMAGES}")
    return prompt["prompt"] if ids is None else ids


def in_text(message: Any) -> Any:
    """A chat message whose content is one string. ValueError for parts that are no text."""
    if not is_message(message):
        raise TypeError(f"a prompt is a list with a {type(message).__name__}; pass {KINDS}")
    message = plain_message(message)
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    kinds = {part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__ for part in parts}
    if other := sorted(kinds - {"text"}):
        raise ValueError(f"a message has a part of type {other[0]!r}; {IMAGES}")
    return {**message, "content": "".join(part["text"] for part in parts)}
