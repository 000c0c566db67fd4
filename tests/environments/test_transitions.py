"""What a template does between turns is found before the first step, as the whole conversation then shows it."""

from random_talks import SCHEMAS
from tables import every_row
from template_tokenizers import tokenizer_of

from lowmem_grpo.environments.renderer import Renderer
from lowmem_grpo.trainer.preflight.template import (
    OF_REPLIES,
    OF_TOOLS,
    QUESTION,
    Transition,
    answer,
    appends,
    cost,
    no_tool_support,
    tried,
    try_transitions,
)

SPLITS = {  # the places in OF_TOOLS, and in OF_REPLIES, where a template rewrites
    "tiny": ((0, 1, 2, 3), ()), "qwen2_5": ((), ()), "qwen3": ((), (1,)), "qwen3_training": ((), ()),
    "qwen3_instruct_2507": ((), ()), "qwen3_5_think": ((), (0, 1, 2)), "qwen3_8": ((), ()), "glm4moe": ((), (1,)),
    "gptoss": ((), (0, 1)), "gemma4_v5": ((2,), (1,)), "lfm2": ((0, 1, 2, 3), ()), "lfm2_2_5": ((), (1,)),
    "llama3_2": ((1,), ()),
}


@every_row("name", SPLITS)
def test_it_is_said_where_a_template_appends_and_where_it_rewrites(name: str) -> None:
    found = [[at for at, one in enumerate(all_of) if not one.appends] for all_of in (
        try_transitions(Renderer(tokenizer_of(name), SCHEMAS), tools=True, replies=False),
        try_transitions(Renderer(tokenizer_of(name)), tools=False, replies=True))]
    assert tuple(map(tuple, found)) == SPLITS[name]


@every_row(("name", "transition"), [
    ("qwen3_8", OF_REPLIES[1]),
    *((name, one) for name in ("qwen2_5", "qwen3", "llama3_2", "gemma3") for one in OF_REPLIES),
])
def test_what_is_said_is_what_the_whole_conversation_does_to_the_tokens(name: str, transition: Transition) -> None:
    tokenizer = tokenizer_of(name)
    renderer = Renderer(tokenizer)
    prompt = renderer.first([QUESTION])
    said = transition.said.removeprefix("<think>\n" * (name == "qwen3_8"))  # which the prompt has said
    end = "" if transition.cut else renderer.marks.every[min(renderer.seam(transition.replies).ends)]
    sampled = tokenizer(said + end, add_special_tokens=False).input_ids
    later = renderer.render_anew([QUESTION, answer(transition) | {"content": said}, *transition.replies], 1)
    assert (later[:len(prompt) + len(sampled)] == prompt + sampled) == appends(renderer, transition)


def test_two_calls_at_once_are_never_rendered_anew_by_llama_but_are_appended() -> None:
    found = tried(Renderer(tokenizer_of("llama3_2"), SCHEMAS), OF_TOOLS[1])
    assert found.refused is None and "only supports single tool-calls at once" in str(found.never_anew)


@every_row("name", ["tiny", "llama3", "cohere", "gemma3", "phi3", "deepseekv3"])
def test_a_template_without_tools_is_refused_naming_a_family_that_has_them(name: str) -> None:
    assert "Qwen2.5" in str(no_tool_support(Renderer(tokenizer_of(name), SCHEMAS)))


def test_tools_that_the_users_own_words_describe_are_enough_where_results_can_be_rendered() -> None:
    said = {"role": "system", "content": 'Write {"name": "look", ...} to look up and {"name": "add", ...} to add.'}
    assert no_tool_support(Renderer(tokenizer_of("tiny"), SCHEMAS), [said, QUESTION]) is None
    assert no_tool_support(Renderer(tokenizer_of("qwen3"), SCHEMAS)) is None


def test_an_episode_split_at_each_turn_costs_the_sum_of_its_prefixes() -> None:
    assert [cost(turns) for turns in (1, 2, 8)] == [1, 1.5, 4.5] == [sum(range(n + 1)) / n for n in (1, 2, 8)]
