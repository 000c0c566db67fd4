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


@pytest.mark.parametrize(("family", "shape", "message"), [
    ("Bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM does not take its attention from transformers' registry"),
    ("GptOss", {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                "intermediate_size": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
     "attention with sinks is not supported"),
])
def test_models_whose_packed_sequences_would_see_each_other_are_refused_by_name(
    family: str, shape: dict[str, Any], message: str
) -> None:
    config = getattr(transformers, f"{family}Config")(vocab_size=384, hidden_size=32, **shape)
    model = getattr(transformers, f"{family}ForCausalLM")(config).requires_grad_(False)
    with pytest.raises(ValueError, match=message):
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


@pytest.mark.parametrize(("capability", "dtype", "masked", "shared"), [
    ((7, 5), torch.float16, False, False), ((8, 0), torch.bfloat16, False, True), ((9, 0), torch.float16, False, True),
    ((8, 0), torch.float32, False, False), ((8, 0), torch.bfloat16, True, False),
])
def test_no_card_is_given_shared_key_heads_that_its_fused_attention_refuses(
    capability: tuple[int, int], dtype: torch.dtype, masked: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_attention.shares_key_heads(torch.device("cuda"), dtype, masked) is shared


@pytest.mark.parametrize("before", [True, False])
def test_attention_never_takes_cudnn_and_leaves_the_choice_of_others_alone(
    before: bool, tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, plain = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*arguments: Any, **options: Any) -> Tensor:
        chosen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    at_start = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        tiny_policy.hidden(batch_of([(3, [9]), (5, [4])]))
        assert torch.backends.cuda.cudnn_sdp_enabled() is before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(at_start)
    assert chosen
    assert not any(chosen)


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
