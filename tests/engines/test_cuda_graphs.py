"""Who cannot have CUDA graphs is told by name, and who asked for them is refused before a weight is loaded."""

import re
from pathlib import Path

import pytest
import transformers
from small_models import TINY

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.engines.cuda_graphs import check_graphs


@pytest.mark.parametrize(("engine", "device", "kind", "offloaded", "why"), [
    ("transformers", "cpu", "Llama", False, "the model is on the cpu; leave enforce_eager out, and token steps run"),
    ("transformers", "cuda:0", "Llama", True, "embedding is on the host; leave enforce_eager or offload_embedding out"),
    ("vllm", "cuda:0", "Qwen3Moe", False, "how many tokens each expert has is read on the host"),
    ("transformers", "cuda:0", "Qwen3_5Text", False, "gated delta nets"),
    ("transformers", "cuda:0", "Gemma4Text", False, "lend each other keys"),
    ("transformers", "cuda:0", "Qwen3Moe", False, "its experts"),
    *(("transformers", "cuda:0", kind, False, "") for kind in ("Llama", "Mistral", "Gemma3Text", "Phi3")),
    ("vllm", "cpu", "Llama", False, ""), ("vllm", "cuda:0", "Llama", False, ""),
])
def test_graphs_that_a_model_cannot_have_are_refused_with_the_reason_and_the_way_out(
    engine: str, device: str, kind: str, offloaded: bool, why: str
) -> None:
    config = getattr(transformers, f"{kind}Config")()
    for asked in (None, True, *([] if why else [False])):
        check_graphs(asked, engine, device, config, offloaded)
    if why:
        with pytest.raises(EngineUnavailableError, match=f"^enforce_eager is False, which asks for .*{re.escape(why)}"):
            check_graphs(False, engine, device, config, offloaded)


def test_graphs_on_a_cpu_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())  # and no weights
    with pytest.raises(EngineUnavailableError, match=r"enforce_eager is False.*the model is on the cpu; leave"):
        FastLanguageModel.from_pretrained(str(tmp_path), device="cpu", fast_inference=False, enforce_eager=False)
