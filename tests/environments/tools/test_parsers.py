"""Calls are read from what a policy wrote, and one that cannot be read is never plain text."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import every_row
from template_tokenizers import tiny_with

from lowmem_grpo.environments.tools.arguments import DEPTH
from lowmem_grpo.environments.tools.parsers import FORMS, Parser, Reading, custom
from lowmem_grpo.types import ToolCall

ARGUMENTS = {"type": "object", "required": ["city"], "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "warm": {"type": "boolean"},
    "where": {"type": "object"}, "tags": {"type": "array", "items": {"type": "string"}}, "rate": {"type": "number"}}}
SCHEMAS = {"weather": ARGUMENTS, "now": {"type": "object", "properties": {}}}
ROME = ToolCall("weather", {"city": "Rome", "days": 3})
WRITTEN = {  # ROME in each form
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "xml": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
           "</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
           "<arg_value>3</arg_value>\n</tool_call>",
    "python": "<|tool_call_start|>[weather(city='Rome', days=3)]<|tool_call_end|>",
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}',
    "json": '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}',
}


def read(form: str, text: str, thinking: bool = False) -> Reading:
    return Parser(FORMS[form], SCHEMAS, thinking=thinking).read([], text)


def hermes(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def xml(*parameters: str, name: str = "weather") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@every_row("form", FORMS)
def test_each_form_reads_a_call_two_calls_and_text_around_them(form: str) -> None:
    call = WRITTEN[form]
    assert read(form, call) == Reading("", [ROME])
    assert read(form, f"I look.\n{call}") == Reading("I look.", [ROME])
    assert read(form, f"{call}\n{call}").calls == [ROME, ROME]
    assert read(form, f"<think>\nsay {call}?\n</think>\n\n{call}") == Reading(
        f"<think>\nsay {call}?\n</think>", [ROME])
    assert read(form, f"or {call}?\n</think>\n{call}", thinking=True).calls == [ROME]


@every_row("form", FORMS)
@every_row("text", ["", "It is warm in Rome.", "<think>\nhm\n</think>\n\n42", '{"answer": {"a": [1]}}',
                                  '{"method": "x", "parameters": 3}', "a < b {", "<think>\nnever closed"])
def test_an_answer_without_a_call_is_text_as_it_was_written(form: str, text: str) -> None:
    assert read(form, text) == Reading(text)


@every_row(("form", "text", "calls"), [
    ("hermes", hermes('{"name": "now"}'), [ToolCall("now", {})]),
    ("hermes", hermes('{"name": "now", "parameters": {"a": "é 東京 🌞"}}'), [ToolCall("now", {"a": "é 東京 🌞"})]),
    ("hermes", hermes('{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 3}"}'), [ROME]),
    ("hermes", hermes(json.dumps({"name": "weather", "arguments": {"where": {"a": [{"b": "}{"}]}}})),
     [ToolCall("weather", {"where": {"a": [{"b": "}{"}]}})]),
    ("hermes", WRITTEN["hermes"].removesuffix("</tool_call>"), [ROME]),  # cut off by a stop string
    ("hermes", hermes('{"name": "now", "arguments": {"a": "</think>"}}'), [ToolCall("now", {"a": "</think>"})]),
    ("xml", xml(parameter("city", "3"), parameter("days", "03")), [ToolCall("weather", {"city": "3", "days": "03"})]),
    ("xml", xml(parameter("city", " two\nlines\n"), parameter("warm", "True"), parameter("where", '{"a": 1}')),
     [ToolCall("weather", {"city": " two\nlines\n", "warm": True, "where": {"a": 1}})]),
    ("xml", xml(parameter("city", "a </parameter> b <function=x>"), parameter("rate", "-1e3")),
     [ToolCall("weather", {"city": "a </parameter> b <function=x>", "rate": -1000.0})]),
    ("xml", xml(name="now"), [ToolCall("now", {})]),
    ("xml", xml(parameter("city", "Rome") + "</function>\n<function=now>\n"),  # two calls in one pair of marks
     [ToolCall("weather", {"city": "Rome"}), ToolCall("now", {})]),
    ("xml", "<tool_call><function=now></function></tool_call>", [ToolCall("now", {})]),
    ("glm", "<tool_call>now</tool_call>", [ToolCall("now", {})]),
    ("python", '<|tool_call_start|>[weather(city="a\'b", where={"x": true, "y": None}, tags=[\'q\'], rate=-5), now()]',
     [ToolCall("weather", {"city": "a'b", "where": {"x": True, "y": None}, "tags": ["q"], "rate": -5}),
      ToolCall("now", {})]),
    ("python", "<|tool_call_start|>[mail.inbox.send(to='a'), get-weather(city='Rome'), a-b.c-d()]<|tool_call_end|>",
     [ToolCall("mail.inbox.send", {"to": "a"}), ToolCall("get-weather", {"city": "Rome"}), ToolCall("a-b.c-d", {})]),
    ("mistral", '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": "[CALL_ID]"}[TOOL_CALLS]now[CALL_ID]jklmnopqr[ARGS]{}',
     [ToolCall("now", {"a": "[CALL_ID]"}), ToolCall("now", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', [ToolCall("now", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"</think>": 1}}]', [ToolCall("now", {"</think>": 1})]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": "</think>"}', [ToolCall("now", {"a": "</think>"})]),
    ("json", '{"type": "function", "name": "now", "parameters": {}}; {"name": "now", "arguments": {}}',
     [ToolCall("now", {})] * 2),
    ("json", '{"id": "c1", "name": "now", "parameters": {}}', [ToolCall("now", {})]),
    ("json", '{"thought": "hm {", "name": "now", "parameters": {}}', [ToolCall("now", {})]),
])
def test_a_call_is_read_as_it_was_meant(form: str, text: str, calls: list[ToolCall]) -> None:
    found = read(form, text)
    assert (found.calls, found.errors) == (calls, [])


@every_row(("text", "content"), [
    ("[CALL, CALL]", ""), ("[ CALL ]\n", ""), ("CALL, CALL", ""), ("```json\n[\n  CALL\n]\n```", ""),
    ("```\nCALL\n```", ""), ("It is in [1]: CALL", "It is in [1]:"), ("```json\n[1]\n``` CALL", "```json\n[1]\n```"),
])
def test_brackets_of_a_list_of_calls_and_its_fence_are_no_words_of_the_policy(text: str, content: str) -> None:
    found = read("json", text.replace("CALL", WRITTEN["json"]))
    assert (found.content, {*map(str, found.calls)}, found.errors) == (content, {str(ROME)}, [])


@every_row(("form", "text", "why"), [
    ("hermes", hermes('{"name": "weather", "arguments": {"city": "Rome"}'), "not valid JSON: Expecting"),
    ("hermes", hermes(""), "not valid JSON"),
    ("hermes", hermes("3"), 'no "name"'), ("hermes", hermes("[]"), 'no "name"'), ("hermes", hermes("[3]"), 'no "name"'),
    ("hermes", hermes('{"arguments": {}}'), 'no "name"'), ("hermes", hermes('{"name": 3}'), 'no "name"'),
    ("hermes", hermes('{"name": "now", "args": {}}'), 'no "arguments"'),
    ("hermes", hermes('{"name": "now", "arguments": [1]}'), 'its "arguments" must be an object'),
    ("hermes", hermes('{"name": "now", "arguments": "{"}'), 'its "arguments" are not valid JSON'),
    ("hermes", hermes('{"name": "now", "arguments": {"a": NaN}}'), "no number of JSON"),
    ("hermes", hermes('{"name": "now", "arguments": {"a": 1e999}}'), "no number of JSON"),
    ("hermes", hermes('{"name": "now", "arguments": {"a": %s}}' % ("9" * 5000)), "digits"),
    ("hermes", hermes('{"name": "now", "arguments": {"a": %s}}' % ("9" * 3000)), "too many digits"),
    ("hermes", hermes('{"name": "now", "arguments": {"a": "\\ud800"}}'), "surrogate pair"),
    ("hermes", hermes("[" * 200_000), "nested too deeply"),
    ("hermes", hermes('{"name": "now", "arguments": {"a": %s}}' % ("[" * DEPTH + "]" * DEPTH)), "nested too deeply"),
    ("hermes", '<tool_call>{"name": "now"', "not valid JSON"),
    ("hermes", '{"name": "now", "arguments": {}}\n</tool_call>', "</tool_call> stands without <tool_call>"),
    ("hermes", 'Now: {"name": "now", "arguments": {}}', "marks are missing"),
    ("hermes", WRITTEN["xml"], "not valid JSON"), ("xml", WRITTEN["hermes"], "does not begin with <function=NAME>"),
    ("hermes", f"<think>\n{WRITTEN['hermes']}", "inside of <think>"),
    ("xml", "<function=now></function>", "marks are missing"),
    ("xml", "<tool_call><function=now></tool_call>", "</function> is missing"),
    ("xml", "<tool_call><function=now</function></tool_call>", "not closed"),
    ("xml", xml("<parameter=city>Rome"), "no <parameter=KEY>"), ("xml", xml("Rome"), "no <parameter=KEY>"),
    ("xml", xml(parameter("city", "a"), parameter("city", "b")), "city is given twice"),
    ("xml", xml("<parameter=city>\nRome\n", parameter("days", "3")), "</parameter> is missing behind city"),
    ("glm", "<tool_call></tool_call>", "name of a tool"), ("glm", "<tool_call>a\nb</tool_call>", "name of a tool"),
    ("glm", "<tool_call>now<arg_key>a</arg_key></tool_call>", "no <arg_key>KEY"),
    ("python", "<|tool_call_start|>[weather('Rome')]<|tool_call_end|>", "written with its name"),
    ("python", "<|tool_call_start|>[weather(**{})]<|tool_call_end|>", "written with its name"),
    ("python", "<|tool_call_start|>[weather(city=open('/etc/passwd'))]<|tool_call_end|>", "not a plain value"),
    ("python", "<|tool_call_start|>[now()(a='x')]<|tool_call_end|>", "not a list of calls"),
    ("python", "<|tool_call_start|>[now().b(a='x')]<|tool_call_end|>", "not a list of calls"),
    ("python", "[os.system(a='x')]<|tool_call_end|>", "stands without <|tool_call_start|>"),
    ("python", "<|tool_call_start|>[weather(city='Rome'<|tool_call_end|>", "not a list of calls as in Python"),
    ("python", f"<|tool_call_start|>[now(a={'(' * 5000})]", "not a list of calls as in Python"),
    ("python", f"<|tool_call_start|>[now(a={'-' * 50_000}1)]", "nested too deeply"),
    ("python", f"<|tool_call_start|>[now(a=0x{'f' * 5000})]", "too many digits"),
    ("python", "<|tool_call_start|>[now(a=1e999)]", "no number of JSON"),
    ("python", "<|tool_call_start|>[now(a='\x00')]", "not a list of calls as in Python"),
    ("python", "[now(a=1)]", "marks are missing"),
    ("mistral", "[TOOL_CALLS]now[ARGS]{", "not valid JSON"), ("mistral", "[TOOL_CALLS]now", "not valid JSON"),
    ("json", '{"name": "weather", "parameters": {"city": "Rome"}', "not valid JSON"),
    ("json", '{"name": "now", "parameters": {"a": %s}}' % ("[" * 100_000), "nested too deeply"),
    ("json", '{"parameters": {"city": "Rome"}}', 'no "name"'),
    ("json", '{"type": "function", "function": {"name": "now", "parameters": {}}}', 'no "name"'),
    ("json", '{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}', 'no "name"'),
    ("json", '{"type": "function", "name": "now"}', 'no "arguments"'),
])
def test_a_call_that_cannot_be_read_is_an_error_that_shows_how_to_write_one(form: str, text: str, why: str) -> None:
    found = read(form, text)
    assert found.calls == [] and found.content == text and len(found.errors) == 1
    assert why in found.errors[0] and found.errors[0].endswith(FORMS[form].example)
    assert len(found.errors[0]) < 500


def test_a_good_call_is_kept_beside_a_broken_one() -> None:
    found = read("hermes", f"{WRITTEN['hermes']}<tool_call>{{</tool_call>")
    assert found.calls == [ROME] and len(found.errors) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unit", [
    "word ", "{", '{"name": "a", ', "<tool_call>", "</tool_call>", "<function=a>", "<parameter=a>", "</parameter>", "[",
    "<arg_key>", "<|tool_call_start|>[f(", "<think>", '{"a":', "\n"])
@pytest.mark.every(2)
def test_a_megabyte_of_anything_is_read_and_does_not_hang(form: str, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    for whole in (text, WRITTEN[form].replace("Rome", text)):
        assert len(read(form, whole).errors) <= 5


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
                      lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@pytest.mark.parametrize("form", ["hermes", "mistral", "json"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments=st.dictionaries(st.text(min_size=1), VALUES))
@pytest.mark.every(3)
def test_any_arguments_come_back_from_json(form: str, arguments: dict[str, Any]) -> None:
    text = json.dumps({"name": "now", "arguments": arguments})
    marked = {"hermes": hermes(text.replace("<", "\\u003c")), "mistral": f"[TOOL_CALLS][{text}]", "json": text}[form]
    assert read(form, marked) == Reading("", [ToolCall("now", arguments)])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.every(2)
def test_no_completion_raises_and_none_with_a_mark_is_plain_text(form: str, data: st.DataObject) -> None:
    words = st.sampled_from([*FORMS[form].marks, *WRITTEN[form].partition("weather"), '"', "}", "a", "\n"]) | st.text()
    found = read(form, text := "".join(data.draw(st.lists(words, max_size=8))))
    if FORMS[form].open and FORMS[form].open in text.rpartition("</think>")[2]:
        assert found.calls or found.errors


def test_marks_that_are_tokens_are_told_from_text_that_looks_like_them() -> None:
    tokenizer = tiny_with("lfm2_2_5", "<|tool_call_start|>", "<|tool_call_end|>")
    parser = Parser(FORMS["python"], SCHEMAS, tokenizer)
    start, end = tokenizer.convert_tokens_to_ids(["<|tool_call_start|>", "<|tool_call_end|>"])

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    written = ids("Well. "), [start], ids("[weather(city='<|tool_call_end|>')]"), [end], [tokenizer.eos_token_id]
    completion = [token for part in written for token in part]
    text = tokenizer.decode(completion, skip_special_tokens=True)
    assert parser.read(completion, text) == Reading("Well.", [ToolCall("weather", {"city": "<|tool_call_end|>"})])
    spelled = ids(WRITTEN["python"])  # by a policy that has not yet learnt the tokens
    assert parser.read(spelled, WRITTEN["python"]).calls == [ROME]


@every_row(("given_back", "calls"), [
    ([], []), (None, []), ([ROME], [ROME]), ([{"name": "now", "arguments": {}}], [ToolCall("now", {})]),
    ([{"type": "function", "function": {"name": "now", "arguments": "{}"}}], [ToolCall("now", {})]),
    (Reading("x", [ROME]), [ROME]),
])
def test_a_function_of_the_users_reads_calls(given_back: Any, calls: list[ToolCall]) -> None:
    assert custom(lambda text: given_back, "text").calls == calls


@pytest.mark.parametrize(("given_back", "why"), [(3, "not iterable"), ([3], "attribute"), ([{"args": 3}], 'no "name"')])
def test_what_a_function_of_the_users_cannot_read_is_an_error(given_back: Any, why: str) -> None:
    assert why in custom(lambda text: given_back, "text").errors[0]
