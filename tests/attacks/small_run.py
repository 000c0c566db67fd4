"""Small runs of the embedded model on the CPU, whose weights move far, and what is the same in two of them."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, add_new_tokens
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.runs.records import COMPLETIONS, METRICS, read_lines
from tests.support.small_models import shallow

ROWS = [{"prompt": f"Start with {n}. Add {n + 3}. Multiply by 2. What is the result?\n"} for n in range(1, 8)]
SETTINGS: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 24, "max_steps": 6,
    "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "save_steps": 100, "beta": 0.02,
}
TAUGHT: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 1e-2, "lr_scheduler_type": "cosine",
    "save_steps": 2, "save_total_limit": 2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3,
}
TIMES = ("elapsed", "step_time", "tokens_per_second", "time/", "memory/", "ranks/", "runtime", "samples_per_second",
         "steps_per_second")  # and what begins so, of an evaluation too


def digit_sum(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(int(c) for c in text if c in "0123456789")) for text in completions]


def make(
    folder: str | Path, reward: Any = digit_sum, rows: Any = ROWS, callbacks: Any = (), eval_dataset: Any = None,
    model: Any = None, **settings: Any,
) -> GRPOTrainer:
    """A trainer of the embedded model, or another, with dropout."""
    config = GRPOConfig(output_dir=str(folder), **(SETTINGS | settings))
    return GRPOTrainer(model or adapted(), reward, config, rows, eval_dataset, callbacks=list(callbacks))


def make_sft(folder: str | Path, callbacks: Any = (), model: Any = None, **settings: Any) -> SFTTrainer:
    """A fine-tuning trainer of the embedded model, with dropout, on seven rows, two in a step."""
    rows = [row | {"completion": f"Answer = {index}"} for index, row in enumerate(ROWS)]
    config = SFTConfig(output_dir=str(folder), **(TAUGHT | settings))
    return SFTTrainer(model or adapted(), rows, config, eval_dataset=rows[:2], callbacks=list(callbacks))


def adapted() -> FastPeftModel:
    """The embedded model with LoRA."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, r=4, lora_dropout=0.1, use_gradient_checkpointing=False)


def with_new_tokens() -> FastPeftModel:
    """Two layers of it with new tokens whose rows are trained, and a head and an embedding that are one."""
    bare, tokenizer = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128, load_in_4bit=False)
    add_new_tokens(bare, tokenizer, [f"<new {number}>" for number in range(70)])
    return FastLanguageModel.get_peft_model(bare, r=4, trainable_token_indices=[*bare.loaded.new_tokens, 20, 21, 22],
                                            use_gradient_checkpointing=False)


def with_whole_embedding() -> FastPeftModel:
    """Two layers of it, with an embedding that is trained whole, and is the head."""
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, r=4, modules_to_save=["embed_tokens", "lm_head"],
                                            use_gradient_checkpointing=False)


class StopAt:
    """Asks for a stop after a step."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.stop


def records(folder: Path, completions: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics that do not depend on the machine's pace and memory, and the completions."""
    lines = read_lines(folder / METRICS)
    kept = [{k: v for k, v in line.items() if not k.removeprefix("eval_").startswith(TIMES)}
            for line in lines]
    return kept, read_lines(folder / COMPLETIONS) if completions else []


def differences(folder: Path, expected: Path) -> list[str]:
    """What differs between two finished runs: adapter and optimizer bit for bit, and every record once."""
    newest = max(expected.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2])).name
    found = []
    for name in ("adapter/adapter_model.safetensors", f"{newest}/optimizer.safetensors"):
        if not (folder / name).is_file():
            found.append(f"{name} is missing")
            continue
        one, other = (load_file(path / name) for path in (folder, expected))
        if one.keys() != other.keys() or not all(tensor.equal(other[key]) for key, tensor in one.items()):
            found.append(f"{name} has other weights")
    sampled = (expected / COMPLETIONS).exists()
    for name, *both in zip((METRICS, COMPLETIONS), records(folder, sampled), records(expected, sampled), strict=True):
        if both[0] != both[1]:
            steps = [[line["step"] for line in lines] for lines in both]
            found.append(f"{name} has other lines: of the steps {steps[0]}, expected {steps[1]}")
    return found
