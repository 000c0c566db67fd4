"""JSON that nobody expects: no route answers it with a 500, or with anything of what is inside."""

import json
from collections import defaultdict
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker_server import API, MODEL, OTHER, OWNER, Server

from lowmem_grpo.server.users import Allowance

ALLOWANCES = defaultdict(Allowance, owner=Allowance(models=12))
FUZZ = settings(max_examples=16, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))
SIMPLE = st.integers() | st.floats() | st.text(max_size=40) | st.none() | st.booleans()
ANY = SIMPLE | st.lists(SIMPLE, max_size=3) | st.dictionaries(st.text(max_size=5), SIMPLE, max_size=2)
SEQ = st.integers(1, 40) | st.sampled_from([0, -1, 2**31, 2**63, 1.5, True, "1"])
TOKENS = st.lists(st.integers(0, 300) | st.sampled_from([-1, 2**40, None, "a", 1.5]), max_size=70)
NAMES = ["a/b", "../x", "..", ".", "a\x00", "a" * 200, "plain"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20) | st.sampled_from(NAMES)


def some(**fields: Any) -> st.SearchStrategy[Any]:
    """An object with all or some of these fields."""
    return st.fixed_dictionaries(fields) | st.fixed_dictionaries({}, optional=fields)


def known(*values: Any) -> st.SearchStrategy[Any]:
    """Draw one of these values twice as often as anything else."""
    return st.one_of(st.sampled_from(values), st.sampled_from(values), ANY)


def bodies(server: Server) -> dict[str, st.SearchStrategy[Any]]:
    """The bodies of each route, with ids that are there, and others'."""
    model, theirs = server.create(), server.create(key=OTHER)
    session = model.partition(":")[0]
    sampler = server.sampler(session)
    models, sessions = known(model, theirs), known(session, theirs.partition(":")[0])
    path = known(f"tinker://{model}/weights/plain", f"tinker://{theirs}/weights/x", "tinker://../../x/weights/y")
    adam = some(**dict.fromkeys(("learning_rate", "beta1", "eps", "grad_clip_norm", "x"), st.floats() | ANY))
    lora = some(rank=st.integers(0, 9) | ANY, seed=ANY, train_mlp=ANY, y=ANY)
    params = some(max_tokens=st.integers(0, 4), stop=ANY,
                  **dict.fromkeys(("temperature", "top_k", "top_p", "seed"), st.floats(0, 2) | ANY))
    prompt = some(chunks=st.lists(some(tokens=TOKENS, type=ANY), max_size=2))
    asked = {"model_id": models, "seq_id": SEQ}
    return {
        "create_model": some(session_id=sessions, model_seq_id=SEQ, base_model=known(MODEL), lora_config=lora | ANY,
                             optimizer_config=ANY, user_metadata=st.dictionaries(st.text(max_size=5), ANY) | ANY),
        "get_info": some(model_id=models), "unload_model": some(model_id=known(theirs, "x")),
        "optim_step": some(**asked, adam_params=adam | ANY),
        "save_weights": some(**asked, path=TEXT | ANY, ttl_seconds=ANY, overwrite=ANY),
        "save_weights_for_sampler": some(**asked, path=TEXT | ANY, sampling_session_seq_id=SEQ),
        "load_weights": some(**asked, path=path, optimizer=ANY, session_id=sessions, model_seq_id=SEQ),
        "weights_info": some(tinker_path=path), "session_heartbeat": some(session_id=sessions),
        "create_sampling_session": some(session_id=sessions, sampling_session_seq_id=SEQ, base_model=known(MODEL),
                                        model_path=path),
        "asample": some(sampling_session_id=known(sampler, "x"), seq_id=SEQ, prompt=prompt | ANY, num_samples=SEQ | ANY,
                        sampling_params=params | ANY, prompt_logprobs=ANY),
        "retrieve_future": some(request_id=known(f"{model}:1", f"{theirs}:0", f"{sampler}:1", f"{model}:unload_model")),
    }


def test_no_request_breaks_the_server_or_tells_of_its_inside(
    one_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes, inside, statuses = bodies(one_server), str(one_server.database.path.parent), set[int]()
    monkeypatch.setattr("lowmem_grpo.server.tinker.routes.POLL", 0.02)  # nothing is waited for

    def check(reply: Any, sent: Any) -> None:
        statuses.add(reply.status_code)
        assert reply.status_code < 500, (sent, reply.text)
        assert "Traceback" not in reply.text and inside not in reply.text
        if reply.status_code >= 400:
            assert len(reply.json()["error"]["message"]) > 10

    for route, sent in routes.items():
        FUZZ(given(st.tuples(st.just(route), sent | ANY))(lambda case: check(one_server.post(*case), case)))()

    @FUZZ
    @given(st.tuples(TEXT, TEXT, TEXT), some(ttl_seconds=ANY) | ANY, some(limit=TEXT, offset=TEXT))
    def ask_paths(names: tuple[str, ...], body: Any, query: Any) -> None:
        model, kind, name = (quote(each, safe="") for each in names)
        runs, headers = f"{API}/training_runs", {"X-API-Key": OWNER}
        saved = f"{runs}/{model}/checkpoints/{kind}/{name}"
        for method, path in (("DELETE", saved), ("GET", f"{runs}/{model}"), ("GET", runs),
                             ("GET", f"{API}/samplers/{name}")):
            check(one_server.http.request(method, path, params=query, headers=headers), (path, query))
        check(one_server.http.put(f"{saved}/ttl", content=json.dumps(body), headers=headers), (saved, body))

    ask_paths()
    assert statuses >= {200, 404, 422}, "not all of it was refused at the door"


def test_after_all_that_the_server_works_and_the_other_users_model_is_as_it_was(one_server: Server) -> None:
    theirs = one_server.model.training.store.models("other")
    assert all(model.done == 0 and model.state is None for model in theirs)
    assert one_server.model.training.checkpoints.all("other") == []
    model = one_server.create(number=7, key=OTHER)
    assert one_server.post("get_info", {"model_id": model}, OTHER).status_code == 200
