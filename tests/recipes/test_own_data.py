"""A user's own rows: read, tidied, split; no test prompt is ever trained on, and what is left out is said."""

import json
import random
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.data.files import cell_text, read_rows
from lowmem_grpo.recipes.own_data import OwnData


def make_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": row["question"]}],
            "answer": row["answer"]}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"How much is {i} and {i}?", "answer": 2 * i} for i in range(start, start + count)]


def asked(rows: Any) -> list[str]:
    return [prompt[-1]["content"] for prompt in rows["prompt"]]


def split(path: Path, **settings: Any) -> tuple[set[str], set[str]]:
    data = OwnData(path, make_row, **settings)
    return set(asked(data.train())), set(asked(data.test(10_000)))


def test_every_row_is_on_one_side_and_about_one_in_eight_is_held_out_of_a_few_at_least_one(tmp_path: Path) -> None:
    train, test = split(write(tmp_path / "rows.jsonl", some(2000)))
    assert not train & test and len(train | test) == 2000 and 200 < len(test) < 300
    for count in (2, 3, 5, 12):
        for start in range(0, 300, 60):
            train, test = split(write(tmp_path / f"rows{count}-{start}.jsonl", some(count, start)))
            assert train and test and not train & test


def test_a_row_stays_on_its_side_whatever_the_order_and_whichever_rows_come_and_go(tmp_path: Path) -> None:
    train, test = split(write(tmp_path / "rows.jsonl", some(400)))
    more = some(900)
    random.Random(0).shuffle(more)
    new_train, new_test = split(write(tmp_path / "more.jsonl", more))
    assert train <= new_train
    assert test <= new_test
    fewer_train, fewer_test = split(write(tmp_path / "fewer.jsonl", some(200, 100)))
    assert fewer_train <= train
    assert fewer_test <= test


def test_the_same_question_in_other_letters_and_spaces_or_under_another_system_prompt_is_on_the_same_side(
    tmp_path: Path,
) -> None:
    twice = [{"question": question, "answer": row["answer"]} for row in some(300)
             for question in (row["question"], f"  {row['question'].upper().replace(' ', '   ')}\n")]
    path = write(tmp_path / "rows.jsonl", twice)
    train, test = split(path)
    assert not {" ".join(q.split()).lower() for q in train} & {" ".join(q.split()).lower() for q in test}
    other = OwnData(path, lambda row: {"prompt": row["question"], "answer": row["answer"]})
    assert set(asked(other.train())) == train


def test_the_file_that_is_trained_on_gives_only_held_out_rows_to_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.jsonl", some(100))
    data = OwnData(path, make_row)
    monkeypatch.chdir(tmp_path)
    for source in (str(path), "rows.jsonl", "./rows.jsonl"):
        assert not {*asked(data.problems(1000, 0, source))} & {*asked(data.train())}
    other = write(tmp_path / "other.jsonl", some(9))
    assert len(data.problems(1000, 0, str(other))) == 9


def test_the_test_is_the_same_each_time_and_a_smaller_one_is_its_beginning(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", some(200))
    whole = asked(OwnData(path, make_row).test(100))
    assert asked(OwnData(path, make_row).test(5)) == whole[:5]
    exam = OwnData(path, make_row).exam(len, max_tokens=7)
    assert asked(exam.problems(5, 99, None)) == whole[:5]
    assert (exam.max_tokens, exam.takes_source) == (7, True)
    other = exam.problems(3, 0, str(write(tmp_path / "other.jsonl", some(4, 500))))
    assert asked(other) == [row["question"] for row in some(3, 500)]


def test_answers_are_texts_and_empty_cells_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\nWhat is 2 + 3?,5\nWho?,\n,7\nWhat is half of 5?,2.5\nWhat is 1?,1\n")
    data = OwnData(path, make_row)
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        assert list(data.rows["answer"]) == ["5", "2.5", "1"]
    assert "2 of 5 rows are left out: no answer (1), no prompt (1)" in caplog.text
    answers = ["a ", True, 1.5, {"b": [1]}, ["ü"]]
    rows = [{"question": f"What is {i}?", "answer": json.dumps(value)} for i, value in enumerate(answers)]
    data = OwnData(write(tmp_path / "rows.jsonl", rows), lambda row: row | {
        "prompt": row["question"], "answer": json.loads(row["answer"])})
    assert list(data.rows["answer"]) == ["a", "true", "1.5", '{"b": [1]}', '["ü"]']


@pytest.mark.parametrize(("answers", "texts"), [
    ("None NA nan NULL a", ["None", "NA", "a"]), ("007 12 -", ["007", "12"]), ("12 0 -", ["12", "0"]),
    ("12 NA 7", ["12", "7"]), ("1 2 #N/A", ["1", "2"]), ("1234567890123456 56", ["1234567890123456", "56"]),
    ("0.5 1.50 -", ["0.5", "1.5"]), (f"{2**53 + 1} 3 -", [str(2**53 + 1), "3"]), ("True - False", ["true", "false"]),
])
def test_words_and_digits_of_a_csv_file_are_those_that_it_has(
    answers: str, texts: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    rows = "".join(f'"Which,\n{place}?",{answer}\n' for place, answer in enumerate(answers.replace("-", "").split(" ")))
    path.write_text(f"\ufeffquestion,answer\n\n{rows}")
    assert list(OwnData(path, make_row).rows["answer"]) == texts


@pytest.mark.parametrize(("answers", "texts"), [
    (["2026-01-02", "2026-01-03", None], ["2026-01-02", "2026-01-03"]), (["2026-01-02T03:04:05Z"] * 2, None),
    ([10**25 + 7, 3], [str(10**25 + 7), "3"]), ([6.5, 2.0], ["6.5", "2"]), ([6.02e23, 2.5], ["6.02e+23", "2.5"]),
])
def test_dates_and_long_numbers_of_a_json_file_are_the_texts_that_it_has(
    answers: list[Any], texts: list[str] | None, tmp_path: Path
) -> None:
    rows = [{"answer": answer, "question": f"Which is number {place}?"} for place, answer in enumerate(answers)]
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps(rows, indent=1))
    for path in (write(tmp_path / "rows.jsonl", rows), whole)[:1 if 3 in answers else 2]:  # in a list 10**25 is refused
        assert list(OwnData(path, make_row).rows["answer"]) == (texts or answers)
        assert read_rows(str(path)).column_names == ["answer", "question"]


def test_a_decimal_and_a_date_of_a_table_are_answers_without_quotes() -> None:
    assert [cell_text(value) for value in (Decimal("0.50"), date(2026, 1, 2), 1e25)] == ["0.50", "2026-01-02", "1e+25"]


def test_an_empty_system_prompt_is_no_message_and_a_chat_that_ends_in_an_answer_is_no_prompt(tmp_path: Path) -> None:
    rows = [{"chat": [{"role": "system", "content": ""}, {"role": "user", "content": f"What is {i}?"}], "answer": "1"}
            for i in range(3)]
    rows.append({"chat": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "answer": "1"})
    data = OwnData(write(tmp_path / "rows.jsonl", rows), lambda row: {"prompt": row["chat"], "answer": row["answer"]})
    assert [len(prompt) for prompt in data.rows["prompt"]] == [1, 1, 1]


def test_rewards_without_answers_take_rows_without_them(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i}?", "answer": None} for i in range(4)]
    path = write(tmp_path / "rows.jsonl", rows)
    assert len(OwnData(path, make_row, reads=()).rows) == 4
    with pytest.raises(ValueError, match=r"has 0 usable rows of 4, .*: no answer \(4\)"):
        _ = OwnData(path, make_row).rows


@pytest.mark.parametrize(("made", "message"), [
    (lambda row: {"prompt": row["Question"], "answer": 1}, "has no column 'Question'; its columns are question"),
    (lambda row: {"prompt": row[""], "answer": 1}, "is read by a column without a name; its columns are question"),
    (lambda row: {"prompt": row["question"]}, "make_row gave prompt, and no 'answer'"),
    (lambda row: {}, "make_row gave nothing, and no 'prompt'"),
    (lambda row: {"prompt": [row["question"]], "answer": 1}, "it is a text, or a list of"),
    (lambda row: {"prompt": "the same", "answer": 1}, "all rows of .* have the same prompt"),
    (lambda row: {"prompt": row["question"], "answer": 1, "x": row["answer"] if row["answer"] else "no"},
     "one kind of value in each column"),
])
def test_rows_that_make_no_lesson_are_named(made: Any, message: str, tmp_path: Path) -> None:
    data = OwnData(write(tmp_path / "rows.jsonl", some(3)), made)
    with pytest.raises(ValueError, match=message):
        data.train()


def test_an_error_of_make_row_itself_is_its_own_and_a_size_or_share_that_makes_no_sense_is_refused(
    tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", some(9))
    with pytest.raises(KeyError):
        OwnData(path, lambda row: {}[row["question"] and "question"]).train()
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"eval_problems is {size}; it must be at least 1"):
            OwnData(path, make_row).test(size)
    for share in (0, 1, -0.1, 2):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            OwnData(path, make_row, held_out=share)
