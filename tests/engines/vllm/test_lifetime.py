"""vLLM's engine that dies, is closed, or does not start: nothing is lost, and the next one works."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from small_models import SPLIT
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Starcoder2Config, Starcoder2ForCausalLM
from vllm_models import CONTEXT, GREEDY, KV_BYTES, NEEDS_VLLM, PLAIN, SAME, distance, dying, engine_on, states

from lowmem_grpo.config.loading import EngineSettings, EngineUnavailableError
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.settings import kv_bytes_of
from lowmem_grpo.engines.vllm.shared_linear import LAYERS, BorrowedLinear, BorrowError
from lowmem_grpo.models.policy import Policy

pytestmark = [*NEEDS_VLLM, pytest.mark.usefixtures("all_is_collected")]


@pytest.mark.slow
def test_a_second_death_is_an_error_and_the_next_call_works(
    engine: VLLMEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(self: BorrowedLinear, x: Tensor) -> Tensor:
        raise RuntimeError("the device is gone for good")

    with monkeypatch.context() as patched:
        patched.setattr(BorrowedLinear, "forward", always)
        with pytest.raises(RuntimeError, match="gone for good"):
            engine.generate(prompts, GREEDY)
    assert len(engine.generate(prompts, GREEDY)) == 3


@pytest.mark.slow
def test_an_engine_that_dies_is_replaced_and_the_call_repeated_with_the_same_adapter_each_prompt_told_once(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, told = engine.llm, list[int]()
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.add_adapter("saved", peft.LoraConfig(r=4, target_modules=SPLIT))
    try:
        policy.model.set_adapter("saved")
        died = dying(monkeypatch, RuntimeError("the device is gone"))
        params = SamplingParams(n=2, max_tokens=40, seed=4, stop_token_ids=[*range(0, 320, 20)])
        saved = engine.generate(prompts, params, lambda prompt, rollouts: told.append(prompt))
        assert died and engine.llm is not llm and sorted(told) == [0, 1, 2]
        assert distance(policy, prompts, saved) < SAME
    finally:
        policy.model.set_adapter("default")
        policy.model.delete_adapter("saved")
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.model.named_parameters())
    assert distance(policy, prompts, engine.generate(prompts, GREEDY)) < SAME


def caches(model: Any) -> list[Tensor]:
    """The key-value caches of vLLM's model."""
    layers = [module.kv_cache for module in model.modules() if hasattr(module, "kv_cache")]
    return [tensor for layer in layers for tensor in (layer if isinstance(layer, list | tuple) else [layer])]


@pytest.mark.slow
def test_closing_frees_the_cache_and_the_model_and_a_closed_engine_says_so(
    engine: VLLMEngine, prompts: list[list[int]]
) -> None:
    (found,) = engine.llm.apply_model(caches)
    assert sum(tensor.untyped_storage().nbytes() for tensor in {t.data_ptr(): t for t in found}.values()) > KV_BYTES / 2
    gone = [weakref.ref(tensor) for tensor in found] + [weakref.ref(engine.llm), weakref.ref(engine.loan)]
    engine.loan, found = None, []  # type: ignore[assignment]
    engine.close()
    engine.close()
    gc.collect()
    assert [reference() for reference in gone if reference() is not None] == []
    assert not LAYERS
    assert engine.kv_bytes == 0
    assert not torch.distributed.is_initialized()
    uses: list[Callable[[], Any]] = [
        lambda: engine.generate(prompts, GREEDY), lambda: engine.generate([], GREEDY), engine.wake,
        lambda: engine.base_model().__enter__(),
    ]
    for use in uses:
        with pytest.raises(EngineUnavailableError, match="this engine was closed; make a new one"):
            use()
    engine.sleep()
    engine.on_policy_update(1)  # another model took over between a rollout and its update


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_an_engine_that_is_deleted_without_close_makes_room_for_the_next(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    lost: list[Any] = [VLLMEngine(policy, tokenizer, CONTEXT, PLAIN)]
    lost.append(lost)  # a cycle: it is unreachable before it is gone
    del lost
    with engine_on(policy) as engine:
        assert len(engine.generate(prompts, GREEDY)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_models_that_do_not_map_are_refused_by_name_and_a_later_engine_starts(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    shape = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2}
    backend = Starcoder2ForCausalLM(Starcoder2Config(**shape)).requires_grad_(False).eval()
    call, before = type(backend.model).__call__, states()
    with pytest.raises(BorrowError, match=r"this vLLM has no Starcoder2ForCausalLM of its own.*fast_inference"):
        VLLMEngine(Policy(backend), tokenizer, CONTEXT, PLAIN)
    assert type(backend.model).__call__ is call  # vLLM would have changed the trainer's own class
    assert states() == before

    class UnknownForCausalLM(type(policy.base)):  # type: ignore[misc]
        pass

    unknown = UnknownForCausalLM(policy.base.config).requires_grad_(False).eval()
    with pytest.raises(BorrowError, match=r"this vLLM has no UnknownForCausalLM\. Sample with fast_inference"):
        VLLMEngine(Policy(unknown), tokenizer, CONTEXT, PLAIN)
    assert not LAYERS
    assert not torch.distributed.is_initialized()
    with engine_on(policy) as engine:
        assert distance(policy, prompts, engine.generate(prompts, GREEDY)) < SAME


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_cache_too_small_for_one_sequence_is_refused_with_the_bytes_it_needs(
    policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    context, needed = 200, kv_bytes_of(policy, 256 + 128)
    with pytest.raises(ValueError, match=f"has {needed - 1:,} bytes; one sequence of max_seq_length={context} needs "
                                         f"{needed:,}"):
        VLLMEngine(policy, tokenizer, context, EngineSettings(kv_cache_bytes=needed - 1))
    with engine_on(policy, max_seq_length=context, kv_cache_bytes=needed) as engine:  # so much is enough, in turn
        groups = engine.generate([[5] * 100, [6] * 100], SamplingParams(max_tokens=context, ignore_eos=True, n=2))
        assert {len(rollout.completion_ids) for group in groups for rollout in group} == {context - 100}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_settings_that_vllm_refuses_are_an_error_that_says_so(
    policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match="max_num_seqs") as caught:
        VLLMEngine(policy, tokenizer, CONTEXT, EngineSettings(kv_cache_bytes=KV_BYTES, max_num_seqs=8192))
    assert caught.value.__notes__ == [
        "vLLM did not start with Qwen2ForCausalLM and these settings. Change them, or sample with "
        'fast_inference="transformers"'
    ]
    assert not LAYERS
