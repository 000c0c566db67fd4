"""Count the files of the package that single calls enter, with a tiny model: the files that a reader has to visit.

    python -m bench.common.entered

prints one JSON object: the number of files of a first and a second `rollout()`, of `update()`, of a chat call and of
`train(groups)`.
"""

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "lowmem_grpo") + "/"
LOADING: dict[str, Any] = {"load_in_4bit": False, "max_seq_length": 128}
ADAPTER: dict[str, Any] = {"r": 4, "use_gradient_checkpointing": False}
SETTINGS: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8,
                            "max_steps": 2, "save_strategy": "no"}


class Trace:
    """Records the files of the package whose functions any thread enters during a call."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.counts: dict[str, int] = {}
        threading.setprofile(self.note)  # for threads that begin later

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_name not in ("<module>", "<lambda>"):
            self.files.add(frame.f_code.co_filename)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Count the files that are entered inside the block under `name`."""
        self.files.clear()
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
        self.counts[name] = sum(file.startswith(PACKAGE) for file in self.files)


def place(completions: list[Any], **_columns: Any) -> list[float]:
    """Return rewards that differ within every group."""
    return [float(number) for number in range(len(completions))]


def trace_trainer(trace: Trace, folder: Path) -> None:
    """Record two rollouts and an update of GRPOTrainer."""
    from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer

    bare, _ = FastLanguageModel.from_pretrained("tiny", **LOADING)
    model = FastLanguageModel.get_peft_model(bare, **ADAPTER)
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} + 2?"}]} for number in range(4)]
    trainer = GRPOTrainer(model, place, GRPOConfig(output_dir=str(folder), **SETTINGS), rows)
    with trace.call("first rollout()"):
        groups = trainer.rollout()
    with trace.call("update()"):
        trainer.update(groups)
    trainer.state.global_step = 1  # as the loop does: only the first step's samples are compared with the trainer
    with trace.call("second rollout()"):
        trainer.rollout()


async def trace_agent(trace: Trace, folder: Path) -> None:
    """Record the second chat call of an agent, and its first training step."""
    from lowmem_grpo import agents

    model: agents.TrainableModel[Any] = agents.TrainableModel(name="agent", project="house", base_model="tiny")
    messages: list[Any] = [{"role": "user", "content": "What is 3 + 2?"}]

    async def ask(seed: int) -> Any:
        reply = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=8, seed=seed)
        return agents.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=float(seed))

    async with agents.LocalBackend(path=folder, fast_inference=False, **LOADING, **ADAPTER) as backend:
        await model.register(backend)
        first = await ask(0)
        with trace.call("chat call"):
            second = await ask(1)
        await backend.run(model).in_worker(int, sleep=False)  # wait until the call's engine session has ended
        with trace.call("train(groups)"):
            await model.train([agents.TrajectoryGroup([first, second])], learning_rate=1e-3)


def count() -> dict[str, int]:
    """Return the number of files that each call enters."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        trace_trainer(trace, Path(folder) / "trainer")
        asyncio.run(trace_agent(trace, Path(folder) / "agent"))
    return trace.counts


if __name__ == "__main__":
    sys.stdout.write(json.dumps(count(), sort_keys=True) + "\n")
