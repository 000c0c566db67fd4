"""Trainings on preferences and PPO that are killed by SIGKILL in the middle of a step, and go on in another process.

    python test_killed_preferences.py METHOD FOLDER     trains, and is killed in its third step
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_models import scatter
from trainer_runs import ROWS as CHATS
from trainer_runs import by_letters, load
from transformers import TrainerCallback

from lowmem_grpo import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
)
from lowmem_grpo.runs.records import METRICS, read_lines
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from tests.attacks.small_run import differences

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [{"prompt": f"{n} + 2 = ", "chosen": f"{n + 2}", "rejected": f"{n + 3}, or so" + "!" * (n % 3)}
         for n in range(7)]
OFFLINE: dict[str, Any] = {"dpo": (DPOTrainer, DPOConfig, {"loss_type": ["sigmoid", "aot"]}),
                           "orpo": (ORPOTrainer, ORPOConfig, {}),
                           "kto": (KTOTrainer, KTOConfig, {"shuffle_dataset": True}),
                           "reward": (RewardTrainer, RewardConfig, {"center_rewards_coefficient": 0.01})}
PPO: dict[str, Any] = {"advantage_estimator": "gae", "num_generations": 1, "max_completion_length": 8,
                       "critic_learning_rate": 1e-2, "beta": 0.1}


class Killed(TrainerCallback):
    """Kills the process when the gradient of the third step is known, and nothing has moved yet."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def make(method: str, folder: Path, *callbacks: Any) -> Any:
    """A trainer of four steps with dropout, whose adapter goes on from another training."""
    settings = {"output_dir": str(folder), "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4,
                "learning_rate": 1e-2, "disable_dropout": False, "disable_tqdm": True}
    model = load(lora_dropout=0.2)
    if method == "ppo":
        return GRPOTrainer(scatter(model), by_letters, GRPOConfig(**settings, **PPO), CHATS, callbacks=[*callbacks])
    trainer, config, own = OFFLINE[method]
    return trainer(model if method == "reward" else scatter(model), args=config(**settings, **own),
                   train_dataset=PAIRS, callbacks=[*callbacks])


def killed(method: str, folder: Path) -> None:
    """Train in a process of its own, which is killed."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    child = subprocess.run([sys.executable, __file__, method, str(folder)], capture_output=True, text=True, timeout=600,
                           env=os.environ | {"PYTHONPATH": paths})
    assert child.returncode == -signal.SIGKILL, child.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("method", [*OFFLINE, "ppo"])
def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(method: str, tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    killed(method, parts)
    (last,) = list_checkpoints(parts)
    assert last.name == "checkpoint-2" and len(read_lines(parts / METRICS)) == 2
    assert make(method, parts).train(resume_from_checkpoint=True).finished
    assert make(method, straight).train().finished
    assert differences(parts, straight) == []
    for path in (straight / "checkpoint-4").glob("*.safetensors"):  # of a critic too
        held, wanted = load_file(parts / "checkpoint-4" / path.name), load_file(path)
        assert held.keys() == wanted.keys() and all(held[name].equal(wanted[name]) for name in wanted), path.name


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), Killed()).train()
