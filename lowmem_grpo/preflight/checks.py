"""The table of checks: what each finds, as the code works through it and as the documentation shows it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lowmem_grpo.preflight import paying, prompts, room, tokens
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.runs.findings import Finding


@dataclass(frozen=True)
class Check:
    """One check. `severity` is the worst that it can give."""

    name: str
    severity: str
    finds: str
    look: Callable[[Subject], Iterable[Finding]]
    with_sft: bool = True  # SFTTrainer makes it too


CHECKS = (
    Check("rows", "error", "rows that cannot be made into a prompt: chat messages and no chat template (a base model "
          "has none), a template that fails on a system message, a broken row", prompts.unreadable),
    Check("skipped rows", "error", "rows that will be skipped: empty prompts, other types; an error where none is left",
          prompts.unusable),
    Check("prompt lengths", "error", "prompts longer than `max_prompt_length`, or than what the context leaves beside "
          "`max_completion_length`; an error where none is left", prompts.too_long),
    Check("few rows", "warning", "fewer rows than one generation draws", prompts.few_rows, with_sft=False),
    Check("duplicates", "warning", f"more than {prompts.MANY_ALIKE:.0%} of the prompts repeat another one",
          prompts.alike, with_sft=False),
    Check("generation prompt", "warning", "a chat template that adds nothing for the assistant's turn",
          prompts.no_generation_prompt),
    Check("dropped messages", "warning", "a chat template that leaves out system or user messages", prompts.left_out),
    Check("two start tokens", "warning", "prompts that begin with the start token twice", prompts.two_starts),
    Check("no end token", "warning", "neither tokenizer nor generation config names a token that ends a completion",
          tokens.no_end, with_sft=False),
    Check("another end token", "warning", "the chat template ends an answer with a token that ends no completion",
          tokens.other_end),
    Check("unknown tokens", "error", "end, padding or prompt tokens beyond the model's vocabulary", tokens.unknown_ids),
    Check("reserved columns", "error", "a dataset column with the name of a reward function's argument",
          paying.reserved_names, with_sft=False),
    Check("missing columns", "error", "a reward function requires a column that the dataset, or the evaluation "
          "dataset, does not have", paying.missing_columns, with_sft=False),
    Check("empty columns", "warning", "a reward function names a column that is None in every row",
          paying.empty_columns, with_sft=False),
    Check("evaluation rows", "error", "no row of the evaluation dataset can be used", paying.unusable_evaluation,
          with_sft=False),
    Check("output_dir", "error", "it cannot be made, or may not be written to", room.unwritable),
    Check("disk", "error", "no room for a checkpoint; a warning where there is none for all of them, up to "
          "`save_total_limit`, and for completions.jsonl", room.full_disk),
    Check("host memory", "warning", "on a card: little is left beside offloaded layer inputs and a paged optimizer",
          room.little_host_memory),
    Check("plan", "warning", "the memory plan is larger than the card", room.over_plan),
    Check("bfloat16", "warning", "it is computed in on a card that only emulates it", room.emulated_dtype),
    Check("scale", "note", "fewer rows or steps than guides advise", prompts.small_scale, with_sft=False),
)
