"""Peaks of memory."""

import torch

from lowmem_grpo.memory.peaks import peak_memory


def test_peak_memory_of_this_process_is_bytes_and_not_kilobytes() -> None:
    peak = peak_memory(torch.device("cpu"))["memory/peak_bytes"]
    assert 50 * 2**20 < peak < 2**40  # torch alone needs more than 50 MiB
