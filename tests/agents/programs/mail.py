"""A mail agent as an ART program writes it: a database, scenarios, RULER without labels, a held-out split.

`JUDGE` stands for a model at a URL; a test puts one of its own there.
"""

import asyncio
import sqlite3
from typing import Any

from pydantic import BaseModel

from lowmem_grpo import agents as art
from lowmem_grpo.agents.rewards import ruler_score_group

JUDGE: Any = "openai/gpt-4o-mini"
MAILS = [("Ann", "Lunch", "Lunch is at 12 in the garden."), ("Bob", "Rent", "The rent is 700."),
         ("Cat", "Train", "My train comes at 9.")]


class Policy(BaseModel):
    max_turns: int = 2


class Scenario(BaseModel):
    question: str
    answer: str


SCENARIOS = [Scenario(question="When is lunch?", answer="12"), Scenario(question="How much is the rent?", answer="700"),
             Scenario(question="When does the train come?", answer="9")]


def inbox() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.execute("create virtual table mail using fts5(sender, subject, body)")
    database.executemany("insert into mail values (?, ?, ?)", MAILS)
    return database


def search(database: sqlite3.Connection, words: str) -> str:
    asked = " OR ".join(f'"{word}"' for word in words.split() if word.isalnum()) or '"nothing"'
    found = database.execute("select sender, subject, body from mail where mail match ? limit 2", [asked]).fetchall()
    return "\n".join(" | ".join(row) for row in found) or "no mail found"


@art.limit_concurrency(4)
async def rollout(model: art.TrainableModel[Policy], scenario: Scenario) -> art.Trajectory:
    assert model.config is not None
    database = inbox()
    trajectory = art.Trajectory(
        messages_and_choices=[
            {"role": "system", "content": "You search mail. Say words to search for, then the answer."},
            {"role": "user", "content": scenario.question},
        ], reward=0, metadata={"question": scenario.question},
    )
    for _ in range(model.config.max_turns):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=12, temperature=1,
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        said = completion.choices[0].message.content or ""
        trajectory.messages_and_choices.append({"role": "user", "content": search(database, said)})
    trajectory.metrics["correct"] = scenario.answer in said
    trajectory.reward = float(scenario.answer in said)
    return trajectory


async def main() -> None:
    async with art.LocalBackend() as backend:
        model = art.TrainableModel(name="mail-001", project="mail", base_model="tiny-games", config=Policy())
        await model.register(backend)
        state = model.read_state() or {"seen": 0}
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, scenario) for _ in range(4)) for scenario in SCENARIOS[:2]),
            after_each=lambda group: ruler_score_group(group, JUDGE, swallow_exceptions=True), max_exceptions=0.5,
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-4))
        model.merge_state({"seen": state["seen"] + len(groups)})
        held_out = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(rollout(model, SCENARIOS[2]) for _ in range(2))], pbar_desc="val")
        await model.log(held_out)
        await model.delete_checkpoints()


if __name__ == "__main__":
    asyncio.run(main())
