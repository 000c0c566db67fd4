"""Where a completion ends, alike in every engine: room in the context, end tokens, stop strings."""

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.models.policy import Policy


def budget_of(prompt: list[int], params: SamplingParams, max_seq_length: int) -> int:
    """Tokens that a completion of this prompt may have; ValueError where there is no prompt or no room."""
    room = max_seq_length - len(prompt)
    if not prompt:
        raise ValueError("a prompt has no tokens; give it at least one (a start token, say)")
    if room < 1:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of {max_seq_length}; "
            "load with a larger max_seq_length or shorten the prompt"
        )
    return min(params.max_tokens, room)


def cut_at_stop(text: str, params: SamplingParams) -> str:
    """Text up to the first stop string, which stays only where it was asked for."""
    found = [(text.index(stop), stop) for stop in params.stop_strings if stop in text]
    if not found:
        return text
    start, stop = min(found)
    return text[: start + len(stop)] if params.include_stop_str_in_output else text[:start]


def eos_token_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every end-of-sequence id that the tokenizer or the model's generation config names."""
    config = getattr(policy.base, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None})
