"""Cards by their names, what a number of the key-value cache takes on them, and where it can be held in 8 bits."""

import pytest

from lowmem_grpo.memory.cards import (
    CACHE_DTYPES,
    CARDS,
    SPEEDS,
    cache_itemsize,
    cache_text,
    card_of,
    device,
    why_not_on_card,
    why_not_on_cpu,
)
from lowmem_grpo.utils import GIB


def test_cards_are_found_by_their_usual_names_and_a_share_is_what_may_be_filled() -> None:
    cards = {"Tesla T4": 15360, "NVIDIA RTX 4090": 24564, "a100-40gb": 40960, "A100 80GB": 81920, "rtx5090": 32607,
             "V100-32": 32768, "RTX 3050": 8192, "RTX 3060 Ti": 8192, "3080": 10240, "GTX 1660": 6144,
             "NVIDIA H100 80GB HBM3": 81559, "NVIDIA A100-SXM4-80GB": 81920}
    found = {name: (device(name).total, device(name).budget) for name in ("16GiB", "24 gb", *cards)}
    assert found == {"16GiB": (16 * GIB, 16 * GIB), "24 gb": (24 * 10**9, 24 * 10**9)} | {
        name: (mib * 2**20, int(0.95 * mib * 2**20)) for name, mib in cards.items()}
    assert device("16GiB", 0.5).budget == 8 * GIB
    for share in (1.5, "0.9"):
        with pytest.raises(ValueError, match=f"gpu_memory_utilization is {share!r}; it must be above 0 and at most 1"):
            device("t4", share)
    for size in (16, None):
        with pytest.raises(ValueError, match=f"the card is {size}; give its name.*its memory with a unit: '16GiB'"):
            device(size)


def test_every_card_has_a_speed() -> None:
    assert set(SPEEDS) == set(CARDS)
    for name, speed in SPEEDS.items():
        assert min(speed[:-1]) > 0 and 1 <= speed.tflops / speed.memory_tb_s < 1000, name
        assert 0 < speed.products < 1e12 * speed.tflops, name
    assert {name for name, speed in SPEEDS.items() if speed.capability < 80} == {
        "gtx1660", "t4", "p100", "v100-16", "v100-32"}


def test_the_drivers_names_are_known_and_no_other_card_is_taken_for_one() -> None:
    cards = {
        "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "Tesla T4": "t4", "NVIDIA L4": "l4",
        "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100 80GB PCIe": "a100-80", "NVIDIA RTX A6000": "a6000",
        "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 3060": "rtx3060", "NVIDIA B200": "b200",
        "NVIDIA GeForce RTX 4070 Ti": "rtx4070ti", "NVIDIA GeForce RTX 4060 Ti": "rtx4060ti-16",
        "Tesla V100-SXM2-16GB": "v100-16", "rtx4090": "rtx4090", "16GiB": None, "NVIDIA H100 PCIe": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None, "": None, "NVIDIA GeForce RTX 4060": "rtx4060",
        "NVIDIA GeForce RTX 4060 Laptop GPU": "rtx4060-laptop", "NVIDIA GeForce RTX 3060 Ti": "rtx3060ti",
        "NVIDIA GeForce RTX 5060": "rtx5060", "NVIDIA GeForce GTX 1660": "gtx1660",
        "NVIDIA GeForce RTX 3050": None, "NVIDIA GeForce RTX 3080": None,  # cards of two sizes have this name
    }
    assert {name: card_of(name) for name in cards} == cards


def test_only_the_models_own_dtype_takes_its_bytes() -> None:
    assert [cache_itemsize(name, 4) for name in CACHE_DTYPES] == [4, 1, 1, 1]
    assert (cache_text("auto"), cache_text("fp8_e5m2")) == ("16 bits", "8 bits (fp8_e5m2)")


def test_cards_and_cpus_that_cannot_hold_it_are_told_why() -> None:
    for capability, flashinfer, why in (
        ((7, 5), True, "from compute capability 8.0 on, and this card has 7.5"),
        ((8, 6), False, "FlashInfer only, which is not installed, and this card has 8.6"), ((8, 6), True, None),
        ((8, 9), False, None), ((9, 0), False, None), ((12, 0), False, None),
    ):
        found = why_not_on_card(capability, flashinfer)
        assert found is None if why is None else why in str(found)
    assert why_not_on_cpu("AVX512") is None
    assert "AVX-512 only" in str(why_not_on_cpu("AVX2")) and "DEFAULT" in str(why_not_on_cpu("DEFAULT"))
