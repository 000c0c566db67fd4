"""Completions and a teacher's likeliest tokens from the columns of a dataset: what is trained, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from small_models import TINY
from transformers import AutoTokenizer

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import DataError, Prompt
from lowmem_grpo.rollout.stored_completions import StoredCompletions, stored_values

IDS, TOP, LOGPROBS = [7, 8, 2], [[7, 1], [3, 8], [2, 4]], [[-0.5, -1.5], [-0.7, -0.9], [-0.1, -9.0]]
ROW: dict[str, Any] = {"completion_ids": IDS, "teacher_top_ids": TOP, "teacher_top_logprobs": LOGPROBS}
PARAMS = SamplingParams(n=1, max_tokens=8)


def player(context: int = 16, most: int = 2) -> StoredCompletions:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = SimpleNamespace(loaded=SimpleNamespace(max_seq_length=context),
                            get_input_embeddings=lambda: SimpleNamespace(weight=torch.empty(384, 0)))
    return StoredCompletions(SimpleNamespace(model=model, tokenizer=tokenizer, state=SimpleNamespace(policy_version=3),
                                             args=SimpleNamespace(distillation_topk=most),
                                             policy=SimpleNamespace(eos_token_ids=lambda tokenizer: [2])))


def test_a_rollout_is_its_rows_completion_with_the_teachers_values_as_fields() -> None:
    prompts = [Prompt({"prompt": "a"} | ROW, [5], "a", 0),
               Prompt({"prompt": "b", **{name: value[:1] for name, value in ROW.items()}}, [5, 6], "b", 1)]
    told = list[Any]()
    groups = player().play(None, prompts, PARAMS, lambda index, group: told.append((index, group)))
    [first], [second] = groups
    assert told == [(0, [first]), (1, [second])]
    assert (first.completion_ids, first.rollout_logprobs, first.finish_reason) == (IDS, [0.0] * 3, "stop")
    assert (second.completion_ids, second.finish_reason, second.policy_version) == ([7], "length", 3)
    assert first.text == player().trainer.tokenizer.decode([7, 8])
    assert torch.equal(first.fields["teacher_top_ids"], torch.tensor(TOP))
    assert torch.equal(first.fields["teacher_top_logprobs"], torch.tensor(LOGPROBS))


def test_rows_with_more_tokens_at_each_place_than_are_asked_for_would_not_fit_together() -> None:
    [[rollout]] = player(most=1).play(None, [Prompt({"prompt": "a"} | ROW, [5], "a", 0)], PARAMS)
    assert torch.equal(rollout.fields["teacher_top_ids"], torch.tensor(TOP)[:, :1])
    assert torch.equal(rollout.fields["teacher_top_logprobs"], torch.tensor(LOGPROBS)[:, :1])


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_rows_of_a_dataset_are_read_in_every_format(kind: str | None) -> None:
    ids, top_ids, top_logprobs = stored_values(Dataset.from_list([ROW]).with_format(kind)[0], 0, 384)
    assert ids == IDS and all(type(token) is int for token in ids)
    assert top_ids.dtype == torch.int64 and torch.equal(top_ids, torch.tensor(TOP))
    assert top_logprobs.dtype == torch.float32 and torch.equal(top_logprobs, torch.tensor(LOGPROBS))


def changed(name: str, at: int, place: int, value: float) -> dict[str, Any]:
    rows = [list(row) for row in ROW[name]]
    rows[at][place] = value
    return {name: rows}


@pytest.mark.parametrize(("change", "said"), [
    ({"completion_ids": []}, r"completion_ids has the shape \(0,\); it must be a list of one token id or more"),
    ({"completion_ids": 5}, r"completion_ids has the shape \(\)"),
    ({"completion_ids": "seven"}, "completion_ids is seven; it must hold numbers"),
    ({"completion_ids": [7, 384, 2]}, "completion_ids has 384; the model's token ids are 0 to 383"),
    ({"teacher_top_ids": TOP[:2]}, r"teacher_top_ids has the shape \(2, 2\), and completion_ids has 3 tokens"),
    ({"teacher_top_logprobs": [*LOGPROBS, LOGPROBS[0]]}, r"teacher_top_logprobs has the shape \(4, 2\)"),
    ({"teacher_top_ids": [7, 3, 2]}, r"teacher_top_ids has the shape \(3,\)"),
    ({"teacher_top_ids": [[], [], []]}, r"teacher_top_ids has the shape \(3, 0\).*with K of 1 or more"),
    ({"teacher_top_logprobs": [row[:1] for row in LOGPROBS]}, r"teacher_top_logprobs has .*\(3, 1\).* both"),
    ({"teacher_top_ids": [[7], [3, 8], [2, 4]]}, r"teacher_top_ids is \[\[7\], .*as many at each token"),
    ({"teacher_top_ids": None}, "teacher_top_ids is None"),
    (changed("teacher_top_ids", 1, 0, -1), "teacher_top_ids has -1; the model's token ids are 0 to 383"),
    (changed("teacher_top_ids", 1, 0, 3.5), "teacher_top_ids has 3.5"),
    (changed("teacher_top_ids", 1, 0, 8), "at token 1, teacher_top_ids has an id twice"),
    (changed("teacher_top_logprobs", 2, 1, float("nan")), "teacher_top_logprobs has nan; .* finite number, 0 at most"),
    (changed("teacher_top_logprobs", 2, 1, -float("inf")), "teacher_top_logprobs has -inf"),
    (changed("teacher_top_logprobs", 0, 0, 0.25), "teacher_top_logprobs has 0.25"),
    (changed("teacher_top_logprobs", 2, 1, -0.05), "at token 2, teacher_top_logprobs rises; sort the tokens"),
    (changed("teacher_top_logprobs", 1, 1, -0.7), None),
    (changed("teacher_top_logprobs", 1, 1, -0.68) | {"teacher_top_logprobs": [[-0.69, -0.69]] * 3}, "at token 0, .*more"
     " than 1; store log-probabilities at temperature 1, not logits"),
])
def test_columns_that_cannot_be_trained_on_are_refused_with_the_row(change: dict[str, Any], said: str | None) -> None:
    if said is None:
        assert len(stored_values(ROW | change, 41, 384)[0]) == 3, "equal ones do not rise"
        return
    with pytest.raises(DataError, match=f"row 41: {said}"):
        stored_values(ROW | change, 41, 384)


def test_rows_that_lack_a_column_or_room_and_several_completions_are_refused() -> None:
    prompt = Prompt({"prompt": "a"} | ROW, [5] * 14, "a", 41)
    with pytest.raises(DataError, match=r"row 41: the prompt has 14 tokens and completion_ids 3, .*loaded for 16"):
        player().play(None, [prompt], PARAMS)
    with pytest.raises(DataError, match="num_generations is 2, and a row has one stored completion; set it to 1"):
        player().play(None, [prompt], replace(PARAMS, n=2))
    with pytest.raises(DataError, match="row 41: teacher_top_ids has 2 tokens at each place, and distillation_topk is"):
        player(32, most=3).play(None, [prompt], PARAMS)
    with pytest.raises(DataError, match="row 41 has no column teacher_top_ids; it needs completion_ids, te"):
        stored_values({"completion_ids": np.array([5])}, 41, 384)
