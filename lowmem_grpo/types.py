"""The nouns of a run. P prompts, G completions of a prompt, T packed tokens, S packed sequences.

The alignment rule, stated once: index t of every (T,) field describes the prediction of `targets[t]`, the token that
follows `input_ids[t]` in its sequence. A sequence of L tokens therefore takes L - 1 places, and its last token is a
target only.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

Message = dict[str, Any]  # a chat's: `role`, `content`, and `tool_calls` or `name` where it has them
FAILURES = ("timeout", "environment_error")  # endings of episodes that are not the policy's


@dataclass
class ToolCall:
    """A tool that a policy asks for, as it was read from a completion."""

    name: str
    arguments: dict[str, Any]


@dataclass
class Turn:
    """One call of the engine in an episode, as the engine returned it, and what the environment answered."""

    prompt_ids: list[int]  # (P,) all that the engine saw
    completion_ids: list[int]  # (C,) as they were drawn
    logprobs: list[float]  # (C,) the sampler's own
    finish_reason: Literal["stop", "length"]  # as of the rollout that it is made of
    text: str = ""  # decoded, special tokens left out
    policy_version: int = 0
    cached_tokens: int = 0  # prompt tokens that the engine did not compute again
    message: Message = field(default_factory=dict)  # the assistant's, with the tool calls that were read from it
    replies: list[Message] = field(default_factory=list)  # tools' and the environment's, before the next turn
    reward: float | None = None  # that the environment paid for this turn
    state: str | None = None  # the key of the state that the policy acted in
    calls: int = 0  # to tools
    failures: int = 0  # calls that could not be read, or failed
    seconds: float = 0.0  # that its tools and its environment took
    exact: bool = True  # False: drawn at another temperature than the run's, or from a part of the vocabulary
    routes: Any = None  # `models.routes.Routes` (P + C - 1 tokens) of all that ran, where the model has experts


@dataclass(frozen=True)
class Split:
    """The place where another sequence of an episode begins: the template rewrote the history, or the environment left
    it out."""

    start: int  # the index of its first token among the C of its rollout
    prompt_ids: list[int] | None = None  # (P,) what comes before that token; None: the prompt of the group


@dataclass
class Rollout:
    """One sampled completion of C tokens (the end token included, where it was sampled), or one episode: all that
    followed the prompt, of which the policy drew the `trained` tokens. Fields of (C,) are 0 at the others."""

    completion_ids: list[int]  # (C,)
    rollout_logprobs: list[float]  # (C,) the sampler's own
    finish_reason: Literal["stop", "length"]
    text: str = ""  # decoded, special tokens left out; of an episode the last turn
    policy_version: int = 0  # the oldest that drew one of the tokens
    cached_tokens: int = 0  # prompt tokens that the engine did not compute again
    trained: list[bool] | None = None  # (C,) whether the policy drew the token, so that it is in the loss; None: all
    splits: list[Split] = field(default_factory=list)  # an episode of several sequences: where each further one begins
    turns: list[Turn] = field(default_factory=list)  # an episode's
    ending: str = ""  # why an episode ended
    asked: int = 0  # times that an episode's environment asked the base model
    unread: int = 0  # replies of the base model that its environment could not read
    environment: Any = None  # that the episode was played in, until its rewards are there
    columns: dict[str, Any] = field(default_factory=dict)  # that a `rollout_func` gave for the reward functions
    opening: list[Message] = field(default_factory=list)  # what came before an episode's first turn
    rewards: dict[str, float | None] = field(default_factory=dict)  # by reward function
    invalid_rewards: dict[str, float] = field(default_factory=dict)  # NaN and infinities, which are None in `rewards`
    reward: float | None = None  # their weighted sum
    advantage: float = 0.0
    token_advantages: Tensor | None = None  # (C,) where the estimator gives one to each token
    extras: dict[str, Any] = field(default_factory=dict)  # what reward functions gave to `log_extra`
    old_logprobs: Tensor | None = None  # (C,) at the start of the update; None where the data is on-policy
    ref_logprobs: Tensor | None = None  # (C,) under the base model; None without a KL term
    entropy: Tensor | None = None  # (C,) at the start of the update; None where the loss does not ask for it
    policy_mask: Tensor | None = None  # (C,) bool, tokens whose policy term counts; None for all
    routes: Any = None  # as in `Turn`, of a single completion with its prompt; those of an episode are its turns'

    @property
    def num_trained(self) -> int:
        """Tokens that the policy drew."""
        return len(self.completion_ids) if self.trained is None else sum(self.trained)

    @property
    def has_routes(self) -> bool:
        """Whether the sampler told which experts some tokens took."""
        return self.routes is not None or any(turn.routes is not None for turn in self.turns)

    @property
    def failed(self) -> bool:
        """Whether the episode ended for a reason that is not the policy's: it counts nowhere."""
        return self.ending in FAILURES

    @property
    def has_signal(self) -> bool:
        """Whether an advantage is not 0: of the whole, or of a turn."""
        of_turns = self.token_advantages if self.turns else None
        return bool(self.advantage) or (of_turns is not None and bool(of_turns.any()))

    @property
    def advantages(self) -> Tensor | float:
        """One for each token where there are such, (C,), else the completion's."""
        return self.advantage if self.token_advantages is None else self.token_advantages


@dataclass
class RolloutGroup:
    """The G completions of one prompt."""

    row: dict[str, Any]  # the dataset row
    prompt_ids: list[int]
    rollouts: list[Rollout]
    baseline: float | None = None  # the reward of the prompt's greedy completion, where the estimator asks for it
    row_index: int | None = None  # in the dataset, where the row is of one
    replayed: bool = False  # sampled for an earlier update, and used again
    unjudged: bool = False  # a required function had no opinion on a rollout: the rewards count for nothing

    @property
    def lost(self) -> bool:
        """Whether so many of its episodes failed that fewer than two are left to compare."""
        failed = sum(rollout.failed for rollout in self.rollouts)
        return failed > 0 and len(self.rollouts) - failed < 2


@dataclass
class MicroBatch:
    """S whole sequences packed without padding into T places; see the alignment rule above.

    They are those of R rollouts: one of each, or several of an episode whose history was rewritten. Sequences of one
    prompt share the places of its tokens but the last. Laid side by side in width W = max_seqlen, the sequences' tokens
    come from `sources`, and results go back to the packed places through `places`.
    """

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, from 0 in each sequence
    targets: Tensor  # (T,) int64
    cu_seqlens: Tensor  # (S + 1,) int32, summed lengths of the sequences, each with its prompt
    max_seqlen: int
    sources: Tensor  # (S * W,) int64, index into T
    places: Tensor  # (T,) int64, index into S * W; of a shared place, that in the first sequence
    copies: Tensor  # (T,) int64, of how many sequences the place is, which are neighbours: 1 where it is not shared
    prompts: tuple[tuple[int, ...], ...]  # by prompt: places of its own (P - 1), and of each of its completions
    loss_mask: Tensor  # (T,) bool, tokens that the policy drew
    trained: Tensor  # (N,) int64, where loss_mask is True: found on the host, as a card would have to be waited for
    sequence_ids: Tensor  # (T,) int64, the rollout, 0 .. R - 1; of a shared place, the first one
    advantages: Tensor  # (T,) float32
    rollout_logprobs: Tensor  # (T,) float32
    old_logprobs: Tensor | None = None  # (T,) float32
    ref_logprobs: Tensor | None = None  # (T,) float32
    policy_mask: Tensor | None = None  # (T,) bool
    rollouts: tuple[Rollout, ...] = ()  # the R packed completions, in order
    host_ids: Tensor | None = None  # (T,) int64, `input_ids` as they were packed, which stay on the host
    homes: Tensor | None = None  # (N,) int64, on the host: where trained tokens lie in the rollouts' (C,) joined; None:
    # they are all of these, in order
    routes: Tensor | None = None  # (T, layers, k) uint8 or int16, experts that the sampler chose; None: it told none
    routed: Tensor | None = None  # (T,) bool, places that have routes; None for all

    def at_trained(self, values: Tensor) -> Tensor:
        """Values (T, ...) at the tokens that the policy drew, (N, ...)."""
        return values.index_select(0, self.trained)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return the same batch with every tensor on `device`, but for `host_ids` and `homes`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("host_ids", "homes")}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items() if torch.is_tensor(value)}
        changes: dict[str, Any] = moved
        return replace(self, **changes)


@dataclass
class LossOutput:
    """The scalar to call backward on, and what to log, detached."""

    loss: Tensor
    metrics: dict[str, Tensor]  # means over this call, or min and max
    counts: dict[str, float] = field(default_factory=dict)  # by mean: over how many tokens or sequences
    samples: dict[str, Tensor] = field(default_factory=dict)  # (N,) values whose percentiles over the step are of use
    policy_loss: Tensor | None = None  # the loss without its entropy bonus
