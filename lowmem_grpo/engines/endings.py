"""Where a completion ends, other than at its budget."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams


class Endings:
    """The end tokens and stop strings of a call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams, eos_ids: list[int]) -> None:
        self.tokenizer, self.stops = tokenizer, params.stop_strings
        self.tokens = [*(params.stop_token_ids or []), *([] if params.ignore_eos else eos_ids)]
        self.held: Tensor | None = None  # `tokens` on the device
        self.reach = max((len(stop.encode()) for stop in self.stops), default=0) + 4  # a token may be a single byte

    def of(self, ids: Tensor) -> Tensor:
        """(B,) bool: whether the last tokens of completions (B, C) end them."""
        if self.held is None or self.held.device != ids.device:  # making it anew in each step would wait for the device
            self.held = torch.tensor(self.tokens, dtype=torch.long, device=ids.device)
        ended = (ids[:, -1:] == self.held).any(-1)  # `isin` sorts where there are many, which may wait for the device
        if self.stops:
            matches = [self.stopped(text) for text in self.tokenizer.batch_decode(ids[:, -self.reach :])]
            ended = ended | torch.tensor(matches, device=ended.device)
        return ended

    def end(self, ids: list[int]) -> bool:
        """Whether the last token of one completion ends it."""
        if ids[-1] in self.tokens:
            return True
        return bool(self.stops) and self.stopped(str(self.tokenizer.decode(ids[-self.reach :])))

    def stopped(self, text: str) -> bool:
        """Whether a stop string is in a text."""
        return any(stop in text for stop in self.stops)
