"""The ready-made verifiers and rewards on hostile completions."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import rewards
from lowmem_grpo.rewards.ready.instruction_kinds import KINDS

DOCS = Path(__file__).resolve().parents[3] / "docs"
ARGUMENTS = {  # of each kind of instruction
    "keywords:existence": {"keywords": ["step"]}, "keywords:frequency": {"keyword": "a", "frequency": 1},
    "keywords:forbidden_words": {"forbidden_words": ["no"]}, "startend:end_checker": {"end_phrase": "x"},
    "keywords:letter_frequency": {"letter": "a", "let_frequency": 1}, "language:response_language": {"language": "en"},
    "length_constraints:number_sentences": {"num_sentences": 1},
    "length_constraints:number_paragraphs": {"num_paragraphs": 1}, "length_constraints:number_words": {"num_words": 1},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"},
    "detectable_content:number_placeholders": {"num_placeholders": 1},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 1},
    "detectable_format:number_highlighted_sections": {"num_highlights": 1},
    "detectable_format:multiple_sections": {"section_spliter": "S", "num_sections": 1},
    "combination:repeat_prompt": {"prompt_to_repeat": "a"},
    "change_case:capital_word_frequency": {"capital_frequency": 1},
}
ROW = {"answer": "10", "keyword": "step", "ideal": "Yes.", "recipient": "Bo", "instruction_id_list": [*KINDS],
       "kwargs": [ARGUMENTS.get(kind, {}) for kind in KINDS]}


def all_rewards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Every entry of the page, verifiers made into rewards."""
    monkeypatch.syspath_prepend(str(DOCS))
    import make_rewards

    names = {name: getattr(rewards, name) for name in rewards.__all__}
    for entry in make_rewards.ENTRIES:
        try:
            made: Any = eval(entry.code, dict(names))
        except ImportError:
            continue
        yield made.reward() if isinstance(made, rewards.Verifier) else made


LENGTH = 500_000
HOSTILE = {
    "angles": "<" * LENGTH, "parentheses": "(" * LENGTH, "digits": "7" * LENGTH, "commas": "1," * (LENGTH // 2),
    "dots": "1." * (LENGTH // 2), "minuses": "-" * LENGTH, "signs": "-1" * (LENGTH // 2), "dollars": "$" * LENGTH,
    "exponents": "1e" * (LENGTH // 2), "slashes": "1/" * (LENGTH // 2), "arabic digits": "\u0663" * LENGTH,
    "open boxes": "\\boxed{" * (LENGTH // 7), "boxes": "\\boxed{5}" * (LENGTH // 9),
    "nested boxes": "\\boxed{" * (LENGTH // 14) + "5" + "}" * (LENGTH // 14),
    "spaced box": "\\boxed" + " " * LENGTH + "{", "bare boxes": "\\boxed " * (LENGTH // 7), "braces": "{" * LENGTH,
    "closing braces": "}" * LENGTH, "open answers": "<answer>" * (LENGTH // 8),
    "closed answers": "</answer>" * (LENGTH // 9),
    "joints": "<reasoning>" + "</reasoning><answer>" * (LENGTH // 20),
    "spaces": "<reasoning></reasoning>" + " " * LENGTH,
    "lines": "<reasoning>\n" + "\n</reasoning>\n<answer>\n" * (LENGTH // 11) + "\n</answer>\n" * (LENGTH // 6) + "x",
    "blank lines": "\n" * LENGTH, "tags": "<start_working_out>" * (LENGTH // 20), "fences": "```" * (LENGTH // 3),
    "brackets": "[" * LENGTH, "keys": '{"a":' * (LENGTH // 5), "large integer": "[" + "9" * LENGTH + "]",
    "hashes": "####" * (LENGTH // 4), "keywords": "step " * (LENGTH // 5), "signatures": "Ada Moss\n" * (LENGTH // 9),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.every(2)
def test_a_hostile_completion_does_not_hold_up_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is so long that what takes time quadratic in its length takes minutes, and the rest some hundredths."""
    columns: dict[str, Any] = {column: [value] for column, value in ROW.items()}
    for reward in all_rewards(monkeypatch):
        (paid,) = reward(prompts=["p"], completions=[HOSTILE[name]], completion_ids=[[1] * LENGTH], **columns)
        assert paid is None or math.isfinite(paid)
