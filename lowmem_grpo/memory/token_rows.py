"""How attention takes the sequences of a micro-batch, decided from their lengths only, and the rows that it holds.

    side by side   all sequences in one call, (S, W): each with a copy of its prompt, and as wide as the longest
    prompts once   a call for each prompt and one for each of its completions, whose keys are the prompt's and its own:
                   P^2 instead of G P^2 pairs of a query and a key, and no padding, but more launches

`prompts` are those of a micro-batch: for each the places of its own, P - 1, and those of each of its completions.
A sliding window takes blocks of queries, each against the keys before it that are within its reach.
"""

from collections.abc import Sequence

Prompts = Sequence[Sequence[int]]
PAIRS_A_CALL = 2**20  # pairs of a query and a key, whose work takes a card longer than the launches of one more call
KEY_SHARE = 1 / 2  # share of a row, at most: keys and values only, and as many heads of them as of queries
BLOCK = 1024  # queries that meet a window's mask at a time
ALIGNED = 16  # numbers: rows of masks begin at multiples, as fused attention wants them


def prompts_once(prompts: Prompts) -> bool:
    """Return whether prompts are computed once, because the pairs of a query and a key that this saves are worth its
    calls; a completion without others goes with its prompt."""
    side_by_side = count_sequences(prompts) * widest(prompts) ** 2 // 2
    pairs = sum(own**2 // 2 + sum(length * (own + length // 2) for length in others) for own, *others in prompts)
    calls = sum(len(others) + (own > 0 and len(others) > 1) for own, *others in prompts)
    return side_by_side - pairs > PAIRS_A_CALL * (calls - 1)


def token_rows(prompts: Prompts) -> int:
    """Rows that attention holds beside the packed ones; keys and values copied alone count as a part of a row."""
    if count_sequences(prompts) == 1:
        return 0
    if not prompts_once(prompts):
        return count_sequences(prompts) * widest(prompts)
    copied = sum(own + length for own, *others in prompts if own and len(others) > 1 for length in others)
    return sum(map(sum, prompts)) + int(KEY_SHARE * copied)


def count_sequences(prompts: Prompts) -> int:
    return sum(len(others) for _, *others in prompts)


def widest(prompts: Prompts) -> int:
    return max(own + max(others) for own, *others in prompts)


def window_block(width: int) -> int:
    """Return queries of a block where the longest sequence has `width` tokens."""
    return min(BLOCK, width)


def window_reach(window: int, width: int) -> int:
    """Keys before a block that it is shown: those of its window, and a few more, which the mask hides."""
    return -(-min(window - 1, width) // ALIGNED) * ALIGNED


def mask_numbers(window: int | None, width: int) -> int:
    """Numbers of the one mask that all blocks and layers with a window share; 0 where there is no window."""
    if window is None or window >= width:
        return 0
    block = window_block(width)
    return block * -(-(window_reach(window, width) + block) // ALIGNED) * ALIGNED
