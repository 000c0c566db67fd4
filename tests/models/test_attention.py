"""Packed attention: every sequence computes what it would compute alone, and no (T, T) mask is made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from memory import LiveStorage
from packed_problem import batch_of
from small_models import random_model, with_adapter
from torch import Tensor

from lowmem_grpo.models import attention, packed_attention
from lowmem_grpo.models.packed_attention import PackedLayout
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import ImageToken, MicroBatch, Rollout, RolloutGroup

LENGTHS = [(5, [9]), (1, [1]), (30, [3]), (2, [24]), (11, [1])]  # of prompts and completions


def test_logprobs_are_those_of_transformers_logits(policy: Policy) -> None:
    batch = batch_of(LENGTHS)
    base = policy.model.get_base_model()
    with torch.no_grad():
        base.set_attn_implementation("eager")
        parts = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
        logits = torch.cat([policy.model(input_ids=part[None], use_cache=False).logits[0] for part in parts])
        base.set_attn_implementation(attention.NAME)
        ours, entropy = policy.logprobs(batch, temperature=0.7)
    log_softmax = (logits / 0.7).log_softmax(-1)[batch.loss_mask]
    expected = log_softmax.gather(-1, batch.targets[batch.loss_mask, None]).squeeze(-1)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, -(log_softmax.exp() * log_softmax).sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_packing_makes_no_square_mask(family: str) -> None:
    count, length = 64, 64
    policy = Policy(with_adapter(random_model(family)))
    batch = batch_of([(length - 9, [10])] * count)
    total = len(batch.input_ids)
    assert total == count * length
    with torch.no_grad(), LiveStorage() as storage:
        policy.hidden(batch)
    assert storage.largest < total * total / 4
    assert storage.peak < total * total / 2  # bytes: a boolean mask alone would take total * total


def test_models_whose_packed_sequences_would_see_each_other_are_refused_by_name() -> None:
    config = transformers.BloomConfig(vocab_size=384, hidden_size=32, n_layer=2, n_head=4)
    model: Any = transformers.BloomForCausalLM(config).requires_grad_(False)
    with pytest.raises(ValueError, match="BloomForCausalLM does not take its attention from transformers' registry"):
        Policy(model).hidden(batch_of([(3, [4]), (2, [5])]))


def test_layers_with_another_kind_of_attention_are_refused_after_the_first_pass() -> None:
    class Recurrent(torch.nn.Module):
        """A layer that mixes tokens without attention."""

        def forward(self, hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:
            return hidden_states.cumsum(1), None

    model = random_model("Llama").requires_grad_(False)
    model.model.layers[1].self_attn = Recurrent()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM computes attention .* registry in 1 of its 2 layers"):
        Policy(model).hidden(batch_of([(3, [4]), (2, [5])]))


def test_soft_capped_attention_is_refused_not_ignored() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="soft-capping"):
        attention.attention(torch.nn.Identity(), query, query, query, None, softcap=5.0)


def test_a_choice_of_keys_is_refused_not_ignored() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="attention with a choice of keys is not supported"):
        attention.attention(torch.nn.Identity(), query, query, query, None, indices=torch.zeros(1, 2, 1))


def test_keys_beside_those_of_the_packed_tokens_are_refused_not_left_out() -> None:
    query, layout = torch.zeros(1, 1, 9, 4), PackedLayout.from_batch(batch_of([(3, [4, 2])]))
    key = torch.zeros(1, 1, 11, 4)
    with pytest.raises(ValueError, match="attention of 9 tokens to 11 keys is not supported in training"):
        attention.attention(torch.nn.Identity(), query, key, key, None, packed=layout)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = random_model("Llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="output head is a Sequential"):
        Policy(with_adapter(model))


def test_a_sequence_alone_is_laid_out_without_a_copy() -> None:
    layout = packed_attention.PackedLayout.from_batch(batch_of([(3, [4])]))
    packed = torch.randn(1, 2, 6, 8)
    (side_by_side,) = layout.scatter(packed)
    assert side_by_side.data_ptr() == packed.data_ptr()
    assert torch.equal(layout.gather(side_by_side), packed.transpose(1, 2))
    assert layout.sources.tolist() == layout.places.tolist() == list(range(6))


@pytest.mark.parametrize(("capability", "dtype", "masked", "size", "shared"), [
    ((7, 5), torch.float16, False, 64, False), ((8, 0), torch.bfloat16, False, 64, True),
    ((9, 0), torch.float16, False, 256, True), ((8, 0), torch.float32, False, 64, False),
    ((8, 0), torch.bfloat16, True, 64, False), ((9, 0), torch.bfloat16, False, 264, False),
    ((12, 0), torch.float16, False, 512, False),
])
def test_no_card_is_given_shared_key_heads_that_its_fused_attention_refuses(
    capability: tuple[int, int], dtype: torch.dtype, masked: bool, size: int, shared: bool,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_attention.shares_key_heads(torch.device("cuda"), dtype, masked, size) is shared


@pytest.mark.parametrize("prompt", [0, 4])
def test_heads_of_512_reach_a_card_with_repeated_keys_and_keep_their_gradients(
    prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a card's fused kernels only the memory-efficient one takes heads above 256, and only with as many key heads as
    query heads; else torch computes the scores of all pairs of tokens."""
    rule, plain = packed_attention.shares_key_heads, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(packed_attention, "shares_key_heads",
                        lambda device, dtype, masked, size: rule(torch.device("cuda"), torch.bfloat16, masked, size))

    def on_card(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert query.shape[1] == key.shape[1] == value.shape[1]
        assert not options["enable_gqa"], "refused by the memory-efficient kernel"
        return plain(query, key, value, **options)

    layout = packed_attention.PackedLayout.from_batch(batch_of([(prompt + 1, [3, 2])]))
    tokens = len(layout.copies)
    heads = [torch.randn(1, count, tokens, 512, dtype=torch.float64, requires_grad=True) for count in (4, 2, 2)]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", on_card)
    found = packed_attention.packed_attention(*heads, layout, 0.1, 0.0, None)
    grads = torch.autograd.grad(found.square().sum(), heads)
    monkeypatch.undo()
    whole = formula(*heads, layout)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(whole.square().sum(), heads)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def formula(query: Tensor, key: Tensor, value: Tensor, layout: packed_attention.PackedLayout) -> Tensor:
    """softmax(q k^T) v of each sequence alone, with its prompt before it, in the packed order (1, T, H, K)."""
    result = torch.zeros_like(query).transpose(1, 2)
    lengths = [own + length for own, *others in layout.prompts for length in others]
    for length, padded in zip(lengths, layout.sources.view(-1, layout.width), strict=True):
        places = padded[:length]
        asked, keys, values = (part[0][:, places] for part in (query, key, value))
        scores = 0.1 * asked @ keys.repeat_interleave(2, 0).transpose(1, 2)
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        out = scores.softmax(-1) @ values.repeat_interleave(2, 0)
        result = result.index_copy(1, places, out.transpose(0, 1)[None])
    return result


def test_two_threads_in_attention_never_give_each_other_cudnns(tiny_policy: Policy) -> None:
    """It is off once for the process: with a choice for each call, the last of two threads restored the other's."""
    switched = []
    enable, batch = torch.backends.cuda.enable_cudnn_sdp, batch_of([(3, [9]), (5, [4])])
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: (switched.append(on), enable(on)))
        tiny_policy.hidden(batch)
    assert not switched and not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_backbone_may_read_features_of_images_and_three_rows_of_positions() -> None:
    policy = Policy(with_adapter(random_model("Llama")).double())
    features = dict(zip(("cat", "dog"), torch.eye(2, policy.head.weight.shape[1]).double(), strict=True))

    def of_batch(batch: MicroBatch) -> dict[str, Tensor]:
        embeds = policy.backbone.embed_tokens(batch.input_ids)
        embeds[[*batch.images]] = torch.stack([features[token.image] for token in batch.images.values()])
        positions = torch.stack([batch.offsets, batch.offsets // 2, 0 * batch.offsets])
        return {"inputs_embeds": embeds[None], "position_ids": positions[:, None]}

    policy.inputs = SimpleNamespace(of_batch=of_batch)  # type: ignore[assignment]
    policy.backbone.rotary_emb.register_forward_pre_hook(  # turns by the second row
        lambda module, args, named: (args, {"position_ids": named["position_ids"][1]}), with_kwargs=True)
    groups = [RolloutGroup({}, [5, *[ImageToken(9, name)] * 2, 6], [
        Rollout([20, end], [0.0] * 2, "stop") for end in (3, 4)]) for name in features]
    (together,) = pack(groups)
    alone = torch.cat([policy.hidden(batch)[batch.loss_mask] for batch in pack(groups, max_sequences=1)])
    torch.testing.assert_close(policy.hidden(together)[together.loss_mask], alone, rtol=0, atol=1e-12)
    assert (alone[:4] - alone[4:]).abs().max() > 1e-3  # equal ids behind other images


def test_repeated_key_heads_give_what_shared_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(with_adapter(random_model("Llama")))
    batch = batch_of([(3, [9]), (5, [4])])
    shared = policy.hidden(batch)
    monkeypatch.setattr(packed_attention, "shares_key_heads", lambda *arguments: False)
    torch.testing.assert_close(policy.hidden(batch), shared)


@pytest.mark.parametrize(("rows", "heads", "group", "size", "places", "parts"), [
    (2, 3, 5, 7, 24, 4), (1, 1, 1, 1, 2, 2), (3, 2, 4, 64, 256, 8), (1, 2, 8, 16, 40, 1),
])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_keys_read_in_parts_give_what_they_give_as_a_whole(
    rows: int, heads: int, group: int, size: int, places: int, parts: int, dtype: torch.dtype
) -> None:
    """Against the formula in float64. Whole parts are hidden, of one row all but the last place, and what lies in
    storage behind the places is NaN."""
    torch.manual_seed(0)
    storage = torch.full((2, rows, heads, places + 16, size), torch.nan, dtype=dtype)
    storage[:, :, :, :places] = torch.randn(2, rows, heads, places, size)
    key, value = storage[:, :, :, :places]
    real = torch.rand(rows, places) < 0.5
    real[:, : places // max(parts, 2)], real[0], real[:, -1] = False, False, True
    mask = torch.zeros(rows, 1, 1, places).masked_fill_(~real[:, None, None], -torch.inf).to(dtype)
    query = torch.randn(rows, heads, group, size).to(dtype)
    found = attention.in_parts(query, key, value, mask, None, parts)
    wide = [part.double() for part in (query, key, value, mask)]
    expected = ((wide[0] @ wide[1].mT) * size**-0.5 + wide[3]).softmax(-1) @ wide[2]
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert found.dtype == dtype and found.shape == whole.shape
    epsilon = 1e-12 if dtype == torch.float64 else 8e-3
    assert (found - expected).abs().max() <= (whole - expected).abs().max() + epsilon


def test_keys_are_read_in_parts_where_rows_and_heads_leave_multiprocessors_idle(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    cases = {(8, 8, 4096): 4, (2, 2, 4096): 8, (64, 8, 4096): 1, (2, 2, 1920): 1, (1, 2, 2080): 2, (1, 2, 2049): 1}
    for (rows, heads, places), parts in cases.items():
        key: Any = SimpleNamespace(shape=(rows, heads, places, 128), device=torch.device("cuda"), dtype=torch.bfloat16)
        assert attention.parts_of_keys(key) == parts, (rows, heads, places)
    assert attention.parts_of_keys(torch.zeros(1, 1, 4096, 2)) == 1, "the CPU computes as before"
