"""The list of checks before a run, the checks of reward functions' columns, and the check that all ranks agree."""

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import Stream
from lowmem_grpo.models.card_check import LARGER
from lowmem_grpo.rewards.calling import contract
from lowmem_grpo.rewards.checking.diagnosis import failed, faulty_rows
from lowmem_grpo.runs.checkpoint_state import adapter_tensors, version
from lowmem_grpo.trainer.distributed import card_of
from lowmem_grpo.trainer.preflight import prompts, template
from lowmem_grpo.trainer.preflight import resources as room
from lowmem_grpo.trainer.preflight.subject import Subject
from lowmem_grpo.types import Finding, by_severity, has_error, mistakes, warn
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)
PACKAGES = ("transformers", "peft", "bitsandbytes", "vllm", "triton")  # their versions must be the same in all ranks
OWN = ("card", "card_bytes", "processor")  # entries of `describe_machine` that may differ from rank to rank
ROWS = 8  # rows that the ranks compare, spread from the first to the last


def reserved_columns(subject: Subject) -> Iterator[Finding]:
    """Find a dataset column with the name of an argument that every reward function gets, such as `completions`."""
    for which, sample in subject.datasets:
        try:
            contract.passed_columns({name: [] for name in sample.columns})
        except contract.RewardError as error:
            problem, _, fix = str(error).removeprefix("dataset ").partition("; ")
            yield Finding("error", "", f"{which} {problem}", f"{fix} (dataset.rename_column)")


def missing_columns(subject: Subject) -> Iterator[Finding]:
    """Find a reward function with a required argument that neither the trainer nor a dataset column provides. With a
    `rollout_func`, whose columns are not known yet, the check is skipped."""
    scorer = subject.scorer
    if scorer is None or scorer.late_columns:
        return
    others = (*contract.RESERVED, *(contract.OF_EPISODES if scorer.episodes else ()), "completion_ids")
    for which, sample in subject.datasets:
        available = dict.fromkeys([*(name for name in sample.columns if name not in contract.NOT_PASSED), *others])
        for name, function in subject.functions:
            try:
                contract.bind(name, function, available)
            except contract.MissingColumnError as error:
                yield failed(name, error, sample.columns, dataset=which)


def empty_columns(subject: Subject) -> Iterator[Finding]:
    """Find a reward function that reads a column which is None in every row."""
    sample = subject.sample
    empty = [name for name in sample.columns if all(looked.row.get(name) is None for looked in sample.usable)]
    for name, function in subject.functions if sample.usable else ():
        for column in [column for column in empty if column in inspect.signature(function).parameters]:
            yield Finding("warning", name, f"it reads the column {column!r}, which is None in "
                          f"{sample.share(len(sample.usable))}", "fill the column with what the function needs")


def unjudged_rows(subject: Subject) -> Iterator[Finding]:
    """Find rows that a ready-made reward function can never judge, such as rows with unreadable tests of code."""
    for which, sample in subject.datasets:
        rows = sorted(((looked.index, looked.row) for looked in sample.fitting), key=lambda pair: pair[0])
        for name, function in subject.functions:
            yield from faulty_rows(name, function, rows, f"{which} row".removeprefix("dataset "))


def unusable_evaluation(subject: Subject) -> Iterator[Finding]:
    """Find an evaluation dataset without a usable row."""
    sample = subject.eval_sample
    if sample is None or sample.fitting:
        return
    first = sample.rows[0]
    reason = first.reason or str(first.error or f"prompt longer than {sample.limit} tokens")
    yield Finding("error", "", f"no row of the evaluation dataset can be used; the first one: {reason}",
                  "correct its column `prompt`, or leave the dataset out")


@dataclass(frozen=True)
class Check:
    """A check before a run; `severity` is the worst severity of its findings."""

    name: str
    severity: str
    look: Callable[[Subject], Iterable[Finding]]
    with_sft: bool = True  # it also applies to SFTTrainer
    of_rows: bool = False  # it looks at the rows of a dataset, which not every trainer has
    method: str | None = None  # the only kind of training that it applies to

    @property
    def finds(self) -> str:
        """The kind of fault that the check finds: the first sentence of its function's docstring."""
        told = " ".join((self.look.__doc__ or "").split()).partition(". ")[0]
        return told.removeprefix("Find ").removeprefix("that ").removesuffix(".")

    def fits(self, subject: Subject) -> bool:
        return ((self.with_sft or subject.does_sampling) and not (self.of_rows and subject.without_rows)
                and self.method in (None, subject.method))


CHECKS = (
    Check("rows", "error", prompts.unreadable),
    Check("skipped rows", "error", prompts.unusable),
    Check("prompt lengths", "error", prompts.too_long),
    Check("few rows", "warning", prompts.few_rows, with_sft=False, of_rows=True),
    Check("duplicates", "warning", prompts.alike, with_sft=False, of_rows=True),
    Check("labels", "warning", prompts.unequal_labels, method="kto"),
    Check("generation prompt", "warning", template.no_generation_prompt),
    Check("dropped messages", "warning", template.left_out),
    Check("answers without an end", "error", template.endless),
    Check("no end token", "warning", template.no_end, with_sft=False),
    Check("another end token", "warning", template.other_end),
    Check("unknown tokens", "error", template.unknown_ids),
    Check("turns", "error", template.not_rendered, with_sft=False),
    Check("rewritten history", "warning", template.rewritten, with_sft=False),
    Check("reserved columns", "error", reserved_columns, with_sft=False),
    Check("missing columns", "error", missing_columns, with_sft=False),
    Check("empty columns", "warning", empty_columns, with_sft=False),
    Check("rows without a verdict", "error", unjudged_rows, with_sft=False),
    Check("the teacher's prompts", "error", prompts.too_long_for_teacher, with_sft=False, of_rows=True),
    Check("stored completions", "error", prompts.unfit_completions, with_sft=False, of_rows=True),
    Check("evaluation rows", "error", unusable_evaluation, with_sft=False),
    Check("output_dir", "error", room.unwritable),
    Check("disk", "error", room.full_disk),
    Check("host memory", "warning", room.little_host_memory),
    Check("managed memory", "error", room.unshared_memory),
    Check("plan", "warning", room.over_plan),
    Check("cache in 8 bits", "warning", room.cache_in_8_bits, with_sft=False),
    Check("bfloat16", "warning", room.emulated_dtype),
    Check("scale", "note", prompts.small_scale, with_sft=False, of_rows=True),
)


class PreflightError(DataError):
    """A run would fail or learn nothing; the message has one line for each problem, with its fix."""


def preflight(trainer: Any) -> list[Finding]:
    """Return every finding about a trainer, errors first. Nothing is sampled or written."""
    return look_over(Subject(trainer))


def look_over(subject: Subject) -> list[Finding]:
    return by_severity(finding for check in CHECKS if check.fits(subject) for finding in check.look(subject))


def before_training(trainer: Any) -> None:
    """Check a run at the start of `train()`: raise PreflightError for errors, log warnings, show the expected time."""
    if not trainer.args.preflight:
        return
    began = time.monotonic()
    subject = Subject(trainer)
    findings = look_over(subject)
    refuse_errors(findings)
    warn(logger, "preflight", findings)
    if trainer.view is None:
        return
    if not mistakes(findings):
        rows = f"{len(subject.sample.rows):,} of {subject.sample.total:,} rows{', the rewards' * bool(subject.rewards)}"
        trainer.view.say(f"preflight: checked {'the chat template' if subject.without_rows else rows}, disk and memory "
                         f"in {time.monotonic() - began:.1f} s; nothing is wrong")
    for line in filter(None, (room.beside_lora(subject), room.how_long(subject))):
        trainer.view.say(line)


def refuse_errors(findings: list[Finding]) -> None:
    """Raise PreflightError if one of the findings is an error; the message lists all problems."""
    if has_error(findings):
        wrong = mistakes(findings)
        lines = "\n".join(f"- {finding}" for finding in wrong)
        raise PreflightError(f"preflight found {len(wrong)} problem{'s' if len(wrong) > 1 else ''}; nothing was "
                             f"sampled or written:\n{lines}")


def check_settings(config: Any, count: int, does_sampling: bool = True) -> None:
    """Raise ValueError for settings that need a single process, or for a step with fewer prompts than ranks."""
    if count > 1 and (mode := getattr(config, "train_while_sampling", None)):
        raise ValueError(f"train_while_sampling is {mode!r}, and the run has {count} processes: a rank trains other "
                         "groups than it has sampled; leave it out")
    prompts = config.prompts_per_generation if isinstance(config, GRPOConfig) else config.batch_size
    if does_sampling and prompts < count > 1:
        raise ValueError(f"a step has {prompts} prompts, and the run has {count} processes, each of which takes whole "
                         "prompts: raise per_device_train_batch_size or gradient_accumulation_steps, or start fewer")


def check_ranks_agree(trainer: Any) -> None:
    """Raise ValueError if the processes differ in settings, data or versions, or if two local ranks share a GPU."""
    ranks, device = trainer.ranks, trainer.policy.device
    if ranks.count == 1:
        return
    machine = room.describe_machine(trainer.model, device)
    told = ranks.gather("what the ranks are", (described(trainer, machine), card_of(device), ranks.process.local,
                                               machine["card_bytes"] or 0))
    facts, cards, places, sizes = zip(*told, strict=True)
    if ranks.leads and max(sizes) > LARGER * min(sizes):
        logger.warning("the ranks have cards of different size (%s): each plans its own memory, but all get as many "
                       "prompts and wait for the slowest. Cards of one kind would not wait; CUDA_VISIBLE_DEVICES names "
                       "those to use", ", ".join(map(size_text, sizes)))
    for card in {*cards} - {None}:
        on_it = [rank for rank, other in enumerate(cards) if other == card]
        if len({places[rank] for rank in on_it}) > 1:
            raise ValueError(f"the ranks {' and '.join(map(str, on_it))} are on one card ({card}), and each takes a "
                             "card of its own: start them with `torchrun --nproc-per-node N -m lowmem_grpo run "
                             "RECIPE`, or let each see only its card (CUDA_VISIBLE_DEVICES) before torch is imported")
    lines = []
    for name in facts[0]:
        by_value: dict[str, list[str]] = {}
        for rank, known in enumerate(facts):
            by_value.setdefault(str(known[name]), []).append(str(rank))
        if len(by_value) > 1:
            values = " and ".join(f"{value} (rank {', '.join(its)})" for value, its in by_value.items())
            lines.append(f"{name} is {values}")
    if lines:
        raise ValueError(f"the ranks are not alike: {'; '.join(lines)}. Start all of them with the same program, "
                         "versions, settings, model and rows")


def described(trainer: Any, machine: dict[str, Any]) -> dict[str, Any]:
    """Return, as plain values, the properties of a run that must be the same in all processes."""
    adapter = (held.detach().cpu().float().numpy().tobytes() for held in adapter_tensors(trainer.model).values())
    return {
        **{f"the version of {name}": version(name) for name in PACKAGES},
        **{f"the setting {name}": value for name, value in trainer.args.to_dict().items()},
        **{name.replace("_", " "): value for name, value in machine.items() if name not in OWN},
        "the device": trainer.policy.device.type, "the model": trainer.model.loaded.name,
        "the model's config": digest(trainer.model.get_base_model().config.to_json_string().encode()),
        "the adapter's weights": digest(*adapter), "the rows": digest_of_rows(trainer.source.dataset),
        "the rewards": list(trainer.rewards),
    }


def digest_of_rows(rows: Any) -> str:
    """Return the number of rows and a short hash of some of them; "a stream" for a stream."""
    if isinstance(rows, Stream) or not len(rows):
        return "a stream" if isinstance(rows, Stream) else "none"
    some = [rows[place] for place in sorted({n * (len(rows) - 1) // (ROWS - 1) for n in range(ROWS)})]
    return f"{len(rows)} ({digest(json.dumps(some, default=str).encode())})"


def digest(*parts: bytes) -> str:
    """Return a short hash of the bytes."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]
