"""A client that vanishes while it waits for an answer finds it when it comes again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import MODEL, OWNER, Serving, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def http(served: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{served.url}/api/v1/", headers={"X-API-Key": OWNER, "Accept": "application/json"},
                      timeout=60) as client:
        yield client


def ask(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.post(path, json=fields).json()
    return found


def poll(http: httpx.Client, promise: dict[str, Any]) -> dict[str, Any]:
    """The answer; TimeoutException of a client that waits for a moment only, and closes its connection."""
    return ask(http, "retrieve_future", request_id=promise["request_id"])


def begun(http: httpx.Client) -> dict[str, str]:
    """A session, and a model in it."""
    session = ask(http, "create_session", tags=[])["session_id"]
    made = ask(http, "create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config={"rank": 4})
    poll(http, made)
    sampler = ask(http, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    return {"model": made["model_id"], "sampler": sampler["sampling_session_id"]}


def test_its_gradient_is_made_once_and_its_sample_is_there(served: Serving, http: httpx.Client) -> None:
    ids = begun(http)
    data = [{"tokens": [5, 6, 7], "target_tokens": [6, 7, 8], "weights": [1, 1, 1]}]
    with served.held_up():
        promises = [
            ask(http, "forward_backward", model_id=ids["model"], seq_id=1, loss_fn="cross_entropy", data=data),
            ask(http, "optim_step", model_id=ids["model"], seq_id=2, adam_params={"learning_rate": 0.01}),
            ask(http, "asample", sampling_session_id=ids["sampler"], seq_id=0, num_samples=2, prompt=[5, 6, 7],
                sampling_params={"max_tokens": 2}),
        ]
        for promise in promises:
            with pytest.raises(httpx.TimeoutException), httpx.Client(
                    base_url=http.base_url, headers=http.headers, timeout=httpx.Timeout(60, read=0.1)) as hasty:
                poll(hasty, promise)
    passed, stepped, sampled = (poll(http, promise) for promise in promises)
    assert passed["metrics"]["loss:sum"] > 0 and stepped["metrics"]["grad_norm"] > 0
    assert [len(one["tokens"]) for one in sampled["sequences"]] == [2, 2]
    assert poll(http, promises[0]) == passed, "an answer may be asked for twice"
    assert served.model.training.ledger.model(ids["model"]).done == 2
