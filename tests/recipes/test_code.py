"""Recipe code: problems that are exact, and tests that a solution passes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from recipe_runs import run

from lowmem_grpo.recipes import code
from lowmem_grpo.recipes.code import HIDDEN_TESTS, TEMPLATES, CodeProblem, draw_problem
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards.ready.code import code_passes_tests
from lowmem_grpo.rewards.sandbox import worker
from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.sandbox.trial import ISOLATIONS, SandboxError, why_not

WORKING = [name for name in ISOLATIONS if why_not(name) is None]
PATIENT = Limits(seconds=60, total_seconds=120)  # right code on a busy machine
needs_isolation = pytest.mark.skipif(not WORKING, reason="no isolation works here: " + str(why_not("process")))


# problems


@needs_isolation
def test_a_solution_passes_its_own_tests_and_no_other_one_does() -> None:
    """Expected results come from one function, the solution is another text: the sandbox compares the two."""
    firsts = {problem.template: problem for problem in take(distinct("train", 0, draw_problem, repr), 200)}
    assert len(firsts) == len(TEMPLATES)
    verifier = code_passes_tests(isolation=WORKING[0], limits=PATIENT, batch_seconds=600)
    problems = list(firsts.values())
    tests = [problem.tests for problem in problems]
    assert verifier.verdicts([problem.solution for problem in problems], tests=tests) == [True] * len(problems)
    others = [CodeProblem(p.template, p.a + 1, p.b + 1).solution for p in problems]
    assert verifier.verdicts(others, tests=tests) == [False] * len(problems)


def test_the_question_shows_only_one_test() -> None:
    dataset = code.make_dataset("test", 60)
    assert dataset.column_names == ["prompt", "answer", "tests"]
    for row in dataset:
        (message,) = row["prompt"]
        first, *hidden = row["tests"]
        given, result = first.removeprefix("assert solve(").split(") == ")
        assert f"For example, solve({given}) gives {result}." in message["content"]
        assert len(hidden) == HIDDEN_TESTS == len(set(hidden)) and first not in hidden
        assert not any(test.removeprefix("assert ").partition(" == ")[0] in message["content"] for test in hidden)


PAID = [
    ("```python\ndef solve(x):\n    return x\n```", 0.1), ("Here.\n```python\ndef solve(x):\n    return x\n```\n", 0.1),
    ("def solve(x):\n    return x", 0.0), ("```python\ndef other(x):\n    return x\n```", 0.0), ("", 0.0),
    ("```python\nimport math\n\ndef solve(x):\n    return x\n```", 0.1),
    ("```python\n\ndef solve(x): return x\n```", 0.1),
    ("```python\n# def solve(\n```", 0.0), ("```python\n\n```\ndef solve(x): return x", 0.0),
    ("def solve(x):\n```python\nx = 1\n```", 0.0),
    ("```python\ndef solve(x):\n```\n```\n1\n```", 0.0), ("```\ndef solve(x):\n```", 0.0),
]


def test_only_a_block_that_defines_the_function_is_paid_for_its_form() -> None:
    for text, pay in PAID:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert code.one_block([completion], prompts=[""]) == [pay], text


# without a sandbox, and the exam


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker, "BWRAP", "no-such-bwrap")
    why_not.cache_clear()
    yield
    why_not.cache_clear()


@pytest.mark.usefixtures("no_sandbox")
def test_without_a_sandbox_neither_a_run_nor_an_exam_begins(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"apt install bubblewrap.*exam: .*--recipe code isolation=process"):
        code.EXAM.problems(3, 0, None)
    result = run("code", tmp_path / "run")
    assert result.exit_code == 1 and "apt install bubblewrap" in result.output
    assert 'isolation="process"' in result.output and not (tmp_path / "run").exists()


@needs_isolation
def test_the_exam_only_takes_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = code_passes_tests(isolation=WORKING[0], limits=PATIENT, batch_seconds=600)
    monkeypatch.setattr(code, "code_passes_tests", lambda: patient)
    dataset = code.EXAM.problems(3, 0, None)
    answers, tests = list(dataset["answer"]), list(dataset["tests"])
    assert code.EXAM.right(answers, tests=tests) == [1.0] * 3
    assert code.EXAM.right(answers[::-1], tests=tests)[0] == 0.0
    hurried = code_passes_tests(isolation=WORKING[0], batch_seconds=1e-9)
    monkeypatch.setattr(code, "code_passes_tests", lambda: hurried)
    assert code.EXAM.right(answers, tests=tests) == [None] * 3  # never run: unjudged, not wrong
