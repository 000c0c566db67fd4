"""The inbox pays in bands, ends when it should, and tells a policy what went wrong; known players do as is known."""

import json
from typing import Any

import pytest
from scripted import played

from lowmem_grpo.recipes.tasks.inbox import PLAYERS, Inbox, baselines, earned, says
from lowmem_grpo.recipes.tasks.inbox import played as asked
from lowmem_grpo.recipes.tasks.mailbox import WORLDS, mailbox

QUESTION = mailbox("small").questions[0]
*_, THING, _, NAME = QUESTION.text.rstrip("?").split()
ROW = {"prompt": [{"role": "user", "content": QUESTION.text}], "mailbox": "small", "mail_seed": 0,
       "answer": QUESTION.answer, "source": QUESTION.source, "calls": 4}
OTHER = QUESTION.source % 500 + 1  # a mail that says something else


def inbox(**more: Any) -> Inbox:
    made = Inbox()
    made.reset(**ROW | more)
    return made


def test_tools_show_what_a_reader_of_mails_needs() -> None:
    made = inbox()
    found = made.search(f"{NAME} {THING}")
    assert found.startswith(f"{QUESTION.source} | ") and found.endswith(f" | {THING} {NAME}") and "\n" not in found
    mail = made.read(QUESTION.source)
    assert mail.startswith("From: ") and mail.endswith(f"\nSubject: {THING} {NAME}\n\nIt is {QUESTION.answer}.")
    assert inbox().search("Falcon Raven") == "nothing found"
    source = mailbox("large").questions[0].source
    large = inbox(mailbox="large", source=source, calls=None)
    assert len(large.search("budget").splitlines()) == 8 and large.most == 10
    letter = large.read(source)
    assert letter.startswith("From: ") and "\nTo: " in letter and "\nDate: 2026-" in letter


GOOD, BAD = QUESTION.answer, str(int(QUESTION.answer) % 90 + 9)
SEARCH, READ = ("search", f"{THING} {NAME}"), ("read", QUESTION.source)


def test_an_episode_earns_what_its_band_says() -> None:
    for calls, pay in (
        ([], -2.0), ([SEARCH], -1.8), ([SEARCH, READ], -1.6), ([("answer", BAD, [])], -1.0),
        ([SEARCH, ("answer", BAD, [])], -0.8), ([SEARCH, READ, ("answer", BAD, [QUESTION.source])], -0.4),
        ([SEARCH, READ, ("answer", BAD, [OTHER])], -0.6), ([("answer", "unknown", [])], 0.0),
        ([SEARCH, READ, ("answer", "I don't know.", [QUESTION.source])], 0.6), ([("answer", GOOD, [])], 1.225),
        ([SEARCH, READ, ("answer", GOOD, [QUESTION.source])], 1.675),
        ([SEARCH, READ, ("answer", GOOD, [QUESTION.source, OTHER])], 1.675),
        ([SEARCH, READ, ("answer", GOOD, [QUESTION.source, 1, 2, 3, 4])], 1.475),
        ([SEARCH, READ, READ, ("answer", GOOD, [QUESTION.source])], 1.6),
    ):
        made = inbox()
        for tool, *values in calls:
            getattr(made, tool)(*values)
        assert made.earned == pytest.approx(pay) and earned([made]) == [made.earned]
        assert made.won == (pay > 1)


def test_an_answer_is_right_in_any_words_around_it_and_not_by_naming_several() -> None:
    for answer, expected, right in (
        ("48", "48", True), ("It is 48.", "48", True), ("480", "48", False), ("48 or 49", "48", False),
        ("", "48", False), ("48,300 euros", "48,300 euros", True), ("The budget is 48300 euros", "48,300 euros", True),
        ("48,300", "48,300 euros", False), ("8:15", "8:15", True), ("at 8:15.", "8:15", True), ("18:15", "8:15", False),
        ("room 4.12", "4.12", True), ("4", "4.12", False), ("14 march", "14 March", True),
        ("14 May 2026", "14 May", False), ("Ines Weber leads it", "Ines Weber", True),
        ("Ines Weber or Omar Silva", "Ines Weber", False), ("Weber Ines", "Ines Weber", False),
        ("nordwind", "Nordwind", True), ("٤٨", "48", False), ("\x00" * 9, "48", False),
    ):
        assert says(answer, expected) is right


# Episodes with an engine


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_turns(*said: str) -> Any:
    """A policy that says these, one after the other."""
    return lambda prompt: said[prompt.count("<tool_response>")]


def test_an_answer_the_last_call_and_text_without_a_call_end_the_episode() -> None:
    says = in_turns(call("search", words=SEARCH[1]), call("read", id=QUESTION.source),
                    call("answer", text=GOOD, sources=[QUESTION.source]))
    [[one]] = played(says, [ROW], Inbox, n=1)
    assert one.ending == "done" and len(one.turns) == 3 and one.environment.earned == pytest.approx(1.675)
    assert [turn.failures for turn in one.turns] == [0, 0, 0]
    [[one]] = played(lambda prompt: call("search", words="Falcon"), [ROW], Inbox, n=1)
    assert one.ending == "done" and len(one.turns) == 4 and one.environment.earned == -2.0 + 0.2 * (NAME == "Falcon")
    [[one]] = played(lambda prompt: f"It is {GOOD}.", [ROW], Inbox, n=1)
    assert one.ending == "answer" and one.environment.earned == -2.0 and not one.environment.right


def test_a_broken_call_is_told_and_counted_and_the_episode_goes_on() -> None:
    for broken, told in (
        (call("search", words='"'), "cannot search for"), (call("search", words=3), "words"),
        (call("read", id=10**9), "no mail"), (call("read", id="first"), "id"), (call("answer", text="4"), "sources"),
        (call("forward", to="all"), "no tool 'forward'"),
        ("<tool_call>\n{words: Falcon\n</tool_call>", "could not be read"),
    ):
        [[one]] = played(in_turns(broken, call("answer", text=GOOD, sources=[])), [ROW], Inbox, n=1)
        assert told in one.turns[0].replies[0]["content"] and one.turns[0].failures == 1
        assert one.ending == "done" and len(one.turns) == 2 and one.environment.right


# Players


@pytest.mark.parametrize("name", list(WORLDS))
def test_the_keyword_player_answers_every_question_and_a_random_one_hardly_any(name: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": question.text}], "mailbox": name, "mail_seed": 0,
             "answer": question.answer, "source": question.source} for question in mailbox(name).of_split("test")[:60]]
    found = baselines(rows)
    assert found["keywords"] == 1.0 and found["random"] < 0.1 and baselines(rows) == found
    for row in rows[:20]:
        played_well = asked(PLAYERS["keywords"], row)
        assert played_well.sources == [row["source"]] and played_well.left >= 0 and played_well.earned > 1.5
