"""Limits of a key: what is above one is refused with its name, and costs nobody else anything."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tinker_server import OTHER, Server, body

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
    assert server.model.training.usage.samples["owner"] == 0, "what was broken off does not count either"


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
