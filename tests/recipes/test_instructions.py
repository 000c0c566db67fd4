"""Recipe instructions: prompts whose instructions can be followed together, and never leak into the test split."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import records, run_well

from lowmem_grpo.models import card_check
from lowmem_grpo.recipes.instructions import FOLLOWS, KINDS, LEARNED_FIRST, InstructionOptions, make_dataset
from lowmem_grpo.recipes.presets import mixed_on_cpu
from lowmem_grpo.rewards.ready.instructions import instructions_of

WISHES = {  # by kind: what a prompt with it says, and an answer's change that follows it
    "change_case:english_lowercase": ("lower-case", str.lower), "change_case:english_capital": ("capital", str.upper),
    "punctuation:no_comma": ("commas", lambda text: text.replace(",", "")),
    "startend:quotation": ("quotation marks", lambda text: f'"{text}"'),
    "detectable_content:postscript": ("postscript", lambda text: f"{text}\nP.S. Good."),
    "detectable_format:title": ("<<my title>>", lambda text: f"<<a walk>>\n{text}"),
}


def test_an_instruction_of_a_prompt_cannot_be_read_or_contradicts_another() -> None:
    rows = make_dataset("train", 400, most=6)
    assert set(Counter(len(row["instruction_id_list"]) for row in rows)) == set(range(1, 7))
    for row in rows:
        kinds = row["instruction_id_list"]
        assert [kind for kind, _ in instructions_of(kinds, row["kwargs"])] == kinds
        assert len({KINDS[kind][0] for kind in kinds}) == len(kinds)
        question = row["prompt"][0]["content"]
        assert all(said in question for kind, (said, _) in WISHES.items() if kind in kinds), question
        assert FOLLOWS.verify(followed(row), **{name: row[name] for name in FOLLOWS.columns}), (question, followed(row))


def followed(row: dict[str, list[dict[str, object]]]) -> str:
    """Write an answer that follows a prompt, by what its sentences ask for."""
    wanted = dict(zip(map(str, row["instruction_id_list"]), row["kwargs"], strict=True))
    text = "We saw it, and then slept."
    if used := wanted.get("keywords:existence"):
        text = f"{text} {' '.join(map(str, used['keywords']))}"  # type: ignore[call-overload]
    if listed := wanted.get("detectable_format:number_bullet_lists"):
        named = text.removeprefix("We saw it, and then slept.")
        points = (f"We saw it.{named}", "Rain fell.", "Birds sang, too.", "Nobody spoke.")
        text = "\n".join(f"* {point}" for point in points[: int(str(listed["num_bullets"]))])
    if ended := wanted.get("startend:end_checker"):
        text = f"{text}\n{ended['end_phrase']}"
    for kind in ("detectable_format:title", "detectable_content:postscript", "startend:quotation",
                 "punctuation:no_comma", "change_case:english_lowercase", "change_case:english_capital"):
        text = WISHES[kind][1](text) if kind in wanted else text  # type: ignore[operator]
    return text


def test_a_held_out_prompt_has_a_topic_or_a_value_that_is_trained_on() -> None:
    train, test = (make_dataset(split, 500) for split in ("train", "test"))
    for name in ("keywords", "num_words", "end_phrase"):
        trained, held_out = ({value for row in rows["kwargs"] for each in row for value in listed(each[name])}
                             for rows in (train, test))
        assert len(trained) > 3 and len(held_out) > 2 and not trained & held_out, name
    topics = {"a lighthouse", "birds", "tea", "an old bicycle", "mountains", "a museum", "wind", "a river"}
    found = [sum(f" {topic}" in prompt[0]["content"] for topic in topics) for prompt in test["prompt"]]
    assert set(found) == {1} and not any(f" {topic}" in prompt[0]["content"].partition(".")[0]
                                         for topic in topics for prompt in train["prompt"])


def listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def test_a_kind_is_left_out_of_a_step_or_occurs_twice() -> None:
    for split in ("train", "test"):
        rows = InstructionOptions(kinds="no_comma,title,end_checker", instructions=1).dataset(split, 30, 5)
        kinds = [kind.partition(":")[2] for (kind,) in rows["instruction_id_list"]]
        assert kinds == ["no_comma", "title", "end_checker"] * 10
        assert len({prompt[0]["content"] for prompt in rows["prompt"]}) == 30


def test_the_kinds_of_a_run_are_those_asked_for_and_on_a_cpu_those_that_a_small_model_learns(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {kind.partition(":")[2] for kind in InstructionOptions().chosen} == set(LEARNED_FIRST)
    assert InstructionOptions(instructions=2).chosen == list(KINDS)
    rows = InstructionOptions(kinds="title, no_comma", instructions=2).dataset("test", 20, 0)
    kinds = {kind for row in rows["instruction_id_list"] for kind in row}
    assert kinds == {"detectable_format:title", "punctuation:no_comma"}
    with pytest.raises(ValueError, match="kinds has 'haiku'; allowed are english_lowercase, english_capital"):
        InstructionOptions(kinds="no_comma,haiku")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert InstructionOptions().chosen == list(KINDS)


@pytest.mark.parametrize("most", [0, 7, -1])
def test_a_number_of_instructions_that_no_prompt_can_have_is_taken(most: int) -> None:
    with pytest.raises(ValueError, match=f"instructions is {most}; it must be 1 to 6"):
        InstructionOptions(instructions=most)


def test_a_run_of_two_steps_does_not_finish(tmp_path: Path) -> None:
    result = run_well("instructions", tmp_path, "seed=3", "model=tiny", "train_size=8", "max_completion_length=6")
    assert "The embedded tiny model cannot follow instructions" in result.output
    summary, line = records(tmp_path)
    assert summary["status"] == "finished" and summary["eval_problems"] == 4 == len(summary["samples"])
    assert sum(kind["problems"] for kind in summary["kinds"].values()) == 4 and "Problems" in result.output
    assert {"rewards/follows_instructions/mean", "rewards/instructions_followed/mean"} <= line.keys()


@pytest.mark.parametrize(("amx", "chosen", "mixed"), [
    (True, {}, {"bf16": True}), (False, {}, {}), (True, {"model": "tiny"}, {}), (True, {"config": {"bf16": False}}, {}),
    (True, {"config": {"fp16": True}}, {}),
])
def test_a_cpu_with_amx_rounds_products_and_says_so_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, amx: bool, chosen: dict[str, Any],
    mixed: dict[str, bool],
) -> None:
    monkeypatch.setattr(card_check, "has_amx", lambda: amx)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mixed_on_cpu(InstructionOptions(**chosen)) == mixed
    assert ("bf16=false computes in float32" in caplog.text) == bool(mixed)
