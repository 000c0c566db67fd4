"""LocalBackend: an agent in plain Python is trained, stopped, resumed, logged and asked for; bad calls lose nothing."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import agent_runs
import numpy as np
import pytest
from agent_runs import agent, backend, groups
from tables import every_row

from lowmem_grpo import agents as art
from lowmem_grpo.agents.rewards import judge_of
from lowmem_grpo.runs.lock import RunInUseError
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.utils import UnsupportedError
from tests.attacks.small_run import differences


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from trained(loop, tmp_path_factory.mktemp("runs"))


def trained(loop: asyncio.AbstractEventLoop, folder: Path) -> Iterator[Any]:
    """Yield a model that is registered, and trained for a step."""
    made, trainer = agent(), backend(folder)
    loop.run_until_complete(made.register(trainer))
    loop.run_until_complete(made.train(played(made, loop)))
    yield made
    del PLAYED[id(made)]  # another model may come to lie there
    loop.run_until_complete(trainer.close())


@pytest.fixture
def own_model(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Iterator[Any]:
    """A model that no other test has trained."""
    yield from trained(loop, tmp_path)


PLAYED: dict[int, list[art.TrajectoryGroup]] = {}


def played(model: Any, loop: asyncio.AbstractEventLoop) -> list[art.TrajectoryGroup]:
    """Groups of a step, which can be trained on again."""
    if id(model) not in PLAYED:
        PLAYED[id(model)] = loop.run_until_complete(groups(model, 0))
    return deepcopy(PLAYED[id(model)])


def folder_of(model: Any) -> Path:
    return Path(model.backend().path) / "games" / "agent"


def program(folder: Path, steps: int, end: str) -> "subprocess.CompletedProcess[bytes]":
    """The program in a process of its own."""
    return subprocess.run(
        [sys.executable, agent_runs.__file__, str(folder), str(steps), end], timeout=600, capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(agent_runs.__file__).parent), *sys.path])},
    )


@pytest.mark.slow
def test_a_program_that_closes_nothing_and_fails_leaves_a_whole_run(tmp_path: Path) -> None:
    child = program(tmp_path, 1, "raise")
    assert child.returncode == 1 and b"ZeroDivisionError" in child.stderr
    folder = tmp_path / "games" / "agent"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1) and "in the program" in summary["error"]
    assert (folder / "report.html").is_file() and (folder / "checkpoint-1").is_dir()
    assert not (folder / ".owner.json").exists()


def test_a_model_that_is_only_asked_has_a_folder_and_a_log(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    async def all_of_it() -> None:
        asked = art.Model(name="gpt", project="games", inference_base_url="http://127.0.0.1:1/v1",
                          inference_api_key="none")
        await asked.register(backend(tmp_path))
        await asked.log([art.Trajectory(reward=0.5)], split="val", metrics={"cost": 1})
        assert await asked.get_step() == 0

    loop.run_until_complete(all_of_it())
    [line] = read_lines(tmp_path / "games" / "gpt" / "metrics.jsonl")
    assert (line["step"], line["val/reward"], line["val/cost"]) == (0, 0.5, 1.0)


@pytest.mark.slow
def test_a_program_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    child = program(tmp_path / "parts", 1, "kill")
    assert child.returncode == -signal.SIGKILL, child.stderr[-2000:]
    asyncio.run(agent_runs.train(tmp_path / "parts", 2))
    asyncio.run(agent_runs.train(tmp_path / "whole", 2))
    parts, whole = (tmp_path / name / "games" / "agent" for name in ("parts", "whole"))
    assert differences(parts, whole) == []
    assert json.loads((parts / "summary.json").read_text())["status"] == "finished"
    assert (parts / "report.html").is_file()
    lines = read_lines(parts / "completions.jsonl")
    assert len(lines) == 16 and all("1 to 32" in line["prompt"] for line in lines)
    for line in lines:
        assert [reply["role"] for turn in line["turns"] for reply in turn["replies"]] == ["user"] * line["num_turns"]
        assert line["sampled_tokens"] == sum(turn["tokens"] for turn in line["turns"])


def test_what_is_trained_is_what_was_sampled(model: Any, loop: asyncio.AbstractEventLoop) -> None:
    line = read_lines(folder_of(model) / "metrics.jsonl")[0]
    assert line["sampling/parity/later_turns"] < 1e-5
    assert line["trajectories/total"] == line["trajectories/trained"] == 8 and line["trajectories/unexplained"] == 0
    assert line["metrics/won"] == pytest.approx(line["reward"])


def test_names_of_checkpoints_answer_and_old_ones_are_deleted(own_model: Any, loop: asyncio.AbstractEventLoop) -> None:
    model = own_model

    async def ask(name: str) -> str:
        asked = [{"role": "user", "content": "Guess a number from 1 to 32."}]
        reply = await model.openai_client().chat.completions.create(model=name, messages=asked, max_tokens=4, seed=1)
        return str(reply.choices[0].message.content)

    async def all_of_it() -> None:
        assert await model.get_step() == 1 and model.get_inference_name(0) == "agent@0"
        run = model.backend().run(model)
        await model.register(model.backend())
        assert model.backend().run(model) is run, "the same model again changes nothing"
        live, first, base = [await ask(name) for name in ("agent", "agent@0", "tiny-games")]
        assert await ask("agent@1") == live and first == base, "LoRA starts at zero"
        await model.log(metrics={"reward": 0.25}, step=np.int64(0))
        result = await model.train(played_again, learning_rate=np.float32(1e-5))
        assert (result.step, Path(result.checkpoint_path).name) == (2, "checkpoint-2")
        await model.delete_checkpoints()
        assert sorted(path.name for path in folder_of(model).glob("checkpoint-*")) == ["checkpoint-0", "checkpoint-2"]
        assert sorted(model.backend().run(model).names()) == ["agent", "agent@0", "agent@2", "tiny-games"]

    played_again = played(model, loop)
    loop.run_until_complete(all_of_it())


def test_what_train_wrote_is_not_written_again(model: Any, loop: asyncio.AbstractEventLoop) -> None:
    async def all_of_it() -> list[dict[str, Any]]:
        result = await model.train(given)
        before = len(read_lines(folder_of(model) / "metrics.jsonl"))
        await model.log(given, split="train", metrics=result.metrics, step=result.step)
        await model.log(given, split="train", metrics={"cost": 2.0, "reward": 1.0}, step=result.step)
        given[0].exceptions.append(art.FailedRollout(type="E", message="", traceback=""))
        await model.log(given, split="val", metrics={"best_so_far": 3})
        return read_lines(folder_of(model) / "metrics.jsonl")[before:]

    given = played(model, loop)
    own, val = loop.run_until_complete(all_of_it())
    assert {name: value for name, value in own.items() if name != "step"} == {"train/cost": 2.0}
    assert val["val/exception_rate"] == pytest.approx(1 / 9) and val["val/best_so_far"] == 3
    assert {"val/reward", "val/reward_std_dev", "val/won"} <= val.keys() and val["step"] == own["step"]


def test_what_cannot_be_trained_is_said_and_the_run_goes_on(
    model: Any, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    given, step = played(model, loop), loop.run_until_complete(model.get_step())
    first = given[0].trajectories
    first[0].messages_and_choices[1].turn = "turn-gone-7"
    first[1].messages_and_choices = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "never said"}]
    given[1].trajectories = given[1].trajectories[:1]
    with caplog.at_level(logging.WARNING):
        result = loop.run_until_complete(model.train(given))
        assert (result.step, result.metrics["trajectories/trained"]) == (step + 1, 2)
        assert (result.metrics["trajectories/unexplained"], result.metrics["groups/left_out"]) == (2, 1)
        said = " ".join(caplog.messages)
        assert "messages_and_choices[1]" in said and "turn-gone-7, which is not held" in said
        assert "trajectory 1 of group 0: the policy is not known to have said anything" in said
        caplog.clear()
        for nothing in ([], given[1:], [art.TrajectoryGroup([])]):
            result = loop.run_until_complete(model.train(nothing))
            assert result.step == step + 1 and "no step was made" in caplog.text


@every_row(("call", "error", "match"), [
    (lambda model, given: model.train(given, learning_rat=1), TypeError, "did you mean learning_rate"),
    (lambda model, given: model.train(given, config={"rate": 1}), ValueError, "rate"),
    (lambda model, given: model.train(given, kimi_k2_tau=0.5), ValueError, "kl_penalty_coef"),
    (lambda model, given: model.log(given, step="3"), ValueError, "step is '3'; it must be a whole number, at least 0"),
    (lambda model, given: model.log(given, split=""), ValueError, "split is ''; it must be a text that is not empty"),
    (lambda model, given: model.train(given, loss_fn="sft"), ValueError, "allowed are cispo, ppo"),
    (lambda model, given: model.backend().train(model, given[0].trajectories), TypeError, "takes groups"),
    (lambda model, given: model.backend().train(agent(name="other"), given), ValueError, "register"),
    (lambda model, given: backend(model.backend().path).register(agent()), RunInUseError, "belongs to a run"),
    (lambda model, given: model.backend().register(agent(base_model="tiny")), ValueError, "another name"),
])
def test_wrong_calls_are_refused_before_anything_is_done(
    call: Callable[..., Any], error: type[Exception], match: str, model: Any, loop: asyncio.AbstractEventLoop
) -> None:
    async def awaited() -> None:
        await call(model, given)

    given = played(model, loop)
    before = loop.run_until_complete(model.get_step())
    with pytest.raises(error, match=match):
        loop.run_until_complete(awaited())
    assert loop.run_until_complete(model.get_step()) == before


def test_the_judge_self_is_the_base_model_of_the_run_that_is_open_and_of_no_other(
    model: Any, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    assert judge_of("self", None) is model.judge() and model.judge() is not model.judge(max_tokens=64)
    other, trainer = agent(), backend(tmp_path)
    loop.run_until_complete(other.register(trainer))
    with pytest.raises(ValueError, match=r"there are 2 \(agent, agent\): give judge_model=model\.judge\(\)"):
        judge_of("self", None)
    loop.run_until_complete(trainer.close())
    assert judge_of("self", None) is model.judge(), "a run that is closed judges nothing"


def test_training_waits_for_calls_in_flight(model: Any, loop: asyncio.AbstractEventLoop) -> None:
    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(agent_runs.play(model, 50, 0), model.train(given))

    given = played(model, loop)
    trajectory, result = loop.run_until_complete(both())
    versions = [model.backend().run(model).chat.turn(one.turn).policy_version
                for one in trajectory.messages_and_choices if not isinstance(one, dict)]
    assert set(versions) <= {result.step - 1, result.step} and versions == sorted(versions)


def test_options_nobody_knows_and_names_of_other_backends_are_refused(tmp_path: Path) -> None:
    for options, error, match in (
        ({"learning_rat": 1}, TypeError, "did you mean learning_rate"),
        ({"output_dir": "x"}, ValueError, "path/project"),
        ({"load_in_8bit": True}, ValueError, "load_in_4bit"), ({"gpu_cost_per_hour_usd": 3}, ValueError, "prices"),
        ({"learning_rate": -1}, ValueError, "learning_rate"),
    ):
        with pytest.raises(error, match=match):
            art.LocalBackend(path=tmp_path, **options)
    with pytest.raises(UnsupportedError):
        art.LocalBackend(path=tmp_path)._experimental_push_to_s3()
