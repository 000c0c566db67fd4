"""Find a stored model by its name (a folder, a GGUF file or a name on the hub), and read from its config the form of
its weights: 16 or 32 bits, NF4, FP8, NVFP4, or an unsupported one.

From a multimodal checkpoint only the text model is loaded, by transformers' class for it. No torch is imported here, so
that a wrong name or an unsupported checkpoint is refused at once.
"""

import copy
import logging
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowmem_grpo.config.teacher import OF_MODEL, STORED, is_url
from lowmem_grpo.memory.families import TEXT_NAMES, check_family, check_float16, experts_in_mxfp4
from lowmem_grpo.memory.layer_forms import FP8, MXFP4, NF4, NVFP4
from lowmem_grpo.memory.model_shape import named_config, read_config
from lowmem_grpo.models.gguf_file import gguf_config
from lowmem_grpo.runs.files import beside
from lowmem_grpo.runs.saved_adapter import adapter_at
from lowmem_grpo.utils import JsonError, bytes_of, is_adapter, is_gguf, leads_out, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TINY = "tiny"  # a model that ships with the package, and trains on a CPU in minutes
TINY_GAMES = "tiny-games"  # plays games
TINY_INBOX = "tiny-inbox"  # searches mails
TINY_TALKS = "tiny-talks"  # plays 2048, asks questions and answers them
TINY_SHAPES = "tiny-shapes"  # answers questions about pictures
logger = logging.getLogger(__name__)
GGUF_OF_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*/.+")
NO_WEIGHTS = ("no model {0!r}: {1} holds an adapter, and no weights of a model. Name its base, or load both with "
              "FastLanguageModel.from_pretrained({1!r}); a reward model scores as rewards.from_adapter({1!r})")
EMBEDDED = (TINY, TINY_GAMES, TINY_INBOX, TINY_TALKS, TINY_SHAPES)
SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # config fields that list unquantized modules
PLAIN_ONE = ("take the model's checkpoint in 16 bits (in its name there is no {0}), and load it with load_in_4bit=True "
             "or load_in_fp8=True")
OF_COMPRESSED = {"float-quantized": (FP8, 8), "naive-quantized": (FP8, 8), "nvfp4-pack-quantized": (NVFP4, 4)}
LABELS = {  # transformers' quant_method, or a format of compressed-tensors -> its common name
    "mxfp4": "MXFP4", "gptq": "GPTQ", "awq": "AWQ", "nvfp4": "NVFP4", "mxfp8": "MXFP8", "fbgemm_fp8": "FBGEMM FP8",
    "nvfp4-pack-quantized": "NVFP4", "mxfp4-pack-quantized": "MXFP4", "mxfp8-quantized": "MXFP8",
    "pack-quantized": "packed integers (INT4, W4A16)", "int-quantized": "INT8", "marlin-24": "sparse INT4",
    "modelopt": "ModelOpt", "auto-round": "AutoRound", "bitsandbytes": "bitsandbytes, 8 bits",
}


def resolve(model_name: str) -> str:
    """Return the folder of a model that ships with the package (EMBEDDED), or of a model at a path; a name on the hub
    is returned unchanged. OSError for a path without a model."""
    if model_name in EMBEDDED:
        return str(files("lowmem_grpo") / "assets" / model_name)
    if not str(model_name).strip():
        raise OSError("the name of the model is empty; give a name on the hub, a folder, or leave the option out")
    if is_gguf(model_name):
        return resolve_gguf(model_name)
    looks_like_path = str(model_name).startswith((".", "/", "~")) or str(model_name).count("/") > 1
    folder = Path(model_name).expanduser()
    if not looks_like_path and not folder.exists():
        return model_name
    if not (folder / "config.json").is_file():
        if folder.is_file():
            raise OSError(f"no model {model_name!r}: it is a file; give a folder that holds a config.json, a .gguf "
                          "file, or a name on the hub")
        if adapter := next((place for place in (folder, folder / "adapter") if is_adapter(place)), None):
            raise OSError(NO_WEIGHTS.format(model_name, str(adapter)))
        why = "the folder holds no config.json" if folder.is_dir() else \
            f"there is no such folder ({beside(folder)})"
        raise OSError(f"no model {model_name!r}: {why}")
    if is_adapter(folder):
        raise OSError(NO_WEIGHTS.format(model_name, str(folder)))
    return str(folder.absolute())


def resolve_gguf(model_name: str) -> str:
    """Return the path of a GGUF file; OWNER/NAME/FILE of the hub is returned unchanged. OSError if there is no file."""
    path = Path(model_name).expanduser()
    if path.is_file():
        return str(path.absolute())
    if GGUF_OF_HUB.fullmatch(model_name):
        return model_name
    raise OSError(f"no model {model_name!r}: there is no such file")


def public_name(model_name: str) -> str:
    """Return a name that other programs on this machine can load: an absolute path, or a name on the hub."""
    path = Path(resolve(model_name))
    return str(path.resolve()) if path.exists() else model_name


def find(model_name: str, **options: Any) -> str:
    """Resolve a name; OSError within seconds if the model is neither in the hub's cache nor on the hub."""
    path = resolve(model_name)
    if not Path(path).exists():
        from lowmem_grpo.models.hub import (  # imported here: huggingface_hub takes half a second
            find_model,
            gguf_of_hub,
        )

        if is_gguf(path):
            options.pop("weights", None)
            return gguf_of_hub(path, **options)
        find_model(path, **options)
    return path


def find_teacher(name: str, **options: Any) -> None:
    """Raise RunError, CheckpointError or OSError for a teacher's name that is neither known nor that of a folder or
    model. A URL is not asked."""
    if name in (*OF_MODEL, STORED) or is_url(name) or adapter_at(name):
        return
    try:
        find(name, **options)
    except OSError as error:
        raise OSError(f"there is no teacher {name!r} ({error}). Give the folder of a run or an adapter, a model, or a "
                      "URL that begins with http:// or https://") from error


def config_of(model_name: str) -> Any:
    """Return a model's config: by the name of a model or config that this package ships, from a folder or file, or from
    the hub. ValueError if none is found."""
    if Path(model_name).is_dir():
        is_adapter(Path(model_name))  # raises where it holds a model too
    if is_gguf(model_name):
        return gguf_config(find(model_name))
    try:
        return named_config(resolve(model_name) if model_name in EMBEDDED else model_name)
    except ValueError as unknown:
        if model_name.count("/") != 1 or Path(model_name).exists():
            raise
        try:
            find(model_name, weights=False)
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(model_name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0]
            raise ValueError(f"{unknown}. From the hub: {cause}") from error


def check_stored(folder: str, name: str, dtype: Any, max_seq_length: int | None = None, vision: bool = False) -> None:
    """Raise ValueError for a refused family, an unsupported form of weights, float16 for a model that overflows in it,
    and a context longer than the model's. A name on the hub is not checked here, but when it is loaded."""
    fields = stored_fields(folder)
    if fields is None:
        return
    if Path(folder).is_dir():
        weight_files(Path(folder))
    check_family(fields, name, vision)
    stored_form(fields, name)
    refuse_longer(max_seq_length, (fields.get("text_config") or fields).get("max_position_embeddings"))
    if str(dtype).removeprefix("torch.") == "float16":
        check_float16(fields)


def stored_fields(path: str | Path) -> dict[str, Any] | None:
    """Return the config of a model in a folder or in a GGUF file, in the fields of a config.json; None elsewhere."""
    if is_gguf(path):
        return gguf_config(path) if Path(path).is_file() else None
    file = Path(path) / "config.json"
    return read_config(file) if file.is_file() else None


def indexed_files(index: Path) -> list[str]:
    """Return the names of the files in a model's index, in order. ValueError for a damaged index."""
    try:
        places = read_json(bytes_of(index))
    except JsonError as error:
        raise ValueError(f"{index}: {error}; download the model again") from None
    names = places.get("weight_map") if isinstance(places, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} is no index of a model: weight_map must name a file for each tensor")
    return sorted({*names.values()})


def refuse_longer(max_seq_length: int | None, longest: int | None) -> None:
    """Raise ValueError if `max_seq_length` exceeds the model's `longest` context, in tokens; None means unknown."""
    if longest is not None and (max_seq_length or 0) > longest:
        raise ValueError(f"max_seq_length is {max_seq_length}; this model's context is {longest}")


def weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files that are the model in a folder, in the order in which transformers reads them, and the names of
    files with other weights, which it leaves; no files if there are no weights. OSError if a shard is missing,
    ValueError if a file lies outside of the folder."""
    config = folder / "config.json"
    named = read_config(config).get("transformers_weights") if config.is_file() else None
    first = next((name for name in (named, SINGLE, INDEX, *PICKLED) if name and (folder / name).is_file()), None)
    names = [] if first is None else indexed_files(folder / first) if first.endswith(".index.json") else [first]
    for name in names:
        if leads_out(folder, name):
            raise ValueError(f"{folder} has its weights in {name}, which lies outside of its folder; put the file "
                             "itself into the folder")
        if not (folder / name).is_file():
            raise OSError(f"{folder} is not a whole model: {name} is missing")
    kinds = ("*.safetensors", "pytorch_model*.bin", "consolidated*.pth", "*.index.json")
    held = {path.name for kind in kinds for path in folder.glob(kind) if not path.name.startswith("adapter_")}
    return [folder / name for name in names], sorted(held - {first, *names})


def say_other_weights(folder: Path) -> None:
    """Warn about weights in a model's folder that are not read."""
    files, others = weight_files(folder)
    if files and others:
        logger.warning("%s holds more than one set of weights: read is %s, as in transformers, and not %s. Remove "
                       "the set that is not meant", folder, files[0].name, ", ".join(others))


def stored_form(config: Any, name: str) -> str | None:
    """Return NF4, FP8, NVFP4 or (of experts) MXFP4, if a config says that weights are stored so, or None for 16 or 32
    bits; else ValueError."""
    quantization = quantization_of(config)
    if quantization is None:
        return None
    method = str(quantization.get("quant_method", "bitsandbytes"))
    if method == "bitsandbytes" and quantization.get("load_in_4bit", quantization.get("_load_in_4bit")):
        return NF4
    if method == "fp8":
        kind = quantization.get("fmt", quantization.get("weight_format", "e4m3"))
        if kind not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
            raise refusal(name, f"FP8 of the kind {kind}")
        return FP8
    if method == "compressed-tensors":
        try:
            return form_of_groups(quantization, name)
        except (AttributeError, TypeError, LookupError, OverflowError) as error:
            raise ValueError(f"the quantization_config of {name!r} is none of compressed-tensors ({error}): its "
                             "config_groups are needed; fetch config.json again") from error
    if method == "mxfp4" and experts_in_mxfp4(config):
        return MXFP4
    raise refusal(name, LABELS.get(method, method))


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the quantization_config of a config (an object, or config.json's fields) or its text part, or None."""
    if isinstance(config, Mapping):
        parts = [fields.get("quantization_config") for fields in (config, config.get("text_config") or {})]
    else:
        parts = [getattr(whole, "quantization_config", None) for whole in (config, config.get_text_config())]
    stored = next((part for part in parts if part is not None), None)
    return None if stored is None else dict(stored if isinstance(stored, Mapping) else stored.to_dict())


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block (h, w) that shares a scale, from the config; None for one scale per row or per weight."""
    block = quantization.get("weight_block_size")
    for group in (quantization.get("config_groups") or {}).values():
        weights = group["weights"]
        size = weights.get("group_size")
        block = weights.get("block_structure") or ([1, size] if size and size > 0 else None)
    return None if block is None else (round(block[0]), round(block[1]))


def form_of_groups(quantization: Mapping[str, Any], name: str) -> str:
    """Return FP8 or NVFP4, in which all groups of a compressed-tensors config have their weights, with static scales;
    ValueError for other forms, several forms, and FP8 in blocks of several shapes."""
    groups = list((quantization.get("config_groups") or {}).values())
    if not any(group.get("weights") for group in groups):
        raise refusal(name, "compressed-tensors without quantized weights (activations or the key-value cache only)")
    kinds = [str(group.get("format") or quantization.get("format")) for group in groups]
    found = set()
    for group, kind in zip(groups, kinds, strict=True):
        weights = group.get("weights") or {}
        form, bits = OF_COMPRESSED.get(kind, (None, 0))
        if weights.get("type") != "float" or weights.get("num_bits") != bits or not weights.get("symmetric", True):
            raise refusal(name, LABELS.get(kind, f"compressed-tensors, {kind}"))
        if form == NVFP4 and weights.get("group_size") != 16:
            raise refusal(name, f"NVFP4 in groups of {weights.get('group_size')}, not of 16")
        found.add((str(form), block_of({"config_groups": {"one": group}})))
    if len(found) != 1 or (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refusal(name, "compressed-tensors with several kinds of blocks, or sparse")
    return found.pop()[0]


def refusal(name: str, label: str) -> ValueError:
    """Return the error for an unsupported stored form; it names the supported forms and what to load instead."""
    return ValueError(
        f"{name!r} is stored in {label:.80}, which is not trained here. Allowed are checkpoints in 16 or 32 bits, in 4 "
        "bits of bitsandbytes, in FP8 (e4m3, of compressed-tensors or fine-grained), and in NVFP4 of "
        "compressed-tensors: "
        + PLAIN_ONE.format(label.partition(" ")[0][:80])
    )


# The text model of a multimodal checkpoint


def text_names(config: Any) -> dict[str, str]:
    """Return {pattern of stored names: replacement} if only the text part of the checkpoint is loaded; otherwise {}."""
    return TEXT_NAMES.get(str(config.model_type), {})


def text_part(config: Any) -> Any:
    """Return the config of the model to load: that of the text part, with the whole config's weight tying and
    quantization; `config` itself if there is no other part."""
    names = text_names(config)
    if not names:
        return config
    text = copy.deepcopy(config.get_text_config())
    text.transformers_weights = getattr(config, "transformers_weights", None)
    text.tie_word_embeddings = bool(text.tie_word_embeddings or config.tie_word_embeddings)
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantization is not None:
        fields = dict(quantization if isinstance(quantization, dict) else quantization.to_dict())
        left = {key: [text_name(path, names) or path for path in fields[key]] for key in SKIPPED if fields.get(key)}
        text.quantization_config = fields | left
    return text


def text_name(stored: str, names: dict[str, str]) -> str | None:
    """Return the name that a stored tensor or module has in the text model; None if it belongs to another part."""
    if not names or stored.startswith("lm_head"):
        return stored
    pattern = next((known for known in names if re.match(known, stored)), None)
    return None if pattern is None else re.sub(pattern, names[pattern], stored)
