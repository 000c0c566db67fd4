"""Chat templates of strangers: those that would hang this process or take its memory are refused, and others' errors
are said in a line."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_models import TINY
from trl import chat_template_utils

from lowmem_grpo.models.pretrained import Pretrained, tokenizer_beside
from lowmem_grpo.models.template_trial import ChatTemplateError, fault, fault_of

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SLOW, LARGE, LONG, NONE = "longer than 1 second", "more than 512 MiB", "characters for", "is no template"
HOSTILE = {
    LOOPS: SLOW, "{% if tools %}" + LOOPS + "{% endif %}": SLOW, "{{ lipsum(n=10**7) }}": SLOW,
    "{% if messages[-1].role == 'tool' %}" + LOOPS + "{% endif %}": SLOW, "{{ 9 ** (9 ** 9) }}": SLOW,
    "{{ 'a' * (10**9) }}": LARGE, "{{ '%1000000000d' % 5 }}": LARGE, "{{ '{:>2000000000}'.format(1) }}": LARGE,
    "{{ 'a' | center(2000000000) }}": LARGE, "{{ 'a' | indent(2000000000, first=true) }}": LARGE,
    "{{ [1] | tojson(indent=100000000) }}": LARGE,
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}": LARGE,
    "{{ 'a' * 2000000 }}": LONG, "{{ messages[0].content * 999999 }}": LONG,
    "{% for": NONE, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": NONE, "{% nothing %}": NONE,
}
RAISING = {
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero", "{{ messages[99].content.x.y }}": "no element 99",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recursion", "{% include 'x' %}": "no loader",
    "{{ messages.__class__.__mro__ }}": "unsafe",
    "{{ raise_exception('No system\nmessages.') }}": "messages: No system",
    "{{ strftime_now(5) }}": "TypeError", "{{ 'a' + 1 }}": "TypeError",
}


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_template_that_would_hang_or_fill_the_memory_is_refused(template: str) -> None:
    assert HOSTILE[template] in fault_of(template, "{}")


def test_tokens_with_the_names_of_a_templates_variables_do_not_end_the_trial() -> None:
    assert SLOW in fault_of(LOOPS, '{"messages": "a", "tools": "b", "add_generation_prompt": "c"}')


def test_templates_of_the_field_are_no_faults() -> None:
    held = sorted((Path(chat_template_utils.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(held) > 20
    assert [path.name for path in held if fault(path.read_text("utf-8"), {"bos_token": "<s>"})] == []
    assert [path.name for path in held[::9] if fault_of(path.read_text("utf-8"), '{"bos_token": "<s>"}')] == []


def beside(tmp_path: Path, template: str | None) -> Path:
    """An adapter's folder with the tokenizer of the tiny model and this template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.mark.parametrize("template", [LOOPS, "{{ 'a' * (10**9) }}", "{% for"], ids=["loops", "memory", "none"])
def test_an_adapter_whose_template_has_no_end_is_refused_by_its_folder(template: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the chat template of") as refused:
        tokenizer_beside(beside(tmp_path, template))
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("template", RAISING, ids=range(len(RAISING)))
def test_what_a_template_raises_is_said_in_one_line_with_its_own_words(template: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_beside(beside(tmp_path, template))
    for tokenize in (True, False):
        with pytest.raises(ChatTemplateError, match="the chat template cannot write these messages: ") as said:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=tokenize)
        assert RAISING[template] in str(said.value) and "\n" not in str(said.value)


def test_an_error_that_is_not_the_templates_stays_as_it_is() -> None:
    tokenizer = Pretrained("tiny", str(TINY), {}).tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"chat_template is not set") as raised:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert not isinstance(raised.value, ChatTemplateError)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "added_tokens.json",
                                  "special_tokens_map.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "gigabytes"])
def test_what_is_no_file_or_too_large_in_place_of_a_tokenizers_file_is_refused(
    name: str, kind: str, tmp_path: Path
) -> None:
    path = beside(tmp_path, None) / name
    path.unlink(missing_ok=True)
    made: dict[str, Any] = {"pipe": os.mkfifo, "folder": os.mkdir, "gigabytes": lambda at: sparse(at, 3 << 30)}
    made[kind](path)
    with pytest.raises(ValueError, match=rf"{name} (is a folder, a pipe|has 3\.00 GiB)"):
        Pretrained(str(tmp_path), str(tmp_path), {}).tokenizer()


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)
