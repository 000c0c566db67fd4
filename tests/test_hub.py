"""Where there is no network, the hub is asked once, for seconds, and one line says so."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from lowmem_grpo import hub

NAME = "someone/some-model"
PROGRAM = """
import json, sys, time
from lowmem_grpo import hub
for find in (hub.find_model, hub.find_dataset):
    begin = time.perf_counter()
    try:
        find("someone/some-model")
    except OSError as error:
        print(json.dumps([str(error), time.perf_counter() - begin]))
"""


@pytest.fixture
def silent() -> Any:
    """The address of a port that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def asked(endpoint: str, **settings: str) -> list[tuple[str, float]]:
    """What is said about a model and a dataset, and seconds; nothing else may be printed."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
                          env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"} | settings)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_that_says_nothing_is_given_up_after_seconds_in_one_line(silent: str) -> None:
    for said, seconds in asked(silent):
        assert "\n" not in said and seconds < 5, (said, seconds)
        assert f"{NAME!r}: it is not in the cache" in said and "Where there is a network: " in said
    assert all(1 <= seconds < 2 for _, seconds in asked(silent, HF_HUB_ETAG_TIMEOUT="1"))  # the library's own option


def test_a_hub_that_cannot_be_reached_is_refused_at_once_in_one_line() -> None:
    model, dataset = asked("http://127.0.0.1:9")
    assert model[0].startswith(f"no model {NAME!r}: it is not in the cache, and the hub does not answer (")
    assert model[0].endswith(f"). Where there is a network: hf download {NAME}; or give its folder")
    assert dataset[0].endswith("split='train').to_json('rows.jsonl'); then give that file")
    assert max(model[1], dataset[1]) < 2
    assert "HF_HUB_OFFLINE allows no download" in asked("http://127.0.0.1:9", HF_HUB_OFFLINE="1")[0][0]


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
    (hub.RepositoryNotFoundError, "the hub has no such model, or not for everyone"),
    (hub.GatedRepoError, "only to those whom its owner admits"),
    (hub.RevisionNotFoundError, "on the hub it has no revision 'v9'"),
    (hub.HfHubHTTPError, None),  # for example a mirror that knows no HEAD: the loader decides
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
