"""The card (README.md) of a saved adapter or model: its base, its adapter's settings, and the runs that trained it."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from lowmem_grpo.models.stored_model import EMBEDDED
from lowmem_grpo.runs.adapter_file import SEQ_CLS
from lowmem_grpo.runs.files import CARD, has_own_card
from lowmem_grpo.runs.saved_adapter import BaseRecord
from lowmem_grpo.utils import count_text, is_gguf, time_text

ADAPTER, MERGED, MERGED_4BIT, MERGED_MXFP4, GGUF = "adapter", "merged", "merged_4bit", "merged_mxfp4", "gguf"
REWARD = "reward"  # an adapter that is a reward model
TITLES = {ADAPTER: "LoRA adapter of {}", REWARD: "Reward model on {}", MERGED: "{}, merged",
          MERGED_4BIT: "{}, merged, in 4 bits", MERGED_MXFP4: "{}, merged, experts in MXFP4",
          GGUF: "{}, merged, as GGUF"}
USES = {
    ADAPTER: "PEFT's `PeftModel.from_pretrained(MODEL, FOLDER)` puts it on the base model, and `FastLanguageModel."
             "from_pretrained(FOLDER)` of lowmem-grpo loads both.",
    REWARD: "PEFT's `PeftModel.from_pretrained(MODEL, FOLDER)` puts it on the model that transformers' "
            "`AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)` loads, and `rewards.from_adapter"
            "(FOLDER)` of lowmem-grpo rewards completions with it.",
    MERGED: "transformers' `AutoModelForCausalLM.from_pretrained(FOLDER)` loads it.",
    MERGED_4BIT: "transformers' `AutoModelForCausalLM.from_pretrained(FOLDER)` loads it, with bitsandbytes.",
    MERGED_MXFP4: "transformers' `AutoModelForCausalLM.from_pretrained(FOLDER)` loads it.",
    GGUF: "llama.cpp reads its file.",
}
METHODS = {"sft": "Supervised fine-tuning", "trajectories": "GRPO on trajectories", "rloo": "RLOO", "grpo": "GRPO",
           "ppo": "PPO",
           "distillation": "Distillation", "sdpo": "Self-distillation (SDPO)", "sdft": "Self-distillation (SDFT)",
           "dpo": "Direct preference optimization (DPO)", "orpo": "Odds-ratio preference optimization (ORPO)",
           "kto": "Kahneman-Tversky optimization (KTO)", "reward": "Reward model"}
SETTINGS = ("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps",
            "num_generations", "temperature", "max_completion_length", "max_length", "loss_type", "beta", "seed")
OF_TEACHER = ("distillation_mode", "distillation_topk", "distillation_alpha", "distillation_weight")
MEASURED = ("reward", "loss", "eval_reward", "eval_loss", "distillation/divergence", "rewards/accuracies",
            "eval_rewards/accuracies", "accuracy", "eval_accuracy")
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # on the hub
OF_MODULE = re.compile(r"\.(token_adapter|modules_to_save|weight|lora_\w+)\b")  # after a module, in a tensor's name
CACHED = re.compile(r"models--([^/]+?)--([^/]+)")  # a folder of the hub's cache
Run = tuple[Mapping[str, Any], list[dict[str, Any]]]  # as in summary.json and metrics.jsonl


@dataclass(frozen=True)
class PastRuns:
    """What a card says of the runs that trained an adapter."""

    tags: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)  # of the hub
    text: str = ""  # a section for each run

    @classmethod
    def of_runs(cls, runs: Iterable[Run], data: str | None = None) -> Self:
        """Return what the records of these runs say; `data` is the user's name of their data."""
        trained = [(method_of(facts), facts, lines) for facts, lines in runs if facts.get("steps")]
        names = each_once([data, *(name for _, facts, _ in trained for name in names_of(facts))])
        return cls([method for method, _, _ in trained],
                   each_once(name.partition(":")[0] for name in names if "/" in (hub_name(name) or "")),
                   "\n\n".join(section(*run, data) for run in trained))

    @classmethod
    def of_card(cls, folder: Path) -> Self:
        """Return what the card of a saved adapter says. One of another hand, or none, says nothing."""
        from huggingface_hub import ModelCard

        if not (folder / CARD).is_file() or not has_own_card(folder):
            return cls()
        card: Any = ModelCard((folder / CARD).read_text("utf-8"))
        _, mark, text = card.text.rpartition("\n<!--")[0].partition("\n## ")
        return cls(card.data.tags or [], card.data.datasets or [], f"{mark}{text}".strip())


def card_text(kind: str, base: BaseRecord, lora: Mapping[str, Any] | None = None, history: PastRuns | None = None,
              title: str | None = None, tags: str | Iterable[str] | None = None,
              shapes: Mapping[str, Sequence[int]] | None = None) -> str:
    """Return the card of an ADAPTER, of a MERGED model or of a GGUF file. `lora` has the fields of adapter_config.json,
    and `shapes` those of the adapter's tensors.
    """
    from huggingface_hub import ModelCardData

    history, name = history or PastRuns(), shown(base.model)
    kind = REWARD if kind == ADAPTER and (lora or {}).get("task_type") == SEQ_CLS else kind
    kinds = ["lowmem-grpo", "lora" if lora else None, GGUF if kind == GGUF else None]
    front = ModelCardData(
        base_model=hub_name(base.model),
        library_name={ADAPTER: "peft", REWARD: "peft", GGUF: None}.get(kind, "transformers"),
        pipeline_tag="text-classification" if kind == REWARD else "text-generation", datasets=history.datasets or None,
        tags=each_once([*kinds, *history.tags, *([tags] if isinstance(tags, str) else tags or [])]))
    parts = [f"# {title or (TITLES[kind].format(name) if lora else name)}", "Made with lowmem-grpo. " + USES[kind],
             listed({"base model": of_base(base), "its weights in training": form_of_base(base) if lora else None,
                     "LoRA": lora and lora_text(lora),
                     "trained beside it": lora and beside_text(lora, shapes or {})}), history.text]
    return f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def section(method: str, facts: Mapping[str, Any], lines: list[dict[str, Any]], data: str | None) -> str:
    """Return what the records of a run say."""
    steps = f"{count_text(facts['steps'], 'step')} ({time_text(facts.get('train_seconds') or 0)})"
    return f"## {METHODS.get(method, method)}, {steps}\n\n{listed(of_run(facts, lines, data))}"


def listed(entries: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in entries.items() if value)


def each_once(names: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name))


def names_of(facts: Mapping[str, Any]) -> list[str]:
    return each_once([facts.get("dataset"), *facts.get("datasets", ())])


def hub_name(name: str | None) -> str | None:
    """Return the name on the hub of a model, without a file or a configuration; None if it has none."""
    if name is None or name in EMBEDDED:
        return None
    if CACHED.search(name):
        return shown(name)
    name = "/".join(name.split("/")[:2]) if is_gguf(name) else name.partition(":")[0]
    return name if NAME.fullmatch(name) and not Path(name).exists() else None


def shown(name: str | None) -> str:
    """Return a name of a model or dataset for strangers: of a path on this machine, only its last part."""
    if name is None:
        return "an unknown model"
    if cached := CACHED.search(name):
        return f"{cached[1]}/{cached[2]}"
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def of_base(base: BaseRecord) -> str:
    return ", ".join(filter(None, [shown(base.model), base.revision and f"revision {base.revision}",
                                   base.sha256 and f"sha256 {base.sha256}"]))


def form_of_base(base: BaseRecord) -> str | None:
    """Return how the base's weights were held; None if that is unknown."""
    if base.load_in_4bit is None:
        return None
    form = "FP8" if base.load_in_fp8 else "4 bits" if base.load_in_4bit else "not quantized"
    return f"{form}, computing in {base.dtype}"


def lora_text(lora: Mapping[str, Any]) -> str:
    targets = lora.get("target_modules") or ()
    targets = [targets] if isinstance(targets, str) else sorted(targets)
    on = ", ".join([*targets, *sorted(lora.get("target_parameters") or ())])
    return f"rank {lora.get('r')}, alpha {lora.get('lora_alpha')}, on {on}"


def beside_text(lora: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> str:
    """Return what an adapter's tensors are beside LoRA; of a tied embedding and head, only the first."""
    parts = []
    for name, shape in shapes.items():
        module, kind = OF_MODULE.split(name)[:2]
        if ".lora_" not in name:
            size = " x ".join(f"{each:,}" for each in shape)
            parts.append(f"{'rows' if kind == 'token_adapter' else 'all'} of {module.rpartition('.')[2]} ({size})")
    return f"{min(parts)}, tied" if lora.get("ensure_weight_tying") and parts else ", ".join(sorted(parts))


def method_of(facts: Mapping[str, Any]) -> str:
    estimator = (facts.get("config") or {}).get("advantage_estimator")
    return str(facts.get("method") or {"rloo": "rloo", "gae": "ppo"}.get(str(estimator), "grpo"))


def of_run(facts: Mapping[str, Any], lines: list[dict[str, Any]], data: str | None) -> dict[str, Any]:
    """Return what a run's records say: data, settings, and measurements at its beginning and end."""
    config = facts.get("config") or {}
    teacher, renamed = config.get("teacher"), "distillation_alpha" if facts.get("method") == "distillation" else ""
    settings = [f"{name} {config[name]}" for name in (*SETTINGS, *(OF_TEACHER if teacher else ()))
                if config.get(name) is not None and name != renamed]
    known = {"recipe": facts.get("recipe"), "teacher": teacher and ("a server" if "://" in teacher else shown(teacher)),
             "data": ", ".join(map(shown, [data] if data else names_of(facts))),
             "settings": ", ".join(settings)}
    lines = [line for line in lines if "train_runtime" not in line]  # the run's summary
    for name in MEASURED:
        values = [line[name] for line in lines if isinstance(line.get(name), float) and math.isfinite(line[name])]
        if values and not (name == "loss" and "reward" in known):  # a policy's loss says nothing
            few = max(1, min(10, len(values) // 2))
            known[name] = f"{fmean(values[:few]):.3g} in the first {count_text(few, 'log line')}, " \
                          f"{fmean(values[-few:]):.3g} in the last"
    before, after = facts.get("accuracy_before"), facts.get("accuracy_after")
    if isinstance(before, float) and isinstance(after, float):
        known["right answers"] = (f"{before:.1%} before and {after:.1%} after training, of "
                                  f"{count_text(facts.get('eval_problems') or 0, 'held-out problem')}")
    return known
