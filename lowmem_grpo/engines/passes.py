"""Passes of the trainer's model over rows and their cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowmem_grpo.engines.generation_state import DecodeState
from lowmem_grpo.kernels.frozen import WIDE, WideWeights
from lowmem_grpo.kernels.lora_factors import Kept, kept_factors
from lowmem_grpo.models.policy import Policy, evaluating

FED = 256  # tokens fed at once to rows that are resumed or go on


class Passes:
    """Feeds tokens to the model of a policy, and returns logits."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.wide: WideWeights | None = None  # quantized weights in 16 bits

    def feed(self, state: DecodeState, tokens: Tensor, real: Tensor | None = None, at_once: int = FED) -> Tensor:
        """Feed tokens (B, S), of which the `real` ones are no padding; returns the logits (B, V) of the next ones."""
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        routes, width = list[Tensor](), state.real.shape[1] + tokens.shape[1]
        for ids, true in zip(tokens.split(at_once, dim=1), real.split(at_once, dim=1), strict=True):
            hidden = self.feed_piece(state, ids, true)[:, -1:]
            routes += [] if state.routes is None else [state.routes]
            state.cache.reserve(width)  # no piece to come makes it grow by half
        state.routes = torch.cat(routes, 1) if routes else None
        return self.logits(hidden).squeeze(1)

    def feed_piece(self, state: DecodeState, ids: Tensor, real: Tensor) -> Tensor:
        """Feed tokens (B, S) in one pass; returns their last hidden states (B, S, D)."""
        width = ids.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # padding must attend to something
        before = state.real[:, None].expand(-1, width, -1)
        mask = torch.cat([before, causal & real[:, None, :] | itself], dim=2)[:, None]
        positions = (state.positions[:, None] + real.long().cumsum(-1)).clamp(min=0)
        hidden = self.hidden(ids, positions, mask, real, state)
        state.real = torch.cat([state.real, real], dim=1)
        state.positions = state.positions + real.sum(-1)
        return hidden

    @contextmanager
    def evaluating(self, lasting: Kept | None = None) -> Iterator[None]:
        """Inside, nothing is dropped out, no gradient is computed, and adapters are kept as products take them, in
        `lasting` for longer."""
        token = WIDE.set(self.wide)
        try:
            with evaluating(self.policy.model), torch.no_grad(), kept_factors(lasting):
                yield
        finally:
            WIDE.reset(token)

    def hidden(self, input_ids: Tensor, positions: Tensor, mask: Tensor, real: Tensor, state: DecodeState,
               **named: Any) -> Tensor:
        """The last hidden states (B, Q, D) of input_ids (B, Q), which are `real` (B, Q); mask (B, 1, Q, L)."""
        recorder = self.policy.recorder()
        with self.policy.autocast():
            out = self.policy.backbone(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=state.cache,
                use_cache=True, cached=True, real=real, **named,
                **({} if recorder is None else {"routes": recorder}),
            )
        state.routes = None if recorder is None else recorder.taken(len(input_ids))
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.policy.head.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


def left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids (P, L), and whether each place holds a real token (P, L); prompts end at the right edge."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side="left")
    real = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], True, padding_side="left")
    return input_ids.to(device), real.to(device)
