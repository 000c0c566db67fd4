"""What vLLM is told when it starts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import every_row

from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.memory.cards import Device
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.rows import engine_workspace


@every_row(("device", "context", "given", "told"), [
    ("cpu", 2048, None, {"block_size": 32}), ("cpu", 2049, None, {}), ("cpu", 2048, 64, {"block_size": 64}),
    ("cpu", 2049, 64, {"block_size": 64}), ("cuda:0", 512, None, {}), ("cuda:0", 512, 32, {"block_size": 32}),
])
def test_blocks_of_the_cache_are_small_for_short_contexts_on_the_cpu_too(
    device: str, context: int, given: int | None, told: dict[str, int]
) -> None:
    assert vllm_settings.block_size(torch.device(device), context, given) == told


@pytest.mark.parametrize(("gib", "sequences", "tokens"), [
    (15, 64, 2048), (16, 64, 2048), (22.5, 64, 4096), (24, 64, 4096), (32, 64, 8192), (141, 64, 8192), (15, 3000, 3000),
])
def test_the_plan_counts_the_prefills_that_the_engine_makes(
    gib: float, sequences: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(gib * 2**30)
    monkeypatch.setattr(vllm_settings.torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(vllm_settings.torch.cuda, "mem_get_info", lambda device: (0, total))
    room: Any = SimpleNamespace(policy=SimpleNamespace(device=torch.device("cuda:0")), seqs=sequences, cache=total // 4)
    assert vllm_settings.device_options(room) == {"max_num_batched_tokens": tokens, "gpu_memory_utilization": 0.25}
    shape, settings = ModelShape.from_config(named_config("qwen2.5-3b")), RunSettings(30_000, sequences=sequences)
    of_token = engine_workspace(shape, replace(settings, context=2), Device("", total, total)) - engine_workspace(
        shape, replace(settings, context=1), Device("", total, total))
    found = engine_workspace(shape, settings, Device("", total, total))
    assert found == engine_workspace(shape, replace(settings, context=1), Device("", total, total)) + of_token * (
        tokens - 1)
