"""Whether the host has room for layer inputs: what is needed, what is available, what is said if it is too little."""

from pathlib import Path

import pytest
import torch

from lowmem_grpo.memory.offload import pages
from lowmem_grpo.memory.offload.pages import (
    PAGE_BYTES,
    available_host_bytes,
    check_host_room,
    container_room,
    host_bytes_needed,
    system_room,
)
from lowmem_grpo.utils import GIB


def test_the_bytes_needed_are_whole_pages_for_each_layer_and_four_inputs_more() -> None:
    assert host_bytes_needed(32, 20480, 4096, torch.bfloat16) == 36 * 20480 * 4096 * 2
    assert host_bytes_needed(2, 1, 8, torch.float32) == 6 * PAGE_BYTES
    assert host_bytes_needed(1, PAGE_BYTES // 4 + 1, 1, torch.float32) == 5 * 2 * PAGE_BYTES


def meminfo(folder: Path, text: str) -> Path:
    path = folder / "meminfo"
    path.write_text(text)
    return path


def test_the_systems_room_is_what_it_says_is_available(tmp_path: Path) -> None:
    path = meminfo(tmp_path, "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:   3000 kB\nHugePages_Total:   0\n")
    assert system_room(path) == 3000 * 1024
    assert system_room(meminfo(tmp_path, "MemTotal: 16000 kB\n")) is None
    assert system_room(tmp_path / "none") is None


def test_a_containers_room_is_its_limit_less_what_it_cannot_drop(tmp_path: Path) -> None:
    assert container_room(tmp_path) is None
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 500\ninactive_file 150\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert container_room(tmp_path) == 450
    (tmp_path / "memory.current").write_text("2000\n")
    assert container_room(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert container_room(tmp_path) is None


@pytest.mark.skipif(not pages.MEMINFO.is_file(), reason="needs /proc/meminfo")
def test_this_machines_room_is_a_number_of_bytes() -> None:
    room = available_host_bytes()
    assert room is not None
    assert 2**20 < room < 2**50


@pytest.fixture
def five_gib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with 5 GiB available."""
    path = meminfo(tmp_path, f"MemAvailable: {5 * 2**20} kB\n")
    monkeypatch.setattr(pages, "MEMINFO", path)
    monkeypatch.setattr(pages, "CGROUP", tmp_path / "none")


@pytest.mark.usefixtures("five_gib")
def test_too_little_room_is_an_error_that_says_needed_available_and_what_to_do() -> None:
    with pytest.raises(MemoryError) as error:
        check_host_room(6 * GIB)
    message = str(error.value)
    assert f"need 6.00 GiB ({6 * GIB} bytes)" in message
    assert f"5.00 GiB ({5 * GIB} bytes) of host memory are available" in message
    assert "max_tokens_per_micro_batch" in message
    assert "use_gradient_checkpointing=True" in message


@pytest.mark.usefixtures("five_gib")
def test_little_left_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_host_room(4 * GIB)
    assert caplog.records == []
    check_host_room(5 * GIB - 2**29)
    assert "leaves 512.0 MiB for everything else" in caplog.text


def test_room_that_cannot_be_told_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(pages, "CGROUP", tmp_path / "none")
    check_host_room(6 * GIB)
    assert "cannot tell whether the host has 6.00 GiB" in caplog.text
