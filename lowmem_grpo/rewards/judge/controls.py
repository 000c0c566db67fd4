"""Breaking of control tokens in a judge's input by a space, so that no answer can end its turn or speak for others."""

import re
import unicodedata
from itertools import pairwise
from typing import Any

# Names of control tokens of well-known model families, in angle brackets and in square ones.
ANGLE = ("s", "bos", "eos", "pad", "unk", "mask", "cls", "sep", "sop", "eop", "eod", "eot", "eoh", "eoa", "eoc",
         "endoftext", "think", "tools?", "tool_calls?", "tool_responses?", "tool_results?", "arg_key", "arg_value",
         "im_start", "im_end", "role", r"\w{1,40}_token", r"(?:start|end|begin|beginning)_of_\w{1,40}",
         r"seed:\w{1,40}", r"fim_\w{1,20}",
         r"(?:unused_?|reserved_|reserved_token_|extra_id_|special_|tokens_unused_|mask:)\d{1,6}")
SQUARE = ("INST", "SYSTEM_PROMPT", "MODEL_SETTINGS", "AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "TOOL_CONTENT",
          "ARGS", "CALL_ID", "THINK", "PREFIX", "MIDDLE", "SUFFIX", "IMG", "IMG_BREAK", "IMG_END", "AUDIO",
          "BEGIN_AUDIO", "gMASK", "sMASK", "MASK", "CLS", "SEP", "PAD", "UNK", "BOS", "EOS", "EOT", "@BOS@",
          "multimodal", "(?:start|end)_header_id", r"extra_id_\d{1,6}")
CONTROL = re.compile(r"<(?=[|\uff5c][^\s<>]{1,80}[|\uff5c]>"  # <|im_end|>, and DeepSeek's with wide bars
                     r"|/?[|\uff5c][\w\"]{1,40}>|/?[\w\"]{1,40}[|\uff5c]>"  # Gemma 4's <|turn> and <turn|>
                     rf"|/?(?:{'|'.join(ANGLE)})>"  # </s>, <start_of_turn>
                     r"|</?SYS>>)"  # Llama 2
                     rf"|\[(?=/?(?:{'|'.join(SQUARE)})\]"  # Mistral, Kimi, GLM
                     r"|\|[^\s\[\]]{1,40}\|\]"  # EXAONE's [|assistant|]
                     r"|e~\[)|\](?=~!?b[\[\]]|<\])"  # MiniMax's [e~[, ]~b] and ]<]
                     r"|>(?=>[a-z_]{3,20}<<)"  # Falcon's >>QUESTION<<
                     r"|(?<!\S)/(?=(?:no_?)?think(?!\w))",  # Qwen's and GLM's switches /think and /no_think
                     re.IGNORECASE)
INVISIBLE = re.compile(r"[\u034f\u115f\u1160\u3164\u180b-\u180f\ufe00-\ufe0f]")  # in addition to Unicode category Cf
TRIES = 20


def broken(text: str) -> str:
    """Return the text with a space inside each likely control token of well-known model families, for a judge whose
    tokenizer is unknown. A token is also found if it appears only after the normalisation of many tokenizers, which
    removes invisible characters and applies NFKC (wide characters become narrow)."""
    pairs = [(char, place) for place, letter in enumerate(text) if not INVISIBLE.match(letter)
             and unicodedata.category(letter) != "Cf" for char in unicodedata.normalize("NFKC", letter)]
    matches = CONTROL.finditer("".join(char for char, _ in pairs))
    ends = [pairs[match.end() - 1][1] + 1 for match in matches]
    return " ".join(text[start:end] for start, end in pairwise([0, *ends, len(text)]))


def without_controls(text: str, tokenizer: Any) -> str:
    """Return the text with a space inside each part that the tokenizer would encode as a control token, even if only
    after its normalisation (of wide characters, to lower case). This is repeated, at most TRIES times, since breaking
    one token may create another."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    controls = {control for control in (*added, *tokenizer.all_special_tokens) if len(control) > 1 and control.strip()}
    for control in sorted(controls, key=len, reverse=True):
        text = text.replace(control, f"{control[0]} {control[1:]}")
    numbers = {*tokenizer.convert_tokens_to_ids(sorted(controls))} - {tokenizer.unk_token_id}
    for _ in range(TRIES if tokenizer.is_fast else 0):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        starts = [start for number, (start, end) in spans if number in numbers and end - start > 1]
        for start in reversed(starts):
            text = f"{text[:start + 1]} {text[start + 1:]}"
        if not starts:
            break
    return text
