"""A client that vanishes while it waits for an answer finds it when it comes again."""

from typing import Any

import httpx
import pytest
from served import MODEL, OWNER, Serving


def test_its_gradient_is_made_once_and_its_sample_is_there(served: Serving) -> None:
    def ask(path: str, seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """The answer; TimeoutException of a client that waits so long only, and closes its connection."""
        headers = {"X-API-Key": OWNER, "Accept": "application/json"}
        with httpx.Client(headers=headers, timeout=httpx.Timeout(60, read=seconds)) as http:
            found: dict[str, Any] = http.post(f"{served.url}/api/v1/{path}", json=fields).json()
        return found

    def poll(promise: dict[str, Any], **more: Any) -> dict[str, Any]:
        return ask("retrieve_future", request_id=promise["request_id"], **more)

    session = {"session_id": ask("create_session")["session_id"], "base_model": MODEL}
    made = ask("create_model", **session, model_seq_id=0, lora_config={"rank": 4})
    poll(made)
    sampler = ask("create_sampling_session", **session, sampling_session_seq_id=0)["sampling_session_id"]
    model: dict[str, Any] = {"model_id": made["model_id"]}
    data = [{"tokens": [5, 6, 7], "target_tokens": [6, 7, 8], "weights": [1, 1, 1]}]
    with served.held_up():
        promises = [
            ask("forward_backward", **model, seq_id=1, loss_fn="cross_entropy", data=data),
            ask("optim_step", **model, seq_id=2, adam_params={"learning_rate": 0.01}),
            ask("asample", sampling_session_id=sampler, seq_id=0, num_samples=2, prompt=[5, 6, 7],
                sampling_params={"max_tokens": 2}),
        ]
        for promise in promises:
            with pytest.raises(httpx.TimeoutException):
                poll(promise, seconds=0.1)
    passed, stepped, sampled = map(poll, promises)
    assert passed["metrics"]["loss:sum"] > 0 and stepped["metrics"]["grad_norm"] > 0
    assert [len(one["tokens"]) for one in sampled["sequences"]] == [2, 2]
    assert poll(promises[0]) == passed, "an answer may be asked for twice"
    assert served.model.training.store.model(made["model_id"]).done == 2
