"""Rollouts by the trainer's own model through transformers: no second copy, nothing to sync, any device.

All prompts of a call are decoded in one batch. Each prompt is prefilled once, and its cache is repeated for its n
completions; finished rows leave the batch. If memory runs out, fewer rows are decoded at once. Unfinished rows keep the
tokens they have and go on from there, because drawing them anew would favour short completions.
"""

import random
import time
from collections import deque
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, FinishedPrompts, OnGroup
from lowmem_grpo.engines.decoding import budget_of, cut_at_stop, draw
from lowmem_grpo.engines.kv_cache import GrowingCache, left_padded
from lowmem_grpo.engines.rounds import in_rounds
from lowmem_grpo.kernels.logits import LogitShape
from lowmem_grpo.kernels.matmul import matmul_fp32
from lowmem_grpo.memory.bounds import Bound, RunMemory, Shortage, tried
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

COMPACT_BELOW = 0.9  # finished rows leave the batch once less than this share of it is unfinished
REPLAYED = 256  # tokens fed at once to rows that are resumed


@dataclass
class Decode:
    """The B rows still in the batch. `real` marks the cache places that hold a token, not left padding."""

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


@dataclass
class Drawn:
    """What a call has drawn so far: R = prompts * n rows of at most C tokens."""

    prompts: list[list[int]]
    params: SamplingParams
    seed: int
    ids: Tensor  # (R, C)
    logprobs: Tensor  # (R, C)
    budgets: Tensor  # (R,)
    lengths: Tensor  # (R,) of the completion, or its budget until it is finished
    stopped: Tensor  # (R,) bool
    finished: FinishedPrompts
    unfinished: list[int]  # number of rows, for each prompt

    @classmethod
    def nothing(cls, prompts: list[list[int]], params: SamplingParams, budgets: list[int],
                device: torch.device, finished: FinishedPrompts) -> "Drawn":
        """Before the first token."""
        seed = time.time_ns() % 2**63 if params.seed is None else params.seed
        total, width, most = len(budgets), max(budgets), torch.tensor(budgets, device=device)
        return cls(
            prompts, params, seed, torch.zeros(total, width, dtype=torch.long, device=device),
            torch.zeros(total, width, device=device), most, most.clone(),
            torch.zeros(total, dtype=torch.bool, device=device), finished, [params.n] * len(prompts),
        )

    def prompts_of(self, rows: list[int]) -> tuple[list[list[int]], list[int]]:
        """The prompts of some rows, and how many of the rows belong to each."""
        shared = [(owner, len(list(same))) for owner, same in groupby(row // self.params.n for row in rows)]
        return [self.prompts[owner] for owner, _ in shared], [count for _, count in shared]

    def finish(self, rows: set[int]) -> list[int]:
        """Count rows as finished; returns the prompts that have no unfinished rows left."""
        for row in rows:
            self.unfinished[row // self.params.n] -= 1
        return sorted({row // self.params.n for row in rows if not self.unfinished[row // self.params.n]})

    def reopen(self, rows: Tensor) -> None:
        """Undo what an interrupted step may have written about unfinished rows."""
        self.lengths[rows], self.stopped[rows] = self.budgets[rows], False


@dataclass
class Part:
    """Rows that are decoded together, all with `start` tokens drawn. While decoding, finished rows leave it and `start`
    grows, so that the rest can be resumed."""

    rows: list[int]
    start: int = 0

    def split(self, size: int) -> list["Part"]:
        """Parts of at most `size` rows, in order."""
        return [Part(self.rows[i : i + size], self.start) for i in range(0, len(self.rows), size)]

    def generator(self, seed: int, device: torch.device) -> torch.Generator:
        """Random numbers of this part, from the call's seed for its very beginning, otherwise from a derived one."""
        if self.rows[0] or self.start:
            seed = random.Random(f"{seed}-{self.rows[0]}-{self.start}").getrandbits(62)
        return torch.Generator(device).manual_seed(seed)


class TransformersEngine:
    """The engine that needs nothing but the trainer's model."""

    name = "transformers"

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.policy_version = 0
        self.kv_bytes = 0
        self.eos_ids = policy.eos_token_ids(tokenizer)
        self.bound: Bound = RunMemory().rollout  # on the rows that are decoded together

    def on_policy_update(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def sleep(self) -> None:
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing to do: each call makes its own cache."""

    def close(self) -> None:
        """Nothing to free: the weights are the trainer's, and each call frees its cache."""

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        if not prompts:
            return []
        finished = FinishedPrompts(len(prompts), on_group)
        budgets = [budget_of(prompt, params, self.max_seq_length) for prompt in prompts for _ in range(params.n)]
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            drawn = self.decode(Drawn.nothing(prompts, params, budgets, self.policy.device, finished))
        finally:
            self.policy.model.train(was_training)
        self.report(drawn, finished.missing)
        return finished.result()

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        in_rounds(self, conversation, params)

    def report(self, drawn: Drawn, prompts: list[int]) -> None:
        """Copy the rows of finished prompts to the host, and report each prompt."""
        if not prompts:
            return
        n = drawn.params.n
        rows = torch.tensor([row for prompt in prompts for row in range(prompt * n, prompt * n + n)])
        parts = (drawn.ids, drawn.logprobs, drawn.lengths, drawn.stopped)
        ids, logprobs, lengths, stopped = (part[rows.to(part.device)].cpu() for part in parts)
        if logprobs.isnan().any():
            raise RuntimeError("the model gave NaN logits: load it in bfloat16 or float32, and check the learning rate")
        rollouts = self.rollouts(ids, logprobs, lengths, stopped, drawn.params)
        for place, prompt in enumerate(prompts):
            drawn.finished.add(prompt, rollouts[place * n : place * n + n])

    def decode(self, drawn: Drawn) -> Drawn:
        """Draw every row to its end: all together, or in parts of as many rows as memory has room for."""
        self.kv_bytes = 0
        parts = deque([Part(list(range(len(drawn.ids))))])
        while parts:
            part = parts.popleft()
            size = self.bound.under(len(part.rows)) or 1
            if size < len(part.rows):
                parts.extendleft(reversed(part.split(size)))
                continue
            failed = tried(lambda held=part: self.decode_part(drawn, held), self.policy.device)  # type: ignore[misc]
            if isinstance(failed, Shortage):
                self.bound.lower(f"sampling {size} at once", failed, size // 2 or None)
                parts.extendleft(reversed(part.split(max(1, len(part.rows) // 2))))
        return drawn

    def decode_part(self, drawn: Drawn, part: Part) -> None:
        """Draw the rows of a part to their ends. `part` keeps up with them: after an error it holds what is left."""
        params = drawn.params
        rows = torch.tensor(part.rows, device=self.policy.device)
        generator = part.generator(drawn.seed, self.policy.device)
        drawn.reopen(rows)
        budget = int(drawn.budgets[rows].max())
        state, logits = self.prefill(*drawn.prompts_of(part.rows))
        state.rows = rows
        if part.start:
            logits = self.replay(state, drawn.ids[rows, : part.start])
        self.kv_bytes = max(self.kv_bytes, state.cache.nbytes)
        for step in range(part.start, budget):
            state.tokens, logprobs = draw(logits, params, generator)
            drawn.ids[state.rows, step], drawn.logprobs[state.rows, step] = state.tokens, logprobs
            ended = state.alive & self.ends(state, drawn.ids[:, : step + 1], params)
            state.alive = state.alive & ~ended & (drawn.lengths[state.rows] > step + 1)
            left = state.rows[state.alive].tolist()
            drawn.lengths[state.rows[ended]] = step + 1
            drawn.stopped[state.rows[ended]] = True
            before, part.rows, part.start = part.rows, left, step + 1
            if drawn.finished.on_group is not None and len(left) < len(before):
                self.report(drawn, drawn.finish(set(before).difference(left)))
            if not left or step + 1 == budget:
                break
            if len(left) < COMPACT_BELOW * len(state.rows):
                state.compact()
            logits = self.extend(state)
            self.kv_bytes = max(self.kv_bytes, state.cache.nbytes)

    def prefill(self, prompts: list[list[int]], counts: list[int]) -> tuple[Decode, Tensor]:
        """The state after the prompts, each repeated by its count to B rows, and the next tokens' logits (B, V)."""
        input_ids, real = left_padded(prompts, self.tokenizer.pad_token_id or 0, self.policy.device)
        width = input_ids.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=input_ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=input_ids.device)  # a padding place must attend to something
        positions = real.long().cumsum(-1).sub(1).clamp(min=0)
        cache = GrowingCache()
        logits = self.forward(input_ids, positions, (causal & real[:, None, :] | itself)[:, None], cache)
        owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
        rows = torch.tensor(owners, device=input_ids.device)
        cache.batch_select_indices(rows)
        state = Decode(cache, rows, rows, torch.ones_like(rows, dtype=torch.bool), real[rows], positions[rows, -1])
        return state, logits[rows]

    def replay(self, state: Decode, tokens: Tensor) -> Tensor:
        """Feed tokens (B, S) that were drawn before; returns the logits (B, V) of the next ones."""
        for chunk in tokens.split(REPLAYED, dim=1):
            rows, width = chunk.shape
            causal = torch.ones(width, width, dtype=torch.bool, device=chunk.device).tril()
            before = state.real[:, None].expand(-1, width, -1)
            mask = torch.cat([before, causal.expand(rows, -1, -1)], dim=2)[:, None]
            positions = state.positions[:, None] + torch.arange(1, width + 1, device=chunk.device)
            logits = self.forward(chunk, positions, mask, state.cache)
            state.real = torch.cat([state.real, torch.ones_like(chunk, dtype=torch.bool)], dim=1)
            state.positions = positions[:, -1]
        return logits

    def extend(self, state: Decode) -> Tensor:
        """Feed the tokens last drawn; returns the logits (B, V) of the next ones."""
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
