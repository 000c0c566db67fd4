"""What `FastLanguageModel` returns: a model that can also sample, and save and load its adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModelForCausalLM
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams, as_sampling_params
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.engines.choice import EngineChoice, EngineKeeper
from lowmem_grpo.engines.prompt_inputs import Encoded, encode, encoded
from lowmem_grpo.engines.request_output import Answers, RequestOutput
from lowmem_grpo.export.saving import Saving
from lowmem_grpo.models.chat_ids import generate_inputs
from lowmem_grpo.models.fp8_linear import form_in_fp8
from lowmem_grpo.models.policy import Policy, end_ids
from lowmem_grpo.models.pretrained import generation_of, linears_in_4bit
from lowmem_grpo.models.rope_context import fix_frequencies
from lowmem_grpo.runs.adapter_file import check_for
from lowmem_grpo.runs.checkpoint_state import ADAPTER
from lowmem_grpo.runs.saved_adapter import BaseRecord, check_base

SAVED_ADAPTER = "fast_generate"  # the name that a saved adapter has while it samples
NO_LORA = "{} needs a model with LoRA: put it on with FastLanguageModel.get_peft_model first"


@dataclass(frozen=True)
class LoraRequest:
    """Which adapter `fast_generate` uses: a saved one by its folder, or the one in the model (path None)."""

    path: Path | None


@dataclass
class Loaded:
    """The parts that were loaded together with the weights."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    keeper: EngineKeeper  # of the rollout engine
    offload: bool = False  # activations to the host, set by get_peft_model
    mlp_tile: int | None = None  # tokens, as given to get_peft_model; None leaves them to a run's plan
    revision: str | None = None  # of the stored model
    vocabulary: int | None = None  # rows of its embedding, as it is stored
    stop_ids: tuple[int, ...] = ()  # that ended a completion in the last training, beside the usual end tokens


class VLLMEngineHandle:
    """`model.vllm_engine`, as Unsloth's programs use it: what the sampler holds beside the weights is freed, and made
    again. Training and sampling do both by themselves. The transformers engine holds nothing between two calls."""

    def __init__(self, keeper: EngineKeeper) -> None:
        self.keeper = keeper

    def sleep(self, level: int = 1) -> None:
        """Free vLLM's cache. The weights are the trainer's, so that every `level` means the same."""
        if self.keeper.kept is not None:
            self.keeper.kept.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Make the cache again, unless `tags` name the weights only, which never sleep."""
        if self.keeper.kept is not None and (tags is None or "kv_cache" in tags):
            self.keeper.kept.wake()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"model.vllm_engine has no {name!r} here, but sleep and wake_up; sample with "
                             "model.fast_generate(prompts, sampling_params)")


class FastGeneration(Saving):
    """`fast_generate` and the export calls, shared by the bare model and the one with an adapter."""

    loaded: Loaded

    def fast_generate(
        self, prompts: Any = None, sampling_params: Any = None, lora_request: Any = None, use_tqdm: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Sample completions; results have vLLM's shape: `out[0].outputs[0].text`.

        `prompts` is a string (already rendered), a list of chat messages, a list of token ids, what a tokenizer
        returned, vLLM's own dictionary of a prompt, or a list of any of these. `sampling_params` is a SamplingParams,
        ours or vLLM's own, or a list with one for each prompt. With `SamplingParams(logprobs=5)` each completion has
        vLLM's `logprobs`. As in vLLM, `lora_request=None` samples from the base model: pass `model.load_lora(folder)`
        for a saved adapter, or `model.current_lora()` for the one that is being trained. There is no bar, whatever
        `use_tqdm` says.
        """
        if others:
            raise TypeError(f"fast_generate got {', '.join(others)}; it takes prompts, sampling_params "
                            "and lora_request, as vLLM does. For transformers' arguments (input_ids, max_new_tokens, "
                            "streamer) call model.generate(...)")
        given = encoded(self.loaded.tokenizer, prompts)
        calls = calls_of(given, sampling_params, self.loaded.max_seq_length)
        engine, request = self.engine(), as_request(lora_request)
        policy = Policy(self.inner)
        outputs: list[RequestOutput] = []
        with adapter_for(self.inner, request):
            for params, part in calls:
                groups = engine.generate([ids for _, ids in part], params)
                answers = Answers(policy, self.loaded.tokenizer, params, request)
                outputs += [answers.of(len(outputs) + place, *prompt, group)
                            for place, (prompt, group) in enumerate(zip(part, groups, strict=True))]
        return outputs

    @property
    def inner(self) -> Any:
        """The transformers or PEFT model itself."""
        return self

    def engine(self, policy: Policy | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> Engine:
        """An engine over this model's own weights, decoding with the given tokenizer or the one loaded beside them.

        vLLM's is made at the first call, and given again afterwards.
        """
        return self.loaded.keeper.engine(policy or Policy(self.inner), tokenizer or self.loaded.tokenizer)

    @property
    def vllm_engine(self) -> VLLMEngineHandle:
        """Return the handle that frees the sampler's cache and makes it again, under Unsloth's names."""
        return VLLMEngineHandle(self.loaded.keeper)

    def close_engine(self) -> None:
        """Free what the rollout engine holds beside the weights. The next sampling makes a new engine."""
        self.loaded.keeper.close()

    @property
    def engine_choice(self) -> EngineChoice:
        """Which engine samples (`name`) and why (`why`)."""
        return self.loaded.keeper.choice

    def encode(self, prompt: Any) -> tuple[str, list[int]]:
        """(text, token ids) of a string, of chat messages or of token ids."""
        return encode(self.loaded.tokenizer, prompt)


class BareModel(FastGeneration, nn.Module):
    """A loaded model before `get_peft_model`. All other attributes are those of the transformers model."""

    def __init__(self, model: PreTrainedModel, loaded: Loaded) -> None:
        super().__init__()
        fix_frequencies(model, loaded.max_seq_length)
        self.transformers_model = model
        self.loaded = loaded

    @property
    def inner(self) -> PreTrainedModel:
        return self.transformers_model

    def engine(self, policy: Policy | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> Engine:
        if hasattr(self.transformers_model, "peft_config"):
            raise ValueError("this model has LoRA now: sample with the model that get_peft_model returned")
        return super().engine(policy, tokenizer)

    def save_lora(self, path: str | Path) -> None:
        raise ValueError(NO_LORA.format("save_lora"))

    def load_lora(self, path: str | Path, any_base: bool = False) -> LoraRequest:
        raise ValueError(NO_LORA.format("load_lora"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("transformers_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.transformers_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as transformers does; `input_ids` may also be the whole dictionary that a tokenizer returned."""
        args, kwargs = generate_inputs(args, kwargs)
        model: Any = self.transformers_model
        return model.generate(*args, **kwargs)


class FastPeftModel(FastGeneration, PeftModelForCausalLM):
    """A PEFT model that can sample with its live adapter. All methods of PEFT work."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as PEFT does; `input_ids` may also be the whole dictionary that a tokenizer returned."""
        args, kwargs = generate_inputs(args, kwargs)
        return super().generate(*args, **kwargs)

    def save_lora(self, path: str | Path) -> None:
        """Write the adapter to a folder, in PEFT format."""
        self.save_pretrained(str(path))

    def save_pretrained(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """Save as PEFT does, and beside it a record of the base model (an export needs to know how the weights were
        stored), the tokenizer, and the end tokens of sampling."""
        super().save_pretrained(save_directory, *args, **kwargs)
        base: Any = self.get_base_model()
        held, in_fp8 = next(linears_in_4bit(base), None), form_in_fp8(base)
        dtype = base.get_input_embeddings().weight.dtype if held is None else held.weight.quant_state.dtype
        BaseRecord(
            self.loaded.name, held is not None, str(dtype).removeprefix("torch."), self.loaded.revision, in_fp8
        ).write(Path(save_directory))
        if ADAPTER in (kwargs.get("selected_adapters") or [ADAPTER]):  # a server's clients have the base's
            self.loaded.tokenizer.save_pretrained(save_directory)
            ends = {*end_ids(base.generation_config, self.loaded.tokenizer), *self.loaded.stop_ids}
            GenerationConfig(eos_token_id=sorted(ends) or None).save_pretrained(save_directory)

    def take_up(self, folder: Path, tokenizer: Any) -> None:
        """Sample as in the training that left an adapter in `folder`: with its tokenizer (None: it left none) and with
        its end tokens, where they lie beside the adapter."""
        base: Any = self.get_base_model()
        self.loaded.tokenizer = tokenizer or self.loaded.tokenizer
        if (kept := generation_of(folder)) is not None:
            base.generation_config.eos_token_id = end_ids(kept, self.loaded.tokenizer)

    def load_lora(self, path: str | Path, any_base: bool = False) -> LoraRequest:
        """A saved adapter for `fast_generate(lora_request=...)`. The adapter in the model does not change.

        Raises CheckpointError for a folder that is no adapter, and AdapterError for one that is not whole, not finite,
        or made for other layers or another base model. `any_base` leaves out the comparison of the bases' names.
        """
        folder = Path(path)
        check_for(self, folder)
        if not any_base:
            check_base(folder, self.loaded.name, self.loaded.revision)
        return LoraRequest(folder)

    def current_lora(self) -> LoraRequest:
        """The adapter in the model, as it is when `fast_generate` is called."""
        return LoraRequest(None)


@contextmanager
def adapter_for(model: Any, request: LoraRequest | None) -> Iterator[None]:
    """Inside, the model computes with the requested adapter; afterwards it is as before."""
    if request is None:
        with Policy(model).base_model():
            yield
        return
    if not isinstance(model, PeftModelForCausalLM):
        raise ValueError(NO_LORA.format("lora_request"))
    if request.path is None:
        yield
    else:
        check_for(model, request.path)  # it may be a request of another model, or the file may have changed
        live, training = model.active_adapter, model.training
        try:
            model.load_adapter(str(request.path), SAVED_ADAPTER, is_trainable=False)  # also turns training mode off
            model.set_adapter(SAVED_ADAPTER)
            yield
        finally:
            model.set_adapter(live)
            if SAVED_ADAPTER in model.peft_config:
                model.delete_adapter(SAVED_ADAPTER)
            model.train(training)


def as_request(given: Any) -> LoraRequest | None:
    """Our request of an adapter, of vLLM's own, or of the path of a saved adapter."""
    if given is None or isinstance(given, LoraRequest):
        return given
    path = getattr(given, "lora_path", given)
    if not isinstance(path, str | Path):
        raise TypeError(f"lora_request is a {type(given).__name__}; pass model.load_lora(FOLDER), "
                        "model.current_lora(), or None for the base model")
    return LoraRequest(Path(path))


def calls_of(given: list[Encoded], sampling_params: Any, longest: int) -> list[tuple[SamplingParams, list[Encoded]]]:
    """The calls of the engine: one for all prompts, or one for each where each has its own parameters."""
    if not isinstance(sampling_params, list | tuple):
        return [(as_sampling_params(sampling_params, longest), given)]
    if len(sampling_params) != len(given):
        raise ValueError(f"sampling_params has {len(sampling_params)} entries and there are {len(given)} prompts; pass "
                         "one for each prompt, or one for all")
    return [(as_sampling_params(each, longest), [prompt])
            for each, prompt in zip(sampling_params, given, strict=True)]
