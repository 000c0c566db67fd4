"""The data types of a run: P prompts, G completions of a prompt, T packed tokens, S packed sequences.

The alignment rule, stated once: index t of every (T,) field describes the prediction of `targets[t]`, the token that
follows `input_ids[t]` in its sequence. A sequence of L tokens therefore takes L - 1 positions, and its last token is a
target only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass, replace
from logging import Logger
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Literal

from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor


Message = dict[str, Any]  # `role`, `content`, and sometimes `tool_calls` or `name`
UNCHANGING = frozenset({type(None), bool, int, float, str, bytes})
FAILURES = ("timeout", "environment_error")  # endings of episodes that are not the policy's fault


class ImageToken(int):
    """A prompt's token id that stands for a part of an image, which `image` names by its content. The token equals no
    other image's, so a prompt with images is a list of ids that can be compared, hashed, cut and joined like any other.
    Only what stores plain integers, such as a tensor, loses the name."""

    image: str
    __ne__ = object.__ne__  # int's ignores the image

    def __new__(cls, token: int, image: str = "") -> ImageToken:
        made = super().__new__(cls, token)
        made.image = image
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageToken) and (int(self), self.image) == (int(other), other.image)

    def __hash__(self) -> int:
        return hash((int(self), self.image))


@dataclass
class ToolCall:
    """A tool call of the policy, as parsed from a completion."""

    name: str
    arguments: dict[str, Any]


@dataclass
class Turn:
    """One call of the engine in an episode, as the engine returned it, and the environment's answer."""

    prompt_ids: list[int]  # (P,) the whole input of the engine
    completion_ids: list[int]  # (C,) as they were sampled
    logprobs: list[float]  # (C,) as the sampler computed them
    finish_reason: Literal["stop", "length"]  # as the engine returned it
    text: str = ""  # decoded, special tokens left out
    policy_version: int = 0
    cached_tokens: int = 0  # prompt tokens that the engine did not compute again
    message: Message = field(default_factory=dict)  # the assistant's, with the parsed tool calls
    replies: list[Message] = field(default_factory=list)  # from tools and the environment, before the next turn
    reward: float | None = None  # paid by the environment for this turn
    state: str | None = None  # the key of the state that the policy acted in
    calls: int = 0  # tool calls
    failures: int = 0  # tool calls that could not be parsed, or failed
    seconds: float = 0.0  # spent in tools and the environment
    exact: bool = True  # False: sampled at another temperature than the run's, or from a part of the vocabulary
    routes: Any = None  # `models.routes.Routes` of the P + C - 1 computed tokens, for a model with experts


@dataclass(frozen=True)
class Split:
    """The start of a further sequence of an episode: the chat template rewrote the history before it, or the
    environment dropped that history."""

    start: int  # the index of the sequence's first token among the C tokens of the rollout
    prompt_ids: list[int] | None = None  # (P,) the tokens before it; None: the prompt of the group


@dataclass
class Rollout:
    """One sampled completion of C tokens (with the end token, if it was sampled), or one episode. An episode's C tokens
    are all that follow the prompt; the policy sampled the `trained` ones. At all other tokens, values such as
    log-probabilities are 0."""

    completion_ids: list[int]  # (C,)
    rollout_logprobs: list[float]  # (C,) as the sampler computed them
    finish_reason: Literal["stop", "length"]
    text: str = ""  # decoded, special tokens left out; the last turn of an episode
    policy_version: int = 0  # the oldest policy version among those that sampled the tokens
    cached_tokens: int = 0  # prompt tokens that the engine did not compute again
    trained: list[bool] | None = None  # (C,) True: the policy sampled it, and the loss counts it; None: all tokens
    splits: list[Split] = field(default_factory=list)  # where each further sequence of an episode begins
    turns: list[Turn] = field(default_factory=list)  # the turns of an episode
    ending: str = ""  # why an episode ended
    asked: int = 0  # requests of the episode's environment to the base model
    unread: int = 0  # replies of the base model that the environment could not parse
    environment: Any = None  # kept until the episode's rewards are computed
    columns: dict[str, Any] = field(default_factory=dict)  # from a `rollout_func`, for the reward functions
    opening: list[Message] = field(default_factory=list)  # messages before an episode's first turn
    rewards: dict[str, float | None] = field(default_factory=dict)  # by reward function
    invalid_rewards: dict[str, float] = field(default_factory=dict)  # NaN and infinities, which are None in `rewards`
    reward: float | None = None  # the weighted sum of `rewards`
    advantage: float = 0.0
    token_advantages: Tensor | None = None  # (C,) if the estimator gives one to each token
    extras: dict[str, Any] = field(default_factory=dict)  # values that reward functions passed to `log_extra`
    old_logprobs: Tensor | None = None  # (C,) at the start of the update; None if the data is on-policy
    ref_logprobs: Tensor | None = None  # (C,) under the reference policy (`kl_reference`); None without a KL term
    entropy: Tensor | None = None  # (C,) at the start of the update; None if the loss does not need it
    policy_mask: Tensor | None = None  # (C,) bool, tokens whose policy term counts; None for all
    routes: Any = None  # as in `Turn`, for a single completion; in an episode each turn has its routes
    teacher_prompt: list[int] | None = None  # (P,) behind which a teacher reads the completion; None: the group's
    trains_prompt: bool = False  # the prompt's tokens after the first are trained too, once for all that share them
    unit: int | None = None  # a loss that couples rollouts of a group, as a pair's, gives them the same unit
    fields: dict[str, Any] = field(default_factory=dict)  # by name, those of TOKEN_FIELDS that are not attributes

    @property
    def num_trained(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.completion_ids) if self.trained is None else sum(self.trained)

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens that the policy sampled."""
        ids, trained = self.completion_ids, self.trained
        return ids if trained is None else [token for token, own in zip(ids, trained, strict=True) if own]

    @property
    def has_routes(self) -> bool:
        """True if the sampler reported the experts of some tokens."""
        return self.routes is not None or any(turn.routes is not None for turn in self.turns)

    @property
    def failed(self) -> bool:
        """True if the episode ended through no fault of the policy. Such an episode is left out everywhere."""
        return self.ending in FAILURES

    @property
    def has_signal(self) -> bool:
        """True if the rollout's advantage, or the advantage of one of its turns, is not 0."""
        of_turns = self.token_advantages if self.turns else None
        return bool(self.advantage) or (of_turns is not None and bool(of_turns.any()))

    @property
    def advantages(self) -> Tensor | float:
        """The tokens' advantages (C,) if the estimator computes one for each token, else the rollout's advantage."""
        return self.advantage if self.token_advantages is None else self.token_advantages

    def at_trained(self, values: Tensor) -> Tensor:
        """Return those of `values` (C,) that are at trained tokens, as a tensor (N,)."""
        return values if self.trained is None else values[torch.tensor(self.trained, dtype=torch.bool)]

    def with_context(self, values: Tensor) -> Tensor:
        """Return a tensor (C,) with `values` (N,) at the trained tokens, and 0 at all others."""
        if self.trained is None:
            return values
        return values.new_zeros(len(self.trained)).masked_scatter(torch.tensor(self.trained, dtype=torch.bool), values)


OnGroup = Callable[[int, list[Rollout]], None]  # (index of a prompt, all its rollouts)


@dataclass
class RolloutGroup:
    """The G completions of one prompt."""

    row: dict[str, Any]  # the dataset row
    prompt_ids: list[int]
    rollouts: list[Rollout]
    baseline: float | None = None  # the reward of the prompt's greedy completion, if the estimator needs it
    row_index: int | None = None  # in the dataset, if the row is from one
    replayed: bool = False  # sampled for an earlier update, and used again
    unjudged: bool = False  # a required function left a rollout unscored: the group's rewards are not used

    @property
    def lost(self) -> bool:
        """True if so many episodes failed that fewer than two are left to compare."""
        failed = sum(rollout.failed for rollout in self.rollouts)
        return failed > 0 and len(self.rollouts) - failed < 2


@dataclass(frozen=True)
class TokenField:
    """A value for each token of a rollout, (C, ...), or one for all. A rollout has it as the attribute of this name, or
    else in `fields`. A micro-batch has it in `fields`, (T, ...), with 0 at tokens of a prompt."""

    name: str
    dtype: str | None = "float32"  # None: that of the value
    kept: bool = False  # True: a group that is replayed has it again
    value: Callable[[Any], Tensor] | None = None  # (N, ...), from the `PolicyOutputs` of a pass; None: not computed
    under: Callable[[Any], AbstractContextManager[Any]] | None = None  # the pass's context of the `Policy`, which may
    # give another `Policy` that computes
    behind: Callable[[list[RolloutGroup]], list[RolloutGroup]] | None = None  # other prompts, for the same completions
    of_all: bool = False  # True: also computed for rollouts without a gradient
    told: bool = True  # False: too large for all ranks to have it, where no rank needs that of another's rollouts
    packed: bool = True  # False: a micro-batch reads it from its rollouts, by `MicroBatch.of_rollouts`

    @property
    def source(self) -> tuple[Any, Any]:
        """The context and the prompts that the fields of one pass share."""
        return self.under, self.behind

    def of(self, rollout: Rollout) -> Any:
        """Return the rollout's value, or None."""
        return rollout.fields.get(self.name, getattr(rollout, self.name, None))

    def put(self, rollout: Rollout, value: Any) -> None:
        (vars(rollout) if self.name in vars(rollout) else rollout.fields)[self.name] = value

    def read(self, outputs: Any) -> Tensor:
        """Return the value (N, ...) of a pass with these `PolicyOutputs`, on the host."""
        assert self.value is not None, f"no pass computes {self.name}"
        return self.value(outputs).to("cpu", self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else getattr(torch, self.dtype)


TOKEN_FIELDS = {row.name: row for row in (
    TokenField("rollout_logprobs", kept=True),
    TokenField("old_logprobs", value=attrgetter("logprobs")),
    TokenField("ref_logprobs", value=attrgetter("logprobs"), under=methodcaller("reference")),
    TokenField("entropy", value=methodcaller("entropy"), of_all=True),
    TokenField("policy_mask", "bool"),
    TokenField("advantages"),
    TokenField("teacher_logprobs", value=attrgetter("logprobs")),
    TokenField("teacher_entropy", value=methodcaller("entropy")),
    TokenField("teacher_hidden", None, value=attrgetter("hidden"), told=False, packed=False),  # (C, E)
    TokenField("teacher_top_ids", "int64"),  # (C, K) the tokens that a teacher elsewhere thinks likeliest,
    TokenField("teacher_top_logprobs"),  # and their log-probabilities
    TokenField("values"),  # a critic's, of the text before the token
    TokenField("returns"),  # what its values are to be
    TokenField("teacher_mask"),  # 1 where the teacher is learnt from
    TokenField("label"),  # 1 for a completion that is wanted, 0 for one that is not
)}  # algorithms may add rows


@dataclass
class MicroBatch:
    """S whole sequences packed without padding into T positions; see the alignment rule at the top of types.py.

    The sequences belong to R rollouts: one per rollout, or several if an episode's history was rewritten. Sequences of
    one prompt share the positions of its tokens, except that of its last token. `sources` gathers the tokens into a
    padded (S, W) layout, W = max_seqlen, and `places` takes results from that layout back to the packed positions.
    """

    input_ids: Tensor  # (T,) int64
    offsets: Tensor  # (T,) int64, the index in its sequence; `Policy.inputs` makes RoPE positions of them
    targets: Tensor  # (T,) int64
    cu_seqlens: Tensor  # (S + 1,) int32, cumulative lengths of the sequences, each with its prompt
    max_seqlen: int
    sources: Tensor  # (S * W,) int64, index into T
    places: Tensor  # (T,) int64, index into S * W; for a shared place, in the first sequence
    copies: Tensor  # (T,) int64, how many (neighbouring) sequences share the place; 1 if it is not shared
    prompts: tuple[tuple[int, ...], ...]  # by prompt: the number of prompt places (P - 1), then that of each completion
    loss_mask: Tensor  # (T,) bool, tokens that the policy sampled, and those of a prompt that is trained
    trained: Tensor  # (N,) int64, indices where loss_mask is True; computed on the host to avoid a GPU sync
    sequence_ids: Tensor  # (T,) int64, the rollout, 0 .. R - 1; the first one for a shared place
    units: Tensor  # (R,) int64, the unit of each rollout, 0 .. U - 1; no unit is split between micro-batches
    fields: dict[str, Tensor]  # (T, ...) by name, those of TOKEN_FIELDS that the rollouts have
    images: dict[int, ImageToken] = field(default_factory=dict)  # by place (0 .. T - 1): the tokens of images
    rollouts: tuple[Rollout, ...] = ()  # the R packed completions, in order
    host_ids: Tensor | None = None  # (T,) int64, a copy of `input_ids` that stays on the host
    homes: Tensor | None = None  # (N,) int64, on the host: index of each trained token in the rollouts' (C,) fields,
    # concatenated in order; None: all tokens of the rollouts are trained, in order. A trained prompt has no index
    routes: Tensor | None = None  # (T, layers, k) uint8 or int16, experts that the sampler chose; None: not reported
    routed: Tensor | None = None  # (T,) bool, places that have routes; None for all

    advantages = property(lambda batch: batch.fields["advantages"])
    rollout_logprobs = property(lambda batch: batch.fields["rollout_logprobs"])

    @property
    def of_prompts(self) -> Tensor:
        """A mask (N,) of the trained tokens that belong to a prompt."""
        lengths = torch.tensor([length for lengths in self.prompts for length in lengths])
        first = torch.tensor([not place for lengths in self.prompts for place in range(len(lengths))])
        return self.at_trained(first.repeat_interleave(lengths).to(self.trained.device))

    def at_trained(self, values: Tensor) -> Tensor:
        """Return those of `values` (T, ...) at positions whose target the policy sampled, as a tensor (N, ...)."""
        return values.index_select(0, self.trained)

    def of_rollouts(self, name: str) -> Tensor:
        """Return the rollouts' field `name`, which is not packed, at the trained tokens, (N, ...), on the device."""
        values = torch.cat([TOKEN_FIELDS[name].of(rollout) for rollout in self.rollouts])
        return (values if self.homes is None else values[self.homes]).to(self.trained.device)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the same batch with every tensor on `device`, except `host_ids` and `homes`."""
        def moved(tensors: dict[str, Any]) -> dict[str, Any]:
            return {name: value.to(device, non_blocking=True) for name, value in tensors.items()
                    if torch.is_tensor(value) and name not in ("host_ids", "homes")}

        return replace(self, **moved(vars(self)), fields=moved(self.fields))


@dataclass
class LossOutput:
    """The loss to call backward on, and detached values to log."""

    loss: Tensor
    metrics: dict[str, Tensor]  # means over this call, or min and max
    counts: dict[str, float] = field(default_factory=dict)  # by mean: the number of tokens or sequences
    samples: dict[str, Tensor] = field(default_factory=dict)  # (N,) values for percentiles over the step
    policy_loss: Tensor | None = None  # the loss without its entropy bonus
    sums: dict[str, Tensor] = field(default_factory=dict)  # parts of the loss, which micro-batches add up


def repeated_share(ids: Sequence[int], ngram: int) -> float:
    """Return the share of n-grams of tokens that repeat an earlier one; 0 for fewer than `ngram` tokens."""
    count = len(ids) - ngram + 1
    if count < 1:
        return 0.0
    different = len(set(zip(*(ids[start : start + count] for start in range(ngram)), strict=True)))
    return 1 - different / count


def owned(value: Any) -> Any:
    """Return a copy of a value for user code, which may change it: all completions of a prompt share its row, and later
    steps read it again. The copy shares no list, dict, array or dataclass (such as `Turn`) with the original. It does
    share all other objects: an environment, a client, a function, the routes of a turn."""
    if type(value) in UNCHANGING:
        return value
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((name, owned(part)) for name, part in value.items())
        return made
    if isinstance(value, list):
        listed = copy.copy(value)
        listed[:] = [part if type(part) in UNCHANGING else owned(part) for part in value]
        return listed
    if type(value) in (tuple, set):
        return type(value)(map(owned, value))
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for name, part in getattr(value, "__dict__", {}).items():
            if isinstance(part, (list, dict)):  # other fields may refer back to `value`, or be as large as routes
                object.__setattr__(twin, name, owned(part))  # works for frozen dataclasses too
        return twin
    return copy.deepcopy(value) if hasattr(value, "dtype") else value


SEVERITIES = ("error", "warning", "note")  # the run fails or learns nothing; probably a mistake; for information


@dataclass(frozen=True)
class Finding:
    """A problem and what to do about it. `str` returns one line."""

    severity: str  # one of SEVERITIES
    about: str  # a reward function, judge or alarm; empty for the run as a whole
    problem: str
    fix: str
    kind: str = ""  # a short name that identifies the same problem when it recurs

    def __str__(self) -> str:
        about = f"{self.about}: " if self.about else ""
        return " ".join(f"{about}{self.problem}. What to do: {self.fix}".split())


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def has_error(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is an error: the run would fail or learn nothing."""
    return any(finding.severity == "error" for finding in findings)


def mistakes(findings: Iterable[Finding]) -> list[Finding]:
    """Return the errors and warnings, without the notes."""
    return [finding for finding in findings if finding.severity != "note"]


def warn(logger: Logger, where: str, findings: Iterable[Finding]) -> None:
    """Log a warning for each error and warning, prefixed by `where`."""
    for finding in mistakes(findings):
        logger.warning("%s: %s", where, finding)
