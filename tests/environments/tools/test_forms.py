"""The form of a template's tool calls is found by its look, and a template without one says what to do."""

import pytest
from tables import every_row
from template_tokenizers import FOLDER, tiny_with
from trl.chat_template_utils import add_response_schema

from lowmem_grpo.environments.tools.forms import CALL, SCHEMA, ToolCallTemplate, ToolFormError, parser_of
from lowmem_grpo.environments.tools.parsers import Parser

FOUND = {  # by the beginning of a template's name, the longest first
    "qwen2_5_vl": None, "qwen2_5": "hermes", "qwen3_instruct": "hermes", "qwen3_vl": "hermes", "qwen3_5": "xml",
    "qwen3_6": "xml", "qwen3_8": "xml", "qwen3": "hermes", "nemotron": "xml", "glm4moe": "glm", "llama3_": "json",
    "llama3_training": None, "lfm2_2": "python", "lfm2_v2": "python", "gptoss": "unknown", "gemma4": "unknown",
    "diffusion_gemma": "unknown", "deepseek": "unknown", "muse": "unknown",
}


def expected(template: str) -> str | None:
    names = sorted((name for name in FOUND if template.startswith(name)), key=len)
    return FOUND[names[-1]] if names else None


@every_row("template", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_the_form_of_each_template_that_trl_ships_is_found_or_refused_with_the_fix(template: str) -> None:
    tokenizer, form = tiny_with(template), expected(template)
    if form in (None, "unknown"):
        fix = "no tool calls.*Qwen2.5, Qwen3" if form is None else 'name one as in parse="hermes".*response_template'
        with pytest.raises(ToolFormError, match=fix):
            parser_of(tokenizer, [SCHEMA], None, {})
        return
    parser = parser_of(tokenizer, [SCHEMA], None, {})
    assert isinstance(parser, Parser) and parser.form.name == form
    assert parser.thinking == ("_think" in template or template.startswith(("nemotron", "qwen3_6", "qwen3_8")))


MISTRAL = (  # what Mistral's own templates write, by their version of the tokenizer; calls end in the end token
    "{% for m in messages %}{% if m.role == 'user' %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content or '' }}{% for tool in m.tool_calls or []"
    " %}{% set arguments = tool.function.arguments %}{% if arguments is not string %}{% set arguments = arguments | "
    "tojson | safe %}{% endif %}CALL{% endfor %}</s>{% endif %}{% endfor %}")
CALLS_OF_MISTRAL = {  # Mistral 7B v0.3, Devstral 2507 and Mistral Small 3.2, Devstral 2 and Ministral 3
    "v3": "[TOOL_CALLS] [{{ (tool.function | tojson)[:-1] + ', \"id\": \"' + tool.id + '\"}' }}]",
    "v11": "[TOOL_CALLS]{{ tool.function.name + '[CALL_ID]' + tool.id + '[ARGS]' + arguments }}",
    "v13": "[TOOL_CALLS]{{ tool.function.name + '[ARGS]' + arguments }}",
}


@pytest.mark.parametrize("special", [(), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "</s>")])
@every_row("version", CALLS_OF_MISTRAL)
def test_the_calls_of_devstral_and_ministral_are_read(version: str, special: tuple[str, ...]) -> None:
    tokenizer = tiny_with("qwen3", *special)
    tokenizer.chat_template = MISTRAL.replace("CALL{", CALLS_OF_MISTRAL[version] + "{")
    parser = parser_of(tokenizer, [SCHEMA], None, {})
    assert isinstance(parser, Parser) and parser.form.name == "mistral"
    said = ToolCallTemplate(tokenizer, {}).call().partition("[/INST]")[2].removesuffix("</s>")
    ids = tokenizer.encode(said, add_special_tokens=False)
    assert parser.read(ids, tokenizer.decode(ids, skip_special_tokens=True)).calls == [CALL]


def test_the_calls_of_a_template_that_leaves_them_out_are_those_that_the_tokenizer_has_marks_for() -> None:
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    assert parser_of(tiny_with("lfm2", *marks), [SCHEMA], None, {}).form.name == "python"
    with pytest.raises(ToolFormError, match="no tool calls"):  # of three forms with these marks none is likelier
        parser_of(tiny_with("lfm2", "<tool_call>", "</tool_call>"), [SCHEMA], None, {})
    with pytest.raises(ToolFormError, match="no tool calls"):  # it does not tell of tools
        parser_of(tiny_with("gemma3", *marks), [SCHEMA], None, {})


def test_without_a_template_or_with_an_unknown_name_it_says_what_is_allowed() -> None:
    tokenizer = tiny_with("qwen3")
    with pytest.raises(ToolFormError, match=r"'openai'; allowed are hermes, xml, .*response_template, or a function"):
        parser_of(tokenizer, [SCHEMA], "openai", {})
    assert parser_of(tokenizer, [SCHEMA], "xml", {}).form.name == "xml"
    tokenizer.chat_template = None
    with pytest.raises(ToolFormError, match="no chat template"):
        parser_of(tokenizer, [SCHEMA], None, {})


def test_template_kwargs_say_whether_the_prompt_opens_a_thought() -> None:
    tokenizer = tiny_with("qwen3_5_think")
    opens = [ToolCallTemplate(tokenizer, {"enable_thinking": on}).opens_thought() for on in (True, False)]
    assert opens == [True, False]


@every_row(("template", "special", "broken"), [
    ("gptoss", ("<|call|>", "<|channel|>"), "<|channel|>commentary json<|message|>{}<|call|>"),
    ("gptoss", (), " to=functions.look_up_weather<|channel|>commentary json<|message|>{"),
    ("gemma4_v5", ("<|tool_call>", "<tool_call|>"), "<|tool_call>look_up_weather{}<tool_call|>"),
    ("gemma4_v5", (), "<|tool_call>call:look_up_weather{place:<tool_call|>"),
    ("gemma4_v5", (), "<|tool_call>call:look_up_weather[3]<tool_call|>"),
])
def test_an_unknown_form_is_read_by_the_tokenizers_response_template(
    template: str, special: tuple[str, ...], broken: str,
) -> None:
    tokenizer = add_response_schema(tiny_with(template, *special))
    parser = parser_of(tokenizer, [SCHEMA], None, {})
    whole = ToolCallTemplate(tokenizer, {}).call()
    ids = tokenizer.encode(whole.removeprefix(ToolCallTemplate(tokenizer, {}).prompt().rpartition("?")[2]))
    assert parser.read(ids, "").calls == [CALL]
    assert parser.read([], "It is warm.").content == "It is warm."
    found = parser.read(tokenizer.encode(broken), "as decoded")
    assert (found.calls, found.content, len(found.errors)) == ([], "as decoded", 1)
    assert "look_up_weather" in found.errors[0] and "Write it like this" in found.errors[0]


def test_thoughts_that_a_response_template_tells_apart_stay_in_the_message() -> None:
    parser = parser_of(add_response_schema(tiny_with("gptoss")), [SCHEMA], None, {})
    message = parser.read([], "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look_up_weather"
                              '<|channel|>commentary json<|message|>{"days": 3}<|call|>').message()
    assert message == {"role": "assistant", "thinking": "hm", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "look_up_weather", "arguments": {"days": 3}}}]}
