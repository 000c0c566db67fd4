"""An agent in plain Python, in several processes: each plays its part, and the adapter is that of one process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_runs import agent, backend, play

from lowmem_grpo import agents as art
from lowmem_grpo.runs.records import read_lines
from tests.attacks.ranked_run import Ranked

TASKS, MEMBERS = 3, 4
ROUNDING = 1e-4  # of float32, through Adam, which makes much of the rounding of gradients that are nearly zero


async def games(model: Any, tasks: Any) -> list[art.TrajectoryGroup]:
    """A group of each task, one game after the other: how the engine batches them changes the last bits."""
    return [art.TrajectoryGroup([await play(model, task, member) for member in range(MEMBERS)]) for task in tasks]


def weights(trainer: Any, model: Any) -> dict[str, torch.Tensor]:
    trained = trainer.run(model).trainer.model
    return {name: p.detach().clone() for name, p in trained.named_parameters() if p.requires_grad}


async def learned(folder: Path, begun: list[Any]) -> dict[str, Any]:
    """Two steps, of which the second one has a single task; what was played, logged and kept."""
    model = agent()
    async with backend(folder) as trainer:
        await model.register(trainer)
        for step, tasks in enumerate((range(TASKS), range(1))):
            begun += (mine := model.share(tasks))
            played = await games(model, mine)
            result = await model.train(played, learning_rate=3e-3)
            await model.log(played, split="val", metrics={"level": step})
            model.merge_state({"step": result.step})
        await model.delete_checkpoints("val/level")
        return {"weights": weights(trainer, model), "metrics": result.metrics,
                "saved": sorted(trainer.run(model).saved), "state": model.read_state()}


def work(folder: Path, rank: int) -> Any:
    begun: list[Any] = []
    return asyncio.run(learned(folder, begun)) | {"tasks": begun}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    (found,) = Ranked(folder, 1, work).wait()
    return folder, found


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_what_several_ranks_played_trains_the_adapter_of_one_process(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], count: int
) -> None:
    folder, expected = one
    found = Ranked(tmp_path, count, work).wait()
    assert all(isinstance(each, dict) for each in found), found
    assert sorted(task for each in found for task in each["tasks"]) == sorted(expected["tasks"]), "each task once"
    for each in found:
        for name, held in expected["weights"].items():
            assert (each["weights"][name] - held).norm() <= ROUNDING * held.norm()
        assert (each["saved"], each["state"]) == ([2], {"step": 2})
        for name in ("reward", "trajectories/total", "trajectories/trained", "metrics/won", "num_tokens"):
            assert each["metrics"][name] == pytest.approx(expected["metrics"][name]), name
    told, lines = (read_lines(path / "games/agent/metrics.jsonl") for path in (tmp_path, folder))
    assert [line["step"] for line in told] == [line["step"] for line in lines] == [1, 1, 2, 2], "each line once"
    for line, other in zip(told, lines, strict=True):
        of_split = [name for name in other if name.startswith("val/")]
        assert {name: line.get(name) for name in of_split} == pytest.approx({name: other[name] for name in of_split})
    texts = [[(line["step"], line["completion"]) for line in read_lines(path / "games/agent/completions.jsonl")]
             for path in (tmp_path, folder)]
    assert texts[0] == texts[1], "the same games, in the same order"


def fails(folder: Path, rank: int, how: str) -> Any:
    async def all_of_it() -> Any:
        model = agent()
        async with backend(folder) as trainer:
            await model.register(trainer)
            if how == "nothing":
                return await model.train([])
            played = await games(model, [rank])
            await model.train(played, learning_rate=1e-3)
            if how == "an error" and rank == 1:
                raise ZeroDivisionError("in the program")
            await model.train(await games(model, [rank]), learning_rate=1e-3 * (1 + rank))

    return asyncio.run(all_of_it())


@pytest.mark.slow
def test_an_error_in_the_program_of_one_rank_is_told_by_all(tmp_path: Path) -> None:
    told = Ranked(tmp_path, 2, fails, how="an error").wait()
    assert told[0] == "RankError: rank 1 has failed: ZeroDivisionError: in the program"
    assert told[1] == "ZeroDivisionError: in the program"
    assert (tmp_path / "games/agent/checkpoint-1").is_dir()


@pytest.mark.slow
def test_other_settings_in_one_rank_are_refused_by_name_in_all(tmp_path: Path) -> None:
    told = Ranked(tmp_path, 2, fails, how="settings").wait()
    assert all("the ranks train a step with different settings" in each and "0.002" in each for each in told), told


@pytest.mark.slow
def test_where_no_rank_has_played_no_step_is_made(tmp_path: Path) -> None:
    told = Ranked(tmp_path, 2, fails, how="nothing").wait()
    assert [each.step for each in told] == [0, 0] and all(each.metrics["trajectories/total"] == 0 for each in told)


def says(folder: Path, rank: int) -> Any:
    """What is drawn of the same prompt by calls without a seed."""
    async def all_of_it() -> list[str]:
        model = agent()
        async with backend(folder) as trainer:
            await model.register(trainer)
            client = model.openai_client()
            ask = [{"role": "user", "content": "Guess a number from 1 to 32."}]
            replies = [await client.chat.completions.create(model="agent", messages=ask, max_tokens=4)
                       for _ in range(8)]
            await model.log([], metrics={"said": 1})
            return [reply.choices[0].message.content or "" for reply in replies]

    return asyncio.run(all_of_it())


@pytest.mark.slow
def test_ranks_that_ask_the_same_are_answered_differently(tmp_path: Path) -> None:
    first, second = Ranked(tmp_path, 2, says).wait()
    assert len(first) == 8 and first != second
