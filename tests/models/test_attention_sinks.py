"""Attention with sinks: a softmax with one more column, forward and backward, in every form that attention takes."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import ROUNDING
from card import CPU, DEVICES
from gpt_oss import gpt_oss_config, gpt_oss_model
from packed_problem import batch_of, learned, learned_alone, outcome
from small_models import with_adapter
from tables import pairwise
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from lowmem_grpo.memory import cutting
from lowmem_grpo.memory.families import Attention
from lowmem_grpo.models import attention
from lowmem_grpo.models.attention_sinks import ATEN, attention_with_sinks
from lowmem_grpo.models.lean_modules import LeanAttention
from lowmem_grpo.models.packed_attention import PackedLayout, lower_right, packed_attention, window_mask
from lowmem_grpo.models.policy import Policy

WINDOW = 128  # of the published models: a window that is ignored shows beyond it only
SINKS = {"like scores": [0.5, -1.0, 2.0, 0.0], "above all scores": [30.0] * 4, "below all scores": [-30.0] * 4}
NEAR = ROUNDING | {torch.float64: 1e-13}  # the sum in another order, or two roundings, of the largest value
SPREAD = [(5, [9, 2]), (1, [1]), (150, [70, 30, 4]), (2, [140])]  # prompts and completions, within and beyond a window


def plain(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """Return the attention (S, H, Q, K), by a softmax over the scores and the sinks (H,); `seen` (..., Q, L) bool."""
    groups = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def made(rows: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device = CPU) -> list[Tensor]:
    """Return query (S, 4, Q, 16), key and value (S, 2, L, 16), as a model's layer has them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, tokens, heads, 16, generator=generator).to(device, dtype).transpose(1, 2)
            .detach().requires_grad_() for tokens, heads in ((queries, 4), (keys, 2), (keys, 2))]


def assert_exact(ours: dict[str, Tensor], reference: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """The error of every result may exceed that of plain torch in the same dtype by a rounding."""
    scale = max(values.abs().max() for values in truth.values())
    for what, values in truth.items():
        assert ours[what].dtype == reference[what].dtype and ours[what].shape == values.shape
        error, allowed = ((found[what].double() - values).abs().max() for found in (ours, reference))
        assert error <= allowed + NEAR[ours[what].dtype] * scale, what


FORMS: dict[str, tuple[int, int, Any]] = {  # queries, keys, and which keys each query sees; None: `is_causal`
    "causal": (37, 37, None), "one key": (1, 1, None), "one query": (1, 33, lambda like: None),
    "the last of all": (5, 33, lambda like: lower_right(5, 33, like)),
    "a window": (40, 48, lambda like: window_mask(40, 48, 9, like.device)),
    "rows with padding": (20, 20, lambda like: torch.stack([
        torch.ones(20, 20, dtype=torch.bool, device=like.device).tril().index_fill(1, torch.arange(
            start, device=like.device), False) | torch.eye(20, dtype=torch.bool, device=like.device)
        for start in (0, 7)])[:, None]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sinks", "dtype"), [
    *((sinks, torch.float64) for sinks in SINKS), ("like scores", torch.float32), ("like scores", torch.bfloat16),
    ("above all scores", torch.float16), ("below all scores", torch.float16), ("like scores", torch.float16),
])
def test_results_and_gradients_are_those_of_a_softmax_with_one_more_column(
    sinks: str, dtype: torch.dtype, form: str, device: torch.device
) -> None:
    if device.type == "cuda" and dtype == torch.float64:
        dtype = torch.float32
    queries, keys, mask_of = FORMS[form]
    heads, logits = made(2, queries, keys, dtype, device), torch.tensor(SINKS[sinks], device=device)
    mask = None if mask_of is None else mask_of(heads[0])
    grad = torch.randn(2, 4, queries, 16, generator=torch.Generator().manual_seed(2)).to(device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        seen = mask
    ours = outcome(lambda q, k, v: attention_with_sinks(
        q, k, v, logits.to(dtype)[:, None], mask, mask_of is None, None), heads, grad)
    reference = outcome(lambda q, k, v: plain(q, k, v, logits, seen), heads, grad)
    exact = [one.detach().double().requires_grad_() for one in heads]
    assert_exact(ours, reference, outcome(lambda q, k, v: plain(q, k, v, logits, seen), exact, grad))


def test_queries_and_keys_learn_from_a_sequence_of_one_token() -> None:
    """Its softmax would be 1 without the sink, so a factor without a gradient leaves them none."""
    heads, sinks = made(1, 1, 1, torch.float64), torch.tensor(SINKS["like scores"], dtype=torch.float64)
    value, grad = heads[2].repeat_interleave(2, 1), torch.ones(1, 4, 1, 16, dtype=torch.float64)
    found = outcome(lambda q, k, v: attention_with_sinks(q, k, v, sinks[:, None], None, True, None), heads, grad)
    score = (heads[0] * heads[1].repeat_interleave(2, 1)).sum(-1) / 4
    share = (score - sinks[:, None]).sigmoid()  # d share / d score = share (1 - share)
    slope = (share * (1 - share) * value.sum(-1))[..., None] / 4
    torch.testing.assert_close(found["result"], share[..., None] * value)
    torch.testing.assert_close(found["query"], slope * heads[1].repeat_interleave(2, 1))
    torch.testing.assert_close(found["key"], (slope * heads[0]).view(1, 2, 2, 1, 16).sum(2))


@pytest.mark.parametrize(*pairwise(window=(None, WINDOW), once=(False, True), groups=(1, 2), block=(1024, 64),
                                   dtype=(torch.float64, torch.bfloat16)))
def test_packed_sequences_compute_what_each_computes_alone(
    window: int | None, once: bool, groups: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "BLOCK", block)
    batch, sinks = batch_of(SPREAD), torch.tensor(SINKS["like scores"], dtype=dtype)
    layout = replace(PackedLayout.from_batch(batch, groups), once=once)
    heads = made(1, len(batch.input_ids), len(batch.input_ids), dtype)
    grad = torch.randn(1, len(batch.input_ids), 4, 16, generator=torch.Generator().manual_seed(2))

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = query.new_zeros(query.shape)
        lengths = batch.cu_seqlens.diff().tolist()
        for number, (row, length) in enumerate(zip(batch.sources.view(len(lengths), -1), lengths, strict=True)):
            tokens, seen = row[:length], window_mask(length, length, window or length, CPU)
            out = plain(*(part[:, :, tokens] for part in (query, key, value)), sinks, seen)
            first = batch.places[tokens] // batch.max_seqlen == number
            result = result.index_copy(2, tokens[first], out[:, :, first])
        return result.transpose(1, 2)

    ours = outcome(lambda q, k, v: packed_attention(q, k, v, layout, None, 0.0, window, sinks), heads, grad)
    exact = [one.detach().double().requires_grad_() for one in heads]
    assert_exact(ours, outcome(alone, heads, grad), outcome(alone, exact, grad))


@pytest.mark.parametrize("window", [None, WINDOW])
def test_it_is_the_attention_of_transformers_gpt_oss(window: int | None) -> None:
    config, length = gpt_oss_config(), 200
    torch.manual_seed(0)
    module = GptOssAttention(config, 1 if window is None else 0).double()
    nn.init.normal_(module.sinks.requires_grad_(False))
    assert module.sliding_window == window
    x, positions = torch.randn(2, length, 64, dtype=torch.float64), torch.arange(length)[None]
    angles = GptOssRotaryEmbedding(config)(x, positions)
    seen = window_mask(length, length, window or length, CPU)[None, None]
    found = []
    for name, mask in (("eager", torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf)),
                       (attention.NAME, seen)):
        config._attn_implementation = name
        given = x.clone().requires_grad_()
        out = module(given, angles, mask)[0]
        found.append((out, *torch.autograd.grad(out.square().sum(), given)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_layer_is_as_exact_as_transformers_own(dtype: torch.dtype) -> None:
    """With biases, YaRN's angles as transformers computes them, a window and the sinks, beyond the window."""
    config, length = gpt_oss_config(), 200
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    exact = GptOssAttention(config, 0).requires_grad_(False).eval()
    for parameter in exact.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    x, positions = torch.randn(2, length, 64).to(dtype), torch.arange(length)[None]
    seen = window_mask(length, length, WINDOW, CPU)[None, None]
    lean_config = gpt_oss_config()
    lean_config._attn_implementation = attention.NAME

    def run(dtype: torch.dtype, lean: bool = False) -> dict[str, Tensor]:
        module: Any = copy.deepcopy(exact).to(dtype)
        angles = GptOssRotaryEmbedding(config)(x.to(dtype), positions)
        if lean:
            module.config = lean_config
            module = LeanAttention(module, Attention("GptOssAttention", position="once"))
        mask = seen if lean else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        given = x.to(dtype, copy=True).requires_grad_()
        out = module(given, angles, mask)[0]
        return {"result": out.detach(), "input": torch.autograd.grad(out.float().square().sum(), given)[0]}

    truth, reference, ours = run(torch.float64), run(dtype), run(dtype, lean=True)
    for what in truth:
        assert_exact(*({what: values[what]} for values in (ours, reference, truth)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("places", "window"), [(48, None), (200, WINDOW), (200, 250)])
def test_a_new_token_attends_to_the_cache_as_to_its_sequence(
    places: int, window: int | None, dtype: torch.dtype
) -> None:
    """Left-padded rows of all lengths, with empty places of a graph's cache behind the newest, or without."""
    query, key, value = (one.detach() for one in made(3, 1, places, dtype))
    sinks = torch.tensor(SINKS["like scores"], dtype=dtype)
    starts = torch.tensor([0, places - 1, places // 2])
    seen = (torch.arange(places) >= starts[:, None])[:, None, None]
    inside = seen & window_mask(1, places, window or places, CPU)
    truth = plain(*(one.double() for one in (query, key, value, sinks)), inside).transpose(1, 2)
    reference = plain(query, key, value, sinks, inside).transpose(1, 2)
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    longer = [torch.cat([one, torch.randn(3, 2, 8, 16).to(dtype)], 2) for one in (key, value)]
    empty, newest = nn.functional.pad(added, (0, 8), value=-torch.inf), torch.tensor([places - 1])
    for keys, values, mask, at in ((key, value, seen, None), (key, value, added, None), (*longer, empty, newest)):
        found = attention.cached_attention(query, keys, values, mask, None, window, at, sinks)
        assert_exact({"result": found}, {"result": reference}, {"result": truth})
    if window is None:
        folded = query.view(3, 2, 2, 16)
        found = attention.in_parts(folded, key, value, added, None, 4, sinks.view(2, 2)).view(3, 1, 4, 16)
        assert_exact({"result": found}, {"result": reference}, {"result": truth})


def test_a_static_cache_may_have_empty_places_behind_the_prompt() -> None:
    query, key, value = (one.detach() for one in made(1, 6, 9, torch.float64))
    sinks = torch.tensor(SINKS["like scores"], dtype=torch.float64)
    found, _ = attention.attention(nn.Identity(), query, key, value, None, s_aux=sinks)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(found.transpose(1, 2), plain(query, key[:, :, :6], value[:, :, :6], sinks, seen))


def test_a_model_learns_from_packed_sequences_what_transformers_learns_from_each_alone() -> None:
    """Beyond the window, with YaRN, shared prompts, and heads in groups or together."""
    model = with_adapter(gpt_oss_model(experts=4, vocab_size=384)).double()
    batch, policy = batch_of([(140, [30, 9]), (3, [160])]), Policy(model)
    base: Any = model.get_base_model()
    base.set_experts_implementation("eager")  # the others compute in 16 and 32 bits only
    base.set_attn_implementation("eager")
    logprobs, grads = learned_alone(model, batch)
    base.set_attn_implementation(attention.NAME)
    for policy.head_groups in (1, 2):
        found, ours = learned(policy, batch)
        torch.testing.assert_close(found, logprobs.to(found), rtol=0, atol=1e-5)
        for name, grad in grads.items():
            assert grad.any() and (ours[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def test_dropout_and_sinks_that_are_trained_are_refused() -> None:
    query, key, value = made(1, 3, 3, torch.float32)
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"sinks and a dropout of 0.1 .* attention_dropout=0.0"):
        attention.attention(nn.Identity(), query, key, value, None, s_aux=sinks, dropout=0.1)
    with pytest.raises(ValueError, match=r"sinks require a gradient.* freeze them"):
        attention.attention(nn.Identity(), query, key, value, None, s_aux=sinks)


@pytest.mark.parametrize(("name", "arguments", "results"), [
    ("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal attn_mask scale", 2),
    ("_scaled_dot_product_flash_attention_for_cpu_backward",
     "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale", 3),
    ("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale", 9),
    ("_scaled_dot_product_flash_attention_backward",
     "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
     "philox_offset scale", 3),
    ("_scaled_dot_product_efficient_attention",
     "query key value attn_bias compute_log_sumexp dropout_p is_causal scale", 4),
    ("_scaled_dot_product_efficient_attention_backward",
     "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal "
     "scale", 4),
    ("_efficient_attention_forward",
     "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type "
     "compute_log_sumexp scale seqlen_k window_size", 6),
    ("_efficient_attention_backward",
     "grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k logsumexp dropout_p "
     "philox_seed philox_offset custom_mask_type bias_requires_grad scale num_splits_key window_size "
     "shared_storage_dqdkdv", 4),
])
def test_torchs_private_operations_take_and_give_what_they_did(name: str, arguments: str, results: int) -> None:
    schema = getattr(ATEN, name).default._schema
    assert [argument.name for argument in schema.arguments] == arguments.split()
    assert len(schema.returns) == results
