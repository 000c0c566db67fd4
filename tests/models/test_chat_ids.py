"""The tokenizer that is handed out answers programs for transformers 4 and for transformers 5."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from tables import every_row
from transformers import AutoTokenizer

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.utils import UnsupportedError

CHAT = [{"role": "user", "content": "Start with 4."}]


@pytest.fixture(scope="module")
def loaded() -> Any:
    return FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)


def test_the_answer_is_the_ids_and_the_dictionary(loaded: Any) -> None:
    tokenizer = loaded[1]
    ids, answer = tokenizer.apply_chat_template(CHAT, return_dict=False), tokenizer.apply_chat_template(CHAT)
    assert answer == ids and len(answer) == len(ids) and answer[0] == ids[0] and answer[:2] == ids[:2]
    assert answer["input_ids"] == answer.input_ids == ids and {*answer} == {*ids} and ids[0] in answer
    assert dict(**answer).keys() == {"input_ids", "attention_mask"} and "attention_mask" in answer
    assert tokenizer.decode(answer) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    for again in (copy.deepcopy(answer), copy.copy(answer), pickle.loads(pickle.dumps(answer))):  # noqa: S301
        assert again == ids


def test_ids_go_into_a_dataset_by_rows_and_in_batches(loaded: Any) -> None:
    rows, ids = Dataset.from_list([{"prompt": CHAT}] * 2), loaded[1].apply_chat_template(CHAT, return_dict=False)
    for batched in (False, True):
        found = rows.map(lambda row: {"tokens": loaded[1].apply_chat_template(row["prompt"])}, batched=batched)
        assert found["tokens"][:] == [ids, ids]


def test_what_was_asked_for_by_name_is_as_transformers_returns_it(loaded: Any, tmp_path: Path) -> None:
    loaded[1].save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)  # so the class has kept its name, too
    assert type(theirs).__name__ == type(loaded[1]).__name__
    for options in ({"return_dict": True}, {"return_dict": False}, {"tokenize": False}, {"return_tensors": "pt"}):
        ours, found = (tokenizer.apply_chat_template(CHAT, **options) for tokenizer in (loaded[1], theirs))
        assert type(ours) is type(found) and repr(ours) == repr(found)


def test_copies_of_the_tokenizer_answer_alike(loaded: Any) -> None:
    ids = loaded[1].apply_chat_template(CHAT, return_dict=False)
    for again in (copy.deepcopy(loaded[1]), copy.copy(loaded[1]), pickle.loads(pickle.dumps(loaded[1]))):  # noqa: S301
        assert type(again) is type(loaded[1]) and len(again.apply_chat_template(CHAT)) == len(ids)
        assert again.get_vocab() == loaded[1].get_vocab() and again.eos_token == loaded[1].eos_token


@pytest.mark.parametrize("with_lora", [False, True])
def test_generate_takes_the_whole_dictionary_as_its_ids(loaded: Any, with_lora: bool) -> None:
    """As programs for transformers 4 write it, where the answer was a tensor."""
    model = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)[0] if with_lora else loaded[0]
    model = FastLanguageModel.get_peft_model(model, r=2) if with_lora else model
    inputs = loaded[1].apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt").to("cpu")
    ways = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**inputs, **ways)
    mask = inputs["attention_mask"]
    for found in (model.generate(input_ids=inputs, **ways), model.generate(inputs=inputs, **ways),
                  model.generate(inputs, **ways), model.generate(inputs["input_ids"], attention_mask=mask, **ways)):
        assert torch.equal(found, expected)


PICTURE = Image.new("RGB", (4, 4))


def asks(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


@every_row("refused", [
    lambda it: it.apply_chat_template(asks({"type": "image"}, {"type": "text", "text": "a"})),
    lambda it: it.apply_chat_template([CHAT, asks({"type": "image_url", "image_url": "a"})]),
    lambda it: it.apply_chat_template(asks({"type": "audio", "audio": [0.0]}), tokenize=False),
    lambda it: it.apply_chat_template(asks({"type": "video", "video": "a.mp4"})),
    lambda it: it(PICTURE, "text", add_special_tokens=False), lambda it: it([PICTURE], "text"),
    lambda it: it("text", PICTURE), lambda it: it(text="text", images=[PICTURE]), lambda it: it(text="a", audio=[0.0]),
])
def test_an_image_or_a_sound_is_refused_by_name(refused: Any, loaded: Any) -> None:
    """As in programs for a processor of transformers, in whose place this tokenizer stands."""
    with pytest.raises(UnsupportedError, match=r"images and sounds are not supported.*docs/families"):
        refused(loaded[1])


def test_texts_in_parts_and_batches_of_texts_are_read_as_before(loaded: Any, tmp_path: Path) -> None:
    loaded[1].save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for given in ("a", ["a", "b c"], [["a", "b"]]):
        assert loaded[1](given).input_ids == theirs(given).input_ids
    assert loaded[1]("a", "b", images=None).input_ids == theirs("a", "b").input_ids
    assert loaded[1](text="a").input_ids == theirs("a").input_ids and loaded[1]("").input_ids == theirs("").input_ids
    for chat in (CHAT, [CHAT, CHAT], [{"role": "user", "content": None}]):
        assert loaded[1].apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
