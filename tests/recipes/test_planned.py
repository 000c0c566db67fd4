"""The plan of a recipe before its model is loaded is that of its page; a share of a card is a smaller card."""

from importlib import import_module
from typing import Any

import pytest
import torch
from card import gpu

from lowmem_grpo.engines.vllm.settings import default_kv_bytes
from lowmem_grpo.memory.cards import Device, device
from lowmem_grpo.memory.peaks import keep_to
from lowmem_grpo.recipes.options import fill
from lowmem_grpo.recipes.presets import planned, prepare
from lowmem_grpo.server.jobs.dispatcher import JobPlan, plan_recipe
from lowmem_grpo.utils import GIB


def setup_of(recipe: str, *arguments: str) -> Any:
    module = import_module(f"lowmem_grpo.recipes.{recipe}")
    return prepare(fill(module.OPTIONS, list(arguments)), module.DEFAULTS, module.PRESETS)


@pytest.mark.parametrize("size", ["16", "24", "48", "80"])
def test_every_preset_fits_its_card(size: str) -> None:
    found = planned(setup_of("gsm8k", f"gpu={size}", "engine=vllm"), device(f"{size}GB"))
    assert found.fits and found.settings.context == setup_of("gsm8k", f"gpu={size}").max_seq_length


def test_a_share_of_a_card_is_planned_as_a_smaller_card() -> None:
    setup = setup_of("gsm8k", "gpu=16", "engine=vllm")
    share = Device("half of a card", 32 * GIB, 16 * GIB)
    assert planned(setup, share).peak <= 16 * GIB < planned(setup, Device("a card", 32 * GIB, 32 * GIB)).device.budget


@pytest.mark.parametrize("model", ["tiny", "tiny-games"])
def test_the_embedded_models_have_a_plan_too(model: str) -> None:
    assert planned(setup_of("arithmetic", f"model={model}"), device("t4")).fits


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_without_a_card_nothing_is_known() -> None:
    assert plan_recipe("arithmetic", ["max_steps=3"]) == JobPlan()
    keep_to(0.5)  # and there is nothing to keep to


class Card:
    """What torch says of a card that others use as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
        self.device = torch.device("cuda")


def test_the_cache_of_a_run_with_a_share_counts_only_what_the_run_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = Card(monkeypatch, 1.0)
    assert default_kv_bytes(policy, 0.5) == 0  # 70 of 100 are in use
    policy = Card(monkeypatch, 0.4)
    assert default_kv_bytes(policy, 0.5) == 10  # half of 40, less the 10 that this process holds


@gpu
def test_a_run_that_fills_its_share_is_told_so_on_the_card() -> None:
    before = torch.cuda.get_per_process_memory_fraction()
    keep_to(0.01)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(torch.cuda.get_device_properties(0).total_memory // 50, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
