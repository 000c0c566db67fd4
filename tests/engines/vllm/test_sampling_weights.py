"""4-bit weights dequantized while sampling: the same values, the same addresses, freed in between, given up first."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory import LiveStorage
from torch import Tensor, nn
from vllm_models import (
    CONTEXT,
    MODULES,
    NEEDS_VLLM,
    PARTS,
    close_to,
    differences,
    engine_on,
    fuse,
    inputs,
    move_adapter,
    ours,
    policy_of,
    theirs,
)

from lowmem_grpo.config.loading import EngineSettings
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm import engine as vllm_engine
from lowmem_grpo.engines.vllm import process_state as vllm_pool
from lowmem_grpo.engines.vllm import settings as vllm_settings
from lowmem_grpo.engines.vllm import weight_sharing as loan
from lowmem_grpo.engines.vllm.process_state import SleepingRoom
from lowmem_grpo.engines.vllm.sampling_weights import new_buffer
from lowmem_grpo.engines.vllm.settings import Capacity, choose_weights, kv_bytes_of, wide_bytes
from lowmem_grpo.engines.vllm.shared_linear import LAYERS, BorrowError, Product
from lowmem_grpo.engines.vllm.weight_sharing import WeightSharing
from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_dequantize
from lowmem_grpo.kernels.frozen_weight import PlainWeight
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize
from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.models.fp8_layers import fp8_linears
from lowmem_grpo.models.policy import Policy

pytestmark = pytest.mark.usefixtures("no_layers_left")
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 60))]
PARAMS = SamplingParams(n=4, max_tokens=16, seed=1, ignore_eos=True)
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2048 bytes"


@pytest.fixture(params=[pytest.param((torch.float32, True), marks=pytest.mark.slow), (torch.bfloat16, True),
                        (torch.bfloat16, "fp8")], ids=str)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """A Llama in NF4 or FP8 whose q, k and v are one matrix, with an adapter that does something."""
    policy = policy_of("llama", *request.param, tmp_path, hidden_size=256, num_key_value_heads=4)
    fuse(policy.model, next(iter(MODULES)))
    move_adapter(policy, 0.05)
    return policy


def needs_vllm(test: Callable[..., None]) -> Callable[..., None]:
    return NEEDS_VLLM[0](NEEDS_VLLM[1](test))


def borrow(policy: Policy, room: Any) -> WeightSharing:
    """What an engine would borrow of the first layer."""
    borrowing = WeightSharing(policy.base, CPU, room=room)
    for name in MODULES:
        borrowing.linear(name, PARTS)
    borrowing.widen()
    return borrowing


def products() -> list[Product]:
    return [product for layer in MODULES for product in LAYERS[layer].products]


def dequantized(product: Product) -> torch.Tensor:
    """The values of a product's codes."""
    if isinstance(product.weight, FP8Weight):
        return fp8_dequantize(product.weight)
    assert isinstance(product.weight, NF4Weight)
    return nf4_dequantize(product.weight)


# values


@pytest.mark.parametrize("layer", MODULES)
def test_a_layer_gives_the_trainers_outputs_with_and_without_the_adapter(policy: Policy, layer: str) -> None:
    borrowing = borrow(policy, new_buffer)
    x = inputs(policy.model, layer)
    borrowing.use_policy(False)
    close_to(ours(layer, x), theirs(policy.model, layer, x))
    borrowing.use_policy(True)
    with policy.base_model():
        close_to(ours(layer, x), theirs(policy.model, layer, x))
    move_adapter(policy, 0.1, seed=3)
    borrowing.use_policy(False)
    close_to(ours(layer, x), theirs(policy.model, layer, x))


@pytest.mark.parametrize("ranks", [(5, 5, 5), (16, None, 3), (None, None, None)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_below_the_weights_leaves_the_base_part_its_bits_and_rows_contiguous(
    ranks: tuple[int | None, ...], biased: bool
) -> None:
    features, inside, generator = [24, 7, 8], 48, torch.Generator().manual_seed(1)

    def whole(*shape: int) -> Tensor:
        """Whole numbers, whose products are exact in any order."""
        return torch.randint(-4, 5, shape, generator=generator).float()

    present = [rank for rank in ranks if rank is not None]
    a, weight = whole(sum(present), inside), whole(sum(features), inside)
    b = [whole(size, rank or 0) for size, rank in zip(features, ranks, strict=True)]
    room = torch.cat([part.flatten() for part in b]) / 16
    b = [part.view_as(like) for part, like in zip(room.split([one.numel() for one in b]), b, strict=True)]
    rows = iter(a.split(present))
    loras = [None if rank is None else LoRA(next(rows), factor, 0.5) for rank, factor in zip(ranks, b, strict=True)]
    biases = [nn.Parameter(whole(size), requires_grad=False) if biased and size == 24 else None for size in features]
    product = Product(PlainWeight(weight), features, list(biases), loras, torch.float32)
    assert product.rows % 8 == len(weight) % 8
    product.wide = torch.full((product.rows, inside), torch.nan)
    product.wide[: len(weight)], product.wide[len(weight) : len(weight) + len(a)] = weight, a
    x = whole(5, inside)
    base = x.double() @ weight.double().T
    base[:, :24] += biases[0].double() if biases[0] is not None else 0.0
    added = [0.5 * (x.double() @ lora.a.double().T) @ lora.b.double().T if lora is not None else x.new_zeros(5, size)
             for lora, size in zip(loras, features, strict=True)]
    assert torch.equal(product.forward(x).double(), base + torch.cat(added, 1)) and product.forward(x).is_contiguous()
    room.zero_()
    assert torch.equal(product.forward(x).double(), base)


def test_few_rows_read_codes_also_where_weights_in_16_bits_are_there(policy: Policy, monkeypatch: Any) -> None:
    monkeypatch.setattr(loan, "few_rows", lambda base, device: 3)
    borrow(policy, new_buffer)
    for product in products():
        assert product.wide is not None
        x = torch.randn(4, product.weight.shape[1], dtype=product.wide.dtype)
        product.wide = torch.full_like(product.wide, torch.nan)  # in place, other passes would read it too
        assert product.forward(x[:3]).isfinite().all() and product.forward(x).isnan().all()


def test_one_buffer_holds_all_weights_of_2_bytes_each_and_is_freed_and_filled_again(policy: Policy) -> None:
    with LiveStorage() as made:
        borrowing = borrow(policy, new_buffer)
        assert borrowing.wide is not None
        before = made.live
        assert len({product.wide.untyped_storage().data_ptr() for product in products() if product.wide is not None}
                   ) == 1
        borrowing.drop_weights()
        assert before - made.live == borrowing.wide.nbytes
        numbers = sum(product.rows * product.weight.shape[1] for product in products())
        assert numbers <= sum(borrowing.wide.sizes) <= numbers + 128 * len(products())
        layer, x = "model.layers.0.self_attn.o_proj", inputs(policy.model, "model.layers.0.self_attn.o_proj")
        narrow = ours(layer, x)  # by the 4-bit kernels meanwhile
        borrowing.fill_weights()
        borrowing.fill_weights()
        close_to(ours(layer, x), narrow)
        del x, narrow
        assert before == made.live
        borrowing.close()
        assert before - made.live >= numbers * policy.dtype.itemsize


# where it lies on a card


class FakePool:
    """vLLM's memory pool as far as it is used: segments with tags; sleeping spoils what is in them."""

    def __init__(self, forced: str | None = None) -> None:
        self.tag, self.forced, self.segments = "", forced, dict[int, Any]()

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self.tag = self.forced or tag
        yield
        self.tag = ""

    def made(self, size: int, **options: Any) -> Tensor:
        buffer = torch.zeros(size, dtype=torch.uint8)
        if self.tag:
            self.segments[buffer.data_ptr()] = SimpleNamespace(tag=self.tag, handle=(0, size), buffer=buffer)
        return buffer

    def sleep(self) -> None:
        for segment in self.segments.values():
            segment.buffer.fill_(255)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakePool]:
    """Puts a pretend pool in the place of vLLM's."""
    def make(available: bool = True, **options: Any) -> FakePool:
        fake = FakePool(**options)
        allocator = SimpleNamespace(get_instance=lambda: SimpleNamespace(
            use_memory_pool=fake.use_memory_pool, pointer_to_data=fake.segments))
        module = SimpleNamespace(cumem_available=available, CuMemAllocator=allocator)
        monkeypatch.setattr(vllm_pool, "pool", lambda: module)
        monkeypatch.setattr(vllm_pool, "torch", SimpleNamespace(empty=fake.made, uint8=torch.uint8))
        return fake

    return make


def test_addresses_are_the_same_after_sleep_and_each_weight_is_the_dequantized_one_bit_for_bit(
    policy: Policy, pool: Callable[..., FakePool]
) -> None:
    fake = pool()
    borrowing = borrow(policy, SleepingRoom())
    counts = {layer: len(LAYERS[layer].products) for layer in MODULES}
    assert counts == {layer: 1 if number == 0 else len(MODULES[layer]) for number, layer in enumerate(MODULES)}
    places = [product.wide.data_ptr() for product in products() if product.wide is not None]
    assert len(places) == len(products())
    for _ in range(2):
        borrowing.drop_weights()
        fake.sleep()
        borrowing.fill_weights()
        assert places == [product.wide.data_ptr() for product in products() if product.wide is not None]
        for product in products():
            assert product.wide is not None
            assert torch.equal(product.wide[: product.weight.shape[0]], dequantized(product))
    (segment,) = fake.segments.values()
    assert segment.tag == "sampling_weights"  # not "weights", which sleep would copy to the host
    assert segment.handle[1] % (32 << 20) == 0  # a segment of its own: nothing of vLLM's lies behind the weights


@pytest.mark.parametrize(("options", "message"), [
    ({"forced": "weights"}, "gave no segment .* but 33,554,432 bytes tagged 'weights'"),
    ({"available": False}, "has no memory pool that sleep can free"),
])
def test_a_pool_that_is_not_as_it_was_read_is_refused_by_name(
    pool: Callable[..., FakePool], options: dict[str, Any], message: str
) -> None:
    pool(**options)
    with pytest.raises(BorrowError, match=message):
        SleepingRoom()(1000, torch.bfloat16, CPU)


def test_a_pool_that_cannot_be_used_leaves_the_4_bit_kernels_and_says_so(
    policy: Policy, pool: Callable[..., FakePool], caplog: pytest.LogCaptureFixture
) -> None:
    pool(forced="weights")
    with caplog.at_level(logging.WARNING):
        borrowing = borrow(policy, SleepingRoom())
    assert "sampling with 4-bit weights" in caplog.text
    assert borrowing.wide is None
    assert all(product.wide is None for product in products())


# when it is done


def on_card(policy: Policy) -> Any:
    """The same policy, as if it were on a card."""
    return SimpleNamespace(base=policy.base, dtype=policy.dtype, device=torch.device("cuda"))


def chosen(asked: str | None, policy: Any, kv_bytes: int, sequences: int = 8, given: bool = False) -> tuple[str, int]:
    """The choice for a cache of so many bytes, which are the user's own if `given`."""
    settings = EngineSettings(sampling_weights=asked, max_num_seqs=sequences, kv_cache_bytes=kv_bytes)
    capacity = Capacity(policy, CONTEXT, settings)
    capacity.settings = settings if given else replace(settings, kv_cache_bytes=None)
    return choose_weights(capacity, eager=True)


def test_without_being_asked_it_never_takes_room_that_the_cache_of_the_whole_batch_needs(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, card = wide_bytes(policy), on_card(policy)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card without a data sheet")
    wanted = 8 * kv_bytes_of(policy, CONTEXT + 128)
    assert chosen(None, card, size + wanted) == ("16bit", wanted)
    assert chosen(None, card, size + wanted - 1) == ("4bit", size + wanted - 1)
    assert chosen("4bit", card, 10 * size + wanted) == ("4bit", 10 * size + wanted)
    assert chosen("16bit", card, size + 5) == ("16bit", 5)
    assert chosen(None, policy, 1 << 40) == ("4bit", 1 << 40)  # on the CPU only if it is asked for
    assert chosen("16bit", policy, 1 << 20) == ("16bit", 1 << 20)
    for free, form in ((size + wanted, "16bit"), (size + wanted - 1, "4bit")):
        monkeypatch.setattr(vllm_settings, "free_share", lambda device, free=free: free)
        assert chosen(None, card, wanted, given=True) == (form, wanted)  # a cache that was given stays


def test_a_card_that_decodes_few_rows_slower_in_16_bits_does_so_without_being_asked(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, room = on_card(policy), 1 << 40
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    least = {"nf4": 64, "fp8": 33}
    monkeypatch.setattr(vllm_settings, "faster_in_16_bit", lambda *given: given[2] >= least[given[4]])
    assert chosen(None, card, room)[0] == "4bit"
    assert chosen(None, card, room, 33)[0] == ("16bit" if any(fp8_linears(policy.base)) else "4bit")
    assert chosen(None, card, room, 64)[0] == "16bit"
    assert chosen("16bit", card, room)[0] == "16bit"


def test_wide_bytes_are_those_that_the_buffer_takes(policy: Policy) -> None:
    borrowing = WeightSharing(policy.base, CPU, room=new_buffer)
    for layer in range(policy.base.config.num_hidden_layers):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            borrowing.linear(f"model.layers.{layer}.{name}", PARTS)
    borrowing.widen()
    assert borrowing.wide is not None and borrowing.wide.nbytes == wide_bytes(policy)


@pytest.mark.parametrize("fast", [False, True])
def test_the_loader_refuses_the_option_where_it_has_nothing_to_act_on(fast: bool) -> None:
    with pytest.raises(ValueError, match=r"sampling_weights is '16bit' and the model is not in 4 bits.*load_in_4bit"):
        FastLanguageModel.from_pretrained("tiny", sampling_weights="16bit", load_in_4bit=False, fast_inference=fast)


# in vLLM's engine


@pytest.fixture
def sampled(tmp_path: Path) -> Policy:
    policy = policy_of("shallow", torch.float32, True, tmp_path)
    move_adapter(policy, 0.05)
    return policy


@needs_vllm
def test_the_sampler_agrees_with_the_trainer_and_sleep_frees_what_the_next_call_makes_again(sampled: Policy) -> None:
    with engine_on(sampled, sampling_weights="16bit") as engine:
        wide = engine.loan.wide
        assert wide is not None
        assert wide.nbytes == wide_bytes(sampled)
        first = engine.generate(PROMPTS, PARAMS)
        assert differences(sampled, PROMPTS, first).abs().mean() < 1e-5
        engine.sleep()
        assert not wide.filled
        assert all(product.wide is None for product, _ in wide.pairs)
        move_adapter(sampled, 0.1, seed=3)
        engine.on_policy_update(1)
        second = engine.generate(PROMPTS, PARAMS)
        assert wide.filled
        assert differences(sampled, PROMPTS, second).abs().mean() < 1e-5
        with engine.base_model():
            base = engine.generate(PROMPTS, PARAMS)
    with sampled.base_model():
        assert differences(sampled, PROMPTS, base).abs().mean() < 1e-5


@needs_vllm
@pytest.mark.slow
def test_memory_that_runs_out_in_dequantizing_leaves_the_4_bit_kernels_and_the_run_goes_on(
    sampled: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    had = [new_buffer]  # memory has room the first time and not again

    def room(*arguments: Any) -> Tensor:
        if not had:
            raise RuntimeError(NO_MEMORY)
        return had.pop()(*arguments)

    monkeypatch.setattr(vllm_engine, "new_buffer", room)
    with engine_on(sampled, sampling_weights="16bit") as engine, caplog.at_level(logging.WARNING):
        assert engine.sampling_weights == "16bit"
        engine.sleep()
        groups = engine.generate(PROMPTS, PARAMS)
        assert differences(sampled, PROMPTS, groups).abs().mean() < 1e-5
        assert (engine.sampling_weights, engine.loan.wide) == ("4bit", None)
        assert engine.capacity.seqs == engine.capacity.wanted_seqs
        engine.sleep()
        engine.generate(PROMPTS, PARAMS)
    lines = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(lines) == 1
    assert "the 4-bit kernels serve for the rest of the run" in lines[0]
