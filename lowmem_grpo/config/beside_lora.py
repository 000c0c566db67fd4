"""What may be trained beside LoRA on linear layers: the embedding and the head, whole or chosen rows. The options of
get_peft_model, the settings of a LoraConfig, the parameters of a model and the tensors in an adapter's file are judged
here, and nowhere else."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from lowmem_grpo.config.unsupported import Table, any_value, is_off
from lowmem_grpo.utils import count_text

# Options of get_peft_model, and settings of a LoraConfig; `models.trained_embedding.check_beside` judges the values
BESIDE: Table = any_value("modules_to_save", "trainable_token_indices", "ensure_weight_tying")
WHOLE = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out", "word_embeddings")  # heads and embeddings
ROWS = ".token_adapter.trainable_tokens_delta"  # end of the name of trained rows in a file
MATRICES = tuple(f".{name}.weight" for name in WHOLE)  # ends of the names of whole matrices in a file
COPY = ".original_module.weight"  # end of the name of a base's matrix in a file, beside that of the trained copy
OF_BASE = re.compile(r"(\.original_module|\.modules_to_save|\.token_adapter\.base_layer)?\.weight$")
OF_LORA = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".lora_magnitude_vector")  # ends of names in a file
TRAINED = re.compile(r"\.lora_|\.modules_to_save\.[^.]+\.weight$|\.token_adapter\.trainable_tokens_delta\.")

logger = logging.getLogger(__name__)


def accepts(setting: str, value: Any) -> bool:
    """Return whether a setting is one of those above, and may have this value."""
    return setting in BESIDE and BESIDE[setting].accepts(setting, value)


def settings_beside(targets: Any, options: dict[str, Any], tied: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the `target_modules` that get LoRA, and a LoraConfig's settings for what get_peft_model's arguments train
    beside it. Names of the embedding and the head among the targets mean the whole matrices, as in Unsloth. A tied
    model has one matrix for both: a line says so."""
    named = [] if isinstance(targets, str) else [name for name in targets or () if name.rpartition(".")[2] in WHOLE]
    targets = [name for name in targets if name not in named] if named else targets
    if named and not targets:
        raise ValueError(f"target_modules names {' and '.join(named)} only, which are trained whole, beside LoRA: name "
                         "linear layers too, or leave target_modules out and name these in modules_to_save")
    beside = {name: value for name, value in options.items() if name in BESIDE and not is_off(value)}
    saved = beside.pop("modules_to_save", ())
    if whole := [*dict.fromkeys([*([saved] if isinstance(saved, str) else saved), *named])]:
        beside["modules_to_save"] = whole
    if tied and whole and options.get("ensure_weight_tying") is not False:
        beside["ensure_weight_tying"] = True
        logger.info("the model ties its embedding to its head: the one matrix is trained for both")
    return targets, beside


def plain_rows(chosen: Any) -> Any:
    """Return the value of `trainable_token_indices` in lists of int, with which PEFT can index, and which JSON has."""
    if isinstance(chosen, dict):
        return {name: [*map(int, ids)] for name, ids in chosen.items()} or None
    return [*map(int, chosen or ())] or None


def check_targets_of_lora(targets: Collection[str]) -> None:
    """Raise ValueError if a name or a path among the targets is that of a module without LoRA."""
    names = {target.rpartition(".")[2] for target in targets}
    if found := next((name for name in WHOLE if name in names), None):
        raise ValueError(f"target_modules names {found}; embedding and head get no LoRA here: name it in "
                         "modules_to_save, which trains it whole")


def check_trained(names: Iterable[str]) -> None:
    """Raise ValueError for the name of a trained parameter that has to stay frozen."""
    if other := next((name for name in names if not TRAINED.search(name)), None):
        raise ValueError(f"the model trains {other} beside its LoRA; only LoRA, and an embedding and a head, are "
                         "trained here: freeze it with requires_grad_(False)")


def faults_beside(config: Any, names: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the names of tensors in an adapter's file: those that are neither LoRA's nor of what the
    config trains beside it, and what the config trains without a tensor."""
    whole, rows = last_parts(config.modules_to_save), bool(config.trainable_token_indices)
    if other := sorted(whole.difference(WHOLE)):
        yield f"trains {other[0]} (modules_to_save), and only embedding and head are trained beside LoRA here"
    for name in names:
        layer, lora, _ = name.partition(".lora_")
        of_lora = bool(lora) and name.endswith(OF_LORA) and not layer.endswith(WHOLE)
        if not (of_lora or (rows and name.endswith(ROWS)) or (whole and not lora and name.endswith(MATRICES))):
            yield f"holds {name}, and only LoRA on linear layers below the head is loaded here"
    yield from (f"lacks {module}, which its modules_to_save names" for module in sorted(whole)
                if not any(name.endswith(f"{module}.weight") for name in names))
    if rows and not any(name.endswith(ROWS) for name in names):
        yield "lacks the rows that its trainable_token_indices names"


def base_names(names: Collection[str], whole: bool) -> dict[str, str]:
    """Return {name: weight in the model} of those names in an adapter's file that are of matrices which the adapter
    does not train. PEFT also saves these for a resized model. `whole`: the config trains whole matrices."""
    trained = {OF_BASE.sub(".weight", name) for name in names if name.endswith(COPY)} or ({*names} if whole else set())
    weights = {name: OF_BASE.sub(".weight", name) for name in names if ".lora_" not in name}
    return {name: weight for name, weight in weights.items() if weight.endswith(MATRICES) and name not in trained}


def last_parts(modules: Iterable[str] | None) -> set[str]:
    """Return the names of modules without the paths before them."""
    return {module.rpartition(".")[2] for module in modules or ()}


def check_rows(stored: int | None, rows: int, untrained: Sequence[int] = ()) -> None:
    """Raise ValueError if an embedding has fewer than the `stored` rows, or if rows of new tokens are not trained, in
    embedding and head, since an adapter holds only rows that it trains."""
    if untrained:
        whole = f"list(range({untrained[0]}, {untrained[-1] + 1}))"
        ids = whole if len(untrained) == untrained[-1] + 1 - untrained[0] > 3 else str([*untrained])
        raise ValueError(f"{count_text(len(untrained), 'new token')} would not be trained, and an adapter holds only "
                         f"rows that it trains. With ids = {ids}, give get_peft_model or LoraConfig "
                         'trainable_token_indices={"embed_tokens": ids, "lm_head": ids} (for a tied model just ids); '
                         'or train both matrices, with modules_to_save=["embed_tokens", "lm_head"]')
    if stored is not None and rows < stored:
        raise ValueError(f"the model's embedding was cut from {stored} to {rows} rows, which no adapter can say: save "
                         "model and tokenizer in a folder (save_pretrained of both), load that, and train it")
