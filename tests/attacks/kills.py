"""Runs killed by SIGKILL at seeded moments of every phase, each resumed until it ends as the run that nobody killed.

    python -m tests.attacks.kills                 500 kills, some minutes on two cores
    python -m tests.attacks.kills --count 24

Each process is forked from one that has loaded the libraries and made the trainer, but never trained: it shares only
the folder on disk with the others. There are two ways of killing. The process kills itself right before a change of the
disk, counted within a phase. Or it is killed from outside, some time after it has entered a phase. Which phase a kill
really met is read from memory that the killed process shared.

A run fails if its adapter or its optimizer's states differ in any bit from the undisturbed run, if a line of its
metrics or completions is missing, repeated or different, if resuming raises an error, if a checkpoint is lost, or if
anything is left over at the end.
"""

import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import click
from safetensors.torch import load_file

from lowmem_grpo.runs.records import COMPLETIONS, METRICS
from lowmem_grpo.runs.saved_adapter import last_good, read_summary
from lowmem_grpo.runs.views.terminal import quiet
from lowmem_grpo.trainer.loop import Trainer
from tests.attacks.attack import Verdict, attack_and_exit
from tests.attacks.small_run import differences, digit_sum, make, make_sft, with_new_tokens, with_whole_embedding

PHASES = ("resuming", "sampling", "scoring", "training", "writing records", "saving a checkpoint", "swapping it in",
          "ending")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
SHORT: dict[str, Any] = {"max_steps": 6, "save_steps": 1, "save_total_limit": 2, "disable_tqdm": True,
                         "preflight": False}
SAMPLED: dict[str, Any] = {"max_completion_length": 12, "per_device_train_batch_size": 4}
SCENARIOS: dict[str, dict[str, Any]] = {
    "grpo": {}, "two updates a rollout": {"num_iterations": 2, "save_steps": 2}, "saved every third step":
    {"save_steps": 3, "logging_steps": 2}, "replay": {"replay_buffer_size": 4, "dynamic_sampling_rounds": 1},
    "sft": {}, "new tokens": {"embedding_learning_rate": 1e-3}, "whole embedding": {"embedding_learning_rate": 1e-4},
}
MODELS = {"new tokens": with_new_tokens, "whole embedding": with_whole_embedding}  # of other scenarios: LoRA alone
MOVED = 0.01  # the largest entry of B, which begins at 0, must get beyond this: else weights could be lost unseen
LONGEST = 400.0  # seconds a process may run


class Watch:
    """The phase of a run, in memory that outlives its process, and the kill that is due at a change of the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.phase = RawArray("i", 1)
        self.entered, self.changes = (RawArray("i", len(PHASES)) for _ in range(2))
        self.target: tuple[str, int] | None = None  # the phase, and before which change in it
        self.stop: int | None = None  # the step after which the run stops

    def clear(self) -> None:
        for values in (self.phase, self.entered, self.changes):
            values[:] = [0] * len(values)

    def enter(self, name: str) -> None:
        number = PHASES.index(name)
        self.phase[0] = number
        self.entered[number] += 1

    @property
    def current(self) -> str:
        return PHASES[self.phase[0]]

    # A listener of the trainer.

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.enter("sampling")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.stop

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.enter("ending")

    def reward(self, completions: list[str], **kwargs: Any) -> list[float]:
        self.enter("scoring")
        found = digit_sum(completions)
        self.enter("training")
        return found

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Notice a change of the run's folder before it is made; Python calls this."""
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        path = str(args[0]) if writes or event in CHANGES else ""
        if not path.startswith(self.folder):
            return
        name = phase_of(event, path.removeprefix(self.folder))
        if self.current not in ("resuming", "ending") and name != self.current:
            self.enter(name)
        number = self.phase[0]
        self.changes[number] += 1
        if self.target == (self.current, self.changes[number]):
            os.kill(os.getpid(), signal.SIGKILL)


def phase_of(event: str, path: str) -> str:
    """What a change of the disk belongs to."""
    if "checkpoint-" not in path:
        return "writing records"
    return "saving a checkpoint" if event in ("open", "os.mkdir") else "swapping it in"


@dataclass
class Scenario:
    """A trainer that was made and never trained, its folder, and what its undisturbed run left."""

    name: str
    trainer: Trainer
    watch: Watch
    folder: Path
    expected: Path

    def start(self) -> int:
        """Fork a process that trains, and goes on from a checkpoint where there is one; returns its id."""
        self.watch.clear()
        child = os.fork()
        if child == 0:
            self.train()
        return child

    def train(self) -> None:
        """What the forked process does; it never returns."""
        try:
            said = os.open(self.folder.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            logging.basicConfig(force=True, stream=os.fdopen(2, "w"))
            sys.addaudithook(self.watch.audit)
            self.trainer.train(resume_from_checkpoint=True)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing may get out of the forked process
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)

    @property
    def said(self) -> str:
        """What the last process printed."""
        return (self.folder.parent / "said.txt").read_text()

    def damage(self) -> str:
        """How the finished run differs from the undisturbed one, and what it has left over."""
        found = differences(self.folder, self.expected)
        left = [path.name for path in self.folder.iterdir() if path.name.startswith(".") or ".tmp" in path.name]
        found += [f"{name} is left over" for name in left]
        status = read_summary(self.folder).get("status")
        return "; ".join(found + ([] if status == "finished" else [f"its status is {status!r}"]))


def prepare(name: str, root: Path, **changed: Any) -> Scenario:
    """Make a scenario's trainer, with settings of its own, and the run that nobody kills."""
    folder, expected = root / name / "run", root / name / "expected"
    folder.parent.mkdir(parents=True)
    watch = Watch(folder)
    settings = SHORT | SCENARIOS[name] | changed
    trainer: Trainer = make_sft(folder, [watch], **settings) if name == "sft" else make(
        folder, watch.reward, callbacks=[watch], model=MODELS[name]() if name in MODELS else None, **SAMPLED | settings)
    scenario = Scenario(name, trainer, watch, folder, expected)
    if ended(scenario.start(), LONGEST) != 0:
        raise RuntimeError(f"the undisturbed run failed:\n{scenario.said}")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert max(float(tensor.abs().max()) for key, tensor in adapter.items() if "lora_B" in key) > MOVED
    folder.rename(expected)
    return scenario


def ended(child: int, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
    """Wait for the end of a process: its exit status, negative for a signal. None if `until` came true before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if until():
            return None
        time.sleep(0.0005)
    return None


def strike(scenario: Scenario, rng: random.Random) -> tuple[int, str]:
    """One process of a run, killed at a moment that `rng` chooses: its exit status and the phase it ended in."""
    watch = scenario.watch
    kind = rng.choice(PHASES)
    seldom = kind in ("resuming", "ending")
    by_change = kind in PHASES[4:] or (seldom and rng.random() < 0.5)
    watch.target = (kind, rng.randint(1, 12 if seldom else 24)) if by_change else None
    occurrence, delay = 1 if seldom else rng.randint(1, 3), rng.uniform(0, 0.15)
    number = PHASES.index(kind)
    child = scenario.start()
    if by_change:
        status = ended(child, LONGEST)
    else:
        status = ended(child, LONGEST, lambda: kind == "resuming" or watch.entered[number] >= occurrence)
        if status is None:
            status = ended(child, delay)
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, watch.current


def one_run(scenario: Scenario, rng: random.Random, most: int) -> Iterator[Verdict]:
    """A run from its first step to its last, killed at most `most` times: a verdict for each kill."""
    shutil.rmtree(scenario.folder, ignore_errors=True)
    kills: list[str] = []
    saved = 0
    while True:
        if len(kills) < most:
            status, phase = strike(scenario, rng)
        else:
            scenario.watch.target = None
            status, phase = ended(scenario.start(), LONGEST) or 0, ""
        newest, _ = last_good(scenario.folder)
        step = 0 if newest is None else int(newest.name.rpartition("-")[2])
        damage = f"a checkpoint of step {saved} was lost" if step < saved else ""
        saved = max(saved, step)
        if status == 1:
            damage = f"resuming failed: {scenario.said.splitlines()[-1]}"
        if status == 0:
            damage = damage or scenario.damage()
        if status == -signal.SIGKILL:
            kills.append(phase)
        if damage or status == 0:
            break
    for number, phase in enumerate(kills):
        last = number == len(kills) - 1
        yield Verdict(phase, f"{scenario.name}, killed {len(kills)} times", damage if last else "")
    if damage and not kills:
        yield Verdict("no kill", scenario.name, damage)


def attack(root: Path, count: int, seed: int, names: tuple[str, ...]) -> Iterator[Verdict]:
    """Kill runs of these scenarios in turn, `count` times in all."""
    rng, left = random.Random(seed), count
    for scenario in cycle([prepare(name, root) for name in names]):
        for verdict in one_run(scenario, rng, left):
            left -= verdict.kind in PHASES
            yield verdict
        if left <= 0:
            return


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--count", default=500, help="How many kills.")
@click.option("--seed", default=0)
@click.option("--scenario", "names", type=click.Choice(list(SCENARIOS)), multiple=True, default=tuple(SCENARIOS))
def main(count: int, seed: int, names: tuple[str, ...]) -> None:
    """Attack, and print the table."""
    quiet()
    attack_and_exit(lambda folder: attack(folder, count, seed, names),
                    f"{count} kills of runs of {', '.join(names)}, seed {seed}. Each run was compared with the "
                    f"undisturbed one: weights, {METRICS}, {COMPLETIONS}")


if __name__ == "__main__":
    main()
