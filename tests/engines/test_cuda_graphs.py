"""Who cannot have CUDA graphs is told by name, and who asked for them is refused before a weight is loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import TINY, random_model

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.engines import cuda_graphs
from lowmem_grpo.engines.cuda_graphs import check_graphs, not_on_card, say_plain
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError


def test_a_card_that_records_nothing_is_named_and_one_that_records_is_not_refused(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(work: Any) -> Any:
        raise RuntimeError("CUDA driver version is insufficient\nmore")

    ran: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(cuda_graphs, "CudaGraph", refuses)
    assert not_on_card(torch.device("cpu")) == ("Tesla T4 (compute capability 7.5, CUDA 12.8) records no graph "
                                                "(CUDA driver version is insufficient)")
    monkeypatch.setattr(cuda_graphs, "CudaGraph", lambda work, beside=None: lambda: ran.append(work()))
    assert not_on_card(torch.device("cpu")) == "" and len(ran) == 1


def asked_for(engine: str, device: str, config: Any, offloaded: bool = False) -> str:
    """The error's words."""
    with pytest.raises(EngineUnavailableError) as caught:
        check_graphs(False, engine, device, config, offloaded)
    return str(caught.value)


def test_the_reason_and_the_way_out_are_told() -> None:
    dense, mixture = random_model("Llama").config, transformers.Qwen3MoeConfig()
    assert asked_for("transformers", "cpu", dense) == (
        "enforce_eager is False, which asks for token steps as CUDA graphs, and the model is on the cpu; leave "
        "enforce_eager out, and token steps run without graphs where they must")
    assert "embedding is on the host; leave enforce_eager or offload_embedding out" in asked_for(
        "transformers", "cuda:0", dense, True)
    assert "how many tokens each expert has is read on the host" in asked_for("vllm", "cuda:0", mixture)
    for asked, engine, device in ((None, "transformers", "cpu"), (True, "transformers", "cpu"), (False, "vllm", "cpu"),
                                  (False, "vllm", "cuda:0")):
        check_graphs(asked, engine, device, dense, False)


@pytest.mark.parametrize(("kind", "why"), [
    ("Qwen3_5TextConfig", "gated delta nets"), ("Gemma4TextConfig", "lend each other keys"),
    ("Qwen3MoeConfig", "its experts"), ("LlamaConfig", "this card was tried"), ("MistralConfig", "this card was tried"),
    ("Gemma3TextConfig", "this card was tried"), ("Phi3Config", "this card was tried"),
])
def test_families_are_refused_by_their_config_and_for_the_others_the_card_is_tried(
    kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "not_on_card", lambda device: "this card was tried")
    assert why in asked_for("transformers", "cuda:0", getattr(transformers, kind)())


def test_graphs_on_a_cpu_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())  # and no weights
    with pytest.raises(EngineUnavailableError, match=r"enforce_eager is False.*the model is on the cpu; leave"):
        FastLanguageModel.from_pretrained(str(tmp_path), device="cpu", fast_inference=False, enforce_eager=False)


def test_steps_without_graphs_on_a_card_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    say_plain.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            say_plain("its embedding is on the host")
    assert [one.getMessage() for one in caplog.records] == [
        "token steps run without CUDA graphs, several times slower where rows are few: its embedding is on the host. "
        "enforce_eager=True says that this is meant"]
    say_plain.cache_clear()
