"""Recipe shapes: what a picture shows is what its answer says, and a run reads the pictures from data to report."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import invoke_well, records, run_well

from lowmem_grpo import FastLanguageModel, FastVisionModel, SamplingParams
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.recipes.shapes import COLOURS, EXACT, MOST, QUESTIONS, SIDES, TINY_MOST, make_dataset
from lowmem_grpo.rollout.assessment import answer


def seen(image: Any, places: int) -> tuple[int, set[str], set[str]]:
    """The number of shapes in a picture, their colours, and the sides that all of them touch, by its pixels."""
    cell = image.width // places
    ground = max(image.getcolors(), key=lambda found: found[0])[1]
    names = {value: name for name, value in COLOURS.items()}
    full, colours = list[tuple[int, int]](), set[str]()
    for column in range(places):
        for row in range(places):
            box = image.crop((column * cell, row * cell, (column + 1) * cell, (row + 1) * cell))
            if found := {value for _, value in box.getcolors()} - {ground}:
                full.append((column, row))
                colours |= {names[value] for value in found}
    last = places - 1
    sides = {"left": {place[0] for place in full} == {0}, "right": {place[0] for place in full} == {last},
             "top": {place[1] for place in full} == {0}, "bottom": {place[1] for place in full} == {last}}
    return len(full), colours, {side for side, touched in sides.items() if touched}


@pytest.mark.parametrize("most", [TINY_MOST, MOST])
def test_the_pixels_of_a_picture_say_the_answer_and_no_other(most: int) -> None:
    rows = make_dataset("train", 120, most=most)
    for row in rows:
        count, colours, sides = seen(row["image"], most)
        assert row["answer"] in {"count": {str(count)}, "colour": colours, "place": sides}[row["kind"]]
        assert len(colours) == len(sides) == 1 and 1 <= count <= most
        assert row["prompt"][0]["content"][1]["text"] == QUESTIONS[row["kind"]]
    assert set(rows["answer"]) >= {*COLOURS, *SIDES, "1", str(TINY_MOST)} and set(rows["kind"]) == set(QUESTIONS)


def test_held_out_pictures_are_not_trained_on_and_a_seed_gives_the_same_again() -> None:
    def keys(split: str, seed: int) -> set[tuple[str, bytes]]:
        return {(row["kind"], row["image"].tobytes()) for row in make_dataset(split, 200, seed, TINY_MOST)}

    assert not keys("train", 0) & keys("test", 0)
    assert keys("test", 0) == keys("test", 0) != keys("test", 1)


def test_the_embedded_model_answers_in_the_form_and_is_wrong_more_often_than_right() -> None:
    model, _ = FastVisionModel.from_pretrained("tiny-shapes", max_seq_length=64, load_in_4bit=False)
    rows = list(make_dataset("test", 128, most=TINY_MOST))
    known = {"count": {"1", "2", "3", "4"}, "colour": {*COLOURS}, "place": {*SIDES}}
    answers = answer(model, rows, [EXACT], SamplingParams(max_tokens=4, seed=0))
    formed = [texts[0] in known[row["kind"]] for texts, row in zip(answers.texts, rows, strict=True)]
    assert sum(formed) >= 0.9 * len(rows) and 0.2 < answers.accuracy < 0.45
    sure = answer(model, rows, [EXACT], SamplingParams(temperature=0, max_tokens=4))
    assert sure.accuracy > 0.4, "it sees the pictures: chance is a quarter"


def test_pictures_are_refused_by_a_model_of_text_and_so_is_a_row_that_lacks_its_picture() -> None:
    rows = [row | {"image": None} for row in make_dataset("test", 2, most=TINY_MOST)]
    model, _ = FastVisionModel.from_pretrained("tiny-shapes", max_seq_length=64, load_in_4bit=False)
    with pytest.raises(ValueError, match="the prompt has 1 places of images, and the row has 0 images"):
        answer(model, rows, [EXACT], SamplingParams(max_tokens=1))
    text, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=64, load_in_4bit=False)
    with pytest.raises(DataError, match="has the column 'image', and images are not supported"):
        answer(text, rows, [EXACT], SamplingParams(max_tokens=1))


def test_a_short_run_reads_the_pictures_and_its_adapter_takes_the_exam(tmp_path: Path) -> None:
    result = run_well("shapes", tmp_path, "train_size=16", "eval_problems=12", "save_steps=1")
    summary, line = records(tmp_path)
    assert (summary["model"], summary["status"], summary["eval_problems"]) == ("tiny-shapes", "finished", 12)
    assert set(summary["kinds"]) == set(QUESTIONS) and "rewards/answer_match/mean" in line
    assert summary["samples"][0]["prompt"].startswith("[image]\n") and "[image]" in result.output
    invoke_well("eval", tmp_path, "--recipe", "shapes", "--limit", "6", "--engine", "transformers")
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["prompts"] == 6 and {"base", "adapter"} <= found.keys()
