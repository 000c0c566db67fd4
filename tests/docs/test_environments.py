"""The page on environments: every example runs, every setting and every end is on it."""

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from small_models import random_model
from template_tokenizers import tokenizer_of

from lowmem_grpo.config.sampling import EpisodeSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
BEGIN, *EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
QUICK = ("counter", "animal", "guess", "tools")  # examples that are not left to the long lane
ENDINGS = ("done", "answer", "max_turns", "max_tokens", "context", "parse_error", "timeout", "environment_error")
CLIENT = '''
from types import SimpleNamespace


def EchoAction(message):
    return message


class EchoEnv:
    def __init__(self, base_url):
        pass

    async def reset(self, **columns):
        return SimpleNamespace(observation=SimpleNamespace(echoed_message="Say something."), reward=None, done=False)

    async def step(self, action):
        observation = SimpleNamespace(echoed_message=action)
        return SimpleNamespace(observation=observation, reward=0.1 * len(action), done=False)

    async def close(self):
        pass
'''


@pytest.fixture(scope="module")
def calls_tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model whose chat template has tools."""
    folder, tokenizer, model = tmp_path_factory.mktemp("model"), tokenizer_of("qwen3"), random_model("Llama")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("example", [
    pytest.param(example, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
    for name, example in zip(re.findall(r'output_dir="(\w+)"', PAGE), EXAMPLES, strict=True)])
@pytest.mark.every(3)
def test_an_example_on_the_page_trains(
    example: str, calls_tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "echo_env.py").write_text(CLIENT, encoding="utf-8")
    code = (BEGIN + example).replace('"Qwen/Qwen3-0.6B"', repr(calls_tools))
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    left: dict[str, Any] = runpy.run_path("script.py")
    assert left["trainer"].state.global_step == 2
    metrics = left["trainer"].state.log_history[-1]
    assert metrics.get("episodes/environment_error", 0) == metrics.get("episodes/timeout", 0) == 0


def test_every_setting_and_every_end_of_episodes_is_on_the_page() -> None:
    named = set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
    assert {field.name for field in fields(EpisodeSettings)} | set(ENDINGS) <= named
