"""The page of ready-made verifiers and rewards is as its source says, every example on it holds, nothing is missing."""

import re
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import rewards
from lowmem_grpo.rewards.sandbox.limits import Limits

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "rewards.md").read_text(encoding="utf-8")
NOT_IN_TABLES = {  # places and code are in words below the tables; the rest is what calls, checks and carries
    "Finding", "MeanOf", "Reward", "RewardCheck", "RewardError", "RewardScorer", "SYSTEM_PROMPT", "Scores", "SelfJudge",
    "UrlJudge", "Verifier", "after", "boxed", "check", "code_passes_tests", "email_rewards", "extract_hash_answer",
    "from_adapter",
    "extract_xml_answer", "in_tag", "judged", "last_line", "last_number", "ruler", "whole",
}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    import make_rewards

    return make_rewards


def test_the_page_is_that_of_the_table_and_every_example_on_it_holds(source: Any) -> None:
    assert source.page() == PAGE, "run python docs/make_rewards.py"
    ran = [run(entry) for entry in source.ENTRIES if not entry.needs or find_spec(entry.needs)]
    assert len(ran) >= len(source.ENTRIES) - 2
    for code, found, expected in ran:
        assert found == [None if value is None else pytest.approx(value) for value in expected], code


def run(entry: Any) -> tuple[str, list[Any], list[Any]]:
    """(code, what it says, what the page says) of one entry."""
    made: Any = eval(entry.code, {name: getattr(rewards, name) for name in rewards.__all__})
    texts, expected = [list(values) for values in zip(*entry.examples, strict=True)]
    row = {name: value for name, value in entry.columns.items() if name != "completion_ids"}
    if entry.kind == "verifier":
        assert isinstance(made, rewards.Verifier), entry.code
        return entry.code, [made.verify(text, **row) for text in texts], expected
    assert callable(made) and not isinstance(made, rewards.Verifier), entry.code
    columns = {name: [value] * len(texts) for name, value in row.items()}
    ids = entry.columns.get("completion_ids", [[7]] * len(texts))
    scores = rewards.RewardScorer(made).score(["p"] * len(texts), texts, ids, columns, None)
    (found,) = scores.rewards.values()
    return entry.code, found, expected


def test_every_ready_made_one_is_on_the_page(source: Any) -> None:
    named = {re.match(r"\w+", entry.code)[0] for entry in source.ENTRIES}  # type: ignore[index]
    assert sorted(named ^ (set(rewards.__all__) - NOT_IN_TABLES)) == [], (
        "give each reward and verifier an example in docs/make_rewards.py: ENTRIES, and run it; what is neither "
        "is named in NOT_IN_TABLES here")
    for name in ("after", "boxed", "code_passes_tests", "email_rewards", "in_tag", "last_line", "last_number", "whole"):
        assert f"`{name}" in PAGE


def test_the_page_says_every_limit_of_the_sandbox_and_its_number() -> None:
    units = {"s": 1, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1, "that": 1}
    table = PAGE.partition("## What code may use")[2].partition("| processes")[0]
    said = {}
    for row in re.findall(r"^\| [^|]+ \| (\d+) (\w+)[^|]* \| `(\w+)` \|$", table, re.MULTILINE):
        said[row[2]] = int(row[0]) * units[row[1]]
    assert said == asdict(Limits())
