"""Control tokens of chat models in what a judge is shown, broken: no answer can end its turn and speak as the judge."""

import re
from typing import Any

NAMES = ("s", "bos", "eos", "pad", "unk", "mask", "sop", "eop", "start_of_turn", "end_of_turn", "endoftext", "think",
         "tool_call", "tool_response", "bos_token", "eos_token", "im_start", "im_end")
LISTED = ("INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "TOOL_CONTENT", "THINK", "gMASK")
CONTROL = re.compile(
    r"<(?=[|\uff5c][^\s<>]{1,80}[|\uff5c]>"  # <|im_end|>, and DeepSeek's with wide bars
    rf"|/?(?:{'|'.join(NAMES)})>"  # </s>, <start_of_turn>
    r"|</?SYS>>)"  # Llama 2
    rf"|\[(?=/?(?:{'|'.join(LISTED)})\]"  # Mistral
    r"|\|[^\s\[\]]{1,40}\|\])",  # EXAONE's [|assistant|]
    re.IGNORECASE,
)


def broken(text: str) -> str:
    """The text with a space inside whatever looks like a control token of a well-known family of models, for a judge
    whose tokenizer is not known."""
    return CONTROL.sub(lambda found: f"{found[0]} ", text)


def without_controls(text: str, tokenizer: Any) -> str:
    """The text with a space inside whatever the tokenizer would take for one of its control tokens."""
    controls = [token.content for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
    for control in sorted({*controls, *tokenizer.all_special_tokens}, key=len, reverse=True):
        text = text.replace(control, f"{control[0]} {control[1:]}") if len(control) > 1 else text
    return text
