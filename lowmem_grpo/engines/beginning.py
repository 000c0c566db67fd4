"""What rows need before their first step of decoding: their prompts are computed, each of them once."""

import torch
from torch import Tensor

from lowmem_grpo.engines.decode import Decode
from lowmem_grpo.engines.drawn import Drawn, Part
from lowmem_grpo.engines.kept_rows import Continued
from lowmem_grpo.engines.kv_cache import left_padded, right_aligned
from lowmem_grpo.engines.pace import Pace
from lowmem_grpo.engines.passes import Passes


class Beginning:
    """Computes prompts, or what is not yet held of them, and what rows drew before they were interrupted."""

    def __init__(self, passes: Passes, pace: Pace, pad_id: int) -> None:
        self.passes, self.pace, self.pad_id = passes, pace, pad_id

    def begin(self, drawn: Drawn, part: Part, running: int) -> tuple[Decode, Tensor]:
        """The state before the next token of a part's rows, and the logits (B, V) of that token, beside so many rows
        that run."""
        continued = drawn.going_on(part.rows, running)
        known = {row for more in continued for row in more.rows}
        made = [self.go_on(drawn, more) for more in continued]
        if fresh := [row for row in part.rows if row not in known]:
            made.append(self.prefill(drawn, fresh))
        state, logits = Decode.joined([state for state, _ in made]), torch.cat([logits for _, logits in made])
        if part.start:
            self.pace.read(part.start * len(part.rows))
            logits = self.passes.feed(state, drawn.ids[state.rows, : part.start])
            drawn.keep(state.rows, part.start - 1, state.routes)  # the others' are known from their first pass
        return state, logits

    def prefill(self, drawn: Drawn, rows: list[int]) -> tuple[Decode, Tensor]:
        """The state after the prompts of B rows, each of which is computed once, and the next tokens' logits (B, V)."""
        prompts, counts = drawn.prompts_of(rows)
        input_ids, real = left_padded(prompts, self.pad_id, self.passes.policy.device)
        state = Decode.of(torch.arange(len(prompts), device=input_ids.device))
        logits = self.passes.feed(state, input_ids, real, at_once=input_ids.shape[1])
        self.pace.read(sum(map(len, prompts)))
        drawn.keep_prompts(rows, prompts, counts, state.routes)
        owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
        state.select(torch.tensor(owners, device=input_ids.device))
        logits = logits[state.rows]
        state.rows = torch.tensor(rows, device=input_ids.device)
        return state, logits

    def go_on(self, drawn: Drawn, more: Continued) -> tuple[Decode, Tensor]:
        """The same for prompts whose first tokens are held."""
        device = self.passes.policy.device
        cache = right_aligned([kept.piece(held) for kept, held in zip(more.kept, more.held, strict=True)],
                              max(more.held), room=more.fed)
        state = Decode.of(torch.tensor(more.rows, device=device), cache, torch.tensor(more.held, device=device))
        rest = left_padded([ids[-more.fed :] for ids in more.prompts], self.pad_id, device)
        logits = self.passes.feed(state, *rest)
        self.pace.read(more.fed * len(more.rows))
        drawn.keep_continued(more, state.routes)
        return state, logits
