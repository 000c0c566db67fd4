"""A game as an ART program plays it: guess a number, several turns, groups that are gathered, and two steps."""

import asyncio
import random
import re

from lowmem_grpo import agents as art
from lowmem_grpo.agents.local import LocalBackend

model = art.TrainableModel(name="guesser-001", project="guess", base_model="tiny-games")
model._internal_config = art.dev.InternalModelConfig(init_args=art.dev.InitArgs(max_seq_length=512))


@art.retry(max_attempts=2)
async def rollout(model: art.Model, seed: int) -> art.Trajectory:
    hidden = random.Random(seed).randint(1, 32)
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "Guess my number from 1 to 32. Reply with a number."}],
        metadata={"seed": seed},
    )
    for turn in range(5):
        completion = await model.openai_client().chat.completions.create(
            model=model.name, messages=trajectory.messages(), max_completion_tokens=8,
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        said = re.search(r"\d+", choice.message.content or "")
        if said is None:
            trajectory.reward = -1
            break
        if int(said[0]) == hidden:
            trajectory.reward = 1 - 0.1 * turn
            break
        hint = "higher" if int(said[0]) < hidden else "lower"
        trajectory.messages_and_choices.append({"role": "user", "content": hint})
    trajectory.metrics["won"] = trajectory.reward > 0
    return trajectory.finish()


async def main() -> None:
    backend = LocalBackend()
    await model.register(backend)
    for step in range(await model.get_step(), 2):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, 10 * step + task) for _ in range(4)) for task in range(2)),
            pbar_desc="gather", max_exceptions=4,
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-4))
        await model.delete_checkpoints()
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
