"""What a number of the key-value cache takes, and where it can be held in 8 bits."""


from lowmem_grpo.memory.cards import CACHE_DTYPES, cache_itemsize, cache_text, why_not_on_card, why_not_on_cpu


def test_only_the_models_own_dtype_takes_its_bytes() -> None:
    assert [cache_itemsize(name, 4) for name in CACHE_DTYPES] == [4, 1, 1, 1]
    assert cache_text("auto") == "16 bits"
    assert cache_text("fp8_e5m2") == "8 bits (fp8_e5m2)"


def test_cards_that_cannot_hold_it_are_told_why() -> None:
    for capability, flashinfer, why in (
        ((7, 5), True, "from compute capability 8.0 on, and this card has 7.5"),
        ((8, 6), False, "FlashInfer only, which is not installed, and this card has 8.6"), ((8, 6), True, None),
        ((8, 9), False, None), ((9, 0), False, None), ((12, 0), False, None),
    ):
        found = why_not_on_card(capability, flashinfer)
        assert found is None if why is None else why in str(found)


def test_a_cpu_without_avx_512_is_told_so() -> None:
    assert why_not_on_cpu("AVX512") is None
    assert "AVX-512 only" in str(why_not_on_cpu("AVX2")) and "DEFAULT" in str(why_not_on_cpu("DEFAULT"))
