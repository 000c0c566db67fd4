"""Chat formats under Unsloth's names: the text that they give, and where a model that learns them stops."""

import copy
import re
from typing import Any

import pandas
import pytest
from datasets import Dataset, DatasetDict
from small_models import TINY
from tables import every_row
from template_tokenizers import tokenizer_of
from transformers import AutoTokenizer

from lowmem_grpo.chat_templates import get_chat_template, standardize_data_formats, standardize_sharegpt
from lowmem_grpo.data.chat_template import FORMATS
from lowmem_grpo.data.prompts import DataError

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "Bye"}]
SHAREGPT = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
AS_SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
               for m in CHAT]


def fresh(tokens: tuple[str, ...] = (), bos: str | None = None) -> Any:
    """The embedded tokenizer without a template, with these tokens added."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.chat_template, tokenizer.bos_token = None, bos
    return tokenizer


def rendered(tokenizer: Any, chat: Any = CHAT, prompt: bool = True) -> str:
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt))


RENDERED = {  # of CHAT; / stands for a new line
    "chatml": "<|im_start|>system/Be kind.<|im_end|>/<|im_start|>user/Hi<|im_end|>/<|im_start|>assistant/Ho<|im"
              "_end|>/<|im_start|>user/Bye<|im_end|>/<|im_start|>assistant/",
    "llama-3.1": "<|start_header_id|>system<|end_header_id|>//Be kind.<|eot_id|><|start_header_id|>user<|end_heade"
                 "r_id|>//Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>//Ho<|eot_id|><|start_header_id"
                 "|>user<|end_header_id|>//Bye<|eot_id|><|start_header_id|>assistant<|end_header_id|>//",
    "gemma-3": "<start_of_turn>user/Be kind.//Hi<end_of_turn>/<start_of_turn>model/Ho<end_of_turn>/<start_of_tur"
               "n>user/Bye<end_of_turn>/<start_of_turn>model/",
    "gemma-4": "<|turn>system/Be kind.<turn|>/<|turn>user/Hi<turn|>/<|turn>model/Ho<turn|>/<|turn>user/Bye<turn|"
               ">/<|turn>model/",
    "phi-3": "<|system|>/Be kind.<|end|>/<|user|>/Hi<|end|>/<|assistant|>/Ho<|end|>/<|user|>/Bye<|end|>/<|assi"
             "stant|>/",
    "phi-4": "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>"
             "assistant<|im_sep|>Ho<|im_end|><|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_"
             "sep|>",
    "zephyr": "<|system|>/Be kind.</s>/<|user|>/Hi</s>/<|assistant|>/Ho</s>/<|user|>/Bye</s>/<|assistant|>/",
    "mistral": "[INST] Be kind.//Hi [/INST] Ho</s>[INST] Bye [/INST] ",
    "vicuna": "Be kind. USER: Hi ASSISTANT: Ho</s> USER: Bye ASSISTANT: ",
    "alpaca": "Be kind.//### Instruction:/Hi//### Response:/Ho</s>//### Instruction:/Bye//### Response:/",
}


@every_row("name", RENDERED)
@every_row("mapped", [False, True])
def test_a_format_renders_as_its_family_writes_it(name: str, mapped: bool) -> None:
    tokenizer = fresh((FORMATS[name].end,))
    same = get_chat_template(tokenizer, chat_template=name, mapping=SHAREGPT if mapped else None)
    assert same is tokenizer
    wanted = re.sub(r"/(?!s>|INST)", "\n", RENDERED[name])
    assert rendered(tokenizer, AS_SHAREGPT if mapped else CHAT) == wanted
    assert tokenizer.eos_token == FORMATS[name].end


@every_row("name", FORMATS)
def test_every_name_ends_turns_with_a_token_that_the_tokenizer_has(name: str) -> None:
    tokenizer = get_chat_template(fresh(bos="<|im_start|>"), name)
    whole = rendered(tokenizer, CHAT[1:3], prompt=False)
    assert whole.rstrip().endswith(tokenizer.eos_token)
    assert whole.startswith("<|im_start|>") == (FORMATS[name].bos or FORMATS[name].turn.startswith("<|im_start|>"))
    assert whole.count("Hi") == whole.count("Ho") == 1
    assert len(tokenizer(tokenizer.eos_token, add_special_tokens=False).input_ids) == 1
    assert FORMATS[name].open_ended or whole.count(tokenizer.eos_token) == 2


def test_a_tokenizer_that_has_the_format_keeps_its_own_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    before = tokenizer.chat_template
    assert get_chat_template(tokenizer, "qwen-2.5").chat_template == before
    wanted = rendered(tokenizer)
    assert rendered(get_chat_template(tokenizer, "qwen3", mapping=SHAREGPT), AS_SHAREGPT) == wanted
    for name, form in (("llama3_1", "llama-3.1"), ("gemma3", "gemma-3"), ("gemma4", "gemma-4"), ("phi3", "phi-3"),
                       ("lfm2", "lfm-2"), ("qwen3_5_think", "chatml")):
        shipped = tokenizer_of(name)
        assert get_chat_template(copy.deepcopy(shipped), form).chat_template == shipped.chat_template, name


@every_row(("name", "begins"), [
    ("phi-3", "<|user|>\nHi"), ("zephyr", "<|user|>\nHi"), ("phi-4", "<|im_start|>user<|im_sep|>Hi")])
def test_a_format_that_only_begins_like_the_tokenizers_own_is_set(name: str, begins: str) -> None:
    tokenizer = get_chat_template(AutoTokenizer.from_pretrained(TINY), name)
    assert rendered(tokenizer, [{"role": "user", "content": "Hi"}]).startswith(begins)


def test_a_default_message_of_the_system_is_for_chats_without_one() -> None:
    for tokenizer in (fresh(), AutoTokenizer.from_pretrained(TINY)):
        get_chat_template(tokenizer, "chatml", system_message='Say "é".')
        assert rendered(tokenizer, CHAT[1:2]).startswith('<|im_start|>system\nSay "é".<|im_end|>\n<|im_start|>user')
        assert "é" not in rendered(tokenizer)


@pytest.mark.parametrize(("end", "wanted"), [("<end>", "<end>"), ("eos_token", "<|im_end|>"),
                                             ("unknown", "<|im_end|>")])
def test_a_template_of_ones_own_is_taken_with_its_end_token(end: str, wanted: str) -> None:
    own = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    tokenizer = get_chat_template(fresh(("<end>",)), chat_template=(own, end), mapping=SHAREGPT)
    assert rendered(tokenizer, AS_SHAREGPT[1:3]) == f"user: Hi{wanted}assistant: Ho{wanted}"


def test_content_in_parts_is_read_as_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    assert rendered(get_chat_template(fresh(), "gemma-3"), parts).startswith("<start_of_turn>user\nHi")


@pytest.mark.parametrize(("options", "message"), [
    ({"chat_template": "lama-3"}, "did you mean llama-3"), ({"chat_template": ("x",)}, "pass a name, or"),
    ({"chat_template": None}, "chat_template is None; pass a name"), ({"chat_template": 3}, "pass a name, or"),
    ({"mapping": {"speaker": "from"}}, "mapping has 'speaker'; its keys are role"),
])
def test_what_is_no_format_is_refused_with_the_names(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_chat_template(fresh(), **options)


# Conversations under ShareGPT's names become chat messages, whatever holds them

TOLD = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"},
        {"from": "tool", "value": "T"}]
READ = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "T"}]
HOLDERS: dict[str, Any] = {
    "list": (lambda rows: rows, list), "Dataset": (Dataset.from_list, list),
    "streamed": (lambda rows: Dataset.from_list(rows).to_iterable_dataset(), list),
    "DatasetDict": (lambda rows: DatasetDict(train=Dataset.from_list(rows)), lambda found: list(found["train"])),
}


@every_row("holder", HOLDERS)
@every_row(("column", "messages"), [("conversations", TOLD), ("messages", READ)])
def test_every_holder_and_spelling_gives_the_same_messages(holder: str, column: str, messages: Any) -> None:
    make, read = HOLDERS[holder]
    for call in (standardize_sharegpt, standardize_data_formats):
        found = read(call(make([{column: messages, "id": 1}, {column: messages[1:], "id": 2}])))
        assert [row[column] for row in found] == [READ, READ[1:]]
        assert [row["id"] for row in found] == [1, 2]


def test_other_names_of_roles_can_be_given() -> None:
    rows = [{"conversations": [{"from": "Alice", "value": "Q"}, {"from": "Bob", "value": "A"}]}]
    (found,) = standardize_sharegpt(rows, aliases_for_user=["alice"], aliases_for_assistant=["bob"])
    assert [message["role"] for message in found["conversations"]] == ["user", "assistant"]


def test_tool_calls_names_and_thoughts_of_messages_stay() -> None:
    said = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "name": "f", "tool_call_id": "1", "content": "3"},
            {"role": "assistant", "content": "3", "reasoning_content": "so"}]
    rows = [{"messages": said}, {"messages": None}]
    assert [row["messages"] for row in standardize_sharegpt(rows)] == [said, []]
    assert standardize_sharegpt(Dataset.from_list(rows))[1]["messages"] == []


def test_an_empty_thought_stays_empty_since_templates_cannot_read_none() -> None:
    rows = [{"messages": [{"role": "assistant", "content": "4", "thinking": ""}]}]
    assert standardize_sharegpt(Dataset.from_list(rows))[0] == rows[0]


@every_row("dataset", [None, (), pandas.DataFrame({"messages": [READ]}), iter([{"messages": READ}])])
def test_what_is_no_dataset_of_conversations_is_refused(dataset: Any) -> None:
    with pytest.raises(DataError, match=f"the dataset is a {type(dataset).__name__}; pass a datasets.Dataset, or"):
        standardize_sharegpt(dataset)


@pytest.mark.parametrize(("row", "message"), [
    ({"messages": "Q"}, "a message is a str; needed are dicts"), ({"messages": ["Q"]}, "a message is a str"),
    ({"question": "Q"}, "columns are question; one of conversations"),
    ({"conversations": [{"speaker": "x", "value": "Q"}]}, "a message has speaker, value; needed are role and content"),
])
def test_what_is_no_conversation_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        standardize_sharegpt([row])
