"""An agent of LangGraph, which knows nothing of training, is trained on what it did at the endpoint."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.chat.chat_completion import Choice

from lowmem_grpo import agents as art
from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.sampled import Sampled
from lowmem_grpo.recipes.calculator import calculate, make_dataset
from lowmem_grpo.recipes.tasks.arithmetic import last_integer
from lowmem_grpo.types import Rollout

WHY = "LangGraph is not installed: pip install langgraph langchain-openai"
graphs = pytest.importorskip("langgraph.graph", reason=WHY)
prebuilt = pytest.importorskip("langgraph.prebuilt", reason=WHY)
langchain_openai = pytest.importorskip("langchain_openai", reason=WHY)
MEMBERS = 6


def react(model: Any) -> Any:
    """The graph of an agent that calls tools until it answers."""
    graph = graphs.StateGraph(graphs.MessagesState)
    asked = model.bind_tools([calculate])

    async def agent(state: Any) -> Any:
        return {"messages": [await asked.ainvoke(state["messages"])]}

    graph.add_node("agent", agent)
    graph.add_node("tools", prebuilt.ToolNode([calculate]))
    graph.add_edge(graphs.START, "agent")
    graph.add_conditional_edges("agent", prebuilt.tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


async def rollout(name: str, endpoint: AgentEndpoint, problem: dict[str, Any], streaming: bool) -> art.Trajectory:
    """One run of the agent."""
    async with endpoint.session() as session:
        model = langchain_openai.ChatOpenAI(
            model=name, base_url=session.base_url, api_key=session.api_key, streaming=streaming, max_tokens=32,
            extra_body={"return_token_ids": True})
        end = await react(model).ainvoke({"messages": problem["prompt"]}, {"recursion_limit": 8})
    said = end["messages"]
    right = last_integer(said[-1].content) == int(problem["answer"])
    return session.trajectory(reward=float(right), metrics={"calls": sum(one.type == "tool" for one in said)})


def told(trajectory: art.Trajectory) -> list[int]:
    """The ids of all replies, as the endpoint told them to the client."""
    said = [one.token_ids for one in trajectory.messages_and_choices if isinstance(one, Choice)]  # type: ignore[attr-defined]
    return [token for ids in said for token in ids]


def own(rollout: Rollout) -> list[int]:
    """The ids that are trained."""
    return [token for token, trained in zip(rollout.completion_ids, rollout.trained or [], strict=True) if trained]


@pytest.mark.slow
def test_a_langgraph_agent_is_trained_a_step_on_the_tokens_that_it_was_answered_with(tmp_path: Path) -> None:
    async def main() -> None:
        async with art.LocalBackend(path=tmp_path, load_in_4bit=False, max_seq_length=256, r=8,
                                    use_gradient_checkpointing=False, parity_steps=1) as backend:
            model = art.TrainableModel(name="agent", project="sums", base_model="tiny-games")
            await model.register(backend)
            adapter = dict(backend.run(model).trainer.model.named_parameters())
            before = {name: one.detach().clone() for name, one in adapter.items() if one.requires_grad}
            with model.serve() as endpoint:
                groups = await art.gather_trajectory_groups(
                    art.TrajectoryGroup(rollout(model.name, endpoint, problem, bool(member % 2))
                                        for member in range(MEMBERS)) for problem in make_dataset("train", 2, 3))
                trained = Sampled(backend.run(model).chat.histories, [model.name]).groups(groups)
                done = await backend.train(model, groups, learning_rate=1e-3)
            everyone = [one for group in groups for one in group]
            assert len(everyone) == 2 * MEMBERS and len({one.reward for one in everyone}) == 2
            assert any(one.metrics["calls"] for one in everyone)
            assert all(len(one.histories) == 1 and one.tools is not None for one in everyone)
            assert done.step == 1 and done.metrics["trajectories/unexplained"] == 0
            drawn = [one for group in trained for one in group.rollouts]
            for trajectory, one in zip(everyone, drawn, strict=True):
                assert own(one) == told(trajectory) and not one.splits
            assert any(not torch.equal(adapter[name], one) for name, one in before.items())

    asyncio.run(main())
