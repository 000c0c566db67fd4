"""Without a network, the hub is asked once, for a while, and one line says so."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from lowmem_grpo.models import hub

NAME = "someone/some-model"
ONCE = (1, 2)  # connections: the library may ask for a list of its own before
PROGRAM = """
import json, sys
from lowmem_grpo.models import hub
asked = []
sys.addaudithook(lambda event, _: asked.append(event) if event == "socket.connect" else None)
for find in (hub.find_model, hub.find_dataset):
    asked.clear()
    try:
        find("someone/some-model")
    except OSError as error:
        print(json.dumps([str(error), len(asked)]))
"""


@pytest.fixture
def port() -> Any:
    """A port that nobody answers; `listen` makes it take connections and say nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


def asked(port: socket.socket, **settings: str) -> list[tuple[str, int]]:
    """Return the message about a model and about a dataset, each with its calls of the hub; nothing else is printed."""
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{port.getsockname()[1]}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*",
             "HF_HUB_ETAG_TIMEOUT": "60"}  # for a busy machine, on which the client's imports alone take seconds
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=400,
                          env=os.environ | place | settings)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_hub_that_says_nothing_is_asked_once_and_given_up_in_one_line(port: socket.socket) -> None:
    port.listen()
    for said, calls in asked(port, HF_HUB_ETAG_TIMEOUT="1"):  # the library's own option
        assert "\n" not in said and calls <= max(ONCE), said  # none where a busy machine needs a second to ask
        assert f"{NAME!r}: it is not in the cache" in said and "Where there is a network: " in said


@pytest.mark.parametrize(("asked_for", "seconds"), [(hub.constants.DEFAULT_ETAG_TIMEOUT, hub.SECONDS), (30, 30)])
def test_a_hub_that_says_nothing_is_given_up_after_as_many_seconds_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked_for: int, seconds: float
) -> None:
    waited: list[float] = []

    def get(timeout: float) -> Any:
        waited.append(timeout)
        raise Empty

    monkeypatch.setattr(hub, "SimpleQueue", lambda: SimpleNamespace(put=lambda answer: None, get=get))
    monkeypatch.setattr(hub.constants, "HF_HUB_ETAG_TIMEOUT", asked_for)
    with pytest.raises(hub.NoAnswerError, match=rf"gave no answer in {seconds:g} s \(HF_HUB_ETAG_TIMEOUT=30 waits"):
        hub.answer(lambda: None)
    assert waited == [seconds]


def test_a_hub_that_cannot_be_reached_is_asked_once_and_refused_in_one_line(port: socket.socket) -> None:
    model, dataset = asked(port)
    assert model[0].startswith(f"no model {NAME!r}: it is not in the cache, and the hub does not answer (")
    assert model[0].endswith(f"). Where there is a network: hf download {NAME}; or give its folder")
    assert dataset[0].endswith("split='train').to_json('rows.jsonl'); then give that file")
    assert model[1] in ONCE and dataset[1] in ONCE
    said, calls = asked(port, HF_HUB_OFFLINE="1")[0]
    assert "HF_HUB_OFFLINE allows no download" in said and calls == 0


def test_a_hub_that_may_not_be_asked_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "Thread", lambda **_: pytest.fail("a thread was started, and waited for"))
    for find in (hub.find_model, hub.find_dataset):
        with pytest.raises(OSError, match="HF_HUB_OFFLINE allows no download"):
            find(NAME)
        with pytest.raises((OSError, ValueError), match="no name on the hub"):
            find("a/b/c")


def test_what_is_in_the_cache_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "models--someone--cached"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "answer", lambda ask: pytest.fail("the hub was asked"))
    hub.find_model("someone/cached", cache_dir=str(tmp_path), weights=False)
    with pytest.raises(OSError, match="not in the cache, and local_files_only=True allows no download"):
        hub.find_model("someone/cached", cache_dir=str(tmp_path), local_files_only=True)  # the weights are not there
    (cache / "snapshots" / "abc" / "model.safetensors").write_text("")
    hub.find_model("someone/cached", cache_dir=str(tmp_path))


def refusal(kind: type[Exception]) -> Any:
    """Stands in for the request that the hub answers with such an error."""
    def ask(*_: Any, **__: Any) -> None:
        raise kind.__new__(kind)

    return ask


@pytest.mark.parametrize(("kind", "words"), [
    (hub.errors.RepositoryNotFoundError, "the hub has no such model, or it is private"),
    (hub.errors.GatedRepoError, r"it is gated\. Ask its owner for access"),
    (hub.errors.RevisionNotFoundError, "on the hub it has no revision 'v9'"),
    (hub.errors.HfHubHTTPError, None),  # for example a mirror that knows no HEAD: the loader decides
])
def test_what_the_hub_refuses_is_said_before_anything_is_loaded(
    kind: type[Exception], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "huggingface_hub", SimpleNamespace(
        hf_hub_url=lambda *_, **__: "", try_to_load_from_cache=lambda *_: None, get_hf_file_metadata=refusal(kind)))
    hub.find_model.cache_clear()
    if words is None:
        return hub.find_model(NAME, "v9")
    with pytest.raises(OSError, match=words):
        hub.find_model(NAME, "v9")


def test_the_cache_of_datasets_is_looked_for_where_the_library_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.dataset_cache() == Path(datasets.config.HF_DATASETS_CACHE)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "owner___some-rows").mkdir()
    assert hub.is_loaded_before("Owner/some-rows") and not hub.is_loaded_before("other/some-rows")


class Unreachable:
    """A client of the hub whose network library has errors of its own, which are no OSError."""

    def whoami(self) -> Any:
        raise RuntimeError("[Errno -2] Name or service not known\nwith fifty more lines")

    create_repo = upload_folder = file_exists = lambda self, **_: Unreachable.whoami(self)


def test_an_upload_without_a_network_is_one_line_that_says_where_the_adapter_lies(tmp_path: Path) -> None:
    with pytest.raises(hub.HubError, match=r"did not take me/it: \[Errno -2\] Name or service not known\. The files in "
                                           rf"{tmp_path} are complete: run `hf auth login`, then `hf upload") as caught:
        hub.push(tmp_path, "me/it", api=Unreachable())
    assert "\n" not in str(caught.value)
    with pytest.raises(hub.HubError, match="log in with `hf auth login`"):
        hub.full_name("it", api=Unreachable())
