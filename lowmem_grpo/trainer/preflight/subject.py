"""The input of the checks: the parts of a trainer, and a bounded sample of its rows, encoded as in the run."""

import time
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.config.teacher import STORED
from lowmem_grpo.data.packing import PackedRows, of_any_length
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, is_chat
from lowmem_grpo.data.stream import Stream
from lowmem_grpo.memory.cards import AUTO
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import ImageToken

Messages = list[dict[str, str]]

MOST_ROWS, LEAST_ROWS = 256, 16
OF_A_STREAM = 512  # rows of a stream that are read ahead
SECONDS = 1.0  # after LEAST_ROWS, no more rows are read once this time has passed


@dataclass(frozen=True)
class LookedAt:
    """A row with its encoded prompt, or with the reason or the error that explains why it has no prompt."""

    row: dict[str, Any]
    index: int  # in the dataset
    prompt: Prompt | None = None  # None if the row cannot be used
    reason: str = ""  # the encoder's reason to skip the row
    error: Exception | None = None  # raised while the row was read or encoded

    @property
    def tokens(self) -> int:
        """The number of tokens of the prompt; in fine-tuning, of prompt and completion."""
        if self.prompt is None:
            return 0
        return len(self.prompt.ids) + len(getattr(self.prompt, "completion_ids", ()))

    @property
    def image_tokens(self) -> int:
        return 0 if self.prompt is None else sum(isinstance(token, ImageToken) for token in self.prompt.ids)


@dataclass(frozen=True)
class RowSample:
    """Rows spread evenly over a dataset. Prompts of any length count as usable here."""

    rows: list[LookedAt]
    dataset: Any  # sampled from it
    columns: list[str]
    encoder: PromptEncoder  # without a bound on the length
    limit: int  # most tokens of a row in the run

    @property
    def total(self) -> int:
        return len(self.dataset)

    @property
    def usable(self) -> list[LookedAt]:
        return [looked for looked in self.rows if looked.prompt is not None]

    @property
    def fitting(self) -> list[LookedAt]:
        return [looked for looked in self.usable if looked.tokens <= self.limit]

    def share(self, count: int) -> str:
        """Return a phrase such as '3 of 256 sampled rows' or 'all 8 rows'."""
        if len(self.rows) < self.total:
            return f"{count} of {len(self.rows)} sampled rows"
        return f"all {self.total} rows" if count == self.total else f"{count} of {self.total} rows"


def sample_rows(dataset: Any, encoder: PromptEncoder) -> RowSample:
    """Return a sample of at most MOST_ROWS rows (of a stream, its next rows), fewer if reading them is slow."""
    if isinstance(dataset, Stream):
        dataset = dataset.peek(OF_A_STREAM)
    count = min(len(dataset), MOST_ROWS)
    unbounded = of_any_length(encoder)
    began, rows = time.monotonic(), []
    for place in bit_reversed(count):
        rows.append(look_at(dataset, place * len(dataset) // count, unbounded))
        if len(rows) >= LEAST_ROWS and time.monotonic() - began > SECONDS:
            break
    return RowSample(rows, dataset, columns_of(dataset, rows), unbounded, encoder.max_prompt_length)


def bit_reversed(count: int) -> list[int]:
    """Return 0 .. count - 1 in bit-reversed order. So every prefix is spread evenly, in case time runs out."""
    width = max(count - 1, 0).bit_length()
    turned = (int(f"{place:0{width}b}"[::-1], 2) if width else place for place in range(1 << width))
    return [place for place in turned if place < count]


def look_at(dataset: Any, index: int, encoder: PromptEncoder) -> LookedAt:
    """Encode one row. An error of a broken row, or of a chat template that refuses it, is stored in the result."""
    row: Any = {}
    try:
        row = dataset[index]
        encoded = encoder.encode(row)
    except Exception as error:  # noqa: BLE001 - a check reports it
        return LookedAt(row if isinstance(row, dict) else {}, index, error=error)
    return LookedAt(row, index, reason=encoded) if isinstance(encoded, str) else LookedAt(row, index, encoded)


def columns_of(dataset: Any, rows: list[LookedAt]) -> list[str]:
    """Return the sorted column names: the dataset's own, or those of all rows of a list, or of the sampled rows."""
    named = getattr(dataset, "column_names", None)
    if named is not None:
        return sorted(named)
    known = dataset if isinstance(dataset, list) else [looked.row for looked in rows]
    return sorted({name for row in known if isinstance(row, dict) for name in row})


@dataclass(frozen=True)
class Turns:
    """The tools or environment that answer the policy in a multi-turn run."""

    tools: list[dict[str, Any]] | None = None  # their OpenAI schemas
    replies: bool = False  # an environment answers as the user
    begins: bool = False  # an environment adds to the prompt, or makes it


class Subject:
    """The parts of a GRPOTrainer or an SFTTrainer that the checks examine."""

    def __init__(self, trainer: Any) -> None:
        self.args, self.tokenizer, self.run_dir = trainer.args, trainer.tokenizer, trainer.run_dir
        self.policy: Policy = trainer.policy
        self.state: TrainerState = trainer.state
        self.objective = trainer.parts.objective
        self.memory: RunMemory = trainer.memory
        self.plan = self.memory.advice.plan  # None on the CPU, and for models without a memory plan
        self.context: int = trainer.model.loaded.max_seq_length  # tokens
        source = trainer.source
        self.without_rows = not hasattr(source, "encoder")  # the caller samples
        self.sample = self.template_sample() if self.without_rows else self.sample_of(source.dataset, source.encoder)
        self.chats = [looked for looked in self.sample.usable if is_chat(looked.row.get("prompt"))]
        self.does_sampling: bool = trainer.does_sampling  # False in fine-tuning
        self.method: str | None = trainer.method  # the kind of training
        self.rewards = list(trainer.rewards)  # their names
        self.scorer: RewardScorer | None = getattr(trainer, "scorer", None)  # None where no function is called
        self.functions = [] if self.scorer is None else list(self.scorer.by_name.items())
        rows = getattr(trainer, "evaluation", None)
        self.eval_sample = None if rows is None or rows.dataset is None else sample_rows(rows.dataset, rows.encoder)
        params = getattr(trainer.args, "vllm_sampling_params", None)
        own = set[int]() if params is not None and params.ignore_eos else {*self.policy.eos_token_ids(self.tokenizer)}
        self.end_ids = own | {*(getattr(params, "stop_token_ids", None) or [])}  # tokens that end a completion
        self.end_texts: list[str] = getattr(params, "stop_strings", [])  # strings that end a completion
        self.turns: Turns | None = getattr(trainer, "turns", None)  # None: single-turn
        self.teacher_prompts: Any = getattr(getattr(trainer, "teaching", None), "prompts", None)
        self.stored: Any = trainer.player if getattr(trainer.args, "teacher", None) == STORED else None
        self.cache_dtype = getattr(getattr(trainer, "engine", None), "cache_dtype", AUTO)  # the KV cache's

    def passes(self, updates: int) -> int:
        """Return the forward passes before `updates` optimizer steps: for old policy, KL reference and teacher."""
        return len({field.source for field in self.objective.needed_before(updates)})

    def sample_of(self, rows: Any, encoder: Any) -> RowSample:
        """Return a sample of the training rows; of packs, a sample of the rows in them."""
        return sample_rows(*(rows.rows, encoder.inner) if isinstance(rows, PackedRows) else (rows, encoder))

    def template_sample(self) -> RowSample:
        """Return a sample of one made-up row, to try the chat template with."""
        encoder = PromptEncoder(self.tokenizer, self.context - 1, self.args.chat_template_kwargs)
        return sample_rows([{"prompt": [{"role": "user", "content": "A task of the caller's."}]}], encoder)

    @property
    def datasets(self) -> list[tuple[str, RowSample]]:
        """The name and the sampled rows of each dataset that reward functions score."""
        evaluation = [] if self.eval_sample is None else [("evaluation dataset", self.eval_sample)]
        return [("dataset", self.sample), *evaluation]

    def render(self, messages: Messages, ready: bool) -> str:
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ready, **self.sample.encoder.template_kwargs
        )
        return str(text)
