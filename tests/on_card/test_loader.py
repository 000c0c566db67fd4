"""Loading on a card: bitsandbytes' own bits, no 16-bit copy of the model on the way, and a dtype that the card has."""

import gc
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from card import CARD, DEVICES, HALVES, gpu
from families import save_large
from safetensors.torch import load_file
from small_models import TINY

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize
from lowmem_grpo.models.card_check import compute_dtype, is_bfloat16_supported
from lowmem_grpo.models.pretrained import linears_in_4bit


def load(device: torch.device, name: str = "tiny", **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(name, max_seq_length=64, device=str(device), **options)[0]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_has_the_bits_that_bitsandbytes_gives_it_and_is_read_alike(
    device: torch.device, dtype: torch.dtype
) -> None:
    model, stored = load(device, dtype=dtype), load_file(TINY / "model.safetensors")
    linears = {id(module) for module in linears_in_4bit(model)}
    checked = 0
    for name, module in model.inner.named_modules():
        if id(module) not in linears:
            continue
        source = stored[f"{name}.weight"].to(device, dtype)
        packed, state = bitsandbytes.functional.quantize_4bit(
            source, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        assert torch.equal(module.weight.data.view(torch.uint8).flatten(), packed.view(torch.uint8).flatten()), name
        held = module.weight.quant_state
        assert torch.equal(held.absmax, state.absmax) and torch.equal(held.state2.absmax, state.state2.absmax), name
        expected = bitsandbytes.functional.dequantize_4bit(packed, state)
        found = nf4_dequantize(NF4Weight.from_bitsandbytes(module.weight))
        assert found.dtype == dtype and found.device == source.device
        # one rounding of the scale apart at most, where the card contracts a product and a sum into one step
        assert (found.double() - expected.double()).abs().max() <= 2**-7 * expected.abs().max(), name
        assert (found == expected).double().mean() > 0.99, name
        checked += 1
    assert checked == 7 * model.config.num_hidden_layers


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("device", DEVICES)
def test_16_bit_weights_are_the_stored_ones_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    model, stored = load(device, dtype=dtype, load_in_4bit=False), load_file(TINY / "model.safetensors")
    for name, parameter in model.inner.named_parameters():
        assert parameter.device == device and not parameter.requires_grad
        assert torch.equal(parameter.cpu(), stored[name].to(dtype)), name


@gpu
@pytest.mark.parametrize("four_bit", [True, False])
def test_loading_takes_little_more_of_the_card_than_the_model_does(four_bit: bool, tmp_path: Path) -> None:
    stored, largest = save_large(tmp_path)
    load(CARD)  # what is made once is made
    gc.collect()  # the models of earlier tests
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load(CARD, str(tmp_path), load_in_4bit=four_bit, dtype=compute_dtype(None))
    torch.cuda.synchronize()
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= held <= 1.1 * weights + 2**20
    # one matrix in 16 bits and what quantizing it makes; all of them would be much more
    assert peak - held <= 4 * largest < 0.25 * stored


@gpu
def test_the_default_dtype_is_one_that_the_card_computes_in() -> None:
    in_hardware = torch.cuda.get_device_capability() >= (8, 0)
    assert is_bfloat16_supported() == in_hardware
    assert compute_dtype(None) == (torch.bfloat16 if in_hardware else torch.float16)
    model = load(CARD)
    assert model.get_input_embeddings().weight.dtype == compute_dtype(None)
    assert model(input_ids=torch.tensor([[5, 6, 7]], device=CARD)).logits.isfinite().all()


@pytest.mark.parametrize(("in_hardware", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_card_that_only_emulates_bfloat16_gets_float16(
    in_hardware: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or in_hardware
    )
    assert is_bfloat16_supported() == in_hardware
    assert compute_dtype(None) == dtype
