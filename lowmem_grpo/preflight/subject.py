"""What the checks look at: the parts of a trainer, and a sample of its rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lowmem_grpo.data.prompts import PromptSource, is_chat
from lowmem_grpo.memory.bounds import RunMemory
from lowmem_grpo.memory.cache_dtype import AUTO
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.preflight.rows import LookedAt, RowSample, sample_rows
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.views.live import LiveView

Messages = list[dict[str, str]]


class Trainer(Protocol):
    """What GRPOTrainer and SFTTrainer have in common."""

    model: Any
    args: Any
    tokenizer: Any
    policy: Policy
    source: PromptSource
    state: TrainerState
    run_dir: Path
    memory: RunMemory

    @property
    def view(self) -> LiveView | None: ...


@dataclass(frozen=True)
class Turns:
    """What answers the policy in a run of several turns."""

    tools: list[dict[str, Any]] | None = None  # their OpenAI schemas
    replies: bool = False  # an environment answers as the user
    begins: bool = False  # an environment adds to the prompt, or makes it


@dataclass(frozen=True)
class Subject:
    """A trainer as the checks see it."""

    args: Any  # GRPOConfig or SFTConfig
    tokenizer: Any
    policy: Policy
    state: TrainerState
    run_dir: Path
    memory: RunMemory
    context: int  # tokens
    sample: RowSample
    end_ids: list[int]  # tokens that end a completion
    scorer: RewardScorer | None = None  # None in fine-tuning
    eval_sample: RowSample | None = None  # of what is sampled from for evaluation
    turns: Turns | None = None  # None: one prompt gets one answer
    cache_dtype: str = AUTO  # of the sampler's key-value cache
    without_rows: bool = False  # the caller samples: what `sample` holds only tries the chat template

    @classmethod
    def of(cls, trainer: Trainer) -> "Subject":
        evaluation = getattr(trainer, "evaluation", None)
        return cls(
            trainer.args, trainer.tokenizer, trainer.policy, trainer.state, trainer.run_dir, trainer.memory,
            trainer.model.loaded.max_seq_length, sample_rows(trainer.source.dataset, trainer.source.encoder),
            trainer.policy.eos_token_ids(trainer.tokenizer), getattr(trainer, "scorer", None),
            None if evaluation is None or evaluation.dataset is None
            else sample_rows(evaluation.dataset, evaluation.encoder), getattr(trainer, "turns", None),
            getattr(getattr(trainer, "engine", None), "cache_dtype", AUTO), getattr(trainer, "given", None) is not None,
        )

    @property
    def chats(self) -> list[LookedAt]:
        """Usable rows whose prompt is chat messages."""
        return [looked for looked in self.sample.usable if is_chat(looked.row.get("prompt"))]

    @property
    def plan(self) -> MemoryPlan | None:
        """The memory plan of the run on its card; None on the CPU, and for models that cannot be planned."""
        plan = self.memory.advice.plan
        return plan if isinstance(plan, MemoryPlan) else None

    @property
    def embeddings(self) -> int:
        """Rows of the input embedding."""
        return int(self.policy.base.get_input_embeddings().weight.shape[0])

    @property
    def end_texts(self) -> list[str]:
        """Strings that end a completion, beside `end_ids`."""
        params = getattr(self.args, "vllm_sampling_params", None)
        return [] if params is None else list(params.stop_strings)

    @property
    def all_end_ids(self) -> set[int]:
        """`end_ids` and those of `vllm_sampling_params`; without the model's own if these are ignored."""
        params = getattr(self.args, "vllm_sampling_params", None)
        if params is None:
            return set(self.end_ids)
        return {*(params.stop_token_ids or []), *([] if params.ignore_eos else self.end_ids)}

    def render(self, messages: Messages, ready: bool) -> str:
        """The chat template's text, ready for the assistant's turn or not."""
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ready, **self.sample.encoder.template_kwargs
        )
        return str(text)
