"""What starts the processes of a run, and what their ends look like to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.attacks.ranked_run import Ranked, free_port, train

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"max_steps": 6, "save_steps": 2}
NOTEBOOK = """
import sys
from pathlib import Path

from accelerate import notebook_launcher

from lowmem_grpo import FastLanguageModel, GRPOConfig  # as the first cell of a notebook has it


def train(folder):
    import os
    import signal

    import torch
    from transformers import TrainerCallback

    from tests.attacks.ranked_run import train as run
    from lowmem_grpo.trainer.distributed import ranks

    class Killed(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            once = folder / "killed"
            if state.global_step == 3 and ranks().rank == 1 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    adapter, _ = run(folder / "run", ranks().rank, resume=True, callbacks=[Killed()], max_steps=6, save_steps=2)
    torch.save((ranks().count, adapter), folder / f"rank-{ranks().rank}.pt")


notebook_launcher(train, (Path(sys.argv[1]),), num_processes=2, use_port=sys.argv[2], max_restarts=1)
"""
EXITS = """
import gc
import os
import time

from datetime import timedelta

from torch.distributed import TCPStore

from lowmem_grpo.config.launcher import ProcessRank
from lowmem_grpo.trainer.distributed import Heartbeat


def join(rank, pipe):
    "Return the store of a pair of ranks; the first rank listens on a port that the system chooses."
    port = int(os.read(pipe[0], 9)) if rank else 0
    store = TCPStore("127.0.0.1", port, 2, not rank, timedelta(seconds=60), wait_for_workers=False)
    if rank:
        store.set("here", "")
    else:
        os.write(pipe[1], str(store.port).encode())
        store.wait(["here"])
    return store


gc.freeze()  # what imports have made: each child would look through it at its end, for two seconds
children = []
for number in range(16):  # without `close` at exit a third of them abort
    rank = number % 2
    pipe = pipe if rank else os.pipe()
    children.append(os.fork())
    if not children[-1]:
        Heartbeat(join(rank, pipe), ProcessRank(rank, 2, rank), beat=0.001)
        time.sleep(0.1)
        raise SystemExit  # the interpreter goes while the heartbeat is in torch
failed = [code for child in children if (code := os.waitpid(child, 0)[1])]
raise SystemExit(f"{len(failed)} of {len(children)} have failed: {failed}" if failed else 0)
"""


def script(text: str, folder: Path, *words: str) -> str:
    """What a program prints; it must end well."""
    (folder / "program.py").write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, str(folder / "program.py"), *words], capture_output=True, text=True,
                          env=environment | {"PYTHONPATH": str(ROOT)}, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_process_that_has_done_its_part_ends_without_an_abort(tmp_path: Path) -> None:
    script(EXITS, tmp_path)


@pytest.mark.slow
def test_in_a_notebook_a_killed_rank_is_started_again_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    script(NOTEBOOK, tmp_path, str(tmp_path), str(free_port()))
    (expected, _), _ = Ranked(tmp_path / "straight", 2, train, **SETTINGS).wait()
    assert (tmp_path / "killed").exists()
    for rank in range(2):
        count, adapter = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)
        assert count == 2 and adapter.keys() == expected.keys()
        assert all(torch.equal(held, expected[name]) for name, held in adapter.items())
