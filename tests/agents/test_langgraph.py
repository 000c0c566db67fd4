"""An agent of LangGraph, which knows nothing of training, is trained on what it did at the endpoint."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.chat.chat_completion import Choice

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.agents.serve import AgentEndpoint, serve
from lowmem_grpo.agents.trajectories import Trajectory
from lowmem_grpo.recipes.games.calculator import Sum, calculate, sums
from lowmem_grpo.recipes.problems.arithmetic import last_integer
from lowmem_grpo.recipes.problems.splits import take
from lowmem_grpo.rollout.from_turns import group_of
from lowmem_grpo.train.trajectories import TrajectoryTrainer
from lowmem_grpo.types import RolloutGroup, Turn

WHY = "LangGraph is not installed: pip install langgraph langchain-openai"
graphs = pytest.importorskip("langgraph.graph", reason=WHY)
prebuilt = pytest.importorskip("langgraph.prebuilt", reason=WHY)
langchain_openai = pytest.importorskip("langchain_openai", reason=WHY)
MEMBERS = 6


def react(model: Any) -> Any:
    """The graph of an agent that calls tools until it answers."""
    graph = graphs.StateGraph(graphs.MessagesState)
    asked = model.bind_tools([calculate])
    graph.add_node("agent", lambda state: {"messages": [asked.invoke(state["messages"])]})
    graph.add_node("tools", prebuilt.ToolNode([calculate]))
    graph.add_edge(graphs.START, "agent")
    graph.add_conditional_edges("agent", prebuilt.tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


def rollout(endpoint: AgentEndpoint, problem: Sum, streaming: bool) -> Trajectory:
    """One run of the agent."""
    with endpoint.session() as session:
        model = langchain_openai.ChatOpenAI(
            model="policy", base_url=session.base_url, api_key=session.api_key, streaming=streaming,
            extra_body={"return_token_ids": True})
        said = react(model).invoke({"messages": [("user", problem.question)]}, {"recursion_limit": 8})["messages"]
    right = last_integer(said[-1].content) == problem.answer
    return session.trajectory(reward=float(right), metrics={"calls": sum(one.type == "tool" for one in said)})


def turns_of(endpoint: AgentEndpoint, trajectory: Trajectory) -> list[list[Turn]]:
    """What the engine drew in each conversation."""
    found = [[endpoint.chat.turn(one.turn) for one in history.messages_and_choices if isinstance(one, Choice)]  # type: ignore[attr-defined]
             for history in trajectory.histories]
    return [[turn for turn in turns if turn is not None] for turns in found]


def group(endpoint: AgentEndpoint, trajectories: list[Trajectory]) -> RolloutGroup:
    """The trajectories of one problem as they are trained on."""
    made = group_of([turns_of(endpoint, one) for one in trajectories])
    for one, trajectory in zip(made.rollouts, trajectories, strict=True):
        one.reward = trajectory.reward
    return made


@pytest.mark.slow
def test_a_langgraph_agent_is_trained_a_step_on_the_tokens_that_it_was_answered_with(tmp_path: Path) -> None:
    bare, tokenizer = FastLanguageModel.from_pretrained("tiny-games", max_seq_length=256, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    trainer = TrajectoryTrainer(model, GRPOConfig(
        output_dir=str(tmp_path), learning_rate=1e-3, lr_scheduler_type="constant", parity_steps=1,
        num_generations=MEMBERS, per_device_train_batch_size=MEMBERS, loss_type="dr_grpo", scale_rewards="none"))
    before = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
    with serve(model, tokenizer, max_turn_tokens=32) as endpoint, ThreadPoolExecutor(MEMBERS) as pool:
        played = [list(pool.map(lambda streaming, problem=problem: rollout(endpoint, problem, streaming),  # type: ignore[misc]
                                [True, False] * (MEMBERS // 2))) for problem in take(sums("train", 3), 2)]
        groups = [group(endpoint, one) for one in played]
        desk = endpoint.chat.desk
        with trainer.running():
            metrics = desk.run(lambda: trainer.step(groups)).result(120)
    everyone = [one for trajectories in played for one in trajectories]
    rollouts = [one for made in groups for one in made.rollouts]
    assert any(one.metrics["calls"] for one in everyone)
    for trajectory, one in zip(everyone, rollouts, strict=True):
        assert len(trajectory.histories) == 1 and trajectory.tools is not None and not one.splits
        told = [ids for choice in trajectory.messages_and_choices if isinstance(choice, Choice)
                for ids in choice.token_ids]  # type: ignore[attr-defined]
        assert [ids for ids, trained in zip(one.completion_ids, one.trained or [], strict=True) if trained] == told
    assert len({trajectory.reward for trajectory in everyone}) == 2 and metrics["step"] == 1
    after = dict(model.named_parameters())
    assert any(not torch.equal(after[name], one) for name, one in before.items())
