"""Turns that a caller's own code asked for, as a rollout that is trained on. A turn whose prompt begins with all that
came before continues a sequence, any other begins one; all share the rollout's reward, and a turn of several histories
is trained once."""

from collections import Counter
from collections.abc import Iterable, Sequence

from lowmem_grpo.types import Rollout, RolloutGroup, Split, Turn

History = Sequence[Turn]  # the turns of one conversation, in order
DONE, CUT = "done", "max_tokens"  # why a rollout ended: its code came back, or its last turn was cut


def rollout_of(histories: Sequence[History], prompt: list[int] | None = None) -> Rollout:
    """The rollout of these histories, in a group with this prompt (P,); without one, it is that of the first turn. A
    turn is the same in two histories where it is the same object. Where histories share turns, their order changes
    which of them carries a shared turn, and no gradient. ValueError where there is no turn."""
    sequences = sequences_among(turns_of(histories))
    if not sequences:
        raise ValueError("a rollout without a turn of the policy has nothing to train")
    made = Rollout([], [], "stop", trained=[])
    first = sequences[0][0].prompt_ids
    for turns in sequences:
        if made.completion_ids or turns[0].prompt_ids != (first if prompt is None else prompt):
            made.splits.append(Split(len(made.completion_ids), turns[0].prompt_ids))
        add(made, turns)
    last = next(turn for history in reversed(histories) for turn in reversed(history))
    made.finish_reason, made.text = last.finish_reason, last.text
    made.ending = CUT if last.finish_reason == "length" else DONE
    made.policy_version = min(turn.policy_version for turn in made.turns)
    made.cached_tokens = sum(turn.cached_tokens for turn in made.turns)
    return made


def group_of(members: Sequence[Sequence[History]]) -> RolloutGroup:
    """The rollouts of one task. The prompt of the group is the one that most of them began with."""
    firsts = [tuple(next(iter(turns_of(histories))).prompt_ids) for histories in members]
    prompt = list(Counter(firsts).most_common(1)[0][0])
    return RolloutGroup({}, prompt, [rollout_of(histories, prompt) for histories in members])


def turns_of(histories: Iterable[History]) -> list[Turn]:
    return list({id(turn): turn for history in histories for turn in history}.values())


def sequences_among(turns: list[Turn]) -> list[list[Turn]]:
    """Return the turns as sequences, each turn behind the longest that it continues."""
    sequences: list[list[Turn]] = []
    ends: list[list[int]] = []  # all ids of each sequence
    for turn in turns:
        fitting = [at for at, ids in enumerate(ends) if turn.prompt_ids[: len(ids)] == ids]
        at = max(fitting, key=lambda place: len(ends[place]), default=len(ends))
        if at == len(ends):
            sequences.append([])
            ends.append([])
        sequences[at].append(turn)
        ends[at] = [*turn.prompt_ids, *turn.completion_ids]
    return sequences


def add(rollout: Rollout, turns: list[Turn]) -> None:
    """Add the turns of a sequence: what was drawn, and as context what came between."""
    assert rollout.trained is not None
    held = len(turns[0].prompt_ids)
    for turn in turns:
        between = turn.prompt_ids[held:]
        rollout.completion_ids += [*between, *turn.completion_ids]
        rollout.rollout_logprobs += [*[0.0] * len(between), *turn.logprobs]
        rollout.trained += [*[False] * len(between), *[True] * len(turn.completion_ids)]
        held = len(turn.prompt_ids) + len(turn.completion_ids)
    rollout.turns += turns
