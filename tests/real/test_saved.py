"""An adapter of a published model in plain PEFT, and its merged model in plain transformers."""

from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from published_model import published_model
from safetensors.torch import load_file
from small_models import scatter
from torch import Tensor
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel

pytestmark = pytest.mark.slow
HALF_UNIT = 2**-8  # what rounding to bfloat16 may change, of a value
CANCELLED = 1e-7  # what float32 leaves of a sum of base and adapter whose terms cancel


class Saved(NamedTuple):
    """A trained model of ours, its adapter in plain PEFT in float64 over the same base weights, and a prompt."""

    model: Any
    twin: Any
    ids: Tensor
    found: Tensor  # log-probabilities of all tokens after each: ours, PEFT's in float32 and in float64
    theirs: Tensor
    truth: Tensor
    bare: Tensor  # of PEFT without the adapter, in float64


@pytest.fixture(scope="module", params=["load_in_16bit", "load_in_4bit"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder, adapter = published_model().folder, tmp_path_factory.mktemp("adapter")
    bare, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=256, dtype=torch.float32,
                                                        **{request.param: True})
    model = scatter(FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False), 0.01)
    model.save_lora(adapter)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.get_base_model().named_modules():
        if state := getattr(getattr(module, "weight", None), "quant_state", None):
            stored = base.get_submodule(name.removesuffix(".base_layer")).weight.data
            stored.copy_(dequantize_4bit(module.weight.data, state))
    twin: Any = peft.PeftModel.from_pretrained(base, adapter)
    chat = [{"role": "user", "content": "Why do leaves turn red in autumn?"}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True)])
    found, theirs = logprobs(model, ids), logprobs(twin, ids)
    truth = logprobs(twin.double(), ids)
    with twin.disable_adapter():
        return Saved(model, twin, ids, found, theirs, truth, logprobs(twin, ids))


@torch.no_grad()
def logprobs(model: Any, ids: Tensor) -> Tensor:
    made: Tensor = model.eval()(input_ids=ids).logits.log_softmax(-1)
    return made


def test_plain_peft_computes_with_a_saved_adapter_what_we_do(saved: Saved, record_property: Any) -> None:
    off, allowed = ((found - saved.truth).square().mean().sqrt() for found in (saved.found, saved.theirs))
    record_property("printed", f"saved adapter: log-probabilities off by {off:.2g} (root mean square), plain "
                    f"PEFT's by {allowed:.2g}")
    assert (saved.bare - saved.truth).abs().max() > 0.1  # the adapter matters
    assert off <= allowed + 5e-6


def test_the_merged_model_in_plain_transformers_is_base_plus_adapter_rounded_once(
    saved: Saved, tmp_path: Path, record_property: Any
) -> None:
    saved.model.save_pretrained_merged(tmp_path)
    merged, wanted = load_file(tmp_path / "model.safetensors"), saved.twin.merge_and_unload()
    for name, tensor in merged.items():
        exact = wanted.get_parameter(name)
        assert tensor.dtype == torch.bfloat16
        assert ((tensor.double() - exact).abs() <= HALF_UNIT * exact.abs() + CANCELLED).all(), name
    rounded = wanted.bfloat16().float()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    off, allowed = ((logprobs(model, saved.ids) - saved.truth).square().mean().sqrt() for model in (loaded, rounded))
    record_property("printed", f"merged model: log-probabilities off by {off:.2g}, PEFT's merged one by {allowed:.2g}")
    assert off <= 1.1 * allowed
