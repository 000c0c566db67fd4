"""The prompts of a call that may end before all of its sequences have: each completion is a request of its own.

vLLM returns a prompt with n completions when all n are done. As requests of their own, with the seeds that vLLM would
give them, they draw the same tokens and can be taken back one by one; vLLM computes their prompt once all the same, if
it caches prefixes. Their tokens are told as they are drawn (`RequestOutputKind.DELTA`), so that it is known what a
sequence had when it was taken back.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from lowmem_grpo.engines.base import Meanwhile, OnGroup, Request, Until
from lowmem_grpo.engines.expected import ExpectedLengths
from lowmem_grpo.engines.vllm.requests import Prompts, Sampling, number_of
from lowmem_grpo.engines.vllm.steps import Steps
from lowmem_grpo.models.routes import one_prompt
from lowmem_grpo.types import Rollout


@dataclass(eq=False)
class Sequence:
    """One completion, as far as it is drawn. What is done of it has the fields of vLLM's own completion."""

    prompt: int
    row: int  # of the prompt's n
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # vLLM's, of each token
    finish_reason: str | None = None
    routed_experts: Any = None
    begun: Rollout | None = None  # what an earlier call had drawn of it

    @property
    def tokens(self) -> int:
        """Tokens that it has, with those of an earlier call."""
        return len(self.token_ids) + (0 if self.begun is None else len(self.begun.completion_ids))

    def rollout(self, sampling: Sampling, prompt: list[int], version: int) -> Rollout:
        """The completion, with what an earlier call had drawn of it."""
        if self.begun is None:
            return sampling.rollout(self, prompt, version) if self.finish_reason else self.unfinished(version)
        if self.begun.finish_reason != "unfinished":
            return self.begun
        earlier = self.begun.completion_ids
        new = sampling.rollout(self, [*prompt, *earlier], version) if self.finish_reason else self.unfinished(version)
        ids = [*earlier, *new.completion_ids]
        text = str(sampling.tokenizer.decode(ids, skip_special_tokens=sampling.params.skip_special_tokens))
        return replace(new, completion_ids=ids, text=text,
                       rollout_logprobs=[*self.begun.rollout_logprobs, *new.rollout_logprobs])

    def unfinished(self, version: int) -> Rollout:
        """What it drew until the call ended."""
        logprobs = [step[token].logprob for step, token in zip(self.logprobs, self.token_ids, strict=True)]
        return Rollout(self.token_ids, logprobs, "unfinished", "", version)

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
        sequences = [Sequence(prompt, row, begun=self.begun(prompt, row))
                     for prompt in missing for row in range(self.n)]
        for one in sequences:
            if one.begun is not None and one.begun.finish_reason != "unfinished":
                self.ended[one.prompt].append(one)
        new = [one for one in sequences if one not in self.ended[one.prompt]]
        asked = [self.request(one) for one in new]
        for number, (one, request, own) in enumerate(zip(new, asked, self.sampling.settings(asked), strict=True)):
            self.open[str(number)] = one
            steps.enter(str(number), request.ids, own)

    def begun(self, prompt: int, row: int) -> Rollout | None:
        """What an earlier call has left of a sequence."""
        return self.until.begun[prompt][row] if prompt in self.until.begun else None

    def request(self, one: Sequence) -> Request:
        """What vLLM is asked for: to go on with the prompt and what is drawn already."""
        asked, earlier = self.asked[one.prompt], [] if one.begun is None else one.begun.completion_ids
        return replace(asked, ids=[*asked.ids, *earlier], max_tokens=asked.max_tokens - len(earlier),
                       seed=asked.seed + one.row)

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
                self.until.drop(sequence.prompt, sequence.tokens)
                continue
            self.ended[sequence.prompt].append(sequence)
            if len(self.ended[sequence.prompt]) == self.until.enough:
                self.finish(steps, sequence.prompt, version)
        if done and self.until.ends(self.rollouts):
            self.leave(steps, version)

    def leave(self, steps: Steps, version: int) -> None:
        """Enough prompts are finished: keep what there is of the others."""
        steps.abort([*self.open])
        for prompt in self.missing:
            rows = [*self.ended[prompt], *(one for one in self.open.values() if one.prompt == prompt)]
            self.until.left[prompt] = [one.rollout(self.sampling, self.asked[prompt].ids, version)
                                       for one in sorted(rows, key=lambda one: one.row)]
        self.open.clear()

    def finish(self, steps: Steps, prompt: int, version: int) -> None:
        """Enough sequences of a prompt are done."""
        asked = self.asked[prompt]
        self.take_back(steps, prompt)
        steps.was_read(len(asked.ids))
        with self.outside_the_engine():
            chosen = sorted(self.ended.pop(prompt), key=lambda one: one.row)
            self.add(prompt, one_prompt([one.rollout(self.sampling, asked.ids, version) for one in chosen], asked.ids))

    def take_back(self, steps: Steps, prompt: int) -> None:
        """Stop what is still drawn of a prompt."""
        numbers = [number for number, sequence in self.open.items() if sequence.prompt == prompt]
        steps.abort(numbers)
        for number in numbers:
            self.until.drop(prompt, self.open.pop(number).tokens)
