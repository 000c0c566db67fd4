"""The prompts of a call that may end before all of its sequences have: each completion is a request of its own.

vLLM returns a prompt with n completions when all n are done. As requests of their own, with the seeds that vLLM would
give them, they draw the same tokens and can be taken back one by one; vLLM computes their prompt once all the same, if
it caches prefixes. Their tokens are told as they are drawn (`RequestOutputKind.DELTA`), so that it is known what a
sequence had when it was taken back.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from lowmem_grpo.engines.base import Meanwhile, OnGroup, Until
from lowmem_grpo.engines.expected import ExpectedLengths
from lowmem_grpo.engines.vllm.requests import Prompts, Sampling, number_of
from lowmem_grpo.engines.vllm.steps import Steps
from lowmem_grpo.models.routes import one_prompt


@dataclass
class Sequence:
    """One completion, as far as it is drawn. What is done of it has the fields of vLLM's own completion."""

    prompt: int
    row: int  # of the prompt's n
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # vLLM's, of each token
    finish_reason: str | None = None
    routed_experts: Any = None

    def take_in(self, output: Any) -> None:
        """What vLLM drew since it was asked last."""
        new = output.outputs[0]
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs or []
        self.finish_reason, self.routed_experts = new.finish_reason, getattr(new, "routed_experts", None)


class Sequences(Prompts):
    """The prompts of one call of `generate` that ends as `until` says."""

    def __init__(self, prompts: list[list[int]], sampling: Sampling, on_group: OnGroup | None,
                 meanwhile: Meanwhile | None, expected: ExpectedLengths | None, until: Until) -> None:
        self.n, self.until = sampling.params.n, until
        one = replace(sampling, params=replace(sampling.params, n=1))
        super().__init__(prompts, one, on_group, meanwhile, expected)

    def run(self, steps: Steps, version: int) -> None:
        self.open: dict[str, Sequence] = {}  # by the number of vLLM's request
        self.ended: dict[int, list[Sequence]] = {prompt: [] for prompt in self.missing}
        self.enter(steps, self.in_order())
        while steps.unfinished:
            self.take_in(steps, steps.step(every=True), version)
            if self.meanwhile is not None:
                self.between(steps.open)

    def enter(self, steps: Steps, missing: list[int]) -> None:
        """Ask vLLM for all completions of these prompts."""
        rows = [(self.asked[prompt], row) for prompt in missing for row in range(self.n)]
        settings = self.sampling.settings([replace(asked, seed=asked.seed + row) for asked, row in rows])
        for number, ((asked, row), own) in enumerate(zip(rows, settings, strict=True)):
            steps.enter(str(number), asked.ids, own)
            self.open[str(number)] = Sequence(asked.key, row)

    def take_in(self, steps: Steps, outputs: list[Any], version: int) -> None:
        """A step was made: finish the prompts of which enough sequences are done, and take the others back."""
        done: list[Sequence] = []
        for output in outputs:
            number = number_of(output.request_id)
            if (sequence := self.open.get(number)) is not None:  # else it was taken back
                sequence.take_in(output)
                done += [self.open.pop(number)] if output.finished else []
        for sequence in sorted(done, key=lambda one: (one.prompt, one.row)):
            if sequence.prompt in self.rollouts:
                self.until.drop(sequence.prompt, len(sequence.token_ids))
                continue
            self.ended[sequence.prompt].append(sequence)
            if len(self.ended[sequence.prompt]) == self.until.enough:
                self.finish(steps, sequence.prompt, version)

    def finish(self, steps: Steps, prompt: int, version: int) -> None:
        """Enough sequences of a prompt are done."""
        asked = self.asked[prompt]
        self.take_back(steps, prompt)
        steps.was_read(len(asked.ids))
        with self.outside_the_engine():
            chosen = sorted(self.ended.pop(prompt), key=lambda one: one.row)
            self.add(prompt, one_prompt([self.sampling.rollout(one, asked.ids, version) for one in chosen], asked.ids))

    def take_back(self, steps: Steps, prompt: int) -> None:
        """Stop what is still drawn of a prompt."""
        numbers = [number for number, sequence in self.open.items() if sequence.prompt == prompt]
        steps.abort(numbers)
        for number in numbers:
            self.until.drop(prompt, len(self.open.pop(number).token_ids))
