"""A model with LongRoPE computes a text with the same factors wherever it lies: alone, packed, sampled, exported."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY, random_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.pretrained import fix_frequencies
from lowmem_grpo.types import Rollout, RolloutGroup

ORIGINAL = 24  # tokens of a text in pretraining
LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL, "num_key_value_heads": 4,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
                        "long_factor": [1.5, 3.0, 6.0, 9.0], "original_max_position_embeddings": ORIGINAL},
}
PROMPTS = [list(range(5, 15)), list(range(20, 60))]  # on both sides of the original window


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    random_model("Phi3", **LONGROPE).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, context: int) -> FastPeftModel:
    bare, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=context, load_in_4bit=False, device="cpu")
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)


@torch.no_grad()
def plain(folder: Path, ids: list[int], behind: int) -> Tensor:
    """Log-probabilities of all tokens but the first by plain transformers, with `behind` more tokens behind the text.

    Attention is causal: what stands behind a text changes nothing but the factors, where the whole is long enough.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(torch.tensor([ids + [7] * behind])).logits[0, : len(ids) - 1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.no_grad()
def packed(model: FastPeftModel, texts: list[list[int]]) -> list[Tensor]:
    """The trainer's log-probabilities of all tokens but the first, of all texts in one micro-batch."""
    groups = [RolloutGroup({}, ids[:1], [Rollout(ids[1:], [0.0] * (len(ids) - 1), "stop")]) for ids in texts]
    (batch,) = pack(groups)
    values, targets = Policy(model.inner).logprobs(batch, 1.0)[0], batch.at_trained(batch.targets).tolist()
    starts = [targets.index(ids[1]) for ids in texts]  # no token stands in two texts
    return [values[start : start + len(ids) - 1] for start, ids in zip(starts, texts, strict=True)]


@pytest.mark.parametrize(("context", "behind"), [(ORIGINAL, 0), (ORIGINAL + 1, ORIGINAL), (128, ORIGINAL)])
def test_the_context_decides_and_not_the_longest_text_of_a_micro_batch(stored: Path, context: int, behind: int) -> None:
    """A context within the original window: the short factors, as transformers has them for a short text. Beyond it:
    the long ones, as transformers has them where a text is longer."""
    model, short = load(stored, context), PROMPTS[0]
    wanted = plain(stored, short, behind)
    alone = packed(model, [short])[0]
    assert (alone - wanted).abs().max() <= 1e-4
    if context == 128:
        beside, long = packed(model, [short, PROMPTS[1]])
        assert (beside - wanted).abs().max() <= 1e-4 and (long - plain(stored, PROMPTS[1], 0)).abs().max() <= 1e-4
    assert (plain(stored, short, 0) - plain(stored, short, ORIGINAL)).abs().max() > 0.01  # the factors matter


@pytest.mark.parametrize("context", [ORIGINAL, 128])
def test_sampler_and_trainer_agree_on_both_sides_of_the_window(stored: Path, context: int) -> None:
    model, prompts = load(stored, context), PROMPTS[: 1 if context == ORIGINAL else 2]
    groups = model.engine().generate(prompts, SamplingParams(n=4, max_tokens=12, seed=1, ignore_eos=True))
    for prompt, rollouts in zip(prompts, groups, strict=True):
        for rollout in rollouts:
            (batch,) = pack([RolloutGroup({}, prompt, [rollout])])
            with torch.no_grad():
                found = Policy(model.inner).logprobs(batch, 1.0)[0]
            assert (found - torch.tensor(rollout.rollout_logprobs)).abs().max() <= 1e-4


def test_a_warning_says_that_short_texts_get_long_factors_and_how_to_keep_the_short_ones(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(stored, ORIGINAL)
    assert "LongRoPE" not in caplog.text
    load(stored, 100)
    assert ("max_seq_length is 100, and the model was pretrained on texts of 24 tokens, so texts of every length use "
            "the long factors, as in vLLM. max_seq_length=24 keeps the short ones") in caplog.text


def test_a_loaded_model_is_merged_and_compared_with_the_same_factors(stored: Path, tmp_path: Path) -> None:
    load(stored, 128).save_pretrained_merged(str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_dynamic_rope_keeps_the_frequencies_of_its_context(stored: Path) -> None:
    """Within a context that is no longer than the model's, transformers never stretches them."""
    model = random_model("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    rotary: Any = model.model.rotary_emb
    fix_frequencies(model, 4096)
    wanted = torch.tensor([10000.0 ** (-2 * place / 8) for place in range(4)])
    assert rotary.rope_type == "default" and torch.allclose(rotary.inv_freq, wanted) and rotary.attention_scaling == 1


def test_layers_of_several_types_have_their_own_frequencies() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": ORIGINAL}
    model = random_model("Gemma3", rope_parameters={
        "full_attention": {"rope_type": "longrope", "rope_theta": 10000.0, **factors},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})
    rotary: Any = model.model.rotary_emb
    fix_frequencies(model, 4096)
    frequencies = torch.tensor([10000.0 ** (-2 * place / 8) for place in range(4)])
    assert rotary.rope_type == {"full_attention": "default", "sliding_attention": "default"}
    assert torch.allclose(rotary.full_attention_inv_freq, frequencies / 2)
    stretched = math.sqrt(1 + math.log(4096 / ORIGINAL) / math.log(ORIGINAL))
    assert rotary.full_attention_attention_scaling == pytest.approx(stretched)
