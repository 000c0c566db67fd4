"""Loads a saved LoRA adapter, and checks that it is complete, finite and fits the model."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lowmem_grpo import utils
from lowmem_grpo.config.beside_lora import ROWS, accepts, base_names, faults_beside, last_parts
from lowmem_grpo.config.loading import LORA
from lowmem_grpo.config.unsupported import is_off
from lowmem_grpo.runs.expert_names import named_in_model, settings_in_model
from lowmem_grpo.runs.saved_adapter import ADAPTER_FILE, AdapterError, adapter_settings, check_adapter_folder

PREFIX = "base_model.model."  # PEFT's prefix of module names
SEQ_CLS, SCORE = "SEQ_CLS", "score"  # PEFT's task type of a reward model, and the name of its head in transformers
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIDES = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal")  # values that leave the base weights unchanged
ANY = frozenset((  # settings that may have any value; those without a comment are applied
    "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "use_dora",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_bias", "peft_type", "base_model_name_or_path",
    "task_type", "inference_mode", "auto_mapping", "peft_version", "revision", "runtime_config",  # metadata
    "eva_config", "loftq_config", "corda_config", "lora_ga_config",  # only used at initialization
    "modules_to_tie", "target_modules_to_tie",  # where PEFT notes what it tied
    "fan_in_fan_out", "megatron_core", "qalora_group_size",  # no effect on LoRA on linear layers
))
OF_FILES = LORA | {  # rules for the settings in a file: PEFT also saves what is not trained here
    "lora_alpha": utils.number("from -1e9 to 1e9", lambda value: abs(value) <= 1e9), "lora_dropout": utils.SHARE,
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "inference_mode"), utils.TRUTH),
    **dict.fromkeys(("task_type", "base_model_name_or_path", "revision"), utils.OF_KINDS[str]),
}
PLAIN = re.compile(r"[\w.-]*", re.ASCII)  # patterns that need no look: nothing in them repeats
VARIANT = re.compile(r"^use_|_config$")  # settings for which PEFT takes {} as on
MOST_HEADER, MOST_NAME = 32 * utils.MIB, 500  # bytes, with about 150 for a tensor; characters
MOST_SIDE = 2**21  # rows or columns of a matrix in an adapter; vocabularies have 2**18
AT_ONCE = 2**26  # values that are looked at together
LONGEST = 60  # seconds for a process that matches patterns
MATCHING = """import json, re, signal, sys
patterns, names = json.load(sys.stdin)
if hasattr(signal, "setitimer"):
    signal.setitimer(signal.ITIMER_VIRTUAL, 1 + len(patterns) * len(names) / 1e4)  # seconds until the kernel kills it
for place, (how, pattern) in enumerate(patterns):
    print(place, flush=True)
    for name in names:
        getattr(re, how)(pattern, name)
print("done")
"""
MERGE = ("merge it into its base with plain peft (PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload()), save "
         "that, and load it as a model")


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return the PEFT config and the trained tensors of an adapter. AdapterError unless it has only LoRA on linear
    layers, embedding and head, and only finite values."""
    config, trained, of_base = read_all(folder)
    check_finite(folder, trained | of_base)
    return config, trained


def base_matrices(folder: Path) -> dict[str, Tensor]:
    """Return {name of the weight: values} of the base's embedding and head, which PEFT saves beside an adapter if their
    rows were resized. AdapterError if the adapter cannot be read."""
    return read_all(folder)[2]


def read_all(folder: Path) -> tuple[LoraConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Return the PEFT config, the trained tensors, and the base's matrices. Of the tensors no value is read yet, so
    that their shapes are compared with a model's first (`check_fits`), and then `check_finite` reads what fits."""
    settings, stored = contents_of(folder)
    if is_reward_model(settings):
        raise AdapterError(f"the adapter in {folder} is a reward model, which scores texts and writes none. Reward "
                           f"completions with reward_funcs=rewards.from_adapter({str(folder)!r}), or load it with "
                           "transformers' AutoModelForSequenceClassification and peft")
    return parts_of(folder, settings, stored)


def contents_of(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return adapter_config.json and the tensors of an adapter, as they are stored."""
    check_adapter_folder(folder)
    settings = adapter_settings(folder)
    try:
        with (folder / ADAPTER_FILE).open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > MOST_HEADER:
            raise ValueError(f"its header has {utils.size_text(header)}; at most {utils.size_text(MOST_HEADER)} are "
                             "read")
        stored = load_file(folder / ADAPTER_FILE)
        if long := next((name for name in stored if len(name) > MOST_NAME), None):
            raise ValueError(f"a tensor's name, {long[:80]!r}..., has more than {MOST_NAME} characters")
        return settings, stored
    except (ValueError, SafetensorError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error}; use an older checkpoint") from error


def is_reward_model(settings: Mapping[str, Any]) -> bool:
    """Return whether an adapter's settings are those of a classifier's, as PEFT names its head."""
    saved = settings.get("modules_to_save")
    return settings.get("task_type") == SEQ_CLS or (isinstance(saved, list) and SCORE in saved)


def parts_of(folder: Path, settings: dict[str, Any], stored: dict[str, Tensor]
             ) -> tuple[LoraConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Return what `read_all` returns, of these contents."""
    tensors = named_in_model(stored, settings, folder)
    layers = [layer.removeprefix(PREFIX) for layer in layers_of(tensors)]
    config = lora_config(settings_in_model(settings, layers), folder)
    check_patterns(config, layers_of(tensors), f"the adapter in {folder}")
    of_base = base_names(tensors, bool(config.modules_to_save))
    trained = {name: tensor for name, tensor in tensors.items() if name not in of_base}
    for fault in faults_beside(config, sorted(trained)):
        raise AdapterError(f"the adapter in {folder} {fault}: {MERGE}")
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in DTYPES:
            raise AdapterError(f"the adapter in {folder} holds {name} as {str(tensor.dtype).removeprefix('torch.')}; "
                               "allowed are float32, bfloat16 and float16: save it again without quantizing it")
        if max(tensor.shape, default=0) > MOST_SIDE:
            raise AdapterError(f"the adapter in {folder} holds {name} of the shape {[*tensor.shape]}, and no model has "
                               f"more than {MOST_SIDE:,} rows or columns; the file is damaged")
    return config, trained, {weight: tensors[name] for name, weight in of_base.items()
                             if ".modules_to_save." not in name}


def check_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise AdapterError for a value that is NaN or infinity."""
    for name, tensor in sorted(tensors.items()):
        if not all(bool(part.isfinite().all()) for part in tensor.flatten().split(AT_ONCE)):
            raise AdapterError(f"the adapter in {folder} is not finite: {name} holds NaN or infinity. The run "
                               "diverged; take an older checkpoint")


def lora_config(settings: dict[str, Any], folder: Path) -> LoraConfig:
    """Return adapter_config.json as a LoraConfig; AdapterError names the first unsupported setting."""
    start = settings.get("init_lora_weights", True)
    if not starts_plainly(start):
        raise AdapterError(
            f"the adapter in {folder} has init_lora_weights={start!r:.200}, a start for which PEFT changes the base's "
            "weights or computes with them, and here they stay as they are. Have PEFT save it as plain LoRA, with "
            f"save_pretrained(FOLDER, path_initial_model_for_weight_conversion=BEGINNING), or {MERGE}")
    if (name := beyond_lora(settings)) is not None:
        raise AdapterError(f"the adapter in {folder} has {name}={settings[name]!r:.200}; only LoRA on linear layers, "
                           f"with nothing else, is loaded here: {MERGE}")
    try:
        usual = LoraConfig()
        known = {name: value for name, value in settings.items() if hasattr(usual, name) and name != "runtime_config"
                 and not (value is None and isinstance(getattr(usual, name), dict))}  # null: PEFT's default
        utils.check_given(known, {name: rule for name, rule in OF_FILES.items() if name in known})
        config = LoraConfig(**known)
        if config.target_modules is None:
            raise ValueError("target_modules is null; the names of the layers that have LoRA are needed")
        check_values(config, OF_FILES)
    except (TypeError, ValueError, RecursionError) as error:
        raise AdapterError(f"{folder / 'adapter_config.json'} holds no settings of PEFT: {error!s:.1000}") from error
    return config


def check_values(config: Any, rules: Mapping[str, utils.Rule] = LORA) -> None:
    """Raise ValueError, with the option's name, for a value of a LoraConfig that PEFT cannot use."""
    utils.check_given(vars(config), {name: rule for name, rule in rules.items() if hasattr(config, name)})
    for name, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        for key, value in ({"": getattr(config, name)} | (getattr(config, pattern) or {})).items():
            utils.require(f"{pattern}[{key!r}]" if key else name, value, rules[name])
    utils.require("lora_dropout", config.lora_dropout, rules["lora_dropout"])


def check_patterns(config: Any, names: Iterable[str], owner: str) -> None:
    """Raise AdapterError for a regular expression of a LoraConfig that is none, or that PEFT could not match with these
    names of modules in seconds: nested repetitions take for ever, and nothing can stop Python's `re`. `owner`
    begins the message."""
    patterns = patterns_of(config)
    if patterns and (found := fault_of(tuple(patterns.values()), ("", *sorted({*names})))):
        raise AdapterError(f"{owner} has the pattern {[*patterns][found[0]]}, {found[1]}. Write it without nested "
                           "repetitions, or list names")


def patterns_of(config: Any) -> dict[str, tuple[str, str]]:
    """Return {setting: (function of `re`, pattern)} for what PEFT matches, without patterns that match plain names."""
    layers = config.layers_pattern or []
    calls = [(f"{name}={value!r:.200}", value, ("fullmatch", value)) for name in ("target_modules", "exclude_modules")
             if isinstance(value := getattr(config, name), str)]
    calls += [(f"layers_pattern={each!r:.200}", each, ("match", rf"(?:^|.*?\.){each}\.(?P<idx>\d+)\."))
              for each in ([layers] if isinstance(layers, str) else layers)]
    calls += [(f"{name} {key!r:.200}", key, ("match", rf"(.*\.)?({key})$"))
              for name in ("rank_pattern", "alpha_pattern") for key in getattr(config, name) or ()]
    return {said: call for said, pattern, call in calls if not PLAIN.fullmatch(pattern)}


@lru_cache(16)
def fault_of(patterns: tuple[tuple[str, str], ...], names: tuple[str, ...]) -> tuple[int, str] | None:
    """Match each pattern with each name in a process of its own. Return the place of the first pattern that fails, and
    what is wrong with it; None if all are matched in time."""
    try:
        run = subprocess.run([sys.executable, "-I", "-S", "-c", MATCHING], input=json.dumps([patterns, names]),
                             capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired as slow:
        return len((slow.stdout or b"0").split()) - 1, "which takes too long to match"
    said = run.stdout.split() or ["0"]
    if said[-1] == "done":
        return None
    words = run.stderr.strip().rpartition("\n")[2].removeprefix("re.error: ") if run.returncode > 0 else ""
    return int(said[-1]), f"no regular expression ({words})" if words else "which takes too long to match"


def starts_plainly(start: Any) -> bool:
    return str(start).lower() in STARTS


def beyond_lora(settings: Mapping[str, Any]) -> str | None:
    """Return the first setting that asks for more than LoRA on linear layers; None if there is none."""
    usual = LoraConfig()
    return next((name for name, value in settings.items() if not (
        name in ANY or accepts(name, value) or name == "init_lora_weights" or value == getattr(usual, name, None)
        or value is None or value is False or (is_off(value) and not VARIANT.search(name)))), None)


def of_pattern(pattern: dict[str, Any] | None, layer: str, usual: Any) -> Any:
    """Return a layer's value in `rank_pattern` or `alpha_pattern`, else `usual`."""
    return (pattern or {}).get(get_pattern_key(list(pattern or ()), layer.removeprefix(PREFIX)), usual)


def rank_of(config: LoraConfig, layer: str) -> int:
    return int(of_pattern(config.rank_pattern, layer, config.r))


def scaling_of(config: LoraConfig, layer: str) -> float:
    """Return the LoRA scaling of a layer: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    rank, alpha = rank_of(config, layer), of_pattern(config.alpha_pattern, layer, config.lora_alpha)
    return float(alpha / (math.sqrt(rank) if config.use_rslora else rank))


def layers_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group LoRA's tensors by layer, then by the rest of the name, such as `lora_A.weight`."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, lora, part = name.partition(".lora_")
        if lora:
            layers.setdefault(layer, {})[f"lora_{part}"] = tensor
    return layers


def check_for(model: nn.Module, folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return the config and the tensors of the adapter in `folder`. AdapterError unless it is complete and fits the
    LoRA layers, the embedding and the head of `model`."""
    config, tensors, _ = read_all(folder)
    check_fits(model, folder, config, tensors)
    check_finite(folder, tensors)
    check_base_matrices(model, folder)
    return config, tensors


def check_fits(model: nn.Module, folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise AdapterError unless what was read of an adapter's folder is complete and fits the model."""
    saved = layers_of(tensors)
    check_patterns(config, (name.removeprefix(PREFIX) for name, _ in model.named_modules()), f"the adapter in {folder}")
    held = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if missing := sorted(saved.keys() - held.keys()):
        raise AdapterError(f"the adapter in {folder} has {len(missing)} layers that the one in the model lacks, "
                           f"{missing[0]} among them; load the model again and put LoRA on the same target_modules")
    linear = [name for name, module in model.named_modules() if name in held or (
        isinstance(module, nn.Linear) and ".lora_" not in name and not name.endswith(".base_layer"))]
    named = {name for name in linear if check_target_module_exists(config, name.removeprefix(PREFIX))}
    if missing := sorted(named - saved.keys()):
        raise AdapterError(f"the adapter in {folder} lacks {len(missing)} of the layers that its own "
                           f"adapter_config.json names, {missing[0]} among them; the file is not whole: use an older "
                           "checkpoint")
    if (extra := sorted(saved.keys() - named)) and config.target_modules != "all-linear":
        raise AdapterError(f"the adapter in {folder} holds {len(extra)} layers that its own adapter_config.json does "
                           f"not name, {extra[0]} among them, and PEFT would leave them out; one file is of another "
                           "adapter")
    for name, parts in sorted(saved.items()):
        for problem in problems(parts, held[name], config, rank_of(config, name)):
            raise AdapterError(f"the adapter in {folder} does not fit: {name} {problem}")
    for problem in problems_beside(model, config, tensors):
        raise AdapterError(f"the adapter in {folder} does not fit: {problem}")


def check_base_matrices(model: Any, folder: Path) -> None:
    """Raise AdapterError if the adapter in `folder` brings values of embedding and head that a PEFT model's base does
    not have."""
    brought = base_matrices(folder)
    with model.disable_adapter() if brought else nullcontext():
        for name, values in brought.items():
            module: Any = dict(model.named_modules()).get(name.removesuffix(".weight"))
            own = getattr(module, "original_module", module).weight if module is not None else values[:0]
            if own.shape != values.shape or not torch.equal(own.detach().to(values), values):
                raise AdapterError(f"the adapter in {folder} brings its own {name}, {[*values.shape]}, since its base "
                                   "was resized, and this model has other values: load the folder with from_pretrained")


def refuse_variants(config: LoraConfig, folder: Path, done: str) -> None:
    """Raise AdapterError for DoRA and LoRA biases, which can only be sampled with. `done` is "trained" or "merged"."""
    if name := next((name for name in ("use_dora", "lora_bias") if getattr(config, name)), None):
        raise AdapterError(f"the adapter in {folder} has {name}=True, and only plain LoRA is {done} here. To sample "
                           f"with it, pass model.load_lora(FOLDER) to fast_generate; else {MERGE}")


def problems_beside(model: Any, config: LoraConfig, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the faults of what a file holds beside LoRA, whole matrices and chosen rows, for this model."""
    saved = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    if not saved:
        return
    expected = beside_of(model, config)
    if missing := sorted(expected.keys() - saved.keys()):
        yield f"it lacks {missing[0]}; the file is not whole, or it was trained with an embedding that is not the head"
    for name in sorted(expected.keys() & saved.keys()):
        matrix, ids = expected[name]
        for row, times in Counter(ids or ()).items():
            if times > 1 or not 0 <= row < len(matrix):
                yield (f"its trainable_token_indices name row {row}, twice or beyond the model's {len(matrix)} rows. "
                       "New tokens get rows when the adapter's folder is loaded with from_pretrained")
        wanted = [len(matrix) if ids is None else len(ids), matrix.shape[1]]
        if wanted != [*saved[name].shape]:
            yield (f"{name} is {[*saved[name].shape]} where {wanted} is expected; for another number of rows, load the "
                   "adapter's folder with from_pretrained, which resizes its base")
    embedding, head = (getattr(module, "original_module", module).weight
                       for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    same = [saved[name] for name in expected.keys() & saved.keys() if embedding is head]
    if other := sorted(name for name in saved.keys() - expected.keys()  # PEFT also saves tied rows of a resized head
                       if not any(torch.equal(saved[name], each) for each in same)):
        yield f"it holds {other[0]}, which its adapter_config.json does not train in this model"
    whole = [saved[name] for name in expected.keys() & saved.keys() if not name.endswith(ROWS)]
    if len({id(matrix) for matrix, _ in expected.values()}) < len(expected) and not torch.equal(whole[0], whole[-1]):
        yield f"the model's embedding is its head, and the file has two different matrices for them: {MERGE}"


def beside_of(model: Any, config: LoraConfig) -> dict[str, tuple[Tensor, Any]]:
    """Return {name in the file: (matrix in the base, ids of its rows, None for all)} of what is trained beside LoRA."""
    modules = {module: name for name, module in model.named_modules()
               if module in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = [getattr(module, "original_module", module).weight for module in modules]
    tied, whole = matrices[0] is matrices[-1], last_parts(config.modules_to_save)
    chosen: Any = config.trainable_token_indices
    expected: dict[str, tuple[Tensor, Any]] = {}
    for place, (path, matrix) in enumerate(zip(modules.values(), matrices, strict=True)):
        name = path.rpartition(".")[2]
        named = {key.rpartition(".")[2]: ids for key, ids in chosen.items()} if isinstance(chosen, dict) else {}
        ids = named.get(name) if named else chosen if place == 0 else None
        if name in whole or (tied and whole):
            expected[f"{path}.weight"] = matrix, None
        elif ids and not (tied and place):
            expected[f"{path}{ROWS}"] = matrix, ids
    return expected


def problems(parts: dict[str, Tensor], layer: Any, config: LoraConfig, rank: int) -> Iterator[str]:
    """Yield the faults of a layer's tensors."""
    a, b, magnitude = (parts.get(name) for name in SIDES.values())
    if a is None or b is None:
        yield f"has no {SIDES['A' if a is None else 'B']}; the file is not whole: use an older checkpoint"
        return
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        yield f"has factors of shapes {list(a.shape)} and {list(b.shape)}, which cannot be multiplied"
    elif (a.shape[1], len(b)) != (layer.in_features, layer.out_features):
        yield (f"takes {a.shape[1]} numbers and gives {len(b)}, where this model's layer takes {layer.in_features} and "
               f"gives {layer.out_features}: it was trained on another base model")
    elif len(a) != rank * getattr(layer.base_layer, "experts", 1):
        yield f"has rank {len(a)} and adapter_config.json says r={rank}; one file is of another adapter"
    if config.use_dora and magnitude is None:
        yield ("has no lora_magnitude_vector although adapter_config.json says use_dora: without its magnitudes DoRA "
               "is another model; save the adapter again with PEFT's save_pretrained")
    bias = parts.get("lora_B.bias")
    if config.lora_bias and bias is None:
        yield "has no lora_B.bias although adapter_config.json says lora_bias; one file is of another adapter"
    if bias is not None and [*bias.shape] != [layer.out_features]:
        yield f"has biases of the shape {[*bias.shape]} and {layer.out_features} outputs"
    if magnitude is not None and magnitude.numel() != layer.out_features:
        yield f"has {magnitude.numel()} magnitudes and {layer.out_features} outputs"
