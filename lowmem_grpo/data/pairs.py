"""Rows of preferences: pairs of a chosen and a rejected completion, and completions with a label, as token ids.

    pairs       `chosen` and `rejected`, each text or chat messages, with `prompt` before them or inside both
    labelled    `prompt`, `completion` and `label`; rows of pairs are read as two of these

Prompt and completion are tokenised together, as in TRL: a completion begins at the first token that differs from the
prompt's. Only texts get an end token; chats end as the chat template ends them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.examples import Example, ExampleEncoder, each_of
from lowmem_grpo.data.prompt_inputs import half_pair, text_ids
from lowmem_grpo.data.prompts import DataError, Prompt, is_chat, no_chat, odd_role
from lowmem_grpo.data.shapes import messages_of
from lowmem_grpo.data.stream import Stream, columns_of, rows_of
from lowmem_grpo.types import Rollout, RolloutGroup, Split

PAIR, TOKENS = ("chosen", "rejected"), ("chosen_ids", "rejected_ids")
LABELLED = ("prompt", "completion", "label")
BATCH = 1000  # rows of pairs whose chosen sides come before their rejected ones in rows with a label, as in TRL
SAME = "chosen and rejected are equal"
Row = dict[str, Any]


@dataclass
class Pair(Prompt):
    """A usable row: two completions, whose `ids` are `self.ids`, unless nothing is left of the prompt once a completion
    follows: then each is behind its own first token, which is not trained."""

    chosen: Example = field(default_factory=lambda: Example({}, [], ""))
    rejected: Example = field(default_factory=lambda: Example({}, [], ""))
    margin: float | None = None  # by how much the chosen side's score is to be higher, if the row says so

    @property
    def parts(self) -> list[Example]:
        return [self.chosen, self.rejected]

    @property
    def completion_ids(self) -> list[int]:
        """The ids of the longer side."""
        return max((side.completion_ids for side in self.parts), key=len)


class PairEncoder(ExampleEncoder):
    """Turns a row's `chosen` and `rejected` into a Pair with the ids of TRL's DPOTrainer, or returns the reason to skip
    the row. All tokens of both completions are trained."""

    column = "chosen"
    source = "`prompt`, `chosen` or `rejected`"
    continues = False  # a completion after an assistant message is a new turn
    longest_prompt: int | None = None  # longer prompts are cut to their last tokens
    longest_completion: int | None = None  # longer completions are cut to their first tokens

    def encode(self, row: Row) -> Any:
        parts = parted(row)
        sides = parts if isinstance(parts, str) else self.sides(row, parts, PAIR)
        if isinstance(sides, str):
            return sides
        chosen, rejected = sides
        if chosen.input_ids == rejected.input_ids:
            return f"{SAME} within max_length"
        return Pair(row, chosen.ids, chosen.text, None, 0, chosen, rejected)

    def columns(self, item: Any) -> Row:
        """Return the tokens of an encoded row under the names of TRL's tokenised dataset."""
        return {"prompt_ids": item.ids, "chosen_ids": item.chosen.completion_ids,
                "rejected_ids": item.rejected.completion_ids}

    def sides(self, row: Row, parts: Row, names: tuple[str, ...]) -> list[Example] | str:
        """Return an example for each of the columns `names`, all behind the same prompt; or the reason to skip the row.
        `parts` is the row with its prompt and completions apart."""
        text, why = self.text_of(parts)
        whole: list[Any] = [why or self.whole(parts, name) for name in names]
        if why := reason_in(whole):
            return why
        prompt = self.tokens(parts, text)
        same = min(shared_length(prompt, ids) for ids in whole)
        if same < len(prompt):
            self.say_once(f"the end of a prompt, {self.tokenizer.decode(prompt[same:])!r}, has other tokens once a "
                          "completion follows, and is left out of it, as in TRL. The model is trained behind another "
                          "prompt than it samples behind: end prompts where a token ends, or change the chat template")
        cut = max(0, same - (self.longest_prompt or same))
        if self.longest_completion is not None:
            whole = [ids[: same + self.longest_completion] for ids in whole]
        made: list[Any] = [
            self.example(row, text, ids[cut:], [False] * (same - cut) + [True] * (len(ids) - same), name)
            for name, ids in zip(names, whole, strict=True)]
        return reason_in(made) or made

    def whole(self, parts: Row, name: str) -> list[int] | str:
        """Return the ids of the prompt with the completion in the column `name`, or the reason to skip the row."""
        prompt, side = parts["prompt"], parts[name]
        if isinstance(side, str):
            why = "" if side.strip() else f"empty {name}"
        elif not is_chat(side):
            why = no_chat(side, name)
        elif isinstance(prompt, str):
            why = f"{name} is chat messages, and prompt is text"
        else:
            why = no_chat(prompt, "prompt") if prompt and not is_chat(prompt) else odd_role(side, self.tokenizer)
        text = "" if why else self.text(parts, name)
        return why or half_pair(text, name) or self.tokens(parts, text)

    def text(self, parts: Row, name: str) -> str:
        """Return the text of the prompt with a completion: rendered, or with an end token if it is no chat."""
        prompt, side = parts["prompt"], parts[name]
        if isinstance(side, list):
            return self.render_whole([*prompt, *side], parts)
        end = self.tokenizer.convert_ids_to_tokens(self.end_id)
        return str(prompt + side if side.endswith(end) else prompt + side + end)

    def tokens(self, parts: Row, text: str) -> list[int]:
        """Return the ids of a text of the row, which is a chat or plain text."""
        if isinstance(parts["prompt"], str):
            return text_ids(self.tokenizer, text)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


class ClosedPairEncoder(PairEncoder):
    """Turns a row into a Pair with the ids of TRL's ORPOTrainer: chats too begin with the start token, if the tokenizer
    has one, and end with the end token."""

    continues = True

    def tokens(self, parts: Row, text: str) -> list[int]:
        ids, start = super().tokens(parts, text), self.tokenizer.bos_token_id
        return ids if start is None or ids[:1] == [start] else [int(start), *ids]

    def whole(self, parts: Row, name: str) -> list[int] | str:
        ids = super().whole(parts, name)
        return ids if isinstance(ids, str) or ids[-1] == self.end_id else [*ids, self.end_id]


    def columns(self, item: Pair) -> Row:
        return {f"{name}_{what}": getattr(side, what) for name, side in zip(PAIR, item.parts, strict=True)
                for what in ("input_ids", "labels")}


class ScoredPairEncoder(PairEncoder):
    """Turns a row's `chosen` and `rejected` into a Pair for a reward model, which reads its score at a sequence's last
    token, with the ids of TRL's RewardTrainer. Behind them stands one more end token, the only one that is trained: it
    is a target, which no model reads. `margin` is a column. Rows of tokens, `chosen_ids` and `rejected_ids`, are taken
    unchanged."""

    def encode(self, row: Row) -> Any:
        margin, parts = row.get("margin"), row if self.column in TOKENS else parted(row, whole=True)
        if isinstance(parts, str):
            return parts
        if margin is not None and not (isinstance(margin, (int, float)) and isfinite(margin)):
            return f"margin is {margin!r}, not a number"
        both: list[Any] = [self.whole(parts, name) for name in PAIR]
        long = [f"{name} longer than {self.max_prompt_length} tokens" for name, ids in zip(PAIR, both, strict=True)
                if len(ids) > self.max_prompt_length]
        if why := reason_in([*both, *long, *([SAME] if both[0] == both[1] else [])]):
            return why
        same = max(1, shared_length(*both))
        chosen, rejected = (Example(row, ids[:same], "", None, 0, [*ids[same:], self.end_id],
                                    [False] * len(ids[same:]) + [True], ids) for ids in both)
        text = str(self.tokenizer.decode(chosen.ids))
        return Pair(row, chosen.ids, text, None, 0, chosen, rejected, None if margin is None else float(margin))

    def whole(self, parts: Row, name: str) -> list[int] | str:
        if self.column not in TOKENS:
            return super().whole(parts, name)
        ids = parts[f"{name}_ids"]
        good = ids and isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
        return ids if good else f"{name}_ids is no list of token ids"

    def columns(self, item: Pair) -> Row:
        return {"chosen_ids": item.chosen.input_ids, "rejected_ids": item.rejected.input_ids}


class LabelledEncoder(PairEncoder):
    """Turns a row's `prompt`, `completion` and `label` into an Example with the ids of TRL's KTOTrainer, or returns the
    reason to skip the row. In a row of a pair, the label says which side is the completion."""

    column = "label"
    source = "`prompt`, `completion` or `label`"

    def encode(self, row: Row) -> Any:
        label, paired = row.get("label"), {*PAIR} <= row.keys()
        if label is None or label not in (0, 1):
            return "no label" if label is None else f"label is {label!r}, not True or False"
        name = PAIR[1 - int(label)] if paired else "completion"
        parts = parted(row) if paired else told(row, ("prompt", name))
        sides = parts if isinstance(parts, str) else self.sides(row | {"label": bool(label)}, parts, (name,))
        return sides if isinstance(sides, str) else sides[0]

    def columns(self, item: Example) -> Row:
        return {"prompt_ids": item.ids, "completion_ids": item.completion_ids, "label": item.row["label"]}


def reason_in(made: Iterable[Any]) -> str:
    """Return the first text, which is the reason to skip a row; "" if there is none."""
    return next((reason for reason in made if isinstance(reason, str)), "")


def shared_length(one: Any, other: Any) -> int:
    """Return how many first elements (tokens, letters or messages) two sequences share."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def said(message: Any) -> str:
    """Return the text of a message, whose content is text or parts; "" if it has none, as a broken one."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return " ".join(str(part.get("text")) for part in parts if isinstance(part, dict))


def told(row: Row, names: tuple[str, ...]) -> Row:
    """Return a row whose columns `names` are read: ShareGPT's messages, and a text that answers chat messages."""
    made = row | {name: messages_of(row, name) for name in names}
    answers = [name for name in names[1:] if isinstance(made["prompt"], list) and isinstance(made[name], str)]
    return made | {name: [{"role": "assistant", "content": made[name]}] for name in answers if made[name].strip()}


def parted(row: Row, whole: bool = False) -> Row | str:
    """Return a row of a pair with `prompt`, `chosen` and `rejected` apart, or the reason to skip it. Without a prompt,
    or with a text beside conversations, the prompt is what both sides share, as in TRL's `extract_prompt`, or if
    `whole` it is empty. Conversations that repeat the prompt's messages are read without these."""
    made = told(row, ("prompt", *PAIR))
    prompt, *sides = (made[name] for name in ("prompt", *PAIR))
    odd = [no_chat(side or None, name) for name, side in zip(PAIR, sides, strict=True)
           if not side or not isinstance(side, (str, list))]
    odd += [no_chat(prompt, "prompt")] if not isinstance(prompt, (str, list, type(None))) else []
    if odd or type(sides[0]) is not type(sides[1]):
        return odd[0] if odd else "one of chosen and rejected is text, and the other is chat messages"
    chosen, rejected = sides
    if chosen == rejected:
        return SAME
    if not (prompt is None or (isinstance(prompt, str) and isinstance(chosen, list))):
        repeated = isinstance(prompt, list) and chosen[: len(prompt)] == rejected[: len(prompt)] == prompt
        return made | {name: made[name][len(prompt) :] for name in PAIR if repeated}
    at = min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    at -= at > 0 and chosen[at - 1] == " "
    if prompt and prompt.strip() and not any(prompt.strip() in said(message) for message in chosen[:at]):
        return "prompt is text that no message of both sides has, and chosen is chat messages"
    if whole:
        return made | {"prompt": chosen[:0]}
    return made | {"prompt": chosen[:at], "chosen": chosen[at:], "rejected": rejected[at:]} if at else \
        "chosen and rejected share no prompt"


class UnpairedRows:
    """Rows of pairs, by index, as twice as many rows with a label, in the order of TRL's `unpair_preference_dataset`:
    of each thousand rows first the chosen sides, then the rejected ones."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.stored = rows, getattr(rows, "stored", True)
        self.column_names = [*columns_of(rows), "label"]

    def __len__(self) -> int:
        return 2 * len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index // (2 * BATCH) * BATCH
        count = min(BATCH, len(self.rows) - first)
        side, place = divmod(index - 2 * first, count)
        return {**self.rows[first + place], "label": side == 0}


def read_pairs(
    dataset: Any, parameter: str, settings: Any, tokenizer: PreTrainedTokenizerBase, longest: int, end_ids: list[int],
    kind: type[PairEncoder] = PairEncoder,
) -> tuple[Any, PairEncoder]:
    """Return (rows, their encoder) of a dataset; DataError if its columns do not fit. `longest` is the limit on prompt
    and completion together. For rows with a label, pairs are taken apart."""
    rows = rows_of(dataset, parameter)
    columns, labels = columns_of(rows), kind is LabelledEncoder
    if not columns and not isinstance(rows, Stream):
        raise DataError(f"{parameter} has no rows")
    pairs, labelled, tokens = ({*names} <= {*columns} for names in (PAIR, LABELLED, TOKENS))
    tokens &= kind is ScoredPairEncoder
    if not (pairs or tokens or (labels and labelled)):
        other = "KTOTrainer takes rows with prompt, completion and label. " if labelled else ""
        raise DataError(f"{parameter} has the columns {', '.join(columns)}; needed are chosen and rejected, with a "
                        f"prompt before them or inside both{', or prompt, completion and label' if labels else ''}. "
                        f"{other}Rename some (dataset.rename_column('accepted', 'chosen'))")
    if pairs and labels and isinstance(rows, Stream):
        raise DataError(f"{parameter} is a stream of pairs, which are taken apart only in rows that have indices: pass "
                        "a datasets.Dataset, or rows with prompt, completion and label")
    encoder = kind(tokenizer, longest, end_ids, settings.chat_template_kwargs, "keep_start")
    encoder.column = TOKENS[0] if tokens else kind.column
    encoder.longest_prompt = getattr(settings, "max_prompt_length", None)
    encoder.longest_completion = getattr(settings, "max_completion_length", None)
    return UnpairedRows(rows) if pairs and labels else rows, encoder


read_scored, read_labelled = (partial(read_pairs, kind=kind) for kind in (ScoredPairEncoder, LabelledEncoder))


def pair_groups(items: Iterable[Any], policy_version: int = 0) -> list[RolloutGroup]:
    """Return each Pair as a group of its chosen and its rejected completion, which share a micro-batch, and each
    Example of a row with a label as a group of one completion with the field `label`."""
    return [RolloutGroup(item.row, item.ids, [completion_of(item, side, policy_version) for side in each_of(item)],
                         row_index=item.index) for item in items]


def completion_of(item: Pair | Example, side: Example, policy_version: int) -> Rollout:
    """Return a side as a rollout, which has a prompt of its own if that is not its group's."""
    return Rollout(side.completion_ids, [0.0] * len(side.completion_ids), "stop", policy_version=policy_version,
                   trained=side.trained, splits=[] if side.ids == item.ids else [Split(0, side.ids)], unit=0,
                   fields={} if isinstance(item, Pair) else {"label": float(item.row["label"])})
