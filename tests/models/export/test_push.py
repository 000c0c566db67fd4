"""An export that is pushed to the hub."""

from pathlib import Path

import pytest
from export_tools import StubHub

from lowmem_grpo.models.export.formats import export
from lowmem_grpo.models.export.merge import read_pairs
from lowmem_grpo.models.hub import HubError


def test_a_push_makes_the_repository_and_uploads_the_whole_folder(adapter: Path, tmp_path: Path) -> None:
    hub = StubHub()
    done = export(adapter, "adapter", tmp_path / "out", repo="owner/name", api=hub)
    assert done.address == "https://hub/owner/name/commit/1"
    (_, created), (_, uploaded) = hub.calls
    assert created == {"repo_id": "owner/name", "private": True, "exist_ok": True}
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("owner/name", str(tmp_path / "out"))
    assert {"adapter_model.safetensors", "adapter_config.json", "base_model.json"} <= set(uploaded["files"])
    assert str(tmp_path) not in (tmp_path / "out" / "export.json").read_text()  # nobody else's business


def test_a_hub_that_refuses_leaves_the_export_whole(adapter: Path, tmp_path: Path) -> None:
    refusing = StubHub(OSError("no token"))
    with pytest.raises(HubError, match=r"did not take owner/name: no token\. What lies in .* is whole: `hf auth"):
        export(adapter, "adapter", tmp_path / "out", repo="owner/name", api=refusing)
    assert read_pairs(tmp_path / "out")
