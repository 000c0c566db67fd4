"""Clients that leave: their models are unloaded, their snapshots replaced, their weights deleted in time."""

import asyncio
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinker_server import MODEL, OTHER, OWNER, Server, body
from transformers import AutoTokenizer

from lowmem_grpo.models.stored_model import public_name
from lowmem_grpo.server.requests import ChatError
from lowmem_grpo.server.tinker import usage as runs
from lowmem_grpo.server.users import Allowance, User


def snapshot(server: Server, model: str, seq: int) -> str:
    made = server.asked("save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq)
    return str(made["sampling_session_id"])


def at_rest(server: Server) -> None:
    server.model.worker.run(lambda: None).result()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_an_unloaded_model_leaves_nothing_but_what_was_saved_under_a_name(server: Server, tmp_path: Path) -> None:
    model, other = server.trained(), server.trained()
    assert server.asked("save_weights", model_id=model, seq_id=3, path="kept")["path"].endswith("/weights/kept")
    sampler = snapshot(server, model, 4)
    state = server.state(other)
    told = server.post("unload_model", {"model_id": model}).json()
    assert server.wait(told).json() == {"type": "unload_model", "model_id": model}
    assert server.post("unload_model", {"model_id": model}).json() == told, "it may be asked for again"
    at_rest(server)
    left = files(tmp_path / "models")
    assert len(left) == 2 and sum("kept" in name for name in left) == 1
    assert list(server.model.training.adapters.held) == [other]
    assert server.forward_backward(model, 5, 1)["error"]["code"] == "unknown"
    assert server.sample(sampler).status_code == 404
    assert all((server.state(other)[name] == one).all() for name, one in state.items())
    session = server.post("create_session", {}).json()["session_id"]
    again = server.asked("load_weights", session_id=session, model_seq_id=0, optimizer=True,
                         path=f"tinker://{model}/weights/kept")
    assert again["type"] == "load_weights"


def test_of_unloaded_models_the_newest_of_each_user_are_known(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_GONE", 1)
    models = [(server.create(key=key), key) for key in (OTHER, OWNER, OWNER)]
    for _ in range(2):  # a second call is about a model that is gone
        told = [server.post("unload_model", {"model_id": model}, key).status_code for model, key in models]
    assert told == [200, 404, 200]


def test_a_model_that_is_unloaded_while_it_works_is_gone_after_it(server: Server, tmp_path: Path) -> None:
    model = server.trained()
    asked = [server.forward_backward(model, 3, 3), server.optim_step(model, 4), server.optim_step(model, 5)]
    server.post("unload_model", {"model_id": model})
    at_rest(server)
    at_rest(server)
    assert files(tmp_path / "models") == set() and server.model.training.adapters.held == {}
    assert {server.wait(one).status_code for one in asked} == {404}
    assert server.trained()


def test_a_model_is_announced_by_a_name_with_which_clients_find_its_tokenizer(server: Server) -> None:
    (found,) = server.get("get_server_capabilities").json()["supported_models"]
    assert AutoTokenizer.from_pretrained(found["model_name"]).chat_template
    session = server.post("create_session", {}).json()["session_id"]
    for number, name in enumerate((found["model_name"], MODEL)):
        asked = {"session_id": session, "model_seq_id": number, "base_model": name, "lora_config": {"rank": 4}}
        assert server.post("create_model", asked).status_code == 200


def test_models_are_listed_to_their_user_only_the_newest_first(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: 1.7e9, monotonic=time.monotonic))
    models = [server.trained(number=number) for number in range(3)]
    theirs = server.create(key=OTHER)
    found = server.get("training_runs").json()
    assert [run["training_run_id"] for run in found["training_runs"]] == models[::-1]
    assert found["cursor"] == {"offset": 0, "limit": 20, "total_count": 3}
    run = server.get(f"training_runs/{models[0]}").json()
    assert run["base_model"] == public_name(MODEL) and run["lora_rank"] == 4 and run["model_owner"] == "owner"
    assert datetime.fromisoformat(run["last_request_time"]).timestamp() == 1.7e9
    page = server.get("training_runs?limit=1&offset=1").json()["training_runs"]
    assert [run["training_run_id"] for run in page] == [models[1]]
    for path in (f"training_runs/{models[0]}", f"training_runs/{models[0]}/checkpoints"):
        assert server.get(path, OTHER).status_code == 404
    assert server.post("unload_model", {"model_id": models[0]}, OTHER).status_code == 404
    assert server.wait({"request_id": f"{models[0]}:unload_model"}).status_code == 404, "it is not gone"
    assert [run["training_run_id"] for run in server.get("training_runs", OTHER).json()["training_runs"]] == [theirs]
    assert server.get("training_runs?limit=x").status_code == 422
    assert "project_id is 'p', which is not offered" in server.get("training_runs?project_id=p").text


def test_the_newest_snapshots_are_kept(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.server.tinker.training.SNAPSHOTS", 2)
    model = server.trained()
    samplers = [snapshot(server, model, seq) for seq in (3, 4, 5)]
    at_rest(server)
    assert len(list((tmp_path / "models" / "snapshots").iterdir())) == 2
    told = server.sample(samplers[0])
    assert told.status_code == 404 and "the newest are kept" in told.json()["error"]["message"]
    assert [server.wait(server.sample(one).json()).status_code for one in samplers[1:]] == [200, 200]


@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": True}], ids=["sample", "with its prompt's scores"])
def test_an_older_snapshot_stays_until_what_waits_for_it_is_sampled(
    more: dict[str, Any], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.server.tinker.training.SNAPSHOTS", 1)
    model = server.trained()
    old = snapshot(server, model, 3)
    with server.held_up():
        newer = server.post("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 4})
        waiting = server.sample(old, **more).json()
    assert "error" not in server.wait(newer.json()).text and server.wait(waiting).status_code == 200
    assert "error" not in server.wait(waiting).text
    snapshot(server, model, 5)
    at_rest(server)
    assert len(list((tmp_path / "models" / "snapshots").iterdir())) == 1


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "expired"])
def test_named_weights_stay_until_what_waits_for_them_is_sampled(
    replaced: bool, server: Server, tmp_path: Path
) -> None:
    model = server.trained()
    asked = {"model_id": model, "path": "s"}
    path = server.asked("save_weights_for_sampler", **asked, seq_id=3)["path"]
    sampler = server.sampler(model.partition(":")[0], 9, path)
    with server.held_up():
        if not replaced:
            server.model.training.checkpoints.keep_for(path, User("owner").name, -1)
        newer = server.post("save_weights_for_sampler", {**asked, "seq_id": 4, "path": "s" if replaced else "other"})
        waiting = server.sample(sampler).json()
    assert "error" not in server.wait(newer.json()).text and "error" not in server.wait(waiting).text
    server.asked("save_weights_for_sampler", **asked, seq_id=5)
    at_rest(server)
    assert len(list((tmp_path / "models" / "saved").iterdir())) == 2 - replaced


def test_a_sampling_session_keeps_its_weights_when_its_number_is_sent_again(server: Server) -> None:
    model = server.trained()
    session, number = model.partition(":")[0], {"model_id": model, "sampling_session_seq_id": 7}
    sampler = server.asked("save_weights_for_sampler", **number, seq_id=3)["sampling_session_id"]
    greedy = {"sampling_params": {"max_tokens": 4, "temperature": 0}}
    before = server.wait(server.sample(sampler, **greedy).json()).text
    server.forward_backward(model, 4, 1)
    server.asked("optim_step", model_id=model, seq_id=5, adam_params={"learning_rate": 0.1})
    said = server.asked("save_weights_for_sampler", **number, seq_id=6)["error"]
    assert "sampling_session_seq_id is 7" in said and "a number that was not used before" in said
    assert server.wait(server.sample(sampler, 2, **greedy).json()).text == before
    paths = [server.asked("save_weights_for_sampler", model_id=model, seq_id=seq, path=f"s{seq}")["path"]
             for seq in (7, 8)]
    asked = {"session_id": session, "sampling_session_seq_id": 9}
    told = [server.post("create_sampling_session", {**asked, "model_path": path}) for path in (paths[0], *paths)]
    assert [one.status_code for one in told] == [200, 200, 422] and "sampling_session_seq_id is 9" in told[2].text


def test_a_sampler_whose_weights_were_deleted_says_so_and_nothing_of_the_servers_folders(server: Server) -> None:
    model = server.trained()
    path = server.asked("save_weights_for_sampler", model_id=model, seq_id=3, path="s")["path"]
    sampler = server.sampler(model.partition(":")[0], 9, path)
    with server.held_up():
        waiting = server.sample(sampler).json()
        deleted = server.get(f"training_runs/{model}/checkpoints/sampler_weights/s", method="DELETE")
        assert deleted.status_code == 204
    told = server.wait(waiting).json()
    assert "were deleted meanwhile" in told["error"] and "/" not in told["error"]
    after = server.sample(sampler, 2)
    assert after.status_code == 404 and "its weights were deleted" in after.json()["error"]["message"]


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_of_damaged_weights_a_client_learns_nothing_of_the_servers_folders(
    file: str, server: Server, tmp_path: Path
) -> None:
    path = server.asked("save_weights_for_sampler", model_id=(model := server.trained()), seq_id=3, path="s")["path"]
    [saved] = (tmp_path / "models" / "saved").iterdir()
    (saved / file).write_text("damaged")
    told = server.wait(server.sample(server.sampler(model.partition(":")[0], 9, path)).json()).text
    with pytest.raises(ChatError) as refused:
        asyncio.run(server.model.completions.chats(User("owner")).create({"model": path, "prompt": [5]}, texts=True))
    for said in (told, str(refused.value)):
        assert str(tmp_path) not in said and "cannot be read" in said


def test_weights_go_when_their_time_is_over_and_the_time_can_be_set(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1.7e9]
    monkeypatch.setattr("lowmem_grpo.server.tinker.checkpoint_store.time", SimpleNamespace(time=lambda: now[0]))
    model = server.trained()
    for seq, name in ((3, "a"), (4, "b")):
        server.asked("save_weights", model_id=model, seq_id=seq, path=name)
    for key, given, status in ((OWNER, {"ttl_seconds": 1}, 204), (OTHER, {"ttl_seconds": 1}, 404), (OWNER, {}, 422)):
        ttl = server.get(f"training_runs/{model}/checkpoints/weights/a/ttl", key, "PUT", json=given)
        assert ttl.status_code == status
    session = model.partition(":")[0]
    for later, left in ((0.5, ["a", "b"]), (0.6, ["b"])):
        now[0] += later
        assert server.post("session_heartbeat", {"session_id": session}).status_code == 200
        at_rest(server)
        assert sorted(path.name.split(".")[-2] for path in (tmp_path / "models" / "saved").iterdir()) == left


def test_a_model_whose_client_left_makes_room_for_a_new_one(start: Any) -> None:
    server = start(allowances=defaultdict(lambda: Allowance(models=2)))
    first, second = server.trained(), server.trained()
    again = {"session_id": second.partition(":")[0], "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    assert server.post("create_model", again).status_code == 200, "a repeated request is no further model"
    session = server.post("create_session", {}).json()["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    assert "models: this key has 2" in server.post("create_model", asked).json()["error"]["message"]
    server.post(f"sessions/{first.partition(':')[0]}/finish", {"reason": {"type": "success"}})
    made = server.post("create_model", asked)
    assert made.status_code == 200
    runs = [run["training_run_id"] for run in server.get("training_runs").json()["training_runs"]]
    assert runs == [f"{session}:train:0", second]


def test_a_body_that_could_not_be_read_holds_up_what_comes_after_it_for_a_moment_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.time()]
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr("lowmem_grpo.server.tinker.routes.SOON", 0.01)  # a poll for what is missing ends at once
    model = server.create()
    server.wait(server.forward_backward(model, 1, 1))
    assert server.post("forward_backward", body(model, 2, 2)[:-7]).status_code == 422
    stepped = server.optim_step(model, 3)
    assert server.wait(stepped).json()["type"] == "try_again"
    now[0] += runs.SOON
    server.wait(stepped)
    monkeypatch.undo()
    assert server.wait(stepped).json()["metrics"]["grad_norm"] > 0


def test_a_request_that_never_comes_holds_up_the_others_for_a_while_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.time()]
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: now[0]))
    model = server.create()
    server.wait(server.forward_backward(model, 1, 1))
    monkeypatch.setattr("lowmem_grpo.server.tinker.routes.POLL", 0.01)
    late = server.optim_step(model, 3)
    for _ in range(2):
        assert server.wait(late).json()["type"] == "try_again", "it has a minute to come"
        now[0] += runs.GAP / 2
    server.wait(late)
    monkeypatch.undo()
    assert server.wait(late).json()["metrics"]["grad_norm"] > 0
    came_too_late = server.wait(server.forward_backward(model, 2, 1)).json()
    assert "seq_id 2 did not come, or" in came_too_late["error"]
