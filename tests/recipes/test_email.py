"""Recipe email: requests with one answer that never leak, pay for each criterion, a short run."""

import code as standard_code
import email as standard_email
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowmem_grpo.cli import main
from lowmem_grpo.recipes import email
from lowmem_grpo.recipes.problems.email import KINDS, NAMES, SIGNATURE, Request, requests
from lowmem_grpo.rewards.ready.mail import email_rewards, has_word


def take(count: int, split: str = "train", seed: int = 0) -> list[Request]:
    return list(islice(requests(split, seed), count))


def test_a_keyword_is_in_the_ideal_reply_and_answers_only_its_question() -> None:
    for request in take(2000):
        assert [fact for fact in request.facts if has_word(fact, request.keyword)] == [request.fact]
        assert has_word(request.ideal, request.keyword) and request.text.count(request.fact) == 1
        assert request.ideal.startswith(f"Dear {request.recipient},\n") and request.ideal.endswith(SIGNATURE)


def test_a_kind_of_question_or_a_name_hardly_ever_comes() -> None:
    drawn = take(2000)
    for question, _, _ in KINDS:
        assert sum(request.question.startswith(question.partition("{")[0]) for request in drawn) > 200
    assert all(sum(request.recipient == name for request in drawn) > 80 for name in NAMES)


@pytest.mark.parametrize(("train_seed", "test_seed"), [(0, 0), (3407, 7)])
def test_no_test_request_is_trained_on(train_seed: int, test_seed: int) -> None:
    test = {request.text for request in take(2000, "test", test_seed)}
    assert len(test) == 2000
    assert not test & {request.text for request in take(5000, "train", train_seed)}
    for split in ("train", "test"):
        assert {request.split for request in take(500, split)} == {split}


def test_a_seed_does_not_repeat_its_requests_or_draws_from_the_global_random_state() -> None:
    state = random.getstate()
    assert take(20, seed=1) == take(40, seed=1)[:20] != take(20, seed=2)
    assert random.getstate() == state


@pytest.mark.parametrize(("split", "size", "message"), [
    ("validation", 5, '"train" and "test"'), ("train", 0, "size is 0"), ("test", -3, "at least 1"),
])
def test_a_split_or_size_that_makes_no_sense_is_taken(split: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        email.make_dataset(split, size)


BODY = "Dear Mei,\nIt costs 84 euros.\n"


@pytest.mark.parametrize(("reply", "right"), [
    (f"{BODY}{SIGNATURE}", 1.0), (f"Hello Mei!\n\n84 euros.\n\n{SIGNATURE}\n", 1.0), (BODY, 0.0), (SIGNATURE, 0.0),
    ("", 0.0), (f"Dear Omar,\nIt costs 84 euros.\n{SIGNATURE}", 0.0), (f"Dear Mei,\nIt is cheap.\n{SIGNATURE}", 0.0),
    (f"Dear Mei,\n{'well, ' * 40}84 euros.\n{SIGNATURE}", 0.0),
])
def test_a_reply_that_misses_a_criterion_is_right_or_one_that_is_not_ideal_is_wrong(reply: str, right: float) -> None:
    columns = {"recipient": ["Mei"], "keyword": ["84 euros"], "ideal": ["Dear Mei, ..."], "answer": ["..."]}
    assert email.good_reply()(completions=[reply], **columns) == [right]


def test_the_ideal_reply_does_not_earn_the_most() -> None:
    dataset = email.make_dataset("test", 100)
    columns: dict[str, Any] = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    assert email.EXAM.right(completions=columns["ideal"], **columns) == [1.0] * 100
    for reward in email_rewards(SIGNATURE, email.LONGEST_WORDS):
        wanted = 0.0 if reward.__name__ == "too_long" else 1.0
        assert reward(completions=columns["ideal"], **columns) == [wanted] * 100


def test_a_recipe_stands_in_front_of_the_standard_library() -> None:
    for module in (standard_code, standard_email):
        assert "lowmem_grpo" not in str(module.__file__)


def run(folder: Path, *words: str) -> Result:
    small = ["max_steps=1", "eval_problems=4", "train_size=8", "num_generations=2", "per_device_train_batch_size=4",
             "gradient_accumulation_steps=1", "max_completion_length=8", f"output_dir={folder}", "engine=transformers"]
    return CliRunner().invoke(main, ["run", "email", *small, *words])


def test_the_recipe_finishes_on_the_embedded_model(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "seed=3")
    assert result.exit_code == 0, result.output
    assert "The embedded tiny model cannot write e-mails" in result.output and "accuracy before" in result.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["recipe"], summary["status"], summary["steps"], summary["seed"]) == ("email", "finished", 1, 3)
    assert (summary["accuracy_before"], summary["eval_problems"]) == (0.0, 4)
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = ("keyword_present", "ideal_answer", "too_long", "recipient_named", "signed")
    assert {f"rewards/{name}/mean" for name in names} <= line.keys()
    assert (tmp_path / "run" / "report.html").is_file()
    assert run(tmp_path / "other", "longest_words=-1").exit_code == 1
