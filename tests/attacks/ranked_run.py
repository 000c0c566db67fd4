"""Small runs in several processes, each a rank: forked from a server that has imported all that they need."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo import (
    DPOConfig,
    DPOTrainer,
    FastLanguageModel,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowmem_grpo.trainer.distributed import ranks
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.loop import Trainer
from lowmem_grpo.types import MicroBatch
from tests.attacks.small_run import ROWS, digit_sum

SETTINGS: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 16, "max_steps": 4,
    "learning_rate": 1e-4, "save_steps": 100, "beta": 0.02, "disable_tqdm": True, "report_to": "none",
}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["lowmem_grpo.trainer.grpo", "lowmem_grpo.trainer.sft", "lowmem_grpo.loader",
                               "tests.attacks.ranked_run"])
PREFERRING: dict[str, Any] = {"dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}
TIMEOUT = 400  # seconds until what hangs is killed


def free_port() -> int:
    """Return a free port below those that the system gives to connections, so that none takes it before it is used."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port


class Ranked:
    """A run of `count` processes over a folder; `work(folder, rank, **given)` is what each of them does."""

    def __init__(self, folder: Path, count: int, work: Callable[..., Any], **given: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count, port = folder, count, free_port()
        self.results = [folder / f".result-{rank}.pt" for rank in range(count)]
        for path in self.results:
            path.unlink(missing_ok=True)
        self.processes = [SERVER.Process(target=begin, args=(folder, rank, count, port, work, given))
                          for rank in range(count)]
        for process in self.processes:
            process.start()

    def wait(self, longest: float = TIMEOUT) -> list[Any]:
        """What each rank returned, or the last line of its error; what has not ended after `longest` seconds is
        killed."""
        until = time.monotonic() + longest
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
        return [torch.load(path, weights_only=False) if path.exists() else None for path in self.results]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        assert self.processes[rank].pid is not None
        os.kill(self.processes[rank].pid, number)


def begin(folder: Path, rank: int, count: int, port: int, work: Callable[..., Any], given: dict[str, Any]) -> None:
    """In the process of a rank."""
    torch.set_num_threads(1)
    # all have the same place on the machine, so that on a card they may share it
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    try:
        ranks()  # they find each other first
        found = work(folder, rank, **given)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        traceback.print_exc(file=sys.stderr)
        found = f"{type(error).__name__}: {error}"
    torch.save(found, folder / f".result-{rank}.pt")


def trainer(folder: Path, double: bool = False, method: str = "grpo", reward: Any = digit_sum, rows: Any = ROWS,
            callbacks: Any = (), engine: str = "transformers", lora_seed: int = 3, beside: Any = None,
            dtype: torch.dtype | None = None, **settings: Any) -> Trainer:
    """A trainer of the embedded model, without dropout. `beside` are options of get_peft_model: what is trained beside
    LoRA."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False, fast_inference=engine,
                                                dtype=dtype)
    model = FastLanguageModel.get_peft_model(bare, r=4, lora_dropout=0.0, use_gradient_checkpointing=False,
                                             random_state=lora_seed, **beside or {})
    if double:
        model.double()
    given = {name: value for name, value in (SETTINGS | settings).items()
             if name not in ("num_generations", "max_completion_length", "beta")}
    if method in PREFERRING:
        kind, config = PREFERRING[method]
        pairs = [row | {"chosen": f"Answer = {index}", "rejected": "No" * (index + 1)}
                 for index, row in enumerate(rows)]
        return kind(model, args=config(output_dir=str(folder), max_length=128, **given), train_dataset=pairs,
                    eval_dataset=pairs[:3], callbacks=list(callbacks))
    if method == "sft":
        taught = [row | {"completion": f"Answer = {index}"} for index, row in enumerate(rows)]
        return SFTTrainer(model, taught, SFTConfig(output_dir=str(folder), **given), eval_dataset=taught[:3],
                          callbacks=list(callbacks))
    config = GRPOConfig(output_dir=str(folder), **(SETTINGS | settings))
    return GRPOTrainer(model, reward, config, rows, rows[:3], callbacks=list(callbacks))


def weights(run: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}


def train(folder: Path, rank: int, resume: bool = False, **settings: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """The adapter after a run, and the lines of its metrics."""
    run = trainer(folder, **settings)
    run.train(resume_from_checkpoint=resume)
    return weights(run), run.state.log_history[:-1]


class InOrder(Learner):
    """Adds the gradients of groups in the order of the groups, whichever rank computes them, so that their sum does not
    depend on the number of ranks. Each micro-batch is one group."""

    def forward_backward(self, groups: Any, *args: Any, **options: Any) -> dict[str, float]:
        self.parts: dict[int, list[Tensor | None]] = {}
        self.order = {id(rollout): place for place, group in enumerate(groups) for rollout in group.rollouts}
        found = super().forward_backward(groups, *args, **options)
        told = self.ranks.gather("gradients of groups", self.parts)
        parts = {place: part for some in told for place, part in some.items()}
        for index, parameter in enumerate(self.policy.trainable):
            parameter.grad = torch.zeros_like(parameter)
            for place in sorted(parts):
                if (part := parts[place][index]) is not None:
                    parameter.grad += part
            if not self.ranks.leads:
                parameter.grad = None  # the sum over the ranks is then that of the first one
        return found

    def add(self, batch: MicroBatch, *args: Any) -> None:
        super().add(batch, *args)
        (place,) = {self.order[id(rollout)] for rollout in batch.rollouts}
        self.parts[place] = [parameter.grad for parameter in self.policy.trainable]
        for parameter in self.policy.trainable:
            parameter.grad = None


def train_in_order(folder: Path, rank: int, **settings: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """The same in float64, with the gradients of groups added in their order."""
    run = trainer(folder, double=True, per_device_train_batch_size=4, gradient_accumulation_steps=4,
                  parity_bound=0.001, **settings)
    run.learner.__class__ = InOrder
    run.train()
    return weights(run), run.state.log_history[:-1]
