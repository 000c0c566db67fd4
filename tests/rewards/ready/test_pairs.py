"""The graders of mathematics and numbers on pairs of a label and an answer, whose verdicts are by hand."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import every_row

from lowmem_grpo import rewards
from lowmem_grpo.rewards.ready import math_answer

Row = tuple[str, str, bool]

DATA = Path(__file__).with_name("data")
SHARED = Path(__file__).parents[4] / "shared" / "data"


def pairs(name: str) -> Iterator[Row]:
    """Yield each label, answer and verdict of a table of ours."""
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        if line[0] in "=!":
            label, _, answer = line[2:].partition(" ;;")
            yield label, answer.removeprefix(" ").replace("⏎", "\n"), line[0] == "="


def shared(name: str, key: str) -> list[Row]:
    """Return the same of a table that comes with the issue, if it is here."""
    path = SHARED / "graders" / name
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [(row["label"], row[key], row["right"]) for row in rows]


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """A comparison may take a minute, on a slow machine."""
    pytest.importorskip("math_verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_answer, "SECONDS", 60.0)
        patch.setattr(math_answer, "WORKER", worker := math_answer.MathWorker())
        yield
    worker.close()


def boxed(answer: str) -> str:
    return rf"So it is $\boxed{{{answer}}}$."


@pytest.mark.usefixtures("patient")
@every_row(("label", "answer", "right"), [*pairs("math_pairs.txt"), *shared("math.jsonl", "answer")])
def test_mathematics_is_judged_as_by_hand(label: str, answer: str, right: bool) -> None:
    assert rewards.math_match().verify(boxed(answer), answer=label) is right


@every_row(("label", "answer", "right"), [*pairs("math_pairs.txt"), *shared("math.jsonl", "answer")])
def test_what_is_wrong_is_wrong_without_math_verify_too(label: str, answer: str, right: bool) -> None:
    assert right or rewards.boxed_match().verify(boxed(answer), answer=label) is False


@every_row(("label", "text", "right"), [*pairs("number_pairs.txt"), *shared("numbers.jsonl", "text")])
def test_numbers_are_judged_as_by_hand(label: str, text: str, right: bool) -> None:
    assert rewards.number_match().verify(text, answer=label) is right


@pytest.mark.usefixtures("patient")
@every_row(("text", "right"), [
    ("$5$", True), (r"\(5\)", True), ("**5**", True), ("`5`", True), (r"\boxed{5}", True), (r"$\boxed{5}$", True),
    ("5} or 6", False), ("5}+1", False), ("5}{", False), ("}5", False), (r"\boxed{5} or \boxed{6}", False),
    ("$5$ or $6$", False),
])
def test_an_answer_in_tags_may_be_enclosed_and_all_of_it_counts(text: str, right: bool) -> None:
    for match in (rewards.math_match, rewards.number_match):
        assert match(where=rewards.in_tag("answer")).verify(f"<answer>{text}</answer>", answer="5") is right


FORMS = r"""3\sqrt{13} ;; \left( 3, \frac{\pi}{2} \right) ;; \text{Evelyn} ;; p - q ;; 90^\circ ;; \frac{14}{3}
4\!:\!51 \text{ p.m.} ;; 864 \mbox{ inches}^2 ;; \text{(E)}, ;; 6, 8\text{, and }10 ;; 12\text{ and }13
\$32,\!348 ;; 18\text{ ways.} ;; \text{A,C,F} ;; \text{A5}_{11} ;; \frac{1}{7}\triangle ABC
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}. ;; 7\text{ hours}. ;; (-\infty, 2) \cup (3, \infty) ;; x \in [-2,7]
y = \frac12 x - 3 ;; \approx 8.24 \text{ mph} ;; 0.\overline{428571} ;; 2516_8 ;; \dfrac{3}{4} ;; 11\sqrt2
-\frac{35}{9} ;; \{1\pm\sqrt{5},-2\} ;; \sqrt{51} ;; \text{June 20} ;; 3 \pm 2 \sqrt{2}
\$\dfrac23 \approx \$0.67 ;; 20\%; ;; 1,000,000 ;; (5,\infty)"""


@every_row("verifier", [rewards.boxed_match(), rewards.math_match()])
def test_the_forms_of_gold_answers_equal_themselves(verifier: rewards.Verifier) -> None:
    golds = [form for line in FORMS.splitlines() for form in line.split(" ;; ")]
    verdicts = verifier.verdicts([boxed(gold) for gold in golds], answer=golds)
    assert [gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict is not True] == []
    labels = verifier.verdicts([boxed(gold) for gold in golds], answer=[boxed(gold) for gold in golds])
    assert set(labels) == {True}


def test_every_solution_of_gsm8k_has_its_label_and_no_other() -> None:
    """Of 100 rows, or of all where they are."""
    whole = SHARED / "gsm8k" / "train.jsonl"
    lines = (whole if whole.exists() else DATA / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    labels = [rewards.extract_hash_answer(solution) for solution in solutions]
    assert len(labels) in (100, 7473) and all(label is not None and str(int(label)) == label for label in labels)
    tagged = [f"<reasoning>\n{text}\n</reasoning>\n<answer>\n{label}\n</answer>\n"
              for text, label in zip(solutions, labels, strict=True)]
    assert set(rewards.correctness_reward_func([], tagged, labels)) == {2.0}
    assert set(rewards.strict_format_reward_func(tagged)) == {0.5}
    assert set(rewards.number_match().verdicts(solutions, answer=labels)) == {True}
    amounts = [boxed(rf"\${int(label or 0):,}.00") for label in labels]
    assert set(rewards.boxed_match().verdicts(amounts, answer=labels)) == {True}
    others = [f"{label}1" for label in labels[:500]]
    assert set(rewards.number_match().verdicts(solutions[:500], answer=others)) == {False}
