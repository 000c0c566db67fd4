"""Rollouts in the shape of vLLM's RequestOutput. `logprobs=k` recomputes log-probabilities at temperature 1."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.decoding import first_stop
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy, evaluating
from lowmem_grpo.types import Rollout, RolloutGroup

ROWS = 256  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class LoraRequest:
    """The adapter for `fast_generate`: a saved adapter by its folder, or the model's current adapter (path None)."""

    path: Path | None


def as_request(adapter: Any) -> LoraRequest | None:
    """Return our LoraRequest for ours, vLLM's or an adapter's path, and None for None; TypeError for other types."""
    if adapter is None or isinstance(adapter, LoraRequest):
        return adapter
    path = getattr(adapter, "lora_path", adapter)
    if not isinstance(path, str | Path):
        raise TypeError(f"lora_request is a {type(adapter).__name__}; pass model.load_lora(FOLDER), "
                        "model.current_lora(), or None for the base model")
    return LoraRequest(Path(path).expanduser().absolute())


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, with vLLM's field names."""

    logprob: float
    rank: int  # 1 for the most likely token
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One completion, with vLLM's field names.

    `logprobs` are those of the drawn tokens under the sampling distribution. With `SamplingParams(logprobs=k)` they
    have vLLM's shape: for each position, the drawn token and the k most likely ones.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | list[dict[int, Logprob]]
    finish_reason: str
    cumulative_logprob: float = 0.0  # the sum over the drawn tokens
    stop_reason: int | str | None = None  # the stop string or stop token that ended it; None for an EOS token
    lora_request: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class RequestOutput:
    """The completions of one prompt, with vLLM's field names."""

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_id: str = field(default="0", compare=False)
    finished: bool = True
    prompt_logprobs: None = None
    lora_request: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class OutputProcessor:
    """The conversion of rollouts to vLLM's RequestOutput."""

    policy: Policy
    tokenizer: Any
    params: SamplingParams
    lora_request: Any = None

    def request_output(self, number: int, text: str, ids: list[int], rollouts: list[Rollout]) -> RequestOutput:
        outputs = [self.completion(index, ids, rollout) for index, rollout in enumerate(rollouts)]
        return RequestOutput(text, ids, outputs, str(number), lora_request=self.lora_request)

    def completion(self, index: int, prompt_ids: list[int], rollout: Rollout) -> CompletionOutput:
        drawn: Any = rollout.rollout_logprobs
        total = sum(drawn)
        if self.params.logprobs is not None:
            drawn = self.likeliest(prompt_ids, rollout)
            total = sum(place[token].logprob for place, token in zip(drawn, rollout.completion_ids, strict=True))
        return CompletionOutput(index, rollout.text, rollout.completion_ids, drawn, rollout.finish_reason, total,
                                self.stop_reason(rollout), self.lora_request)

    def stop_reason(self, rollout: Rollout) -> int | str | None:
        if rollout.finish_reason != "stop":
            return None
        if rollout.completion_ids[-1] in (self.params.stop_token_ids or []):
            return rollout.completion_ids[-1]
        text = self.tokenizer.decode(rollout.completion_ids) if self.params.stop_strings else ""
        match = first_stop(text, self.params)
        return None if match is None else match[1]

    @torch.no_grad()
    def likeliest(self, prompt_ids: list[int], rollout: Rollout) -> list[dict[int, Logprob]]:
        """Return, for each of the C positions, the drawn token and the `params.logprobs` most likely ones (-1: all)."""
        batch = collate([(RolloutGroup({}, prompt_ids, [rollout]), rollout)]).to(self.policy.device)
        with evaluating(self.policy.model):
            hidden, targets = self.policy.at_trained(batch)
        return [place for start in range(0, len(targets), ROWS)
                for place in self.places(hidden[start : start + ROWS], targets[start : start + ROWS])]

    def places(self, hidden: Tensor, targets: Tensor) -> list[dict[int, Logprob]]:
        """Return what `likeliest` does, for N positions with hidden states (N, D) and drawn tokens (N,)."""
        logprobs = self.policy.head.logits(hidden).log_softmax(-1)
        asked = self.params.logprobs or 0
        count = logprobs.shape[1] if asked == -1 else min(asked, logprobs.shape[1])
        top = logprobs.topk(count, -1)
        drawn = logprobs.gather(-1, targets[:, None])
        ranks = (logprobs > drawn).sum(-1) + 1
        rows = zip(targets.tolist(), drawn.squeeze(-1).tolist(), ranks.tolist(), top.indices.tolist(),
                   top.values.tolist(), strict=True)
        return [self.place(*row) for row in rows]

    def place(self, token: int, logprob: float, rank: int, ids: list[int], values: list[float]) -> dict[int, Logprob]:
        tokens = {token: (logprob, rank)}
        for number, (other, value) in enumerate(zip(ids, values, strict=True), start=1):
            tokens.setdefault(other, (value, number))
        return {each: Logprob(value, place, self.tokenizer.decode([each])) for each, (value, place) in tokens.items()}
