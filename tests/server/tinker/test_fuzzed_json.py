"""JSON that nobody expects, by schemathesis: no route answers it with a 500, or with anything of what is inside."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tinker_server import API, MODEL, OTHER, OWNER, Server

from lowmem_grpo.server.users import Allowance

schemathesis: Any = pytest.importorskip("schemathesis", reason="pip install schemathesis==4.32.5")
FUZZ = settings(max_examples=12, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))
ANY: list[Any] = [{"type": "integer"}, {"type": "string", "maxLength": 40}, {"type": "null"}, {"type": "boolean"},
                  {"type": "array", "maxItems": 3, "items": {}}, {"type": "object", "maxProperties": 2}]
SEQ = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 40}, {"enum": [0, -1, 2**31, 2**63, 1.5, True, "1"]}]}
ADAM = {"type": "object", "properties": {
    name: {"anyOf": [{"type": "number"}, *ANY]} for name in ("learning_rate", "beta1", "eps", "grad_clip_norm", "x")}}
LORA = {"type": "object", "properties": {"rank": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, *ANY]},
                                         "seed": {"anyOf": ANY}, "train_mlp": {"anyOf": ANY}, "y": {}}}
PARAMS = {"type": "object", "properties": {
    "max_tokens": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 4}, *ANY]},
    **{name: {"anyOf": [{"type": "number"}, *ANY]} for name in ("temperature", "top_k", "top_p", "seed")},
    "stop": {"anyOf": ANY}}, "required": ["max_tokens"]}
TOKEN = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 300}, {"enum": [-1, 2**40, None, "a", 1.5]}]}
CHUNK = {"type": "object", "properties": {"tokens": {"type": "array", "maxItems": 70, "items": TOKEN}, "type": {}}}
PROMPT = {"type": "object", "properties": {"chunks": {"type": "array", "maxItems": 2, "items": CHUNK}}}
NAMES = ["a/b", "../x", "..", ".", "a\x00", "a" * 200, "plain"]
NAME = {"anyOf": [{"type": "string", "maxLength": 20}, {"enum": NAMES}, *ANY]}


def known(*values: Any) -> dict[str, Any]:
    """A field that often has one of these values, and else anything."""
    return {"anyOf": [{"enum": list(values)}, {"enum": list(values)}, *ANY]}


def bodies(server: Server) -> dict[str, dict[str, Any]]:
    """The fields of each route's body, with ids that are there, and others'."""
    model, theirs = server.create(), server.create(key=OTHER)
    session = model.partition(":")[0]
    sampler = server.sampler(session)
    models, sessions = known(model, theirs), known(session, theirs.partition(":")[0])
    path = known(f"tinker://{model}/weights/plain", f"tinker://{theirs}/weights/x", "tinker://../../x/weights/y")
    return {
        "create_model": {"session_id": sessions, "model_seq_id": SEQ, "base_model": known(MODEL), "lora_config": LORA,
                         "optimizer_config": {"anyOf": ANY}},
        "get_info": {"model_id": models}, "unload_model": {"model_id": known(theirs, "x")},
        "optim_step": {"model_id": models, "seq_id": SEQ, "adam_params": {"anyOf": [ADAM, *ANY]}},
        "save_weights": {"model_id": models, "seq_id": SEQ, "path": NAME, "ttl_seconds": {"anyOf": ANY},
                         "overwrite": {"anyOf": ANY}},
        "save_weights_for_sampler": {"model_id": models, "seq_id": SEQ, "path": NAME, "sampling_session_seq_id": SEQ},
        "load_weights": {"model_id": models, "seq_id": SEQ, "path": path, "optimizer": {"anyOf": ANY},
                         "session_id": sessions, "model_seq_id": SEQ},
        "weights_info": {"tinker_path": path}, "session_heartbeat": {"session_id": sessions},
        "create_sampling_session": {"session_id": sessions, "sampling_session_seq_id": SEQ, "base_model": known(MODEL),
                                    "model_path": path},
        "asample": {"sampling_session_id": known(sampler, "x"), "seq_id": SEQ, "prompt": {"anyOf": [PROMPT, *ANY]},
                    "num_samples": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 3}, *ANY]},
                    "sampling_params": {"anyOf": [PARAMS, *ANY]}, "prompt_logprobs": {"anyOf": ANY}},
        "retrieve_future": {"request_id": known(f"{model}:1", f"{theirs}:0", f"{sampler}:1", f"{model}:unload_model")},
    }


def schema_of(server: Server) -> dict[str, Any]:
    """All routes, as OpenAPI."""
    paths: dict[str, Any] = {
        f"{API}/{route}": {"post": {"responses": {}, "requestBody": {"content": {"application/json": {"schema": {
            "type": "object", "properties": fields}}}}}} for route, fields in bodies(server).items()}
    text = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in ("model", "kind", "name")]
    saved = f"{API}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}"
    ttl = {"application/json": {"schema": {"type": "object", "properties": {"ttl_seconds": {"anyOf": ANY}}}}}
    pages = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("limit", "offset")]
    return {"openapi": "3.0.2", "info": {"title": "t", "version": "1"}, "paths": paths | {
        saved: {"delete": {"parameters": text, "responses": {}}},
        f"{saved}/ttl": {"put": {"parameters": text, "responses": {}, "requestBody": {"content": ttl}}},
        f"{API}/training_runs": {"get": {"parameters": pages, "responses": {}}},
        f"{API}/training_runs/{{model}}": {"get": {"parameters": text[:1], "responses": {}}},
        f"{API}/samplers/{{name}}": {"get": {"parameters": text[2:], "responses": {}}},
    }}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("fuzzed"), defaultdict(Allowance, owner=Allowance(models=12)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    return schemathesis.openapi.from_dict(schema_of(server))


def test_no_request_breaks_the_server_or_tells_of_its_inside(
    api: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLL", "SOON"):  # nothing is waited for
        monkeypatch.setattr(f"lowmem_grpo.server.tinker.routes.{name}", 0.02)
    inside, statuses = str(server.database.path.parent), set[int]()
    for found in api.get_all_operations():

        @FUZZ
        @given(found.ok().as_strategy())
        def ask(case: Any) -> None:
            sent = case.as_transport_kwargs(base_url="http://127.0.0.1")
            sent["headers"] = dict(sent["headers"]) | {"X-API-Key": OWNER}
            reply = server.http.request(**{name: value for name, value in sent.items() if name != "cookies"})
            statuses.add(reply.status_code)
            assert reply.status_code < 500, (sent, reply.text)
            assert "Traceback" not in reply.text and inside not in reply.text
            if reply.status_code >= 400:
                assert len(reply.json()["error"]["message"]) > 10

        ask()
    assert statuses >= {200, 404, 422}, "not all of it was refused at the door"


def test_after_all_that_the_server_works_and_the_other_users_model_is_as_it_was(server: Server) -> None:
    theirs = server.model.training.ledger.models("other")
    assert all(model.done == 0 and model.state is None for model in theirs)
    assert server.model.training.shelf.all("other") == []
    model = server.create(number=7, key=OTHER)
    assert server.post("get_info", {"model_id": model}, OTHER).status_code == 200
