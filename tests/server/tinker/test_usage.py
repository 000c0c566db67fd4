"""Limits of a key: what is above one is refused with its name, and costs nobody else anything."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from served import MODEL
from tinker_server import OTHER, Server, body

from lowmem_grpo.server.tinker.usage import GONE
from lowmem_grpo.server.users import Allowance
from lowmem_grpo.utils import MIB

SIZE = len(body("m" * 40, 1, 1))


@pytest.fixture
def served(start: Any) -> Any:
    """Starts a server with these limits of its owner."""
    return lambda **limits: start(allowances=defaultdict(Allowance, owner=Allowance(**limits)))


def kept(server: Server, owner: str = "owner") -> int:
    return server.model.training.store.open_of(owner)[1]


def forward(model: str, seq: int) -> bytes:
    """A forward pass: field 6 is `forward_only`."""
    return body(model, seq, seq) + bytes([6 << 3, 1])


def test_bodies_are_kept_for_as_long_as_gradients_are_made_of_them(server: Server) -> None:
    model = server.create()
    server.wait(server.post("forward_backward", forward(model, 1)).json())
    server.wait(server.forward_backward(model, 2, 1, loss="unknown"))
    assert kept(server) == 0, "neither a forward pass nor what failed is needed again"
    server.wait(server.forward_backward(model, 3, 1))
    assert kept(server) == len(body(model, 3, 1))
    server.wait(server.optim_step(model, 4))
    assert kept(server) == 0


def test_bodies_above_the_limit_fail_in_their_turn_and_a_step_makes_room(served: Any) -> None:
    server = served(bodies=2 * SIZE + 50)
    model = server.create()
    for seq in (1, 2):
        server.wait(server.forward_backward(model, seq, seq))
    refused = server.wait(server.forward_backward(model, 3, 3)).json()
    assert refused["category"] == "user" and refused["error"].startswith("bodies: ")
    assert "call optim_step" in refused["error"]
    assert server.wait(server.forward_backward(model, 3, 3)).json() == refused, "its promise is kept once"
    theirs = server.create(key=OTHER)
    for seq in range(1, 5):
        assert server.post("forward_backward", body(theirs, seq, seq), OTHER).status_code == 200
    assert server.wait(server.optim_step(model, 4)).json()["metrics"]["grad_norm"] > 0
    assert "error" not in server.wait(server.forward_backward(model, 5, 5)).text[:20]


def test_requests_above_the_limit_are_told_to_come_again_and_the_next_in_line_is_taken(served: Any) -> None:
    server = served(requests=3)
    model = server.create()
    with server.held_up():
        for seq in (1, 2, 3):
            server.forward_backward(model, seq, seq)
        told = server.post("forward_backward", body(model, 4, 4))
        assert told.status_code == 429 and told.headers["retry-after"] == "1"
        assert told.json()["error"]["message"].startswith(
            "requests: 3 of this key are not answered, and at most 3 may be")
        assert server.post("optim_step", {"model_id": model, "seq_id": 5}).status_code == 429
    for seq in (1, 2, 3):
        server.wait({"request_id": f"{model}:{seq}"})
    assert server.post("forward_backward", body(model, 4, 4)).status_code == 200


def test_requests_that_wait_for_an_earlier_one_do_not_keep_it_out(served: Any) -> None:
    """A client sends the first part of a batch last."""
    server = served(requests=2)
    model = server.create()
    assert [server.post("forward_backward", body(model, seq, seq)).status_code for seq in (3, 2)] == [200, 200]
    assert server.wait(server.post("forward_backward", body(model, 1, 1)).json()).status_code == 200
    assert "error" not in server.wait({"request_id": f"{model}:3"}).text[:20]


def test_samples_count_until_they_are_answered(served: Any) -> None:
    server = served(requests=1)
    with server.held_up():
        first = server.sample(server.sampler(), num_samples=2).json()
        assert server.sample(server.sampler()).status_code == 429
    assert server.wait(first).status_code == 200
    assert server.sample(server.sampler()).status_code == 200
    server.close()
    assert server.model.training.usage.sampling_requests["owner"] == 0, "what was broken off does not count either"


def test_what_is_written_is_bounded_and_told_before_it_is_written(served: Any, tmp_path: Path) -> None:
    server = served(storage=1)
    model = server.create()
    server.wait(server.forward_backward(model, 1, 1))
    for kind, more in (("optim_step", {"adam_params": {}}), ("save_weights", {"path": "a"}),
                       ("save_weights_for_sampler", {"path": "a"}),
                       ("save_weights_for_sampler", {"sampling_session_seq_id": 1})):
        seq = server.model.training.store.model(model).done + 1
        told = server.asked(kind, model_id=model, seq_id=seq, **more)
        assert told["error"].startswith("storage: this key has 0.0 MiB on the disk"), kind
    assert server.model.training.usage.stored("owner") == 0
    theirs = server.create(key=OTHER)
    server.post("forward_backward", body(theirs, 1, 1), OTHER)
    assert "metrics" in server.asked("optim_step", OTHER, model_id=theirs, seq_id=2, adam_params={})
    found = server.model.training.usage.stored("other")
    assert 0 < found == sum(path.stat().st_size for path in (tmp_path / "models").glob("*.safetensors")) < MIB


@pytest.mark.slow
def test_models_that_were_not_asked_for_leave_the_card_and_come_back_as_they_were(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (16, 1):
        monkeypatch.setattr("lowmem_grpo.server.tinker.training.HELD", most)
        server = start(str(most))
        models = [server.create() for _ in range(3)]
        for seq in range(1, 6):
            for number, model in enumerate(models):
                server.wait(server.optim_step(model, seq) if seq == 3
                            else server.forward_backward(model, seq, 9 * number + seq))
        assert len(server.model.training.adapters.held) == min(most, 3)
        found.append([server.wait(server.optim_step(model, 6)).json() for model in models])
    assert found[0] == found[1]


def test_a_clients_notes_are_storage_too(served: Any) -> None:
    """Notes of 60,000 letters in JSON: {"note": "xxx..."} has 12 bytes more."""
    server, notes = served(storage=100_000), {"note": "x" * 60_000}
    session = server.post("create_session", {}).json()["session_id"]
    asked = {"session_id": session, "base_model": MODEL, "lora_config": {"rank": 1}}
    made = server.post("create_model", asked | {"model_seq_id": 0, "user_metadata": notes}).json()
    assert server.wait(made).json()["type"] == "create_model"
    assert server.model.training.usage.stored("owner") == 60_012
    again = asked | {"model_seq_id": 1, "user_metadata": notes}
    told = server.post("create_model", again)
    assert told.status_code == 422 and told.json()["error"]["message"].startswith("storage: this key has 0.1 MiB")
    assert server.post("create_model", asked | {"model_seq_id": 0, "user_metadata": notes}).json() == made
    long = server.post("create_model", asked | {"model_seq_id": 2, "user_metadata": {"note": "x" * 70_000}})
    assert long.status_code == 422 and "user_metadata has 70,012 bytes; at most 65,536" in long.text
    refused = server.asked("save_weights", model_id=made["model_id"], seq_id=1, path="a", user_metadata=notes)
    assert refused["error"].startswith("storage: ")


def test_notes_on_saved_weights_are_storage_too(served: Any) -> None:
    server, notes = served(), {"note": "x" * 60_000}
    model = server.create()
    usage, size = server.model.training.usage, server.model.training.adapters.size(model, moments=True)
    usage.allowances["owner"] = Allowance(storage=size + 30_000)
    refused = server.asked("save_weights", model_id=model, seq_id=1, path="a", user_metadata=notes)
    assert refused["error"].startswith("storage: ")
    usage.allowances["owner"] = Allowance()
    path = server.asked("save_weights", model_id=model, seq_id=2, path="a", user_metadata=notes)["path"]
    assert usage.stored("owner") == server.model.training.checkpoints.find(path, "owner").size + 60_012


def test_answers_are_bounded_too(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.server.tinker.usage.ANSWERS", 200)
    server = served(storage=200)
    model = server.create()
    told = [server.wait(server.forward_backward(model, seq, seq)).text for seq in range(1, 8)]
    assert "error" not in told[0] and told[-1].startswith('{"error": "storage: 0.0 MiB of answers are kept')


def test_why_a_request_failed_does_not_store_what_was_sent(served: Any) -> None:
    server = served()
    model = server.create()
    told = server.asked("save_weights", model_id=model, seq_id=1, path="x" * 10**6)
    assert told["error"].startswith("path is 'xxx") and server.model.training.store.answers_of("owner") < 5000


def test_old_answers_go_also_where_no_step_is_made(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.server.tinker.request_store.KEPT", 2)
    server = served()
    model = server.create()
    server.wait(server.forward_backward(model, 1, 1))
    for seq in range(2, 7):
        assert "path is" in server.asked("save_weights", model_id=model, seq_id=seq, path="/")["error"]
    kept = [row["seq"] for row in server.database.rows("SELECT seq FROM tinker_promises ORDER BY seq")]
    assert kept == [1, 5, 6], "the pass is needed until the next step"
    assert server.wait(server.optim_step(model, 7)).json()["metrics"]


def test_sessions_are_bounded_and_those_that_ended_make_room(served: Any) -> None:
    server = served(sessions=3)
    sessions = [server.post("create_session", {}).json()["session_id"] for _ in range(3)]
    told = server.post("create_session", {})
    assert told.status_code == 422 and told.json()["error"]["message"].startswith(
        "sessions: this key has 3, and may have 3: close ServiceClients that are done")
    assert server.post("create_session", {}, OTHER).status_code == 200
    server.post(f"sessions/{sessions[0]}/finish", {"reason": "success"})
    assert server.post("create_session", {}).status_code == 200
    assert server.post("session_heartbeat", {"session_id": sessions[0]}).status_code == 404
    server.model.training.runs.beats[sessions[1]] -= GONE + 1  # silent for more than an hour
    assert server.post("create_session", {}).status_code == 200
    assert [server.post("session_heartbeat", {"session_id": each}).status_code for each in sessions] == [404, 404, 200]


def test_a_session_with_a_model_does_not_expire(served: Any) -> None:
    server = served(sessions=1)
    model = server.create()
    server.model.training.runs.beats.clear()
    server.model.training.runs.began -= GONE + 1
    assert server.post("create_session", {}).status_code == 422
    server.post("unload_model", {"model_id": model})
    assert server.post("create_session", {}).status_code == 200


def test_samplers_are_bounded_and_go_with_their_session(served: Any) -> None:
    server = served(samplers=2)
    session = server.post("create_session", {}).json()["session_id"]

    def sampler(number: int) -> Any:
        return server.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": number,
                                                       "base_model": MODEL})

    assert [sampler(number).status_code for number in range(3)] == [200, 200, 422]
    assert "samplers: this key has 2, and may have 2" in sampler(2).text
    server.post(f"sessions/{session}/finish", {"reason": "success"})
    session = server.post("create_session", {}).json()["session_id"]
    assert sampler(0).status_code == 200
