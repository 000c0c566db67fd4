"""The fields of requests for completions: what each may be, and what to do instead of those that are refused."""

from collections.abc import Callable
from typing import Any

from lowmem_grpo.config.sampling import FORMAT, PENALTY, SamplingParams
from lowmem_grpo.config.unsupported import Table, only
from lowmem_grpo.rules import TRUTH, ZERO_OR_MORE, Rule, at_least, one_of
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.messages import shown

MOST_COMPLETIONS, MOST_LIKELIEST, MOST_TEXTS = 128, 20, 4096
NO_SOUND = "Only text is made here; leave it out."
OF_THE_CALLER = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")  # nothing here depends on them
REFUSED: Table = {
    **only(PENALTY, presence_penalty=(None, 0), frequency_penalty=(None, 0), repetition_penalty=(None, 1)),
    **only(FORMAT, logit_bias=(None, {}), guided_json=None, guided_regex=None, guided_choice=None,
           structured_outputs=None),
    **only("Use tools and tool_choice.", functions=(None, []), function_call=None),
    **only(NO_SOUND, audio=None, modalities=(None, ["text"])),
    **only("The model has one way of thinking; say more with chat_template_kwargs.", reasoning_effort=None,
           verbosity=None),
    **only("Put what should be searched into a tool.", web_search_options=None),
    **only("Nothing is predicted beforehand; leave it out.", prediction=None),
    **only("There is one service; leave it out.", service_tier=(None, "auto", "default")),
    **only("Nothing is moderated; leave it out.", moderation=None),
    **only("What was computed of a conversation is always kept while memory allows; leave it out.",
           prompt_cache_options=None, prompt_cache_retention=None),
    **only("The answer continues a last message of the assistant, and else begins a turn; leave it out.",
           add_generation_prompt=(None, True), continue_final_message=(None, False), echo=(None, False)),
    **only("Every end token ends a completion; leave it out.", min_tokens=(None, 0)),
    **only("Log-probabilities of the prompt are not computed.", prompt_logprobs=None),
}

def of_type(kind: Any, words: str, holds: Callable[[Any], bool] = lambda value: True) -> Rule:
    """A rule for values of a type."""
    return words, lambda value: isinstance(value, kind) and holds(value)


def whole(least: int, most: int) -> Rule:
    """A rule for whole numbers between two."""
    return f"a whole number, {least} to {most}", lambda value: at_least(least, int)[1](value) and value <= most


FIELDS: dict[str, Rule] = {
    "messages": of_type(list, "a list of messages"),
    "model": of_type(str, "the name of a model"),
    "tools": of_type(list, "a list of tools"),
    "tool_choice": ("'auto' or 'none': the model is not forced to call a tool, so reward the call instead",
                    one_of("auto", "none")[1]),
    "max_tokens": at_least(1, int),
    "max_completion_tokens": at_least(1, int),
    "temperature": ZERO_OR_MORE,
    "top_p": SamplingParams.RANGES["top_p"],
    "top_k": at_least(-1, int),
    "min_p": SamplingParams.RANGES["min_p"],
    "n": whole(1, MOST_COMPLETIONS),
    "seed": of_type(int, "a whole number"),
    "stop": ("a text that is not empty, or a list of these", lambda value: bool(value) and isinstance(value, str | list)
             and all(isinstance(one, str) and one for one in value)),
    "logprobs": TRUTH,
    "top_logprobs": whole(0, MOST_LIKELIEST),
    "stream": TRUTH,
    "stream_options": of_type(dict, "an object with include_usage"),
    "parallel_tool_calls": TRUTH,
    "response_format": ("{'type': 'text'}: the form of the text is not constrained, so reward it instead",
                        lambda value: value == {"type": "text"}),
    "chat_template_kwargs": of_type(dict, "an object with options of the chat template"),
    "return_token_ids": TRUTH,
}


OF_TEXT: dict[str, Rule] = {  # of a request that has a plain prompt in place of messages
    **{name: FIELDS[name] for name in ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
                                       "stop", "stream", "stream_options", "return_token_ids")},
    "prompt": of_type(str | list, "a text, a list of token ids, or a list of these"),
    "logprobs": whole(0, MOST_LIKELIEST),
}
REFUSED_OF_TEXT: Table = {
    **REFUSED,
    **only("A reply has the completion only; put the prompt before it yourself.", echo=(None, False)),
    **only("Every completion is told; ask for n, and choose among them.", best_of=(None, 1)),
    **only("The model continues a text, and does not fill gaps.", suffix=(None, "")),
}


def check(
    name: str, value: Any, known: dict[str, Rule] = FIELDS, refused: Table = REFUSED,
) -> None:
    """ChatError for a field that is not known, or with a value that it cannot have."""
    if name in OF_THE_CALLER:
        return
    if name in refused:
        fixed = refused[name]
        if value not in fixed.values or isinstance(value, bool) != isinstance(fixed.values[-1], bool):
            raise ChatError(400, f"{name} is {shown(value)}, which is not supported. {fixed.advice}", name,
                            "unsupported_parameter")
    elif name not in known:
        raise ChatError(400, f"{name} is not a field that is known here; leave it out. Known are "
                        f"{', '.join(sorted(known))}", name, "unknown_parameter")
    elif not known[name][1](value) or (isinstance(value, bool) and known[name] is not TRUTH):
        raise ChatError(400, f"{name} is {shown(value)}; it must be {known[name][0]}", name, "invalid_value")
