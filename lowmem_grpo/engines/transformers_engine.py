"""Rollouts by the trainer's own model through transformers: no second copy, nothing to sync, any device.

All prompts of a call run in one batch. Each prompt is prefilled once and its cache repeated for its n completions;
rows that have finished leave the batch.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.decoding import draw
from lowmem_grpo.engines.kv_cache import GrowingCache, left_padded
from lowmem_grpo.engines.stopping import budget_of, cut_at_stop, eos_token_ids
from lowmem_grpo.kernels.logits import LogitShape
from lowmem_grpo.kernels.matmul import matmul_fp32
from lowmem_grpo.policy import Policy
from lowmem_grpo.sampling import SamplingParams
from lowmem_grpo.types import Rollout

COMPACT_BELOW = 0.9  # finished rows leave the batch when fewer than this share of it is alive


@dataclass
class Decode:
    """The rows still in the batch, B of them; `real` marks cache places that hold a token (left padding does not)."""

    cache: GrowingCache
    rows: Tensor  # (B,) which output row
    tokens: Tensor  # (B,) the last token drawn
    alive: Tensor  # (B,) bool
    real: Tensor  # (B, L) bool
    positions: Tensor  # (B,) of the last token drawn

    def compact(self) -> None:
        """Drop the rows that have finished."""
        keep = self.alive.nonzero().squeeze(-1)
        self.cache.batch_select_indices(keep)
        self.rows, self.tokens, self.alive = self.rows[keep], self.tokens[keep], self.alive[keep]
        self.real, self.positions = self.real[keep], self.positions[keep]


class TransformersEngine:
    """The engine that needs nothing but the trainer's model."""

    name = "transformers"

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.policy_version = 0
        self.kv_bytes = 0
        self.eos_ids = eos_token_ids(policy, tokenizer)

    def on_policy_update(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def sleep(self) -> None:
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing to do: the cache is made anew in each call."""

    def close(self) -> None:
        """Nothing to free: the weights are the trainer's, and the cache ends with its call."""

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Rollout]]:
        if not prompts:
            return []
        budgets = [budget_of(prompt, params, self.max_seq_length) for prompt in prompts for _ in range(params.n)]
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            ids, logprobs, lengths, stopped = self.decode(prompts, params, budgets)
        finally:
            self.policy.model.train(was_training)
        if logprobs.isnan().any():
            raise RuntimeError("the model gave NaN logits: load it in bfloat16 or float32, and check the learning rate")
        rollouts = self.rollouts(ids, logprobs, lengths, stopped, params)
        return [rollouts[start : start + params.n] for start in range(0, len(rollouts), params.n)]

    def decode(self, prompts: list[list[int]], params: SamplingParams, budgets: list[int]) -> tuple[Tensor, ...]:
        """ids (R, C), logprobs (R, C), lengths (R,), stopped (R,), where R = prompts * n and C the largest budget."""
        device, total, budget = self.policy.device, len(prompts) * params.n, max(budgets)
        generator = torch.Generator(device)
        generator.manual_seed(time.time_ns() % 2**63 if params.seed is None else params.seed)
        ids = torch.zeros(total, budget, dtype=torch.long, device=device)
        logprobs = torch.zeros(total, budget, device=device)
        lengths = torch.tensor(budgets, device=device)
        stopped = torch.zeros(total, dtype=torch.bool, device=device)
        state, logits = self.prefill(prompts, params.n)
        self.kv_bytes = state.cache.nbytes
        for step in range(budget):
            state.tokens, drawn = draw(logits, params, generator)
            ids[state.rows, step], logprobs[state.rows, step] = state.tokens, drawn
            ended = state.alive & self.ends(state, ids[:, : step + 1], params)
            lengths[state.rows[ended]] = step + 1
            stopped[state.rows[ended]] = True
            state.alive = state.alive & ~ended & (lengths[state.rows] > step + 1)
            remaining = int(state.alive.sum())
            if remaining == 0 or step + 1 == budget:
                break
            if remaining < COMPACT_BELOW * len(state.rows):
                state.compact()
            logits = self.extend(state)
            self.kv_bytes = max(self.kv_bytes, state.cache.nbytes)
        return ids.cpu(), logprobs.cpu(), lengths.cpu(), stopped.cpu()

    def prefill(self, prompts: list[list[int]], n: int) -> tuple[Decode, Tensor]:
        """The state after the prompts, and the logits (P * n, V) of the first token."""
        input_ids, real = left_padded(prompts, self.tokenizer.pad_token_id or 0, self.policy.device)
        width = input_ids.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=input_ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=input_ids.device)  # a padding place must attend somewhere
        positions = real.long().cumsum(-1).sub(1).clamp(min=0)
        cache = GrowingCache()
        logits = self.forward(input_ids, positions, (causal & real[:, None, :] | itself)[:, None], cache)
        cache.batch_repeat_interleave(n)
        rows = torch.arange(len(prompts) * n, device=input_ids.device)
        state = Decode(
            cache, rows, rows, torch.ones_like(rows, dtype=torch.bool), real.repeat_interleave(n, 0),
            positions[:, -1].repeat_interleave(n),
        )
        return state, logits.repeat_interleave(n, 0)

    def extend(self, state: Decode) -> Tensor:
        """Feed the tokens last drawn; logits (B, V) of the next ones."""
        state.positions = state.positions + 1
        state.real = torch.cat([state.real, state.alive[:, None]], dim=1)
        state.real[:, -1] = True
        return self.forward(state.tokens[:, None], state.positions[:, None], state.real[:, None, None, :], state.cache)

    def forward(self, input_ids: Tensor, positions: Tensor, mask: Tensor, cache: GrowingCache) -> Tensor:
        """fp32 logits (B, V) after the last of input_ids (B, Q); mask (B, 1, Q, L)."""
        with self.policy.autocast():
            out = self.policy.backbone(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=cache,
                use_cache=True, cached=True,
            )
        head = self.policy.head
        logits = matmul_fp32(out.last_hidden_state[:, -1].to(head.weight.dtype), head.weight.T)
        return LogitShape(scale=head.logit_scale, softcap=head.softcap).apply_(logits, head.bias)

    def ends(self, state: Decode, ids: Tensor, params: SamplingParams) -> Tensor:
        """(B,) bool: whether the token last drawn ends its completion."""
        ending = [*(params.stop_token_ids or []), *([] if params.ignore_eos else self.eos_ids)]
        ended = torch.isin(state.tokens, torch.tensor(ending, dtype=torch.long, device=state.tokens.device))
        if params.stop_strings:
            tail = max(len(stop.encode()) for stop in params.stop_strings) + 4  # a token may be a single byte
            texts = self.tokenizer.batch_decode(ids[state.rows, -tail:])
            matches = [any(stop in text for stop in params.stop_strings) for text in texts]
            ended = ended | torch.tensor(matches, device=ended.device)
        return ended

    def rollouts(
        self, ids: Tensor, logprobs: Tensor, lengths: Tensor, stopped: Tensor, params: SamplingParams
    ) -> list[Rollout]:
        """Host-side rollouts of the finished rows."""
        completions = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=params.skip_special_tokens)
        return [
            Rollout(
                completion_ids=completion, rollout_logprobs=row[: len(completion)].tolist(),
                finish_reason="stop" if stop else "length", text=cut_at_stop(text, params),
                policy_version=self.policy_version,
            )
            for completion, row, stop, text in zip(completions, logprobs, stopped.tolist(), texts, strict=True)
        ]
