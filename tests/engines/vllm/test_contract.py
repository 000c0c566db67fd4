"""Every name of vLLM that the engine relies on, in the form in which it is used: these fail first when vLLM changes."""

import ast
import importlib
import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_models import NEEDS_VLLM

import lowmem_grpo
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.installed import import_plugin
from lowmem_grpo.engines.vllm.requests import settings_of
from lowmem_grpo.engines.vllm.settings import GRAPHS, llm_options

pytestmark = NEEDS_VLLM

# module: {name: parameters that it is called with, or that a subclass is given; None for what is not called}
NAMES: dict[str, dict[str, list[str] | None]] = {
    "vllm": {"LLM": None, "ModelRegistry": None, "SamplingParams": None, "envs": None},
    "vllm.distributed.parallel_state": {"cleanup_dist_env_and_memory": []},
    "vllm.model_executor.layers.linear": {"LinearBase": None, "LinearMethodBase": None},
    "vllm.model_executor.layers.quantization": {"register_quantization_config": ["quantization"]},
    "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": [], "QuantizeMethodBase": None},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": None, "VocabParallelEmbedding": None},
    "vllm.model_executor.model_loader": {"register_model_loader": ["load_format"]},
    "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": ["load_config"]},
}
# module, class: {method: parameters}
METHODS: dict[tuple[str, str], dict[str, list[str]]] = {
    ("vllm.entrypoints.llm", "LLM"): {
        "generate": ["prompts", "sampling_params", "use_tqdm"], "reset_prefix_cache": [], "sleep": ["level"],
        "wake_up": [], "apply_model": ["func"], "enqueue": ["prompts", "sampling_params", "use_tqdm"],
        "collective_rpc": ["method", "kwargs"],
    },
    ("vllm.v1.engine.llm_engine", "LLMEngine"): {"has_unfinished_requests": [], "is_sleeping": [], "step": []},
    ("vllm.v1.engine.core_client", "InprocClient"): {"shutdown": []},
    ("vllm.config.model", "ModelConfig"): {"using_transformers_backend": []},
    ("vllm.model_executor.layers.quantization.base_config", "QuantizationConfig"): {
        "get_name": [], "get_supported_act_dtypes": [], "get_min_capability": [], "get_config_filenames": [],
        "from_config": ["config"], "get_quant_method": ["layer", "prefix"],
    },
    ("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase"): {
        "create_weights": ["layer"], "apply": ["layer"], "embedding": ["layer"],
        "tie_weights": ["layer", "embed_tokens"],
    },
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader"): {
        "download_model": ["model_config"], "load_weights": ["model", "model_config"],
        "load_model": ["vllm_config", "model_config", "prefix"],
    },
    ("vllm.model_executor.layers.linear", "LinearBase"): {
        "__init__": ["input_size", "output_size", "skip_bias_add", "quant_config", "prefix"],
    },
    ("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"): {
        "__init__": ["num_embeddings", "embedding_dim", "quant_config", "prefix"],
    },
}
# module, class: fields
FIELDS: dict[tuple[str, str], list[str]] = {
    ("vllm.engine.arg_utils", "EngineArgs"): [
        "model", "quantization", "load_format", "dtype", "model_impl", "max_model_len", "max_num_seqs",
        "kv_cache_memory_bytes", "enforce_eager", "compilation_config", "enable_sleep_mode", "enable_prefix_caching",
        "logprobs_mode", "generation_config", "disable_log_stats", "gpu_memory_utilization", "enable_chunked_prefill",
        "max_num_batched_tokens",
    ],
    ("vllm.sampling_params", "SamplingParams"): [
        "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos",
        "include_stop_str_in_output", "logprobs", "detokenize", "skip_special_tokens",
    ],
    ("vllm.outputs", "CompletionOutput"): ["token_ids", "logprobs", "finish_reason"],
    ("vllm.logprobs", "Logprob"): ["logprob"],
    ("vllm.config.compilation", "CompilationConfig"): ["mode", "cudagraph_mode"],
}
ABSTRACT = {"QuantizationConfig": "BorrowedConfig", "BaseModelLoader": "BorrowedLoader",
            "LinearMethodBase": "BorrowedLinearMethod", "QuantizeMethodBase": "BorrowedEmbeddingMethod"}


@pytest.fixture(scope="module")
def borrow() -> Any:
    """Our module that imports vLLM, once its environment is set."""
    return import_plugin()


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.usefixtures("borrow")
@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_they_are_imported_from(module: str) -> None:
    found = importlib.import_module(module)
    for name, expected in NAMES[module].items():
        assert hasattr(found, name), name
        assert expected is None or set(expected) <= parameters(getattr(found, name)), name


def test_every_name_that_is_imported_is_in_the_table_above() -> None:
    tree = ast.parse((Path(lowmem_grpo.__file__).parent / "engines" / "vllm" / "plugin.py").read_text())
    imported = {(node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                for alias in node.names if (node.module or "").startswith("vllm")}
    assert imported == {(module, name) for module, names in NAMES.items() for name in names}


@pytest.mark.usefixtures("borrow")
@pytest.mark.parametrize(("module", "owner"), METHODS)
def test_methods_take_what_they_are_given(module: str, owner: str) -> None:
    found = getattr(importlib.import_module(module), owner)
    for name, expected in METHODS[module, owner].items():
        assert hasattr(found, name), name
        assert set(expected) <= parameters(getattr(found, name)), name


@pytest.mark.usefixtures("borrow")
@pytest.mark.parametrize(("module", "owner"), FIELDS)
def test_settings_and_results_have_the_fields_that_are_used(module: str, owner: str) -> None:
    found = getattr(importlib.import_module(module), owner)
    have = set(getattr(found, "__struct_fields__", ())) or {field.name for field in fields(found)}
    assert set(FIELDS[module, owner]) <= have


def test_every_option_of_llm_is_in_the_table_above() -> None:
    card = SimpleNamespace(head=SimpleNamespace(weight=torch.empty(0)), device=torch.device("cpu"))
    used = llm_options(card, 512, "name", SimpleNamespace(cache=1 << 20, seqs=8), False, True)  # type: ignore[arg-type]
    (settings,) = settings_of(SamplingParams(), [5], [2], dict)
    table = {owner: set(names) for (_, owner), names in FIELDS.items()}
    assert set(used) | {"model", "gpu_memory_utilization"} == table["EngineArgs"]
    assert set(settings) == table["SamplingParams"]


@pytest.mark.parametrize("theirs", ABSTRACT)
def test_whatever_vllm_demands_of_our_classes_is_there(borrow: Any, theirs: str) -> None:
    ours = getattr(borrow, ABSTRACT[theirs])
    assert issubclass(ours, getattr(borrow, theirs))
    assert not ours.__abstractmethods__


def test_registering_gives_the_class_back_and_makes_it_known(borrow: Any) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader import get_model_loader

    assert get_quantization_config(borrow.NAME) is borrow.BorrowedConfig
    assert type(get_model_loader(LoadConfig(load_format=borrow.NAME))) is borrow.BorrowedLoader
    assert borrow.BorrowedConfig().packed_modules_mapping == {}


def test_the_engine_can_stay_in_this_process(borrow: Any) -> None:
    assert borrow.envs.VLLM_ENABLE_V1_MULTIPROCESSING is False


def test_every_family_that_we_name_has_a_model(borrow: Any) -> None:
    families = {f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma3", "Phi3")}
    assert families <= set(borrow.ModelRegistry.get_supported_archs())


@pytest.mark.usefixtures("borrow")
def test_graphs_are_asked_for_in_words_that_vllm_knows() -> None:
    from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode

    config = CompilationConfig(**GRAPHS)
    assert config.mode == CompilationMode.NONE
    assert config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


@pytest.mark.usefixtures("borrow")
def test_reset_prefix_cache_says_whether_it_did() -> None:
    from vllm import LLM

    assert inspect.signature(LLM.reset_prefix_cache).return_annotation in (bool, "bool")
