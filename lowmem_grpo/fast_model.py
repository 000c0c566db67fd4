"""The models that `FastLanguageModel` returns, and the functions that put LoRA on them. The models can also sample."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from peft import LoraConfig, PeftModelForCausalLM, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem_grpo.config.beside_lora import plain_rows
from lowmem_grpo.data.prompt_inputs import calls_of, encoded
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.engines.choice import EngineChoice, EngineKeeper
from lowmem_grpo.engines.decoding import converse
from lowmem_grpo.engines.request_output import LoraRequest, OutputProcessor, RequestOutput, as_request
from lowmem_grpo.memory.layer_forms import FP8, NVFP4
from lowmem_grpo.memory.offload.activations import AUTO, checkpointing_mode, enable_checkpointing
from lowmem_grpo.models.chat_ids import generate_inputs
from lowmem_grpo.models.expert_lora import ExpertLoRA
from lowmem_grpo.models.experts import ExpertStack
from lowmem_grpo.models.export.model_card import ADAPTER as OF_ADAPTER
from lowmem_grpo.models.export.model_card import PastRuns, card_text
from lowmem_grpo.models.export.saving import LORA, Saving
from lowmem_grpo.models.fp8_layers import form_in_fp8
from lowmem_grpo.models.lean_modules import check_tile, make_lean
from lowmem_grpo.models.lora_layers import use_kernel_layers
from lowmem_grpo.models.lora_targets import check_config, check_targets
from lowmem_grpo.models.policy import Policy, end_ids, evaluating
from lowmem_grpo.models.pretrained import fix_frequencies, generation_of, tokenizer_beside
from lowmem_grpo.models.quantized_linear import form_of, linears_in_4bit
from lowmem_grpo.models.trained_set import TrainedWeight, adapter_values
from lowmem_grpo.models.vision import ImageInputs, store_of
from lowmem_grpo.models.vision_processor import with_saved_bounds
from lowmem_grpo.runs.adapter_file import PREFIX, beside_of, check_for, layers_of, read_all, refuse_variants
from lowmem_grpo.runs.checkpoint_state import ADAPTER
from lowmem_grpo.runs.expert_names import rename_in_file
from lowmem_grpo.runs.files import explained, write_card
from lowmem_grpo.runs.saved_adapter import AdapterError, BaseRecord, base_of_adapter, check_base
from lowmem_grpo.runs.state import TrainerState

logger = logging.getLogger(__name__)
SAVED_ADAPTER = "fast_generate"  # PEFT's name of a saved adapter that is loaded for sampling
NO_LORA = "{} needs a model with LoRA: put it on with FastLanguageModel.get_peft_model first"


@dataclass
class Loaded:
    """The tokenizer, engine and settings that were loaded together with the weights."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    keeper: EngineKeeper  # holds the rollout engine
    offload: bool = False  # True: layer inputs go to the host; set by get_peft_model
    auto: bool = False  # True: on a GPU, the memory plan exempts the last layers from checkpointing if there is room
    kept_layers: int = 0  # number of layers that the last trainer's plan exempted from checkpointing
    mlp_tile: int | None = None  # tokens, as given to get_peft_model; None: the run's memory plan decides
    revision: str | None = None  # the model's revision on the hub
    vocabulary: int | None = None  # rows of the stored embedding
    new_tokens: list[int] = field(default_factory=list)  # tokens whose rows in embedding and head were not stored
    sha256: str | None = None  # of the model's GGUF file, if it was loaded from one
    processor: Any = None  # of a model of images: its tokenizer and image processor
    stop_ids: tuple[int, ...] = ()  # end tokens of the last training besides the usual ones
    lora_arguments: dict[str, Any] | None = None  # those of get_peft_model, if it was called
    runs: list[tuple[Callable[[], Any], TrainerState]] = field(default_factory=list)  # facts and state of trainers
    slots: list[str] = field(default_factory=list)  # adapters beside the model's own, of a reward model or a critic
    tokens: int = field(init=False)  # of the tokenizer, when it was loaded

    def __post_init__(self) -> None:
        self.tokens = len(self.tokenizer or ())


class FastGeneration(Saving):
    """The `fast_generate` and export methods of the bare model and of the model with an adapter."""

    loaded: Loaded

    def fast_generate(self, prompts: Any = None, sampling_params: Any = None, lora_request: Any = None,
                      use_tqdm: bool = True, **others: Any) -> list[RequestOutput]:
        """Sample completions; results have vLLM's structure: `out[0].outputs[0].text`.

        `prompts` is a string (already rendered), a list of chat messages, a list of token ids, a tokenizer's output,
        vLLM's own dictionary of a prompt, or a list of any of these. A model of images reads those in the parts of
        messages, or in `multi_modal_data` of the dictionary. `sampling_params` is our SamplingParams or vLLM's, or a
        list with one for each prompt. With `SamplingParams(logprobs=5)` each completion has vLLM's `logprobs`. As in
        vLLM, `lora_request=None` samples from the base model: pass `model.load_lora(folder)` for a saved adapter, or
        `model.current_lora()` for the adapter that is being trained. No progress bar is shown, because `use_tqdm` is
        ignored.
        """
        if others:
            raise TypeError(f"fast_generate got {', '.join(others)}; it takes prompts, sampling_params "
                            "and lora_request, as vLLM does. For transformers' arguments (input_ids, max_new_tokens, "
                            "streamer) call model.generate(...)")
        pairs = encoded(self.loaded.tokenizer, prompts, self.inner.config.get_text_config().vocab_size,
                        self.image_reader())
        calls = calls_of(pairs, sampling_params, self.loaded.max_seq_length)
        engine, request = self.engine(), as_request(lora_request)
        policy = Policy(self.inner)
        outputs: list[RequestOutput] = []
        with adapter_for(self.inner, request):
            for params, part in calls:
                groups = engine.generate([ids for _, ids in part], params)
                answers = OutputProcessor(policy, self.loaded.tokenizer, params, request)
                outputs += [answers.request_output(len(outputs) + place, *prompt, group)
                            for place, (prompt, group) in enumerate(zip(part, groups, strict=True))]
        return outputs

    def stream_text(self, prompt: Any, params: Any, lora_request: Any, say: Callable[[str], None]) -> None:
        """Sample n completions of one prompt as `fast_generate` does, with our SamplingParams, and pass their text to
        `say` as it is sampled: one completion after the other, each with a line's end."""
        from lowmem_grpo.engines.text_stream import AnswersInOrder

        tokenizer = self.loaded.tokenizer
        ((_, ids),) = encoded(tokenizer, prompt, self.inner.config.get_text_config().vocab_size, self.image_reader())
        with adapter_for(self.inner, as_request(lora_request)):
            converse(self.engine(), AnswersInOrder(ids, params, tokenizer, say), replace(params, n=1), tokenizer)

    def image_reader(self) -> Any:
        """Return a reader of images for this model's prompts; None for a model of text."""
        if self.loaded.processor is None:
            return None
        from lowmem_grpo.data.images import ImageReader  # imports PIL

        return ImageReader(self.loaded.processor, store_of(Policy(self.inner).base))

    @property
    def inner(self) -> Any:
        """The underlying model of transformers or PEFT."""
        return self

    def engine(self, policy: Policy | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> Engine:
        """Return an engine over this model's own weights, which decodes with `tokenizer` or the model's own.

        A vLLM engine is created at the first call and reused afterwards.
        """
        self.check_writes("sampled from")
        return self.loaded.keeper.engine(policy or Policy(self.inner), tokenizer or self.loaded.tokenizer)

    @property
    def vllm_engine(self) -> EngineKeeper:
        """The object that holds the engine, and can put it to sleep and wake it. Unsloth has the same property."""
        return self.loaded.keeper

    def close_engine(self) -> None:
        """Free the memory that the engine holds besides the weights. The next sampling creates a new engine."""
        self.loaded.keeper.close()

    @property
    def engine_choice(self) -> EngineChoice:
        """The engine that samples (`name`) and the reason for it (`why`)."""
        return self.loaded.keeper.choice

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None,
                                mean_resizing: bool = True) -> nn.Module:
        """Resize embedding and head, and return the embedding, as transformers does; new rows are the mean of the old
        ones. `add_new_tokens` also adds the tokens. Raises ValueError for what is not supported."""
        from lowmem_grpo.models.new_tokens import resize_to

        if not mean_resizing:
            raise ValueError("mean_resizing=False: new rows are the mean of the old ones here; leave it out, and write "
                             "other values into model.get_input_embeddings().weight afterwards")
        return resize_to(self, new_num_tokens, pad_to_multiple_of)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as transformers or PEFT does, in evaluation mode: in train mode, checkpointed layers would drop the
        cache. `input_ids` may also be the dictionary that a tokenizer returned."""
        args, kwargs = generate_inputs(args, kwargs)
        model: Any = super() if self.inner is self else self.inner
        reader = Policy(self.inner).inputs if self.loaded.processor is not None else None
        with evaluating(self.inner), reader.tower_at_hand() if isinstance(reader, ImageInputs) else nullcontext():
            return model.generate(*args, **kwargs)


class BareModel(FastGeneration, nn.Module):
    """A loaded model before `get_peft_model`. Attributes that it lacks are read from the transformers model."""

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


class FastPeftModel(FastGeneration, PeftModelForCausalLM):
    """A PEFT model that can sample with the adapter that is being trained. All methods of PEFT work."""

    def save_lora(self, path: str | Path) -> None:
        """Write the adapter to a folder, in PEFT format."""
        self.save_pretrained(path)

    def save_pretrained(self, save_directory: str | Path, *args: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as PEFT does, and also write the tokenizer, the end tokens of sampling, and a record of the base model.
        An export reads from this record how the base's weights were stored."""
        if push_to_hub:
            raise ValueError("push_to_hub=True is not supported: call push_to_hub, which uploads the adapter, instead")
        folder = folder_at("save_directory", save_directory)
        with explained(folder):
            self.write_adapter(str(folder), *args, **kwargs)

    def write_adapter(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """Write what `save_pretrained` writes."""
        if len(args) < 3:  # PEFT's "auto" asks the hub about the vocabulary, and adds a resized base's matrices
            kwargs.setdefault("save_embedding_layers", False)
        if self.loaded.slots and len(args) < 2:
            own = [name for name in self.peft_config if name not in self.loaded.slots]
            kwargs["selected_adapters"] = kwargs.get("selected_adapters") or own
        super().save_pretrained(save_directory, *args, **kwargs)
        self.rename_experts(save_directory, kwargs.get("selected_adapters") or [*self.peft_config])
        self.base_record().write(Path(save_directory))
        if self.loaded.new_tokens:
            from lowmem_grpo.models.new_tokens import save_rows

            save_rows(self, Path(save_directory))
        if ADAPTER in (kwargs.get("selected_adapters") or [ADAPTER]):  # a server's clients use the base's tokenizer
            (self.loaded.processor or self.loaded.tokenizer).save_pretrained(save_directory)
            base: Any = self.get_base_model()
            ends = {*end_ids(base.generation_config, self.loaded.tokenizer), *self.loaded.stop_ids}
            GenerationConfig(eos_token_id=sorted(ends) or None).save_pretrained(save_directory)

    def rename_experts(self, save_directory: str, adapters: list[str]) -> None:
        """Let the files that were saved name LoRA on experts as PEFT does on transformers' own model."""
        modules = {path.removeprefix(PREFIX): module for path, module in self.named_modules()}
        stacks = [path.removesuffix(".base_layer") for path, module in modules.items()
                  if isinstance(module, ExpertStack)]
        for adapter in adapters:
            layers = [path for path, module in modules.items() if adapter in getattr(module, "lora_A", ())]
            if {*layers}.intersection(stacks):
                rename_in_file(Path(save_directory) / ("" if adapter == ADAPTER else adapter), layers, stacks)

    def base_record(self) -> BaseRecord:
        """Return which base model the adapter has, and how its weights are held."""
        base: Any = self.get_base_model()
        held, in_fp8 = next(linears_in_4bit(base), None), form_of(base) == FP8 and form_in_fp8(base)
        embedding = base.get_input_embeddings()
        weight = getattr(embedding, "original_module", embedding).weight
        dtype = weight.dtype if held is None else held.weight.quant_state.dtype
        rows = None if len(weight) == (self.loaded.vocabulary or len(weight)) else len(weight)
        four_bit = held is not None or form_of(base) == NVFP4
        return BaseRecord(self.loaded.name, four_bit, str(dtype).removeprefix("torch."), self.loaded.revision, in_fp8,
                          self.loaded.sha256, rows)

    def card(self, kind: str = OF_ADAPTER, data: str | None = None, **more: Any) -> str:
        """Return the text of a README.md for the active adapter, or for what it is merged into."""
        base: Any = self.get_base_model()
        history = PastRuns.of_runs(((facts(), state.log_history) for facts, state in self.loaded.runs), data)
        history.tags.extend(base.model_tags or ())  # as given to the model's `add_model_tags`
        shapes = {name: value.shape for name, value in self.named_parameters() if f".{self.active_adapter}" in name}
        lora = self.peft_config[self.active_adapter].to_dict()
        return card_text(kind, self.base_record(), lora, history, shapes=shapes, **more)

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Write README.md, as PEFT's method of this name does whenever it saves. One of another hand stays."""
        write_card(Path(output_dir), self.card())

    def push_to_hub(self, repo_id: str, token: str | bool | None = None, private: bool | None = None,
                    commit_message: str | None = None, api: Any = None, **options: Any) -> str:
        """Upload what `save_lora` writes, as `push_to_hub_merged` does with save_method="lora"."""
        return self.push_to_hub_merged(repo_id, None, LORA, token, private, commit_message, api, **options)

    def take_up(self, folder: Path, tokenizer: Any) -> None:
        """Use the end tokens saved with an adapter in `folder`, if any, and its `tokenizer` (None: none was saved)."""
        base: Any = self.get_base_model()
        self.loaded.tokenizer = tokenizer or self.loaded.tokenizer
        if self.loaded.processor is not None:
            self.loaded.processor.tokenizer, self.loaded.tokenizer.of_processor = self.loaded.tokenizer, True
        if (kept := generation_of(folder)) is not None:
            base.generation_config.eos_token_id = end_ids(kept, self.loaded.tokenizer)

    def load_lora(self, path: str | Path, any_base: bool = False) -> LoraRequest:
        """Return a request for a saved adapter, for `fast_generate(lora_request=...)`; keep the model's own adapter.

        Raises CheckpointError for a folder without an adapter, and AdapterError for one that is incomplete, not finite,
        or made for other layers or another base model. `any_base` skips the comparison of the base models' names.
        """
        folder = folder_at("path", path, ": what save_lora wrote, or a checkpoint")
        check_for(self, folder)
        if not any_base:
            check_base(folder, self.loaded.name, self.loaded.revision, self.loaded.sha256, "load_lora")
        return LoraRequest(folder)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Merge the adapter in place, as PEFT does; ValueError, and nothing merged, if LoRA is on experts."""
        self.to_merge().merge_adapter(*args, **kwargs)

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return the base model with the adapter merged, as PEFT does; ValueError as in `merge_adapter`."""
        return self.to_merge().merge_and_unload(*args, **kwargs)

    def to_merge(self) -> Any:
        """Return PEFT's model of LoRA layers; ValueError if it has LoRA on experts."""
        for module in self.modules():
            if isinstance(module, ExpertLoRA):
                module.merge()
        return self.base_model

    def unload(self) -> Any:
        """Return the base model without the adapter, as PEFT does; rows that were trained have the base's values."""
        tuner: Any = self.base_model
        for module in tuner.modules():
            if hasattr(module, "trainable_tokens_delta"):
                module.restore()
        return tuner.unload()

    def current_lora(self) -> LoraRequest:
        """Return a request for the model's adapter, with the weights that it has when `fast_generate` is called."""
        return LoraRequest(None)


def folder_at(name: str, path: Any, kind: str = "") -> Path:
    """Return the absolute path of the folder that the user named; ValueError for a value that names no folder."""
    if not isinstance(path, str | os.PathLike) or not str(path).strip():
        raise ValueError(f"{name} is {path!r}; it must be a folder's name{kind}")
    return Path(path).expanduser().absolute()


@contextmanager
def adapter_for(model: Any, request: LoraRequest | None) -> Iterator[None]:
    """Compute with the requested adapter (None: the base model) inside the context, then with the former one again."""
    if request is None:
        with Policy(model).base_model():
            yield
    elif not isinstance(model, PeftModelForCausalLM):
        raise ValueError(NO_LORA.format("lora_request"))
    elif request.path is None:
        yield
    else:
        config, tensors = check_for(model, request.path)  # of another model, perhaps, or of a file that has changed
        beside = beside_of(model, config)
        config.modules_to_save = config.trainable_token_indices = None
        config.ensure_weight_tying, config.init_lora_weights, config.inference_mode = False, True, True
        live = model.active_adapter
        with evaluating(model), ExitStack() as stack:
            try:
                model.add_adapter(SAVED_ADAPTER, config)
                for name, parameter in adapter_values(model, SAVED_ADAPTER).items():
                    saved = TrainedWeight(name, parameter, None).saved_name
                    parameter.data.copy_(tensors[saved if saved in tensors else saved.removesuffix(".weight")])
                model.eval()
                model.set_adapter(SAVED_ADAPTER)
                for name, (matrix, rows) in beside.items():
                    stack.enter_context(holding(matrix.data, rows, tensors[name]))
                yield
            finally:
                stack.close()
                model.set_adapter(live)
                if SAVED_ADAPTER in model.peft_config:
                    model.delete_adapter(SAVED_ADAPTER)


@contextmanager
def holding(matrix: Tensor, rows: list[int] | None, values: Tensor) -> Iterator[None]:
    """Inside the context, a matrix has these values in its rows (None: in all), in place, as engines know its address;
    afterwards its own again."""
    places = slice(None) if rows is None else rows
    own = matrix[places].clone()
    matrix[places] = values.to(matrix)
    try:
        yield
    finally:
        matrix[places] = own


def check_bare(model: Any) -> None:
    """Raise TypeError unless from_pretrained returned this model, and ValueError if the model already has LoRA."""
    if not isinstance(model, BareModel | FastPeftModel):
        raise TypeError(f"get_peft_model takes what from_pretrained returned; got a {type(model).__name__}")
    if hasattr(model.inner, "peft_config"):
        raise ValueError("this model has LoRA already, which needs no get_peft_model; load the model again for another")


def has_this_lora(model: Any, arguments: dict[str, Any]) -> TypeGuard[FastPeftModel]:
    """Return whether the model has LoRA that get_peft_model made with these arguments; if so, warn that it is kept."""
    same = isinstance(model, FastPeftModel) and model.loaded.lora_arguments == arguments
    if same := same and any(".lora_A." in name for name, _ in model.named_parameters()):
        logger.warning("the model has this LoRA already, and goes on from it; load the model again to begin anew")
    return same


def with_lora(model: BareModel, config: LoraConfig, checkpointing: bool | str = AUTO, seed: int = 0,
              mlp_tile: int | None = None) -> FastPeftModel:
    """Add LoRA to a loaded model as PEFT does for this config, with values drawn from `seed`. Raises ValueError for a
    config that PEFT could not apply."""
    check_bare(model)
    mode = checkpointing_mode(checkpointing)
    tile = check_tile(mlp_tile, mode)
    check_config(model.inner, config)
    config.fan_in_fan_out = False  # as PEFT sets it for its own linear layers
    config.modules_to_save = [*(config.modules_to_save or ())] or None  # PEFT appends to it
    config.trainable_token_indices = plain_rows(config.trainable_token_indices)
    use_kernel_layers(config, model.inner)
    model.close_engine()  # its modules are about to be wrapped
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft_model = FastPeftModel(model.inner, config)
    if config.modules_to_save or config.trainable_token_indices:
        from lowmem_grpo.models.trained_embedding import prepare_embeddings

        prepare_embeddings(peft_model)
    peft_model.loaded = loaded = model.loaded
    loaded.offload, loaded.auto, loaded.mlp_tile = mode in ("offload", AUTO), mode == AUTO, mlp_tile
    make_lean(model.inner, tile)
    enable_checkpointing(model.inner, mode)
    return peft_model


def with_adapter(cls: Any, folder: Path, arguments: dict[str, Any]) -> tuple[FastPeftModel, Any]:
    """Load a saved adapter and its base model; return the model, and the tokenizer saved with the adapter (else the
    base's). Raise AdapterError if the adapter is not plain LoRA or does not name its base model."""
    from lowmem_grpo.models.new_tokens import fit_vocabulary

    (config, tensors, _), tokenizer = read_all(folder), tokenizer_beside(folder)
    refuse_variants(config, folder, "trained")
    record = base_of_adapter(folder)
    if record.model is None or Path(record.model).expanduser() == folder:
        raise AdapterError(f"the adapter in {folder} does not say its base model; load that, and then load_lora")
    own: dict[str, Any] = {"revision": arguments["revision"] or record.revision}
    if arguments["load_in_4bit"] is None and not arguments["load_in_16bit"] and not arguments["load_in_fp8"]:
        own |= {"load_in_4bit": record.load_in_4bit, "load_in_fp8": record.load_in_fp8 or False}
    model, _ = cls.from_pretrained(record.model, **arguments | own)
    check_base(folder, record.model, own["revision"], model.loaded.sha256)
    check_targets(model.inner, [name.removeprefix(PREFIX) for name in layers_of(tensors)])
    fit_vocabulary(model, folder, config, tensors)
    adapted = with_values_to_come(model, config)
    check_for(adapted, folder)
    set_peft_model_state_dict(adapted, tensors)
    adapted.take_up(folder, tokenizer)
    if adapted.loaded.processor is not None:
        bounds = {name: arguments[name] for name in ("min_pixels", "max_pixels") if arguments.get(name) is not None}
        with_saved_bounds(adapted.loaded.processor, folder, **bounds)
    return adapted, adapted.loaded.processor or adapted.loaded.tokenizer


def with_values_to_come(model: BareModel, config: LoraConfig, checkpointing: bool | str = AUTO) -> FastPeftModel:
    """Add LoRA to a loaded model without applying `init_lora_weights`, because the caller loads the values next."""
    start, config.init_lora_weights, config.inference_mode = config.init_lora_weights, True, False
    adapted = with_lora(model, config, checkpointing)
    config.init_lora_weights = start
    return adapted
