"""The parts of a plan: settings, the work of a step, rows of bytes, and choices with the bytes that they save."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from lowmem_grpo.memory.cards import AUTO, CACHE_DTYPES, Device, in_8_bits
from lowmem_grpo.memory.cutting import CutLimits, cut
from lowmem_grpo.memory.layer_forms import BITS_16, FORMS, NF4
from lowmem_grpo.utils import COUNT, ZERO_OR_MORE, Rule, at_least, check_given, check_ranges, number, one_of

OPTIMIZER_BYTES = {  # optimizer state per trained number
    "adamw_torch": 8.0, "adamw_torch_fused": 8.0, "adamw_8bit": 2.03125, "adamw_bnb_8bit": 2.03125,
    "paged_adamw_8bit": 2.03125,
}
KV_CACHE = "KV cache"
EMBEDDING, HEAD = "embed_tokens", "lm_head"  # in PEFT's modules_to_save, whatever a family calls them
ENGINES = ("vllm", "transformers")
CHECKPOINTING = (True, False, "offload", "auto")
SAMPLING_WEIGHTS = ("4bit", "16bit")
PROMPTS, PROMPT_SHARE, COMPLETION_SHARE = 8, 1 / 5, 2 / 5  # share of context and of longest completion, as in GSM8K


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that determine its memory. None leaves a choice to the planner."""

    context: int  # tokens of the longest sequence, prompt and completion
    num_generations: int = 8  # completions per prompt, sampled at once
    lora_rank: int = 32
    form: str = NF4  # of the linear weights: one of layer_forms.FORMS
    checkpointing: bool | str = "offload"  # "auto": as "offload", and `kept_layers` is open
    engine: str = "vllm"
    max_tokens: int | None = None  # packed tokens in a training micro-batch
    spread: float | None = None  # padded tokens in its attention, as a multiple of max_tokens; 0: a single sequence
    mlp_tile: int | None = None  # tokens in a tile of the MLP; 0: no tiles
    kept_layers: int | None = 0  # layers, the last ones, that keep all they compute although others are checkpointed
    chunk_rows: int | None = None  # tokens whose logits are in memory at a time
    head_groups: int | None = None  # parts in which attention's backward pass takes the heads; 1: all at once
    kv_bytes: int | None = None  # the KV cache
    kv_cache_dtype: str = AUTO  # vLLM's dtype of the KV cache
    longest_completion: int | None = None  # tokens; None: a completion may fill the context
    host_embedding: bool | None = None
    host_tower: bool | None = None  # a vision tower waits on the host until it encodes images
    optim: str | None = None
    sampling_weights: str | None = None  # for quantized weights: "16bit" dequantizes them once per sampling phase
    sequences: int | None = None  # decoded together; None: one group
    sleeps: bool = True  # whether the engine frees its cache while training
    completions_per_step: int | None = None  # an upper bound on those in a micro-batch; None: unknown
    host_bytes: int | None = None  # host memory that the run may fill; None: unknown
    keeps_reference: bool = False  # whether the KL term compares with a copy of the adapter, kept on the host
    keeps_teacher: bool = False  # whether a teacher has an adapter of its own, kept on the host
    keeps_critic: bool = False  # whether a critic has an adapter of its own, trained beside the policy's
    teacher_bytes: int = 0  # weights on the card of a teacher that is another model
    teacher_hidden_bytes: int = 0  # a teacher's last hidden states at an update's completions, on the host
    reward_bytes: int = 0  # on the card while the largest reward model scores
    reward_host_bytes: int = 0  # all reward models, on the host between steps
    reward_adapter_bytes: int = 0  # of reward models that are adapters on the policy's base, which stay on the card
    image_tokens: int = 0  # of a prompt, at most
    ranks: int = 1  # processes of the run, each with its own card; all other settings are per process
    expert_lora: bool = False  # whether each expert of a mixture has LoRA too
    trained: int | None = None  # weights of the adapter; None: those of `lora_rank` on all linears
    trained_bytes: int | None = None  # their size, and that of their gradients; None: in float32
    modules_to_save: tuple[str, ...] = ()  # embedding and head, where they are trained whole beside LoRA
    saved_itemsize: int = 2  # bytes of a number of theirs, and of its gradient
    trained_rows: int = 0  # rows of embedding and head that are trained alone, in float32
    logits: bool = True  # whether the head computes logits: not that of a reward model
    own_head: bool = True  # whether a head that is not tied has a matrix of its own: not that of a reward model we load

    RANGES: ClassVar[dict[str, Rule]] = {
        **dict.fromkeys(("context", "num_generations", "lora_rank", "trained", "trained_bytes", "max_tokens",
                         "kv_bytes", "chunk_rows", "sequences", "completions_per_step", "longest_completion",
                         "head_groups", "ranks"), COUNT),
        "mlp_tile": at_least(0), "kept_layers": at_least(0), "spread": ZERO_OR_MORE,
        **dict.fromkeys(("host_bytes", "reward_bytes", "reward_host_bytes", "reward_adapter_bytes", "image_tokens",
                         "teacher_bytes", "teacher_hidden_bytes", "trained_rows"), ZERO_OR_MORE),
        "modules_to_save": (f"some of {EMBEDDING} and {HEAD}", lambda names: {*names} <= {EMBEDDING, HEAD}),
        "saved_itemsize": one_of(2, 4),
        "engine": one_of(*ENGINES),
        "checkpointing": one_of(*CHECKPOINTING), "sampling_weights": one_of(*SAMPLING_WEIGHTS),
        "optim": one_of(*OPTIMIZER_BYTES), "kv_cache_dtype": one_of(*CACHE_DTYPES),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        check_given({"form": self.form}, {"form": one_of(*FORMS)})
        if self.host_embedding and self.engine == "vllm":
            raise ValueError("host_embedding is True and engine is 'vllm', which looks the embedding up on the card; "
                             "use engine='transformers', or leave it out")
        if in_8_bits(self.kv_cache_dtype) and self.engine != "vllm":
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype!r} and engine is {self.engine!r}, whose cache "
                             "has the model's dtype; use engine='vllm', or leave it out")
        if self.sampling_weights == "16bit" and (self.form == BITS_16 or FORMS[self.form].only_experts):
            raise ValueError("sampling_weights is '16bit', which needs 4-bit or FP8 weights; leave it out, or set "
                             "form='nf4'")

    def opened(self) -> "RunSettings":
        """Return the settings with checkpointing "auto" resolved. If an MLP tile is set, no layer keeps everything."""
        return self if self.checkpointing != "auto" else replace(
            self, checkpointing="offload", kept_layers=None if self.mlp_tile is None else 0)


@dataclass(frozen=True)
class Workload:
    """The work of a step. Lengths are in tokens; those of prompt and completion are means. Completion lengths are
    assumed to follow a Beta(1, k) distribution, scaled to the longest length L, with k = L / mean - 1."""

    prompts: int
    generations: int
    prompt_length: float
    completion_length: float
    longest: int  # tokens of the step's longest completion
    iterations: int = 1  # passes of training over the completions
    updates: int = 1  # optimizer steps
    forward_only: int = 0  # passes for log-probabilities only: of the old policy, of the reference

    RANGES: ClassVar[dict[str, Rule]] = {
        **dict.fromkeys(("prompts", "generations", "longest", "iterations", "updates"), COUNT),
        **dict.fromkeys(("prompt_length", "completion_length"), number("at least 1", lambda value: value >= 1)),
        "forward_only": at_least(0),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.completion_length > self.longest:
            raise ValueError(f"completion_length is {self.completion_length:g}, the mean, and the longest completion "
                             f"has {self.longest} tokens; give a mean of at most {self.longest}, or a larger "
                             "max_completion_length")

    @classmethod
    def within(
        cls, context: int, prompts: int | None, generations: int, prompt_length: int | None = None,
        completion_length: int | None = None, longest: int | None = None,
    ) -> "Workload":
        """Return the work that fits a context of `context` tokens. Lengths left out are shares of the context, as in
        GSM8K. ValueError if prompt and completion do not fit."""
        share = int(context * PROMPT_SHARE)
        prompt = max(1, min(share, context - (longest or 1))) if prompt_length is None else prompt_length
        limit = max(1, min(context - share, context - prompt)) if longest is None else longest
        if not (prompt_length is None and longest is None) and prompt + limit > context:
            raise ValueError(f"a prompt of {prompt} tokens and a completion of {limit} do not fit a context of "
                             f"{context}; raise --context, or lower --prompt-length or --max-completion-length")
        mean = max(1, round(COMPLETION_SHARE * limit)) if completion_length is None else completion_length
        return cls(PROMPTS if prompts is None else prompts, generations, prompt, mean, limit)

    @property
    def sequences(self) -> int:
        return self.prompts * self.generations

    @property
    def places(self) -> float:
        """The packed tokens of all micro-batches: each prompt once, without its last token, and each completion."""
        return self.prompts * (self.prompt_length - 1) + self.sequences * self.completion_length

    def lengths(self, count: int) -> list[float]:
        """Return the lengths of `count` completions, longest first: quantiles of the distribution."""
        power = self.completion_length / max(self.longest - self.completion_length, 1e-9)  # 1 / k
        return [self.longest * (1 - ((number + 0.5) / count) ** power) for number in range(count)]

    @property
    def squared_length(self) -> float:
        """The mean of (prompt + completion)^2, to which attention's cost is proportional."""
        mean, longest = self.completion_length, self.longest
        return self.prompt_length**2 + 2 * self.prompt_length * mean + 2 * mean**2 * longest / (longest + mean)


@dataclass(frozen=True)
class PlanRow:
    """The bytes of one component at the peak of each phase. `note` describes it, and its bytes at other moments."""

    name: str
    rollout: int = 0
    train: int = 0
    host: int = 0
    note: str = ""
    card_only: bool = False  # taken by the driver or a kernel on a GPU, so not visible with fake tensors


@dataclass(frozen=True)
class Choice:
    """A setting that the planner chose, and the bytes that it saves at the peak."""

    name: str
    value: Any
    saved: int = 0
    why: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """The rows of both phases, their sums in bytes, and the planner's choices."""

    model: str
    device: Device
    settings: RunSettings  # complete, with every choice filled in
    rows: tuple[PlanRow, ...]
    choices: tuple[Choice, ...] = ()
    concurrent_sequences: int = 0  # sequences of the longest length for which the KV cache has room
    moment: str = ""  # the moment of a training step with the most memory
    train_allocated: int = 0  # the peak of tensors while training, without the rows that are `card_only`
    advice: tuple[str, ...] = field(default=())  # what would make it fit, if it does not

    @property
    def rollout(self) -> int:
        return sum(row.rollout for row in self.rows)

    @property
    def train(self) -> int:
        return sum(row.train for row in self.rows)

    @property
    def host(self) -> int:
        return sum(row.host for row in self.rows)

    @property
    def kv_bytes(self) -> int:
        return sum(row.rollout for row in self.rows if row.name == KV_CACHE)

    @property
    def peak(self) -> int:
        return max(self.rollout, self.train)

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.budget and self.concurrent_sequences > 0

    def fits_with(self, share: float) -> bool:
        """Return whether the plan fits, and training takes at most this share of the budget."""
        return self.fits and self.train <= share * self.device.budget

    @property
    def limits(self) -> CutLimits:
        return CutLimits(self.settings.max_tokens, None, self.settings.spread or 0)

    def micro_batches(self, groups: Iterable[tuple[int, Sequence[int]]]) -> int:
        """Return the number of micro-batches for groups of (tokens of the prompt, tokens of each completion)."""
        return len(cut(groups, self.limits))

    def short_of(self, share: float = 1.0) -> list[str]:
        """Return which of "train", "rollout" and "host" lack memory. Training may take `share` of the budget. "rollout"
        lacks memory also if the KV cache has no room for a whole group."""
        crowded = self.concurrent_sequences < self.settings.num_generations or self.rollout > self.device.budget
        short = {"train": self.train > share * self.device.budget, "rollout": crowded,
                 "host": self.settings.host_bytes is not None and self.host > self.settings.host_bytes}
        return [name for name, wants in short.items() if wants]

    def needed(self, phase: str) -> int:
        """Return the bytes that "train", "rollout" or "host" needs, without the KV cache, which takes the rest."""
        return {"train": self.train, "rollout": self.rollout - self.kv_bytes, "host": self.host}[phase]

    def to_dict(self) -> dict[str, Any]:
        totals = ("rollout", "train", "host", "kv_bytes", "peak", "fits")
        return asdict(self) | {name: getattr(self, name) for name in totals}
