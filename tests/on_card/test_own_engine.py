"""Our own engine on a card: graphs that last, weights in 16 bits beside the codes, attention in parts."""

from typing import Any

import pytest
import torch
from card import CARD, gpu, half

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.models import attention

PROMPTS = [[(7 * place + index) % 300 + 5 for place in range(24 + 3 * index)] for index in range(8)]


def engine_of(**options: Any) -> Any:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=256, load_in_4bit=True, dtype=half(),
                                                device=str(CARD), fast_inference="transformers", **options)
    return FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False).engine()


def logprobs(groups: Any) -> list[float]:
    """Of the first token of each answer, which follows from its prompt alone."""
    return [rollout.rollout_logprobs[0] for group in groups for rollout in group]


@gpu
@pytest.mark.parametrize("form", ["4bit", "16bit"])
def test_a_second_call_records_nothing_and_draws_the_same(form: str) -> None:
    engine, params = engine_of(enforce_eager=False, sampling_weights=form), SamplingParams(n=4, max_tokens=96, seed=3)
    engine.sleeps = False
    first = engine.generate(PROMPTS, params)
    recorded = engine.step.recorded
    second = engine.generate(PROMPTS, params)
    assert recorded > 0 and engine.step.recorded == recorded and engine.step.record is not None
    third = engine.generate(PROMPTS, params)
    assert [one.completion_ids for group in second for one in group] == [
        one.completion_ids for group in third for one in group]
    assert logprobs(first) == pytest.approx(logprobs(second), abs=0.02)


@gpu
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_keys_read_in_parts_on_a_card_give_what_float64_gives(parts: int) -> None:
    torch.manual_seed(0)
    storage = torch.full((2, 2, 2, 4608, 128), torch.nan, dtype=half(), device=CARD)
    storage[:, :, :, :4096] = torch.randn(2, 2, 2, 4096, 128)
    key, value = storage[:, :, :, :4096]
    query = torch.randn(2, 2, 8, 128, device=CARD).to(half())
    mask = torch.zeros(2, 1, 1, 4096, device=CARD, dtype=half())
    mask[0, ..., : 4096 - 100] = -torch.inf  # whole parts
    found = attention.in_parts(query, key, value, mask, None, parts)
    wide = [part.double() for part in (query, key, value, mask)]
    expected = ((wide[0] @ wide[1].mT) * 128**-0.5 + wide[3]).softmax(-1) @ wide[2]
    assert (found - expected).abs().max() <= 0.01
