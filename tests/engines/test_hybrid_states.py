"""States of gated delta nets in our engine: no padding gets into them, and rows that are done keep theirs."""

from typing import Any

import pytest
import torch
from episodes import Talk
from small_models import random_model, with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import differences

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import transformers_engine
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.models.delta_net import DeltaNet
from lowmem_grpo.models.policy import Policy

PROMPTS = [[5 + number % 90 for number in range(40)], [9] * 7, [100], [9, 4] * 35]


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """On a model whose padding has an embedding, as it has in a pretrained model whose padding is an end token."""
    model = with_adapter(random_model("Qwen3_5")).double()
    with torch.no_grad():
        model.get_input_embeddings().weight[0].normal_(generator=torch.Generator().manual_seed(0))
    return TransformersEngine(Policy(model), tokenizer, max_seq_length=256)


def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are taken for real ones."""
    rows = DeltaNet.rows
    monkeypatch.setattr(DeltaNet, "rows", lambda net, given, count, cache, real: rows(net, given, count, cache, None))


@pytest.mark.parametrize("masked", [True, False])
def test_padding_left_of_a_prompt_does_not_get_into_its_states(
    engine: TransformersEngine, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not masked:
        unmasked(monkeypatch)
    params = SamplingParams(n=3, max_tokens=24, seed=1, ignore_eos=True)
    groups = engine.generate(PROMPTS, params)
    monkeypatch.undo()
    worst = differences(engine.policy, PROMPTS, groups, 1.0).abs().max()
    assert worst <= 1e-4 if masked else worst > 1e-2


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.every(2)
def test_rows_that_are_done_keep_their_states_while_others_are_decoded(
    engine: TransformersEngine, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_engine, "COMPACT_BELOW", 0.0)  # they stay in the batch to its end
    if not masked:
        unmasked(monkeypatch)

    def played() -> list[float]:
        talk = Talk(PROMPTS, 3, lambda key, turn: [60 + key] * 5, lambda key, turn: 3 + 4 * key)
        engine.converse(talk, SamplingParams(temperature=1.3))
        return [value for key in range(4) for rollout in talk.drawn[key] for value in rollout.rollout_logprobs]

    found: Any = played()
    monkeypatch.undo()
    engine.kept.most = 0  # nothing is kept: all is computed again
    assert (found == pytest.approx(played(), abs=1e-6)) is masked
