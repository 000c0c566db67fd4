"""A model is served however it was loaded: in 4 bits, with its embedding on the host, both, or in FP8. What waits for
it has the name of its user, and no route works in the event loop."""

import asyncio
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import pytest
from scripted_chat import until
from served import MODEL, OTHER, serving, tinker_client
from tinker_server import Server

from lowmem_grpo.server.tinker import calls
from lowmem_grpo.server.users import User

tinker: Any = pytest.importorskip("tinker", reason="the client `tinker` is not installed: pip install tinker==0.38.0")


@pytest.mark.parametrize("loading", [
    {"load_in_4bit": True}, {"offload_embedding": True}, {"load_in_4bit": True, "offload_embedding": True},
    {"load_in_4bit": None, "load_in_fp8": True}], ids=["4bit", "offload", "both", "fp8"])
@pytest.mark.every(2)
def test_it_trains_and_samples(tmp_path: Path, loading: dict[str, Any]) -> None:
    with serving(tmp_path, **loading) as served, tinker_client(served) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1, train_unembed=False).result()
        data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7, 8]), loss_fn_inputs={
            "target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})]
        losses = []
        for _ in range(3):
            losses.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            training.optim_step(tinker.AdamParams(learning_rate=0.003)).result()
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5
        sampler = training.save_weights_and_get_sampling_client().result()
        found = sampler.sample(prompt=tinker.ModelInput.from_ints([5]), num_samples=2,
                               sampling_params=tinker.SamplingParams(max_tokens=4, stop=[])).result()
        assert [len(one.tokens) for one in found.sequences] == [4, 4]


def test_what_waits_for_the_model_waits_in_the_line_of_its_user(server: Server) -> None:
    """Over each route: users have turns only by the names of their lines."""
    model, session = server.create(), server.post("create_session", {}, OTHER).json()["session_id"]
    sampler = server.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0,
                                                      "base_model": MODEL}, OTHER).json()["sampling_session_id"]
    waiting, chat = server.model.worker.waiting, server.model.completions.chats(User("ann"))
    sample = {"sampling_session_id": sampler, "seq_id": 1, "prompt": [5, 6], "sampling_params": {"max_tokens": 1},
              "prompt_logprobs": True}
    body = {"model": MODEL, "prompt": [5], "max_tokens": 1}
    asked = Thread(target=lambda: asyncio.run(chat.create(body, texts=True)))

    def users() -> list[str]:
        return sorted(user for user, _ in waiting.lines)

    with server.held_up():
        until(lambda: not waiting.lines)
        server.forward_backward(model, 1, 1)
        assert users() == ["owner"]
        assert server.post("asample", sample, OTHER).status_code == 200
        assert users() == ["other", "other", "owner"], "its sample, and the scoring of its prompt"
        asked.start()
        until(lambda: len(waiting.lines) > 3)
        assert users() == ["ann", "other", "other", "owner"]
    asked.join(60)


def test_large_bodies_and_the_work_of_routes_leave_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, read = list[str](), calls.read
    monkeypatch.setattr(calls, "read", lambda *given: (seen.append(current_thread().name), read(*given))[1])
    sampler = server.sampler()
    large = {"chunks": [{"tokens": [5]}, *[{"tokens": []}] * 6000]}
    assert server.sample(sampler, prompt=large).status_code == 200
    assert seen == ["AnyIO worker thread"] * 2  # create_sampling_session, asample
