"""10,000 random conversations over every chat template of TRL and the embedded one: tokens that were sampled stay as
they are, what comes between them is what the template writes, and no text forges a mark."""

from collections import Counter
from functools import cache

import pytest
from jinja2 import TemplateError
from random_talks import NO_RESULTS, NO_TEXT, SCHEMAS, Round, Talk, family, marks_of
from tables import every_row
from template_tokenizers import NAMES, tokenizer_of

from lowmem_grpo.environments.renderer import Renderer, RendererError

TALKS = 10_000
NOT_THE_SAME = {  # conversations whose later turns the template rewrites, or refuses; in all other templates none
    "tiny": {"rewritten": 33, "same": 42},
    "deepseek_r1_distill": {"rewritten": 75},
    "deepseek_r1_distill_training": {"rewritten": 32, "same": 43},
    "deepseekv3": {"rewritten": 63, "same": 12},
    "deepseekv3_training": {"rewritten": 66, "same": 9},
    "lfm2": {"rewritten": 32, "same": 42},
    "lfm2_training": {"rewritten": 30, "same": 44},
    "llama3": {"rewritten": 33, "same": 41},
    "llama3_1": {"refused": 15, "same": 59},
    "llama3_2": {"refused": 14, "same": 60},
    "llama3_training": {"rewritten": 36, "same": 38},
    "nemotron_3_5_lightning": {"rewritten": 55, "same": 19},
    "nemotron_3_5_lightning_training": {"rewritten": 57, "same": 17},
    "nemotron_3_nano": {"rewritten": 50, "same": 24},
    "nemotron_3_nano_training": {"rewritten": 55, "same": 19},
    "nemotron_3_super": {"rewritten": 53, "same": 21},
    "nemotron_3_super_training": {"rewritten": 55, "same": 19},
    "nemotron_3_ultra": {"rewritten": 60, "same": 14},
    "nemotron_3_ultra_training": {"rewritten": 54, "same": 20},
    "qwen2_5_vl": {"rewritten": 34, "same": 40},
    "qwen2_5_vl_training": {"rewritten": 31, "same": 43},
    "qwen3_5_nothink": {"rewritten": 55, "same": 19},
    "qwen3_5_think": {"rewritten": 51, "same": 23},
    "qwen3_6": {"rewritten": 59, "same": 15},
}
ABLE = [name for name in NAMES if family(name) not in NO_TEXT]


@cache
def renderer_of(name: str, tools: bool) -> Renderer:
    return Renderer(tokenizer_of(name), SCHEMAS if tools else None)


def numbers(name: str) -> range:
    """The numbers of a template's conversations; together there are TALKS."""
    share, more = divmod(TALKS, len(ABLE))
    return range(share + (ABLE.index(name) < more))


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLE)
def test_what_was_sampled_stays_and_what_lies_between_is_the_templates(name: str) -> None:
    for number in numbers(name):
        talk = Talk(name, number)
        renderer = renderer_of(name, talk.tools is not None)
        held = renderer.first(talk.opening)
        assert held == talk.encode(talk.render(talk.opening)), number
        for one in talk.rounds:
            sampled = talk.sampled(talk.end_of(one))
            ended = renderer.closed(sampled, one.replies)
            assert ended == (sampled[-1] == talk.tokenizer.convert_tokens_to_ids(talk.end_of(one)))
            check(talk, one, renderer.bridge(one.replies, ended), ended)


def check(talk: Talk, one: Round, bridge: list[int], ended: bool) -> None:
    """The bridge spells what the template writes, with the marks that it has around harmless text."""
    marks = {number for number, (_, special) in marks_of(talk.name).items() if special}
    harmless = [reply | {"content": "x" if reply["content"].strip() else reply["content"]} for reply in one.replies]
    expected = talk.encode(talk.behind(one, harmless, ended))
    assert talk.tokenizer.decode(bridge) == talk.behind(one, one.replies, ended)
    assert [number for number in bridge if number in marks] == [number for number in expected if number in marks]


def kind(talk: Talk) -> str:
    """How a conversation in which the policy writes just what the template would compares with the template's own."""
    renderer, messages = renderer_of(talk.name, talk.tools is not None), list(talk.opening)
    for one in talk.rounds:
        messages += [one.answer, *one.replies]
    try:
        text = talk.render(messages)
    except TemplateError:
        return "refused"
    opening = talk.render(talk.opening)
    held, at = renderer.first(talk.opening), len(opening)
    if not text.startswith(opening):
        return "rewritten"
    for place, one in enumerate(talk.rounds):
        if (anchor := text.find(f"Xanadu{place}", at)) < 0:
            return "rewritten"
        stop = text.index(talk.end_of(one), anchor) + len(talk.end_of(one))
        held += talk.encode(text[at:stop])
        if held != talk.encode(text[:stop]):
            return "merged"
        bridge = renderer.bridge(one.replies, True)
        if not text.startswith(talk.tokenizer.decode(bridge), stop):
            return "rewritten"
        held, at = held + bridge, stop + len(talk.tokenizer.decode(bridge))
    assert held == talk.encode(text) and at == len(text)
    return "same"


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])  # an eighth of them, or all
@pytest.mark.parametrize("name", ABLE)
def test_where_a_template_appends_the_tokens_are_those_of_the_whole_conversation(name: str, every: int) -> None:
    found = Counter(kind(Talk(name, number)) for number in numbers(name)[1 :: 2 * every])
    wanted = NOT_THE_SAME.get(name, {"same": found.total()})
    assert found == Counter(wanted) if every == 1 else found.keys() <= wanted.keys()


@every_row("name", [name for name in NAMES if name not in ABLE])
def test_a_template_that_drops_plain_text_is_refused(name: str) -> None:
    with pytest.raises(RendererError, match=r"roles user \(.*: use another template"):
        Renderer(tokenizer_of(name)).bridge([{"role": "user", "content": "Hi"}], True)


@every_row("name", [name for name in ABLE if family(name) in NO_RESULTS])
def test_a_template_without_tools_is_refused_with_a_family_that_has_them(name: str) -> None:
    with pytest.raises(RendererError, match=r"roles tool \(.*use a model family whose template has tools \(Qwen2\.5"):
        Renderer(tokenizer_of(name), SCHEMAS).bridge([{"role": "tool", "name": "add", "content": "3"}], True)
