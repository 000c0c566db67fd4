"""What vLLM is asked for, prompts or turns of a conversation, its steps, and its outputs as rollouts.

`LLM.generate` returns when all is finished. To report each prompt at once, to let turns enter, and to measure steps, we
use the two public methods that it consists of: `LLM.enqueue` and `LLMEngine.step` (the same in vLLM 0.26 to 0.33). How
many sequences run is asked of the scheduler, by `get_request_counts`, which all of vLLM's schedulers have; the way to
it is not public, so it stands here and nowhere else.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, Meanwhile, OnGroup, Request
from lowmem_grpo.engines.decoding import budget_of, cut_at_stop
from lowmem_grpo.engines.progress import Calls, ExpectedLengths, FinishedPrompts, Pace
from lowmem_grpo.engines.vllm.process_state import torch_states_kept
from lowmem_grpo.models.routes import Routes, one_prompt
from lowmem_grpo.types import Rollout

COLDEST = 0.01  # vLLM raises a lower temperature to this one


@dataclass(frozen=True)
class CallSampling:
    """vLLM's sampling options in one call of the engine."""

    params: SamplingParams
    max_seq_length: int
    vocabulary: int
    eos_ids: list[int]
    tokenizer: PreTrainedTokenizerBase
    make: Callable[..., Any]  # vLLM's SamplingParams
    routed: tuple[int, ...] = ()  # the layers that have experts

    def settings(self, asked: list[Request]) -> list[Any]:
        """Return vLLM's own settings for each request; ValueError for what vLLM would change or cannot compute."""
        if 0 < (temperature := self.params.temperature) < COLDEST:
            raise ValueError(f"temperature is {temperature}; vLLM samples at 0 (greedy) or from {COLDEST} on")
        check_vocabulary([request.ids for request in asked], self.vocabulary)
        return [self.settings_of(request) for request in asked]

    def settings_of(self, request: Request) -> Any:
        """Return vLLM's settings for a request. We pass the end tokens; vLLM decodes text only for stop strings."""
        params, budget = self.params, budget_of(request.ids, request.max_tokens, self.max_seq_length)
        return self.make(
            n=params.n, temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0),
            min_p=params.min_p or 0.0, max_tokens=budget, seed=request.seed, stop=params.stop_strings or None,
            stop_token_ids=[*(params.stop_token_ids or []), *([] if params.ignore_eos else self.eos_ids)],
            ignore_eos=True, include_stop_str_in_output=True, logprobs=0, detokenize=bool(params.stop_strings),
            skip_special_tokens=False,
        )

    def rollout(self, output: Any, prompt: list[int], version: int, cached: int = 0) -> Rollout:
        """Return a completion of vLLM as a rollout, with log-probabilities, and routes if vLLM returned them."""
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM gave up a completion ({output.finish_reason}); look at its log")
        ids = list(output.token_ids)
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
        if any(map(math.isnan, logprobs)):
            raise ArithmeticError("the model gave NaN logits: load it in bfloat16 or float32, and check the learning "
                                  "rate")
        text = str(self.tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens))
        return Rollout(ids, logprobs, output.finish_reason, cut_at_stop(text, self.params), version, cached,
                       routes=self.routes(output, len(prompt) + len(ids) - 1))

    def routes(self, output: Any, tokens: int) -> Routes | None:
        """Return the routes of so many tokens; None where vLLM returned none. RuntimeError where they do not fit."""
        experts = getattr(output, "routed_experts", None)  # (tokens, all layers, k), uint8 or uint16
        if experts is None:
            return None
        if len(experts) != tokens:
            raise RuntimeError(f"vLLM returned the routes of {len(experts)} tokens, and {tokens} ran; sample with "
                               'fast_inference="transformers", and report it with the version of vLLM')
        small = experts if experts.dtype.itemsize == 1 else experts.astype("int16")
        return Routes((torch.from_numpy(small)[:, list(self.routed)],))


class Steps:
    """The part of vLLM that a call uses: requests enter, and steps are made."""

    def __init__(self, llm: Any, pace: Pace) -> None:
        self.llm, self.pace = llm, pace

    def enqueue(self, prompts: list[list[int]], settings: list[Any]) -> list[str]:
        """Ask vLLM for completions of prompts (token ids); returns the names of the requests."""
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        names: list[str] = self.llm.enqueue(requests, settings, use_tqdm=False)
        return names

    @property
    def unfinished(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    @property
    def open(self) -> int:
        return int(self.llm.llm_engine.get_num_unfinished_requests())

    def abort(self, numbers: list[str]) -> None:
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


class Prompts(FinishedPrompts):
    """The prompts of one call of `generate`, and which of them are finished."""

    def __init__(self, prompts: list[list[int]], sampling: CallSampling, on_group: OnGroup | None,
                 meanwhile: Meanwhile | None = None, expected: ExpectedLengths | None = None) -> None:
        """With `expected` the prompts enter vLLM in its order. Their seeds follow from the given order."""
        super().__init__(len(prompts), on_group, meanwhile)
        self.expected = expected
        params, self.sampling = sampling.params, sampling
        seeds = seeds_of(params.seed, len(prompts), params.part)
        self.asked = [Request(number, ids, params.max_tokens, seed)
                      for number, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))]
        self.settings = sampling.settings(self.asked)

    def run(self, steps: Steps, version: int) -> None:
        """Sample all that is missing; each prompt is told as it finishes."""
        for prompt, output in self.outputs(steps, self.in_order()):
            with self.outside_the_engine():
                ids = self.asked[prompt].ids
                steps.was_read(len(ids))
                rollouts = [self.sampling.rollout(completion, ids, version) for completion in output.outputs]
                self.add(prompt, one_prompt(rollouts, ids))

    def in_order(self) -> list[int]:
        missing = self.missing
        if self.expected is None:
            return missing
        return [missing[place] for place in self.expected.order([self.asked[prompt].ids for prompt in missing])]

    def outputs(self, steps: Steps, missing: list[int]) -> Iterator[tuple[int, Any]]:
        """(prompt, vLLM's output with all completions) for the `missing` prompts, in the order in which they finish."""
        names = steps.enqueue([self.asked[prompt].ids for prompt in missing],
                              [self.settings[prompt] for prompt in missing])
        prompts = {number_of(name): prompt for name, prompt in zip(names, missing, strict=True)}
        while steps.unfinished:
            for output in steps.step():
                yield prompts[number_of(output.request_id)], output
            if self.meanwhile is not None:
                self.between(steps.open)


class OpenTurns(Calls):
    """The turns of one call of `converse` that are asked for and not given yet, in the order in which they came."""

    def __init__(self, conversation: Conversation, sampling: CallSampling, device: torch.device) -> None:
        self.conversation, self.sampling, self.device = conversation, sampling, device
        self.open: dict[int, tuple[Request, Any]] = {}  # by the key of the episode, with vLLM's settings
        self.routes: dict[int, tuple[list[int], Routes]] = {}  # by key: the tokens that ran, and their routes
        self.keys: dict[str, int] = {}  # the open turns, by the number of vLLM's request

    def run(self, steps: Steps, version: int) -> None:
        """Decode until the conversation has no more. Turns that were lost with another engine are asked for again;
        those that the conversation leaves behind with an error are taken back."""
        self.keys = {}
        self.enter(steps, list(self.open.values()))
        try:
            while self.more(steps):
                with torch_states_kept(self.device):  # not the conversation, whose environments may draw numbers
                    outputs = steps.step()
                for output in outputs:
                    steps.was_read(self.give_turn(output, version))
        except Exception:
            if self.failed_outside is not None:
                steps.abort(list(self.keys))
            raise

    def more(self, steps: Steps) -> bool:
        with self.outside_the_engine():
            asked = self.conversation.next_requests(busy=bool(self.open))
            new = list(zip(asked, self.sampling.settings(asked), strict=True)) if asked else []
            assert not [request.key for request in asked if request.key in self.open], "one turn of a key at a time"
        self.open |= {request.key: (request, settings) for request, settings in new}
        self.enter(steps, new)
        return bool(self.open)

    def enter(self, steps: Steps, turns: list[tuple[Request, Any]]) -> None:
        if turns:
            names = steps.enqueue([request.ids for request, _ in turns], [settings for _, settings in turns])
            self.keys |= {number_of(name): request.key for name, (request, _) in zip(names, turns, strict=True)}

    def give_turn(self, output: Any, version: int) -> int:
        """Give a turn that is drawn; whatever happens then, it is not given again. Returns how many tokens of its
        prompt were computed."""
        key = self.keys.pop(number_of(output.request_id))
        request, _ = self.open.pop(key)
        cached = output.num_cached_tokens or 0
        with self.outside_the_engine():
            rollout = self.sampling.rollout(output.outputs[0], request.ids, version, cached)
            self.share_routes(request, rollout)
            self.conversation.add_rollout(key, rollout)
        return len(request.ids) - cached

    def share_routes(self, request: Request, rollout: Rollout) -> None:
        """Let the routes of a turn share those of the last turn that it goes on from."""
        if rollout.routes is not None:
            ids, known = self.routes.get(request.key, ([], Routes(())))
            if request.ids[: len(ids)] == ids:
                rollout.routes = known.then(rollout.routes)
            self.routes[request.key] = [*request.ids, *rollout.completion_ids[:-1]], rollout.routes


def seeds_of(seed: int | None, count: int, part: tuple[int, int] | None = None) -> list[int]:
    """Return a seed for each prompt, far apart because vLLM adds the number of the completion to it. `part` is that of
    SamplingParams: the seeds are those of these places."""
    source = random.Random(seed) if seed is not None else random.SystemRandom()
    first = 0 if part is None else part[0]
    return [source.getrandbits(62) for _ in range(first + count)][first:]


def number_of(name: str) -> str:
    """Return a request's number: vLLM appends a random ending to its name."""
    return name.partition("-")[0]


def check_vocabulary(prompts: list[list[int]], size: int) -> None:
    """Raise ValueError for a token that the model does not know."""
    for number, prompt in enumerate(prompts):
        unknown = [token for token in prompt if not 0 <= token < size]
        if unknown:
            raise ValueError(f"prompt {number} has the token {unknown[0]}; the model's tokens are 0 to {size - 1}")
