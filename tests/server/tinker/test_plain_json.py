"""Training and sampling in JSON, without the protocol's client."""

import json
from typing import Any

import pytest
import torch
from tables import every_row
from tinker_server import OWNER, Server, same

from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.calls import request_of, wants_json

DATA: list[Any] = [{"tokens": [5, 6, 7], "target_tokens": [6, 7, 8], "weights": [0, 1, -0.5]}]
IN_JSON = {"Accept": "application/json", "Content-Type": "application/json"}


def answer(server: Server, promise: Any, **headers: str) -> Any:
    return server.post("retrieve_future", {"request_id": promise["request_id"]}, OWNER, **headers)


def test_a_pass_in_json_is_the_same_as_in_protobuf(server: Server) -> None:
    models = [server.create(), server.create()]
    body = {"model_id": models[0], "seq_id": 1, "loss_fn": "cross_entropy", "data": DATA}
    plain = server.post("forward_backward", json.dumps(body).encode(), **IN_JSON).json()
    binary = server.post("forward_backward", request_of(json.dumps(body | {"model_id": models[1]}).encode())).json()
    found, other = answer(server, plain, **IN_JSON).json(), answer(server, binary, Accept=wire.PROTOBUF)
    message = wire.ForwardBackwardOutput.FromString(other.content)
    assert found["metrics"] == dict(message.metrics)
    data = message.loss_fn_outputs[0].fields["logprobs"].data
    assert [row["logprobs"] for row in found["loss_fn_outputs"]] == [
        torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()]
    for model in models:
        server.wait(server.optim_step(model, 2))
    assert same(*map(server.state, models))


def test_a_sample_in_json_has_the_prompts_log_probabilities_with_null_first(server: Server) -> None:
    promise = server.post("asample", {"sampling_session_id": server.sampler(), "seq_id": 0, "num_samples": 2,
                                      "prompt": [5, 6, 7], "prompt_logprobs": True,
                                      "sampling_params": {"max_tokens": 4, "stop": []}}).json()
    found = answer(server, promise, **IN_JSON).json()
    assert [(len(one["tokens"]), len(one["logprobs"]), one["stop_reason"]) for one in found["sequences"]] == [
        (4, 4, "length")] * 2
    assert found["prompt_logprobs"][0] is None and max(found["prompt_logprobs"][1:]) < 0


@every_row(("change", "told"), [
    ({"data": 5}, "data is 5; it must be a valid array"), ({"data": [5]}, r"data\[0\] is 5; it must be an object"),
    ({"data": [{"weights": [1]}]}, r"data\[0\].tokens is missing"),
    ({"data": [{"tokens": [1.5]}]}, r"\.tokens\[0\] is 1.5; it must be a valid integer"),
    ({"data": [{"tokens": 5}]}, "must be a valid array"),
    ({"data": [{"tokens": [2**40]}]}, "must be less than"), ({"data": [{"tokens": [True]}]}, "must be a valid integer"),
    ({"data": [{"tokens": [5], "weights": ["1"]}]}, r"\.weights\[0\] is '1'; it must be a valid number"),
    ({"data": [{"tokens": [5], "weights": [10**400]}]}, r"weights\[0\] is 1000.*2\*\*64"),
    ({"seq_id": "1"}, "seq_id is '1'"),
    ({"data": [{"tokens": [5], "weights": [1e39]}]}, "must be less than"),
    ({"data": [{"tokens": [5], "weights": [float("nan")]}]}, "finite"), ({"loss": "x"}, "loss is not a field"),
    ({"loss_fn_config": {"beta": "a"}}, "loss_fn_config.beta is 'a'"), ({"forward_only": 1}, "forward_only is 1"),
])
def test_wrong_json_is_refused_with_the_field(change: dict[str, Any], told: str) -> None:
    given = {"model_id": "m", "seq_id": 1, "loss_fn": "cross_entropy", "data": DATA} | change
    with pytest.raises(ValueError, match=told):
        request_of(json.dumps(given).encode())


def test_only_who_takes_no_protobuf_gets_json() -> None:
    assert wants_json("application/json") and wants_json("text/plain, application/json")
    assert not wants_json("*/*") and not wants_json("application/x-protobuf, application/json") and not wants_json("")
