"""The input embedding on the host: the same numbers, one matrix less on the device, and no silent no-op."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from card import gpu
from families import GROUPS, loaded, saved_family
from packed_problem import batch_of, learned
from small_models import FAMILIES, TINY, random_model
from tables import every_row

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.offload.embedding import HostEmbedding, embed_on_host, knowing, on_host
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

IDS = torch.arange(3, 40)[None]


@every_row("family", FAMILIES)
def test_logits_are_bit_for_bit_those_of_an_embedding_on_the_device(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model(family).to(dtype).requires_grad_(False)
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone(), False)
        expected, names = model(IDS).logits, list(model.state_dict())
        assert embed_on_host(model) == 384 * 32 * dtype.itemsize
        assert isinstance(model.get_input_embeddings(), HostEmbedding)
        assert torch.equal(model(IDS).logits, expected), dtype
        assert list(model.state_dict()) == names


@pytest.mark.parametrize("engine", [True, "vllm"])
def test_an_embedding_on_the_host_and_vllm_are_refused(engine: bool | str) -> None:
    with pytest.raises(ValueError, match="vLLM looks the embedding up on the device"):
        FastLanguageModel.from_pretrained("tiny", max_seq_length=64, offload_embedding=True, fast_inference=engine)


def test_a_tied_embedding_stays_where_it_is_and_the_log_says_so_and_a_trained_one_is_refused(
    caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=64, offload_embedding=True, load_in_4bit=False)
    assert not isinstance(model.get_input_embeddings(), HostEmbedding)
    assert "offload_embedding=True changes nothing" in caplog.text
    with pytest.raises(ValueError, match="ties its input embedding to its output head"):
        embed_on_host(model)
    with pytest.raises(ValueError, match="only a frozen one can be on the host"):
        embed_on_host(random_model("Llama"))


def test_the_embedding_of_each_layers_own_numbers_is_on_the_host_too_and_changes_no_bit(tmp_path: Path) -> None:
    """Gemma 4: the input embedding is the head's and stays; the other, which is larger, moves."""
    folder, found = saved_family("gemma4_text", tmp_path), []
    for offload in (False, True):
        model, tokenizer = loaded(folder, offload_embedding=offload)
        assert [type(table) for table in on_host(model)] == [HostEmbedding] * offload
        batch, policy = batch_of(GROUPS), Policy(model)
        groups = TransformersEngine(policy, tokenizer, 64).generate(
            [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8))
        found.append((*learned(policy, batch), groups[0][0].completion_ids))
    (plain, grads, ids), (moved, moved_grads, moved_ids) = found
    assert torch.equal(plain, moved) and ids == moved_ids
    assert all(torch.equal(grads[name], moved_grads[name]) for name in grads)
    wrong = replace(batch, host_ids=torch.full_like(batch.input_ids, 3))
    assert not torch.equal(policy.logprobs(wrong, 1.0)[0], plain), "the ids of the host are not used"


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


def test_ids_that_were_packed_on_the_host_are_not_read_back_from_the_device_and_others_are_looked_up() -> None:
    embedding = HostEmbedding(torch.nn.Embedding(100, 8).requires_grad_(False))
    (batch,) = pack([RolloutGroup({}, [5, 6, 7], [Rollout([8, 9, 10], [0.0] * 3, "stop")])])
    moved = batch.to("meta")
    assert moved.host_ids is batch.host_ids and torch.equal(moved.host_ids, batch.input_ids)
    with knowing([embedding], moved.host_ids):  # ids on "meta" cannot be read at all
        assert embedding(moved.input_ids[None]).shape == (1, 5, 8)
        assert torch.equal(embedding(IDS), torch.nn.functional.embedding(IDS, embedding.weight)), "of another pass"
    assert embedding.known is None
    with pytest.raises(NotImplementedError):
        embedding(moved.input_ids[None])


@gpu
def test_rows_arrive_on_the_card_and_the_matrix_stays_on_the_host() -> None:
    embedding = torch.nn.Embedding(100, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    on_host, ids = HostEmbedding(embedding), torch.randint(0, 100, (1, 50), device="cuda")
    assert torch.equal(on_host(ids), embedding(ids))
    assert on_host.weight.device.type == "cpu" and not on_host.weight.is_pinned()


@gpu
def test_rows_of_one_pass_are_overwritten_by_those_of_the_next_before_they_are_copied() -> None:
    embedding = torch.nn.Embedding(1000, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    on_host, ids = HostEmbedding(embedding), [torch.randint(0, 1000, (4096,)) for _ in range(8)]
    on_card = [part.to("cuda") for part in ids]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = (busy @ busy).tanh()  # the copies wait behind it
    rows = []
    for host, card in zip(ids, on_card, strict=True):
        with knowing([on_host], host):
            rows.append(on_host(card))
    assert all(torch.equal(found, embedding(card)) for found, card in zip(rows, on_card, strict=True))
