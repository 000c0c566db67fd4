"""Rollouts made by a user's function: TRL's `rollout_func(prompts, trainer) -> dict`, with the interface of TRL 1.16.

The function gets the batch's prompts as they are in the dataset, each repeated `num_generations` times in a row, and
returns one entry for each repetition in `prompt_ids`, `completion_ids` and `logprobs`. `env_mask` (1: the policy drew
the token) is optional. Every other key goes to the reward functions as a column.
"""

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompt_inputs import chat_text, encode, is_message, plain, plain_message, whole_text
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.types import OnGroup, Rollout, RolloutGroup, Split, Turn

NEEDED = ("prompt_ids", "completion_ids", "logprobs")
TOKENS = (*NEEDED, "env_mask")
GIVEN = "generate_rollout_completions(trainer, prompts) returns them for each prompt"
History = Sequence[Turn]  # the turns of one conversation, in order
DONE, CUT = "done", "max_tokens"  # endings of a rollout: the user's code returned, or the last turn was cut
ROUNDING = 1e-3  # how far a log-probability may be above 0


class RolloutFuncError(ValueError):
    """A result of `rollout_func` that cannot be trained on; the message names the entry and what to return."""


class RolloutFunction:
    """A `Player` that makes rollouts with the user's function instead of environments."""

    def __init__(self, function: Callable[..., Any], trainer: Any) -> None:
        """`trainer` is passed to the function, so that it can call `generate_rollout_completions(trainer, ...)`."""
        self.function, self.trainer = function, trainer
        self.params: SamplingParams | None = None  # for the batch being played; None between batches
        self.waited = 0.0  # always 0, as the function's waiting cannot be measured
        self.calls = 0  # engine calls in this batch

    def play(
        self, engine: Any, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """Return `params.n` rollouts of each prompt; RolloutFuncError for a result that cannot be trained on. A
        prompt's `ids` become those of its first rollout; rollouts with other prompt ids begin with a `Split`."""
        n = params.n
        rows = [copy.deepcopy(prompt.row["prompt"]) for prompt in prompts for _ in range(n)]
        self.params, self.calls = params, 0
        try:
            returned = self.function(rows, self.trainer)
        finally:
            self.params = None
        prompt_ids, rollouts = self.checked(returned, len(rows))
        groups = [rollouts[start : start + n] for start in range(0, len(rows), n)]
        for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            prompt.ids = prompt_ids[index * n]
            for rollout, ids in zip(group, prompt_ids[index * n : index * n + n], strict=True):
                rollout.splits = [] if ids == prompt.ids else [Split(0, ids)]
            if on_group is not None:
                on_group(index, group)
        return groups

    def checked(self, returned: Any, rows: int) -> tuple[list[list[int]], list[Rollout]]:
        """Return the prompt ids and the rollout of each row; RolloutFuncError for results that cannot be trained on."""
        lists, context = rows_of(returned, rows), self.trainer.model.loaded.max_seq_length
        vocabulary = int(self.trainer.model.get_input_embeddings().weight.shape[0])
        ends = set(self.trainer.policy.eos_token_ids(self.trainer.tokenizer))
        prompt_ids, rollouts = [], []
        for row in range(rows):
            prompt = ids_of("prompt_ids", row, lists["prompt_ids"][row], vocabulary)
            ids = ids_of("completion_ids", row, lists["completion_ids"][row], vocabulary)
            if len(prompt) + len(ids) > context:
                raise RolloutFuncError(f"rollout_func: row {row} has {len(prompt)} tokens in prompt_ids and {len(ids)} "
                                       f"in completion_ids, and the model was loaded for {context} together; "
                                       "end the episode earlier, or load with a larger max_seq_length")
            trained = mask_of(row, lists["env_mask"][row], len(ids)) if "env_mask" in lists else [True] * len(ids)
            prompt_ids.append(prompt)
            rollouts.append(Rollout(ids, logprobs_of(row, lists["logprobs"][row], trained),
                                    finish_reason(ids, trained, ends),
                                    text=self.trainer.tokenizer.decode(ids, skip_special_tokens=True),
                                    policy_version=self.trainer.state.policy_version,
                                    trained=trained if "env_mask" in lists else None,
                                    columns={name: value[row] for name, value in lists.items() if name not in TOKENS}))
        return prompt_ids, rollouts

    def complete(self, prompts: list[Any], overrides: Mapping[str, Any], as_chat: bool | None) -> list[dict[str, Any]]:
        """Return one completion of each prompt. Each call within a batch has a different seed, so that a repeated
        prompt gets a new completion."""
        self.calls += 1
        usual = self.params or self.trainer.args.sampling(None)
        part = "" if usual.part is None else f"-{usual.part[0]}"
        seed = None if usual.seed is None else random.Random(f"{usual.seed}-{self.calls}{part}").getrandbits(62)
        part_of = None if "seed" in overrides else (0, len(prompts))  # a seed of the caller is each prompt's own
        params = replace(usual, **{"n": 1, "seed": seed, "part": part_of, **overrides})
        if params.n != 1:
            raise ValueError(f"generation_overrides has n={params.n}; repeat the prompt in `prompts` instead")
        ids = [self.encoded(prompt, as_chat) for prompt in prompts]
        self.trainer.renew_engine()
        drawn = [rollouts[0] for rollouts in self.trainer.engine.generate(ids, params)]
        return [{"prompt_ids": prompt, "completion_ids": rollout.completion_ids, "logprobs": rollout.rollout_logprobs,
                 "text": rollout.text} for prompt, rollout in zip(ids, drawn, strict=True)]

    def encoded(self, prompt: Any, as_chat: bool | None) -> list[int]:
        """Return the ids of a rendered text or chat messages; token ids are returned as they are."""
        tokenizer = self.trainer.tokenizer
        chat = isinstance(prompt, list) and bool(prompt) and is_message(prompt[0])
        if as_chat is not None and as_chat != chat:
            raise ValueError(f"as_chat={as_chat}, and the prompt is a {type(prompt).__name__} "
                             f"{'of messages' if chat else 'without messages'}; leave as_chat out")
        if not chat:
            return encode(tokenizer, prompt)[1]
        messages = [plain_message(each) for each in prompt]
        text = chat_text(tokenizer, messages, self.trainer.args.chat_template_kwargs)
        return list(tokenizer(whole_text(text), add_special_tokens=False).input_ids)


def generate_rollout_completions(
    trainer: Any, prompts: list[Any], *, generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Sample one completion of each prompt with the trainer's engine and the run's settings, as TRL's helper of this
    name does. A prompt is a rendered text, chat messages, or token ids, which are continued exactly.
    `generation_overrides` are fields of SamplingParams. Returns `prompt_ids`, `completion_ids`, `logprobs` and `text`
    of each completion."""
    player = getattr(trainer, "player", None)
    if not isinstance(player, RolloutFunction):
        raise ValueError("generate_rollout_completions is for a trainer with a rollout_func: "
                         "GRPOTrainer(..., rollout_func=...); model.fast_generate samples without a trainer")
    return player.complete(list(prompts), generation_overrides or {}, as_chat) if len(prompts) else []


def rows_of(returned: Any, rows: int) -> dict[str, list[Any]]:
    """Return the values of each key, one per row: a list as it is, any other value repeated. RolloutFuncError for a
    missing key, or a list of the wrong length."""
    if not isinstance(returned, Mapping):
        raise RolloutFuncError(f"rollout_func returned a {type(returned).__name__}; it returns a dictionary with "
                               f"{', '.join(NEEDED)}, and may add env_mask and columns for the reward functions")
    if missing := [name for name in NEEDED if name not in returned]:
        raise RolloutFuncError(f"rollout_func returned no {', '.join(missing)}; {GIVEN}")
    if returned["logprobs"] is None:
        raise RolloutFuncError("rollout_func returned None as logprobs: the sampler's log-probability of each token is "
                               f"needed here; {GIVEN}")
    if odd := [name for name in returned if not isinstance(name, str)]:
        raise RolloutFuncError(f"rollout_func returned the key {odd[0]!r}; reward functions get keys as names: texts")
    columns = {}
    for name, value in returned.items():
        if name == "env_mask" and value is None:
            continue
        values = plain(value)
        if not isinstance(values, (list, tuple)):
            if name in TOKENS:
                raise RolloutFuncError(f"rollout_func returned a {type(value).__name__} as {name}; it is a list of "
                                       f"{rows} lists")
            values = [value] * rows
        if len(values) != rows:
            raise RolloutFuncError(f"rollout_func returned {len(values)} entries of {name} for {rows} prompts; one for "
                                   "each is needed, in their order (each prompt of the dataset is in `prompts` "
                                   "num_generations times already)")
        columns[name] = list(values)
    return columns


def ids_of(name: str, row: int, entries: Any, vocabulary: int) -> list[int]:
    """Return the token ids of a row; RolloutFuncError if they are not ids of the vocabulary, or empty."""
    ids = [plain(token) for token in plain(entries)] if isinstance(plain(entries), (list, tuple)) else entries
    if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise RolloutFuncError(f"rollout_func: {name}[{row}] is {shown(ids)}; it is a list of token ids")
    if not ids:
        raise RolloutFuncError(f"rollout_func: {name}[{row}] is empty; it needs a token at least")
    if outside := [token for token in ids if not 0 <= token < vocabulary]:
        raise RolloutFuncError(f"rollout_func: {name}[{row}] has the id {outside[0]}, and the model's are 0 to "
                               f"{vocabulary - 1}; use trainer.processing_class to make ids")
    return ids


def mask_of(row: int, entries: Any, length: int) -> list[bool]:
    """Return a mask (C,) of the tokens of a row that the policy drew; RolloutFuncError if it is malformed or all 0."""
    mask = plain(entries)
    if not isinstance(mask, (list, tuple)) or not all(flag in (0, 1) for flag in mask):
        raise RolloutFuncError(f"rollout_func: env_mask[{row}] is {shown(mask)}; it is a list of 1 (the model drew the "
                               "token) and 0 (it came from elsewhere)")
    same_length("env_mask", row, mask, length)
    if not any(mask):
        raise RolloutFuncError(f"rollout_func: env_mask[{row}] has no 1, so nothing of this completion is the model's; "
                               "let the model take one turn at least")
    return [bool(flag) for flag in mask]


def logprobs_of(row: int, entries: Any, trained: list[bool]) -> list[float]:
    """Return the log-probabilities of a row, 0 for tokens that the policy did not draw; RolloutFuncError if invalid."""
    values = plain(entries)
    if not isinstance(values, (list, tuple)):
        raise RolloutFuncError(f"rollout_func: logprobs[{row}] is {shown(values)}; it is a list with a number for each "
                               f"token of completion_ids[{row}]")
    values = [plain(value) for value in values]
    same_length("logprobs", row, values, len(trained))
    for place, (value, drawn) in enumerate(zip(values, trained, strict=True)):
        number = isinstance(value, (int, float)) and math.isfinite(value) and value <= ROUNDING
        if drawn and not number:
            raise RolloutFuncError(f"rollout_func: logprobs[{row}][{place}] is {shown(value)}, and the log-probability "
                                   f"of a token that was drawn is a finite number, 0 at most; {GIVEN}")
    return [float(value) if drawn else 0.0 for value, drawn in zip(values, trained, strict=True)]


def same_length(name: str, row: int, values: Any, length: int) -> None:
    if len(values) != length:
        raise RolloutFuncError(f"rollout_func: {name}[{row}] has {len(values)} entries and completion_ids[{row}] has "
                               f"{length}; one for each token is needed")


def finish_reason(ids: list[int], trained: list[bool], ends: set[int]) -> Any:
    """Return "length" if the policy drew the last token and it is not an end token, else "stop"."""
    last = max(place for place, drawn in enumerate(trained) if drawn)
    return "stop" if last < len(ids) - 1 or ids[last] in ends else "length"


def shown(value: Any) -> str:
    return f"a {type(value).__name__} ({str(value)[:60]})"


def rollout_of(histories: Sequence[History], prompt: list[int] | None = None) -> Rollout:
    """Return the rollout of `histories` for a group with the prompt ids `prompt` (P,), by default the first turn's. A
    turn in several histories (the same object) is trained once. ValueError without turns."""
    sequences = sequences_among(turns_of(histories))
    if not sequences:
        raise ValueError("a rollout without a turn of the policy has nothing to train")
    made = Rollout([], [], "stop", trained=[])
    first = sequences[0][0].prompt_ids
    for turns in sequences:
        if made.completion_ids or turns[0].prompt_ids != (first if prompt is None else prompt):
            made.splits.append(Split(len(made.completion_ids), turns[0].prompt_ids))
        add_turns(made, turns)
    last = next(turn for history in reversed(histories) for turn in reversed(history))
    made.finish_reason, made.text = last.finish_reason, last.text
    made.ending = CUT if last.finish_reason == "length" else DONE
    made.policy_version = min(turn.policy_version for turn in made.turns)
    made.cached_tokens = sum(turn.cached_tokens for turn in made.turns)
    return made


def group_of(members: Sequence[Sequence[History]]) -> RolloutGroup:
    """Return the group of one task's rollouts, whose prompt is the most common first prompt."""
    firsts = [tuple(next(iter(turns_of(histories))).prompt_ids) for histories in members]
    prompt = list(Counter(firsts).most_common(1)[0][0])
    return RolloutGroup({}, prompt, [rollout_of(histories, prompt) for histories in members])


def turns_of(histories: Iterable[History]) -> list[Turn]:
    return list({id(turn): turn for history in histories for turn in history}.values())


def sequences_among(turns: list[Turn]) -> list[list[Turn]]:
    """Return the turns as sequences, each turn appended to the longest sequence that it continues."""
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


def add_turns(rollout: Rollout, turns: list[Turn]) -> None:
    """Append the turns of a sequence to the rollout: the drawn tokens, and those between turns as untrained context."""
    assert rollout.trained is not None
    held = len(turns[0].prompt_ids)
    for turn in turns:
        between = turn.prompt_ids[held:]
        rollout.completion_ids += [*between, *turn.completion_ids]
        rollout.rollout_logprobs += [*[0.0] * len(between), *turn.logprobs]
        rollout.trained += [*[False] * len(between), *[True] * len(turn.completion_ids)]
        held = len(turn.prompt_ids) + len(turn.completion_ids)
    rollout.turns += turns
