"""An agent in plain Python that plays guess with the embedded model of the games, and a program that trains it.

    python agent_runs.py FOLDER STEPS [kill | raise]    trains so many steps; `kill` ends it by SIGKILL within the next
                                                        one, `raise` by an error, with nothing closed
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lowmem_grpo import agents as art
from lowmem_grpo.recipes.guess import Guess

LOADING: dict[str, Any] = {
    "load_in_4bit": False, "max_seq_length": 256, "r": 4, "use_gradient_checkpointing": False, "parity_steps": 1,
    "fast_inference": False,
}
MEMBERS, TASKS = 4, 2


def agent(**more: Any) -> art.TrainableModel[Any]:
    return art.TrainableModel(**{"name": "agent", "project": "games", "base_model": "tiny-games", **more})


def backend(folder: Path, **more: Any) -> art.LocalBackend:
    return art.LocalBackend(path=folder, **LOADING | more)


async def play(model: Any, task: int, member: int) -> art.Trajectory:
    """One game, whose calls have seeds of their own."""
    game, client = Guess(), model.openai_client()
    found = art.Trajectory(messages_and_choices=[{"role": "user", "content": game.reset(seed=task)}])
    for turn in range(5):
        reply = await client.chat.completions.create(
            model=model.get_inference_name(), messages=found.messages(), max_tokens=4,
            seed=1000 * task + 10 * member + turn,
        )
        found.messages_and_choices.append(reply.choices[0])
        answer, paid, done = game.step(reply.choices[0].message.content or "")
        found.reward += paid
        found.messages_and_choices.append({"role": "user", "content": answer})
        if done:
            break
    found.metrics["won"] = float(found.reward > 0)
    return found


async def groups(model: Any, step: int, members: int = MEMBERS) -> list[art.TrajectoryGroup]:
    """The games of a step, one after the other: how the engine batches them changes the last bits."""
    return [art.TrajectoryGroup([await play(model, TASKS * step + task, member) for member in range(members)])
            for task in range(TASKS)]


async def train(folder: Path, steps: int, kill: bool = False) -> None:
    """Go on up to so many steps."""
    model = agent()
    async with backend(folder) as trainer:
        await model.register(trainer)
        for step in range(await model.get_step(), steps + kill):
            played = await groups(model, step)
            if step == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            await model.train(played, learning_rate=3e-3)
            await model.log(played, split="val", step=step + 1)


async def left_open(folder: Path) -> None:
    """A program as ART's examples are, which fails."""
    model = agent()
    await model.register(backend(folder))
    await model.train(await groups(model, 0))
    raise ZeroDivisionError("in the program")


if __name__ == "__main__":
    if "raise" in sys.argv:
        asyncio.run(left_open(Path(sys.argv[1])))
    asyncio.run(train(Path(sys.argv[1]), int(sys.argv[2]), "kill" in sys.argv))
