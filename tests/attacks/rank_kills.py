"""A run in two processes, of which one is killed at a seeded moment, again and again: no step is lost or made twice.

    python -m tests.attacks.rank_kills                 100 kills, about half an hour on two cores
    python -m tests.attacks.rank_kills --count 5

A process is killed by SIGKILL some time after the start: while it loads, finds the other, samples, trains, adds up
gradients or saves. The other one must end by itself within a minute. Then both are started again and go on from the
last checkpoint. In the end adapter, optimizer and every record must be those of a run that nobody killed, bit for bit.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

from lowmem_grpo.runs.saved_adapter import last_good, list_checkpoints
from tests.attacks.attack import Verdict, kills_command
from tests.attacks.ranked_run import Ranked, train
from tests.attacks.small_run import differences

STEPS, MINUTE = 24, 60.0
LATEST = 6.0  # seconds after the start, by which a process is killed
SETTINGS = {"save_steps": 2, "save_total_limit": 3}


def attack(root: Path, count: int, seed: int = 0, steps: int = STEPS) -> Iterator[Verdict]:
    """A verdict for each kill, and one for each finished run of so many steps."""
    chance, made, number = random.Random(seed), 0, 0
    Ranked(root / "straight", 2, train, max_steps=steps, **SETTINGS).wait()
    while made < count:
        number += 1
        folder = root / f"run-{number}"
        while made < count and not finished(folder, steps):
            victim, moment = chance.randrange(2), chance.uniform(0.2, LATEST)
            verdict = killed(folder, victim, moment, steps)
            if verdict is not None:
                made += 1
                yield verdict
        Ranked(folder, 2, train, resume=True, max_steps=steps, **SETTINGS).wait()
        yield Verdict("finished runs", f"run {number}", "; ".join(differences(folder, root / "straight")))


def finished(folder: Path, steps: int) -> bool:
    return bool(list_checkpoints(folder)) and list_checkpoints(folder)[-1].name == f"checkpoint-{steps}"


def killed(folder: Path, victim: int, moment: float, steps: int) -> Verdict | None:
    """Go on with a run, kill one of its processes, and look at the other; None where it was done before."""
    run = Ranked(folder, 2, train, resume=True, max_steps=steps, **SETTINGS)
    run.processes[victim].join(moment)
    if not run.processes[victim].is_alive():
        run.wait()
        return None
    run.kill(victim)
    began = time.monotonic()
    found = run.wait(MINUTE + 10)
    steps = [path.name.rpartition("-")[2] for path in list_checkpoints(folder)][-1:]
    kind, name = f"kills of rank {victim}", f"after {moment:.2f} s, at step {''.join(steps) or 0}"
    if time.monotonic() - began > MINUTE:
        return Verdict(kind, name, f"the other rank went on for {time.monotonic() - began:.0f} s")
    if finished(folder, steps) and isinstance(found[1 - victim], tuple):
        return None  # the victim had done its part, and was about to end
    if not str(found[1 - victim]).startswith("RankError"):
        return Verdict(kind, name, f"the other rank ended with {found[1 - victim]!r:.200}")
    if list_checkpoints(folder) and last_good(folder)[1]:
        return Verdict(kind, name, f"a checkpoint is not good: {last_good(folder)[1]}")
    return Verdict(kind, name)


if __name__ == "__main__":
    kills_command(__doc__, 100, attack)()
