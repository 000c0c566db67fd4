"""Samples over HTTP: from a snapshot and from the base model, and what is refused."""

import json
from typing import Any

import pytest
import torch
from tables import every_row
from tinker_server import OTHER, Server, same

from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.calls import SampleRequest, read
from lowmem_grpo.server.tinker.datum import ModelBounds
from lowmem_grpo.server.tinker.sampling import failed, params_of

BOUNDS = ModelBounds(vocabulary=384, context=64)
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]}


def sample(server: Server, sampler: str, seq: int = 0, **params: Any) -> Any:
    with server.held_up():  # the two are decoded together, and in each answer alike to the last bit
        promise = server.post("asample", {
            "sampling_session_id": sampler, "seq_id": seq, "num_samples": 2, "prompt": PROMPT, "prompt_logprobs": True,
            "sampling_params": {"max_tokens": 5, "seed": 3, **params}}).json()
    assert len(promise["sample_sequence_ids"]) == 2
    answer = server.wait(promise)
    assert answer.headers["content-type"] == wire.PROTOBUF, answer.text
    return wire.SampleResponse.FromString(answer.content)


def test_sampling_between_two_passes_leaves_the_gradient_as_it_is(start: Any) -> None:
    server, alone = start("both"), start("alone")
    models = [one.create() for one in (server, alone)]
    for one, model in zip((server, alone), models, strict=True):
        one.wait(one.forward_backward(model, 1, seed=1))
        if one is server:
            sample(one, one.sampler())
        one.wait(one.optim_step(model, 2))
    assert same(server.state(models[0]), alone.state(models[1]))


def test_a_stop_token_ends_a_sample_and_belongs_to_it(server: Server) -> None:
    sampler = server.sampler()
    free = sample(server, sampler, stop=[]).sequences[0]
    ids = torch.frombuffer(bytearray(free.tokens), dtype=torch.int32).tolist()
    ended = sample(server, sampler, seq=1, stop=[ids[1]]).sequences[0]
    cut = torch.frombuffer(bytearray(ended.tokens), dtype=torch.int32).tolist()
    assert cut == ids[:ids.index(ids[1]) + 1]
    assert (free.stop_reason, ended.stop_reason) == (wire.LENGTH, wire.STOP)


def test_a_sample_of_an_earlier_server_is_gone_so_that_the_client_asks_again(server: Server) -> None:
    sampler = server.sampler()
    assert server.post("retrieve_future", {"request_id": f"{sampler}:5"}).status_code == 410
    sample(server, sampler, seq=5)
    assert server.post("retrieve_future", {"request_id": f"{sampler}:5"}, OTHER).status_code == 410
    assert server.post("asample", {"sampling_session_id": sampler, "seq_id": 6, "prompt": PROMPT,
                                   "sampling_params": {}}, OTHER).status_code == 404


@every_row(("change", "told"), [
    ({"topk_sample_logprobs": 3}, "topk_sample_logprobs is 3"),
    ({"record_stability_info": True}, "importance_sampling"),
    ({"topk_prompt_logprobs": 129}, "it must be less than or equal to 128"),
    ({"topk_prompt_logprobs": -1}, "must be greater"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "it must be 1 to 3"),
    ({"prompt_logprobs_last_n": 2}, "goes with prompt_logprobs"), ({"prompt": {"chunks": []}}, "no chunks"),
    ({"prompt": {"chunks": [{"tokens": [5, 400]}]}}, "is 400"),
    ({"prompt": {"chunks": [{"tokens": ["a"]}]}}, r"prompt\[0\]\[0\] is 'a'"),
    ({"prompt": {"chunks": [{"type": "image"}]}}, "only encoded text"), ({"prompt": [5] * 64}, "1 to 63"),
    ({"prompt": {"chunks": [{"tokens": [5] * 64}]}}, "1 to 63"), ({"num_samples": 0}, "num_samples is 0"),
    ({"num_samples": 5000}, "less than or equal to 1024"), ({"sampling_params": {"beam": 2}}, "sampling_params.beam"),
    ({"sampling_params": {"temperature": -1}}, "temperature"), ({"sampling_params": {"stop": [1, "a"]}}, "stop is"),
    *(({"sampling_params": {"stop": [5, wrong]}}, f"stop has {wrong}; .* 0 to 383") for wrong in (384, -1, 2**63)),
    ({"sampling_params": {"stop": ["x"] * 65}}, "at most 64 are taken"),
    ({"sampling_params": {"stop": [5] * 65}}, "at most 64 are"),
    ({"sampling_params": {"stop": "x" * 1025}}, "at most 1024"),
    ({"sampling_params": None}, "sampling_params is None"), ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
])
def test_wrong_samples_are_refused_with_the_field(change: dict[str, Any], told: str) -> None:
    given = {"seq_id": 0, "prompt": PROMPT, "sampling_params": {}} | change
    with pytest.raises(ValueError, match=told):
        params_of(read(SampleRequest, json.dumps(given).encode()), BOUNDS)


def test_more_likeliest_tokens_than_a_small_vocabulary_has_are_refused() -> None:
    given = {"seq_id": 0, "prompt": [1], "sampling_params": {}, "topk_prompt_logprobs": 9}
    with pytest.raises(ValueError, match="topk_prompt_logprobs is 9; it must be at most 8"):
        params_of(read(SampleRequest, json.dumps(given).encode()), ModelBounds(vocabulary=8, context=64))


@pytest.mark.parametrize("error", [OSError("/srv/x is gone"), RuntimeError("/srv/x"), KeyError("/srv/x")])
def test_an_error_of_the_server_in_a_sample_tells_the_client_nothing_of_its_files(error: Exception) -> None:
    answer = failed(error, None).body.decode()
    assert "/srv" not in answer and '"category": "server"' in answer
