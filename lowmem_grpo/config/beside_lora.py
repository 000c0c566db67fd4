"""What may be trained beside LoRA on linear layers: nothing, so far. The options of get_peft_model, the settings of a
LoraConfig, the parameters of a model and the tensors in an adapter's file are judged here, and nowhere else."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from lowmem_grpo.config.unsupported import Table, any_value, is_off, off
from lowmem_grpo.utils import count_text

BESIDE: Table = {  # options of get_peft_model, and settings of a LoraConfig
    **off("Only LoRA weights are trained; name modules in target_modules instead.", "modules_to_save"),
    **off("Embeddings stay frozen; train LoRA on linear layers.", "trainable_token_indices"),
    **any_value("ensure_weight_tying"),  # embedding and head stay frozen
}
WHOLE = ("lm_head", "embed_tokens")  # modules without LoRA
OF_LORA = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".lora_magnitude_vector")  # ends of names in a file


def accepts(setting: str, value: Any) -> bool:
    """Return whether a setting is one of those above, and may have this value."""
    return setting in BESIDE and BESIDE[setting].accepts(setting, value)


def settings_beside(targets: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the `target_modules` that get LoRA, and a LoraConfig's settings for what get_peft_model's arguments train
    beside it."""
    return targets, {name: value for name, value in options.items() if name in BESIDE and not is_off(value)}


def check_targets_of_lora(targets: Collection[str]) -> None:
    """Raise ValueError if a name or a path among the targets is that of a module without LoRA."""
    names = {target.rpartition(".")[2] for target in targets}
    if frozen := next((name for name in WHOLE if name in names), None):
        raise ValueError(f"target_modules names {frozen}; the head and the embedding stay frozen here, leave it out")


def check_trained(names: Iterable[str]) -> None:
    """Raise ValueError for the name of a trained parameter that has to stay frozen."""
    if other := next((name for name in names if ".lora_" not in name), None):
        raise ValueError(f"the model trains {other} beside its LoRA; only LoRA is trained here: freeze it with "
                         "requires_grad_(False)")


def faults_beside(config: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the tensors of an adapter's file, by name, that are not LoRA's: those that are not of a
    module in the config's `modules_to_save`, and the modules in it that have no tensor."""
    missing = {*(config.modules_to_save or ())}
    for name in names:
        layer, lora, _ = name.partition(".lora_")
        modules = {module for module in config.modules_to_save or () if f"{module}." in name and not lora}
        missing -= modules
        if not modules and (layer.endswith(WHOLE) or not name.endswith(OF_LORA)):
            yield f"holds {name}, and only LoRA on linear layers below the head is loaded here"
    yield from (f"lacks {module}, which its modules_to_save names" for module in sorted(missing))


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
