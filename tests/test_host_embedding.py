"""The input embedding on the host: the same numbers, one matrix less on the device, and no silent no-op."""

from pathlib import Path

import pytest
import torch
from card import gpu
from small_models import FAMILIES, TINY, random_model

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.host_embedding import HostEmbedding, embed_on_host

IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_bit_for_bit_those_of_an_embedding_on_the_device(family: str, dtype: torch.dtype) -> None:
    model = random_model(family).to(dtype).requires_grad_(False)
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone(), False)
    expected, names = model(IDS).logits, list(model.state_dict())
    assert embed_on_host(model) == 384 * 32 * dtype.itemsize
    assert isinstance(model.get_input_embeddings(), HostEmbedding)
    assert torch.equal(model(IDS).logits, expected)
    assert list(model.state_dict()) == names


def test_a_tied_embedding_is_refused_since_nothing_would_be_saved() -> None:
    with pytest.raises(ValueError, match="ties its input embedding to its output head"):
        FastLanguageModel.from_pretrained(str(TINY), max_seq_length=64, load_in_4bit=False, offload_embedding=True)


def test_a_trained_embedding_is_refused() -> None:
    model = random_model("Llama")
    with pytest.raises(ValueError, match="only a frozen one can be on the host"):
        embed_on_host(model)


@pytest.mark.parametrize("engine", [True, "vllm"])
def test_vllm_and_an_embedding_on_the_host_are_refused_together(engine: bool | str) -> None:
    with pytest.raises(ValueError, match="vLLM looks the embedding up on the device"):
        FastLanguageModel.from_pretrained("tiny", fast_inference=engine, offload_embedding=True)


def test_a_loaded_model_samples_and_trains_with_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    random_model("Llama").save_pretrained(tmp_path)
    for file in TINY.glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    texts = []
    for offload in (False, True):
        model, _ = FastLanguageModel.from_pretrained(
            str(tmp_path), max_seq_length=64, load_in_4bit=False, offload_embedding=offload
        )
        adapted = FastLanguageModel.get_peft_model(model, r=4)
        out = adapted.fast_generate("Start", SamplingParams(temperature=0, max_tokens=8), adapted.current_lora())
        texts.append(out[0].outputs[0].token_ids)
        adapted(input_ids=IDS).logits.sum().backward()
        assert all(parameter.grad is not None for name, parameter in adapted.named_parameters() if "lora_B" in name)
    assert texts[0] == texts[1]


@gpu
def test_rows_arrive_on_the_card_and_the_matrix_stays_on_the_host() -> None:
    embedding = torch.nn.Embedding(100, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    on_host, ids = HostEmbedding(embedding), torch.randint(0, 100, (1, 50), device="cuda")
    assert torch.equal(on_host(ids), embedding(ids))
    assert on_host.weight.device.type == "cpu" and on_host.weight.is_pinned()
