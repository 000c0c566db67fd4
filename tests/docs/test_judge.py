"""The page on judges: its code runs, and what it says of failures is logged."""

import asyncio
import inspect
import re
import runpy
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_runs import load

from lowmem_grpo import GRPOConfig, rewards
from lowmem_grpo.recipes.arithmetic import make_dataset
from tests.attacks.judge_server import by_length, chat, in_turn, serving

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


ERROR = {"error": {"message": "no"}}
ANSWERS = {  # of a server, by what the log then says
    "does not take the API key": (401, ERROR), "does not let this key use": (403, ERROR),
    "knows no model": (404, ERROR), "takes no more requests": (429, ERROR), "answered with an error": (400, ERROR),
    "a reply has no scores that can be used": chat("Both are good."), "was cut off": chat("{", "length"),
    "gives no chat completion that can be read": (200, "<html>"),
}
TABLE = PAGE.partition("| what the log says |")[2].partition("\n\n")[0]


def test_each_failure_on_the_page_is_logged_in_its_words(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    end, logged = threading.Event(), list[str]()

    def never(_: Any) -> Any:
        end.wait(60)
        return chat("")

    def fail(judge: Any, words: str, prompt: str = "p") -> str:
        caplog.clear()
        scores = rewards.ruler(judge)(
            prompts=[prompt] * 2, completions=["a", "b"], log_metric=lambda name, _: logged.append(name))
        assert (asyncio.run(scores) if inspect.isawaitable(scores) else scores) == [None] * 2
        assert words in caplog.text
        return words

    at_url = {**{words: (in_turn(reply), {"retries": 0}) for words, reply in ANSWERS.items()},
              "did not answer within": (never, {"timeout": 0.1, "retries": 0}),
              "had no answer after": (never, {"deadline": 0.1})}  # the client waits longer before it asks again
    said = [fail(rewards.SelfJudge(model), "leaves too little room", "p " * 4096), fail(rewards.SelfJudge(
        SimpleNamespace(loaded=model.loaded, engine=lambda: 1 / 0)), "the engine could not answer")]
    for words, (answer, settings) in at_url.items():
        with serving(answer) as server:
            said.append(fail(rewards.UrlJudge(server.url, "m", "key", **settings), words))
    end.set()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        said.append(fail(rewards.UrlJudge(url, "m", "key", retries=0), "cannot be reached"))
    assert sorted(said) == sorted(row.split("|")[1].partition("(")[0].strip() for row in TABLE.splitlines()[2:])
    assert {f"judge/ruler/{name}" for name in re.findall(r"`judge/NAME/(\w+)`", PAGE)} <= {*logged}
