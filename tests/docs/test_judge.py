"""The page on judges: its code runs, and it names what there is."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import load

from lowmem_grpo import GRPOConfig, rewards
from lowmem_grpo.recipes.arithmetic import make_dataset
from tests.attacks.judge_server import by_length, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def model() -> Any:
    return load(2048)


def run(block: str, folder: Path, url: str, **names: Any) -> dict[str, Any]:
    """What a block of the page leaves, with its server at `url`."""
    file = folder / "block.py"
    file.write_text(block.replace("http://127.0.0.1:8000/v1", url), encoding="utf-8")
    return runpy.run_path(str(file), init_globals={"rewards": rewards, **names})


def test_the_code_on_the_page_works(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 4
    args = GRPOConfig(
        output_dir="run", max_steps=1, num_generations=2, per_device_train_batch_size=4, max_completion_length=8,
        save_strategy="no", disable_tqdm=True,
    )
    with serving(by_length) as server:
        first = run(BLOCKS[0], tmp_path, server.url, dataset=make_dataset("train", 8), model=model, args=args)
        assert first["judge"].meter.calls > 0 == first["judge"].meter.failed
        own = run(BLOCKS[1], tmp_path, server.url, model=model)
        assert own["judge"].max_tokens == 512 and own["reward_funcs"][0].after_sampling
        third = run(BLOCKS[2], tmp_path, server.url, judge=first["judge"])["reward_funcs"]
        row = {"ideal": ["x"] * 2, "how": ["Be strict", None]}
        scores = rewards.RewardScorer(third).score(["p"] * 2, ["a", ""], [[1], []], row, None).rewards
        assert scores["ruler"] == [0.5, 1.0] and set(scores) == {"ruler", "sums", "by_row"}
        last = run(BLOCKS[3], tmp_path, server.url)["judge"]
        assert last.concurrency == 16
    assert "judge Qwen/Qwen3-32B: " in capsys.readouterr().out


def test_every_metric_and_message_on_the_page_exists() -> None:
    source = (Path(rewards.__file__).parent / "judge")
    code = "".join(file.read_text(encoding="utf-8") for file in source.glob("*.py"))
    for name in re.findall(r"`judge/NAME/(\w+)`", PAGE):
        assert f'"{name}"' in code, name
    table = PAGE.partition("| what the log says |")[2].partition("\n\n")[0]
    phrases = [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    assert len(phrases) == 13
    for phrase in phrases:
        for said in phrase.split(" (")[0].split(" / "):
            assert said in code, said
