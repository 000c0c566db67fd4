"""vLLM's engine step by step, and how many sequences run and wait in it.

`LLMEngine.step` tells only which requests have ended. How many run is asked of the scheduler, an object of vLLM's own
in this process. Its method `get_request_counts` belongs to the interface that all of vLLM's schedulers have, but the
way to it is not public, so it stands here and nowhere else.
"""

from typing import Any

from lowmem_grpo.engines.pace import Pace


class Steps:
    """What a call does with vLLM: requests enter, and steps are made."""

    def __init__(self, llm: Any, pace: Pace) -> None:
        self.llm, self.pace = llm, pace

    def enqueue(self, prompts: list[list[int]], settings: list[Any]) -> list[str]:
        """Ask vLLM for completions of prompts (token ids); returns the names of the requests."""
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        names: list[str] = self.llm.enqueue(requests, settings, use_tqdm=False)
        return names

    @property
    def unfinished(self) -> bool:
        """Whether there is anything to decode."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    @property
    def open(self) -> int:
        """Sequences that are not finished."""
        return int(self.llm.llm_engine.get_num_unfinished_requests())

    def abort(self, numbers: list[str]) -> None:
        """Take back requests, by their numbers."""
        if numbers:
            self.llm.llm_engine.abort_request(numbers)

    def step(self) -> list[Any]:
        """Make a step; returns the outputs of the requests that end with it. A step that takes in waiting sequences
        computes their prompts, so its time is that of prefill; one that takes a sequence out takes none in."""
        running, waiting = self.counts()
        self.pace.resume()
        outputs: list[Any] = self.llm.llm_engine.step()
        entered = waiting - self.counts()[1]
        if entered > 0:
            self.pace.read(0)
        self.pace.preemptions += max(0, -entered)
        self.pace.step(running + entered)
        return [output for output in outputs if output.finished]

    def was_read(self, tokens: int) -> None:
        """A request has ended of whose prompt vLLM computed so many tokens."""
        self.pace.spent["prefill"].tokens += tokens

    def counts(self) -> tuple[int, int]:
        """Sequences that run, and that wait."""
        running, waiting = self.llm.llm_engine.engine_core.engine_core.scheduler.get_request_counts()
        return running, waiting
