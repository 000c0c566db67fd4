"""Generated mails have one answer to each question; the database finds them, and no search can harm it."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tables import not_refused

from lowmem_grpo.recipes.tasks import mail_database
from lowmem_grpo.recipes.tasks.mail_database import MailDatabase, SearchError, database_of, write
from lowmem_grpo.recipes.tasks.mailbox import WORLDS, Mail, mailbox


@pytest.fixture(scope="module", params=list(WORLDS))
def name(request: Any) -> str:
    return str(request.param)


def test_a_mail_is_the_source_of_an_answer_and_no_question_comes_twice_or_in_both_splits(name: str) -> None:
    made = mailbox(name, 0)
    train, test = made.of_split("train"), made.of_split("test")
    assert len({question.text for question in (*train, *test)}) == len(made.questions) == len(train) + len(test)
    assert len(train) >= 400 and len(test) >= 64
    assert len({question.source for question in made.questions}) == len(made.questions)
    assert all(question.answer in made.mails[question.source - 1].body for question in made.questions)


def test_the_same_seed_makes_the_same_mails_and_another_one_others(name: str) -> None:
    first = mailbox(name, 0)
    mailbox.cache_clear()
    assert mailbox(name, 0) == first and mailbox(name, 0) is not first
    assert mailbox(name, 1).mails != first.mails


def test_an_older_mail_may_tell_otherwise_and_the_newest_is_the_source() -> None:
    made = mailbox("large", 0)
    budgets = [question for question in made.questions if question.text.startswith("What is the budget of ")]
    revised = 0
    for question in budgets:
        topic = question.text.removeprefix("What is the budget of ").rstrip("?")
        forms = (f"The budget of {topic} is ", f"For {topic} the board approved a budget of ")
        told = [mail for mail in made.mails if any(form in mail.body for form in forms)]
        revised += len(told) > 1
        assert max(told, key=lambda mail: mail.date) is made.mails[question.source - 1]
        assert sum(question.answer in mail.body for mail in told) == 1
    assert 0.1 < revised / len(budgets) < 0.4


# The database


@pytest.fixture(scope="module")
def small() -> MailDatabase:
    return database_of("small", 0)


def test_a_search_for_all_words_of_a_question_finds_its_source_alone(small: MailDatabase) -> None:
    for question in mailbox("small").questions[:50]:
        *_, thing, _, name = question.text.rstrip("?").split()
        assert [hit.id for hit in small.search(f"{name} {thing}", 3)] == [question.source]
        assert len(small.search(name, 3)) == 3 and len(small.search(name, 99)) == 25
        mail = small.read(question.source)
        assert mail is not None and mail.subject == f"{thing} {name}" and mail.body == f"It is {question.answer}."


def test_snippets_are_short_and_the_best_mail_comes_first() -> None:
    database, question = database_of("large", 0), mailbox("large").questions[0]
    source = mailbox("large").mails[question.source - 1]
    hits = database.search(f'"{source.subject}"', 8, snippet=12)
    assert question.source in [hit.id for hit in hits]
    assert all(hit.snippet and len(hit.snippet.split()) <= 20 and "\n" not in hit.snippet for hit in hits)
    assert {hit.snippet for hit in database.search(source.subject, 8)} == {""}


def test_words_that_cannot_be_searched_for_are_an_error_in_words_and_harm_nothing(
    small: MailDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = small.path.read_bytes()
    wrong = ['"', "Falcon AND", "NEAR(", "nothing:Falcon", "(" * 150, "*", "'; DROP TABLE mails; --", "\ud800"]
    rows = [*((words, "cannot search for") for words in wrong),
            *((words, "a search is 1 to 200 letters long") for words in ("", "  ", "a\x00b", "x" * 201))]
    assert not_refused(lambda words: small.search(words, 3), rows, SearchError) == []
    with small.opened() as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM mails")
    assert small.path.read_bytes() == before and small.search("Falcon", 1)
    monkeypatch.setattr(mail_database, "WORK", 50)
    with pytest.raises(SearchError, match="interrupted"):
        small.search("i* OR a* OR b*", 3)


def test_any_number_of_threads_read_at_a_time_and_a_mail_that_is_not_there_is_none(small: MailDatabase) -> None:
    questions = mailbox("small").questions[:200]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda one: small.read(one.source), questions))
    assert [mail.body for mail in found if mail] == [f"It is {question.answer}." for question in questions]
    assert [small.read(number) for number in (0, -1, 10**6, 10**30)] == [None] * 4


def test_a_file_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "a b#?.db"
    write([Mail("Ines", "Omar", "2026-01-05", "Lunch", "At noon?")], path)
    assert MailDatabase(path).read(1) == Mail("Ines", "Omar", "2026-01-05", "Lunch", "At noon?")
    with pytest.raises(FileExistsError, match="exists already"):
        write([], path)
