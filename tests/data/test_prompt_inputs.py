"""Every door for prompts reads a text alike: one begin token, no end, and what the assistant began is continued.

Messages lose the keys that Arrow filled: each is what it was before it went through Arrow."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from small_models import TINY
from tables import every_row
from template_tokenizers import FAMILY_CHATS, TALK, tokenizer_of
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from trl.data_utils import apply_chat_template

from lowmem_grpo.data.examples import Example, ExampleEncoder
from lowmem_grpo.data.prompt_inputs import encode, plain_message, with_object
from lowmem_grpo.data.prompts import PromptEncoder
from lowmem_grpo.data.texts import ConversationEncoder, TextEncoder
from lowmem_grpo.environments.renderer import PlainRenderer, Renderer, RendererError
from lowmem_grpo.rollout.rollout_func import RolloutFunction
from lowmem_grpo.server.openai.request import plain
from lowmem_grpo.server.openai.token_texts import TokenTexts

AROUND = {  # what a tokenizer writes around a text
    "nothing": ("", ""), "Llama 3": ("<s>", ""), "add_eos_token": ("<s>", "</s>"), "an end alone": ("", "</s>"),
    "GLM-4": ("[gMASK]<sop>", ""),
}


def with_around(name: str) -> Any:
    """The embedded tokenizer that writes this around a text."""
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    marks = ["<s>", "</s>", "[gMASK]", "<sop>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "bos_token": "<s>", "eos_token": "</s>"})
    before, after = ([mark for mark in marks if mark in part] for part in AROUND[name])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after], pair=None,
        special_tokens=[(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in marks])
    return tokenizer


def begin_of(tokenizer: Any, name: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(mark) for mark in ("<s>", "[gMASK]", "<sop>") if mark in AROUND[name][0]]


def of_rollout_function(tokenizer: Any, prompt: Any) -> list[int]:
    trainer = SimpleNamespace(tokenizer=tokenizer, args=SimpleNamespace(chat_template_kwargs=None))
    return RolloutFunction(lambda prompts, trainer: {}, trainer).encoded(prompt, None)


DOORS: dict[str, Callable[[Any, Any], list[int]]] = {
    "fast_generate": lambda tokenizer, prompt: encode(tokenizer, prompt)[1],
    "GRPO and its evaluation": lambda tokenizer, prompt: PromptEncoder(tokenizer, 999).of_any_length(
        {"prompt": prompt}).ids,  # type: ignore[union-attr]
    "rollout_func": of_rollout_function,
}
DOORS_OF_TEXTS = DOORS | {
    "environments": lambda tokenizer, prompt: PlainRenderer(tokenizer).first(prompt),
    "text completions of a server": lambda tokenizer, prompt: TokenTexts(tokenizer).encode(prompt),
}
DOORS_OF_CHATS = DOORS | {
    "environments and chats of a server": lambda tokenizer, prompt: Renderer(tokenizer).first(prompt)}


@every_row("door", DOORS_OF_TEXTS)
@every_row("around", AROUND)
def test_a_text_gets_one_begin_and_no_end_also_where_a_template_rendered_it(door: str, around: str) -> None:
    tokenizer = with_around(around)
    before = begin_of(tokenizer, around)
    wanted = [*before, *tokenizer("1 + 1 = ", add_special_tokens=False).input_ids]
    assert DOORS_OF_TEXTS[door](tokenizer, "1 + 1 = ") == wanted
    assert DOORS_OF_TEXTS[door](tokenizer, AROUND[around][0] + "1 + 1 = ") == wanted


@every_row("around", AROUND)
def test_texts_of_fine_tuning_begin_once_and_end_once(around: str) -> None:
    tokenizer = with_around(around)
    before = begin_of(tokenizer, around)
    end = tokenizer.convert_tokens_to_ids("</s>")
    wanted = [*before, *tokenizer("a b", add_special_tokens=False).input_ids, end]
    for kind, row in ((TextEncoder, {"text": "a b"}), (TextEncoder, {"text": AROUND[around][0] + "a b</s>"}),
                      (ExampleEncoder, {"prompt": "a", "completion": " b"})):
        found = kind(tokenizer, 99, [end]).encode(row)
        assert isinstance(found, Example) and [*found.ids, *found.completion_ids] == wanted


PREFILLED = [*TALK[:3], {"role": "assistant", "content": "The sum is"}]
CHATS = {"qwen2_5": None, "llama3_2": None, "gemma3": None, "qwen3": None, "glm4": FAMILY_CHATS["glm4"],
         "mistral": FAMILY_CHATS["mistral"]}


@every_row("name", CHATS)
@every_row("door", DOORS_OF_CHATS)
def test_what_the_assistant_began_is_continued_as_transformers_and_trl_do(name: str, door: str) -> None:
    chat = CHATS[name]
    tokenizer = copy.deepcopy(tokenizer_of(name)) if chat is None else chat.tokenizer()
    text = tokenizer.apply_chat_template(PREFILLED, tokenize=False, continue_final_message=True)
    assert text.endswith("The sum is") and apply_chat_template({"prompt": PREFILLED}, tokenizer)["prompt"] == text
    assert DOORS_OF_CHATS[door](tokenizer, PREFILLED) == tokenizer(text, add_special_tokens=False).input_ids


def test_a_completion_goes_on_with_what_the_assistant_began() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    for completion in (" 7.", [{"role": "assistant", "content": " 7."}]):
        found = ExampleEncoder(tokenizer, 999, [tokenizer.eos_token_id]).encode(
            {"prompt": PREFILLED, "completion": completion})
        assert isinstance(found, Example) and tokenizer.decode(found.completion_ids) == " 7.<|im_end|>"
        assert tokenizer.decode(found.ids).endswith("assistant\nThe sum is")


def test_a_prompt_that_ends_with_tool_calls_is_refused() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    for door, error in (("fast_generate", ValueError), ("environments and chats of a server", RendererError)):
        with pytest.raises(error, match="ends with tool calls; add a message of the role tool"):
            DOORS_OF_CHATS[door](tokenizer_of("qwen2_5"), asked)


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sun"}]


@every_row("template", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "lfm2_v2", "glm4moe"])
def test_a_history_of_calls_is_what_transformers_writes_of_objects_and_empty_texts(template: str) -> None:
    tokenizer = tokenizer_of(template)
    plain = called({"city": "Rome"})
    plain[1]["content"] = ""
    wanted = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert encode(tokenizer, called({"city": "Rome"}))[0] == wanted
    if template in ("qwen3_5_think", "lfm2_v2", "glm4moe"):  # which refuse arguments that are JSON in a text
        assert encode(tokenizer, called('{"city": "Rome"}'))[0] == wanted


DUMPS = "{{ c.function.arguments | tojson }}"
PRINTS = "{{ c.function.arguments }}"
CALLS = ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
         "<{{ c.function.name }} WRITE>{% endfor %}{% endfor %}")
VALUES = [  # what a message has, and the object and the text that are meant
    ('{"city": "Rome"}', {"city": "Rome"}, '{"city": "Rome"}'),
    ({"city": "Rome"}, {"city": "Rome"}, '{"city": "Rome"}'),
    ('{"b":1.0,"a":"Z\\u00fcrich"}', {"b": 1.0, "a": "Zürich"}, '{"b":1.0,"a":"Z\\u00fcrich"}'),
    ('{"a": "{\\"b\\": 1}", "n": null}', {"a": '{"b": 1}', "n": None}, '{"a": "{\\"b\\": 1}", "n": null}'),
    ({"a": '{"b": 1}'}, {"a": '{"b": 1}'}, '{"a": "{\\"b\\": 1}"}'), ("", {}, "{}"), (None, {}, "{}"),
    *((text, text, text) for text in ("[1, 2]", "null", "city=Rome", '"{}"')),
]


@every_row("given, as_object, as_text", VALUES)
@every_row("door", DOORS_OF_CHATS)
def test_arguments_are_an_object_or_text_as_the_template_writes_them(
    door: str, given: Any, as_object: Any, as_text: str
) -> None:
    """Plain transformers renders, in the form that its documentation names for such a template."""
    for write, meant in ((DUMPS, as_object), (PRINTS, as_text)):
        tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
        tokenizer.chat_template = CALLS.replace("WRITE", write)
        wanted = tokenizer.apply_chat_template(with_content(called(meant)), tokenize=False)
        assert tokenizer.decode(DOORS_OF_CHATS[door](tokenizer, called(given))) == wanted


def with_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": message.get("content") or ""} for message in messages]


OF_OBJECTS = ("qwen2_5", "llama3_1", "llama3_2", "gptoss", "qwen3", "qwen3_5_think", "gemma4", "glm4moe", "lfm2_2_5",
              "nemotron_3_nano")


@every_row("name", OF_OBJECTS)
def test_arguments_as_text_are_trained_and_served_as_the_object_that_they_mean(name: str) -> None:
    """As vLLM's server and transformers' documentation pass them; our server and fine-tuning render the same."""
    tokenizer, talk = tokenizer_of(name), called('{"city": "Rome", "days": 2}')
    answered = [*talk, {"role": "assistant", "content": "Sun."}]
    plain_talk = with_content(called({"city": "Rome", "days": 2}))
    wanted = tokenizer.apply_chat_template(plain_talk, tokenize=False, add_generation_prompt=True)
    assert encode(tokenizer, talk)[0] == wanted
    assert tokenizer.decode(Renderer(tokenizer).first(plain(talk))) == wanted
    found = ConversationEncoder(tokenizer, 999, [tokenizer.eos_token_id]).encode({"messages": answered})
    assert isinstance(found, Example)
    assert found.text == tokenizer.apply_chat_template([*plain_talk, answered[-1]], tokenize=False)


@every_row("name", ["deepseekv3", "deepseek_r1_distill"])
def test_templates_that_want_text_get_it_from_an_object_too(name: str) -> None:
    tokenizer, texts = tokenizer_of(name), called('{"city": "Rome"}')
    wanted = tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True)
    assert encode(tokenizer, called({"city": "Rome"}))[0] == wanted == encode(tokenizer, texts)[0]


def test_several_calls_in_both_forms_are_each_read() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    mixed, objects = called('{"city": "Rome"}'), called({"city": "Rome"})
    for talk in (mixed, objects):
        talk[1]["tool_calls"].append({"name": "now", "arguments": {"zone": "UTC"}})
    wanted = tokenizer.apply_chat_template(with_content(objects), tokenize=False, add_generation_prompt=True)
    assert encode(tokenizer, mixed)[0] == wanted and '\\"' not in wanted


@every_row("name", ["gemma4", "gemma4_v5", "diffusion_gemma", "muse_glimmer"])
def test_results_of_parallel_calls_are_served_with_the_names_that_are_trained(name: str) -> None:
    """Plain transformers, with the ids that such templates look the name up by: a served call has an id as well."""
    tokenizer, talk = tokenizer_of(name), with_content(called({"city": "Rome"}))
    talk[1]["tool_calls"].append({"function": {"name": "now", "arguments": {"zone": "UTC"}}})
    for number, call in enumerate(talk[1]["tool_calls"]):
        call.update(id=f"id{number}", type="function")
    results = [{"role": "tool", "tool_call_id": f"id{number}", "content": said}
               for number, said in enumerate(("Sun", "9"))]
    talk[2:] = results
    wanted = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(Renderer(tokenizer).first(plain([*talk[:2], *results[::-1]]))) == wanted
    assert encode(tokenizer, talk)[0] == wanted


def test_a_history_of_calls_that_a_template_leaves_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leaves out the call of weather; set tokenizer\.chat_template"):
        encode(tokenizer_of("lfm2"), called({"city": "Rome"}))


@every_row("call", [
    {"type": "function", "function": {"arguments": {}}}, {"id": 1}, "weather", {"function": {"name": None}},
    {"function": "weather"},
])
def test_a_call_that_names_no_function_is_refused_in_words(call: Any) -> None:
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ValueError, match=r'a call is a dict such as .*"name"'):
        encode(tokenizer_of("qwen3"), [*messages, {"role": "tool", "content": "No."}])


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi", "name": "Ada"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "1 + 1"},
]


def test_what_went_through_arrow_is_what_it_was() -> None:
    through = Dataset.from_list([{"messages": MESSAGES}])[0]["messages"]
    assert through != MESSAGES and [plain_message(message) for message in through] == MESSAGES


def test_parts_of_a_content_lose_the_keys_of_other_parts() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "image": None}]}
    assert plain_message(message) == {"role": "user", "content": [{"type": "text", "text": "Hi"}]}


@pytest.mark.parametrize(("message", "expected"), [
    ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL], "content": None}),
    ({"role": "user", "content": None}, {"role": "user", "content": None}),
    ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
    ({"role": "knight", "name": None}, {"role": "knight", "name": None}), ("text", "text"),
])
def test_a_missing_content_beside_calls_is_none_and_what_is_no_message_stays(message: Any, expected: Any) -> None:
    assert plain_message(message) == expected


def test_a_server_takes_messages_of_a_dataset_for_those_that_were_put_in() -> None:
    through = Dataset.from_list([{"messages": MESSAGES}])[0]["messages"]
    assert plain(through) == plain(MESSAGES)


def test_arguments_that_are_nested_too_deeply_stay_a_text() -> None:
    assert with_object({"arguments": "[" * 10**5}) == {"arguments": "[" * 10**5}
