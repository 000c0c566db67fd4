"""Load a stored model, its weights in 16 bits, in FP8, in 4-bit NF4 or in NVFP4, and its tokenizer.

transformers reads a tensor, quantizes it and frees it before the next one, so a 70B checkpoint needs memory for its
quantized size and one tensor, on host and device.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as their_logging

from lowmem_grpo.memory.families import TOWER, check_family, family_of, has_experts, reads_images, with_experts
from lowmem_grpo.memory.layer_forms import BITS_16, FP8, MXFP4, NF4, NVFP4
from lowmem_grpo.memory.model_shape import read_config
from lowmem_grpo.memory.oom import freed_memory_returned
from lowmem_grpo.models import attention
from lowmem_grpo.models.card_check import check_dtype
from lowmem_grpo.models.chat_ids import with_ids
from lowmem_grpo.models.expert_loading import ExpertsNF4Config, check_packed, keep_packed
from lowmem_grpo.models.experts import packed_stacks, use_routed_blocks
from lowmem_grpo.models.fp8_layers import SCALE, FP8Config, keep_stored, to_quantize
from lowmem_grpo.models.gguf_file import gguf_config, gguf_tensors
from lowmem_grpo.models.gguf_header import gguf_header
from lowmem_grpo.models.hub import first_line
from lowmem_grpo.models.nvfp4_layers import NVFP4Config
from lowmem_grpo.models.quantized_linear import form_of, linears_in_4bit, quantized_linears
from lowmem_grpo.models.stored_model import say_other_weights, stored_form, text_names, text_part
from lowmem_grpo.models.template_trial import check_templates
from lowmem_grpo.utils import BOTH, GIB, MIB, check_file, is_gguf

OWN_CODE = ("{!r} is defined by Python code in its repository, and such code is never run here. Take a model whose "
            "architecture transformers itself has")
NO_TEXT = ("{!r} is no causal language model of text: transformers has no class of that kind for it. Images and "
           "sounds are not supported, only text is trained here: take a text model, such as Qwen3 instead of Qwen3-VL")

NO_TURNS = ("the chat template of {!r} ({}) writes {}, and its tokenizer has no such token: turns would be cut into "
            "pieces that the model never saw. Take the tokenizer of the same model's instruct version, or remove the "
            "template and call get_chat_template")

EXPERTS_STAY = ("{!r} is a mixture of experts{}. Only linear layers would be quantized, and its experts are none: they "
                "would stay in 16 bits, which is nearly all of the model. {}; or, where memory has room for all of it "
                "in 16 bits, load_in_4bit=False: its experts stay frozen, and LoRA goes on its attention")
STORED_EXPERTS = ("{!r} is a mixture of experts that is stored in {}, and its experts are not read in this form. Take "
                  "its checkpoint in 16 bits (in its name there is no {}), and load it with load_in_4bit=True")
STORED = {FP8: "FP8", NVFP4: "NVFP4", NF4: "4 bits"}
BESIDE_MXFP4 = ("{!r} has its experts in MXFP4, and other weights are not held in FP8 beside them: take "
                "load_in_4bit=True (attention in NF4) or load_in_4bit=False (in 16 bits) in place of load_in_fp8")
DAMAGE = ("{!r} cannot be loaded ({}: {}): a field of its config.json, generation_config.json or tokenizer_config.json "
          "has a wrong type or value; fetch the model again")
DAMAGED = (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError,
           StrictDataclassError)
BY_LENGTH = ("dynamic", "longrope")  # RoPE types whose frequencies transformers recomputes in forward passes
FIXED = "default"  # RoPE type whose frequencies it leaves as they are

# files that transformers reads beside the weights, and the most bytes that they have
FILES = {
    **dict.fromkeys(("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"), GIB),
    **dict.fromkeys(("config.json", "generation_config.json", "*processor_config.json", "tokenizer_config.json",
                     "added_tokens.json", "special_tokens_map.json", "chat_template.j*", "additional_chat_templates/*"),
                    64 * MIB),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pretrained:
    """A stored model: its location, from which config, tokenizer and weights are loaded."""

    name: str  # as given by the user
    path: str  # a folder, a GGUF file, or a name on the hub
    options: dict[str, Any]  # revision and token
    vision: bool = False  # a family that reads images is loaded whole

    def load(self, dtype: torch.dtype, device: str, form: str) -> tuple[PreTrainedModel, Any]:
        """Return the frozen model on its device, with weights in this form (NF4, FP8, FP8_BLOCK or BITS_16), and its
        tokenizer. A checkpoint stored in NF4, FP8 or NVFP4 stays as it is."""
        with self.naming_the_model(), freed_memory_returned():
            config, names = self.parts()
            check_dtype(config, dtype)
            if said := check_family(config, self.name, self.vision):
                logger.warning("%s", said)
            stored = stored_form(config, self.name)
            check_experts(config, stored, form, self.name)
            tokenizer = self.tokenizer()
            check_turns(config, tokenizer, self.name)
            how = quantization(config, stored, form, dtype, names)
            model = read_model(
                self.path, config, names, dtype=dtype, device_map={"": device},
                attn_implementation=attention_of(config), **self.options, **how,
            )
            if stored == MXFP4:
                check_packed(model)
            if is_gguf(self.path):
                model.name_or_path = model.config.name_or_path = self.name
        if stored is not None:
            say_stored(self.name, stored, form)
            compute_in(model, dtype)
        use_routed_blocks(model)
        keep_layout(model)
        return model.requires_grad_(False), tokenizer

    def config(self) -> Any:
        """Return the config of the model to load; for a multimodal checkpoint, that of its text part."""
        return self.parts()[0]

    def parts(self) -> tuple[Any, dict[str, str]]:
        """Return the config of the model to load, and the new names of stored tensors if it is only the text part."""
        if is_gguf(self.path):
            return AutoConfig.for_model(**gguf_config(self.path)), {}
        if (Path(self.path) / "config.json").is_file():
            read_config(Path(self.path) / "config.json")  # raises for values that no model can have
            generation_of(self.path)  # raises for what cannot be read
        whole = AutoConfig.from_pretrained(self.path, trust_remote_code=False, **self.options)
        return text_part(whole), text_names(whole)

    def tokenizer(self) -> Any:
        """Load the tokenizer; its `apply_chat_template` works for code of transformers 4 and 5 (see chat_ids.py).
        ValueError for a chat template that takes too long."""
        if is_gguf(self.path):
            made = tokenizer_inside(self.path, self.name)
        else:
            check_tokenizer_files(Path(self.path))
            with self.naming_the_tokenizer():
                made = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False, **self.options)
                if wrong := [name for name in made.model_input_names if not isinstance(name, str)]:
                    raise TypeError(f"model_input_names has {wrong[0]!r:.80}, which is no text")
        check_templates(made, self.name)
        return with_ids(made)

    @contextmanager
    def naming_the_tokenizer(self) -> Iterator[None]:
        """Rewrite errors within this context that values in a folder's files led to, whatever they are."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError | ImportError) or "trust_remote_code" in str(error) or not Path(
                    self.path).is_dir():
                raise
            raise ValueError(f"the tokenizer of {self.name} cannot be read ({type(error).__name__}: "
                             f"{first_line(error):.300}): correct tokenizer_config.json and the files beside it, or "
                             "fetch them again") from error

    def form(self, asked: str) -> str:
        """Return the form of weights: a quantized checkpoint's own, else `asked`, as where it has only its experts in
        MXFP4 and others are asked for in NF4; ValueError if unsupported."""
        stored = stored_form(self.config(), self.name)
        return asked if stored is None or (stored == MXFP4 and asked == NF4) else stored

    @contextmanager
    def naming_the_model(self) -> Iterator[None]:
        """Rewrite errors within this context: an OSError says in one line which model was not found, and a ValueError
        which model has no text class or needs code from its repository."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"no model {self.name!r}: it is not a folder with a model, and the hub did not return one "
                f"(misspelt, gated without token=..., or no network). First line of the cause: {first_line(error)}"
            ) from error
        except ValueError as error:
            if "Unrecognized configuration class" in str(error):
                raise ValueError(NO_TEXT.format(self.name)) from error
            if "does not recognize this architecture" in str(error):
                raise ValueError(f"{self.name!r}: {first_line(error)}") from error
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(OWN_CODE.format(self.name)) from error
        except RuntimeError as error:
            if not any(words in str(error) for words in ("ignore_mismatched_sizes", "Storage size calculation")):
                raise
            raise ValueError(f"the weights of {self.name!r} do not have the sizes of its config.json: one of them is "
                             "of another model; fetch it again") from error
        except SafetensorError as error:
            raise ValueError(f"a file with weights of {self.name!r} cannot be read ({first_line(error)}), as one that "
                             "was cut off: fetch the model again") from error
        except DAMAGED as error:
            raise ValueError(DAMAGE.format(self.name, type(error).__name__, first_line(error))) from error


def class_of(config: Any) -> Any:
    """Return transformers' class that loads models of this config."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def attention_of(config: Any) -> Any:
    """Return the name of our attention, which the tower of a model of images does not take."""
    return {"text_config": attention.NAME} if reads_images(config) else attention.NAME


def read_model(path: str, config: Any, names: dict[str, str], **options: Any) -> Any:
    """Return the causal language model stored at `path`, or the text model of a multimodal checkpoint. ValueError if a
    tensor is missing."""
    if Path(path).is_dir():
        say_other_weights(Path(path))
    kind = class_of(config)
    first: Any = path
    if is_gguf(path):
        kind, first = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None
        options["state_dict"] = gguf_tensors(path, options["dtype"])
    before = their_logging.get_verbosity()
    if names:
        their_logging.set_verbosity_error()
        options = {"key_mapping": names, **options}
    try:
        loaded: Any = kind.from_pretrained(
            first, config=config, output_loading_info=True, trust_remote_code=False, **options)
    finally:
        their_logging.set_verbosity(before)
    model, info = loaded
    if hasattr(model, "peft_config"):  # a repository on the hub; `resolve` refuses such a folder
        raise ValueError(BOTH.format(path))
    computed = {name for name, _ in model.named_buffers() if not name.endswith(SCALE)}  # set when the model is made
    if missing := sorted(set(info["missing_keys"]) - computed):
        raise ValueError(f"{path} lacks {len(missing)} tensors of its {'text ' if names else ''}model, such as "
                         f"{missing[0]}, which would be random. Fetch the checkpoint again, or take another")
    if not names:
        return model
    logger.info("of %s the text model is loaded: %d tensors of images or sounds are left out", path,
                len(info["unexpected_keys"]))
    return model


def check_tokenizer_files(folder: Path) -> None:
    """Raise ValueError for a file of settings or of a tokenizer in a folder that is no file, or is too large."""
    for name, most in FILES.items():
        for path in folder.glob(name):
            check_file(path, most)


def tokenizer_inside(path: str, name: str) -> Any:
    """Return the tokenizer of a GGUF file. ValueError if it has none, or one that cannot be read."""
    try:
        if "tokenizer.ggml.tokens" not in gguf_header(path).settings:
            raise ValueError("it has no tokenizer.ggml.tokens")
        with TemporaryDirectory() as empty:  # beside the file, transformers would find the tokenizer of another
            tokenizer = AutoTokenizer.from_pretrained(empty, gguf_file=str(Path(path).absolute()),
                                                      trust_remote_code=False)
        tokenizer.name_or_path = name
        return tokenizer
    except Exception as error:  # the tokenizers library raises no narrower type
        raise ValueError(f"the tokenizer in {path} cannot be read ({first_line(error)}): take another file, or the "
                         "model's checkpoint in 16 bits, in safetensors") from error


def tokenizer_beside(adapter: Path) -> Any:
    """Return the tokenizer that was saved beside an adapter, or None. ValueError if it is incomplete."""
    if not (adapter / "tokenizer_config.json").is_file():
        return None
    try:
        tokenizer = Pretrained(str(adapter), str(adapter), {}).tokenizer()
        if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}:
            raise ValueError("it has no vocabulary")  # transformers builds an empty one if the file is missing
        return tokenizer
    except Exception as error:  # the tokenizers library raises no narrower type
        raise ValueError(f"the tokenizer beside the adapter in {adapter} cannot be read ({error!r}): save it again "
                         "with tokenizer.save_pretrained, or take its files away for the base model's own") from error


def generation_of(path: str | Path) -> Any:
    """Return the generation config in a folder; None if there is none. ValueError if it cannot be read."""
    if not (file := Path(path) / "generation_config.json").exists():
        return None
    check_file(file)
    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:  # transformers raises whatever a value leads to
        raise ValueError(f"{file} cannot be read ({type(error).__name__}: {first_line(error):.300}): correct it, or "
                         "take it away") from error


def check_experts(config: Any, stored: str | None, form: str, name: str) -> None:
    """Raise ValueError for a mixture of experts that is stored quantized, or whose experts would stay in 16 bits while
    its other weights are quantized."""
    if not has_experts(config) or (stored is None and form == BITS_16):
        return
    if stored == MXFP4:
        if form not in (NF4, BITS_16, MXFP4):
            raise ValueError(BESIDE_MXFP4.format(name))
        return
    row = family_of(config)
    if stored is not None:
        raise ValueError(STORED_EXPERTS.format(name, STORED[stored], STORED[stored].replace(" bits", "bit")))
    if row is None or row.experts is None:
        raise ValueError(EXPERTS_STAY.format(name, "", f"Take a dense model, or {with_experts()} in 4 bits"))
    if form != NF4:
        raise ValueError(EXPERTS_STAY.format(name, ", which is not held in FP8", "Take load_in_4bit=True"))


def check_turns(config: Any, tokenizer: Any, name: str) -> None:
    """Raise ValueError if the chat template writes the family's turn markers, and the vocabulary lacks them."""
    row, template = family_of(config), str(getattr(tokenizer, "chat_template", None) or "")
    known = tokenizer.get_vocab() if row is not None and template else {}
    lacking = [token for token in (row.turns if row is not None else ()) if token in template and token not in known]
    if row is not None and lacking:
        raise ValueError(NO_TURNS.format(name, row.name, " and ".join(lacking)))


def quantization(config: Any, stored: str | None, form: str, dtype: torch.dtype,
                 names: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the quantization arguments for from_pretrained; {} for a checkpoint that is stored in NF4, FP8, NVFP4 or
    (its experts) MXFP4, or is to stay in 16 bits. The config of one that is not in NF4 gets our quantizer."""
    if stored == MXFP4 and form != NF4:
        keep_packed(config, dtype)
        return {}
    if stored == MXFP4:
        del config.quantization_config  # of the experts alone, which our quantizer keeps as they are
    if stored in (FP8, NVFP4):
        keep_stored(config, dtype, names, FP8Config if stored == FP8 else NVFP4Config)
        return {}
    if stored == NF4 or (stored is None and form == BITS_16):
        return {}  # not None, which would override the config of a checkpoint in NF4
    if form != NF4:
        return {"quantization_config": to_quantize(form, dtype)}
    return {"quantization_config": nf4(dtype, config, ExpertsNF4Config if has_experts(config) else BitsAndBytesConfig)}


def say_stored(name: str, stored: str, form: str) -> None:
    """Log that weights are used as they are stored; a warning if they take more memory than the requested form."""
    if stored == FP8 and form == NF4:
        logger.warning("%s is stored in FP8: its weights are used as they are, at one byte each, and not in 4 bits. "
                       "For 4 bits take its checkpoint in 16 bits", name)
    elif stored == MXFP4:
        logger.info("the experts of %s are stored in MXFP4 and used as they are; its other linear layers are %s", name,
                    "quantized to NF4 (load_in_4bit=False: in 16 bits)" if form == NF4 else "in 16 bits")
    else:
        logger.info("%s is stored in %s: its weights are used as they are", name, STORED[stored])


def nf4(dtype: torch.dtype, config: Any = None,
        kind: type[BitsAndBytesConfig] = BitsAndBytesConfig) -> BitsAndBytesConfig:
    """Return the config, of class `kind`, of 4-bit NF4 with double quantization, computing in `dtype`. The tower of a
    model of images stays in 16 bits."""
    return kind(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[TOWER, "lm_head"] if config is not None and reads_images(config) else None,
    )


def is_quantized(model: nn.Module) -> bool:
    return form_of(model) != BITS_16


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make quantized weights compute in `dtype`; the stored numbers do not change."""
    for module in linears_in_4bit(model):
        module.compute_dtype = module.weight.quant_state.dtype = dtype
    for layer in quantized_linears(model):
        layer.compute_dtype = dtype
    for stack in packed_stacks(model):
        stack.compute_dtype = dtype


def keep_layout(model: PreTrainedModel) -> None:
    """Keep the layout of 4-bit weights. On CPUs with AVX512-BF16, bitsandbytes would repack them in the first forward
    pass in evaluation mode, and no gradient flows through repacked weights."""
    for module in linears_in_4bit(model):
        module.support_avx512bf16_for_cpu = False


def fix_frequencies(model: nn.Module, context: int) -> None:
    """Fix a model's RoPE frequencies to those for `context` tokens, whatever the length of a text. Warn if transformers
    would use others for a short text.

    LongRoPE (Phi-3.5, Phi-4-mini; arXiv 2402.13753, section 3.2) has other factors beyond the length of pretraining.
    transformers chooses by the longest position of a *forward pass*, so one long text in a micro-batch would change all
    short ones. `context` decides once, as `max_model_len` does in vLLM, and as CUDA graphs need.
    """
    for rotary, layer_type, kind in by_length(model):
        of_layer: Any = rotary
        device = getattr(rotary, attribute_name("inv_freq", layer_type)).device
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
            of_layer.config, device, seq_len=context, layer_type=layer_type)
        setattr(rotary, attribute_name("inv_freq", layer_type), frequencies)
        setattr(rotary, attribute_name("attention_scaling", layer_type), scaling)
        of_layer.rope_type = FIXED if layer_type is None else {**of_layer.rope_type, layer_type: FIXED}
        settings = of_layer.config.rope_parameters
        settings = settings if layer_type is None else settings[layer_type]
        original = settings.get("original_max_position_embeddings")
        if settings.get("rope_type") == "longrope" and original and context > original:
            logger.warning("LongRoPE: max_seq_length is %s, and the model was pretrained on texts of %s tokens, so "
                           "texts of every length use the long factors, as in vLLM. max_seq_length=%s keeps the short "
                           "ones", f"{context:,}", f"{original:,}", original)


def by_length(model: nn.Module) -> Iterator[tuple[nn.Module, str | None, str]]:
    """Yield each RoPE module whose type is in BY_LENGTH, with its layer type (None: all layers) and RoPE type."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in list(kinds.items()) if isinstance(kinds, dict) else [(None, kinds)]:
            if kind in BY_LENGTH:
                yield module, layer_type, kind


def attribute_name(attribute: str, layer_type: str | None) -> str:
    """Return the name under which a RoPE module of transformers has `attribute` for one layer type (None: all)."""
    return attribute if layer_type is None else f"{layer_type}_{attribute}"
