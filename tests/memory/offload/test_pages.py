"""Host pages and the copies to and from them: used again, and pageable where pinned memory is refused; and whether the
host has room for them."""

import logging
from itertools import product
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import torch
from card import HAS_CARD

from lowmem_grpo.memory.offload import pages
from lowmem_grpo.memory.offload.pages import (
    PAGE_BYTES,
    Copies,
    PagePool,
    StreamCopies,
    available_host_bytes,
    check_host_room,
    container_room,
    host_bytes_needed,
    system_room,
)
from lowmem_grpo.utils import GIB


def test_pages_are_handed_out_again_and_made_only_when_none_is_free() -> None:
    pool = PagePool(Copies(), page_bytes=64)
    first, second = pool.take_pages(65), pool.take_pages(1)
    assert (len(first), len(second), pool.bytes_in_use, pool.peak_bytes) == (2, 1, 192, 192)
    pool.return_pages(first)
    assert (pool.bytes_in_use, pool.peak_bytes) == (64, 192)
    third = pool.take_pages(129)
    assert {id(page) for page in first} < {id(page) for page in third}
    assert (len(pool.storages()), pool.peak_bytes) == (4, 256)
    assert not {id(page) for page in second} & {id(page) for page in third}


def test_release_drops_free_pages_and_no_others_and_none_is_given_back_twice() -> None:
    assert PAGE_BYTES & (PAGE_BYTES - 1) == 0  # a size that torch does not round up
    pool = PagePool(Copies(), page_bytes=64)
    kept, gone = pool.take_pages(64), pool.take_pages(128)
    pool.return_pages(gone)
    with pytest.raises(KeyError):
        pool.return_pages(gone)
    pool.release()
    assert [storage._cdata for storage in pool.storages()] == [kept[0].untyped_storage()._cdata]


def test_where_a_page_cannot_be_had_none_is_taken() -> None:
    class Full(Copies):
        left = 2

        def page(self, num_bytes: int) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("no host memory")
            return super().page(num_bytes)

    pool = PagePool(Full(), page_bytes=64)
    with pytest.raises(RuntimeError, match="no host memory"):
        pool.take_pages(64 * 3)
    assert pool.bytes_in_use == 0
    with pytest.raises(RuntimeError, match="no host memory"):
        pool.take_pages(64)


def test_bytes_are_spread_over_pages_and_gathered_unchanged() -> None:
    for count, dtype in product((1, 31, 32, 33, 100), (torch.bfloat16, torch.float32, torch.float64)):
        pool = PagePool(Copies(), page_bytes=64)
        values, back = torch.randn(count).to(dtype), torch.empty(count, dtype=dtype)
        taken = pool.take_pages(values.nbytes)
        pool.copies.start(list(pool.pairs(taken, values)))
        pool.copies.start([(part, page) for page, part in pool.pairs(taken, back)])
        assert torch.equal(values, back), (count, dtype)


# The CUDA side stream, on streams that only take notes


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """`compute` is current; the next stream made is `side`."""
    found = MagicMock()
    found.side.record_event.return_value, found.current = "event", found.compute
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return found


def test_a_copy_comes_after_the_computation_on_the_side_stream_and_every_stream_waits_that_uses_it(
    streams: MagicMock
) -> None:
    copies, source, target = StreamCopies(torch.device("cuda")), torch.ones(3), MagicMock()
    streams.attach_mock(target, "target")
    ticket = copies.start([(target, source)])
    assert streams.mock_calls == [
        call.side.wait_stream(streams.compute), call.side.__enter__(), call.target.copy_(source, non_blocking=True),
        call.side.__exit__(None, None, None), call.side.record_event()]
    streams.current = streams.other  # whoever frees a tensor on another stream
    copies.wait(ticket)
    copies.drain()
    for stream in (streams.compute, streams.other):
        stream.wait_event.assert_called_once_with("event")
    streams.side.synchronize.assert_called_once_with()


@pytest.mark.skipif(HAS_CARD, reason="with a card, the system does not refuse pinned memory")
def test_refused_pinned_memory_is_pageable_and_said_once(
    streams: MagicMock, caplog: pytest.LogCaptureFixture
) -> None:
    copies = StreamCopies(torch.device("cuda"))
    with caplog.at_level(logging.WARNING, logger="lowmem_grpo"):
        taken = PagePool(copies, page_bytes=64).take_pages(64 * 3)
    assert [page.nbytes for page in taken] == [64] * 3
    (message,) = caplog.messages
    for part in ("refused pinned host memory", "blocks Python and does not overlap", "ulimit -l"):
        assert part in message


# Whether the host has room


def test_the_bytes_needed_are_whole_pages_for_each_layer_and_four_inputs_more() -> None:
    assert host_bytes_needed(32, 20480, 4096, torch.bfloat16) == 36 * 20480 * 4096 * 2
    assert host_bytes_needed(2, 1, 8, torch.float32) == 6 * PAGE_BYTES
    assert host_bytes_needed(1, PAGE_BYTES // 4 + 1, 1, torch.float32) == 5 * 2 * PAGE_BYTES


def test_the_systems_room_is_what_it_says_is_available(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    assert system_room(path) is None
    path.write_text("MemTotal: 16000 kB\nMemFree: 100 kB\n")
    assert system_room(path) is None
    path.write_text("MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:   3000 kB\nHugePages_Total:   0\n")
    assert system_room(path) == 3000 * 1024


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
    assert room is not None and 2**20 < room < 2**50


def test_too_little_room_is_an_error_that_says_what_to_do_and_little_or_unknown_room_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "meminfo"
    monkeypatch.setattr(pages, "MEMINFO", path)
    monkeypatch.setattr(pages, "CGROUP", tmp_path / "none")
    path.write_text(f"MemAvailable: {5 * 2**20} kB\n")
    with pytest.raises(MemoryError) as error:
        check_host_room(6 * GIB)
    for part in (f"need 6.00 GiB ({6 * GIB} bytes)", f"5.00 GiB ({5 * GIB} bytes) of host memory are available",
                 "max_tokens_per_micro_batch", "use_gradient_checkpointing=True"):
        assert part in str(error.value)
    check_host_room(4 * GIB)
    assert caplog.records == []
    check_host_room(5 * GIB - 2**29)
    assert "leaves 512.0 MiB for everything else" in caplog.text
    path.unlink()
    check_host_room(6 * GIB)
    assert "cannot tell whether the host has 6.00 GiB" in caplog.text
