"""Host pages and the copies to and from them: used again, and pageable where pinned memory is refused."""

import logging
from itertools import product
from unittest.mock import MagicMock, call

import pytest
import torch
from card import HAS_CARD

from lowmem_grpo.memory.offload.pages import PAGE_BYTES, Copies, PagePool, StreamCopies


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
        pages = pool.take_pages(values.nbytes)
        pool.copies.start(list(pool.pairs(pages, values)))
        pool.copies.start([(part, page) for page, part in pool.pairs(pages, back)])
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
        pages = PagePool(copies, page_bytes=64).take_pages(64 * 3)
    assert [page.nbytes for page in pages] == [64] * 3
    (record,) = caplog.records
    message = record.getMessage()
    assert "refused pinned host memory" in message
    assert "blocks Python and does not overlap" in message
    assert "ulimit -l" in message
