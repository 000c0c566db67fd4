"""Pages that are generated are as their source says, and name everything there is."""

import re
import sys
from pathlib import Path

import pytest

from lowmem_grpo.advantages import ESTIMATORS
from lowmem_grpo.config import GRPOConfig
from lowmem_grpo.loss_types import LOSS_TYPES
from lowmem_grpo.off_policy import CORRECTIONS
from lowmem_grpo.strategies import STRATEGIES

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "algorithms.md").read_text(encoding="utf-8")


def test_the_page_of_algorithms_is_not_that_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    import make_algorithms

    assert make_algorithms.page() == PAGE, "run python docs/make_algorithms.py"
    sys.modules.pop("make_algorithms")


@pytest.mark.parametrize(("heading", "names"), [
    ("Loss types", LOSS_TYPES), ("Advantages", ESTIMATORS), ("Off-policy corrections", CORRECTIONS),
    ("Which groups are trained on", STRATEGIES),
])
def test_an_algorithm_is_missing_or_has_not_its_three_lines(heading: str, names: dict[str, object]) -> None:
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(heading)]
    for name in names:
        (found,) = re.findall(rf"### `{re.escape(name)}`\n\n((?:- .+\n)+)", section)
        assert len(found.splitlines()) == 3


@pytest.mark.parametrize("line", re.findall(r"^    GRPOConfig\((.*)\)\s+# ", PAGE, flags=re.MULTILINE))
def test_a_setting_on_the_page_is_refused(line: str) -> None:
    settings = dict(re.findall(r"(\w+)=([^,]+)(?:, |$)", line))
    GRPOConfig(**{name: plain(value) for name, value in settings.items()})


def plain(text: str) -> object:
    """A literal of the page."""
    if text in ("True", "False"):
        return text == "True"
    return text.strip('"') if text.startswith('"') else float(text) if "." in text else int(text)
