"""Weights under a name: trained on from where they were, sampled with, listed, deleted, and nobody else's."""

from pathlib import Path
from typing import Any

import pytest
from tinker_server import MODEL, OTHER, Server, same

from lowmem_grpo.models.stored_model import public_name
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.tinker.adapters import LoraSettings
from lowmem_grpo.server.tinker.checkpoint_store import SAMPLING, TRAINING, CheckpointStore, Saved, path_of
from lowmem_grpo.server.tinker.request_store import UnknownError


def session_of(model: str) -> str:
    return model.partition(":")[0]


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_new_model_goes_on_where_the_saved_one_was(server: Server, optimizer: bool) -> None:
    model = server.trained(2)
    saved = server.asked("save_weights", model_id=model, seq_id=5, path="half")
    assert saved == {"type": "save_weights", "path": f"tinker://{model}/weights/half"}
    loaded = server.asked("load_weights", session_id=session_of(model), model_seq_id=7, path=saved["path"],
                   optimizer=optimizer)
    again = loaded["model_id"]
    assert loaded["path"] == saved["path"] and again == f"{session_of(model)}:train:7"
    state, other = server.state(model), server.state(again)
    factors = {name: one for name, one in state.items() if "/" not in name}
    assert same(other, state if optimizer else factors)
    for of, seq in ((model, 6), (again, 1)):
        server.train(of, seq, 9)
    trained_on = [{name: one for name, one in server.state(of).items() if "/" not in name} for of in (model, again)]
    assert same(*trained_on) == optimizer


def test_a_model_goes_back_to_saved_weights_and_stays_there_after_a_restart(start: Any, server: Server) -> None:
    model = server.trained(2)
    path = server.asked("save_weights", model_id=model, seq_id=5, path="good")["path"]
    before = server.state(model)
    server.train(model, 6, 3)
    server.wait(server.forward_backward(model, 8, 4))
    server.asked("load_weights", model_id=model, seq_id=9, path=path, optimizer=True)
    server.close()
    following = start()
    assert same(following.state(model), before)
    reply = following.wait(following.optim_step(model, 10)).json()
    assert "there is no gradient" in reply["error"], "what was added before the load is gone"


def test_lists_tell_what_there_is_and_what_was_deleted_is_gone(server: Server) -> None:
    model = server.trained()
    server.asked("save_weights", model_id=model, seq_id=3, path="a")
    server.asked("save_weights_for_sampler", model_id=model, seq_id=4, path="b", ttl_seconds=3600)
    listed = server.get("checkpoints").json()["checkpoints"]
    assert {(one["checkpoint_id"], one["checkpoint_type"]) for one in listed} == {
        ("weights/a", "training"), ("sampler_weights/b", "sampler")}
    assert all(one["size_bytes"] > 1000 for one in listed) and listed[0]["expires_at"] > listed[0]["time"]
    info = server.post("weights_info", {"tinker_path": f"tinker://{model}/weights/a"}).json()
    assert info == {"base_model": public_name(MODEL), "is_lora": True, "lora_rank": 4, "train_unembed": False,
                    "train_mlp": True, "train_attn": True}
    assert server.get(f"training_runs/{model}/checkpoints/weights/a", method="DELETE").status_code == 204
    left = server.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [one["checkpoint_id"] for one in left] == ["sampler_weights/b"]
    assert len(list(server.model.training.checkpoints.folder.iterdir())) == 1
    assert "no such weights" in server.asked("load_weights", model_id=model, seq_id=5, path=f"tinker://{model}/weights/a",
                                      optimizer=True)["error"]


WRONG = {
    "path is '../x'": {"path": "../x"}, "path is 'a/b'": {"path": "a/b"}, "path is ''": {"path": ""},
    "path is missing": {}, "ttl_seconds is -1": {"path": "x", "ttl_seconds": -1},
    "overwrite is 1": {"path": "x", "overwrite": 1}, "there already": {"path": "taken"},
}


def test_a_wrong_save_is_named_and_costs_nothing(server: Server) -> None:
    model = server.trained()
    server.asked("save_weights", model_id=model, seq_id=3, path="taken")
    for seq, (words, wrong) in enumerate(WRONG.items(), 4):
        assert words in server.asked("save_weights", model_id=model, seq_id=seq, **wrong)["error"]
    replaced = server.asked("save_weights", model_id=model, seq_id=4 + len(WRONG), path="taken", overwrite=True)
    assert replaced["path"].endswith("/weights/taken")
    server.model.worker.run(lambda: None).result()  # the older file goes after the answer
    assert len(list(server.model.training.checkpoints.folder.iterdir())) == 1


def test_anothers_weights_are_as_weights_that_are_not_there(server: Server) -> None:
    model = server.trained()
    path = server.asked("save_weights", model_id=model, seq_id=3, path="mine")["path"]
    theirs = server.create(key=OTHER)
    for body in ({"model_id": theirs, "seq_id": 1}, {"session_id": session_of(theirs), "model_seq_id": 5}):
        said = server.asked("load_weights", OTHER, **body, path=path, optimizer=True)
        assert "no such weights of yours" in str(said)
    assert server.post("weights_info", {"tinker_path": path}, OTHER).status_code == 404
    assert server.get(f"training_runs/{model}/checkpoints/weights/mine", OTHER, "DELETE").status_code == 404
    assert server.get("checkpoints", OTHER).json()["checkpoints"] == []


def test_weights_of_one_kind_are_not_taken_for_the_other(server: Server) -> None:
    model = server.trained()
    to_train = server.asked("save_weights", model_id=model, seq_id=3, path="t")["path"]
    to_sample = server.asked("save_weights_for_sampler", model_id=model, seq_id=4, path="s")["path"]
    said = server.asked("load_weights", model_id=model, seq_id=5, path=to_sample, optimizer=False)["error"]
    assert "save_state saves what to train on" in said
    refused = server.post("create_sampling_session", {"session_id": session_of(model), "sampling_session_seq_id": 0,
                                                      "model_path": to_train})
    assert refused.status_code == 422 and "save_weights_for_sampler saves what to sample with" in refused.text


def test_weights_of_another_rank_are_refused_and_the_model_stays_as_it_was(server: Server) -> None:
    model, other = server.trained(), server.create(rank=2, number=1)
    path = server.asked("save_weights", model_id=other, seq_id=1, path="narrow")["path"]
    before = server.state(model)
    said = server.asked("load_weights", model_id=model, seq_id=3, path=path, optimizer=True)["error"]
    assert "another rank or other layers" in said
    assert same(server.state(model), before)


def test_what_expired_and_what_a_kill_left_is_deleted(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(Database(tmp_path / "server.sqlite"), tmp_path / "saved")
    settings = LoraSettings(rank=4, seed=1)
    for name, expires in (("old", 1.0), ("new", None)):
        place = checkpoints.path_of("run:train:0", TRAINING, name, 1)
        place.write_bytes(b"x")
        with checkpoints.database.write() as connection:
            checkpoints.put(Saved(path_of("run:train:0", TRAINING, name), "me", "run:train:0", settings, place.name, 1,
                                  0.5, expires), connection)
    (checkpoints.folder / "left").mkdir()
    assert [one.path for one in checkpoints.all("me")] == ["tinker://run:train:0/weights/new"]
    with pytest.raises(UnknownError):
        checkpoints.find("tinker://run:train:0/weights/old", "me")
    again = CheckpointStore(checkpoints.database, checkpoints.folder)
    assert [path.name for path in again.folder.iterdir()] == ["run_train_0.weights.1.new.safetensors"]
    assert again.path_of("run:train:0", SAMPLING, "n", 2).name == "run_train_0.sampler_weights.2.n"
