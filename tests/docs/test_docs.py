"""Generated pages are up to date, and name everything there is."""

import re
from ast import literal_eval
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest
from naive_loss import LONGEST, example
from tables import every_row

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.losses.advantages import ESTIMATORS
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.losses.off_policy import CORRECTIONS
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.recipes.arithmetic import PRESETS, ArithmeticOptions, make_lesson
from lowmem_grpo.recipes.lesson import load
from lowmem_grpo.recipes.presets import prepare

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "algorithms.md").read_text(encoding="utf-8")
EXPLAIN = "explain them in docs/make_checks.py: METRICS, and run it"


@pytest.mark.parametrize("name", ["algorithms", "checks", "families"])
def test_a_page_is_what_its_script_makes_of_the_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    page = import_module(f"make_{name}").page()
    assert page == (DOCS / f"{name}.md").read_text(encoding="utf-8"), f"run python docs/make_{name}.py"


def not_on_the_page(metrics: Iterable[str]) -> list[str]:
    """Those of the names that docs/checks.md does not explain."""
    page = (DOCS / "checks.md").read_text(encoding="utf-8")
    known = [re.escape(name).replace("NAME", r"\w+").replace("MODULE", r"\w+")
             for name in re.findall(r"`([^`]+)`", page.partition("## Metrics")[2])]
    return [name for name in metrics if not any(re.fullmatch(one, name) for one in known)]


@every_row("loss_type", LOSS_TYPES)
def test_every_metric_of_a_loss_type_is_on_the_page(loss_type: str) -> None:
    metrics = grpo_loss(**example(), loss_type=loss_type, max_completion_length=LONGEST).metrics
    assert not_on_the_page(metrics) == [], EXPLAIN


def test_every_metric_of_a_run_is_on_the_page(tmp_path: Path) -> None:
    config = {
        "output_dir": str(tmp_path), "max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8,
        "beta": 0.02, "max_completion_length": 16, "top_entropy_quantile": 0.5, "entropy_coef": 0.01,
        "off_policy_mask_threshold": 0.5, "dynamic_sampling_rounds": 1, "replay_buffer_size": 4,
        "difficulty_pools": True, "parity_steps": 1, "save_strategy": "no",
        "vllm_importance_sampling_correction": True, "disable_tqdm": True,
    }
    options = ArithmeticOptions(train_size=8, engine="transformers", config=config)
    _, trainer = load(prepare(options, {}, PRESETS), make_lesson(options, seed=0))
    trainer.train()
    line, summary = trainer.state.log_history
    assert not_on_the_page(line) == not_on_the_page(summary) == [], EXPLAIN


@pytest.mark.parametrize(("heading", "names"), [
    ("Loss types", LOSS_TYPES), ("Advantages", ESTIMATORS), ("Off-policy corrections", CORRECTIONS),
])
def test_every_algorithm_is_on_the_page_with_its_three_lines(heading: str, names: dict[str, object]) -> None:
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(heading)]
    for name in names:
        (found,) = re.findall(rf"### `{re.escape(name)}`\n\n((?:- .+\n)+)", section)
        assert len(found.splitlines()) == 3


@every_row("line", re.findall(r"^    GRPOConfig\((.*)\)\s+# ", PAGE, flags=re.MULTILINE))
def test_every_setting_on_the_page_is_accepted(line: str) -> None:
    GRPOConfig(**{name: literal_eval(value) for name, value in re.findall(r"(\w+)=([^,]+)(?:, |$)", line)})
