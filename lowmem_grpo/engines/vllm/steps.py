"""vLLM's requests one by one, as they are finished, through its own doors: `LLM.enqueue` and `LLMEngine.step`.

`LLM.generate` is these two, and returns when all are finished. Both are in 0.26 to 0.33 in this form; only objects of
vLLM that were made elsewhere are used here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams


@dataclass(frozen=True)
class Work:
    """What a call of the engine asks for."""

    prompts: list[list[int]]
    params: SamplingParams
    settings: list[Any]  # vLLM's own, of each prompt


def outputs(llm: Any, work: Work, missing: list[int], stepwise: bool) -> Iterable[tuple[int, Any]]:
    """vLLM's outputs with their places among the `missing` prompts: as they come, or all at the end."""
    requests = [{"prompt_token_ids": work.prompts[prompt]} for prompt in missing]
    settings = [work.settings[prompt] for prompt in missing]
    if stepwise:
        return finished_outputs(llm, requests, settings)
    return enumerate(llm.generate(requests, settings, use_tqdm=False))


def finished_outputs(llm: Any, requests: list[Any], settings: list[Any]) -> Iterator[tuple[int, Any]]:
    """(index of a request, its output with all completions) in the order in which they are finished."""
    ids = llm.enqueue(requests, settings, use_tqdm=False)
    places = {number_of(name): place for place, name in enumerate(ids)}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                yield places[number_of(output.request_id)], output


def number_of(name: str) -> str:
    """vLLM numbers its requests, and adds a random ending to the names under which it keeps them itself."""
    return name.partition("-")[0]
