"""Sampling parameters under vLLM's names, and the fields of GRPOConfig about episodes and the choice of groups."""

import random
import sys
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from numbers import Integral
from typing import Any, ClassVar

from lowmem_grpo import utils
from lowmem_grpo.config.unsupported import CheckedCall, Table, only
from lowmem_grpo.utils import COUNT, POSITIVE, TEXTS, TRUTH, ZERO_OR_MORE, Rule, at_least, check_ranges, number, one_of

PARALLEL = "parallel"
MIXER = 0x9E3779B1  # odd, so that seeds which differ in 32 higher bits get different lower ones
LATE = "the rewards {} are computed after sampling (score_while_sampling=True computes them before)"
MEND = "mend that, or leave train_while_sampling out"
PENALTY = "A penalty makes the sampled tokens others than the model's own; reward the text instead."
FORMAT = "The form of the text is not constrained; reward it instead."
FIXED: Table = {
    **only(PENALTY, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0),
    **only("Every end token ends a completion; leave it out, or set ignore_eos=True.", min_tokens=0),
    **only("Take one of the n completions yourself.", best_of=None),
    **only("Log-probabilities of the prompt are not computed.", prompt_logprobs=None, prompt_logprob_token_ids=None,
           prompt_logprob_start=None),
    **only("Ask for logprobs=K, the K likeliest tokens.", logprob_token_ids=None, flat_logprobs=False),
    **only(FORMAT, structured_outputs=None, guided_decoding=None, logit_bias=None, allowed_token_ids=(None, []),
           bad_words=(None, []), logits_processors=None),
    **only("Completions are always decoded.", detokenize=True, spaces_between_special_tokens=True),
    **only("Shorten the prompt yourself.", truncate_prompt_tokens=None),
    **only("There is no such option of sampling here.", watermarking=None, extra_args=(None, {}), stream_interval=None,
           skip_clone=(False, True), skip_reading_prefix_cache=(None, False, True), thinking_token_budget=None,
           repetition_detection=None, routed_experts_prompt_start=0, trace_decode_token_ids=None),
}


@dataclass(frozen=True)
class SamplingParams(metaclass=CheckedCall):
    """Settings of one generation call, with vLLM's field names, meanings and defaults (`max_tokens` aside: 512 here).

    temperature 0 is greedy. top_k <= 0 and top_p = 1 keep every token. A completion ends at an end-of-sequence token
    (unless `ignore_eos`), at a token of `stop_token_ids`, at a string of `stop`, or after `max_tokens` tokens.
    `seed` is each prompt's own, as in vLLM: completion i of n draws from seed + i, whatever else the call samples. None
    and -1 are random.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = 0.0
    max_tokens: int = 512
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Number of most likely tokens (-1: all) whose log-probabilities `fast_generate` returns at each position, beside
    the sampled token's own, in vLLM's format; None: no log-probabilities."""
    part: tuple[int, int] | None = None
    """(F, N): the seed is that of N prompts together, each of which gets other random numbers, as in training. If
    processes divide them, this call has those from index F on. None: `seed` is each prompt's own."""

    unsupported = FIXED  # the table that `CheckedCall` reads

    RANGES: ClassVar[dict[str, Rule]] = {
        "n": COUNT, "temperature": utils.TEMPERATURE,
        "top_p": number("in (0, 1], 1e-6 or above", lambda value: 1e-6 <= value <= 1),
        "top_k": number("-1 or 0 (off), or above", lambda value: value >= -1 and value % 1 == 0),
        "min_p": number("in [0, 1]", lambda value: 0 <= value <= 1), "max_tokens": COUNT,
        "stop": (f"{TEXTS[0]}, none of them empty", lambda value: TEXTS[1](value) and "" not in (value, *value)),
        "stop_token_ids": ("a list of token ids", lambda value: isinstance(value, list | tuple | set) and all(
            hasattr(each, "__index__") and not isinstance(each, bool) and each >= 0 for each in value)),
        "logprobs": number("-1 (all), 0 or above", lambda value: value >= -1 and value % 1 == 0),
        "seed": utils.SEED,
    }

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def seeds(self) -> list[int] | None:
        """The seeds of a prompt's n completions; None if they are random, or if the seed is that of N prompts."""
        own = self.part is None and self.seed not in (None, -1)
        return [seed_of(int(self.seed or 0), index) for index in range(self.n)] if own else None

    def of_call(self, prompts: int) -> "SamplingParams":
        """Return the parameters of one call with `prompts` prompts, which share the seed, unless `part` is set."""
        return self if self.part is not None else replace(self, part=(0, prompts))

    @property
    def truncates(self) -> bool:
        """True if some tokens cannot be drawn, which breaks the importance-sampling identity."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of completion `index` of a prompt: seed + index, as in vLLM. On a CPU torch reads only the low 32
    bits of a seed, so any higher bits are mixed into these."""
    whole = seed % 2**64
    return (whole + (whole >> 32) * MIXER + index) % 2**63


@dataclass(frozen=True)
class Draws:
    """The sampling parameters of a run's engine calls, which have `count` prompts and a different seed each."""

    count: int
    params: SamplingParams  # its seed, if it has one, enters the seed of every draw
    seed: int  # the run's seed

    def for_step(self, step: int, extra_round: int = 0) -> SamplingParams:
        """Return the sampling parameters of a step, or of an extra round of dynamic sampling in that step."""
        again = f"-{extra_round}" if extra_round else ""
        seed = random.Random(f"{self.seed}-{self.params.seed}-{step}{again}").getrandbits(62)
        return replace(self.params, seed=seed)

    @property
    def greedy(self) -> SamplingParams:
        """The parameters for one greedy completion of each prompt."""
        return replace(self.params, n=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


def longest_prompt(prompt: int | None, completion: int, context: int) -> int:
    """Return the most tokens that a prompt may have: `prompt`, or if it is None, `context` minus `completion`.
    ValueError if prompt and completion do not fit the context."""
    wanted = prompt or 1
    if wanted + completion > context:
        raise ValueError(f"max_completion_length ({completion}) and a prompt of {wanted} tokens do not fit the context "
                         f"of {context} tokens; lower one of them, or load with a larger max_seq_length")
    return prompt or context - completion


OURS = tuple(field.name for field in fields(SamplingParams))
DERIVED = ("output_text_buffer_length",)  # vLLM computes it from `stop`


def vLLMSamplingParams(**settings: Any) -> Any:  # noqa: N802 - Unsloth's name
    """Return vLLM's own SamplingParams if vLLM is imported already, else ours."""
    kind = import_module("vllm").SamplingParams if "vllm" in sys.modules else SamplingParams
    return kind(**settings)


def as_sampling_params(params: Any, longest: int) -> SamplingParams:
    """Return our SamplingParams for None (defaults), ours or vLLM's; `longest` replaces vLLM's max_tokens=None.
    ValueError for an unknown field that is set, TypeError for another kind of object."""
    if params is None or isinstance(params, SamplingParams):
        return params or SamplingParams()
    names = public_fields(params)
    if not {"n", "temperature", "max_tokens"} <= set(names):
        raise TypeError(f"sampling_params is a {type(params)}; pass a lowmem_grpo.SamplingParams, or vLLM's own")
    usual = type(params)()  # compared by repr: arrays have no single ==
    others = {name: repr(getattr(params, name)) for name in names if name not in (*OURS, *DERIVED)}
    if different := [f"{name}={value}" for name, value in others.items() if value != repr(getattr(usual, name))]:
        raise ValueError(f"sampling_params sets {', '.join(different)}, which is not supported; leave it out. "
                         f"Supported are {', '.join(OURS)}")
    values = {name: getattr(params, name) for name in names if name in OURS}
    return SamplingParams(**values | {"max_tokens": longest if params.max_tokens is None else params.max_tokens})


def public_fields(params: Any) -> list[str]:
    """Return the public fields of a msgspec struct (vLLM's), a dataclass or a plain object."""
    kind = type(params)
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", None)
    return [name for name in names or getattr(params, "__dict__", {}) if not name.startswith("_")]


@dataclass(kw_only=True)
class EpisodeSettings:
    """Fields of GRPOConfig for runs with tools or an environment. Only `max_tool_calling_iterations` is TRL's.
    `max_completion_length` limits the tokens of all turns together, with everything between them."""

    max_turns: int | None = None
    """Maximum turns of the policy in an episode; None: only the number of tokens is limited."""
    max_tool_calling_iterations: int | None = None
    """Maximum tool-calling iterations of an episode, as in TRL. The value n means the same as `max_turns=n + 1`."""
    max_turn_tokens: int | None = None
    """Maximum tokens that the policy may sample in one turn; None: all that the episode has left."""
    history: str = "append"
    """"append": the next prompt is all tokens so far plus the new messages. "template": the chat template renders the
    whole conversation again for each turn; if that changes sampled tokens, a new training sequence begins."""
    environment_timeout: float = 60.0
    """Time limit in seconds for one call of a tool or of an environment."""
    episode_timeout: float = 600.0
    """Time limit in seconds for all calls of tools and environment in one episode together."""
    max_tool_tokens: int = 1024
    """Maximum tokens of the text that a tool call or an environment step returns; the middle of a longer one is cut
    out."""
    turn_discount: float | None = None
    """None: each token gets the advantage of its whole episode. A number from 0 to 1: a turn's advantage is its
    reward-to-go with this discount, less the group's mean at that turn, divided as `scale_rewards` says. A reward
    for the whole episode is added to the reward of the last turn."""
    state_weight: float = 1.0
    """Weight of the advantage among turns that begin in the same state (GiGPO, arXiv 2505.10978, equation 8); needs an
    environment with `state_key`. 0 turns the comparison off. The comparison uses rewards-to-go, discounted by
    `turn_discount`, or without a discount if `turn_discount` is None."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "max_turns": COUNT, "max_tool_calling_iterations": ZERO_OR_MORE, "max_turn_tokens": COUNT,
        "history": one_of("append", "template"), "environment_timeout": POSITIVE, "episode_timeout": POSITIVE,
        "max_tool_tokens": COUNT, "turn_discount": number("in [0, 1]", lambda value: 0 <= value <= 1),
        "state_weight": ZERO_OR_MORE,
    }

    @property
    def turn_limit(self) -> int | None:
        """The most turns, from `max_turns` or `max_tool_calling_iterations`; ValueError if the two disagree."""
        tools = self.max_tool_calling_iterations
        if self.max_turns is not None and tools is not None and self.max_turns != tools + 1:
            raise ValueError(f"max_turns is {self.max_turns} and max_tool_calling_iterations is {tools}: that many "
                             f"calls are {tools + 1} turns; give one of them")
        return self.max_turns if tools is None else int(tools) + 1


@dataclass(kw_only=True)
class StrategySettings:
    """Options that choose the groups of an update and when they are trained; none of these is in TRL. Some options use
    up rows faster, and `epoch` counts the rows used."""

    dynamic_sampling_rounds: int = 0
    """Maximum extra sampling rounds per step, which replace groups without signal; 0 turns it off."""
    difficulty_pools: bool = False
    """True skips rows whose completions all earned the same, for 1 epoch, then 2, 4 and 8."""
    replay_buffer_size: int = 0
    """Number of groups to keep, each to be used once more in place of a group without signal; 0 turns it off."""
    replay_max_age: int | None = None
    """Optimizer steps after which a kept group is discarded; None: never."""
    train_while_sampling: bool | str = False
    """True: gradients of complete groups are computed between decode steps of the last sequences. "parallel": at the
    same time as these, in another thread (on a card, in another stream). False: after all sampling. The policy does not
    change before the step ends, so the gradient is the same up to rounding."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "dynamic_sampling_rounds": at_least(0, Integral), "difficulty_pools": TRUTH,
        "replay_buffer_size": at_least(0, Integral), "replay_max_age": at_least(1, Integral),
        "train_while_sampling": one_of(False, True, PARALLEL),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        self.check_replay()

    def check_replay(self) -> None:
        """Raise ValueError for a `replay_max_age` without replay."""
        if self.replay_max_age is not None and not self.replay_buffer_size:
            raise ValueError(f"replay_max_age is {self.replay_max_age}, and nothing is replayed: set "
                             "replay_buffer_size, or leave replay_max_age out")

    def check_overlap(self) -> None:
        """Raise ValueError if `train_while_sampling` is set, and another setting needs all groups at once."""
        if not self.train_while_sampling:
            return
        for name, wanted in needs(self).items():
            value = getattr(self, name)
            if value not in wanted:
                raise ValueError(f"train_while_sampling={self.train_while_sampling!r} trains a group before the others "
                                 f"are sampled, and {name}={value!r} needs all of them; set {name}={wanted[0]!r}, or "
                                 "leave train_while_sampling out")


def needs(config: Any) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of each field for a run in which no group's gradient depends on later groups."""
    once = {"num_iterations": (1,), "steps_per_generation": (None, *range(1, config.gradient_accumulation_steps + 1)),
            "dynamic_sampling_rounds": (0,), "replay_buffer_size": (0,), "top_entropy_quantile": (1.0,),
            "entropy_coef": (0.0,), "use_adaptive_entropy": (False,), "scale_rewards": ("group", "none", None),
            "advantage_estimator": ("grpo", "rloo", "passk"), "multi_objective_aggregation": ("sum_then_normalize",),
            "score_while_sampling": (None, True), "normalize_advantages": (False,)}
    return once | ({"beta": (0.0,)} if config.train_while_sampling == PARALLEL else {})
