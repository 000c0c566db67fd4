"""Rollouts by the trainer's own model through transformers: no second copy, nothing to sync, any device.

All prompts of a call are decoded in one batch. Each prompt is prefilled once, and its cache is repeated for its n
completions; finished rows leave the batch. If memory runs out, fewer rows are decoded at once. Unfinished rows keep the
tokens they have and go on from there, because drawing them anew would favour short completions.

Turns of episodes are decoded in rounds: all that are ready together, then all that follow from them. So what is drawn
depends on the requests only, and not on how long a tool takes.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, FinishedPrompts, Meanwhile, OnGroup, Request
from lowmem_grpo.engines.decode import Decode
from lowmem_grpo.engines.decoding import budget_of, cut_at_stop, draw
from lowmem_grpo.engines.drawn import Drawn, Part
from lowmem_grpo.engines.drawn_turns import DrawnTurns
from lowmem_grpo.engines.kept_rows import Continued, KeptRows
from lowmem_grpo.engines.kv_cache import left_padded, right_aligned
from lowmem_grpo.engines.pace import Pace
from lowmem_grpo.kernels.logits import LogitShape
from lowmem_grpo.kernels.matmul import matmul_fp32
from lowmem_grpo.memory.bounds import Bound, RunMemory, Shortage, tried
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

COMPACT_BELOW = 0.9  # finished rows leave the batch once less than this share of it is unfinished
FED = 256  # tokens fed at once to rows that are resumed or go on


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
        self.kept, self.widest = KeptRows(), 0  # of the turns of a call, and the most that were decoded together
        self.pace = Pace()

    @property
    def slots(self) -> int | None:
        return self.bound.under(None)

    def on_policy_update(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self.forget()

    def sleep(self) -> None:
        self.forget()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing to do: each call makes its own cache."""

    def close(self) -> None:
        """Free what was kept; the weights are the trainer's."""
        self.forget()

    def forget(self) -> None:
        """Drop what was computed for turns that may go on."""
        self.kept.rows.clear()
        self.widest = 0

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[list[Rollout]]:
        if not prompts:
            return []
        finished = FinishedPrompts(len(prompts), on_group, meanwhile)
        self.forget()
        most = params.max_tokens
        budgets = [budget_of(prompt, most, self.max_seq_length) for prompt in prompts for _ in range(params.n)]
        self.kv_bytes = 0
        self.pace.begin()
        drawn = self.decode(Drawn.nothing(prompts, params, budgets, self.policy.device, finished))
        self.report(drawn, finished.missing)
        return finished.result()

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        """Turns of episodes in rounds, as `Engine.converse` says. Without a bound on the rows that memory has room for,
        as many are kept for their next turns as were decoded together at most."""
        self.kv_bytes, goes_on = 0, getattr(conversation, "goes_on", False)
        if not goes_on:
            self.forget()  # another's keys
        self.pace.begin()
        try:
            while requests := conversation.take(busy=False):
                self.widest = max(self.widest, len(requests))
                self.round(requests, params, conversation, self.bound.under(None) or 2 * self.widest)
        except BaseException:
            self.forget()
            raise
        if not goes_on:
            self.forget()

    def round(self, requests: list[Request], params: SamplingParams, conversation: Conversation, room: int) -> None:
        """Decode some turns together, with at most `room` rows in memory."""
        budgets = [budget_of(request.ids, request.max_tokens, self.max_seq_length) for request in requests]
        drawn = DrawnTurns.asked(requests, params, budgets, self.policy.device, conversation, self.kept, room)
        self.decode(drawn)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, nothing is dropped out and no gradient is computed; the mode of the model comes back."""
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.policy.model.train(was_training)

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
        drawn.give_routes(rows.tolist(), rollouts)
        for place, prompt in enumerate(prompts):
            drawn.finished.add(prompt, rollouts[place * n : place * n + n])

    def decode(self, drawn: Drawn) -> Drawn:
        """Draw every row to its end: all together, or in parts of as many rows as memory has room for."""
        parts = deque([Part(list(range(len(drawn.ids))))])
        while parts:
            part = parts.popleft()
            size = self.bound.under(len(part.rows)) or 1
            if size < len(part.rows):
                parts.extendleft(reversed(part.split(size)))
                continue
            with self.evaluating():
                failed = tried(lambda held=part: self.decode_part(drawn, held), self.policy.device)  # type: ignore[misc]
            if isinstance(failed, Shortage):
                parts.extendleft(reversed(part.split(self.smaller(drawn, size, len(part.rows), failed))))
        return drawn

    def smaller(self, drawn: Drawn, size: int, left: int, shortage: Shortage) -> int:
        """How many of the rows that are `left` of `size` to decode at once after a shortage: all, where memory could be
        had by dropping rows that were only kept, else half."""
        if drawn.finished.failed_outside is not None:
            raise drawn.finished.failed_outside  # memory ran out elsewhere, so that the call ends
        what = f"sampling {size} at once"
        if dropped := drawn.shed():
            self.bound.note(what, shortage, f"the keys and values of {dropped} earlier turns are dropped, and the work "
                                            "is repeated")
            return left
        self.bound.lower(what, shortage, size // 2 or None)
        return max(1, left // 2)

    def decode_part(self, drawn: Drawn, part: Part) -> None:
        """Draw the rows of a part to their ends. `part` keeps up with them: after an error it holds what is left."""
        params = drawn.params
        rows = torch.tensor(part.rows, device=self.policy.device)
        uniform = drawn.uniform(part, self.policy.device)
        drawn.reopen(rows)
        self.pace.resume()
        budget = int(drawn.budgets[rows].max())
        state, logits = self.begin(drawn, part)
        self.kv_bytes = max(self.kv_bytes, state.cache.nbytes + drawn.kept_bytes)
        for step in range(part.start, budget):
            state.tokens, logprobs = draw(logits, params, uniform(state.rows, step))
            drawn.ids[state.rows, step], drawn.logprobs[state.rows, step] = state.tokens, logprobs.float()
            ended = state.alive & self.ends(state, drawn.ids[:, : step + 1], params)
            state.alive = state.alive & ~ended & (drawn.lengths[state.rows] > step + 1)
            left = state.rows[state.alive].tolist()
            self.pace.step(len(part.rows))
            drawn.lengths[state.rows[ended]] = step + 1
            drawn.stopped[state.rows[ended]] = True
            before, part.rows, part.start = part.rows, left, step + 1
            if drawn.finished.on_group is not None and len(left) < len(before):
                self.report(drawn, drawn.finish(set(before).difference(left)))
            if not left or len(left) < COMPACT_BELOW * len(state.rows):
                drawn.leave(state, left, step)
            if not left:
                break
            with self.pace.paused():
                drawn.between()
            if len(left) < COMPACT_BELOW * len(state.rows):
                state.compact()
            logits = self.extend(state)
            drawn.keep(state.rows, step, state.routes)
            self.kv_bytes = max(self.kv_bytes, state.cache.nbytes + drawn.kept_bytes)

    def begin(self, drawn: Drawn, part: Part) -> tuple[Decode, Tensor]:
        """The state before the next token of a part's rows, and the logits (B, V) of that token."""
        continued = drawn.going_on(part.rows)
        known = {row for more in continued for row in more.rows}
        made = [self.go_on(drawn, more) for more in continued]
        if fresh := [row for row in part.rows if row not in known]:
            made.append(self.prefill(drawn, fresh))
        state, logits = Decode.joined([state for state, _ in made]), torch.cat([logits for _, logits in made])
        if part.start:
            self.pace.read(part.start * len(part.rows))
            logits = self.feed(state, drawn.ids[state.rows, : part.start])
            drawn.keep(state.rows, part.start - 1, state.routes)  # the others' are known from their first pass
        return state, logits

    def prefill(self, drawn: Drawn, rows: list[int]) -> tuple[Decode, Tensor]:
        """The state after the prompts of B rows, each of which is computed once, and the next tokens' logits (B, V)."""
        prompts, counts = drawn.prompts_of(rows)
        input_ids, real = left_padded(prompts, self.tokenizer.pad_token_id or 0, self.policy.device)
        state = Decode.of(torch.arange(len(prompts), device=input_ids.device))
        logits = self.feed(state, input_ids, real, at_once=input_ids.shape[1])
        self.pace.read(sum(map(len, prompts)))
        drawn.keep_prompts(rows, prompts, counts, state.routes)
        owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
        state.select(torch.tensor(owners, device=input_ids.device))
        logits = logits[state.rows]
        state.rows = torch.tensor(rows, device=input_ids.device)
        return state, logits

    def go_on(self, drawn: Drawn, more: Continued) -> tuple[Decode, Tensor]:
        """The same for prompts whose first tokens are held."""
        device = self.policy.device
        cache = right_aligned([kept.piece(held) for kept, held in zip(more.kept, more.held, strict=True)],
                              max(more.held), room=more.fed)
        state = Decode.of(torch.tensor(more.rows, device=device), cache, torch.tensor(more.held, device=device))
        rest = left_padded([ids[-more.fed :] for ids in more.prompts], self.tokenizer.pad_token_id or 0, device)
        logits = self.feed(state, *rest)
        self.pace.read(more.fed * len(more.rows))
        drawn.keep_continued(more, state.routes)
        return state, logits

    def feed(self, state: Decode, tokens: Tensor, real: Tensor | None = None, at_once: int = FED) -> Tensor:
        """Feed tokens (B, S), of which the `real` ones are no padding; returns the logits (B, V) of the next ones."""
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        routes: list[Tensor] = []
        for ids, true in zip(tokens.split(at_once, dim=1), real.split(at_once, dim=1), strict=True):
            width = ids.shape[1]
            causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
            itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # padding must attend to something
            before = state.real[:, None].expand(-1, width, -1)
            mask = torch.cat([before, causal & true[:, None, :] | itself], dim=2)[:, None]
            positions = (state.positions[:, None] + true.long().cumsum(-1)).clamp(min=0)
            logits = self.forward(ids, positions, mask, true, state)
            routes += [] if state.routes is None else [state.routes]
            state.real = torch.cat([state.real, true], dim=1)
            state.positions = state.positions + true.sum(-1)
        state.routes = torch.cat(routes, 1) if routes else None
        return logits

    def extend(self, state: Decode) -> Tensor:
        """Feed the tokens last drawn; returns the logits (B, V) of the next ones."""
        state.positions = state.positions + 1
        state.real = torch.cat([state.real, state.alive[:, None]], dim=1)
        state.real[:, -1] = True
        alive = state.alive[:, None]  # rows that are done are decoded on, but what is kept of them must not change
        return self.forward(state.tokens[:, None], state.positions[:, None], state.real[:, None, None, :], alive, state)

    def forward(self, input_ids: Tensor, positions: Tensor, mask: Tensor, real: Tensor, state: Decode) -> Tensor:
        """fp32 logits (B, V) after the last of input_ids (B, Q), which are `real` (B, Q); mask (B, 1, Q, L)."""
        recorder = self.policy.recorder()
        with self.policy.autocast():
            out = self.policy.backbone(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=state.cache,
                use_cache=True, cached=True, real=real,
                **({} if recorder is None else {"routes": recorder}),
            )
        state.routes = None if recorder is None else recorder.taken(len(input_ids))
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
