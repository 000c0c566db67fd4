"""A tool as an ART program offers it: a schema in OpenAI's form, calls in the reply, results as tool messages."""

import asyncio
import json
from typing import Any

from lowmem_grpo import agents as art

PRICES = {"tea": 2, "bread": 3}
TOOLS: art.Tools = [{
    "type": "function",
    "function": {
        "name": "price", "description": "The price of a thing",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
    },
}]


def price(arguments: str) -> str:
    try:
        return str(PRICES[json.loads(arguments)["thing"]])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"


async def rollout(model: art.TrainableModel[Any], thing: str) -> art.Trajectory:
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": f"What does {thing} cost?"}], tools=TOOLS,
        metrics={"calls": 0},
    )
    for _ in range(3):
        async with trajectory.track_duration("llm"):
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=trajectory.messages(), tools=TOOLS, max_tokens=40,
            )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        for call in choice.message.tool_calls or []:
            trajectory.metrics["calls"] += 1
            trajectory.messages_and_choices.append(
                {"role": "tool", "tool_call_id": call.id, "content": price(call.function.arguments)})
        if not choice.message.tool_calls:
            break
    said = str(trajectory.messages()[-1]["content"])
    trajectory.reward = float(str(PRICES[thing]) in said) + 0.01 * len(set(said))
    return trajectory


async def main() -> None:
    async with art.LocalBackend() as backend:
        model = art.TrainableModel(name="001", project="prices", base_model="tiny-games")
        model._internal_config = art.dev.InternalModelConfig(init_args=art.dev.InitArgs(max_seq_length=1024))
        await model.register(backend)
        trajectories = await art.gather_trajectories((rollout(model, "tea") for _ in range(6)), max_exceptions=6)
        result = await model.train([art.TrajectoryGroup(trajectories)], learning_rate=1e-4)
        await model.log(trajectories, split="val", metrics={"asked": 6}, step=result.step)


if __name__ == "__main__":
    asyncio.run(main())
