"""Requests to vLLM (prompts, or turns of a conversation), vLLM's steps, and the conversion of its outputs to rollouts.

`LLM.generate` returns only when all requests are finished. To report each prompt at once, admit new turns and measure
steps, we call the two public methods that `generate` calls: `LLM.enqueue` and `LLMEngine.step` (the same in vLLM 0.26
to 0.33). `enqueue` asks for finished outputs only, so `LLMEngine.add_request`, also public, queues a turn whose tokens
are passed on as they come. The number of running sequences comes from `get_request_counts`, which every scheduler of
vLLM has; the path to the scheduler is not public, so only this file uses it.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Calls, Conversation, ExpectedLengths, FinishedPrompts, Meanwhile, Pace, Request
from lowmem_grpo.engines.decoding import budget_of, cut_at_stop
from lowmem_grpo.engines.vllm.process_state import torch_states_kept
from lowmem_grpo.models.routes import Routes, one_prompt
from lowmem_grpo.types import ImageToken, OnGroup, Rollout

AS_TOKENS = {"type": "token"}  # newer versions ask `add_request` for it, older ones ignore it
STREAMED = itertools.count()  # numbers of streamed requests
COLDEST = 0.01  # vLLM silently raises lower temperatures to this


@dataclass(frozen=True)
class CallSampling:
    """The sampling options of one engine call, in vLLM's form."""

    params: SamplingParams
    max_seq_length: int
    vocabulary: int
    eos_ids: list[int]
    tokenizer: PreTrainedTokenizerBase
    make: Callable[..., Any]  # vLLM's SamplingParams
    routed: tuple[int, ...] = ()  # indices of the layers with experts

    def settings(self, asked: list[Request]) -> list[Any]:
        """Return vLLM's SamplingParams of each request; ValueError for invalid token ids, budgets or temperatures."""
        if 0 < (temperature := self.params.temperature) < COLDEST:
            raise ValueError(f"temperature is {temperature}; vLLM samples at 0 (greedy) or from {COLDEST} on")
        for number, request in enumerate(asked):
            if unknown := [token for token in request.ids if not 0 <= token < self.vocabulary]:
                raise ValueError(f"prompt {number} has the token {unknown[0]}; the model's tokens are 0 to "
                                 f"{self.vocabulary - 1}")
        params = self.params  # EOS ids are passed as stop tokens; vLLM detokenizes only if there are stop strings
        return [self.make(
            n=params.n, temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0),
            min_p=params.min_p or 0.0, max_tokens=budget_of(request.ids, request.max_tokens, self.max_seq_length),
            seed=request.seed, stop=params.stop_strings or None,
            stop_token_ids=[*(params.stop_token_ids or []), *([] if params.ignore_eos else self.eos_ids)],
            ignore_eos=True, include_stop_str_in_output=True, logprobs=0, flat_logprobs=True,
            detokenize=bool(params.stop_strings), skip_special_tokens=False,
        ) for request in asked]

    def rollout(self, output: Any, prompt: list[int], version: int, cached: int = 0) -> Rollout:
        """Return vLLM's completion, which may be unfinished (finish_reason None), as a rollout. RuntimeError if vLLM
        aborted it, ArithmeticError for NaN log-probs."""
        if output.finish_reason not in ("stop", "length", None):
            raise RuntimeError(f"vLLM gave up a completion ({output.finish_reason}); look at its log")
        ids = list(output.token_ids)
        logprobs = logprobs_from(output, 0)
        if any(map(math.isnan, logprobs)):
            raise ArithmeticError("the model gave NaN logits: load it in bfloat16 or float32, and check the learning "
                                  "rate")
        text = str(self.tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens))
        return Rollout(ids, logprobs, output.finish_reason or "length", cut_at_stop(text, self.params), version, cached,
                       routes=self.routes(output, len(prompt) + len(ids) - 1))

    def routes(self, output: Any, tokens: int) -> Routes | None:
        """Return an output's expert routes; None if vLLM gave none. RuntimeError if their number is not `tokens`."""
        experts = getattr(output, "routed_experts", None)  # (tokens, all layers, k), uint8 or uint16
        if experts is None:
            return None
        if len(experts) != tokens:
            raise RuntimeError(f"vLLM returned the routes of {len(experts)} tokens, and {tokens} ran; sample with "
                               'fast_inference="transformers", and report it with the version of vLLM')
        small = experts if experts.dtype.itemsize == 1 else experts.astype("int16")
        return Routes((torch.from_numpy(small)[:, list(self.routed)],))


class Steps:
    """The vLLM interface of a call: enqueue requests, and run steps."""

    def __init__(self, llm: Any, pace: Pace) -> None:
        self.llm, self.pace = llm, pace

    def enqueue(self, prompts: list[list[int]], settings: list[Any]) -> list[str]:
        """Queue prompts (token ids) in vLLM; returns the request ids."""
        names: list[str] = self.llm.enqueue([*map(as_vllm, prompts)], settings, use_tqdm=False)
        return names

    def stream(self, prompt: list[int], settings: Any) -> str:
        """Queue a prompt of which each step returns an output; returns the request id."""
        name = f"streamed{next(STREAMED)}"
        self.llm.llm_engine.add_request(name, as_vllm(prompt) | AS_TOKENS, settings)
        return name

    def step(self) -> list[Any]:
        """Run a step; returns the outputs of the requests that it finishes, and of those that `stream` queued. A step
        that admits waiting sequences also prefills them, so its time counts as prefill. A step that preempts a sequence
        admits none."""
        running, waiting = self.counts()
        self.pace.resume()
        outputs: list[Any] = self.llm.llm_engine.step()
        entered = waiting - self.counts()[1]
        if entered > 0:
            self.pace.read(0)
        self.pace.preemptions += max(0, -entered)
        self.pace.step(running + entered)
        return outputs

    def counts(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting sequences."""
        running, waiting = self.llm.llm_engine.engine_core.engine_core.scheduler.get_request_counts()
        return running, waiting


class Prompts(FinishedPrompts):
    """The prompts of one call of `generate`, and the rollouts of those that are finished."""

    def __init__(self, prompts: list[list[int]], sampling: CallSampling, on_group: OnGroup | None,
                 meanwhile: Meanwhile | None = None, expected: ExpectedLengths | None = None) -> None:
        """Prepare the requests. With `expected`, prompts with the longest expected completions enter vLLM first. Seeds
        do not depend on this order."""
        super().__init__(len(prompts), on_group, meanwhile)
        self.expected = expected
        params, self.sampling = sampling.params, sampling
        shared = params.part is not None and params.seed is not None
        source = random.Random(params.seed) if shared else random.SystemRandom()
        first = 0 if params.part is None else params.part[0]
        # Far apart, because vLLM adds a completion's index to it; with a part, as in the whole call
        seeds = [source.getrandbits(62) for _ in range(first + len(prompts))][first:]
        if params.seeds is not None:
            seeds = params.seeds[:1] * len(prompts)
        self.asked = [Request(number, ids, params.max_tokens, seed)
                      for number, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))]
        self.settings = sampling.settings(self.asked)

    def run(self, steps: Steps, version: int) -> None:
        """Sample the missing prompts, and pass each to `on_group` as it finishes."""
        missing, engine = self.missing, steps.llm.llm_engine
        if self.expected is not None:
            missing = [missing[at] for at in self.expected.order([self.asked[prompt].ids for prompt in missing])]
        names = steps.enqueue([self.asked[prompt].ids for prompt in missing],
                              [self.settings[prompt] for prompt in missing])
        prompts = {number_of(name): prompt for name, prompt in zip(names, missing, strict=True)}
        while engine.has_unfinished_requests():
            for output in steps.step():
                self.give_prompt(prompts[number_of(output.request_id)], output, steps.pace, version)
            if self.meanwhile is not None:
                self.between(int(engine.get_num_unfinished_requests()))

    def give_prompt(self, prompt: int, output: Any, pace: Pace, version: int) -> None:
        ids = self.asked[prompt].ids
        pace.tokens["prefill"] += len(ids)
        with self.outside_the_engine():
            rollouts = [self.sampling.rollout(completion, ids, version) for completion in output.outputs]
            self.add(prompt, one_prompt(rollouts, ids))


class OpenTurns(Calls):
    """The requested turns of one call of `converse` that are not finished, in the order of their requests."""

    def __init__(self, conversation: Conversation, sampling: CallSampling, device: torch.device) -> None:
        self.conversation, self.sampling, self.device = conversation, sampling, device
        self.open: dict[int, tuple[Request, Any]] = {}  # by episode key, with vLLM's SamplingParams
        self.routes: dict[int, tuple[list[int], Routes]] = {}  # by episode key: the tokens fed, and their routes
        self.keys: dict[str, int] = {}  # episode keys of the open turns by vLLM's request number
        self.told: dict[int, int] = {}  # by episode key: how many tokens of the open turn `on_tokens` got

    def run(self, steps: Steps, version: int) -> None:
        """Decode until the conversation has no more turns. Turns lost with an earlier engine are queued again; if the
        conversation raises an error, its open turns are aborted."""
        self.keys = {}
        self.enter(steps, list(self.open.values()))
        try:
            while self.more(steps):
                with torch_states_kept(self.device):  # around the step only: environments may draw random numbers
                    outputs = steps.step()
                for output in outputs:
                    if not output.finished:
                        if self.tell(output):
                            continue
                        steps.llm.llm_engine.abort_request([number_of(output.request_id)])
                    steps.pace.tokens["prefill"] += self.give_turn(output, version)
        except Exception:
            if self.failed_outside is not None and self.keys:
                steps.llm.llm_engine.abort_request(list(self.keys))
            raise

    def more(self, steps: Steps) -> bool:
        """Queue the conversation's next requests. Return False if no turn is open then."""
        with self.outside_the_engine():
            asked = self.conversation.next_requests(busy=bool(self.open))
            new = list(zip(asked, self.sampling.settings(asked), strict=True)) if asked else []
            assert not [request.key for request in asked if request.key in self.open], "one turn of a key at a time"
        self.open |= {request.key: (request, settings) for request, settings in new}
        self.enter(steps, new)
        return bool(self.open)

    def enter(self, steps: Steps, turns: list[tuple[Request, Any]]) -> None:
        whole = [turn for turn in turns if turn[0].on_tokens is None]
        if whole:
            names = steps.enqueue([request.ids for request, _ in whole], [settings for _, settings in whole])
            self.keys |= {number_of(name): request.key for name, (request, _) in zip(names, whole, strict=True)}
        for request, settings in turns:
            if request.on_tokens is not None:
                self.keys[steps.stream(request.ids, settings)] = request.key

    def tell(self, output: Any) -> bool:
        """Pass the new tokens of an unfinished turn to `on_tokens`, also if another engine sampled the first ones.
        Return whether the turn shall go on."""
        key = self.keys[number_of(output.request_id)]
        (request, _), (completion,), told = self.open[key], output.outputs, self.told.get(key, 0)
        new = list(completion.token_ids[told:])
        self.told[key] = told + len(new)
        with self.outside_the_engine():
            return not new or request.on_tokens is None or request.on_tokens(new, logprobs_from(completion, told))

    def give_turn(self, output: Any, version: int) -> int:
        """Pass a finished turn to the conversation, never twice; return how many of its prompt tokens were uncached."""
        key = self.keys.pop(number_of(output.request_id))
        request, _ = self.open.pop(key)
        self.told.pop(key, None)
        cached = output.num_cached_tokens or 0
        with self.outside_the_engine():
            rollout = self.sampling.rollout(output.outputs[0], request.ids, version, cached)
            if rollout.routes is not None:  # tokens that the episode's last turn has too keep their routes
                ids, known = self.routes.get(key, ([], Routes(())))
                if request.ids[: len(ids)] == ids:
                    rollout.routes = known.then(rollout.routes)
                self.routes[key] = [*request.ids, *rollout.completion_ids[:-1]], rollout.routes
            self.conversation.add_rollout(key, rollout)
        return len(request.ids) - cached


def as_vllm(prompt: list[int]) -> dict[str, Any]:
    """Return a prompt as vLLM's TokensPrompt. An image's name is its key in vLLM's caches, which must hold its data."""
    images = [token.image for token, _ in groupby(prompt) if isinstance(token, ImageToken)]
    named = {"multi_modal_data": {"image": [None] * len(images)}, "multi_modal_uuids": {"image": images}}
    return {"prompt_token_ids": [*map(int, prompt)]} | (named if images else {})


def logprobs_from(output: Any, start: int) -> list[float]:
    """Return the log-probabilities of a completion's tokens from index `start` on: of each token's, the first."""
    held = output.logprobs  # vLLM's FlatLogprobs, which has no object for a token
    return [held.logprobs[first] for first in held.start_indices[start:]]


def number_of(name: str) -> str:
    """Return the number in a request id, to which vLLM appends a random suffix."""
    return name.partition("-")[0]
