"""Unsloth's chat helpers: `get_chat_template` sets the chat format of a model family by its name in Unsloth, and
`standardize_sharegpt` converts ShareGPT messages ("from", "value", "human", "gpt") to role and content."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.config.unsupported import suggestion
from lowmem_grpo.data.files import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatFormat:
    """The text around each turn of a chat. In it, {role} stands for the role's name."""

    turn: str  # before the content
    end: str  # the token that ends a turn
    newline: str = "\n"  # after the end
    open_ended: bool = False  # only the assistant's turns have an end token
    roles: tuple[str, str, str] = ("system", "user", "assistant")  # the format's names for these roles
    system: bool = True  # there are system turns; otherwise the system text begins the first user turn
    bos: bool = False  # the chat begins with the tokenizer's BOS token
    turns: tuple[str, str, str] = ("", "", "")  # used instead of `turn` for system, user and assistant, if not empty

    def before(self, place: int) -> str:
        return self.turns[place] or self.turn.replace("{role}", self.roles[place])


GEMMA = ("system", "user", "model")
CHATML = ChatFormat("<|im_start|>{role}\n", "<|im_end|>")
LLAMA_3 = ChatFormat("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "", bos=True)
GEMMA_3 = ChatFormat("<start_of_turn>{role}\n", "<end_of_turn>", roles=GEMMA, system=False, bos=True)
GEMMA_4 = ChatFormat("<|turn>{role}\n", "<turn|>", roles=GEMMA, bos=True)
PHI_3 = ChatFormat("<|{role}|>\n", "<|end|>")
PHI_4 = ChatFormat("<|im_start|>{role}<|im_sep|>", "<|im_end|>", "")
ZEPHYR = ChatFormat("<|{role}|>\n", "</s>")
MISTRAL = ChatFormat("", "</s>", "", True, system=False, bos=True, turns=("", "[INST] ", " [/INST] "))
VICUNA = ChatFormat("", "</s>", " ", True, turns=("", "USER: ", "ASSISTANT: "))
ALPACA = ChatFormat("", "</s>", "\n\n", True, turns=("", "### Instruction:\n", "### Response:\n"))
NAMES = {
    CHATML: "chatml qwen-2.5 qwen-25 qwen25 qwen2.5 qwen-3 qwen3 qwen3-instruct qwen3-thinking yi-chat lfm-2 lfm-2.5",
    LLAMA_3: "llama-3 llama3 llama-3.1 llama-31 llama-3.2 llama-32 llama-3.3 llama-33",
    GEMMA_3: "gemma gemma2 gemma-3 gemma3 gemma-3n gemma3n", GEMMA_4: "gemma-4 gemma4 gemma-4-thinking gemma4-thinking",
    PHI_3: "phi-3 phi-3.5 phi-35", PHI_4: "phi-4", ZEPHYR: "zephyr", MISTRAL: "mistral", VICUNA: "vicuna",
    ALPACA: "alpaca",
}
FORMATS = {name: form for form, names in NAMES.items() for name in names.split()}
MAPPING = {"role": "role", "content": "content", "user": "user", "assistant": "assistant"}

READ = """{%- set own = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- set said = message[keys.content] or '' -%}
{%- set role = keys.roles[message[keys.role]] if message[keys.role] in keys.roles else message[keys.role] -%}
{%- set text = said if said is string else said | map(attribute='text') | join -%}
{%- set own.messages = own.messages + [{'role': role, 'content': text}] -%}
{%- endfor -%}
{%- if keys.system is not none and own.messages and own.messages[0].role != 'system' -%}
{%- set own.messages = [{'role': 'system', 'content': keys.system}] + own.messages -%}
{%- endif -%}
"""
WRITE = """{%- if form.fold and own.messages | length > 1 and own.messages[0].role == 'system' -%}
{%- set both = own.messages[0].content + '\\n\\n' + own.messages[1].content -%}
{%- set own.messages = [{'role': own.messages[1].role, 'content': both}] + own.messages[2:] -%}
{%- endif -%}
{%- if form.bos and bos_token -%}{{- bos_token -}}{%- endif -%}
{%- for message in own.messages -%}
{%- if message.role == 'assistant' -%}{{- form.assistant + message.content + form.end -}}
{%- elif message.role == 'system' -%}{{- form.system + message.content + form.rest -}}
{%- else -%}{{- form.user + message.content + form.rest -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- form.assistant -}}{%- endif -%}
"""


def get_chat_template(
    tokenizer: Any, chat_template: str | tuple[str, str] = "chatml", mapping: dict[str, str] | None = None,
    map_eos_token: bool = True, system_message: str | None = None, patch_saving: bool = True,
    use_zoo_tokenizer_patch: bool | None = None,
) -> Any:
    """Set a chat template on the tokenizer and return it. `chat_template` is a name, or (template, end token).

    A tokenizer that already has the named format keeps its own template. `mapping` gives the dataset's names of keys
    and roles, such as {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}. `map_eos_token` makes
    the format's end token the EOS token; if the tokenizer lacks that token, the old EOS token ends the turns.
    `system_message` is added to conversations without one. The options after it have no effect. ValueError for an
    unknown name.
    """
    if other := sorted(set(mapping or {}) - MAPPING.keys()):
        raise ValueError(f"mapping has {other[0]!r}; its keys are {', '.join(MAPPING)}")
    keys = MAPPING | (mapping or {})
    plain = keys == MAPPING and system_message is None
    if isinstance(chat_template, str):
        form = format_of(chat_template)
        has_it = has_format(tokenizer, form, end := end_of(tokenizer, form, map_eos_token))
        logger.info("chat template %s: %s", chat_template, "the tokenizer's own has this format and stays" if has_it
                    else "made for this tokenizer")
        body = str(tokenizer.chat_template) if has_it else written(form, end)
        stop = form.end
    else:
        if not isinstance(chat_template, (tuple, list)) or [*map(type, chat_template)] != [str, str]:
            raise ValueError(f"chat_template is {chat_template!r}; pass a name, or (template, end token)")
        (body, stop), has_it = chat_template, True
    if map_eos_token and is_token(tokenizer, stop) and tokenizer.eos_token != stop:
        logger.info("end token: %r instead of %r", stop, tokenizer.eos_token)
        tokenizer.eos_token = stop
    if not has_it:
        body = reading(keys, system_message) + body
    elif not plain:
        body = reading(keys, system_message) + "{%- set messages = own.messages -%}\n" + body
    tokenizer.chat_template = body
    return tokenizer


def has_format(tokenizer: Any, form: ChatFormat, end: str) -> bool:
    """Return whether the tokenizer's own template writes a user turn in this format, apart from white space."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Q"}], tokenize=False)
    except Exception:  # noqa: BLE001 - it has none, or one that raises
        return False
    turn = form.before(1) + "Q" + ("" if form.open_ended else end)
    return "".join(turn.split()) in "".join(text.split())


def format_of(name: str) -> ChatFormat:
    """Return the format of this name; ValueError, with the known names, for an unknown one."""
    if name.lower() not in FORMATS:
        raise ValueError(f"chat_template is {name!r}; known are {', '.join(FORMATS)}. For another one pass (template, "
                         f"end token), or set tokenizer.chat_template yourself{suggestion(name.lower(), FORMATS)}")
    return FORMATS[name.lower()]


def is_token(tokenizer: Any, text: str) -> bool:
    number = tokenizer.convert_tokens_to_ids(text)
    return number is not None and number != tokenizer.unk_token_id


def end_of(tokenizer: Any, form: ChatFormat, map_eos_token: bool) -> str:
    """Return the format's end token; if the tokenizer lacks that token and `map_eos_token` is set, the EOS token."""
    missing = map_eos_token and not is_token(tokenizer, form.end) and tokenizer.eos_token is not None
    return str(tokenizer.eos_token) if missing else form.end


def written(form: ChatFormat, end: str) -> str:
    """Return the Jinja code that writes the messages in this format."""
    system, user, assistant = (form.before(place) for place in range(3))
    rest = form.newline if form.open_ended else end + form.newline
    return constant("form", {"system": system, "user": user, "assistant": assistant, "end": end + form.newline,
                             "rest": rest, "fold": not form.system, "bos": form.bos}) + WRITE


def reading(keys: dict[str, str], system_message: str | None) -> str:
    """Return the Jinja code that reads messages with the dataset's names of keys and roles."""
    roles = {keys["user"]: "user", keys["assistant"]: "assistant"}
    return constant("keys", {"role": keys["role"], "content": keys["content"], "roles": roles,
                             "system": system_message}) + READ


def constant(name: str, value: dict[str, Any]) -> str:
    """Return a Jinja statement that sets the variable `name` to `value`, written as JSON with `none` for `null`."""
    text = json.dumps(value, ensure_ascii=False)
    return "{%- set " + name + " = " + text.replace(": null", ": none") + " -%}\n"


# ShareGPT conversations

COLUMNS = ("conversations", "messages", "conversation")
ALIASES = {
    "system": ("system",), "user": ("user", "human", "input"), "assistant": ("gpt", "assistant", "output", "model"),
}
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")  # further keys of messages


def standardize_sharegpt(
    dataset: Any, tokenizer: Any = None, aliases_for_system: Sequence[str] = ALIASES["system"],
    aliases_for_user: Sequence[str] = ALIASES["user"], aliases_for_assistant: Sequence[str] = ALIASES["assistant"],
    batch_size: int = 1000, num_proc: int | None = None,
) -> Any:
    """Return the dataset with each conversation as a list of {"role", "content"}, in the same column.

    `dataset` is a Dataset, an IterableDataset, a DatasetDict or a list of rows. `aliases_for_user` and the like are the
    dataset's names for a role; other roles, such as "tool", are kept. `tokenizer` has no effect. DataError if no column
    holds conversations.
    """
    names = {alias.lower(): role for role, aliases in zip(
        ALIASES, (aliases_for_system, aliases_for_user, aliases_for_assistant), strict=True) for alias in aliases}
    if isinstance(dataset, list):
        column = column_of(list(dataset[0]) if dataset else [])
        return [row | {column: [message_of(each, names) for each in row[column] or []]} for row in dataset]
    if isinstance(dataset, dict):
        return type(dataset)({key: standardize_sharegpt(
            part, tokenizer, aliases_for_system, aliases_for_user, aliases_for_assistant, batch_size, num_proc
        ) for key, part in dataset.items()})
    if not hasattr(dataset, "column_names"):
        raise DataError(f"the dataset is a {type(dataset).__name__}; pass a datasets.Dataset, or a list of rows")
    column = column_of(dataset.column_names or list(next(iter(dataset), {})))

    def convert(rows: dict[str, Any]) -> dict[str, Any]:
        return {column: [[message_of(each, names) for each in row or []] for row in rows[column]]}

    options = {"num_proc": num_proc} if hasattr(dataset, "__len__") else {}
    return dataset.map(convert, batched=True, batch_size=batch_size, **options)


standardize_data_formats = standardize_sharegpt  # Unsloth's newer name


def column_of(columns: list[str]) -> str:
    for column in COLUMNS:
        if column in columns:
            return column
    raise DataError(f"the dataset's columns are {', '.join(columns)}; one of {', '.join(COLUMNS)} must hold the "
                    "conversations: rename yours with dataset.rename_column(NAME, 'conversations')")


def message_of(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return a message with standard keys; `names` maps role aliases to roles. DataError if a needed key is missing."""
    if not isinstance(message, dict):
        raise DataError(f"a message is a {type(message).__name__}; needed are dicts with role and content, or from and "
                        "value")
    role = next((message[key] for key in ROLE_KEYS if message.get(key) is not None), None)
    content = next((message[key] for key in CONTENT_KEYS if message.get(key) is not None), None)
    if role is None or (content is None and not message.get("tool_calls")):
        raise DataError(f"a message has {', '.join(message)}; needed are role and content, or from and value")
    kept = {key: message[key] for key in KEPT if message.get(key) not in (None, [])}  # a dataset makes "" None else
    return {"role": names.get(str(role).lower(), role), "content": content, **kept}
