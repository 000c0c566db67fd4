"""The ready-made verifiers and rewards on hostile completions, and on many."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import rewards

DOCS = Path(__file__).resolve().parents[3] / "docs"
ROW = {"answer": "10", "keyword": "step", "ideal": "Yes.", "recipient": "Bo"}


def all_rewards(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every entry of the page, verifiers made into rewards."""
    monkeypatch.syspath_prepend(str(DOCS))
    import make_rewards

    names = {name: getattr(rewards, name) for name in rewards.__all__}
    found: dict[str, Any] = {}
    for entry in make_rewards.ENTRIES:
        try:
            made: Any = eval(entry.code, dict(names))
        except ImportError:
            continue
        found[entry.code] = made.reward() if isinstance(made, rewards.Verifier) else made
    return found


HOSTILE = {
    "angles": "<" * 100_000, "parentheses": "(" * 100_000, "digits": "7" * 100_000, "commas": "1," * 50_000,
    "dots": "1." * 50_000, "minuses": "-" * 100_000, "signs": "-1" * 50_000, "dollars": "$" * 100_000,
    "exponents": "1e" * 50_000, "slashes": "1/" * 50_000, "arabic digits": "\u0663" * 100_000,
    "open boxes": "\\boxed{" * 14_000, "boxes": "\\boxed{5}" * 11_000,
    "nested boxes": "\\boxed{" * 7000 + "5" + "}" * 7000, "spaced box": "\\boxed" + " " * 100_000 + "{",
    "bare boxes": "\\boxed " * 14_000, "braces": "{" * 100_000, "closing braces": "}" * 100_000,
    "open answers": "<answer>" * 12_500, "closed answers": "</answer>" * 11_000,
    "joints": "<reasoning>" + "</reasoning><answer>" * 5000, "spaces": "<reasoning></reasoning>" + " " * 100_000,
    "lines": "<reasoning>\n" + "\n</reasoning>\n<answer>\n" * 2200 + "\n</answer>\n" * 4000 + "x",
    "blank lines": "\n" * 100_000, "tags": "<start_working_out>" * 5000, "fences": "```" * 33_000,
    "brackets": "[" * 100_000, "keys": '{"a":' * 20_000, "large integer": "[" + "9" * 99_000 + "]",
    "hashes": "####" * 25_000, "keywords": "step " * 20_000, "signatures": "Ada Moss\n" * 11_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_completion_takes_no_longer_than_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns: dict[str, Any] = {column: [value] for column, value in ROW.items()}
    for code, reward in all_rewards(monkeypatch).items():
        started = time.process_time()
        reward(prompts=["p"], completions=[HOSTILE[name]], completion_ids=[[1] * 100_000], **columns)
        assert time.process_time() - started < 0.2, code  # measured: 0.025 s at most; quadratic ones take 0.4 s to 60 s


def solution(index: int, rng: random.Random) -> str:
    """About 900 characters of worked steps, in the format of GSM8K, with a box."""
    numbers = [(rng.randint(1, 999), rng.randint(1, 999), rng.randint(1, 1998)) for _ in range(20)]
    steps = " ".join(f"{a} + {b} = {c}, so the next step follows." for a, b, c in numbers)
    answer = index // 8 + rng.choice((0, 0, 1))
    return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{answer}\n</answer>\n\\boxed{{7}}"


def test_1024_completions_are_scored_with_everything_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, count = random.Random(0), 1024
    texts = [solution(index, rng) for index in range(count)]
    ids = [[rng.randint(0, 50_000) for _ in range(300)] for _ in range(count)]
    columns: dict[str, Any] = {name: [value] * count for name, value in ROW.items()}
    columns["answer"] = [str(index // 8) for index in range(count)]
    scorer = rewards.RewardScorer(list(all_rewards(monkeypatch).values()))
    started = time.process_time()
    scorer.score(["p"] * count, texts, ids, columns, None)
    assert time.process_time() - started < 1.0  # measured: 0.2 s; the limit is 0.5 s on a machine that is idle
