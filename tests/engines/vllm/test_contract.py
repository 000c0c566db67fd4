"""What we rely on in vLLM and no CPU exercises (sleep, graphs, options, its server): it fails first if vLLM changes."""

import importlib
import inspect
import json
from dataclasses import fields, make_dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from vllm_models import NEEDS_VLLM

from lowmem_grpo.config.loading import EngineSettings
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Request
from lowmem_grpo.engines.served_teacher import ServedTeacher
from lowmem_grpo.engines.vllm.installed import import_plugin
from lowmem_grpo.engines.vllm.requests import CallSampling, as_vllm
from lowmem_grpo.engines.vllm.settings import GRAPHS, llm_options
from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.memory.cards import CACHE_DTYPES
from lowmem_grpo.types import ImageToken

pytestmark = NEEDS_VLLM

# module, class: {method: parameters}
METHODS: dict[tuple[str, str], dict[str, list[str]]] = {
    ("vllm.entrypoints.llm", "LLM"): {"sleep": ["level"], "wake_up": [], "collective_rpc": ["method", "kwargs"]},
    ("vllm.v1.engine.llm_engine", "LLMEngine"): {"is_sleeping": []},
    ("vllm.v1.core.sched.interface", "SchedulerInterface"): {"get_request_counts": []},
    ("vllm.model_executor.layers.quantization.base_config", "QuantizationConfig"): {
        "get_min_capability": [], "get_config_filenames": [], "from_config": ["config"],
    },
}

@pytest.fixture(scope="module")
def borrow() -> Any:
    """Our module that imports vLLM, once its environment is set."""
    return import_plugin()


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.usefixtures("borrow")
@pytest.mark.parametrize(("module", "owner"), METHODS)
def test_methods_take_what_they_are_given(module: str, owner: str) -> None:
    found = getattr(importlib.import_module(module), owner)
    for name, expected in METHODS[module, owner].items():
        assert hasattr(found, name), name
        assert set(expected) <= parameters(getattr(found, name)), name


@pytest.mark.usefixtures("borrow")
def test_vllm_has_every_option_and_sampling_setting_that_it_is_given() -> None:
    from vllm import SamplingParams as Theirs
    from vllm.engine.arg_utils import EngineArgs

    card = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"),
                           base=SimpleNamespace(config={"model_type": "qwen2"}))
    room: Any = SimpleNamespace(policy=card, max_seq_length=512, cache=1 << 20, seqs=8,
                                settings=EngineSettings(kv_cache_dtype="fp8"))
    used = llm_options(room, "name", False, True)
    assert {*used, "model", "gpu_memory_utilization"} <= {field.name for field in fields(EngineArgs)}
    sampling = CallSampling(SamplingParams(), 16, 9, [2], cast(Any, None), dict)
    (settings,) = sampling.settings([Request(0, [1], 5, 0)])
    assert settings.keys() <= set(Theirs.__struct_fields__)


@pytest.mark.usefixtures("borrow")
def test_graphs_are_asked_for_in_words_that_vllm_knows() -> None:
    from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode

    config = CompilationConfig(**GRAPHS)
    assert config.mode == CompilationMode.NONE
    assert config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


@pytest.mark.usefixtures("borrow")
def test_vllms_server_takes_and_says_what_a_served_teacher_asks_and_reads() -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
    from vllm.logprobs import Logprob

    asked = {"model": "m", "prompt": [5, 6], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
    params = CompletionRequest.model_validate(asked).to_sampling_params(1, {})
    assert (params.prompt_logprobs, params.temperature, params.max_tokens) == (1, 1.0, 1)
    places = [None, {6: Logprob(-2.5, 7, "a"), 9: Logprob(-0.5, 1, "b")}]
    choice = {"index": 0, "text": "", "prompt_logprobs": places}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    reply = json.loads(CompletionResponse(model="m", choices=[choice], usage=usage).model_dump_json())
    teacher = ServedTeacher("http://host", "m", top_k=1)
    scores = teacher.scores_of(reply["choices"][0]["prompt_logprobs"][1:], [6])
    assert [value.tolist() for value in vars(scores).values()] == [[-2.5], [[9]], [[-0.5]]]


@pytest.mark.usefixtures("borrow")
def test_reset_prefix_cache_says_whether_it_did() -> None:
    from vllm import LLM

    assert inspect.signature(LLM.reset_prefix_cache).return_annotation in (bool, "bool")


def test_vllm_has_each_form_of_the_cache_and_a_version_without_it_is_refused_by_name(
    borrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CACHE_DTYPES:
        borrow.check_cache_dtype(name)
    with pytest.raises(BorrowError, match=r"'fp6', which this vLLM does not have \(it has auto, .*fp8"):
        borrow.check_cache_dtype("fp6")
    assert borrow.names_in(Literal["auto", "fp8"] | str) == borrow.names_in(Literal["auto", "fp8"]) == ["auto", "fp8"]
    monkeypatch.setattr(borrow, "EngineArgs", make_dataclass("EngineArgs", ["model"]))
    with pytest.raises(BorrowError, match=r'Leave kv_cache_dtype at "auto", or install vLLM 0\.32'):
        borrow.check_cache_dtype("fp8")


def test_the_name_of_an_image_is_its_key_in_vllm_s_caches() -> None:
    cat, dog = (as_vllm([5, ImageToken(9, name), ImageToken(9, name)]) for name in ("cat", "dog"))
    assert (cat["multi_modal_uuids"], dog["multi_modal_uuids"]) == ({"image": ["cat"]}, {"image": ["dog"]})
    assert cat.keys() <= importlib.import_module("vllm.inputs").TokensPrompt.__annotations__.keys()
