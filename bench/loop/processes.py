"""What both sides of the comparison share: arguments, rewards, and the JSON object that each prints.

Nothing here imports the package, or torch at the top, so that it also runs in TRL's environment.
"""

import argparse
import json
import re
import resource
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS_PER_STEP, NUM_GENERATIONS = 32, 8
COMPLETIONS_PER_STEP = PROMPTS_PER_STEP * NUM_GENERATIONS
MAX_COMPLETION_LENGTH = 64
SEED = 0
SHARED: dict[str, Any] = {  # options of both GRPOConfigs; a learning rate of 0 keeps the lengths equal
    "num_generations": NUM_GENERATIONS, "max_completion_length": MAX_COMPLETION_LENGTH, "temperature": 1.0, "beta": 0.0,
    "learning_rate": 0.0, "seed": SEED, "report_to": "none", "save_strategy": "no", "shuffle_dataset": False,
    "gradient_checkpointing": False,
}


def arguments(description: str) -> argparse.Namespace:
    """The command line of a step script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--prompts", required=True, type=Path, help="jsonl with `prompt` and `answer`")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="completions of a micro-batch")
    parser.add_argument("--max-tokens", type=int, help="tokens of a micro-batch (ours only)")
    parser.add_argument("--loss-type", default="dr_grpo")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


@dataclass(frozen=True)
class Moment:
    """A point in time: by the clock, and in processor seconds of all threads of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.perf_counter(), time.process_time())


def durations(moments: list[Moment]) -> dict[str, list[float]]:
    """Seconds and processor seconds between each moment and the next."""
    pairs = list(pairwise(moments))
    return {"seconds": [b.wall - a.wall for a, b in pairs], "cpu_seconds": [b.cpu - a.cpu for a, b in pairs]}


def read_rows(path: Path, steps: int) -> list[dict[str, Any]]:
    """The rows that `steps` optimizer steps use."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = steps * PROMPTS_PER_STEP
    if len(rows) < wanted:
        raise ValueError(f"{path} holds {len(rows)} prompts; {steps} steps need {wanted}")
    return rows[:wanted]


def correct_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """The recipe's reward: 1 where the last integer of the completion is the answer."""
    found = [re.findall(r"-?\d+", completion[-1]["content"]) for completion in completions]
    return [float(bool(numbers) and int(numbers[-1]) == int(a)) for numbers, a in zip(found, answer, strict=True)]


def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """The recipe's reward: 0.1 where the last line reads `Answer: <integer>`."""
    lines = [completion[-1]["content"].strip().rpartition("\n")[2] for completion in completions]
    return [0.1 * (line.startswith("Answer: ") and line.removeprefix("Answer: ").isdecimal()) for line in lines]


def resident_bytes(name: str = "VmHWM") -> int:
    """Bytes of the resident set: the peak so far, or with VmRSS the present ones (the peak where unknown)."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike ru_maxrss, this does not count the parent before exec
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(device: str) -> int:
    """Peak memory of the run on its device: allocated on a card, resident on the CPU."""
    import torch

    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else resident_bytes()


def print_result(**result: Any) -> None:
    """The object that the driver reads: the last line of standard output."""
    import peft
    import torch
    import transformers

    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    result["versions"] = versions | result.pop("versions", {})
    print(json.dumps(result | {"threads": torch.get_num_threads()}), flush=True)
