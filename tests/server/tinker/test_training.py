"""The queue of a model's requests over HTTP: order, promises, other users, and what a killed server leaves."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tables import every_row
from tinker_server import MODEL, OTHER, Server, body, same

from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.request_store import RequestStore


def test_requests_are_done_in_the_order_of_their_numbers_not_of_their_arrival(server: Server) -> None:
    orders, states = ([1, 2, 3, 4], [4, 2, 3, 1]), []
    for order in orders:
        model, told = server.create(), {}
        for seq in order:
            told[seq] = (server.optim_step(model, seq) if seq in (2, 4)
                         else server.forward_backward(model, seq, seed=seq))
        answers = [server.wait(told[seq]) for seq in (1, 2, 3, 4)]
        assert answers[0].headers["content-type"] == wire.PROTOBUF
        assert answers[3].json()["metrics"]["grad_norm"] > 0
        states.append(server.state(model))
    assert same(*states)
    assert any("/exp_avg" in name for name in states[0])


def test_a_session_that_its_client_ended_takes_no_more_models_and_says_so(server: Server) -> None:
    session = server.post("create_session", {"tags": []}).json()["session_id"]
    ended = {"reason": {"type": "success"}, "detail": None}
    assert server.post(f"sessions/{session}/finish", ended, OTHER).status_code == 404
    assert server.post(f"sessions/{session}/finish", {"reason": {"type": "bored"}}).status_code == 422
    assert server.post("session_heartbeat", {"session_id": session}).status_code == 200
    for reason in ("success", "errored"):  # the first one stays
        assert server.post(f"sessions/{session}/finish", {"reason": {"type": reason}}).status_code == 200
    told = server.post("session_heartbeat", {"session_id": session})
    assert told.status_code == 410 and "its client ended it (success)" in told.text
    made = server.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL,
                                        "lora_config": {"rank": 4}})
    assert made.status_code == 410


def test_a_repeated_request_has_the_same_promise_and_is_done_once_and_another_of_its_number_is_refused(
    server: Server
) -> None:
    model = server.create()
    first, before = server.forward_backward(model, 1, seed=1), b""
    for _ in range(2):
        assert server.forward_backward(model, 1, seed=1) == first
        before = before or server.wait(first).content
        assert server.wait(first).content == before
    for reply in (server.forward_backward(model, 1, 2), server.optim_step(model, 1)):
        assert "seq_id is 1, which" in reply["error"]["message"] and "two programs" in reply["error"]["message"]
    server.wait(server.optim_step(model, 2))
    state = server.state(model)
    server.wait(server.optim_step(model, 2))
    assert same(server.state(model), state)


def test_a_wrong_datum_fails_its_own_promise_and_the_next_request_is_done(server: Server) -> None:
    model = server.create()
    failed = server.wait(server.forward_backward(model, 1, seed=1, targets=5)).json()
    assert failed["category"] == "user" and "data[0].loss_fn_inputs['target_tokens']" in failed["error"]
    refused = server.wait(server.forward_backward(model, 2, seed=1, loss="stable_reinforce")).json()
    assert "importance_sampling" in refused["error"]
    none = server.wait(server.optim_step(model, 3)).json()
    assert "call forward_backward before" in none["error"]
    assert server.wait(server.forward_backward(model, 4, seed=1)).headers["content-type"] == wire.PROTOBUF


def test_another_users_sessions_models_and_promises_are_unknown(server: Server) -> None:
    model = server.create()
    server.wait(server.forward_backward(model, 1, seed=1))
    for path, asked in (("get_info", {"model_id": model}), ("retrieve_future", {"request_id": f"{model}:1"}),
                        ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
                        ("forward_backward", body(model, 2, 1)),
                        ("session_heartbeat", {"session_id": model.partition(":")[0]}),
                        ("create_model", {"session_id": model.partition(":")[0], "model_seq_id": 0})):
        answer = server.post(path, asked, OTHER)
        assert answer.status_code == 404 and "of yours" in answer.json()["error"]["message"], path
    assert server.post("get_info", {"model_id": model}, "tml-" + "x" * 32).status_code == 401


BAD: list[tuple[str, Any, str]] = [
    ("forward_backward", b"\xff" * 9, "no ForwardBackwardRequest"), ("optim_step", b"[1", "no JSON"),
    ("optim_step", b"[" * 100_000, "nested"), ("optim_step", b"[]", "it must be an object"),
    ("create_model", {"session_id": "S", "model_seq_id": 0, "base_model": "big"}, f"this server has {MODEL!r}"),
    ("create_model", {"session_id": "S", "model_seq_id": "../x", "base_model": MODEL}, "model_seq_id is '../x'"),
    ("create_model", {"session_id": "S", "model_seq_id": 0, "base_model": MODEL}, "lora_config is missing"),
    ("create_model", {"session_id": "S", "model_seq_id": 0, "base_model": MODEL,
                      "lora_config": {"rank": 0}}, "rank is 0"),
    ("create_model", {"session_id": "S", "model_seq_id": 0, "base_model": MODEL,
                      "optimizer_config": {"type": "muon"}}, "only Adam"),
    ("optim_step", {"model_id": "M", "seq_id": 0}, "seq_id is 0"),
    ("optim_step", {"model_id": "M", "seq_id": 10**6}, "at most 4096"),
]


def test_bad_bodies_and_routes_are_refused_at_once_by_name(server: Server) -> None:
    model = server.create()
    ids = {"S": model.partition(":")[0], "M": model}
    for path, given, told in BAD:
        if isinstance(given, dict):
            given = {name: ids.get(str(value), value) for name, value in given.items()}
        answer = server.post(path, given)
        assert answer.status_code == 422 and told in answer.json()["error"]["message"], (path, given, answer.text)
    answer = server.post("copy_weights", {})
    assert answer.status_code == 404 and "/api/v1/copy_weights" in answer.json()["error"]["message"]


def test_a_server_that_starts_again_goes_on_with_steps_gradients_and_requests(start: Any) -> None:
    first, second = start("one"), start("two")
    models = [server.create() for server in (first, second)]
    for server, model in zip((first, second), models, strict=True):
        server.train(model, 1)
        server.wait(server.forward_backward(model, 3, seed=3))
    second.forward_backward(models[1], 5, seed=5)  # waits for 4, and for the next server
    second.close()
    second = start("two")
    first.forward_backward(models[0], 5, seed=5)
    for server, model in zip((first, second), models, strict=True):
        server.wait(server.forward_backward(model, 4, seed=4))
        server.wait(server.optim_step(model, 6))
    assert same(first.state(models[0]), second.state(models[1]))


@pytest.mark.parametrize("broken", ["write_state", "keep"])
def test_a_step_whose_answer_was_not_written_is_made_once_by_the_next_server(
    start: Any, tmp_path: Path, broken: str
) -> None:
    """The disk fails before or after the state is written; then the server is started anew."""
    clean, server = start("clean"), start("broken")
    models = [one.create() for one in (clean, server)]
    for one, model in zip((clean, server), models, strict=True):
        one.wait(one.forward_backward(model, 1, seed=1))
    failing = server.model.training if broken == "write_state" else server.model.training.store

    def fails(*given: Any) -> Any:
        raise OSError("no space left")

    setattr(failing, broken, fails)
    server.optim_step(models[1], 2)
    server.model.worker.run(lambda: None).result()
    assert not any("/exp_avg" in name for name in server.state(models[1]))  # as the disk has it
    server.close()
    server = start("broken")
    clean.wait(clean.optim_step(models[0], 2))
    assert server.wait({"request_id": f"{models[1]}:2"}).json()["metrics"]["grad_norm"] > 0
    assert same(clean.state(models[0]), server.state(models[1]))
    assert len(list((tmp_path / "broken" / "models").glob("*.safetensors"))) == 1


def test_a_pass_that_failed_adds_nothing_after_a_restart(
    start: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = server.create()
    server.wait(server.forward_backward(model, 1, 1))
    adapters = server.model.training.adapters
    plain = adapters.run
    monkeypatch.setattr(adapters, "run", lambda *given: (_ for _ in ()).throw(ValueError("no room")))
    assert server.wait(server.forward_backward(model, 2, 2)).json()["error"] == "no room"
    monkeypatch.setattr(adapters, "run", plain)
    server.close()
    following = start()
    found = following.wait(following.optim_step(model, 3)).json()["metrics"]["grad_norm"]
    other = following.create(number=5)
    assert following.train(other, 1)["metrics"]["grad_norm"] == found


def test_a_promise_of_no_plain_number_is_unknown(server: Server) -> None:
    model = server.create()
    for number in ("9" * 30, "007", "-1", "1.0", "", "\u0661"):
        reply = server.wait({"request_id": f"{model}:{number}"})
        assert reply.status_code == 404 and "no such promise" in reply.text
    assert server.model.training.told == {}


def test_a_gradient_whose_norm_overflows_is_dropped_also_after_a_restart_and_the_moments_stay_finite(
    start: Any, server: Server
) -> None:
    model = server.create()
    server.wait(server.forward_backward(model, 1, 1))
    for one in server.model.training.adapters.held[model].parameters.values():
        if one.grad is not None:
            one.grad.fill_(3e38)
    for seq, told in ((2, "norm of the gradient is not finite"), (3, "there is no gradient")):
        assert told in server.wait(server.optim_step(model, seq)).json()["error"]
    server.close()
    server = start()
    assert "there is no gradient" in server.wait(server.optim_step(model, 4)).json()["error"]
    assert server.train(model, 5)["metrics"]["grad_norm"] > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from lowmem_grpo.server.tinker.adapters import Adapters
from tinker_server import Server

run = Adapters.run

def killed(self, model, work):
    if len(work.data) == 1:
        os.kill(os.getpid(), int(sys.argv[2]))
    return run(self, model, work)

Adapters.run = killed  # before the server starts, since it runs stored requests at once
server = Server(Path(sys.argv[1]))
if len(sys.argv) == 3:
    model = server.create()
    print(model, flush=True)
    body = b'{"model_id": "%s", "seq_id": 1, "loss_fn": "cross_entropy", "data": [{"tokens": [5], '
    body = body % model.encode() + b'"target_tokens": [6], "weights": [1]}]}'
    server.wait(server.post("forward_backward", body, **{"content-type": "application/json"}).json())
print(server.wait({"request_id": sys.argv[3] + ":1"}).json()["error"])
print(server.train(sys.argv[3], 2)["metrics"])
server.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_request_during_which_two_servers_died_is_failed_by_the_third_and_its_model_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path), str(int(number))]
    places = os.pathsep.join(["tests/support", ".", *sys.path])
    model, done = [], []
    for _ in range(3):
        done.append(subprocess.run([*words, *model], capture_output=True, text=True, timeout=300, check=False,
                                   cwd=Path(__file__).parents[3], env=os.environ | {"PYTHONPATH": places}))
        model = model or done[0].stdout.split()[-1:]
    assert [each.returncode for each in done] == [-number, -number, 0], done[-1].stderr[-2000:]
    assert "the server ended 2 times while it ran this forward_backward" in done[-1].stdout
    assert "grad_norm" in done[-1].stdout


def test_what_fails_in_the_server_is_answered_without_its_words(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = server.create()
    monkeypatch.setattr(server.model.training.adapters, "run", Mock(side_effect=RuntimeError("/srv/x")))
    told = server.wait(server.forward_backward(model, 1, 1)).json()
    assert told["category"] == "server" and "/srv" not in told["error"]
    monkeypatch.undo()
    assert server.train(model, 2)["metrics"]


def test_only_starts_of_other_servers_count_against_a_stored_request(server: Server) -> None:
    """What was started and not ended twice before is not run; an error that a server survives is no end of it."""
    model = server.create()
    with server.held_up():
        promises = [server.forward_backward(model, seq, seq) for seq in (1, 2)]
        store = server.model.training.store
        [first, second] = [store.asked(model, seq) for seq in (1, 2)]
        assert first is not None and second is not None
        ended = [RequestStore(server.database).count_start(first) for _ in range(2)]
        assert (ended, [store.count_start(second) for _ in range(4)]) == ([0, 1], [0, 0, 0, 0])
    assert "ended 2 times" in server.wait(promises[0]).json()["error"]
    assert server.wait(promises[1]).status_code == 200 and server.wait(server.optim_step(model, 3)).json()["metrics"]
    assert server.database.rows("SELECT * FROM tinker_starts") == []


@every_row("adam", [
    {"learning_rate": 1e38}, {"learning_rate": 1e300}, {"weight_decay": 1e300}, {"weight_decay": 1e38}, {"eps": 1e39},
])
def test_a_number_that_adam_cannot_take_is_named(one_server: Server, adam: dict[str, float]) -> None:
    """torch: value cannot be converted to type float without overflow, or weights that are infinite."""
    model = one_server.create()
    one_server.wait(one_server.forward_backward(model, 1, 1))
    told = one_server.asked("optim_step", model_id=model, seq_id=2, adam_params=adam)
    assert next(iter(adam)) in told["error"] and told["category"] == "user"
    assert one_server.train(model, 3)["metrics"]["grad_norm"] > 0
