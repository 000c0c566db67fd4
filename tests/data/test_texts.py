"""What is trained of conversations and texts: each answer through the token at which sampling stops, nothing else."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest
from tables import every_row
from template_tokenizers import FAMILY_CHATS, FOLDER, NAMES, TALK, tokenizer_of

from lowmem_grpo.data.examples import Example, ExampleEncoder, Examples, each_of
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.texts import AnswerEncoder, ConversationEncoder, TextEncoder
from lowmem_grpo.memory.families import FAMILIES
from lowmem_grpo.trainer.responses import ResponsesOnly, parts_of
from lowmem_grpo.trainer.sft import as_groups

SYSTEM = {"role": "system", "content": "Be brief."}
EMPTY = "<think>\n\n</think>\n\n"
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}}}
CALLS = {"role": "assistant", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]}
WITH_CALL = [SYSTEM, {"role": "user", "content": "Rome?"}, CALLS | {"content": None},
             {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "It is sunny."}]
OWN_TEMPLATE = {"qwen3": "qwen3", "qwen3_5_text": "qwen3_5_think", "gpt_oss": "gptoss"}  # of TRL's


def encoder_of(tokenizer: Any, ends: Sequence[str], kind: Any = ConversationEncoder) -> Any:
    made = kind(tokenizer, 2000, tokenizer.convert_tokens_to_ids(list(ends)))
    made.assistant_only = True
    return made


def trained(tokenizer: Any, found: Example | str) -> list[str]:
    """The trained runs of an example as text."""
    assert isinstance(found, Example), found
    pairs = zip(found.trained or [True] * len(found.completion_ids), found.completion_ids, strict=True)
    runs = [(counts, [token for _, token in run]) for counts, run in groupby(pairs, lambda pair: pair[0])]
    return [tokenizer.decode(ids) for counts, ids in runs if counts]


def test_every_family_that_trains_has_a_template_here() -> None:
    assert {name for name, row in FAMILIES.items() if not (row.refused or row.vision)} == {
        *FAMILY_CHATS, *OWN_TEMPLATE}


@every_row("family", FAMILY_CHATS)
def test_every_answer_of_every_family_is_trained_through_its_end_and_the_ids_are_those_of_transformers(
    family: str
) -> None:
    chat = FAMILY_CHATS[family]
    tokenizer = chat.tokenizer()
    encoder = encoder_of(tokenizer, chat.ends)
    found = encoder.encode({"messages": TALK})
    assert trained(tokenizer, found) == list(chat.answers)
    whole = tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]
    ids = [*found.ids, *found.completion_ids]
    added = [] if chat.answers[1] in tokenizer.decode(whole) else [tokenizer.eos_token_id]
    assert ids == [*whole, *added][:len(ids)] and ids[-1] in encoder.end_ids


@every_row("family", FAMILY_CHATS)
def test_responses_of_every_family_are_trained_through_their_end(family: str) -> None:
    chat = FAMILY_CHATS[family]
    tokenizer = chat.tokenizer()
    inner = encoder_of(tokenizer, chat.ends, TextEncoder)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    found = ResponsesOnly(inner, *parts_of(tokenizer)).encode({"text": text})
    assert [text.partition("<|end|>")[0].strip() for text in trained(tokenizer, found)] == [
        text.partition("<|end|>")[0].strip() for text in chat.answers]
    assert all(any(end in text for end in chat.ends) for text in trained(tokenizer, found))


QWENS = {"qwen3": ["3.<|im_end|>", EMPTY + "7.<|im_end|>"], "qwen3_5_nothink": ["3.<|im_end|>", "7.<|im_end|>"],
         "qwen3_5_think": ["3.<|im_end|>", "</think>\n\n7.<|im_end|>"],
         "qwen3_6": ["3.<|im_end|>", "</think>\n\n7.<|im_end|>"], "llama3_2": ["3.<|eot_id|>", "7.<|eot_id|>"]}


@every_row("template", QWENS)
@every_row("before", [[], [SYSTEM], [SYSTEM, {"role": "assistant", "content": "Ask."}],
                      [{"role": "assistant", "content": "Ask."}]])
def test_conversations_of_which_a_template_refuses_the_beginning_are_trained(template: str, before: Any) -> None:
    tokenizer = tokenizer_of(template)
    found = encoder_of(tokenizer, [tokenizer.eos_token]).encode({"messages": before + TALK})
    greeting = [f"Ask.{tokenizer.eos_token}"] if before and before[-1]["role"] == "assistant" else []
    assert trained(tokenizer, found) == greeting + QWENS[template]


def test_where_a_template_leaves_earlier_thoughts_out_each_answer_is_trained_behind_what_it_is_sampled_from(
    caplog: pytest.LogCaptureFixture
) -> None:
    thought = [TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3."}, *TALK[2:]]
    tokenizer = tokenizer_of("qwen3")
    found = encoder_of(tokenizer, ["<|im_end|>"]).encode({"messages": thought})
    assert isinstance(found, Examples) and len(found.parts) == 2
    for place, part in zip((1, 3), found.parts, strict=True):
        prompt = tokenizer.apply_chat_template(thought[:place], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(part.ids) == prompt and part.trained is None
    assert [tokenizer.decode(part.completion_ids) for part in found.parts] == [
        "<think>\nhm\n</think>\n\n3.<|im_end|>", EMPTY + "7.<|im_end|>"]
    assert "each answer is trained by itself" in caplog.text
    assert as_groups([found])[1].prompt_ids == found.parts[1].ids


def test_an_answer_that_cannot_be_told_apart_is_refused() -> None:
    tokenizer = tokenizer_of("diffusion_gemma")  # two messages of the assistant are one turn there
    with pytest.raises(DataError, match="message 3 of a conversation differently"):
        encoder_of(tokenizer, ["<turn|>"]).encode({"messages": [TALK[0], TALK[1], TALK[1]]})


ANSWER = re.compile(r"^(?:<\uff5cAssistant\uff5c>|<\|start\|>assistant|\s|</?think>)+")  # what a prompt ends with
PATCHED = {"qwen3", "qwen2_5", "qwen3_instruct_2507", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
           "llama3", "phi3", "phi3_5", "deepseekv3", "lfm2_v2", "gemma3", "cohere2", "gptoss"}
THOUGHTFUL = {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"}


def talks(template: str) -> Iterator[list[dict[str, str]]]:
    """Conversations of one to four turns, with thoughts where the template has them; one goes on after its end."""
    chance = random.Random(template)
    for count in (1, 2, 2, 3, 4):
        talk: list[dict[str, str]] = [] if template.startswith("gemma") or chance.random() < 0.5 else [dict(SYSTEM)]
        for turn in range(count):
            talk += [{"role": "user", "content": f"{turn} + {chance.randrange(9)}?"},
                     {"role": "assistant", "content": f"It is {chance.randrange(20)}."}]
            if template in THOUGHTFUL and chance.random() < 0.5:
                talk[-1]["reasoning_content"] = f"I add {turn}"
        yield talk
    if "phi" not in template:
        yield [*talk, {"role": "user", "content": "Thanks"}]


@every_row("template", sorted(PATCHED))
def test_what_is_trained_is_what_trls_training_template_marks(template: str) -> None:
    tokenizer = tokenizer_of(template)
    training = (FOLDER / f"{template}_training.jinja").read_text("utf-8")
    for talk in talks(template):
        wanted = tokenizer.apply_chat_template(talk, chat_template=training, return_dict=True,
                                               return_assistant_tokens_mask=True)
        theirs = [[token for token, _ in run] for counts, run in groupby(
            zip(wanted["input_ids"], wanted["assistant_masks"], strict=True), lambda pair: pair[1]) if counts]
        ends = {tokenizer.eos_token, "<|end|>"} & {*tokenizer.get_vocab()}
        found = encoder_of(tokenizer, ends).encode({"messages": talk})
        ours = [text for part in each_of(found) for text in trained(tokenizer, part)]
        assert [ANSWER.sub("", text).strip() for text in ours] == [
            ANSWER.sub("", tokenizer.decode(ids)).strip().removesuffix("\n<|end|>") for ids in theirs], talk


THOUGHTS = [{"role": "user", "content": "5?"}, CALLS | {"content": "", "thinking": "look"},
            {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "Sun.", "thinking": "so"},
            {"role": "user", "content": "6?"}, {"role": "assistant", "content": "Six.", "thinking": "easy"}]
OF_GPT_OSS = {1: "<|channel|>analysis<|message|>look<|end|><|start|>assistant to=functions.weather<|channel|>"
                 'commentary json<|message|>{"city": "Rome"}<|call|>',
              3: "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Sun.<|return|>",
              5: "<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final<|message|>Six.<|return|>"}


@every_row("size", [2, 4, 6])
def test_each_answer_of_gpt_oss_is_trained_with_its_thought_behind_the_prompt_it_is_sampled_from(size: int) -> None:
    """The template leaves out the thoughts of earlier answers, and those of calls once an answer follows. TRL's marks
    begin with <|start|>assistant, which the prompt has already; of the last answer they hold the same otherwise."""
    tokenizer = tokenizer_of("gptoss")
    ends, talk = ["<|return|>", "<|call|>"], THOUGHTS[:size]
    places = [place for place in (1, 3, 5) if place < size]
    found = each_of(encoder_of(tokenizer, ends).encode({"messages": talk}))
    assert [trained(tokenizer, part) for part in found] == [[OF_GPT_OSS[place]] for place in places]
    for part, place in zip(found, places, strict=True):
        assert tokenizer.decode(part.ids) == tokenizer.apply_chat_template(
            talk[:place], tokenize=False, add_generation_prompt=True)
    training = (FOLDER / "gptoss_training.jinja").read_text("utf-8")
    wanted = tokenizer.apply_chat_template(talk, chat_template=training, return_dict=True,
                                           return_assistant_tokens_mask=True)
    theirs = tokenizer.decode([token for token, mask in zip(wanted["input_ids"], wanted["assistant_masks"], strict=True)
                               if mask])
    assert theirs.endswith("<|start|>assistant" + OF_GPT_OSS[places[-1]])
    last = encoder_of(tokenizer, ends, AnswerEncoder).encode({"messages": talk})
    assert trained(tokenizer, last) == [OF_GPT_OSS[places[-1]]]


def test_calls_with_objects_as_arguments_reach_a_template_that_wants_text() -> None:
    tokenizer = tokenizer_of("deepseekv3")
    found = encoder_of(tokenizer, [tokenizer.eos_token]).encode({"messages": WITH_CALL})
    assert 'weather\n```json\n{"city": "Rome"}' in trained(tokenizer, found)[0]


MARKED = [name for name in NAMES if name.endswith("_training") and not name.startswith(("llava", "gptoss", "phi3"))]


@every_row("template", MARKED)
def test_the_marks_of_a_template_say_what_is_trained(template: str) -> None:
    tokenizer = tokenizer_of(template)
    ends = [tokenizer.eos_token, "<|user|>", "<|observation|>"]
    found = encoder_of(tokenizer, ends).encode({"messages": TALK})
    whole = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    mask = [bool(one) for one in whole["assistant_masks"]]
    first, last = mask.index(True), len(mask) - mask[::-1].index(True)
    assert found.ids == whole["input_ids"][:first] and found.completion_ids == whole["input_ids"][first:last]
    assert (found.trained or [True] * len(found.completion_ids)) == mask[first:last]


@every_row("template", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "lfm2_v2", "qwen3_training"])
@every_row("tools", ["list", "json"])
@every_row("shape", ["turns", "last"])
def test_tools_reach_the_template_and_calls_without_a_text_are_read(template: str, tools: str, shape: str) -> None:


    tokenizer = tokenizer_of(template)
    ends = [tokenizer.eos_token, "<|user|>", "<|observation|>"]
    column = json.dumps([WEATHER]) if tools == "json" else [WEATHER]
    empty = [one | {"content": one["content"] or ""} for one in WITH_CALL]
    wanted = tokenizer.apply_chat_template(empty, tools=[WEATHER], return_dict=True)["input_ids"]
    row = {"tools": column, "messages": WITH_CALL, "prompt": WITH_CALL[:-1], "completion": WITH_CALL[-1:]}
    found = encoder_of(tokenizer, ends, ConversationEncoder if shape == "turns" else ExampleEncoder).encode(row)
    ids = [*found.ids, *found.completion_ids]
    same = min(len(ids), len(wanted)) - 1
    if shape == "turns":
        assert ids[:same] == wanted[:same]
    assert tokenizer.decode(ids).partition("It is sunny.")[0] == tokenizer.decode(wanted).partition("It is sunny.")[0]
    said = trained(tokenizer, found)
    assert "It is sunny." in said[-1] and (shape == "last" or ("weather" in said[0] and "Rome" in said[0]))


def test_options_of_a_row_reach_the_template() -> None:
    tokenizer = tokenizer_of("qwen3_5_think")
    row = {"prompt": TALK[:1], "completion": "3.", "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    found = ExampleEncoder(tokenizer, 200, [tokenizer.eos_token_id]).encode(row)
    assert isinstance(found, Example) and found.text == tokenizer.apply_chat_template(
        TALK[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    for wrong, words in (({"tools": "["}, "tools is a text that is no JSON"),
                         *(({"chat_template_kwargs": given}, "must be a dict of the chat template's own variables")
                           for given in ("enable_thinking", {"tokenize": True}, {"add_generation_prompt": False}))):
        with pytest.raises(DataError, match=words):
            ExampleEncoder(tokenizer, 200, [tokenizer.eos_token_id]).encode(row | wrong)


@every_row(("text", "ending"), [
    ("a b", ["<|im_end|>"]), ("a b<|im_end|>", ["<|im_end|>"]), ("a b<|im_end|>\n", ["<|im_end|>", "\n"]),
    ("a b<|endoftext|>", ["<|endoftext|>"]),
])
def test_a_text_ends_in_one_end_token_of_those_that_sampling_stops_at(text: str, ending: list[str]) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    encoder = encoder_of(tokenizer, ["<|im_end|>", "<|endoftext|>"], TextEncoder)
    found = encoder.encode({"text": text})
    assert [*found.ids, *found.completion_ids] == [
        *tokenizer("a b", add_special_tokens=False).input_ids, *map(tokenizer.convert_tokens_to_ids, ending[:1]),
        *(tokenizer("\n", add_special_tokens=False).input_ids if ending[1:] else [])]


def test_answers_between_parts_of_the_users_own_are_trained_through_an_end_behind_white_space() -> None:
    tokenizer = FAMILY_CHATS["glm4"].tokenizer()
    inner = encoder_of(tokenizer, FAMILY_CHATS["glm4"].ends, TextEncoder)
    text = "<|user|>\n1 + 2?<|assistant|>\n3.\n<|user|>\n3 + 4?<|assistant|>\n7."
    found = ResponsesOnly(inner, "\n<|user|>\n", "<|assistant|>\n").encode({"text": text})
    assert trained(tokenizer, found)[1:] == ["7.<|endoftext|>"] and trained(tokenizer, found)[0].endswith("<|user|>")
