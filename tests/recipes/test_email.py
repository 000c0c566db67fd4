"""Recipe email: requests with one answer, and pay for each criterion."""

from typing import Any

from lowmem_grpo.recipes import email
from lowmem_grpo.recipes.email import KINDS, NAMES, SIGNATURE, draw_request
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards.ready.mail import email_rewards, has_word


def test_a_keyword_answers_only_its_question_and_every_kind_and_name_comes_often() -> None:
    drawn = take(distinct("train", 0, draw_request, repr), 2000)
    for request in drawn:
        assert [fact for fact in request.facts if has_word(fact, request.keyword)] == [request.fact]
        assert has_word(request.ideal, request.keyword) and request.text.count(request.fact) == 1
        assert request.ideal.startswith(f"Dear {request.recipient},\n") and request.ideal.endswith(SIGNATURE)
    for question, _, _ in KINDS:
        assert sum(request.question.startswith(question.partition("{")[0]) for request in drawn) > 200
    assert all(sum(request.recipient == name for request in drawn) > 80 for name in NAMES)


BODY = "Dear Mei,\nIt costs 84 euros.\n"


def test_a_reply_is_right_when_it_meets_every_criterion_ideal_or_not() -> None:
    for reply, right in (
        (f"{BODY}{SIGNATURE}", 1.0), (f"Hello Mei!\n\n84 euros.\n\n{SIGNATURE}\n", 1.0), (BODY, 0.0), (SIGNATURE, 0.0),
        ("", 0.0), (f"Dear Omar,\nIt costs 84 euros.\n{SIGNATURE}", 0.0),
        (f"Dear Mei,\nIt is cheap.\n{SIGNATURE}", 0.0), (f"Dear Mei,\n{'well, ' * 40}84 euros.\n{SIGNATURE}", 0.0),
    ):
        columns = {"recipient": ["Mei"], "keyword": ["84 euros"], "ideal": ["Dear Mei, ..."], "answer": ["..."]}
        assert email.good_reply()(completions=[reply], **columns) == [right]


def test_the_ideal_reply_earns_the_most() -> None:
    dataset = email.make_dataset("test", 100)
    columns: dict[str, Any] = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    assert email.EXAM.right(completions=columns["ideal"], **columns) == [1.0] * 100
    for reward in email_rewards(SIGNATURE, email.LONGEST_WORDS):
        wanted = 0.0 if reward.__name__ == "too_long" else 1.0
        assert reward(completions=columns["ideal"], **columns) == [wanted] * 100
