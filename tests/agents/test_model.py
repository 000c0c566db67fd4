"""Models as an ART program uses them: registering, asking, training, logging, and what it keeps for itself."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ValidationError
from served import ScriptedBackend
from tables import every_row

from lowmem_grpo import agents as art
from lowmem_grpo.agents.rewards import ruler_score_group


class Policy(BaseModel):
    max_turns: int = 3


def model_of(**fields: Any) -> art.TrainableModel[Any]:
    return art.TrainableModel(name="agent", project="mail", base_model="tiny", **fields)


def judging(prompt: str) -> str:
    """Says yes, and as a judge scores two answers."""
    if "careful judge" not in prompt:
        return "Yes."
    return json.dumps({"scores": [{"id": 1, "reason": "so", "score": 0.25}, {"id": 2, "reason": "so", "score": 1}]})


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ScriptedBackend]:
    made = ScriptedBackend(tmp_path, judging)
    yield made
    made.worker.close()


@pytest.fixture
def model(backend: ScriptedBackend) -> art.TrainableModel[Any]:
    made = model_of(config=Policy())
    asyncio.run(made.register(backend))
    return made


async def rollout(model: Any, question: str) -> art.Trajectory:
    messages: list[Any] = [{"role": "user", "content": question}]
    reply = await model.openai_client().chat.completions.create(model=model.get_inference_name(), messages=messages)
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=float(len(question)))


def test_rollouts_that_say_the_same_keep_apart(model: art.TrainableModel[Any], backend: ScriptedBackend) -> None:
    async def two_turns() -> art.Trajectory:
        trajectory = await rollout(model, "Hi")
        trajectory.messages_and_choices.append({"role": "user", "content": "Sure?"})
        reply = await model.openai_client().chat.completions.create(model="agent", messages=trajectory.messages())
        trajectory.messages_and_choices.append(reply.choices[0])
        return trajectory

    async def main() -> list[art.Trajectory]:
        return await art.gather_trajectories(two_turns() for _ in range(8))

    for one in asyncio.run(main()):
        first, second = one.messages_and_choices[1], one.messages_and_choices[3]
        assert backend.chat.parent(second.turn) == first.turn  # type: ignore[union-attr]
        assert backend.chat.turn(second.turn).text == one.messages()[3]["content"] == "Yes."  # type: ignore[union-attr]


def test_training_passes_groups_and_options_on(model: art.TrainableModel[Any], backend: ScriptedBackend) -> None:
    group = art.TrajectoryGroup([art.Trajectory(reward=1)])
    asyncio.run(model.train([group], config="config", _config={"epsilon": 0.1}, loss_type="grpo"))
    asyncio.run(model.train(trajectory_groups=group.trajectories, verbose=True))
    assert backend.trained[0] == ([group], {"config": "config", "epsilon": 0.1, "loss_type": "grpo"})
    assert [len(one) for one in backend.trained[1][0]] == [1] and asyncio.run(model.get_step()) == 2
    for wrong in ([None], "abc", 3):
        with pytest.raises(TypeError, match="list of groups or of trajectories is needed"):
            asyncio.run(model.train(wrong))  # type: ignore[arg-type]


def test_logging_takes_groups_trajectories_or_numbers(model: art.TrainableModel[Any], backend: ScriptedBackend) -> None:
    asyncio.run(model.log([art.Trajectory(reward=1), ValueError("x")], split="versus-base"))
    asyncio.run(model.log(metrics={"loss": 0.5}, step=7))
    ((groups, split, *_), (none, _, metrics, step)) = backend.logged
    assert split == "versus-base" and len(groups[0]) == len(groups[0].exceptions) == 1
    assert (none, metrics, step) == ([], {"loss": 0.5}, 7)
    asyncio.run(model.delete_checkpoints("val/won"))
    assert backend.logged[-1] == "val/won"


def test_an_address_serves_other_clients_and_litellm(model: art.TrainableModel[Any]) -> None:
    async def ask() -> str:
        params = model.litellm_completion_params()
        assert params["model"] == "hosted_vllm/agent" and model.serve().base_url == params["base_url"]
        async with AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key) as client:
            reply = await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "Hi"}])
        return str(reply.choices[0].message.content)

    for _ in range(2):  # as a cell that is run again
        with model.serve():
            assert asyncio.run(ask()) == "Yes."


def test_a_model_that_is_registered_again_after_its_run_was_closed_answers_as_before(
    model: art.TrainableModel[Any], backend: ScriptedBackend, tmp_path: Path
) -> None:
    async def answers() -> list[Any]:
        other = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key, max_retries=0)
        async with other:
            return [(await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "Hi"}])
                     ).choices[0].message.content for client in (model.openai_client(), other)]

    assert asyncio.run(answers()) == ["Yes.", "Yes."]
    model.serve().close()
    backend.worker.close()
    again = ScriptedBackend(tmp_path)
    asyncio.run(model.register(again))
    assert asyncio.run(answers()) == ["Yes.", "Yes."]
    model.serve().close()
    again.worker.close()


def test_the_address_is_opened_where_it_is_read_and_before_register_the_error_says_what_to_do(
    model: art.TrainableModel[Any]
) -> None:
    unknown = model_of(_internal_config={"init_args": {"max_seq_length": 64}})
    assert unknown._internal_config == {"init_args": {"max_seq_length": 64}}
    unknown._internal_config = art.dev.InternalModelConfig(peft_args={"r": 8})
    assert unknown.model_copy(deep=True)._internal_config == {"peft_args": {"r": 8}}
    assert "inference_base_url=None" in repr(unknown) and unknown.model_dump()["inference_api_key"] is None
    for name in ("inference_base_url", "inference_api_key"):
        with pytest.raises(ValueError, match=r"has no backend yet: call `await model.register\(backend\)` first"):
            getattr(unknown, name)
    opened = model.inference_base_url
    with model.serve() as endpoint:
        assert (opened, model.inference_api_key) == (endpoint.base_url, endpoint.api_key)


def test_the_base_model_judges_a_group_between_the_turns_of_others(
    model: art.TrainableModel[Any], backend: ScriptedBackend
) -> None:
    async def main(judge: Any) -> Any:
        groups = [art.TrajectoryGroup(rollout(model, question) for question in pair) for pair in ("ab", "cd")]
        return await art.gather_trajectory_groups(groups, after_each=lambda group: ruler_score_group(group, judge))

    judge = model.judge()
    for _ in range(2):
        groups = asyncio.run(main(judge))
        assert [[one.reward for one in group] for group in groups] == [[0.25, 1], [0.25, 1]]
    assert set(backend.adapters) == {None}, "the adapter was off for it"
    assert judge.meter.calls == 2, "the second time from the cache"


def test_a_program_keeps_its_state_in_the_folder_of_its_run(model: art.TrainableModel[Any], tmp_path: Path) -> None:
    assert model.read_state() is None
    model.overwrite_state({"offset": 1, "seen": {"a": 1}})
    assert model.merge_state({"seen": {"b": 2}}) == {"offset": 1, "seen": {"a": 1, "b": 2}} == model.read_state()
    with pytest.raises(TypeError):
        model.overwrite_state({"bad": object()})
    assert model.read_state() is not None, "what cannot be written destroys nothing"
    for wrong in ([["offset", 1]], None):
        for write in (model.overwrite_state, model.merge_state):
            with pytest.raises(TypeError, match="a state is a dict such as"):
                write(wrong)  # type: ignore[arg-type]
    for damaged in ("{", '[["offset", 1]]', "5", "null"):
        (tmp_path / "mail" / "agent" / "program_state.json").write_text(damaged)
        with pytest.raises(ValueError, match="is no JSON object"):
            model.read_state()


@every_row(("call", "words"), [
    (lambda model: model.openai_client(), r"await model\.register"), (lambda model: model.serve(), "no backend yet"),
    (lambda model: asyncio.run(model.train([])), "no backend yet"),
    (lambda model: asyncio.run(model.register(None)), "takes a backend, and got None"),
    (lambda model: model_of(report_metrics=["wandb"]), "report_metrics"),
    (lambda model: model_of(base="x"), "base\n  Extra inputs"),
])
def test_what_cannot_be_done_yet_is_said_with_what_to_do(call: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError, ValidationError), match=words):
        call(model_of())


def test_a_prompted_model_is_reached_by_the_client_of_openai() -> None:
    prompted = art.Model(name="gpt", project="mail", inference_model_name="gpt-4o-mini", inference_api_key="key",
                         inference_base_url="http://127.0.0.1:1/v1", config=Policy(max_turns=2))
    client = prompted.openai_client()
    assert isinstance(client, AsyncOpenAI) and str(client.base_url) == "http://127.0.0.1:1/v1/"
    assert prompted.get_inference_name() == "gpt-4o-mini" and asyncio.run(prompted.get_step()) == 0
    assert prompted.config is not None and prompted.config.max_turns == 2 and not prompted.trainable
    with pytest.raises(ValueError, match="no inference_api_key"):
        art.Model(name="gpt", project="mail", inference_base_url="http://127.0.0.1:1/v1").openai_client()
